"""AWEX's engine-side resolver, run over described ranks, and two corrections of what it makes of real layouts."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from weftpub_adapters.awex.converters import EngineRules

__all__ = ["DescribedRank", "resolve_engine"]


class DescribedRank(Protocol):
    """One rank, dressed for the resolver."""

    rules: EngineRules

    def context(self) -> dict[str, Any]: ...

    def model(self) -> Any: ...


def resolve_engine(ranks: Sequence[DescribedRank], hf: SimpleNamespace) -> list[Any]:
    """AWEX's ParameterMeta of every canonical tensor of one engine; call it inside `seams.entered`."""
    from awex.meta.infer_meta_resolver import InferParamMetaResolver

    rules = ranks[0].rules

    class Resolver(InferParamMetaResolver):
        """Tells the sharding rule how many ranks share the vocabulary, and merges replicated key/value heads."""

        def _get_sharding_info(self, name: str, rank_info: Any, param_meta: dict[str, Any]) -> Any:
            shard = rules.vocabulary.get(name)
            shards = {} if shard is None else {"vocabulary_shards": shard["shards"]}
            return super()._get_sharding_info(name, rank_info, {**param_meta, **shards})

        def _build_params_meta(self) -> list[Any]:
            metas = super()._build_params_meta()
            if rules.kv_replicas > 1:
                for meta in metas:
                    if ".k_proj." in meta.name or ".v_proj." in meta.name:
                        _merge_replicas(meta, rules.kv_replicas)
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
