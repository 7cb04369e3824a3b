"""AWEX's plan, as this project's: checked, plain, and free of AWEX.

AWEX's builder matches the two sides and cuts the moves; it checks names, not shapes or dtypes, and leaves holes where
sizes do not divide. So its own metadata check runs first, and `weftpub.plan.check_plan` proves the result.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from weftpub.errors import PlanError
from weftpub.plan import Move, Plan, check_plan, dtype_name, torch_dtype
from weftpub.receive import EngineDescription
from weftpub_adapters.awex.engine import EngineShards, engine_shards
from weftpub_adapters.awex.seams import entered
from weftpub_adapters.awex.trainer import PublishedStore, TrainerShards, trainer_shards

__all__ = ["build_plan", "plan_publish"]


def plan_publish(
    model: Any, store: PublishedStore, hf_config: Mapping[str, Any], descriptions: Sequence[EngineDescription]
) -> Plan:
    """Plan from a trainer's live model and the engines' descriptions; collective over the trainer's ranks."""
    return build_plan(trainer_shards(model, store, hf_config), engine_shards(descriptions))


def build_plan(trainer: TrainerShards, engine: EngineShards) -> Plan:
    """Join the two sides by AWEX's `TransferPlanBuilder`.

    Raises:
        PlanError: names, shapes or dtypes disagree, an element would be written not at all or twice, or a block or its
            scale would be split.
    """
    receivers = engine.world_size * engine.engines
    with entered():
        from awex.transfer.transfer_plan import TransferPlanBuilder
        from awex.util.common import check_train_infer_params_meta

        try:
            check_train_infer_params_meta(trainer.metas, engine.metas, raise_exception=True, strict_key_match=True)
            builder = TransferPlanBuilder(receivers, trainer.world_size, engine.engines, strict_param_key_match=True)
            operations = builder.build_weights_mapping_operations(engine.metas, trainer.metas)
        except (ValueError, AssertionError) as error:
            raise PlanError(f"AWEX cannot join trainer and engine: {error}") from error
    plan = Plan(
        sources=trainer.shards,
        destinations=engine.destinations,
        moves=tuple(_move(operation, receivers) for operation in operations),
        layouts={description.rank: description.layout_digest for description in engine.descriptions},
    )
    check_plan(
        plan,
        parameters={description.rank: description.layout() for description in engine.descriptions},
        exempt={description.rank: description.exempt for description in engine.descriptions},
    )
    return plan


def _move(operation: Any, receivers: int) -> Move:
    """One of AWEX's operations; it numbers receivers first and trainer ranks after them."""
    shape = tuple(operation.overlap_shape)
    dtype = dtype_name(operation.send_shard_meta.dtype)
    return Move(
        name=operation.send_shard_meta.name,
        send_rank=operation.send_rank - receivers,
        send_start=tuple(operation.send_offset),
        recv_rank=operation.recv_rank,
        recv_start=tuple(operation.recv_offset),
        shape=shape,
        dtype=dtype,
        nbytes=math.prod(shape) * torch_dtype(dtype).itemsize,
    )
