"""Asks receivers about themselves beside whoever publishes to them: it pauses nobody, sends nothing, and takes no
session over.

What starts an engine's receivers, watches a run or looks after a fault asks this way. Asking with a `Publisher` would
make a trainer's publisher, which came earlier, stale.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from weftpub.channel import Deadlines
from weftpub.publisher.peers import Peer, PeerLink, check_peers, exchange, expect
from weftpub.publisher.sender import new_nonce
from weftpub.wire import messages as m
from weftpub.wire.description import EngineDescription
from weftpub.wire.identity import local_identity

__all__ = ["Observer"]


class Observer:
    """Links to the receivers of a run that only ask.

    Args:
        run_id: the run whose receivers these are.
        peers: the receivers.
        deadlines: seconds for every wait.

    Raises:
        ConfigError: a setting cannot work.
    """

    def __init__(self, run_id: str, peers: Sequence[Peer], *, deadlines: Deadlines | None = None) -> None:
        check_peers(run_id, peers)
        self._deadlines = Deadlines() if deadlines is None else deadlines
        here = local_identity()
        self._hello = {"role": "observer", "identity": here}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        session = new_nonce()
        self._links = [PeerLink(peer, run_id, session, here, self._context) for peer in peers]

    def describe(self) -> list[EngineDescription]:
        """What every engine rank says about itself, ordered by rank.

        Raises:
            WeftpubError: a receiver does not answer, or refuses; names it.
        """
        replies = self._ask(m.Describe, "describe", self._deadlines.plan)
        found = [reply.description for reply in replies.values() if isinstance(reply, m.Described)]
        return sorted(found, key=lambda description: description.rank)

    def status(self) -> dict[int, m.StatusReport]:
        """Where every receiver stands, by rank. Errors as `describe`."""
        replies = self._ask(m.Status, "status", self._deadlines.hello)
        return {link.peer.rank: reply.status for link, reply in replies.items()}

    def close(self) -> None:
        """Say goodbye. May be called twice."""
        links, self._links = self._links, []
        known: Mapping[PeerLink, Any] = {link: (m.Bye, {}) for link in links if link.known}
        exchange(known, "bye", min(5.0, self._deadlines.hello))
        for link in links:
            link.close()
        self._context.term()

    def __enter__(self) -> "Observer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, kind: Callable[..., m.Request], phase: str, seconds: float) -> dict[PeerLink, m.Reply]:
        # A greeting each time: the receiver may be another one since, or may have forgotten an observer among many.
        for greeting, fields, name, allowed in (
            (m.Hello, self._hello, "hello", self._deadlines.hello),
            (kind, {}, phase, seconds),
        ):
            replies, faults = exchange(dict.fromkeys(self._links, (greeting, fields)), name, allowed)
            expect(faults)
        return replies
