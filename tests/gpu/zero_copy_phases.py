"""The `phases` section of zero_copy.py: GPU memory of trainer and engine in each phase of a colocated step, and bytes
over the link to the host.

Every variant allocates what it would hold at these sizes: the trainer experts, other weights, gradient buffers in FP32
and masters in flight; the engine experts, other weights and a cache. Experts are written by the quantizer and published
for real; no forward or backward pass runs, so activations are not in it. Masters and optimizer state stay on the host
and cross the link once each way in every variant alike; that is not in it either.
"""

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from link_counters import CopiedBytes, LinkCounters
from zero_copy_base import (
    DEVICE,
    GPU,
    NAME,
    RUN,
    EngineRank,
    Process,
    Report,
    Sizes,
    make_store,
    masters_of,
    plan_of,
    settle,
    tidy,
)
from zero_copy_speed import rest_of

from weftpub.channel import Deadlines
from weftpub.device import pinned
from weftpub.memory import SharedAllocation
from weftpub.publisher import Peer, Publisher, SourceBuffers
from weftpub.store import ExpertStore
from weftpub.store.layout import Format, Wt
from weftpub.store.shared import shared_catalogue
from weftpub.wire import gpu_uuid

__all__ = ["PHASES", "VARIANTS", "phases"]

PHASES = ("rollout", "training", "optimizer step", "publish")


@dataclass(frozen=True)
class Variant:
    """How experts are held."""

    format: Format
    shared: bool
    wt: Wt


VARIANTS: Mapping[str, Variant] = {
    "shared": Variant("fp8", True, "rebuild"),
    "shared, W^T stored": Variant("fp8", True, "store"),
    "copied": Variant("fp8", False, "rebuild"),
    "BF16": Variant("bf16", False, "rebuild"),
}


def phases(report: Report, sizes: Sizes) -> None:
    """Every variant, one after the other."""
    found: dict[str, Any] = report.data.setdefault("phases", {})
    engines = {name: Process() for name in VARIANTS}
    try:
        for name, variant in VARIANTS.items():
            tidy()
            with tempfile.TemporaryDirectory(prefix="weft-") as folder, contextlib.ExitStack() as stack:
                step = Step(sizes, variant, folder, engines[name], stack)
                found[name] = step.run()
                del step
            engines[name].kill()
            report.number(f"phases, {name}", {p: sum(row.values()) for p, row in found[name]["memory"].items()})
            report.number(f"link, {name}", found[name]["link"])
            _check(report, name, found[name], variant)
    finally:
        for engine in engines.values():
            engine.kill()
        tidy()
    peak = {name: max(sum(row.values()) for row in one["memory"].values()) for name, one in found.items()}
    report.number("peak_bytes", peak)
    moved = {name: one["link"]["copied"]["to_gpu"] + one["link"]["copied"]["to_host"] for name, one in found.items()}
    report.number("link_bytes", moved)
    if GPU:
        report.check("shared experts cross no link", found["shared"]["experts_over_link"] < 1 << 20)
        report.check(
            "shared experts need less in every phase than BF16",
            all(
                sum(found["shared"]["memory"][phase].values()) < sum(found["BF16"]["memory"][phase].values())
                for phase in PHASES
            ),
        )


def _check(report: Report, name: str, found: Mapping[str, Any], variant: Variant) -> None:
    """What is known must explain what the GPU says: contexts and allocators aside."""
    for phase in PHASES:
        rest = found["memory"][phase]["contexts and the rest"]
        if GPU:
            report.check(
                f"phases, {name}: {phase} is accounted for", rest < 4 << 30, f"{rest / (1 << 30):.2f} GiB", memory=True
            )
    report.check(f"phases, {name}: the version was served", found["served"], None)
    if variant.shared:
        report.check(f"phases, {name}: no expert byte was copied", found["shared_bytes"] > 0, found["moved_bytes"])


class Step:
    """One variant's trainer, in this process, and its engine's process."""

    def __init__(
        self, sizes: Sizes, variant: Variant, folder: str, engine: Process, stack: contextlib.ExitStack
    ) -> None:
        self.variant = variant
        self.engine = engine
        memory: SharedAllocation | None = None
        if variant.shared:
            memory = SharedAllocation.join(folder, NAME, DEVICE, shared_catalogue(sizes.layout(variant.format)))
            stack.callback(memory.leave)
        self.store: ExpertStore = make_store(sizes, memory=memory, format=variant.format, wt=variant.wt)
        self.rest = rest_of(sizes)
        self.host = {n: pinned(t.shape, t.dtype, pin=GPU) for n, t in self.rest.items()}
        self.numel = sizes.numel + sum(tensor.numel() for tensor in self.rest.values())
        self.gradients: torch.Tensor | None = None
        self.slots = 0
        engine.make(EngineRank, sizes, folder, ("experts", "rest"), variant.shared, variant.format, sizes.kv_cache)
        self.publisher = stack.enter_context(
            Publisher(
                RUN,
                plan_of(sizes, ("experts", "rest"), variant.format),
                [Peer(0, engine("where"), "engine")],
                commit_path=Path(folder) / "commit.json",
                deadlines=Deadlines.all(120),
            )
        )

    def run(self) -> dict[str, Any]:
        """A first version, then the step that is measured."""
        self.publisher.pause()
        self.write(1)
        self.publish(1)
        self.offload()  # host buffers are allocated here, once
        memory = {"rollout": self.used()}
        experts = CopiedBytes()
        with LinkCounters(gpu_uuid(0) if GPU else "cpu") as seen, CopiedBytes() as copied:
            self.publisher.pause()
            self.engine("release")
            with experts:
                self.store.reload()
            self.reload_rest()
            self.gradients = torch.zeros(self.numel, dtype=torch.float32, device=DEVICE)
            memory["training"] = self.used()
            self.write(2, memory)
            self.gradients = None
            tidy()
            self.engine("bring_back", "weights")
            done = self.publish(2)
            memory["publish"] = self.used()
            with experts:
                self.store.offload()
            self.offload_rest()
            tidy()
            self.engine("bring_back", "cache")
            settle()
        again = self.used()
        return {
            "memory": {phase: memory[phase] for phase in PHASES},
            "rollout_again": again,
            "link": {
                "copied": {"to_gpu": copied.to_gpu, "to_host": copied.to_host},
                "counters": {"to_gpu": seen.to_gpu, "to_host": seen.to_host},
            },
            "experts_over_link": experts.to_gpu + experts.to_host,
            "moved_bytes": done.nbytes,
            "shared_bytes": done.shared_nbytes,
            "served": self.engine("state") == (True, 2),
        }

    def write(self, generation: int, memory: dict[str, Any] | None = None) -> None:
        """The optimizer's part: masters in flight are written into the store."""
        masters, writer = masters_of(self.store, generation), self.store.writer()
        flying = {masters(matrix.name).data_ptr(): masters(matrix.name).nbytes for matrix in self.store.layout.matrices}
        self.slots = sum(flying.values())
        self.store.begin(generation)
        for matrix in self.store.layout.matrices:
            writer(matrix.name, masters(matrix.name))
        if memory is not None:
            memory["optimizer step"] = self.used()
        self.store.seal()
        self.slots = 0

    def publish(self, version: int) -> Any:
        """Publish the store and the other weights; both are offloaded afterwards, so receivers keep no mapping."""
        tensors = dict(self.rest) | {item.name: item.tensor for item in self.store.canonical()}
        sources = SourceBuffers.of_tensors(tensors, in_place=True, keep=False)
        return self.publisher.publish(version, sources, self.store.checksums)

    def offload(self) -> None:
        """Give everything of the trainer's away, but for what is shared."""
        self.store.offload()
        self.offload_rest()
        tidy()

    def offload_rest(self) -> None:
        """Other weights to the host."""
        for name, tensor in self.rest.items():
            self.host[name].copy_(tensor, non_blocking=True)
        settle()
        for tensor in self.rest.values():
            tensor.untyped_storage().resize_(0)

    def reload_rest(self) -> None:
        """Other weights from the host."""
        for name, tensor in self.rest.items():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            tensor.copy_(self.host[name], non_blocking=True)
        settle()

    def used(self) -> dict[str, int]:
        """Bytes of the GPU by what they are for; together they are all that the GPU says is used."""
        settle()
        if GPU:
            torch.cuda.empty_cache()
        engine = self.engine("bytes_by_kind")
        own = self.store.footprint()
        experts, transposed = own["w"] + own["scale"], own["wt"] + own["scale_t"]
        found = {
            "experts of both" if self.variant.shared else "trainer: experts": experts,
            "trainer: W^T": transposed,
            "trainer: other weights": sum(tensor.untyped_storage().nbytes() for tensor in self.rest.values()),
            "trainer: gradients": 0 if self.gradients is None else self.gradients.nbytes,
            "trainer: masters in flight": self.slots,
            "engine: experts": engine["experts"],
            "engine: other weights": engine["other weights"],
            "engine: cache": engine["cache"],
        }
        if not self.store.resident:
            found |= {"trainer: W^T": 0} if self.variant.shared else {"trainer: experts": 0, "trainer: W^T": 0}
        if GPU:
            free, total = torch.cuda.mem_get_info()
            found["contexts and the rest"] = total - free - sum(found.values())
        else:
            found["contexts and the rest"] = 0
        return found
