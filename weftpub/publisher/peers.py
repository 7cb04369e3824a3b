"""The publisher's links to receivers: requests with numbers, replies that match, and errors that say who, where and in
which phase.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import zmq

from weftpub import errors
from weftpub.channel import ChannelClient, CurveKeys, Deadline, wait_any
from weftpub.channel.address import socket_path
from weftpub.channel.presence import listener
from weftpub.errors import ChannelError, ConfigError, WeftpubError
from weftpub.wire import messages as m
from weftpub.wire.identity import Identity, process_alive

__all__ = ["Peer", "PeerLink", "by_engine", "check_peers", "exchange", "expect"]

_SLICE_S = 0.2  # how often a wait looks whether the peer's process still exists
_RESTART_S = 1.0  # how long a receiver that died is given to be there again


@dataclass(frozen=True)
class Peer:
    """A receiver to publish to.

    Attributes:
        rank: receiver rank in the plan.
        address: where it listens.
        engine: name of its engine; None accepts the name that it gives.
        keys: this end's keys for TCP.
    """

    rank: int
    address: str
    engine: str | None = None
    keys: CurveKeys | None = None


def check_peers(run_id: str, peers: Sequence[Peer]) -> None:
    """ConfigError for a run id that no receiver would take, or peers that do not name every receiver rank once."""
    if not re.fullmatch(m.RUN_ID_PATTERN, run_id):
        raise ConfigError(
            f"run id {run_id!r}: expected 1 to 64 letters, digits, dots, dashes or underscores, not starting with a "
            "sign"
        )
    ranks = [peer.rank for peer in peers]
    if not ranks or len(set(ranks)) != len(ranks):
        raise ConfigError(f"peers: expected one per receiver rank, found ranks {ranks}")


class PeerLink:
    """A connection to one receiver, kept over publishes. Not shared between threads.

    Args:
        peer: the receiver.
        run_id, session: go into every request.
        here: this process.
        context: ZeroMQ context of the publisher.

    Attributes:
        welcome: what the receiver said of itself when it was greeted last.
        greeted: whether it was greeted in this round.
        status: where it stood at its last reply.
    """

    def __init__(
        self, peer: Peer, run_id: str, session: str, here: Identity, context: "zmq.Context[zmq.Socket[bytes]]"
    ) -> None:
        self.peer = peer
        self.client = ChannelClient(peer.address, peer.keys, context)
        self.welcome: m.Welcome | None = None
        self.greeted = False
        self.status: m.StatusReport | None = None
        self._head = {"run_id": run_id, "session": session}
        self._here = here
        self._number = 0
        self._waiting: set[int] = set()
        self._ahead: dict[int, m.Reply | None] = {}

    @property
    def engine(self) -> str:
        """Name of the receiver's engine, as far as it is known."""
        if self.welcome is not None:
            return self.welcome.engine
        return self.peer.engine or f"the engine at {self.peer.address}"

    @property
    def label(self) -> str:
        """The receiver in words: engine, rank, host, process, device."""
        if self.welcome is None or not self.greeted:
            return f"receiver rank {self.peer.rank} at {self.peer.address}"
        return f"{self.welcome.engine} receiver rank {self.peer.rank} ({self.welcome.identity}, {self.welcome.device})"

    def post(
        self, kind: Callable[..., m.Request], deadline: Deadline, patience: Deadline | None = None, **fields: object
    ) -> int:
        """Send a request; its number. DeadlineError if nobody listens, ChannelError if the process has ended.

        Args:
            patience: once it has passed, a listener that is known to have died is not waited for.
        """
        self._number += 1
        data = m.encode(kind(request=self._number, **self._head, **fields))
        while not self.client.try_send(data, min(_SLICE_S, deadline.left)):
            self.require_alive(deadline)
            if patience is not None and patience.passed:
                self.require_listener(deadline)
            if deadline.passed:
                raise deadline.error(f"nobody listens at {self.peer.address}; has the receiver been started?")
        self._waiting.add(self._number)
        return self._number

    def post_ahead(self, kind: Callable[..., m.Request], **fields: object) -> int | None:
        """Send a request whose turn has not come yet, if the peer was met before and can take it at once. Its reply is
        kept until `due` is called.

        Returns:
            its number, or None if it was not sent.
        """
        if not self.known:
            return None
        if kind is m.Hello:
            self.renew()
        self._number += 1
        if not self.client.try_send(m.encode(kind(request=self._number, **self._head, **fields)), 0.0):
            return None
        self._ahead[self._number] = None
        return self._number

    def answered(self, number: int) -> m.Reply | None:
        """The reply to a request that was sent ahead, if it has arrived."""
        return self._ahead.get(number)

    def due(self, number: int) -> m.Reply | None:
        """The turn of a request that was sent ahead has come: its reply if it is there already, else it is waited for
        like any other.
        """
        reply = self._ahead.pop(number, None)
        if reply is None:
            self._waiting.add(number)
        return reply

    def collect(self) -> list[m.Reply]:
        """Replies that have arrived to requests that still wait; others are of requests given up and are dropped."""
        replies: list[m.Reply] = []
        while (data := self.client.take()) is not None:
            reply = m.decode_reply(data)
            ahead = reply.request in self._ahead
            if not ahead and reply.request not in self._waiting:
                continue
            self._waiting.discard(reply.request)
            self.status = reply.status
            if isinstance(reply, m.Welcome):
                self._greet(reply)
            if ahead:
                self._ahead[reply.request] = reply
            else:
                replies.append(reply)
        return replies

    def forget(self) -> None:
        """Stop waiting for every outstanding request."""
        self._waiting.clear()
        self._ahead.clear()

    def renew(self) -> None:
        """A greeting is due: until it is answered, nothing is known about who listens there now."""
        self.greeted = False
        self._ahead.clear()

    @property
    def remembered(self) -> frozenset[str]:
        """Names of the layouts that the receiver remembers, as of its last greeting."""
        return frozenset() if self.welcome is None else frozenset(self.welcome.layouts)

    @property
    def known(self) -> bool:
        """Whether somebody answered there once whose process, as far as is known, still exists."""
        return self.welcome is not None and not self.ended

    @property
    def ended(self) -> bool:
        """Whether the process that answered last is known to have ended."""
        return self.welcome is not None and not process_alive(self.welcome.identity, self._here)

    def require_alive(self, deadline: Deadline) -> None:
        """ChannelError if the greeted receiver's process is known to have ended."""
        if self.greeted and self.ended:
            raise ChannelError(
                f"{self.label}: its process ended in phase {deadline.phase}, after {deadline.elapsed:.1f} s; restart "
                "it and publish again"
            )

    def require_listener(self, deadline: Deadline) -> None:
        """ChannelError if the process that listened at the address last is known to have ended."""
        last = listener(socket_path(self.peer.address)) if self.peer.address.startswith("ipc://") else None
        if last is None and self.welcome is not None:
            last = self.welcome.identity
        if last is not None and not process_alive(last, self._here):
            raise ChannelError(
                f"{self.label}: the process that listened there ({last}) has ended, seen in phase {deadline.phase} "
                f"after {deadline.elapsed:.1f} s; restart it and publish again"
            )

    def error_of(self, reply: m.Failed) -> WeftpubError:
        """The error that a receiver reported, as one of this process: of the same class if it is one of weftpub's."""
        found = getattr(errors, reply.error, None)
        if isinstance(found, type) and issubclass(found, WeftpubError):
            error = found(f"{self.label}: {reply.message}")
        else:
            error = ChannelError(f"{self.label}: {reply.error}: {reply.message}")
        error.add_note(_standing(self.label, reply.status))
        return error

    def close(self) -> None:
        """Close the connection."""
        self.client.close()

    def _greet(self, welcome: m.Welcome) -> None:
        if welcome.rank != self.peer.rank or self.peer.engine not in (None, welcome.engine):
            raise ChannelError(
                f"{self.peer.address}: answers as rank {welcome.rank} of engine {welcome.engine!r}, expected rank "
                f"{self.peer.rank} of "
                f"{self.peer.engine or 'any engine'}; check the addresses"
            )
        self.welcome = welcome
        self.greeted = True


def exchange(
    requests: Mapping[PeerLink, tuple[Callable[..., m.Request], Mapping[str, object]]],
    phase: str,
    seconds: float,
    posted: Mapping[PeerLink, int] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[dict[PeerLink, m.Reply], dict[PeerLink, WeftpubError]]:
    """Ask several receivers at once and wait for all of them: a slow one costs its own time, and a dead one ends only
    its own wait.

    Args:
        requests: message class and fields per receiver.
        phase: for messages.
        seconds: what each may take.
        posted: numbers of requests that were sent ahead.
        meanwhile: called once all are asked, before their replies are waited for.

    Returns:
        replies of those that succeeded, errors of the others.
    """
    replies: dict[PeerLink, m.Reply] = {}
    faults: dict[PeerLink, WeftpubError] = {}
    waits: dict[PeerLink, tuple[int, Deadline]] = {}
    patience = Deadline("", phase, _RESTART_S)
    # All have as long to be in reach, from here on: one that is not must not make the others' time begin later.
    deadlines = {link: Deadline(link.label, phase, seconds) for link in requests}
    for link, (kind, fields) in requests.items():
        deadline = deadlines[link]
        if posted is not None and link in posted:
            reply = link.due(posted[link])
            if reply is None:
                deadline.restart()
                waits[link] = posted[link], deadline
            elif isinstance(reply, m.Failed):
                faults[link] = link.error_of(reply)
            else:
                replies[link] = reply
            continue
        if kind is m.Hello:
            link.renew()
        try:
            waits[link] = link.post(kind, deadline, patience, **fields), deadline
            deadline.restart()
        except WeftpubError as error:
            faults[link] = error
    if meanwhile is not None:
        meanwhile()
    while waits:
        _take_replies(waits, replies, faults)
        for link, (_, deadline) in list(waits.items()):
            try:
                link.require_alive(deadline)
                if patience.passed and not link.greeted:
                    link.require_listener(deadline)
                if deadline.passed:
                    raise deadline.error("its process exists but does not answer: the engine, or a copy, is stuck")
            except WeftpubError as error:
                link.forget()
                faults[link] = error
                del waits[link]
    return replies, faults


def _take_replies(
    waits: dict[PeerLink, tuple[int, Deadline]], replies: dict[PeerLink, m.Reply], faults: dict[PeerLink, WeftpubError]
) -> None:
    """Wait a slice of time for replies, and move whoever answered out of `waits`."""
    wait_any([link.client for link in waits], min(_SLICE_S, *(deadline.left for _, deadline in waits.values())))
    for link in list(waits):
        try:
            for reply in link.collect():
                if reply.request != waits[link][0]:
                    continue  # the late answer to something that was given up
                if isinstance(reply, m.Failed):
                    faults[link] = link.error_of(reply)
                else:
                    replies[link] = reply
                del waits[link]
                break
        except WeftpubError as error:
            link.forget()
            faults[link] = error
            waits.pop(link, None)


def expect(faults: Mapping[PeerLink, WeftpubError]) -> None:
    """Raise the first of the errors, with the others as notes."""
    if faults:
        first, *others = faults.values()
        for other in others:
            first.add_note(f"also: {other}")
        raise first


def _standing(label: str, status: m.StatusReport) -> str:
    text = f"{label} is {status.state}, version {status.version}"
    if status.lost is not None:
        text += f", lost version {status.lost}"
    return f"{text}: {status.reason}" if status.reason else text


def by_engine(links: Sequence[PeerLink]) -> dict[str, list[PeerLink]]:
    """Links grouped by engine."""
    groups: dict[str, list[PeerLink]] = {}
    for link in links:
        groups.setdefault(link.engine, []).append(link)
    return groups
