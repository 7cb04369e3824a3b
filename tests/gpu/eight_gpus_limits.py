"""What copies and links of this machine can do, all GPUs at once, and the least time that a plan's moves take then.

The least time counts moves alone: a GPU reads and writes each byte that stays on it once, and bytes for another GPU
cross its link once; both at once. Checksums, control messages and the commit record come on top of it.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from eight_gpus_ranks import gather, meet

from weftpub.plan import Plan

__all__ = ["Limits", "Traffic", "at_once", "least_ms", "measure_limits", "traffic_of"]

_BYTES = 1 << 30
_CPU_BYTES = 1 << 24
_REPEAT = 5


@dataclass(frozen=True)
class Limits:
    """GB/s of every rank's GPU while all others do the same.

    Attributes:
        copy: bytes read plus bytes written by a copy on the device.
        link: bytes from each GPU to the next one, as each gets as many from the one before; None with one GPU.
        link_alone: the same while the others rest.
    """

    copy: tuple[float, ...]
    link: tuple[float, ...] | None
    link_alone: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Traffic:
    """Bytes of a plan's moves by GPU, trainer rank r and engine rank r being on GPU r.

    Attributes:
        stays: on the GPU.
        leaves, arrives: over its link.
    """

    stays: tuple[int, ...]
    leaves: tuple[int, ...]
    arrives: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def traffic_of(plan: Plan) -> Traffic:
    """Where the bytes of a plan go."""
    world = torch.distributed.get_world_size()
    stays, leaves, arrives = [0] * world, [0] * world, [0] * world
    for move in plan.moves:
        if move.send_rank == move.recv_rank:
            stays[move.send_rank] += move.nbytes
        else:
            leaves[move.send_rank] += move.nbytes
            arrives[move.recv_rank] += move.nbytes
    return Traffic(tuple(stays), tuple(leaves), tuple(arrives))


def least_ms(traffic: Traffic, limits: Limits) -> dict[str, float]:
    """Milliseconds that the GPU with the most to do needs at its limits: for what it copies, and for what crosses its
    link.
    """
    copy = max(2 * stays / limits.copy[rank] / 1e6 for rank, stays in enumerate(traffic.stays))
    crossing = [max(pair) for pair in zip(traffic.leaves, traffic.arrives, strict=True)]
    if limits.link is None:  # one GPU, or a CPU: what crosses is copied, too
        return {"copy": copy, "link": max(2 * n / limits.copy[rank] / 1e6 for rank, n in enumerate(crossing))}
    return {"copy": copy, "link": max(n / limits.link[rank] / 1e6 for rank, n in enumerate(crossing))}


def measure_limits() -> Limits:
    """Copies of all ranks at once; collective."""
    cuda = torch.cuda.is_available()
    nbytes = _BYTES if cuda else _CPU_BYTES
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    limits = _measured(device, nbytes)
    if cuda:
        torch.cuda.empty_cache()
    return limits


def _measured(device: torch.device, nbytes: int) -> Limits:
    """Limits of copies of so many bytes; the memory is free on return."""
    source, target = torch.ones(2, nbytes, dtype=torch.uint8, device=device).unbind()
    copy = tuple(2 * nbytes / seconds / 1e9 for seconds in at_once(lambda: target.copy_(source), device))
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    if device.type == "cpu" or not torch.cuda.device_count() >= world > 1:
        return Limits(copy, None, None)
    there = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{(rank + 1) % world}")
    link = tuple(nbytes / seconds / 1e9 for seconds in at_once(lambda: there.copy_(source), device))
    alone = at_once(lambda: there.copy_(source) if rank == 0 else None, device)[0]
    return Limits(copy, link, nbytes / alone / 1e9)


def at_once(work: Callable[[], object], device: torch.device, repeat: int = _REPEAT) -> list[float]:
    """Median seconds of a piece of work on every rank, begun by all at the same time; collective."""

    def run() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        meet()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    run()
    seconds = sorted(run() for _ in range(repeat))[repeat // 2]
    return gather(seconds)
