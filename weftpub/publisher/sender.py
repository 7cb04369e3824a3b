"""One sender rank's half of a publish: its tensors' checksums, its links and transports, its transfer.

Kept over publishes.
"""

import base64
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from weftpub.channel import Deadlines
from weftpub.errors import StateError, TransportError, WeftpubError
from weftpub.memory.allocation import joined_allocations
from weftpub.plan import Plan, ViewSpec
from weftpub.publisher.lanes import Lane, build_lanes
from weftpub.publisher.peers import PeerLink, exchange
from weftpub.publisher.sources import SourceBuffers, SourceIndex
from weftpub.publisher.staging import BUFFERS, Staged, StagingPool
from weftpub.publisher.transfer import Route, Transfer
from weftpub.transport import (
    FlatTensors,
    SendTransport,
    TransportKind,
    TransportWish,
    find_candidates,
    open_send_transport,
    settle,
    shared_exports,
)
from weftpub.transport.tensors import Known
from weftpub.wire import messages as m
from weftpub.wire.identity import Identity
from weftpub.wire.offers import Offer

__all__ = ["Sender"]

_PROBE_BYTES = 4096

type _Values = np.ndarray[tuple[int], np.dtype[np.uint64]]
type _Request = tuple[Callable[..., m.Request], Mapping[str, object]]


class Sender:
    """What one sender rank sends.

    Args:
        rank: sender rank.
        run_id: the run.
        wish: transport, or "auto".
        deadlines: for every wait.
        max_staging_bytes: most extra memory for packing.
        here: this process.
    """

    def __init__(
        self, rank: int, run_id: str, wish: TransportWish, deadlines: Deadlines, max_staging_bytes: int, here: Identity
    ) -> None:
        self.rank = rank
        self.limit = max_staging_bytes // BUFFERS
        self._kinds: dict[int, str] = {}
        self._reasons: dict[str, str] = {}
        self._nbytes = 0
        self._shared_nbytes = 0
        self._chunks = 0
        self._run_id = run_id
        self._wish: TransportWish = wish
        self._deadlines = deadlines
        self._here = here
        self._open: dict[TransportKind, SendTransport] = {}
        self._pool = StagingPool(self._transport)
        self._device = torch.device("cpu")
        self._version = 0
        self._chosen: dict[PeerLink, tuple[Identity, torch.device, TransportKind]] = {}
        self._joined: dict[PeerLink, tuple[Identity, frozenset[str], frozenset[str]]] = {}
        self._compiled: tuple[str, SourceIndex, dict[int, Lane], dict[str, int]] | None = None
        self._known: WeakKeyDictionary[SourceBuffers, Known] = WeakKeyDictionary()
        self._shared: tuple[Known, tuple[str, ...], Mapping[str, tuple[Offer, int]]] | None = None
        self._exports: dict[TransportKind, dict[str, tuple[Offer, int]]] = {}
        self._kept: dict[PeerLink, frozenset[str]] = {}
        self._sources: SourceBuffers | None = None
        self._tensors: FlatTensors | None = None

    def totals(self) -> dict[str, Any]:
        """What was sent, and how, as plain data."""
        return {
            "nbytes": self._nbytes,
            "shared_nbytes": self._shared_nbytes,
            "chunks": self._chunks,
            "staging_bytes": self._pool.nbytes,
            "transports": {str(rank): kind for rank, kind in self._kinds.items()},
            "reasons": self._reasons,
        }

    def bind(self, plan: Plan, sources: SourceBuffers, version: int) -> None:
        """Take the tensors of one publish; compile the lanes if plan or layouts are new.

        Raises:
            PlanError: names, shapes or dtypes are not those of the plan.
        """
        if (
            self._compiled is None
            or self._compiled[0] != plan.digest
            or not _same(self._compiled[1].views, sources.views)
        ):
            index = SourceIndex(plan, self.rank, sources.views)
            lanes = build_lanes(plan, self.rank, index, self.limit)
            replicas = {name: index.add(name, index.views[name]) for name in replicated(plan, self.rank)}
            self._compiled = plan.digest, index, lanes, replicas
            self._known.clear()  # the buffers were found to hold the views of another index
        index = self._compiled[1]
        known = self._known.get(sources)
        flat = None if known is None else FlatTensors(sources.buffers, index.buffers, known)
        if flat is None or not flat.seen:
            index.check(sources.buffers)
            flat = flat or FlatTensors(sources.buffers, index.buffers)
            self._known[sources] = flat.known
        self._tensors = flat
        self._sources = sources
        settle(self._tensors.devices)
        self._device = next((d for d in self._tensors.devices if d.type == "cuda"), torch.device("cpu"))
        self._version = version
        if self._wish == "auto":
            self._exports["shared_store"] = dict(self._shared_exports(sources, flat.known))
        self._nbytes = self._shared_nbytes = self._chunks = 0
        self._kinds.clear()

    def checksums(self, known: Mapping[str, int], *, travels: bool = True) -> dict[str, Any]:
        """Per receiver the checksums of this sender's pieces, and those of tensors that other ranks hold too.

        Args:
            travels: as data that JSON can hold, for another rank; else the pieces' as arrays.
        """
        compiled, _, tensors = self._bound()
        _, index, lanes, replicas = compiled
        values = index.checksums(tensors, known, self.limit)
        pieces = {str(receiver): values[lane.regions] for receiver, lane in lanes.items()}
        return {
            "pieces": {receiver: _encode(array) for receiver, array in pieces.items()} if travels else pieces,
            "replicas": {name: int(values[number]) for name, number in replicas.items()},
        }

    def sha256(self) -> dict[str, list[str]]:
        """sha256 of this sender's pieces per receiver, of the bytes that the trainer computes with."""
        compiled, _, tensors = self._bound()
        _, index, lanes, _ = compiled
        digests = index.regions.sha256(tensors)
        return {
            str(receiver): [digests[number] for number in lane.regions.tolist()] for receiver, lane in lanes.items()
        }

    def prepare(self) -> None:
        """What the transfer needs and can be done before receivers are ready: nothing of it is visible to them."""
        _, sources, _ = self._bound()
        for chosen in self._chosen.values():
            kind = chosen[2]
            if kind not in self._exports:
                self._exports[kind] = self._export(kind, sources)

    def transfer(
        self,
        links: Mapping[int, PeerLink],
        nonce: str,
        failed: Callable[[PeerLink, WeftpubError], Sequence[PeerLink]],
        finished: Callable[[PeerLink], None],
    ) -> None:
        """Send all pieces to the given receivers, by rank.

        Args:
            links: receivers that have been greeted in this publish: what an earlier one left them to read they have let
                go of.
            failed, finished: see `Transfer`.
        """
        compiled, sources, tensors = self._bound()
        greeted = set(links.values())
        self._pool.reclaim(lambda link: link in greeted or link.ended)
        routes: list[Route] = []
        for receiver, lane in compiled[2].items():
            if receiver in links:
                kind = self._choose(links[receiver])
                self._kinds[receiver] = kind
                routes.append(Route(lane, links[receiver], kind, self._joined_by(links[receiver])))
        for route in routes:
            if route.kind not in self._exports:
                self._exports[route.kind] = self._export(route.kind, sources)
        self._keep_only(routes)
        transfer = Transfer(
            sender=self.rank,
            version=self._version,
            nonce=nonce,
            tensors=tensors,
            exports=self._exports,
            pool=self._pool,
            seconds=self._deadlines.chunk,
            after_last=self._deadlines.verify,
            failed=lambda link, error: self._left_out(failed(link, error)),
            drop=self._drop,
            finished=finished,
        )
        try:
            transfer.run(routes)
        except BaseException:
            # The trainer may free its memory once the publish has raised: nobody may be reading it by then.
            self._left_out([route.link for route in routes])
            raise
        finally:
            self._nbytes, self._chunks = transfer.nbytes, transfer.chunks
            self._shared_nbytes = transfer.shared_nbytes

    def release_sources(self) -> None:
        """Have every receiver let go of memory that it kept open for this rank.

        Raises:
            WeftpubError: a receiver that is alive could not be told.
        """
        kept = {link: (m.Drop, {"allocations": sorted(names)}) for link, names in self._kept.items() if names}
        self._kept.clear()
        self._drop_all(kept)

    def _shared_exports(self, sources: SourceBuffers, known: Known) -> Mapping[str, tuple[Offer, int]]:
        """Buffers in memory that receivers may map too; asked for again when buffers or such memory are others."""
        held = tuple(memory.id for memory in joined_allocations())
        if self._shared is None or self._shared[0] is not known or self._shared[1] != held:
            self._shared = known, held, shared_exports(sources.buffers)
        return self._shared[2]

    def _export(self, kind: TransportKind, sources: SourceBuffers) -> dict[str, tuple[Offer, int]]:
        """Buffers that can be shown where they are over this transport; the first reason against one is noted."""
        exports: dict[str, tuple[Offer, int]] = {}
        if sources.in_place:
            transport = self._transport(kind)
            for name, buffer in sources.buffers.items():
                if name in self._exports.get("shared_store", ()):
                    continue  # a handle could not show it
                try:
                    exports[name] = transport.export(buffer, sources.keep)
                except TransportError as error:
                    self._reasons.setdefault(f"{kind}, in place", str(error))
        return exports

    def _keep_only(self, routes: Sequence[Route]) -> None:
        """Have receivers let go of memory that they kept open and that is not shown any more: it has been replaced, and
        a mapping would keep the freed one from everybody."""
        due: dict[PeerLink, _Request] = {}
        for route in routes:
            shown = frozenset(offer.allocation for offer, _ in self._exports[route.kind].values() if offer.keep)
            gone = self._kept.get(route.link, frozenset()) - shown
            self._kept[route.link] = shown
            if gone:
                due[route.link] = m.Drop, {"allocations": sorted(gone)}
        self._drop_all(due)

    def _drop_all(self, requests: Mapping[PeerLink, _Request]) -> None:
        told = {link: request for link, request in requests.items() if link.known}
        _, faults = exchange(told, "drop of memory", self._deadlines.hello)
        if faults:
            raise next(iter(faults.values()))

    def _left_out(self, links: Sequence[PeerLink]) -> Sequence[PeerLink]:
        """Take back the buffers of receivers that were left out, once they say that they read no more, or are dead."""
        asked = {link: (m.Status, {}) for link in links if link.greeted and not link.ended}
        answered, _ = exchange(asked, "end of reading", min(5.0, self._deadlines.chunk))
        self._pool.reclaim(lambda link: link in answered or link.ended)
        return links

    def end_publish(self) -> None:
        """Let go of the publish's tensors and of what its transports held for it."""
        self._sources = self._tensors = None
        self._exports.clear()
        for transport in self._open.values():
            transport.end_publish()
        if self._open.pop("shared_memory", None) is not None:
            self._pool.forget("shared_memory")

    def close(self) -> None:
        """Free all staging memory. Receivers have been told goodbye."""
        self.end_publish()
        for transport in self._open.values():
            transport.close()
        self._open.clear()

    def _bound(self) -> tuple[tuple[str, SourceIndex, dict[int, Lane], dict[str, int]], SourceBuffers, FlatTensors]:
        if self._compiled is None or self._sources is None or self._tensors is None:
            raise StateError("no publish is under way on this sender rank")
        return self._compiled, self._sources, self._tensors

    def _transport(self, kind: TransportKind) -> SendTransport:
        if kind not in self._open:
            self._open[kind] = open_send_transport(kind, self._device, self._run_id, self._version)
        return self._open[kind]

    def _choose(self, link: PeerLink) -> TransportKind:
        """The transport to a receiver: found once per receiver process and device, by trying."""
        welcome = link.welcome
        if welcome is None:
            raise StateError(f"{link.label}: has not been greeted")
        known = self._chosen.get(link)
        if known is not None and known[:2] == (welcome.identity, self._device):
            return known[2]
        found = find_candidates(self._here, welcome.identity, self._device, welcome.transports, self._wish)
        if "cuda_ipc" in found.obstacles and self._device.type == "cuda":
            self._reasons[f"cuda_ipc, receiver rank {link.peer.rank}"] = found.obstacles["cuda_ipc"]
        for kind in found.kinds:
            obstacle = self._probe(link, kind)
            if obstacle is None:
                self._chosen[link] = welcome.identity, self._device, kind
                return kind
            self._reasons[f"{kind}, receiver rank {link.peer.rank}"] = obstacle
        raise TransportError(
            f"{link.label}: no transport works: {'; '.join(f'{k}: {v}' for k, v in self._reasons.items())}"
        )

    def _joined_by(self, link: PeerLink) -> frozenset[str]:
        """Ids of the shared allocations under the sources that the receiver has joined: asked once per process."""
        offers = {offer.allocation: offer for offer, _ in self._exports.get("shared_store", {}).values()}
        welcome = link.welcome
        if not offers or welcome is None or "shared_store" not in welcome.transports:
            return frozenset()
        known = self._joined.get(link)
        if known is None or known[:2] != (welcome.identity, frozenset(offers)):
            found: set[str] = set()
            for allocation, offer in offers.items():
                asked = {link: (m.Probe, {"offer": offer})}
                fault = exchange(asked, "probe of shared memory", self._deadlines.hello)[1].get(link)
                if fault is None:
                    found.add(allocation)
                elif isinstance(fault, TransportError):
                    self._reasons[f"shared_store, receiver rank {link.peer.rank}"] = str(fault)
                else:
                    raise fault
            known = self._joined[link] = welcome.identity, frozenset(offers), frozenset(found)
        return known[2]

    def _probe(self, link: PeerLink, kind: TransportKind) -> str | None:
        """Why the receiver cannot open a buffer over this transport; None if it can."""
        try:
            transport = self._transport(kind)
            buffer = transport.allocate(_PROBE_BYTES)
        except TransportError as error:
            return str(error)
        try:
            _, faults = exchange({link: (m.Probe, {"offer": buffer.offer})}, f"probe of {kind}", self._deadlines.hello)
        finally:
            transport.free(buffer)
        fault = faults.get(link)
        if fault is not None and not isinstance(fault, TransportError):
            raise fault
        return None if fault is None else str(fault)

    def _drop(self, staged: Staged) -> None:
        """Have every receiver that has a buffer open let go of it, before it is freed."""
        request: _Request = m.Drop, {"allocations": [staged.buffer.offer.allocation]}
        self._drop_all(dict.fromkeys(staged.opened, request))


def replicated(plan: Plan, rank: int) -> list[str]:
    """Names of which `rank` and another sender rank hold the same box, in the plan's order."""
    holders: dict[tuple[str, object], int] = {}
    for shard in plan.sources:
        holders[shard.name, shard.box] = holders.get((shard.name, shard.box), 0) + 1
    return [shard.name for shard in plan.sources if shard.rank == rank and holders[shard.name, shard.box] > 1]


def new_nonce() -> str:
    """A fresh nonce."""
    return secrets.token_hex(16)


def decode(found: str | _Values) -> _Values:
    """Pieces' checksums from `Sender.checksums`."""
    return np.frombuffer(base64.b64decode(found), dtype="<u8") if isinstance(found, str) else found


def _encode(values: _Values) -> str:
    return base64.b64encode(values.astype("<u8", copy=False).tobytes()).decode()


def _same(old: Mapping[str, ViewSpec], new: Mapping[str, ViewSpec]) -> bool:
    return old is new or old == new
