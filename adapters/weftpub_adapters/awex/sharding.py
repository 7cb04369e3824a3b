"""How tensors are split, from the sizes that trainer and engine really use.

AWEX derives splits from names and command-line sizes. With data-parallel attention, replicated linears, experts that
are moved between ranks or an expert tensor parallel size of its own that goes wrong, so here an engine's splits come
from what its modules say of themselves, and a trainer's from its parallel groups. A dequant scale is split as its
weight.
"""

from functools import cache
from typing import Any

from weftpub.errors import PlanError

__all__ = ["SHARDS", "is_routed", "sharding_strategy", "split_dimension"]

# Key of a parameter's metadata under which the engine's resolver puts the number of its shards.
SHARDS = "shards"
# Modules whose weight is split along its columns; every other split is along the rows.
_ROW_PARALLEL = frozenset({"o_proj", "down_proj", "out_proj"})
# What every rank of a trainer's tensor parallel group holds whole; norms too.
_REPLICATED = frozenset({"gate", "shared_expert_gate"})


def is_routed(name: str) -> bool:
    """Whether a canonical name is of a routed expert."""
    return ".mlp.experts." in name


def split_dimension(name: str) -> int:
    """The dimension along which a canonical tensor is split, if it is."""
    return int(_module(name) in _ROW_PARALLEL)


def _module(name: str) -> str:
    return name.removesuffix("_scale_inv").rsplit(".", 2)[-2]


@cache
def sharding_strategy() -> type:
    """The class to register; made on first use, because its base lives in AWEX."""
    from awex.sharding.param_sharding import ShardingStrategy, ShardingType

    class RealSizes(ShardingStrategy):
        """Splits by the real sizes, in AWEX's words."""

        def get_sharding_strategy(self, parameter_name: str, **kwargs: Any) -> tuple[Any, int, int]:
            dim = split_dimension(parameter_name)
            if self.engine_name == "mcore":
                shards = self._trainer_shards(parameter_name)
                return (ShardingType.TP_SHARDING if shards > 1 else ShardingType.NO_SHARDING), dim, shards
            shards = kwargs["param_meta"][SHARDS]
            if shards == 1:
                return ShardingType.NO_SHARDING, dim, 1
            if is_routed(parameter_name):
                return (ShardingType.EP_TP_SHARDING if self.ep_size > 1 else ShardingType.TP_SHARDING), dim, shards
            if shards == self.rank_info.attn_tp_size:
                return ShardingType.DP_TP_SHARDING, dim, shards
            if shards == self.rank_info.tp_size:
                return ShardingType.TP_SHARDING, dim, shards
            raise PlanError(
                f"{parameter_name} is split over {shards} ranks of the engine, which are neither its tensor parallel "
                f"({self.rank_info.tp_size}) nor its attention ranks ({self.rank_info.attn_tp_size})"
            )

        def _trainer_shards(self, name: str) -> int:
            if is_routed(name):
                if self.ep_tp_size > 1:
                    raise PlanError(
                        f"{name}: experts are split over {self.ep_tp_size} trainer ranks, but a published matrix must "
                        "be whole; set expert_tensor_parallel_size=1"
                    )
                return 1
            module = _module(name)
            return 1 if "norm" in module or module in _REPLICATED else self.tp_size

    return RealSizes
