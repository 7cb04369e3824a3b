"""Ranks that gather over gloo, each in a forked process: `python gather_ranks.py OUT`, for test_weftmoe_gather.py.

Every case has a world, layouts of tensors over it, and what its ranks do wrong; OUT/CASE.json holds what each rank got:
names to sha256 by bucket, what rank 0 delivered, and the errors.
"""

import hashlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forked_ranks import fork_ranks

from weftmoe.rollout.gather import Bucket, BucketGather, make_buckets
from weftpub.errors import ChannelError, WeftpubError
from weftpub.plan import Shard, dtype_name
from weftpub.publisher import TorchGroup

WAIT_S = 60.0


@dataclass(frozen=True)
class Split:
    """A tensor of `shape`: its parts along `dimension` in turn, and which ranks hold each."""

    name: str
    shape: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]
    dimension: int = 0
    dtype: torch.dtype = torch.bfloat16

    @property
    def whole(self) -> torch.Tensor:
        """The tensor that one process would hold; the same in every process."""
        seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big")
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    @property
    def parts(self) -> list[torch.Tensor]:
        """Of `whole`, one for each of `holders`."""
        whole = self.whole
        return [whole] if len(self.holders) == 1 else list(whole.tensor_split(len(self.holders), self.dimension))

    def shards(self) -> list[Shard]:
        made, start = [], 0
        for part, ranks in zip(self.parts, self.holders, strict=True):
            offset = tuple(start if d == self.dimension else 0 for d in range(part.ndim))
            made += [Shard(self.name, dtype_name(self.dtype), tuple(part.shape), self.shape, offset, r) for r in ranks]
            start += part.shape[self.dimension] if part.ndim else 0
        return made

    def local(self, rank: int) -> torch.Tensor | None:
        """What a rank holds: strided, as a view of a fused parameter is."""
        mine = [part for part, ranks in zip(self.parts, self.holders, strict=True) if rank in ranks]
        return mine[0] if mine else None


def experts(count: int, owners: Mapping[int, tuple[int, ...]], rows: int = 24) -> list[Split]:
    return [Split(f"experts.{e}.up", (rows, 16), (owners[e],)) for e in range(count)]


EVERYONE = (0, 1)
TP2_EP2 = [
    Split("embed", (40, 16), ((0,), (1,))),
    Split("q", (32, 16), ((0,), (1,))),
    Split("o", (16, 32), ((0,), (1,)), dimension=1),
    Split("odd", (7, 6), ((0,), (1,)), dimension=1),  # three columns each, and smaller than the alignment
    Split("uneven", (5, 3), ((0,), (1,))),
    Split("norm", (16,), (EVERYONE,)),
    Split("router", (8, 16), (EVERYONE,), dtype=torch.float32),
    *experts(8, {e: (e // 4,) for e in range(8)}),
]
EP2 = [
    Split("embed", (40, 16), (EVERYONE,)),
    Split("o", (16, 32), (EVERYONE,)),
    Split("bias", (), (EVERYONE,), dtype=torch.float32),
    *experts(5, {0: (0,), 1: (0,), 2: (1,), 3: (1,), 4: (1,)}, rows=7),
]
# Four ranks: tensor parallel pairs (0, 1) and (2, 3), experts over pairs (0, 1) and (2, 3) too, so each has a replica.
TP2_DP2_EP2 = [
    Split("q", (32, 16), ((0, 2), (1, 3))),
    Split("o", (16, 32), ((0, 2), (1, 3)), dimension=1),
    *experts(4, {0: (0, 2), 1: (0, 2), 2: (1, 3), 3: (1, 3)}),
]


@dataclass(frozen=True)
class Case:
    """`fault` is what rank 1 does wrong: "missing", "pack", "late", "replica", or what rank 0 does, "deliver"."""

    world: int
    splits: tuple[Split, ...]
    most: int
    fault: str = ""
    seconds: float = WAIT_S


CASES: dict[str, Case] = {
    "one": Case(1, tuple(Split(s.name, s.shape, ((0,),), dtype=s.dtype) for s in EP2), 1000),
    "tp2-ep2": Case(2, tuple(TP2_EP2), 1 << 20),
    "tp2-ep2-ragged": Case(2, tuple(TP2_EP2), 1500),
    "ep2": Case(2, tuple(EP2), 700),
    "ep2-smaller-than-any": Case(2, tuple(EP2), 1),
    "tp2-dp2-ep2": Case(4, tuple(TP2_DP2_EP2), 2000),
    "missing": Case(2, tuple(EP2), 700, "missing"),
    "pack": Case(2, tuple(EP2), 700, "pack"),
    "deliver": Case(2, tuple(EP2), 700, "deliver"),
    "replica": Case(2, tuple(EP2), 1 << 20, "replica"),
    "late": Case(2, tuple(EP2), 1 << 20, "late", seconds=0.5),
}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def run(name: str, case: Case, rank: int, folder: Path) -> dict[str, Any]:
    """One rank of one case."""
    store = torch.distributed.FileStore(str(folder / f"{name}.rendezvous"), case.world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=case.world)
    buckets = make_buckets([shard for split in case.splits for shard in split.shards()], most=case.most)
    gather = BucketGather(buckets, TorchGroup(run_id=name), torch.device("cpu"), seconds=case.seconds, verify=True)
    sources = {split.name: mine for split in case.splits if (mine := split.local(rank)) is not None}
    if rank == 1 and case.fault == "missing":
        sources.pop("experts.3.up")
    if rank == 1 and case.fault == "replica":
        sources["embed"] = sources["embed"] + 1
    got: list[dict[str, str]] = []
    delivered: list[list[str]] = []

    def pack(bucket: Bucket, buffer: torch.Tensor) -> str:
        if rank == 1 and case.fault == "pack" and got:
            raise ValueError("no room for the payload")
        got.append({tensor: digest(found) for tensor, found in bucket.named(buffer)})
        return f"rank {rank}, {len(got)}"

    def deliver(payloads: list[str]) -> None:
        if case.fault == "deliver":
            raise ChannelError("engine refused")
        delivered.append(payloads)

    gave_up = folder / f"{name}.gave-up"
    while rank == 1 and case.fault == "late" and not gave_up.exists():
        time.sleep(0.01)
    found: dict[str, Any] = {"got": got, "delivered": delivered, "nbytes": [bucket.nbytes for bucket in buckets]}
    try:
        gather.run(sources, pack, deliver, delivery=case.seconds)
    except (WeftpubError, ValueError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
        gave_up.touch()
    return found


def main() -> int:
    folder = Path(sys.argv[1])
    for name, case in CASES.items():
        if not fork_ranks(name, case.world, partial(run, name, case, folder=folder), folder):
            return 1
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
