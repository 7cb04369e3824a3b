"""The engines of a run, one a node, as the trainer's ranks see them.

The first rank of a node has its engine and acts on it; all ranks wait for all engines, and what becomes of one is
everybody's outcome, naming its rank. Rank 0 draws prompts and judges: it asks the nodes for their shares of a step's
completions, which the first ranks of the others answer in `attend`, until they are dismissed. With one node nobody is
asked, and rank 0 answers alone.

One publisher leads all receivers. Those of rank 0's own node listen on Unix sockets, those of other nodes on TCP, where
they know rank 0 and the ranks of their own node by their keys: every secret stays where it was made, and public keys
travel through torch.distributed.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count, pairwise
from typing import Any

import numpy as np
import torch

from weftmoe.loop.ranks import Place
from weftmoe.rollout.base import Request, Sample, Span
from weftpub.channel import CurveKeys
from weftpub.errors import ChannelError, DeadlineError
from weftpub.publisher import Peer, RankGroup, SoloGroup, StoreMail, TorchGroup
from weftpub.publisher.agreement import agree, as_data, as_error
from weftpub_adapters.sglang.driver import TcpAccess

__all__ = ["Answer", "Fleet", "decode_samples", "encode_samples", "near_address"]

Answer = Callable[[Sequence[Request]], list[Sample]]

_LOOK_S = 0.05
_BEAT_S = 1.0
type _Scored = tuple[tuple[int, ...], int]  # tokens, and the first that is scored


class Fleet:
    """One rank's part of the engines. Every rank makes one, with the same arguments, and calls the same methods.

    Args:
        run_id: of this start.
        nodes: machines.
        wait: seconds that ranks wait for each other, beside what an engine may take.
    """

    def __init__(self, run_id: str, nodes: int, *, wait: float) -> None:
        self.place = Place.here(nodes)
        self._run_id, self._wait = run_id, wait
        self._rounds, self._asked = count(), 0
        self._near: Any = None
        self._keys: CurveKeys | None = None
        self._servers: list[str] = []
        self._access: TcpAccess | None = None

    def group(self) -> RankGroup:
        """The trainer's ranks; each caller begins rounds of names of its own."""
        return self._group_of(None)

    def near_group(self) -> tuple[RankGroup, Any]:
        """The ranks of this node, and their process group; None is the default one. Collective over all ranks."""
        if self.place.nodes > 1 and self._near is None:
            made = [torch.distributed.new_group(list(ranks)) for ranks in self.place.hosts]
            self._near = made[self.place.node]
        if self.place.each == 1:
            return SoloGroup(), self._near
        return self._group_of(self._near), self._near

    def act(self, phase: str, action: Callable[[], Any], seconds: float) -> list[Any]:
        """Have the first rank of each node act on its engine, once all ranks have come: an engine takes memory back on
        the GPUs of all of them, and they take theirs when it has gone.

        Args:
            phase: for messages.
            action: returns plain data that JSON can hold.
            seconds: that it may take.

        Returns:
            what it returned on each node, on every rank.
        """
        group, leads = self.group(), [ranks[0] for ranks in self.place.hosts]
        group.begin(f"fleet-{next(self._rounds)}")
        if self.place.nodes == 1:
            return [agree(group, phase, self._wait, lambda: None, lambda _: action(), allowance=seconds)]
        agree(group, f"{phase}: all ranks", self._wait, lambda: None, lambda _: None, allowance=self._wait)

        def work() -> Any:
            return action() if self.place.leads else None

        def conclude(found: list[Any]) -> list[Any]:
            return [found[rank] for rank in leads]

        both = self._wait + seconds
        acted: list[Any] = agree(group, phase, both, work, conclude, allowance=both)
        return acted

    # Who listens where.

    def access(self) -> TcpAccess | None:
        """Where the receivers of this node's engine are to listen, and to whom; None: on Unix sockets. Collective."""
        if self.place.nodes == 1:
            return None
        own, server = CurveKeys.generate_pair(), CurveKeys.generate_pair()
        group = self.group()
        group.begin(f"fleet-{next(self._rounds)}")
        told: list[list[str]] = agree(
            group, "keys", self._wait, lambda: [own[0], server[0]], lambda found: found, allowance=self._wait
        )
        near = self.place.hosts[self.place.node]
        self._servers = [told[ranks[0]][1] for ranks in self.place.hosts]
        self._keys = CurveKeys(*own, (self._servers[self.place.node],))
        if self.place.node == 0 or not self.place.leads:
            return None
        admitted = tuple(dict.fromkeys([told[0][0], *(told[rank][0] for rank in near)]))
        return TcpAccess(near_address(), CurveKeys(*server, admitted), self._keys)

    def peers(self, phase: str, start: Callable[[TcpAccess | None], Sequence[Peer]], seconds: float) -> list[Peer]:
        """Have each node's engine start its receivers; all of them, as this rank reaches them. Collective."""
        access = self.access()

        def started() -> list[Any]:
            return [[peer.rank, peer.address, peer.engine] for peer in start(access)]

        found = self.act(phase, started, seconds)
        return [
            Peer(rank, address, engine, self._keys_for(node) if address.startswith("tcp://") else None)
            for node, peers in enumerate(found)
            for rank, address, engine in peers
        ]

    def _keys_for(self, node: int) -> CurveKeys | None:
        keys = self._keys
        return None if keys is None else CurveKeys(keys.public, keys.secret, (self._servers[node],))

    # Completions.

    def generate(self, requests: Sequence[Request], answer: Answer, seconds: float) -> list[Sample]:
        """On rank 0: complete all requests, in their order, each node a share of them.

        Args:
            answer: by this node's engine.
            seconds: for all of them.

        Raises:
            WeftpubError: another node's, naming its rank. DeadlineError: a node is silent.
        """
        if self.place.nodes == 1:
            return answer(requests)
        shares, mail = _dealt(requests, self.place.nodes), StoreMail.of_group()
        self._asked += 1
        number, until = self._asked, time.monotonic() + seconds
        for node in range(1, self.place.nodes):
            mail.post(self._key(f"ask/{number}/{node}"), _plain_requests(shares[node]))
        found = list(answer(shares[0])) if shares[0] else []
        for node in range(1, self.place.nodes):
            found += self._answer_of(mail, node, number, until)
        return found

    def attend(self, answer: Answer, seconds: float) -> BaseException | None:
        """On the first ranks of the other nodes: answer rank 0 until it dismisses this one. Nothing elsewhere.

        Returns:
            what `answer` raised, which rank 0 was told in words.

        Raises:
            DeadlineError: it has not after so many seconds. ChannelError: its host has gone.
        """
        place = self.place
        if place.nodes == 1 or place.node == 0 or not place.leads:
            return None
        try:
            return self._attend(answer, time.monotonic() + seconds)
        except RuntimeError as error:  # torch's store errors
            raise ChannelError(f"rank 0: the store through which it asks for completions failed: {error}") from error

    def _attend(self, answer: Answer, until: float) -> BaseException | None:
        place, mail, running = self.place, StoreMail.of_group(), None
        fault: BaseException | None = None
        beat = _Beat(self._key(f"beat/{place.node}"))
        while True:
            if time.monotonic() >= until:
                raise DeadlineError(
                    "rank 0: it neither asked for completions nor went on to the training in the time that a step's "
                    "may take; is it stuck? Its own output says more"
                )
            beat.sound(mail)
            key = self._key(f"ask/{self._asked + 1}/{place.node}")
            if mail.arrived(key):
                self._asked += 1
                message = mail.take(key)
                if not message:
                    return fault  # what it still does is waited for by nobody
                running = self._asked, _begin(answer, _read_requests(message))
            if running is not None and running[1].done():
                number, future = running
                mail.post(self._key(f"answer/{number}/{place.node}"), _outcome(future))
                running, fault = None, future.exception()
            time.sleep(_LOOK_S)

    def dismiss(self) -> None:
        """On rank 0: it has all completions that it wanted, or will not wait for them."""
        if self.place.nodes == 1:
            return
        mail = StoreMail.of_group()
        self._asked += 1
        for node in range(1, self.place.nodes):
            mail.post(self._key(f"ask/{self._asked}/{node}"), b"")

    def score(
        self,
        sequences: Sequence[_Scored],
        scores: Callable[[Sequence[_Scored]], Sequence[Sequence[float]]],
        seconds: float,
    ) -> list[tuple[float, ...]]:
        """Log-probabilities of given tokens, each node's engine those of its share; collective."""
        share = _dealt(sequences, self.place.nodes)[self.place.node]
        found = self.act("score", lambda: [list(one) for one in scores(share)] if share else [], seconds)
        return [tuple(values) for part in found for values in part]

    def _answer_of(self, mail: StoreMail, node: int, number: int, until: float) -> list[Sample]:
        key, rank, heard = self._key(f"answer/{number}/{node}"), self.place.hosts[node][0], _Heard(self._wait)
        while not mail.arrived(key):
            heard.look(mail, self._key(f"beat/{node}"), f"rank {rank}, which has the engine of node {node}")
            if time.monotonic() >= until:
                raise DeadlineError(
                    f"rank {rank}, which has the engine of node {node}: its share of the completions did not come in "
                    "time; are answers still being generated? rollout.generate_timeout is what they may take"
                )
            time.sleep(_LOOK_S)
        answer = mail.take(key)
        if answer[:1] == b"E":
            raise as_error(rank, json.loads(answer[1:]))
        return decode_samples(answer[1:])

    def _group_of(self, process_group: Any) -> RankGroup:
        if not torch.distributed.is_initialized() or self.place.nodes * self.place.each == 1:
            return SoloGroup()
        return TorchGroup(process_group, run_id=self._run_id)

    def _key(self, name: str) -> str:
        return f"weftmoe/{self._run_id}/{name}"


class _Beat:
    """Says now and then that this rank is there."""

    def __init__(self, key: str) -> None:
        self._key, self._number, self._next = key, 0, 0.0

    def sound(self, mail: StoreMail) -> None:
        if time.monotonic() >= self._next:
            self._number += 1
            mail.post(self._key, str(self._number).encode())
            self._next = time.monotonic() + _BEAT_S


class _Heard:
    """Notices when a rank falls silent."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last, self._since = seconds, b"", time.monotonic()

    def look(self, mail: StoreMail, key: str, who: str) -> None:
        """DeadlineError if nothing was heard for as long as ranks wait for each other."""
        if mail.arrived(key) and (found := mail.take(key)) != self._last:
            self._last, self._since = found, time.monotonic()
        if time.monotonic() - self._since > self._seconds:
            raise DeadlineError(
                f"{who}: nothing was heard of it for {self._seconds:g} s while it was to generate; has it, or its "
                "machine, died? Its own output says more"
            )


def near_address() -> str:
    """The address of this host on its way to the first node: what that reaches it by."""
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            found = str(probe.getsockname()[0])
    except OSError as error:
        raise ChannelError(f"node 0 at {host}: there is no way to it from here: {error}; check --master") from error
    return f"[{found}]" if ":" in found else found


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """Samples as bytes: tokens and log-probabilities bit by bit, without a word for each."""
    head = json.dumps(
        [[len(s.tokens), len(s.logprobs), s.finish, [[v.version, v.start, v.end] for v in s.spans]] for s in samples]
    ).encode()
    tokens = np.array([token for s in samples for token in s.tokens], dtype="<i8").tobytes()
    logprobs = np.array([value for s in samples for value in s.logprobs], dtype="<f8").tobytes()
    return len(head).to_bytes(8, "big") + head + tokens + logprobs


def decode_samples(data: bytes) -> list[Sample]:
    """What `encode_samples` made bytes of."""
    end = 8 + int.from_bytes(data[:8], "big")
    head = json.loads(data[8:end])
    count = sum(one[0] for one in head)
    tokens = np.frombuffer(data, dtype="<i8", count=count, offset=end).tolist()
    logprobs = np.frombuffer(data, dtype="<f8", offset=end + 8 * count).tolist()
    samples, first, second = [], 0, 0
    for length, scored, finish, spans in head:
        made = tuple(tokens[first : first + length]), tuple(logprobs[second : second + scored])
        samples.append(Sample(*made, finish, tuple(Span(*span) for span in spans)))
        first, second = first + length, second + scored
    return samples


def _dealt[T](items: Sequence[T], nodes: int) -> list[Sequence[T]]:
    """Runs of items, one a node: what is completed does not depend on where, as seeds belong to requests."""
    ends = [len(items) * node // nodes for node in range(nodes + 1)]
    return [items[first:last] for first, last in pairwise(ends)]


def _plain_requests(requests: Sequence[Request]) -> bytes:
    return json.dumps([[list(one.tokens), one.limit, one.seed] for one in requests]).encode()


def _read_requests(data: bytes) -> list[Request]:
    return [Request(tuple(tokens), limit, seed) for tokens, limit, seed in json.loads(data)]


def _begin(answer: Answer, requests: Sequence[Request]) -> "Future[list[Sample]]":
    future: Future[list[Sample]] = Future()

    def run() -> None:
        try:
            future.set_result(answer(requests) if requests else [])
        except BaseException as error:  # told to rank 0
            future.set_exception(error)

    threading.Thread(target=run, name="rollout share", daemon=True).start()
    return future


def _outcome(future: "Future[list[Sample]]") -> bytes:
    error = future.exception()
    return b"S" + encode_samples(future.result()) if error is None else b"E" + json.dumps(as_data(error)).encode()
