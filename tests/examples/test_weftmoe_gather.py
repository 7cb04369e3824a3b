"""Whole tensors on every rank: how they are dealt into buckets, and what ranks over gloo get and raise."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gather_ranks
import pytest
import torch
from gather_ranks import CASES, Split

from weftmoe.rollout.gather import make_buckets
from weftpub.errors import PlanError
from weftpub.plan import Shard

EVERYONE = (0, 1)


def shards(*splits: Split) -> list[Shard]:
    return [shard for split in splits for shard in split.shards()]


# Buckets.


def test_a_bucket_holds_as_much_as_fits_and_a_larger_tensor_travels_alone() -> None:
    splits = [Split(name, (rows,), (EVERYONE,)) for name, rows in (("a", 100), ("b", 60), ("c", 1000), ("d", 8))]
    buckets = make_buckets(shards(*splits), most=400)
    assert [[whole.name for whole in bucket.tensors] for bucket in buckets] == [["a", "b"], ["c"], ["d"]]
    assert [bucket.nbytes for bucket in buckets] == [256 + 120, 2000, 16]
    assert all(bucket.nbytes <= 400 or len(bucket.tensors) == 1 for bucket in buckets)


def test_the_order_does_not_depend_on_that_of_the_shards() -> None:
    found = shards(*gather_ranks.TP2_EP2)
    assert make_buckets(found, most=1500) == make_buckets(found[::-1], most=1500)


def test_each_box_is_sent_by_one_of_those_who_hold_it() -> None:
    (bucket,) = make_buckets(shards(*gather_ranks.TP2_DP2_EP2), most=1 << 20)
    by_name = {whole.name: whole for whole in bucket.tensors}
    assert [(box.start, box.owner, box.holders) for box in by_name["o"].boxes] == [
        ((0, 0), 0, (0, 2)),
        ((0, 16), 1, (1, 3)),
    ]
    assert [box.holders for box in by_name["experts.3.up"].boxes] == [(1, 3)]


def shard(rank: int, start: int, rows: int, *, of: int = 8, dtype: str = "bfloat16") -> Shard:
    return Shard("w", dtype, (rows, 4), (of, 4), (start, 0), rank)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([shard(0, 0, 4)], "hold 16 of its 32 elements"),
        ([shard(0, 0, 5), shard(1, 3, 5)], "ranks 0 and 1 overlap"),
        ([shard(0, 0, 4), shard(1, 6, 4)], "is outside"),
        ([shard(0, 0, 4), shard(1, 4, 4, dtype="float32")], "ranks disagree"),
        ([shard(0, 0, 4), shard(1, 4, 4, of=16)], "ranks disagree"),
    ],
    ids=["hole", "overlap", "outside", "dtype", "shape"],
)
def test_shards_that_are_not_one_tensor_are_refused(found: list[Shard], message: str) -> None:
    with pytest.raises(PlanError, match=f"w: .*{message}"):
        make_buckets(found, most=1000)


# Ranks.


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """What the ranks of a case got, in their order."""
    folder = tmp_path_factory.mktemp("gather")
    script = Path(__file__).with_name("gather_ranks.py")
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]

    def of(name: str) -> list[Any]:
        ranks = range(CASES[name].world)
        return [json.loads((folder / f"{name}.{rank}.json").read_text(encoding="utf-8")) for rank in ranks]

    return of


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.fault])
def test_every_rank_gets_what_one_process_would_hold(results: Callable[[str], list[Any]], name: str) -> None:
    case, ranks = CASES[name], results(name)
    expected = {split.name: gather_ranks.digest(split.whole) for split in case.splits}
    for rank in ranks:
        assert "error" not in rank
        assert {tensor: found for bucket in rank["got"] for tensor, found in bucket.items()} == expected
        assert sum(len(bucket) for bucket in rank["got"]) == len(expected), "each tensor travels once"
    assert ranks[0]["delivered"] == [
        [f"rank {rank}, {number}" for rank in range(case.world)] for number in range(1, len(ranks[0]["got"]) + 1)
    ]
    assert not any(rank["delivered"] for rank in ranks[1:])


@pytest.mark.parametrize(
    ("name", "kind", "message", "delivered"),
    [
        ("missing", "PlanError", "experts.3.up: rank 1 was to hold .* and has nothing", 4),
        ("pack", "", "no room for the payload", 1),
        ("deliver", "ChannelError", "engine refused", 0),
        ("replica", "PlanError", "rank 1 holds other bytes", 0),
        ("late", "DeadlineError", "sender rank 1: no answer", 0),
    ],
)
def test_an_error_of_one_rank_is_one_of_all(
    results: Callable[[str], list[Any]], name: str, kind: str, message: str, delivered: int
) -> None:
    for rank in results(name):
        assert re.search(message, rank["error"])
        assert rank["error"].startswith(kind)
    assert len(results(name)[0]["delivered"]) == delivered, "nothing is delivered once a rank has failed"


def test_the_reference_is_not_one_tensor_for_all() -> None:
    assert not torch.equal(Split("a", (4,), (EVERYONE,)).whole, Split("b", (4,), (EVERYONE,)).whole)
