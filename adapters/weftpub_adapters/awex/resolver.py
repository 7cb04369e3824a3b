"""AWEX's engine-side resolver, run over described ranks, and two corrections of what it makes of real layouts."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from weftpub_adapters.awex.converters import EngineRules
from weftpub_adapters.awex.sharding import SHARDS

__all__ = ["DescribedRank", "resolve_engine"]


class DescribedRank(Protocol):
    """One rank, dressed for the resolver."""

    rules: EngineRules

    def context(self) -> dict[str, Any]: ...

    def model(self) -> Any: ...


def resolve_engine(ranks: Sequence[DescribedRank], hf: SimpleNamespace, shards: Mapping[str, int]) -> list[Any]:
    """AWEX's ParameterMeta of every canonical tensor of one engine; call it inside `seams.entered`.

    Args:
        ranks: of one engine.
        hf: the model's config.
        shards: canonical name to the number of ranks that split it.
    """
    from awex.meta.infer_meta_resolver import InferParamMetaResolver

    replicas = ranks[0].rules.kv_replicas

    class Resolver(InferParamMetaResolver):
        """Tells the sharding rule the number of shards, and merges replicated key/value heads."""

        def _get_sharding_info(self, name: str, rank_info: Any, param_meta: dict[str, Any]) -> Any:
            return super()._get_sharding_info(name, rank_info, {**param_meta, SHARDS: shards[name]})

        def _build_params_meta(self) -> list[Any]:
            # A tied head that the engine does not hold apart is the embedding, and is published as that.
            self._params_raw_meta = [_only(meta, shards) for meta in self._params_raw_meta]
            metas = super()._build_params_meta()
            if replicas > 1:
                for meta in metas:
                    if ".k_proj." in meta.name or ".v_proj." in meta.name:
                        _merge_replicas(meta, replicas)
            return metas

    return Resolver(_DescribedEngine(ranks, hf), convert_params=True).get_parameters_meta()


class _DescribedEngine:
    """Runs the resolver's task for every described rank, as a live engine would in its workers."""

    engine_name = "sglang"

    def __init__(self, ranks: Sequence[DescribedRank], hf: SimpleNamespace) -> None:
        self._ranks = ranks
        self.hf_config = hf
        self.config = ranks[0].rules

    def execute_task_in_model_worker(self, task: Any, **kwargs: Any) -> list[Any]:
        return [
            # every rank its own rules: the last rank of a vocabulary has fewer rows than the first
            task(**{**kwargs, "infer_engine_config": rank.rules}, model=rank.model(), model_context=rank.context())
            for rank in self._ranks
        ]


def _only(meta: dict[str, Any], names: Mapping[str, int]) -> dict[str, Any]:
    return {**meta, "params_meta": [parameter for parameter in meta["params_meta"] if parameter["name"] in names]}


def _merge_replicas(meta: Any, replicas: int) -> None:
    """Consecutive attention ranks hold the same head: AWEX counted each as rows of its own."""
    from awex.meta.weight_meta import ParameterReplicaMeta

    rows = meta.shards[0].shape[0]
    groups: dict[tuple[int, int], list[Any]] = {}
    for replica_number, replica in enumerate(meta.replicas):
        for shard in replica.shards:
            head, copy = divmod(shard.attn_tp_rank, replicas)
            shard.global_offset = (head * rows, *shard.global_offset[1:])
            shard.num_shards //= replicas
            groups.setdefault((replica_number, copy), []).append(shard)
    meta.replicas = [ParameterReplicaMeta(shards=groups[key]) for key in sorted(groups)]
    meta.global_shape = (meta.global_shape[0] // replicas, *meta.global_shape[1:])
    meta.global_numel //= replicas
