"""The engine's side, planned without the engine: AWEX's real resolver and converter over meta tensors made from
descriptions.

AWEX's SGLang converter cuts canonical tensors out of an engine's parameters by `narrow` and indexing. Run over tensors
without memory that have the engine's shapes and strides, it yields for each canonical tensor exactly where it lives:
storage offset and strides. So AWEX never enters the engine's process.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from weftpub.errors import ConfigError, PlanError
from weftpub.plan import Destination, ParameterSpec, Shard, ViewSpec, dtype_name, require_legal_tp, torch_dtype
from weftpub.receive import EngineDescription
from weftpub_adapters.awex.converters import EngineRules
from weftpub_adapters.awex.hf import hf_namespace
from weftpub_adapters.awex.resolver import resolve_engine
from weftpub_adapters.awex.seams import base_of, entered

__all__ = ["EngineKind", "EngineShards", "engine_shards"]

_PARALLEL = (
    "world_size", "rank", "tp_size", "tp_rank", "attn_tp_size", "attn_tp_rank", "attn_dp_size", "attn_dp_rank",
    "moe_ep_size", "moe_ep_rank", "moe_tp_size", "moe_tp_rank",
)  # fmt: skip
# Settings of a description that engines of one plan have in common.
_SHARED = ("format", "parallel", "w13_order", "kept", "vocabulary", "linears", "hf_config")


@dataclass(frozen=True)
class EngineKind:
    """Engines whose ranks hold the same tensors in the same places.

    Attributes:
        metas: AWEX's ParameterMeta of every canonical tensor of one engine, shards of all its ranks.
        engines: numbers of the engines that are of this kind.
    """

    metas: list[Any]
    engines: tuple[int, ...]


@dataclass(frozen=True)
class EngineShards:
    """What the ranks of one or several engines serve.

    Attributes:
        kinds: the engines, in groups that are alike. Engines that balance their experts apart are a kind each.
        world_size: ranks of one engine.
        descriptions: of every rank, ordered by receiver rank.
        destinations: every shard of every receiver rank with its view, ordered by rank and name; several of one name,
            if a rank holds an expert more than once, in the order of its slots.
    """

    kinds: tuple[EngineKind, ...]
    world_size: int
    descriptions: tuple[EngineDescription, ...]
    destinations: tuple[Destination, ...]

    @property
    def engines(self) -> int:
        """Number of engines."""
        return len(self.descriptions) // self.world_size


def engine_shards(descriptions: Sequence[EngineDescription]) -> EngineShards:
    """Work out what every rank serves and where it lies.

    Args:
        descriptions: of every rank of every engine, as the SGLang adapter makes them. Several engines must be alike, up
            to where their experts are.

    Raises:
        ConfigError: ranks are missing or repeated, engines differ, or a description is not of a supported model.
        PlanError: sizes cut an expert inside a 128-block, or a canonical tensor is not a view of a parameter.
    """
    ordered = tuple(sorted(descriptions, key=lambda description: description.rank))
    world = _check_ranks(ordered)
    hf = hf_namespace(_mapping(ordered[0], "hf_config"))
    _check_blocks(ordered[0], hf)
    kinds: list[EngineKind] = []
    destinations: list[Destination] = []
    with entered():
        for engines in _alike(ordered, world):
            first = engines[0] * world
            ranks = [_RankModel(description, hf) for description in ordered[first : first + world]]
            cuts = [list(rank.cuts()) for rank in ranks]
            shards = {cut.name: cut.shards for rank_cuts in cuts for cut in rank_cuts}
            kind = EngineKind(resolve_engine(ranks, hf, shards), engines)
            kinds.append(kind)
            destinations += _destinations(kind, cuts, world)
    destinations.sort(key=lambda destination: (destination.shard.rank, destination.shard.name))
    return EngineShards(tuple(kinds), world, ordered, tuple(destinations))


@dataclass(frozen=True)
class _Cut:
    """One canonical tensor in one rank's parameters, and how many ranks split it."""

    name: str
    view: ViewSpec
    shards: int


class _RankModel:
    """One described rank, dressed as the model and the worker context that AWEX's resolver asks for."""

    def __init__(self, description: EngineDescription, hf: SimpleNamespace) -> None:
        self.description = description
        self.hf = hf
        parallel = _mapping(description, "parallel")
        self.parallel: dict[str, int] = {name: int(parallel[name]) for name in _PARALLEL}
        size = self.parallel
        self.linears = _mapping(description, "linears")
        self.rules = EngineRules(
            tp_size=size["tp_size"],
            ep_size=size["moe_ep_size"],
            dp_size=size["attn_dp_size"],
            enable_dp_attention=size["attn_dp_size"] > 1,
            vocabulary=_mapping(description, "vocabulary"),
            slots=_mapping(description, "experts"),
            up_first=_w13_order(description) == "up",
            kv_replicas=max(1, size["attn_tp_size"] // hf.num_key_value_heads),
        )
        kept = set(description.settings.get("kept") or ())
        self.parameters = {spec.name: _meta_tensor(spec) for spec in description.parameters if spec.name not in kept}

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
        (name,) = self.hf.architectures
        kind = type(name, (), {"named_parameters": lambda _: iter(self.parameters.items()), "config": self.hf})
        return kind()

    def cuts(self) -> Iterator[_Cut]:
        """Everything that AWEX's converter cuts out of this rank's parameters, in its order.

        Raises:
            PlanError: the converter made a new tensor (the bytes would never reach the parameter), or one name twice
                that is no expert.
        """
        from awex.models.registry import get_infer_weights_converter
        from awex.sharding.sglang_sharding import get_sglang_rank_info

        rank_info = get_sglang_rank_info(self.context(), 0)
        (name,) = self.hf.architectures
        converter = get_infer_weights_converter("sglang", name, self.hf, rank_info, self.rules)
        seen: set[str] = set()
        for name, parameter in self.parameters.items():
            cuts: list[_Cut] = []
            for canonical, view in converter.convert_param(name, parameter):
                if view.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
                    raise PlanError(
                        f"{canonical}: AWEX's converter copies it out of {name} instead of viewing it, so received "
                        "bytes would not reach the engine; this layout is not supported"
                    )
                if canonical in seen:
                    raise PlanError(f"{canonical}: two parameters of receiver rank {self.description.rank} claim it")
                cuts.append(_Cut(canonical, _view_spec(name, view, parameter), self._shards(name)))
            _check_order(cuts, self.rules.up_first)
            seen.update(cut.name for cut in cuts)
            yield from cuts

    def _shards(self, parameter: str) -> int:
        """Number of ranks that split a parameter, by what its module says of itself."""
        if parameter in self.rules.vocabulary:
            return self.rules.vocabulary[parameter]["shards"]
        module, _, last = parameter.rpartition(".")
        if module in self.rules.slots:
            return self.parallel["moe_tp_size"]
        if last in ("A_log", "dt_bias"):  # of a gated delta net, split as the projection that feeds it
            module = f"{module}.in_proj_ba"
        return int(self.linears.get(module, 1))


def _destinations(kind: EngineKind, cuts: Sequence[Sequence[_Cut]], world: int) -> Iterator[Destination]:
    """Join AWEX's shards with their places. Both come in the order of the rank's parameters, so the n-th shard of a
    name on a rank lies in that name's n-th cut."""
    places: dict[tuple[int, str], list[ViewSpec]] = {}
    for rank, rank_cuts in enumerate(cuts):
        for cut in rank_cuts:
            places.setdefault((rank, cut.name), []).append(cut.view)
    for meta in kind.metas:
        taken = dict.fromkeys(range(world), 0)
        for shard in meta.shards:
            view = places[shard.global_rank, meta.name][taken[shard.global_rank]]
            taken[shard.global_rank] += 1
            for engine in kind.engines:
                yield _destination(meta, shard, view, engine * world + shard.global_rank)


def _destination(meta: Any, shard: Any, view: ViewSpec, rank: int) -> Destination:
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


def _alike(descriptions: tuple[EngineDescription, ...], world: int) -> list[tuple[int, ...]]:
    """Numbers of the engines in groups whose ranks have equal layouts and placements."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for engine in range(len(descriptions) // world):
        ranks = descriptions[engine * world : (engine + 1) * world]
        groups.setdefault(tuple(rank.layout_digest for rank in ranks), []).append(engine)
    return [tuple(engines) for engines in groups.values()]


def _check_order(cuts: Sequence[_Cut], up_first: bool) -> None:
    """Gate and up rows have one shape: a converter that takes one for the other would go unnoticed. They come in pairs,
    slot by slot."""
    gates = [cut for cut in cuts if ".experts." in cut.name and ".gate_proj." in cut.name]
    ups = [cut for cut in cuts if ".experts." in cut.name and ".up_proj." in cut.name]
    for number, gate in enumerate(gates):
        up = ups[number] if number < len(ups) else None
        paired = up is not None and up.name == gate.name.replace(".gate_proj.", ".up_proj.")
        if up is None or not paired or (up.view.offset < gate.view.offset) != up_first:
            place = None if up is None else f"element {up.view.offset}"
            raise PlanError(
                f"{gate.name}: AWEX's converter finds it at {gate.view.param} element {gate.view.offset} and its up "
                f"rows at {place}, but the engine keeps {'up' if up_first else 'gate'} rows first"
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
            "weftpub_adapters.sglang.describe_live"
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
    """World size of one engine, having checked that receiver ranks count through engines of one layout."""
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
        apart = _apart(description, first)
        if apart:
            raise ConfigError(
                f"{description.engine} rank {description.rank} is not laid out like {first.engine} rank {first.rank}: "
                f"they differ in {', '.join(apart)}; make one plan for each kind of engine"
            )
    base_of((_mapping(descriptions[0], "hf_config").get("architectures") or [None])[0])
    return world


def _apart(one: EngineDescription, other: EngineDescription) -> list[str]:
    """Where two ranks differ in what engines of one plan must have in common: all that a plan is made of, but where
    their experts are.
    """
    found = ["world_size"] if one.world_size != other.world_size else []
    if one.parameters != other.parameters:
        found.append("parameters")
    return found + [key for key in _SHARED if one.settings.get(key) != other.settings.get(key)]


def _check_blocks(description: EngineDescription, hf: SimpleNamespace) -> None:
    if description.settings.get("format") == "fp8":
        tp = int(_mapping(description, "parallel")["moe_tp_size"])
        require_legal_tp(hf.moe_intermediate_size, tp, experts=hf.num_experts, name="moe_intermediate_size")
