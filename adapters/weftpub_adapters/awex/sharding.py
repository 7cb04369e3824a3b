"""How an engine's tensors are split, from the sizes that the engine really uses.

AWEX's own rule takes Qwen3-MoE's `self_attn` for a layer split by the whole tensor parallel size, which is wrong with
data-parallel attention, and counts the embedding's ranks likewise. Experts follow AWEX's rule. A dequant scale is
split as its weight.
"""

from functools import cache
from typing import Any

__all__ = ["sharding_strategy"]

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_VOCABULARY = ("embed_tokens", "lm_head")


@cache
def sharding_strategy() -> type:
    """The class to register; made on first use, because its base lives in AWEX."""
    from awex.sharding.param_sharding import ShardingStrategy, ShardingType, get_default_sharding_dim

    class RealSizes(ShardingStrategy):
        """AWEX's strategy, corrected for attention, vocabulary and router."""

        def get_sharding_strategy(self, parameter_name: str, **kwargs: Any) -> tuple[Any, int, int]:
            module = parameter_name.removesuffix("_scale_inv").rsplit(".", 2)[-2]
            if self.engine_name == "mcore" or module not in _ATTENTION + _VOCABULARY:
                return super().get_sharding_strategy(parameter_name, **kwargs)
            dim = get_default_sharding_dim(parameter_name)
            if module in _ATTENTION:
                return self._split(self.rank_info.attn_tp_size, dim)
            return self._split(kwargs["param_meta"]["vocabulary_shards"], dim)

        def _split(self, shards: int, dim: int) -> tuple[Any, int, int]:
            if shards == 1:
                return ShardingType.NO_SHARDING, dim, 1
            if shards == self.rank_info.attn_tp_size:
                return ShardingType.DP_TP_SHARDING, dim, shards
            return ShardingType.TP_SHARDING, dim, shards

    return RealSizes
