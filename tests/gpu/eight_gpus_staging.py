"""Section `staging` of eight_gpus.py: staged optimizer steps of all GPUs at once, against pinned copies of all at once.

What all GPUs move together may be bound by the host's memory and not by their buses; so the limit is measured with all
of them copying both ways at the same time, in pinned memory of their own NUMA nodes.
"""

from typing import Any

import torch
from eight_gpus_limits import at_once
from eight_gpus_numa import page_nodes
from eight_gpus_ranks import RankReport

from weftpub.device import pinned
from weftpub.masters import MasterSet
from weftpub.optim import AdamWHyperparameters, MuonHyperparameters, StagedAdamW, StagedMuon
from weftpub.staging import StagingPipeline

__all__ = ["section_staging"]

GPU = torch.cuda.is_available()
_STATES = {"muon": StagedMuon.STATES, "adamw": StagedAdamW.STATES}
_CEILING = (1 << 30) if GPU else (1 << 22)  # bytes of one pinned copy
_COPIES = 4  # of one measurement


def section_staging(report: RankReport, settings: dict[str, Any]) -> None:
    """Ceilings, then a step of each optimizer."""
    device = torch.device("cuda", torch.cuda.current_device()) if GPU else torch.device("cpu")
    alone, together = ceilings(report, settings, device)
    for name in _STATES:
        staged_steps(report, settings, device, name, alone, together)


def ceilings(report: RankReport, settings: dict[str, Any], device: torch.device) -> tuple[float, float]:
    """GB/s of pinned copies both ways: of rank 0 while the others rest, and of all ranks together."""
    count = _CEILING // 4
    host_in, host_out = pinned(count), pinned(count)
    check_nodes(report, settings, "pinned buffers", [host_in, host_out])
    device_in, device_out = torch.zeros(2, count, device=device).unbind()
    streams = [torch.cuda.Stream(device) for _ in range(2)] if GPU else []

    def copy(into: bool, out: bool) -> None:
        for _ in range(_COPIES):
            for wanted, stream, target, source in (
                (into, 0, device_in, host_in),
                (out, 1, host_out, device_out),
            ):
                if wanted and GPU:
                    with torch.cuda.stream(streams[stream]):
                        target.copy_(source, non_blocking=True)
                elif wanted:
                    target.copy_(source)

    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    found: dict[str, Any] = {}
    for kind, into, out in (("in", True, False), ("out", False, True), ("both", True, True)):
        nbytes = _COPIES * (into + out) * _CEILING

        def all_copy(into: bool = into, out: bool = out) -> None:
            copy(into, out)

        def first_copies(into: bool = into, out: bool = out) -> None:
            if rank == 0:
                copy(into, out)

        seconds = at_once(all_copy, device)
        found[kind] = {
            "rank 0 alone": nbytes / at_once(first_copies, device)[0] / 1e9,
            "each of all": [nbytes / one / 1e9 for one in seconds],
            "all": world * nbytes / max(seconds) / 1e9,
        }
    report.note("ceilings_gb_s", found)
    if rank == 0:
        report.say(f"pinned copies, GB/s: {found}")
    return found["both"]["rank 0 alone"], found["both"]["all"]


class Load:
    """As many expert matrices as one layer has on this rank, and what a step of an optimizer needs for them."""

    def __init__(self, settings: dict[str, Any], device: torch.device, name: str) -> None:
        shape = settings["shape"]
        hidden, intermediate = shape["hidden"], shape["intermediate"]
        experts = shape["experts"] // torch.distributed.get_world_size()
        shapes = {f"{e}.fc1": (2 * intermediate, hidden) for e in range(experts)}
        shapes |= {f"{e}.fc2": (hidden, intermediate) for e in range(experts)}
        self.name, self.device = name, device
        self.masters = MasterSet(shapes, _STATES[name])
        generator = torch.Generator(device).manual_seed(torch.distributed.get_rank())
        self.gradients = {key: torch.randn(size, generator=generator, device=device) for key, size in shapes.items()}
        for key, master in self.masters.items():
            master.weight.copy_(self.gradients[key] * 0.02)
        self.written = {key: torch.empty(size, device=device) for key, size in shapes.items()}

    def write(self, key: str, matrix: torch.Tensor) -> None:
        """What a store's writer would do, without its arithmetic."""
        self.written[key].copy_(matrix)

    def seconds(self, slots: int) -> list[float]:
        """Of one step on every rank."""
        pipeline = StagingPipeline.for_masters(self.masters, self.device, slots=slots)
        optimizer: Any = (
            StagedMuon(self.masters, pipeline, self.write, MuonHyperparameters(lr=0.02))
            if self.name == "muon"
            else StagedAdamW(self.masters, pipeline, self.write, AdamWHyperparameters(lr=1e-3))
        )
        return at_once(lambda: optimizer.step(self.gradients), self.device, repeat=3)

    def tensors(self) -> list[torch.Tensor]:
        """Masters and states."""
        return [tensor for master in self.masters.values() for tensor in master.tensors().values()]

    def stray(self) -> list[str]:
        """Matrices of which the writer saw something else than what is in host memory now."""
        return [k for k, master in self.masters.items() if not torch.equal(self.written[k].cpu(), master.weight)]


def staged_steps(
    report: RankReport, settings: dict[str, Any], device: torch.device, name: str, alone: float, together: float
) -> None:
    """Whole optimizer steps on all ranks at once."""
    load, world = Load(settings, device, name), torch.distributed.get_world_size()
    check_nodes(report, settings, f"{name}'s masters", load.tensors())
    rows = []
    for slots in (2, 3):
        seconds = load.seconds(slots)
        gb_s = world * 2 * load.masters.nbytes / max(seconds) / 1e9
        rows.append(
            {
                "slots": slots,
                "seconds": [round(one, 4) for one in seconds],
                "gb_s": round(gb_s, 1),
                "share_of_all_copying": round(gb_s / together, 3),
                "share_of_one_alone": round(gb_s / world / alone, 3),
            }
        )
    stray = load.stray()
    size = f"{len(load.masters)} matrices, {load.masters.nbytes} bytes"
    report.check(f"{name}: the writer saw the updated masters", not stray, stray[:4] or size)
    report.note(name, rows)
    if torch.distributed.get_rank() == 0:
        report.say(f"{name}: {rows}")
    del load
    if GPU:
        torch.cuda.empty_cache()


def check_nodes(report: RankReport, settings: dict[str, Any], what: str, tensors: list[torch.Tensor]) -> None:
    """Whether buffers lie on the NUMA node of this rank's GPU; a machine with one node has no other."""
    rank, found = torch.distributed.get_rank(), {}
    for tensor in tensors:
        pages = page_nodes(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        for node, count in (pages or {}).items():
            found[node] = found.get(node, 0) + count
    node = settings["nodes"][rank] if settings["nodes"] else None
    detail = {"GPU": node, "pages": found, "nodes": settings["node_count"]}
    name = f"{what} lie on the GPU's NUMA node"
    if settings["node_count"] == 1:
        report.check(name, True, detail)
    elif node is None or not found:
        report.check(name, None if GPU else True, detail)
    else:
        report.check(name, found.get(node, 0) >= 0.98 * sum(found.values()), detail)
