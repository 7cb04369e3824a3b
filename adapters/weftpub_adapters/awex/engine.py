"""The engine's side, planned without the engine: AWEX's real resolver and converter over meta tensors made from
descriptions.

AWEX's SGLang converter cuts canonical tensors out of an engine's parameters by `narrow` and indexing. Run over tensors
without memory that have the engine's shapes and strides, it yields for each canonical tensor exactly where it lives:
storage offset and strides. So AWEX never enters the engine's process.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from weftpub.errors import ConfigError, PlanError
from weftpub.plan import Destination, ParameterSpec, Shard, ViewSpec, dtype_name, require_legal_tp, torch_dtype
from weftpub.receive import EngineDescription
from weftpub_adapters.awex.converters import EngineRules
from weftpub_adapters.awex.hf import hf_namespace
from weftpub_adapters.awex.resolver import resolve_engine
from weftpub_adapters.awex.seams import ARCHITECTURE, entered

__all__ = ["EngineShards", "engine_shards"]

_PARALLEL = (
    "world_size", "rank", "tp_size", "tp_rank", "attn_tp_size", "attn_tp_rank", "attn_dp_size", "attn_dp_rank",
    "moe_ep_size", "moe_ep_rank", "moe_tp_size", "moe_tp_rank",
)  # fmt: skip


@dataclass(frozen=True)
class EngineShards:
    """What the ranks of one or several equal engines serve.

    Attributes:
        metas: AWEX's ParameterMeta of every canonical tensor of one engine, shards of all its ranks.
        world_size: ranks of one engine.
        descriptions: of every rank, ordered by receiver rank.
        views: receiver rank to canonical name to the place in that rank's parameters.
    """

    metas: list[Any]
    world_size: int
    descriptions: tuple[EngineDescription, ...]
    views: Mapping[int, Mapping[str, ViewSpec]]

    @property
    def engines(self) -> int:
        """Number of engines."""
        return len(self.descriptions) // self.world_size

    @cached_property
    def destinations(self) -> tuple[Destination, ...]:
        """Every shard of every receiver rank with its view, ordered by rank and name."""
        found = [
            self._destination(meta, shard, engine * self.world_size + shard.global_rank)
            for engine in range(self.engines)
            for meta in self.metas
            for shard in meta.shards
        ]
        return tuple(sorted(found, key=lambda destination: (destination.shard.rank, destination.shard.name)))

    def _destination(self, meta: Any, shard: Any, rank: int) -> Destination:
        view = self.views[rank][meta.name]
        planned = Shard(
            name=meta.name,
            dtype=dtype_name(shard.dtype),
            shape=tuple(shard.shape),
            global_shape=tuple(meta.global_shape),
            offset=tuple(shard.global_offset),
            rank=rank,
        )
        if view.shape != planned.shape or view.dtype != planned.dtype:
            raise PlanError(
                f"{meta.name} on receiver rank {rank}: planned as {planned.dtype} {list(planned.shape)}, its view is "
                f"{view.dtype} {list(view.shape)}"
            )
        return Destination(planned, view)


def engine_shards(descriptions: Sequence[EngineDescription]) -> EngineShards:
    """Work out what every rank serves and where it lies.

    Args:
        descriptions: of every rank of every engine, as the SGLang adapter makes them. Several engines must be alike.

    Raises:
        ConfigError: ranks are missing or repeated, engines differ, or a description is not of a served Qwen3-MoE.
        PlanError: sizes cut an expert inside a 128-block, or a canonical tensor is not a view of a parameter.
    """
    ordered = tuple(sorted(descriptions, key=lambda description: description.rank))
    world = _check_ranks(ordered)
    hf = hf_namespace(_mapping(ordered[0], "hf_config"))
    _check_blocks(ordered[0], hf)
    with entered():
        ranks = [_RankModel(description, hf) for description in ordered]
        metas = resolve_engine(ranks[:world], hf)
        views = {rank.description.rank: dict(rank.views()) for rank in ranks}
        for rank in ranks:
            _check_order(views[rank.description.rank], rank.rules.up_first)
    return EngineShards(metas, world, ordered, views)


class _RankModel:
    """One described rank, dressed as the model and the worker context that AWEX's resolver asks for."""

    def __init__(self, description: EngineDescription, hf: SimpleNamespace) -> None:
        self.description = description
        self.hf = hf
        parallel = _mapping(description, "parallel")
        self.parallel: dict[str, int] = {name: int(parallel[name]) for name in _PARALLEL}
        size = self.parallel
        self.rules = EngineRules(
            tp_size=size["tp_size"],
            ep_size=size["moe_ep_size"],
            dp_size=size["attn_dp_size"],
            enable_dp_attention=size["attn_dp_size"] > 1,
            vocabulary=_mapping(description, "vocabulary"),
            up_first=_w13_order(description) == "up",
            kv_replicas=max(1, size["attn_tp_size"] // hf.num_key_value_heads),
        )
        buffers = set(description.settings.get("buffers") or ())
        self.parameters = {spec.name: _meta_tensor(spec) for spec in description.parameters if spec.name not in buffers}

    def context(self) -> dict[str, Any]:
        """The worker context, with the sizes that the engine really uses."""
        size = self.parallel
        return {
            "scheduler": SimpleNamespace(server_args=self.rules),
            "tp_size": size["tp_size"],
            "tp_rank": size["tp_rank"],
            "pp_size": 1,
            "pp_rank": 0,
            "dp_size": size["attn_dp_size"],
            "attn_tp_size": size["attn_tp_size"],
            "attn_tp_rank": size["attn_tp_rank"],
            "attn_dp_rank": size["attn_dp_rank"],
            "world_size": size["world_size"],
            "global_rank": size["rank"],
            "local_rank": size["rank"],
            "cp_size": 1,
            "cp_rank": 0,
        }

    def model(self) -> Any:
        """An object of the registered class name with the parameters and the config."""
        kind = type(ARCHITECTURE, (), {"named_parameters": lambda _: iter(self.parameters.items()), "config": self.hf})
        return kind()

    def views(self) -> Iterator[tuple[str, ViewSpec]]:
        """Canonical name and place of everything that AWEX's converter cuts out of this rank's parameters.

        Raises:
            PlanError: the converter made a new tensor (the bytes would never reach the parameter), or one name twice.
        """
        from awex.models.registry import get_infer_weights_converter
        from awex.sharding.sglang_sharding import get_sglang_rank_info

        rank_info = get_sglang_rank_info(self.context(), 0)
        converter = get_infer_weights_converter("sglang", ARCHITECTURE, self.hf, rank_info, self.rules)
        seen: set[str] = set()
        for name, parameter in self.parameters.items():
            for canonical, view in converter.convert_param(name, parameter):
                if view.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
                    raise PlanError(
                        f"{canonical}: AWEX's converter copies it out of {name} instead of viewing it, so received "
                        "bytes would not reach the engine; this layout is not supported"
                    )
                if canonical in seen:
                    raise PlanError(f"{canonical}: two parameters of receiver rank {self.description.rank} claim it")
                seen.add(canonical)
                yield canonical, _view_spec(name, view, parameter)


def _check_order(views: Mapping[str, ViewSpec], up_first: bool) -> None:
    """Gate and up rows have one shape, so nothing else would notice that a converter took one for the other."""
    for name, gate in views.items():
        if ".experts." not in name or ".gate_proj." not in name:
            continue
        up = views.get(name.replace(".gate_proj.", ".up_proj."))
        if up is None or up.param != gate.param or (up.offset < gate.offset) != up_first:
            place = None if up is None else f"{up.param} element {up.offset}"
            raise PlanError(
                f"{name}: AWEX's converter finds it at {gate.param} element {gate.offset} and its up rows at {place}, "
                f"but the engine keeps {'up' if up_first else 'gate'} rows first"
            )


def _view_spec(name: str, view: torch.Tensor, parameter: torch.Tensor) -> ViewSpec:
    return ViewSpec(
        param=name,
        offset=view.storage_offset() - parameter.storage_offset(),
        shape=tuple(view.shape),
        stride=tuple(view.stride()),
        dtype=dtype_name(view.dtype),
    )


def _meta_tensor(spec: ParameterSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=torch_dtype(spec.dtype), device="meta")


def _mapping(description: EngineDescription, key: str) -> dict[str, Any]:
    value = description.settings.get(key)
    if not isinstance(value, dict):
        raise ConfigError(
            f"{description.engine} rank {description.rank}: its description has no {key}; make it with "
            "weftpub_adapters.sglang.describe_model"
        )
    return value


def _w13_order(description: EngineDescription) -> str:
    order = description.settings.get("w13_order")
    if order not in ("gate", "up"):
        raise ConfigError(
            f"{description.engine} rank {description.rank}: w13_order is {order!r}, expected 'gate' or 'up' first"
        )
    return str(order)


def _check_ranks(descriptions: tuple[EngineDescription, ...]) -> int:
    """World size of one engine, having checked that receiver ranks count through equal engines."""
    if not descriptions:
        raise ConfigError("no engine rank was described; describe every rank before planning")
    world = descriptions[0].world_size
    found = [description.rank for description in descriptions]
    if found != list(range(len(found))) or len(found) % world:
        raise ConfigError(f"receiver ranks {found} do not count through whole engines of {world} ranks each from 0")
    for description in descriptions:
        first = descriptions[description.rank % world]
        inside = _mapping(description, "parallel").get("rank")
        if inside != description.rank % world:
            raise ConfigError(
                f"receiver rank {description.rank} is rank {inside} of its engine, expected {description.rank % world}"
            )
        alike = (first.layout_digest, first.settings) == (description.layout_digest, description.settings)
        if description.world_size != world or not alike:
            raise ConfigError(
                f"{description.engine} rank {description.rank} is not laid out like {first.engine} rank {first.rank}; "
                "make one plan for each kind of engine"
            )
    return world


def _check_blocks(description: EngineDescription, hf: SimpleNamespace) -> None:
    if description.settings.get("format") == "fp8":
        tp = int(_mapping(description, "parallel")["moe_tp_size"])
        require_legal_tp(hf.moe_intermediate_size, tp, experts=hf.num_experts, name="moe_intermediate_size")
