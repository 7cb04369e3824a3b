"""What a run's nodes say to each other: shares of completions, engines that are acted on together, and where receivers
listen. Ranks are threads over one store, as torch's would be shared by processes.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from weftmoe.loop.ranks import Place
from weftmoe.rollout import Request, Sample, Span
from weftmoe.rollout import fleet as module
from weftmoe.rollout.fleet import Fleet, decode_samples, encode_samples, near_address
from weftpub.errors import ChannelError, ConfigError, DeadlineError, WeftpubError
from weftpub.publisher import Peer, StoreMail, ThreadGroup

LIMIT_S = 30.0


class Shared:
    """A store of threads."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._held[key] = value

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._held[key]

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self._held for key in keys)

    def delete_key(self, key: str) -> None:
        with self._lock:
            self._held.pop(key, None)


def fleets(
    nodes: int, each: int, monkeypatch: pytest.MonkeyPatch, *, wait: float = LIMIT_S
) -> tuple[list[Fleet], list[ThreadGroup]]:
    """The ranks of some nodes."""
    store, groups, made = Shared(), ThreadGroup.of_size(nodes * each), []
    monkeypatch.setattr(module.StoreMail, "of_group", lambda *_: StoreMail(store))
    for rank in range(nodes * each):
        one = Fleet("run", 1, wait=wait)
        one.place = Place(rank, nodes, each)
        monkeypatch.setattr(one, "group", lambda rank=rank: groups[rank])
        made.append(one)
    return made, groups


def on_all(ranks: Sequence[Any], call: Callable[[Any], Any]) -> list[Any]:
    """What a call returned or raised on each rank."""

    def attempt(one: Any) -> Any:
        try:
            return call(one)
        except WeftpubError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(attempt, ranks))


def answered(requests: Sequence[Request]) -> list[Sample]:
    """Completions that follow from a request's seed alone."""
    return [Sample((r.seed, len(r.tokens)), (-0.1 * r.seed, -1e-300), "stop", (Span(3, 0, 2),)) for r in requests]


def requests(count: int) -> list[Request]:
    return [Request(tuple(range(1, 2 + number % 3)), 5, number) for number in range(count)]


def rolled_out(ranks: list[Fleet], asked: Sequence[list[Request]], answer: Any = lambda rank: answered) -> list[Any]:
    """Rank 0 asks several times, then dismisses the others; what each rank got."""

    def run(one: Fleet) -> Any:
        if one.place.rank:
            return one.attend(answer(one.place.rank), LIMIT_S)
        try:
            return [one.generate(some, answer(0), LIMIT_S) for some in asked]
        finally:
            one.dismiss()

    return on_all(ranks, run)


@pytest.mark.parametrize(("nodes", "each"), [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_completions_come_in_order_whoever_made_them(nodes: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one engine would have made them: none twice, none of another request, and to the last bit."""
    ranks, _ = fleets(nodes, each, monkeypatch)
    shares: dict[int, list[int]] = {}

    def answer(rank: int) -> Any:
        def noted(some: Sequence[Request]) -> list[Sample]:
            shares.setdefault(rank, []).extend(request.seed for request in some)
            return answered(some)

        return noted

    for _ in range(2):  # steps
        shares.clear()
        found = rolled_out(ranks, [requests(7), requests(2), []], answer)
        assert found[0] == [answered(requests(7)), answered(requests(2)), []]
        assert found[1:] == [None] * (nodes * each - 1)
        assert sorted(seed for share in shares.values() for seed in share) == sorted([*range(7), 0, 1])
        assert set(shares) == {node * each for node in range(nodes)}, "the first rank of each node has its engine"


def test_an_engine_that_fails_names_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, _ = fleets(2, 2, monkeypatch)

    def answer(rank: int) -> Any:
        def failing(some: Sequence[Request]) -> list[Sample]:
            raise ChannelError("engine sglang-node-1: its worker processes [7] have ended")

        return failing if rank == 2 else answered

    found = rolled_out(ranks, [requests(4)], answer)
    assert isinstance(found[0], ChannelError)
    assert str(found[0]) == "sender rank 2: engine sglang-node-1: its worker processes [7] have ended"
    assert (found[1], found[3]) == (None, None)
    assert isinstance(found[2], ChannelError)
    assert str(found[2]) == "engine sglang-node-1: its worker processes [7] have ended"


def test_a_node_that_falls_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is switched off says nothing: completions are not waited for as long as they may take."""
    ranks, _ = fleets(2, 1, monkeypatch, wait=0.3)
    with pytest.raises(
        DeadlineError, match=r"rank 1, which has the engine of node 1: nothing was heard of it for 0\.3 s"
    ):
        ranks[0].generate(requests(4), answered, 3600.0)


def test_a_node_that_is_heard_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = SimpleNamespace(now=0.0), StoreMail(Shared())
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    beat, heard = module._Beat("beat"), module._Heard(10.0)
    for clock.now in (0.0, 8.0, 16.0, 24.0):
        beat.sound(store)
        heard.look(store, "beat", "rank 1")
    for clock.now in (24.5, 33.0):
        heard.look(store, "beat", "rank 1")
    clock.now = 34.5
    with pytest.raises(DeadlineError, match="rank 1: nothing was heard of it for 10 s"):
        heard.look(store, "beat", "rank 1")


def test_a_slow_node_is_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, _ = fleets(2, 1, monkeypatch)
    over = threading.Event()

    def answer(rank: int) -> Any:
        return (lambda some: over.wait(LIMIT_S) and []) if rank else answered

    def run(one: Fleet) -> Any:
        if one.place.rank:
            return one.attend(answer(1), LIMIT_S)
        try:
            return one.generate(requests(4), answered, 0.3)
        finally:
            one.dismiss()

    found = on_all(ranks, run)
    over.set()
    assert "its share of the completions did not come in time" in str(found[0])
    assert found[1] is None, "it is dismissed, whatever its engine still does"


def test_a_rank_0_that_says_nothing_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, _ = fleets(2, 1, monkeypatch)
    with pytest.raises(DeadlineError, match="rank 0: it neither asked for completions nor went on"):
        ranks[1].attend(answered, 0.1)

    def gone(*_: Any) -> None:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(StoreMail, "arrived", gone)
    with pytest.raises(ChannelError, match=r"rank 0: the store .* failed: Connection reset by peer"):
        ranks[1].attend(answered, LIMIT_S)


@pytest.mark.parametrize("nodes", [1, 2])
def test_engines_are_acted_on_when_all_ranks_have_come(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, _ = fleets(nodes, 2, monkeypatch)
    came: list[int] = []
    seen: list[int] = []

    def run(one: Fleet) -> Any:
        came.append(one.place.rank)

        def action() -> int:
            seen.append(len(came))
            return one.place.rank

        return one.act("release", action, LIMIT_S)

    leaders = [node * 2 for node in range(nodes)]
    assert on_all(ranks, run) == [leaders] * (2 * nodes)
    assert seen == [2 * nodes] * nodes


@pytest.mark.parametrize("count", [5, 1])
def test_tokens_are_scored_by_shares(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, _ = fleets(2, 1, monkeypatch)
    sequences = [((number, 1, 2), 1) for number in range(count)]

    def scores(some: Any) -> list[tuple[float, ...]]:
        assert some, "an engine has nothing to score"
        return [(0.1 * tokens[0], -0.3) for tokens, _ in some]

    found = on_all(ranks, lambda one: one.score(sequences, scores, LIMIT_S))
    assert found == [[(0.1 * number, -0.3) for number in range(count)]] * 2, "bit by bit"


def test_receivers_of_other_nodes_know_rank_0_and_their_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    ranks, _ = fleets(2, 2, monkeypatch)
    given: dict[int, Any] = {}

    def started(one: Fleet) -> Callable[[Any], list[Peer]]:
        def start(access: Any) -> list[Peer]:
            node = given[one.place.node] = one.place.node, access
            address = "ipc:///run/weft/a" if access is None else f"tcp://{access.host}:4{node[0]}"
            return [Peer(one.place.node, address, one.place.named("sglang"))]

        return start

    found = on_all(ranks, lambda one: one.peers("start", started(one), LIMIT_S))
    assert [[(p.rank, p.address, p.engine) for p in peers] for peers in found] == [
        [(0, "ipc:///run/weft/a", "sglang-node-0"), (1, "tcp://127.0.0.1:41", "sglang-node-1")]
    ] * 4
    assert given[0][1] is None, "on rank 0's node nobody comes from elsewhere"
    receivers = given[1][1].receivers
    own = [peers[1].keys for peers in found]
    assert all(peers[0].keys is None for peers in found)
    assert all(keys.peers == (receivers.public,) for keys in own)
    assert receivers.peers == (own[0].public, own[2].public, own[3].public), "and not rank 1's"
    assert len({keys.secret for keys in own} | {receivers.secret}) == 5


def test_samples_travel_bit_by_bit() -> None:
    samples = [
        Sample((), (), "length", ()),
        Sample((5, 2**40), (-0.1, float("-inf")), "stop", (Span(1, 0, 1), Span(2, 1, 2))),
    ]
    assert decode_samples(encode_samples(samples)) == samples
    assert decode_samples(encode_samples([])) == []


def test_the_way_to_the_first_node_is_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert near_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    with pytest.raises(ChannelError, match=r"node 0 at nowhere\.invalid: there is no way to it"):
        near_address()


def test_places_are_numbered_node_by_node() -> None:
    place = Place(5, 3, 2)
    assert (place.node, place.leads, place.named("engine")) == (2, False, "engine-node-2")
    assert place.hosts == (range(2), range(2, 4), range(4, 6))
    assert Place(0, 1, 4).named("engine") == "engine"
    with pytest.raises(ConfigError, match="1 ranks on 2 nodes"):
        Place.here(2)
