"""Which tensor parallel and expert parallel sizes keep 128-wide quantization blocks whole, and the words for those that
do not.

A block that two ranks share would need one scale in two places, each valid for half of its values. No engine stores
that, so such sizes are refused when the plan is made, before anything is written.
"""

from weftpub.errors import PlanError

__all__ = ["explain_illegal_tp", "legal_ep", "legal_tp", "require_legal_tp"]


def legal_tp(intermediate: int, block: int = 128) -> tuple[int, ...]:
    """Tensor parallel sizes that split `intermediate` rows into equal shards of whole blocks; always holds 1."""
    return tuple(tp for tp in range(1, max(1, intermediate // block) + 1) if _splits(intermediate, tp, block))


def legal_ep(intermediate: int, ranks: int, experts: int | None = None, block: int = 128) -> tuple[int, ...]:
    """Expert parallel sizes with which `ranks` ranks can serve the experts: the rest of the ranks splits each expert in
    whole blocks.
    """
    return tuple(
        ep
        for ep in range(1, ranks + 1)
        if ranks % ep == 0 and (experts is None or experts % ep == 0) and _splits(intermediate, ranks // ep, block)
    )


def explain_illegal_tp(
    intermediate: int, tp: int, *, experts: int | None = None, block: int = 128, name: str = "moe_intermediate"
) -> str:
    """Say why expert tensor parallel size `tp` cannot split `intermediate`, and list the sizes that can.

    Args:
        intermediate: extent of the split dimension, in elements of the weight.
        tp: the expert tensor parallel size that was asked for.
        experts: number of routed experts; without it the expert parallel sizes are not checked against it.
        name: what to call the dimension.
    """
    if tp > 0 and intermediate % tp == 0:
        share = f"{intermediate // tp} per rank, "
        share += "less than one block" if intermediate // tp < block else "not a multiple"
        share += f" of {block}"
    else:
        share = "not a whole number of elements per rank"
    sizes = ", ".join(map(str, legal_tp(intermediate, block)))
    asked = f"{name} {intermediate} with tensor parallel size {tp} leaves {share}"
    text = f"{asked}; legal expert tensor parallel sizes: {sizes}"
    with_ep = [
        f"EP {ep} with expert TP {tp // ep}" for ep in legal_ep(intermediate, max(tp, 1), experts, block) if ep > 1
    ]
    return f"{text}; legal on the same {tp} ranks: {', '.join(with_ep)}" if with_ep else text


def require_legal_tp(
    intermediate: int, tp: int, *, experts: int | None = None, block: int = 128, name: str = "moe_intermediate"
) -> None:
    """Raise PlanError with `explain_illegal_tp` unless `tp` ranks each get whole blocks."""
    if not _splits(intermediate, tp, block):
        raise PlanError(explain_illegal_tp(intermediate, tp, experts=experts, block=block, name=name))


def _splits(intermediate: int, tp: int, block: int) -> bool:
    """One rank may hold a ragged last block; several ranks need whole blocks each."""
    return tp == 1 or (
        tp > 1 and intermediate % tp == 0 and (intermediate // tp) % block == 0 and intermediate // tp > 0
    )
