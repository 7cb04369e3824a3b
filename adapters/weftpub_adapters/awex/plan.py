"""AWEX's plan, as this project's: checked, plain, and free of AWEX.

AWEX's builder matches the two sides and cuts the moves; it checks names, not shapes or dtypes, and leaves holes where
sizes do not divide. So its own metadata check runs first, and `weftpub.plan.check_plan` proves the result.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weftpub.errors import PlanError
from weftpub.plan import Move, Plan, check_plan, dtype_name, torch_dtype
from weftpub.receive import EngineDescription
from weftpub_adapters.awex.engine import EngineKind, EngineShards, engine_shards
from weftpub_adapters.awex.seams import entered
from weftpub_adapters.awex.trainer import PublishedStore, TrainerShards, trainer_shards

__all__ = ["build_plan", "plan_is_current", "plan_publish"]

_HEAD, _MTP = "lm_head.weight", "mtp."


def plan_publish(
    model: Any,
    store: PublishedStore,
    hf_config: Mapping[str, Any],
    descriptions: Sequence[EngineDescription],
    hosts: Sequence[Collection[int]] | None = None,
) -> Plan:
    """Plan from a trainer's live model and the engines' descriptions; collective over the trainer's ranks. `hosts`: see
    `build_plan`.
    """
    return build_plan(trainer_shards(model, store, hf_config), engine_shards(descriptions), hosts)


def plan_is_current(plan: Plan, descriptions: Sequence[EngineDescription]) -> bool:
    """Whether `plan` was made for the layouts and placements that the engines describe now.

    Ask before each publish to an engine that balances its experts: after a move `plan_publish` makes another plan.
    """
    return plan.layouts == {description.rank: description.layout_digest for description in descriptions}


def build_plan(trainer: TrainerShards, engine: EngineShards, hosts: Sequence[Collection[int]] | None = None) -> Plan:
    """Join the two sides by AWEX's `TransferPlanBuilder`.

    Args:
        hosts: for each engine, in their order, the trainer ranks that may send to it: those of its own host, where no
            transport reaches another. None: all of them may.

    Raises:
        PlanError: names, shapes or dtypes disagree, an element would be written not at all or twice, a block or its
            scale would be split, or the ranks of a host do not hold everything that its engine serves.
    """
    if hosts is not None and len(hosts) != engine.engines:
        raise PlanError(f"hosts: expected the trainer ranks of {engine.engines} engines' hosts, found {len(hosts)}")
    served = {destination.shard.name for destination in engine.destinations}
    # A tied head that engines do not hold apart is the embedding: it is published once. Multi-token prediction is
    # published where engines have a draft model.
    drafted = any(name.startswith(_MTP) for name in served)
    needless = {
        meta.name
        for meta in trainer.metas
        if (meta.name == _HEAD and trainer.tied and _HEAD not in served) or (meta.name.startswith(_MTP) and not drafted)
    }
    published = trainer.without(needless) if needless else trainer
    with entered():
        moves = tuple(
            move
            for senders, kind in _pairs(published, engine.kinds, hosts)
            for move in _moves(senders, kind, engine.world_size)
        )
    plan = Plan(
        sources=published.shards,
        destinations=engine.destinations,
        moves=moves,
        layouts={description.rank: description.layout_digest for description in engine.descriptions},
    )
    check_plan(
        plan,
        parameters={description.rank: description.layout() for description in engine.descriptions},
        exempt={description.rank: description.exempt for description in engine.descriptions},
    )
    return plan


def _pairs(
    trainer: TrainerShards, kinds: Sequence[EngineKind], hosts: Sequence[Collection[int]] | None
) -> Iterator[tuple[TrainerShards, EngineKind]]:
    """Who sends to whom: everybody to all engines of a kind, or each host's ranks to its engine."""
    for kind in kinds:
        if hosts is None:
            yield trainer, kind
        else:
            yield from ((trainer.on(hosts[engine]), replace(kind, engines=(engine,))) for engine in kind.engines)


def _moves(trainer: TrainerShards, kind: EngineKind, world: int) -> Iterator[Move]:
    """AWEX's operations from the trainer to all engines of one kind."""
    from awex.transfer.transfer_plan import TransferPlanBuilder
    from awex.util.common import check_train_infer_params_meta

    receivers = world * len(kind.engines)
    try:
        check_train_infer_params_meta(trainer.metas, kind.metas, raise_exception=True, strict_key_match=True)
        builder = TransferPlanBuilder(receivers, trainer.world_size, len(kind.engines), strict_param_key_match=True)
        operations = builder.build_weights_mapping_operations(kind.metas, trainer.metas)
    except (ValueError, AssertionError) as error:
        raise PlanError(f"AWEX cannot join trainer and engine: {error}") from error
    replicas = _replicas(kind)
    for operation in operations:
        engine, rank = divmod(operation.recv_rank, world)
        yield _move(
            operation,
            send_rank=operation.send_rank - receivers,
            recv_rank=kind.engines[engine] * world + rank,
            replica=replicas[id(operation.recv_shard_meta)],
        )


def _replicas(kind: EngineKind) -> dict[int, int]:
    """Shard object to its number among the shards of its name on its rank."""
    numbers: dict[int, int] = {}
    for meta in kind.metas:
        seen: dict[int, int] = {}
        for shard in meta.shards:
            numbers[id(shard)] = seen.setdefault(shard.global_rank, 0)
            seen[shard.global_rank] += 1
    return numbers


def _move(operation: Any, *, send_rank: int, recv_rank: int, replica: int) -> Move:
    """One of AWEX's operations, in the numbering of senders and receivers apart."""
    shape = tuple(operation.overlap_shape)
    dtype = dtype_name(operation.send_shard_meta.dtype)
    return Move(
        name=operation.send_shard_meta.name,
        send_rank=send_rank,
        send_start=tuple(operation.send_offset),
        recv_rank=recv_rank,
        recv_start=tuple(operation.recv_offset),
        shape=shape,
        dtype=dtype,
        nbytes=math.prod(shape) * torch_dtype(dtype).itemsize,
        replica=replica,
    )
