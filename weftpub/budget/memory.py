"""GPU memory of one rank in each phase of a colocated step. Every row says how it was counted and where that is from.

Phases: the engine serves (rollout); forward and backward of a microbatch with gradients (train); the publish, with both
sides' weights present. The optimizer step needs no more than `train`: its slots are counted there, and activations are
gone by then.

Rows are `exact` (elements times bytes), or `estimate` (activations, whose true peak the allocator and the kernels
decide), or `assumed` (processes' fixed costs).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from weftpub.budget.counts import GIB, SCALE_BYTES, served, split, state_bytes, usable_bytes
from weftpub.budget.request import Request

__all__ = ["PHASES", "Phase", "Row", "phase_rows", "pool_bytes", "slot_bytes"]

Phase = Literal["rollout", "train", "publish"]
PHASES: tuple[Phase, ...] = ("rollout", "train", "publish")

# CUDA context and libraries of one process, NCCL's buffers of one process, and SGLang's decode graphs with workspace.
_CONTEXT, _NCCL, _GRAPHS = 0.6, 1.0, 1.5
# Rows that the busiest expert-parallel rank gets, over the mean, early in RL training.
_IMBALANCE = 1.25


@dataclass(frozen=True)
class Row:
    """Bytes of one thing on one GPU."""

    what: str
    owner: Literal["trainer", "engine"]
    bytes: int
    how: str
    kind: Literal["exact", "estimate", "assumed"] = "exact"


def phase_rows(request: Request, phase: Phase) -> tuple[Row, ...]:
    """Rows of one phase; their sum is the peak of one rank."""
    rows = {"rollout": _rollout, "train": _train, "publish": _publish}[phase](request)
    return tuple(row for row in rows if row.bytes)


def pool_bytes(request: Request) -> int:
    """What SGLang's memory fraction leaves for requests on one rank; negative if not even the weights fit in."""
    weights = sum(row.bytes for row in _engine_weights(request))
    return int(usable_bytes(request.limits.gpu_memory) * request.limits.memory_fraction) - weights


def slot_bytes(request: Request) -> int:
    """Bytes of all staging slots on one GPU: `SlotPool`, slots x tensors x elements x 4.

    With Muon every matrix that it updates is whole in a slot, and the pool has AdamW's three tensors for embeddings and
    vectors; with AdamW only experts are, and the rest is cut into rows.
    """
    shape = request.shape
    whole = shape.largest_matrix(request.trainer.tensor) if request.rule == "muon" else shape.expert_matrix
    return request.limits.slots * 3 * whole * 4


def _fixed(request: Request, *, serving: bool) -> Iterator[Row]:
    yield Row("CUDA context, NCCL", "trainer", int((_CONTEXT + _NCCL) * GIB), "0.6 + 1.0 GiB of one process", "assumed")
    graphs = _GRAPHS if serving else 0.0
    yield Row(
        "CUDA context, NCCL" + (", graphs" if serving else ""),
        "engine",
        int((_CONTEXT + _NCCL + graphs) * GIB),
        "0.6 + 1.0 GiB of one process" + (", + 1.5 GiB for decode graphs and workspace" if serving else ""),
        "assumed",
    )


def _trainer_weights(request: Request, *, transposed: bool) -> Iterator[Row]:
    experts, dense = split(request)
    if request.variant == "fp8":
        yield Row("W", "trainer", experts, "1 byte an element (float8_e4m3fn)")
        yield Row("scales of W", "trainer", int(experts * SCALE_BYTES), "4 bytes a block of 128 x 128")
        if transposed:
            layers = request.shape.layers if request.rebuild_wt else 1
            how = "1 byte an element, and its scales"
            wt = int(experts * (1 + SCALE_BYTES)) // layers
            yield Row("W^T and scales", "trainer", wt, how + (", one layer at a time" if request.rebuild_wt else ""))
    else:
        yield Row("BF16 experts", "trainer", 2 * experts, "2 bytes an element")
    yield Row("BF16 dense weights", "trainer", 2 * dense, "2 bytes an element of this tensor parallel rank")


def _engine_weights(request: Request) -> Iterator[Row]:
    experts, dense = served(request)
    if not request.shared_experts:
        how = "1 byte an element, and scales" if request.variant == "fp8" else "2 bytes an element"
        yield Row("routed experts", "engine", experts, how)
    yield Row("other weights", "engine", dense, "2 bytes an element; attention split over tensor / data ranks (SGLang)")


def _rollout(request: Request) -> Iterator[Row]:
    yield from _fixed(request, serving=True)
    yield from _engine_weights(request)
    how = f"{request.limits.memory_fraction:g} of the GPU (mem_fraction_static) less the weights"
    yield Row("KV cache, request state", "engine", max(0, pool_bytes(request)), how)
    if request.shared_experts:
        experts, _ = split(request)
        how = "one allocation, mapped by both sides"
        yield Row("W and scales, shared", "trainer", int(experts * (1 + SCALE_BYTES)), how)


def _train(request: Request) -> Iterator[Row]:
    experts, dense = split(request)
    yield from _fixed(request, serving=False)
    yield from _trainer_weights(request, transposed=True)
    yield Row("FP32 main gradients", "trainer", 4 * (experts + dense), "4 bytes an element (Megatron's DDP buffers)")
    yield from _optimizer(request)
    yield from _activations(request)


def _optimizer(request: Request) -> Iterator[Row]:
    if request.staged:
        how = f"{request.limits.slots} slots x 3 tensors x largest matrix x 4 bytes (SlotPool)"
        yield Row("staging slots", "trainer", slot_bytes(request), how)
        return
    if request.cpu_offload:
        return
    how = "8 bytes an element (Megatron's Muon), 12 for embeddings and vectors"
    if request.rule == "adamw":
        how = "12 bytes an element of this rank's flat shard (Megatron's distributed optimizer)"
    yield Row("FP32 masters and state", "trainer", state_bytes(request), how)


def _activations(request: Request) -> Iterator[Row]:
    s, t, limits = request.shape, request.trainer, request.limits
    tokens = limits.microbatch_tokens // t.context
    local = tokens // t.tensor if t.sequence_parallel else tokens
    kept = 1 if request.recompute else 12
    how = "tokens of this rank x hidden x 2 bytes x layers" + ("" if request.recompute else " x 12, not recomputed")
    yield Row("saved activations", "trainer", local * s.hidden * 2 * s.layers * kept, how, "estimate")
    # Values and their gradients, two bytes each, of what one recomputed layer holds at once.
    wide = s.qkv_rows + s.heads * s.head_dim
    if s.linear:
        wide = max(wide, 2 * s.linear.key_dim + 3 * s.linear.value_dim)
    attention = 4 * tokens * (wide // t.tensor + s.hidden)
    routed = int(local * s.top_k * _IMBALANCE)
    copies = 2 * s.hidden + 3 * s.intermediate + s.hidden
    moe = 4 * routed * copies + (2 * routed * (s.hidden + s.intermediate) if request.variant == "fp8" else 0)
    chunk = limits.logit_chunk_tokens or tokens
    logits = min(chunk, tokens) * (s.vocab // t.tensor) * 10
    how = (
        f"the largest of attention, experts ({_IMBALANCE} x the mean rows of a rank), logits (10 bytes a token and "
        "vocabulary entry)"
    )
    yield Row("one layer at work", "trainer", max(attention, moe, logits), how, "estimate")


def _publish(request: Request) -> Iterator[Row]:
    yield from _fixed(request, serving=False)
    yield from _trainer_weights(request, transposed=not request.rebuild_wt)
    yield from _engine_weights(request)
    if request.staged:
        how = "cap of the packed staging buffer, sent and received"
        yield Row("publish staging", "trainer", 2 * request.limits.staging_bytes, how)
    else:
        yield Row("weight bucket", "trainer", 2 * request.limits.bucket_bytes, "one bucket gathered, one received")
