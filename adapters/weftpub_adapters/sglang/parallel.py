"""The sizes and ranks that an SGLang process really uses, read from its runtime context.

A command line says something else: SGLang rewrites it, and attention is split over fewer ranks than the engine has when
it is data parallel.
"""

from dataclasses import dataclass

from weftpub.errors import ConfigError

__all__ = ["ParallelSizes", "parallel_sizes"]

# Ways of splitting a model that this adapter knows no mapping for.
_ONE = {
    "pp_size": "pipeline parallel",
    "attn_cp_size": "attention context parallel",
    "moe_dp_size": "data parallel experts",
    "dcp_size": "decode context parallel",
}


@dataclass(frozen=True)
class ParallelSizes:
    """The sizes and ranks that SGLang really uses, read from its own runtime context, never from its command line."""

    world_size: int
    rank: int
    tp_size: int
    tp_rank: int
    attn_tp_size: int
    attn_tp_rank: int
    attn_dp_size: int
    attn_dp_rank: int
    moe_ep_size: int
    moe_ep_rank: int
    moe_tp_size: int
    moe_tp_rank: int


def parallel_sizes() -> ParallelSizes:
    """Sizes and ranks of SGLang's current runtime context; a worker's own, or that of `ServedModel.active`.

    Raises:
        ConfigError: the engine splits its model in a way that cannot be published to; names it.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    for field, what in _ONE.items():
        size = getattr(parallel, field)
        if size not in (None, 1):
            raise ConfigError(f"SGLang's {field} is {size}: {what} engines are not supported; set it to 1")
    names = set(ParallelSizes.__dataclass_fields__) - {"world_size", "rank"}
    return ParallelSizes(
        world_size=parallel.tp_size, rank=parallel.tp_rank, **{name: getattr(parallel, name) for name in names}
    )
