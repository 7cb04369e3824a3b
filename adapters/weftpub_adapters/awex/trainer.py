"""The trainer's side: what every rank holds, by AWEX's real resolver."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from weftpub.canonical import CanonicalTensor
from weftpub.errors import PlanError
from weftpub.plan import Shard, dtype_name
from weftpub.store import LayerStore, StoreLayout
from weftpub_adapters.awex.converters import MATRICES, SHAPES_ONLY, MatrixSource, MatrixTensors
from weftpub_adapters.awex.hf import hf_namespace
from weftpub_adapters.awex.seams import entered

__all__ = [
    "BUFFERS",
    "PublishedStore",
    "TrainerShards",
    "converter_settings",
    "meta_buffers",
    "store_matrices",
    "trainer_shards",
]

# Which of a layer's buffers a matrix lies in.
BUFFERS = {"fc1": "w13", "fc2": "w2"}


class PublishedStore(Protocol):
    """The part of `weftpub.store.ExpertStore` that is published."""

    @property
    def layout(self) -> StoreLayout: ...

    def canonical(self) -> Iterator[CanonicalTensor]: ...

    def buffers(self, layer: int) -> LayerStore: ...


@dataclass(frozen=True)
class TrainerShards:
    """What all trainer ranks hold.

    Attributes:
        metas: AWEX's ParameterMeta of every canonical tensor, shards of all ranks.
        world_size: number of trainer ranks.
        tied: whether the output layer is the embedding.
    """

    metas: list[Any]
    world_size: int
    tied: bool = False

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

    def without(self, names: Collection[str]) -> "TrainerShards":
        """The same, but for some tensors."""
        return replace(self, metas=[meta for meta in self.metas if meta.name not in names])

    def on(self, ranks: Collection[int]) -> "TrainerShards":
        """What some ranks hold, such as those of one host.

        Raises:
            PlanError: a tensor is not whole there.
        """
        return replace(self, metas=[_held_by(meta, frozenset(ranks)) for meta in self.metas])


def trainer_shards(model: Any, store: PublishedStore | None, hf_config: Mapping[str, Any]) -> TrainerShards:
    """Metadata of every trainer rank; collective over the default process group, once per layout.

    Needs no sealed generation and no memory of the parameters, which may be offloaded: shapes and dtypes come from the
    store's layout and from the parameters' own.

    Args:
        model: the Megatron model of this rank, attached or not.
        store: holds this rank's experts; None if the model's own BF16 parameters do.
        hf_config: the model's `config.json`.

    Raises:
        PlanError: AWEX names, cuts or types an expert's tensors otherwise than the store.
    """
    hf = hf_namespace(hf_config)
    matrices = None if store is None else store_matrices(store.layout, meta_buffers(store.layout))
    with entered():
        from awex.meta.train_meta_resolver import McoreParamMetaResolver

        engine = SimpleNamespace(model=model, engine_name="mcore", enable_debug_mode=False)
        resolver = McoreParamMetaResolver(engine, hf, converter_settings(hf, matrices) | {SHAPES_ONLY: True})
        metas = resolver.get_parameters_meta()
    made = TrainerShards(metas, torch.distributed.get_world_size(), hf.tie_word_embeddings)
    if store is not None:
        _check_shapes(made.shards, store.layout)
    return made


def converter_settings(hf: SimpleNamespace, matrices: MatrixSource | None) -> dict[str, Any]:
    """What AWEX's trainer side wants to know; attention is published split by name, so the engine's size is not
    used.
    """
    return {"hf_config": hf, "infer_atten_tp_size": 1, "router_dtype": "bf16", MATRICES: matrices}


def meta_buffers(layout: StoreLayout) -> dict[tuple[int, str], torch.Tensor]:
    """(layer, buffer) to a tensor without memory, of the shape and dtype that a store of this layout has."""
    return {
        (layer, name): torch.empty(shape, dtype=dtype, device="meta")
        for layer in layout.layers
        for name, (shape, dtype) in layout.buffer_shapes().items()
    }


def store_matrices(layout: StoreLayout, buffers: Mapping[tuple[int, str], torch.Tensor]) -> MatrixSource:
    """Matrices as views of a store's buffers, by (layer, local expert, projection)."""

    def source(layer: int, local: int, projection: str) -> MatrixTensors:
        name = BUFFERS[projection]
        if (layer, name) not in buffers or local >= len(layout.experts):
            raise PlanError(
                f"the model has expert {local} of layer {layer} on this rank, the store holds layers "
                f"{list(layout.layers)} with {len(layout.experts)} experts each"
            )
        scale = buffers.get((layer, f"{name}_scale"))
        return MatrixTensors(buffers[layer, name][local], None if scale is None else scale[local])

    return source


def _held_by(meta: Any, ranks: frozenset[int]) -> Any:
    """A ParameterMeta with the replicas that lie on some ranks."""
    replicas = [replica for replica in meta.replicas if ranks.issuperset(s.global_rank for s in replica.shards)]
    if not replicas:
        raise PlanError(
            f"{meta.name}: trainer ranks {sorted(ranks)} of one host do not hold all of it, and an engine takes "
            "weights from its own host; keep tensor and expert parallel groups within a host"
        )
    return replace(meta, shards=[shard for replica in replicas for shard in replica.shards], replicas=replicas)


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
