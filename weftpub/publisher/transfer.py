"""Move one sender rank's pieces to their receivers: pack, offer, wait for the release, reuse. One thread, two buffers,
any number of receivers.

While one receiver copies out of a buffer, the next chunk is packed into the other, for whichever receiver is next. A
receiver that fails takes its engine out, or ends the transfer, as the policy says; its deadline runs from its last sign
of life.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weftpub.channel import Deadline, wait_any
from weftpub.errors import WeftpubError
from weftpub.publisher.lanes import Lane, NamedLayout, Parcel
from weftpub.publisher.peers import PeerLink
from weftpub.publisher.staging import Staged, StagingPool
from weftpub.transport import FlatTensors, TransportKind, wait_for_devices
from weftpub.wire import messages as m
from weftpub.wire.offers import Offer

__all__ = ["Route", "Transfer"]

_SLICE_S = 0.2
_AHEAD = 2  # chunks that one receiver may have before it answers


@dataclass(frozen=True)
class Route:
    """A lane with the link, the transport it goes over, and the ids of the allocations that both ends map."""

    lane: Lane
    link: PeerLink
    kind: TransportKind
    shared: frozenset[str] = frozenset()


@dataclass(eq=False)
class _Progress:
    """How far one receiver is."""

    route: Route
    exports: Mapping[str, tuple[Offer, int]]
    parcels: Sequence[Parcel]
    deadline: Deadline
    following: int = 0
    waiting: dict[int, Staged | None] = field(default_factory=dict[int, Staged | None])

    @property
    def finished(self) -> bool:
        return self.following == len(self.parcels) and not self.waiting


class Transfer:
    """One publish's transfer from one sender rank.

    Args:
        sender: this sender rank.
        version, nonce: of the publish.
        tensors: the bytes of this rank's buffers.
        exports: buffers that are shown where they are, per transport: the offer of the allocation that holds each, and
            its byte offset in it. The others are packed.
        pool: staging buffers.
        seconds: deadline of each chunk.
        after_last: how much longer the answer to a receiver's last chunk may take if it is shown where it is: the
            engine post-processes before.
        failed: called when a receiver fails; raises to end the transfer, or returns the links that are to be left out
            from then on.
        drop: see `StagingPool.prepare`.
        finished: called when a receiver has been sent its last chunk, which it may still be copying.
    """

    def __init__(
        self,
        *,
        sender: int,
        version: int,
        nonce: str,
        tensors: FlatTensors,
        exports: Mapping[TransportKind, Mapping[str, tuple[Offer, int]]],
        pool: StagingPool,
        seconds: float,
        after_last: float,
        failed: Callable[[PeerLink, WeftpubError], Sequence[PeerLink]],
        drop: Callable[[Staged], None],
        finished: Callable[[PeerLink], None],
    ) -> None:
        self._sender = sender
        self._version = version
        self._nonce = nonce
        self._tensors = tensors
        self._pool = pool
        self._seconds = seconds
        self._after_last = after_last
        self._failed = failed
        self._drop = drop
        self._finished = finished
        self._exports = exports
        self.nbytes = 0
        self.shared_nbytes = 0
        self.chunks = 0

    def run(self, routes: Sequence[Route]) -> None:
        """Send everything; on return every receiver has copied and released all of it, or was left out."""
        progress = {route.link: self._start(route) for route in routes}
        users: dict[TransportKind, set[PeerLink]] = {r.kind: set() for r in routes}
        sizes: dict[TransportKind, int] = {}
        for p in progress.values():
            users[p.route.kind].add(p.route.link)
            packed = [parcel.nbytes for parcel in p.parcels if parcel.pack is not None]
            if packed:
                sizes[p.route.kind] = max([*packed, sizes.get(p.route.kind, 0)])
        self._pool.prepare(sizes, self._drop)
        queue = deque(progress)
        while any(not p.finished for p in progress.values()):
            posted = self._post_round(queue, progress)
            self._receive(progress, users, 0.0 if posted else _SLICE_S)
            self._watch(progress)
            for link in list(queue):
                if link not in progress:
                    queue.remove(link)

    def _start(self, route: Route) -> _Progress:
        mapped = self._exports.get("shared_store", {}) if route.shared else {}
        shared = {name: place for name, place in mapped.items() if place[0].allocation in route.shared}
        exports = {**self._exports.get(route.kind, {}), **shared}
        parcels = route.lane.parcels(self._sender, frozenset(exports.keys() - shared.keys()), frozenset(shared))
        deadline = Deadline(route.link.label, f"chunks of version {self._version}", self._seconds)
        return _Progress(route, exports, parcels, deadline)

    def _post_round(self, queue: "deque[PeerLink]", progress: dict[PeerLink, _Progress]) -> bool:
        """Post one chunk to every receiver that can take one; whether any was posted."""
        posted = False
        for _ in range(len(queue)):
            link = queue[0]
            queue.rotate(-1)
            if link in progress and self._post_next(progress, link):
                posted = True
        return posted

    def _post_next(self, progress: dict[PeerLink, _Progress], link: PeerLink) -> bool:
        p = progress[link]
        if p.following == len(p.parcels) or len(p.waiting) >= _AHEAD:
            return False
        parcel = p.parcels[p.following]
        staged: Staged | None = None
        if parcel.shown is not None:
            offers, layout = parcel.shown.offer(p.exports)
            wait_for_devices(self._tensors.devices)
        else:
            staged = self._pool.take(p.route.kind, link)
            if staged is None:
                return False
            assert parcel.pack is not None, "a parcel is packed or shown"
            parcel.pack.gather(self._tensors, [staged.buffer.tensor])
            wait_for_devices(self._tensors.devices)
            offers, layout = (staged.buffer.offer,), parcel.layout
        if isinstance(layout, NamedLayout):
            layout, offers = layout.for_receiver(link.remembered, offers)
        if not p.waiting:
            p.deadline.restart()
        try:
            number = link.post(
                m.ChunkMessage,
                p.deadline,
                version=self._version,
                nonce=self._nonce,
                sender=self._sender,
                sequence=p.following,
                offers=offers,
                layout=layout,
            )
        except WeftpubError as error:
            if staged is not None:
                staged.reader = None  # it never heard of the buffer
            self._leave_out(progress, link, error)
            return False
        p.waiting[number] = staged
        p.following += 1
        mapped = 0 if parcel.shown is None else parcel.shown.shared_nbytes
        self.shared_nbytes += mapped
        self.nbytes += parcel.nbytes - mapped
        self.chunks += 1
        if p.following == len(p.parcels):
            if parcel.shown is not None:
                p.deadline.allowed += self._after_last
            self._finished(link)
        return True

    def _receive(
        self, progress: dict[PeerLink, _Progress], users: Mapping[TransportKind, set[PeerLink]], seconds: float
    ) -> None:
        waiting = [p.route.link for p in progress.values() if p.waiting]
        if not waiting:
            self._pool.require_progress()
            return
        wait_any([link.client for link in waiting], seconds)
        for link in waiting:
            if link not in progress:
                continue
            try:
                for reply in link.collect():
                    staged = progress[link].waiting.pop(reply.request, None)
                    if staged is not None:
                        self._pool.release(staged, users[staged.kind])
                    if isinstance(reply, m.Failed):
                        raise link.error_of(reply)
                    progress[link].deadline.restart()
            except WeftpubError as error:
                self._leave_out(progress, link, error)

    def _watch(self, progress: dict[PeerLink, _Progress]) -> None:
        for link, p in list(progress.items()):
            if link not in progress or not p.waiting:
                continue
            try:
                link.require_alive(p.deadline)
                if p.deadline.passed:
                    raise p.deadline.error("its process exists but does not answer: the engine, or a copy, is stuck")
            except WeftpubError as error:
                self._leave_out(progress, link, error)

    def _leave_out(self, progress: dict[PeerLink, _Progress], link: PeerLink, error: WeftpubError) -> None:
        for gone in self._failed(link, error):
            progress.pop(gone, None)
