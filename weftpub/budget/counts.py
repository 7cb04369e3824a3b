"""Elements and bytes that several tables share."""

from weftpub.budget.request import Request

__all__ = ["GIB", "SCALE_BYTES", "by_rule", "served", "split", "state_bytes", "usable_bytes"]

GIB = 1 << 30
# Dequant scales: one FP32 for each 128 x 128 block.
SCALE_BYTES = 4 / (128 * 128)
# An H200 is sold with 141 GB and gives processes about 139 GiB: NVIDIA's GB are GiB, less what driver and ECC keep.
_USABLE = 0.985


def usable_bytes(gpu_memory: float) -> int:
    """What processes can have of a GPU that is sold with `gpu_memory` GB."""
    return int(gpu_memory * GIB * _USABLE)


def split(request: Request) -> tuple[int, int]:
    """Elements of (routed experts, everything else that is trained) on one trainer rank."""
    share = request.trainer.share
    experts = sum(share(group) for group in request.shape.groups if group.train == "expert")
    return experts, sum(share(group) for group in request.shape.groups if group.train != "expert")


def by_rule(request: Request) -> tuple[int, int]:
    """Elements on one trainer rank that Muon updates, and those that AdamW updates beside it."""
    share = request.trainer.share
    matrices = sum(share(group) for group in request.shape.groups if group.matrices)
    return matrices, sum(share(group) for group in request.shape.groups if not group.matrices)


def served(request: Request) -> tuple[int, int]:
    """Bytes of (routed experts with their scales, other weights in BF16) on one engine rank."""
    share = request.engine.share
    experts = sum(share(group) for group in request.shape.groups if group.serve == "expert")
    dense = sum(share(group) for group in request.shape.groups if group.serve != "expert")
    each = 1 + SCALE_BYTES if request.variant == "fp8" else 2
    return int(experts * each), 2 * dense


def state_bytes(request: Request) -> int:
    """FP32 masters and optimizer state of one rank: 8 bytes an element with Muon, 12 with AdamW.

    Muon needs whole matrices, so dense ones are replicated over data-parallel ranks, and experts over their replicas;
    AdamW's are sharded (Megatron's distributed optimizer), within each of its instances where there are several.
    """
    if request.rule == "muon":
        matrices, vectors = by_rule(request)
        return 8 * matrices + 12 * vectors
    experts, dense = split(request)
    trainer, copies = request.trainer, request.optimizer_copies
    return 12 * (experts * copies // trainer.expert_data + dense * copies // trainer.data)
