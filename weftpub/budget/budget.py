"""The whole account of one request, whether it fits, by how much it does not, and what would fit."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from weftpub.budget.counts import GIB, usable_bytes
from weftpub.budget.memory import PHASES, Phase, Row, phase_rows, pool_bytes
from weftpub.budget.request import Request
from weftpub.budget.traffic import Flow, host_rows, pcie_flows, publish_rows

__all__ = ["TYPED", "Budget", "Change", "make_budget"]

Change = Literal["rebuild_wt", "adamw", "fp8", "microbatch", "logits", "memory_fraction"]
# As options of `weftpub plan`.
TYPED: Mapping[Change, str] = {
    "rebuild_wt": "--rebuild-wt",
    "adamw": "--variant baseline --optimizer adamw --cpu-offload",
    "fp8": "--variant fp8",
    "microbatch": "--microbatch {}",
    "logits": "--logit-chunk {}",
    "memory_fraction": "--memory-fraction {}",
}


@dataclass(frozen=True)
class Budget:
    """Bytes of one rank, by phase.

    Attributes:
        request: what was asked.
        phases: rows of each phase.
        host: pinned host memory of one rank.
        pcie: what a step moves over PCIe.
        publish: what a publish writes into one engine rank.
        usable: bytes that processes can have of one GPU.
    """

    request: Request
    phases: dict[Phase, tuple[Row, ...]]
    host: tuple[Row, ...]
    pcie: tuple[Flow, ...]
    publish: tuple[Row, ...]
    usable: int

    def peak(self, phase: Phase) -> int:
        """Bytes of one GPU in a phase."""
        return sum(row.bytes for row in self.phases[phase])

    @property
    def host_bytes(self) -> int:
        """Pinned host memory of one rank."""
        return sum(row.bytes for row in self.host)

    @property
    def sequence_bytes(self) -> int:
        """KV cache and request state of one sequence of full length on one engine rank."""
        shape, tensor = self.request.shape, self.request.engine.attention_tensor
        state = shape.linear.state_bytes() // tensor if shape.linear else 0
        return shape.kv_bytes_per_token(tensor) * self.request.limits.total_tokens + state

    @property
    def sequences(self) -> int:
        """Sequences of full length that one engine holds at once; below one means that it cannot serve."""
        return pool_bytes(self.request) // self.sequence_bytes * self.request.engine.data

    def problems(self) -> tuple[str, ...]:
        """Why it does not fit: phase, missing GiB, and the three largest rows. Empty if it does."""
        return tuple(self._problems())

    def _problems(self) -> Iterator[str]:
        for phase in PHASES:
            short = self.peak(phase) - self.usable
            if short > 0:
                largest = sorted(self.phases[phase], key=lambda row: -row.bytes)[:3]
                names = ", ".join(f"{row.owner} {row.what} {row.bytes / GIB:.1f}" for row in largest)
                yield (
                    f"{phase}: {self.peak(phase) / GIB:.1f} GiB of {self.usable / GIB:.1f}, {short / GIB:.1f} GiB too "
                    f"much; largest: {names}"
                )
        if self.sequences < 1:
            yield (
                f"rollout: memory_fraction={self.request.limits.memory_fraction:g} leaves no room for one sequence of "
                f"{self.request.limits.total_tokens} tokens ({self.sequence_bytes / GIB:.1f} GiB) beside the weights"
            )

    @property
    def fits(self) -> bool:
        """Whether every phase fits."""
        return not self.problems()

    def remedies(self, typed: Mapping[Change, str] = TYPED) -> tuple[str, ...]:
        """Single changes of settings with which it fits; empty if it fits, or if none of them is enough.

        Args:
            typed: how to ask for each change where the reader is; a change that is left out cannot be asked for.
        """
        if self.fits:
            return ()
        return tuple(
            f"{words} ({typed[change].format(number)})"
            for change, words, number, request in _changes(self.request)
            if change in typed and make_budget(request).fits
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data: bytes, and how each was counted."""
        request = asdict(self.request)
        request["shape"].pop("groups")
        return {
            "request": request,
            "parameters": self.request.shape.parameters,
            "usable_bytes": self.usable,
            "phases": {
                phase: {"bytes": self.peak(phase), "rows": [asdict(row) for row in self.phases[phase]]}
                for phase in PHASES
            },
            "host_pinned": {"bytes_per_rank": self.host_bytes, "rows": [asdict(row) for row in self.host]},
            "pcie_per_step": {
                "up": sum(flow.up for flow in self.pcie),
                "down": sum(flow.down for flow in self.pcie),
                "rows": [asdict(flow) for flow in self.pcie],
            },
            "publish": {
                "bytes_per_rank": sum(row.bytes for row in self.publish),
                "rows": [asdict(row) for row in self.publish],
            },
            "full_length_sequences_per_engine": self.sequences,
            "fits": self.fits,
            "problems": list(self.problems()),
            "remedies": list(self.remedies()),
        }


def make_budget(request: Request) -> Budget:
    """Count one request; raises as `Request.check`."""
    request.check()
    return Budget(
        request,
        {phase: phase_rows(request, phase) for phase in PHASES},
        host_rows(request),
        pcie_flows(request),
        publish_rows(request),
        usable_bytes(request.limits.gpu_memory),
    )


def _changes(request: Request) -> Iterator[tuple[Change, str, float, Request]]:
    """(change, in words, its number, the request with it)."""
    if request.variant == "fp8" and not request.rebuild_wt:
        yield "rebuild_wt", "rebuild W^T layer by layer", 0, replace(request, rebuild_wt=True)
    if request.variant == "baseline" and not request.cpu_offload:
        yield "adamw", "AdamW with Megatron's CPU offload", 0, replace(request, rule="adamw", cpu_offload=True)
    if request.variant != "fp8" and request.trainer.expert_tensor == 1:
        yield "fp8", "variant fp8", 0, replace(request, variant="fp8")
    tokens = request.limits.microbatch_tokens // 2
    while tokens >= request.limits.total_tokens:
        smaller = replace(request, limits=replace(request.limits, microbatch_tokens=tokens))
        if make_budget(smaller).fits:
            yield "microbatch", f"microbatches of {tokens} tokens", tokens, smaller
            break
        tokens //= 2
    if request.limits.logit_chunk_tokens == 0:
        chunk = 4096
        smaller = replace(request, limits=replace(request.limits, logit_chunk_tokens=chunk))
        yield "logits", f"logits of {chunk} tokens at a time", chunk, smaller
    share = 0.85
    fraction = replace(request, limits=replace(request.limits, memory_fraction=share))
    yield "memory_fraction", "a larger engine share", share, fraction
