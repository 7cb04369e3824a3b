"""What one rank moves over PCIe in a step, keeps pinned in host memory, and receives in a publish.

A publish itself stays on NVLink or inside a GPU: CUDA IPC on one host, NCCL between hosts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from weftpub.budget.counts import SCALE_BYTES, served, split, state_bytes
from weftpub.budget.memory import Row
from weftpub.budget.request import Request

__all__ = ["Flow", "host_rows", "pcie_flows", "publish_rows"]


@dataclass(frozen=True)
class Flow:
    """Bytes to the GPU (`up`) and to the host (`down`) in one step."""

    what: str
    up: int
    down: int
    how: str


def host_rows(request: Request) -> tuple[Row, ...]:
    """Pinned host memory of one rank at its peak, which is the rollout."""
    return tuple(row for row in _host(request) if row.bytes)


def pcie_flows(request: Request) -> tuple[Flow, ...]:
    """What crosses PCIe in one step of one rank, with one optimizer update and everything offloaded in the rollout."""
    return tuple(flow for flow in _flows(request) if flow.up or flow.down)


def publish_rows(request: Request) -> tuple[Row, ...]:
    """Bytes that a publish writes into one engine rank."""
    experts, dense = served(request)
    rows = (
        Row(
            "routed experts and scales", "engine", 0 if request.shared_experts else experts, "as the engine holds them"
        ),
        Row("other weights", "engine", dense, "every publish: an offload leaves all weight memory undefined"),
    )
    return tuple(row for row in rows if row.bytes)


def _host(request: Request) -> Iterator[Row]:
    experts, dense = split(request)
    state = state_bytes(request)
    if request.staged:
        how = "8 bytes an element with Muon (12 for embeddings and vectors), 12 with AdamW"
        yield Row("masters and state", "trainer", state, how)
    elif request.cpu_offload:
        how = "12 bytes an element, and 4 for gradients (HybridDeviceOptimizer)"
        yield Row("masters, state and gradients", "trainer", state // 12 * 16, how)
    else:
        yield Row("offloaded masters, state", "trainer", state, "away from the GPU while the engine generates")
    if request.variant == "fp8":
        if not request.shared_experts:
            yield Row("offloaded W and scales", "trainer", int(experts * (1 + SCALE_BYTES)), "W^T is made again from W")
    else:
        yield Row("offloaded BF16 experts", "trainer", 2 * experts, "2 bytes an element")
    yield Row("offloaded dense weights", "trainer", 2 * dense, "2 bytes an element")


def _flows(request: Request) -> Iterator[Flow]:
    experts, dense = split(request)
    state = state_bytes(request)
    if request.staged:
        yield Flow("staged optimizer", state, state, "every master and its state once to a slot and back")
    elif request.cpu_offload:
        own = state // 12
        yield Flow("HybridDeviceOptimizer", 4 * own, 4 * own, "FP32 gradients down, FP32 weights up")
    else:
        yield Flow("offload of masters and state", state, state, "down for the rollout, up for the step")
    each = 1 + SCALE_BYTES if request.variant == "fp8" else 2
    if not request.shared_experts:
        moved = int(experts * each)
        yield Flow("offload of expert weights", moved, moved, "down for the rollout, up for training")
    yield Flow("offload of dense weights", 2 * dense, 2 * dense, "down for the rollout, up for training")
