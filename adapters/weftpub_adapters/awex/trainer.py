"""The trainer's side: what every rank holds, by AWEX's real resolver, and the tensors themselves at each publish."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from weftpub.canonical import CanonicalTensor
from weftpub.errors import PlanError
from weftpub.masters import ExpertMatrix
from weftpub.plan import Shard, dtype_name
from weftpub.store import MatrixView, StoreLayout
from weftpub_adapters.awex.converters import MATRICES, MatrixSource, MatrixTensors
from weftpub_adapters.awex.hf import hf_namespace
from weftpub_adapters.awex.seams import ARCHITECTURE, entered

__all__ = ["PublishedStore", "TrainerShards", "canonical_sources", "trainer_shards"]


class PublishedStore(Protocol):
    """The part of `weftpub.store.ExpertStore` that is published."""

    @property
    def layout(self) -> StoreLayout: ...

    def matrix(self, matrix: ExpertMatrix) -> MatrixView: ...

    def canonical(self) -> Iterator[CanonicalTensor]: ...


@dataclass(frozen=True)
class TrainerShards:
    """What all trainer ranks hold.

    Attributes:
        metas: AWEX's ParameterMeta of every canonical tensor, shards of all ranks.
        world_size: number of trainer ranks.
    """

    metas: list[Any]
    world_size: int

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The same as plain data, in the planner's order."""
        return tuple(
            Shard(
                name=meta.name,
                dtype=dtype_name(meta.dtype),
                shape=tuple(shard.shape),
                global_shape=tuple(meta.global_shape),
                offset=tuple(shard.global_offset),
                rank=shard.global_rank,
            )
            for meta in sorted(self.metas, key=lambda meta: meta.name)
            for shard in meta.shards
        )


def trainer_shards(model: Any, store: PublishedStore, hf_config: Mapping[str, Any]) -> TrainerShards:
    """Metadata of every trainer rank; collective over the default process group, once per layout.

    Needs no sealed generation: shapes and dtypes come from the store's layout.

    Args:
        model: the Megatron model of this rank, attached or not.
        store: holds this rank's experts.
        hf_config: the model's `config.json`.

    Raises:
        PlanError: AWEX names, cuts or types an expert's tensors otherwise than the store.
    """
    hf = hf_namespace(hf_config)
    with entered():
        from awex.meta.train_meta_resolver import McoreParamMetaResolver

        engine = SimpleNamespace(model=model, engine_name="mcore", enable_debug_mode=False)
        resolver = McoreParamMetaResolver(engine, hf, _settings(hf, _meta_matrices(store.layout)))
        made = TrainerShards(resolver.get_parameters_meta(), torch.distributed.get_world_size())
    _check_shapes(made.shards, store.layout)
    return made


@torch.no_grad()
def canonical_sources(model: Any, store: PublishedStore, hf_config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """This rank's canonical tensors at this moment: take them anew for every publish.

    Experts are views of the store, everything else a view of its parameter or, for query, key and value rows, a tensor
    made from it.

    Args:
        model: the Megatron model of this rank.
        store: must hold a sealed generation.
        hf_config: the model's `config.json`.

    Raises:
        GenerationError: the store has nothing sealed. PlanError: AWEX gives an expert's name to other bytes than the
            store does.
    """
    hf = hf_namespace(hf_config)
    with entered():
        from awex.converter.mcore_converter import get_mcore_model_parameters
        from awex.models.registry import get_train_weights_converter
        from awex.sharding.mcore_sharding import get_mcore_rank_info

        converter = get_train_weights_converter(
            "mcore", ARCHITECTURE, hf, get_mcore_rank_info(), _settings(hf, _live_matrices(store)), model.config
        )
        sources: dict[str, torch.Tensor] = {}
        for name, parameter in get_mcore_model_parameters(model).items():
            sources.update((hf_name, tensor.detach()) for hf_name, tensor in converter.convert_param(name, parameter))
    if hf.tie_word_embeddings:
        sources.setdefault("lm_head.weight", sources["model.embed_tokens.weight"])
    _check_places(sources, store)
    return sources


def _check_shapes(shards: Sequence[Shard], layout: StoreLayout) -> None:
    """The store's canonical names are its own; AWEX's must be the same, for every expert held here."""
    rank = torch.distributed.get_rank()
    found = {shard.name: (shard.shape, shard.dtype) for shard in shards if shard.rank == rank}
    wrong = [
        f"{entry.name} (store: {dtype_name(entry.dtype)} {list(entry.shape)}, AWEX: {found.get(entry.name)})"
        for entry in layout.entries()
        if found.get(entry.name) != (entry.shape, dtype_name(entry.dtype))
    ]
    if wrong:
        raise PlanError(f"AWEX and the store disagree about {len(wrong)} expert tensors: {', '.join(wrong[:4])}")


def _check_places(sources: Mapping[str, torch.Tensor], store: PublishedStore) -> None:
    """Gate and up rows have one shape: only their places tell whether a converter took one for the other."""
    wrong = [
        item.name
        for item in store.canonical()
        if item.name not in sources
        or sources[item.name].data_ptr() != item.tensor.data_ptr()
        or sources[item.name].shape != item.tensor.shape
    ]
    if wrong:
        raise PlanError(f"AWEX gives {len(wrong)} names of experts to other bytes than the store: {wrong[:4]}")


def _settings(hf: SimpleNamespace, matrices: MatrixSource) -> dict[str, Any]:
    """What AWEX's trainer side wants to know; attention is published split by name, so the engine's size is not
    used.
    """
    return {"hf_config": hf, "infer_atten_tp_size": 1, "router_dtype": "bf16", MATRICES: matrices}


def _meta_matrices(layout: StoreLayout) -> MatrixSource:
    """Tensors without memory, of the shapes and dtypes that the store publishes."""
    shapes = layout.buffer_shapes()

    def source(layer: int, local: int, projection: str) -> MatrixTensors:
        name = {"fc1": "w13", "fc2": "w2"}[projection]
        made = [
            torch.empty(shapes[key][0][1:], dtype=shapes[key][1], device="meta") if key in shapes else None
            for key in (name, f"{name}_scale")
        ]
        assert made[0] is not None, f"{name}: every layout publishes its weights"
        return MatrixTensors(made[0], made[1])

    return source


def _live_matrices(store: PublishedStore) -> Callable[[int, int, str], MatrixTensors]:
    experts = store.layout.experts

    def source(layer: int, local: int, projection: Any) -> MatrixTensors:
        view = store.matrix(ExpertMatrix(layer, experts[local], projection))
        return MatrixTensors(view.w, view.scale)

    return source
