"""Where each canonical tensor lies in the trainer's memory: worked out once by AWEX's converter, bound at each publish
without it.

A recipe says in which buffer (a store's, or a parameter) a tensor lies and how it is strided there. Converters also
move rows (query, key and value of a fused projection) or change a dtype; such a tensor is made anew at each binding,
into memory that stays. Both kinds of recipe are found by running AWEX's converter on tensors that show what it does:
tensors without memory for views, numbered rows for the rest. So thousands of experts cost a publish a look at a few
hundred pointers.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from weftpub.errors import PlanError
from weftpub.plan import ViewSpec, dtype_name
from weftpub.plan.views import listing
from weftpub.publisher import SourceBuffers
from weftpub.store import MatrixView, StoreLayout
from weftpub_adapters.awex.hf import hf_namespace
from weftpub_adapters.awex.seams import entered
from weftpub_adapters.awex.trainer import BUFFERS, PublishedStore, converter_settings, meta_buffers, store_matrices

__all__ = ["SourceMapping", "canonical_sources"]

_STORE = "store."  # of the names of a store's buffers
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class _Made:
    """A tensor that is made from a parameter: some of its rows in some order, plus a constant, in some dtype."""

    param: str
    rows: torch.Tensor
    shift: float
    dtype: torch.dtype
    shape: tuple[int, ...]


class SourceMapping:
    """This rank's canonical tensors, as places in its memory.

    Args:
        model: the Megatron model of this rank, attached or not.
        store: holds this rank's experts; None if the model's own BF16 parameters do. Nothing of it is read until a
            binding.
        hf_config: the model's `config.json`.
        names: keep these only, such as those of a plan's sources.

    Raises:
        PlanError: AWEX gives an expert's name to other bytes than the store does, or makes a tensor in a way that is
            neither a view nor a choice of rows.
    """

    def __init__(
        self,
        model: Any,
        store: PublishedStore | None,
        hf_config: Mapping[str, Any],
        *,
        names: Iterable[str] | None = None,
    ) -> None:
        self._model = model
        self._store = store
        self._layouts: dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}
        self._views: dict[str, ViewSpec] = {}
        self._made: dict[str, _Made] = {}
        self._memory: dict[str, torch.Tensor] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._bound: dict[str, int] = {}
        self._record(hf_config)
        if names is not None:
            self._keep(set(names))
        if store is not None:
            self._check_places(store.layout, None if names is None else set(names))

    @property
    def views(self) -> Mapping[str, ViewSpec]:
        """Canonical name to its place in a buffer; the same object at every publish."""
        return self._views

    @torch.no_grad()
    def buffers(self, *, in_place: bool = False, keep: bool = False) -> SourceBuffers:
        """The buffers as they are at this moment, for `Publisher.publish`; `in_place` and `keep` as there.

        Raises:
            GenerationError: the store has nothing sealed. PlanError: a buffer has no memory now, or another layout than
                when the mapping was made.
        """
        live = self._checked()
        for name, made in self._made.items():
            live[name] = self._remake(name, made, live[made.param])
        return SourceBuffers({name: live[name] for name in self._needed}, self._views, in_place, keep)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The same as one tensor per canonical name. Views whose buffer did not move are those of the last call.

        Raises:
            GenerationError, PlanError: as `buffers`.
        """
        buffers = self.buffers().buffers
        moved = {name for name, buffer in buffers.items() if self._bound.get(name) != buffer.data_ptr()}
        for name, view in self._views.items():
            if view.param in moved:
                buffer = buffers[view.param]
                self._tensors[name] = buffer.as_strided(view.shape, view.stride, buffer.storage_offset() + view.offset)
        self._bound = {name: buffer.data_ptr() for name, buffer in buffers.items()}
        return dict(self._tensors)

    @torch.no_grad()
    def one_by_one(self, *, copied: bool = False) -> Mapping[str, torch.Tensor]:
        """The same, each tensor made when it is asked for and not kept: for a consumer that copies one after the other,
        which then never has more of them than those that it holds itself. Good until something of the trainer moves.

        Args:
            copied: give nothing but memory of its own, not even of what could be viewed.

        Raises:
            GenerationError, PlanError: as `buffers`.
        """
        return _OneByOne(self._views, self._made, self._checked(), copied)

    def release(self) -> None:
        """Free the memory of tensors that are made, until the next binding; views taken before keep theirs alive."""
        self._memory.clear()
        self._tensors.clear()
        self._bound.clear()

    # How it is made.

    def _record(self, hf_config: Mapping[str, Any]) -> None:
        """Run AWEX's converter once, over tensors without memory."""
        hf = hf_namespace(hf_config)
        store = self._store
        held = {} if store is None else meta_buffers(store.layout)
        matrices = None if store is None else store_matrices(store.layout, held)
        owners = {tensor.untyped_storage()._cdata: (_store_name(*key), tensor) for key, tensor in held.items()}
        with entered():
            from awex.models.registry import get_train_weights_converter
            from awex.sharding.mcore_sharding import get_mcore_rank_info

            (name,) = hf.architectures
            settings = converter_settings(hf, matrices)
            converter = get_train_weights_converter(
                "mcore", name, hf, get_mcore_rank_info(), settings, self._model.config
            )
            for name, parameter in _parameters(self._model).items():
                twin = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
                own = {**owners, twin.untyped_storage()._cdata: (name, twin)}
                for canonical, tensor in converter.convert_param(name, twin):
                    if canonical in self._views or canonical in self._made:
                        raise PlanError(f"{canonical}: AWEX makes it of two parameters, the second is {name}")
                    place = own.get(tensor.untyped_storage()._cdata)
                    if place is not None:
                        self._add_view(canonical, tensor, *place)
                    else:
                        self._add_made(converter, name, canonical, tensor, twin)
        if hf.tie_word_embeddings and _HEAD not in self._views and _EMBEDDING in self._views:
            self._views[_HEAD] = self._views[_EMBEDDING]

    def _add_view(self, canonical: str, tensor: torch.Tensor, buffer: str, whole: torch.Tensor) -> None:
        self._layouts[buffer] = (whole.shape, whole.stride(), whole.dtype)
        self._views[canonical] = ViewSpec(
            buffer, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype)
        )

    def _add_made(self, converter: Any, name: str, canonical: str, tensor: torch.Tensor, twin: torch.Tensor) -> None:
        rows, shift = _probe(converter, name, canonical, twin, tensor.dtype)
        self._layouts[name] = (twin.shape, twin.stride(), twin.dtype)
        first = int(rows[0]) if len(rows) else 0
        in_order = torch.equal(rows, torch.arange(first, first + len(rows)))
        if in_order and not shift and tensor.dtype == twin.dtype and twin.is_contiguous():
            self._add_view(canonical, twin.narrow(0, first, len(rows)), name, twin)
            return
        self._made[canonical] = _Made(name, rows, shift, tensor.dtype, tuple(tensor.shape))
        stride = torch.empty(tensor.shape, device="meta").stride()
        self._views[canonical] = ViewSpec(canonical, 0, tuple(tensor.shape), stride, dtype_name(tensor.dtype))

    def _keep(self, names: set[str]) -> None:
        missing = sorted(names - self._views.keys())
        if missing:
            raise PlanError(f"{len(missing)} planned tensors are not among this model's: {listing(missing)}")
        self._views = {name: view for name, view in self._views.items() if name in names}
        self._made = {name: made for name, made in self._made.items() if name in names}
        used = {view.param for view in self._views.values()} | {made.param for made in self._made.values()}
        self._layouts = {name: layout for name, layout in self._layouts.items() if name in used}

    def _check_places(self, layout: StoreLayout, names: set[str] | None) -> None:
        """Gate and up rows have one shape: only their places tell whether a converter took one for the other."""
        held = meta_buffers(layout)
        matrices = store_matrices(layout, held)
        local = {expert: number for number, expert in enumerate(layout.experts)}
        wrong: list[str] = []
        for entry in layout.entries():
            if names is not None and entry.name not in names:
                continue
            matrix = entry.matrix
            tensors = matrices(matrix.layer, local[matrix.expert], matrix.projection)
            own = layout.view(entry, MatrixView(tensors.weight, tensors.weight, tensors.scale, tensors.scale))
            name = BUFFERS[matrix.projection] + ("_scale" if entry.role == "scale" else "")
            place = (_store_name(matrix.layer, name), own.storage_offset(), tuple(own.shape), tuple(own.stride()))
            view = self._views.get(entry.name)
            if view is None or (view.param, view.offset, view.shape, view.stride) != place:
                wrong.append(entry.name)
        if wrong:
            raise PlanError(f"AWEX gives {len(wrong)} names of experts to other bytes than the store: {wrong[:4]}")

    # What is done at each publish.

    @cached_property
    def _needed(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(view.param for view in self._views.values()))

    @cached_property
    def _own(self) -> tuple[str, ...]:
        """Names of the parameters that are bound."""
        return tuple(name for name in self._layouts if not name.startswith(_STORE))

    def _live(self) -> dict[str, torch.Tensor]:
        live = {name: found for name in self._own if (found := _resolve(self._model, name)) is not None}
        if self._store is not None:
            next(iter(self._store.canonical()), None)  # a generation must be sealed, whole and resident
            for layer in self._store.layout.layers:
                held = self._store.buffers(layer)
                for name in self._store.layout.buffer_shapes():
                    live[_store_name(layer, name)] = getattr(held, name)
        return live

    def _checked(self) -> dict[str, torch.Tensor]:
        """All buffers, as they were when they were mapped."""
        live = self._live()
        faults = [
            f"{name} ({_fault(live.get(name), *layout)})"
            for name, layout in self._layouts.items()
            if _fault(live.get(name), *layout)
        ]
        if faults:
            raise PlanError(
                f"{len(faults)} buffers of the trainer are not as they were when they were mapped: "
                f"{listing(faults, 4)}; reload them, or map the model anew"
            )
        return live

    def _remake(self, name: str, made: _Made, parameter: torch.Tensor) -> torch.Tensor:
        """Fill the tensor's memory from the parameter; the memory is made at the first time and when the device
        changed."""
        memory = self._memory.get(name)
        if memory is None or memory.device != parameter.device:
            memory = torch.empty(made.shape, dtype=made.dtype, device=parameter.device)
            self._memory[name] = memory
            self._made[name] = made = replace(made, rows=made.rows.to(parameter.device))
        return _fill(made, parameter, memory)


class _OneByOne(Mapping[str, torch.Tensor]):
    """See `SourceMapping.one_by_one`."""

    def __init__(
        self,
        views: Mapping[str, ViewSpec],
        made: Mapping[str, _Made],
        live: Mapping[str, torch.Tensor],
        copied: bool,
    ) -> None:
        self._views, self._made, self._live, self._copied = views, made, live, copied

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        view = self._views[name]
        made = self._made.get(view.param)  # a tied head is a view of what is made for the embedding
        if made is None:
            buffer = self._live[view.param]
        else:
            parameter = self._live[made.param]
            memory = torch.empty(made.shape, dtype=made.dtype, device=parameter.device)
            buffer = _fill(replace(made, rows=made.rows.to(parameter.device)), parameter, memory)
        tensor = buffer.as_strided(view.shape, view.stride, buffer.storage_offset() + view.offset)
        return tensor.clone() if self._copied and made is None else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


def _fill(made: _Made, parameter: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Make a tensor from its parameter; rows are where the parameter is."""
    if made.dtype == parameter.dtype:
        torch.index_select(parameter, 0, made.rows, out=memory)
    else:
        memory.copy_(parameter.index_select(0, made.rows))
    return memory.add_(made.shift) if made.shift else memory


def canonical_sources(
    model: Any, store: PublishedStore | None, hf_config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """This rank's canonical tensors at this moment, by AWEX's converter: take them anew for every publish. A loop keeps
    a `SourceMapping` instead.

    Experts are views of the store, everything else a view of its parameter or, for query, key and value rows, a tensor
    made from it.

    Args:
        model: the Megatron model of this rank.
        store: must hold a sealed generation; None if the model's own BF16 parameters hold the experts.
        hf_config: the model's `config.json`.

    Raises:
        GenerationError: the store has nothing sealed. PlanError: see `SourceMapping`.
    """
    return SourceMapping(model, store, hf_config).tensors()


def _probe(
    converter: Any, name: str, canonical: str, twin: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, float]:
    """Which rows of a parameter a made tensor consists of, and what is added to them.

    The converter shows it: it is given rows that hold their own numbers, then zeros, and the recipe must then agree
    with it on random rows, bit for bit.
    """
    tail = [1] * (twin.ndim - 1)
    count = twin.shape[0]

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return dict(converter.convert_param(name, tensor))[canonical]

    def agrees(rows: torch.Tensor) -> bool:
        inside = len(rows) > 0 and bool(((rows >= 0) & (rows < count)).all())
        return inside and torch.equal((random[rows].to(dtype) + constant).to(dtype), expected)

    shift = torch.unique(convert(torch.zeros(count, *tail, dtype=torch.float64)).double())
    constant = float(shift[0])
    numbered = convert(torch.arange(count, dtype=torch.float64).reshape(count, *tail)).double().flatten()
    random = torch.randn(count, *tail, generator=torch.Generator().manual_seed(0)).to(twin.dtype)
    expected = convert(random)
    # A change of dtype may round the numbers; then the rows can only be all of them, in order.
    for rows in ((numbered - constant).round().long(), torch.arange(count)):
        if len(shift) == 1 and expected.dtype == dtype and agrees(rows):
            return rows, constant
    raise PlanError(
        f"{canonical}: AWEX makes it of {name} otherwise than by choosing rows, adding a number and changing the "
        "dtype; such a tensor cannot be bound at each publish"
    )


def _parameters(model: Any) -> dict[str, torch.Tensor]:
    """Parameters by name, and the buffers that AWEX publishes with them."""
    named = dict(model.named_parameters())
    named.update((name, buffer) for name, buffer in model.named_buffers() if "expert_bias" in name)
    return named


def _resolve(model: Any, name: str) -> torch.Tensor | None:
    """The parameter or buffer of that name at this moment, looked up along its path: a walk over all modules, thousands
    of experts among them, would take longer than the rest of a binding."""
    *path, last = name.split(".")
    for part in path:
        model = model._modules.get(part)
        if model is None:
            return None
    found = model._parameters.get(last)
    if found is None:
        found = model._buffers.get(last)
    return None if found is None else found.detach()


def _store_name(layer: int, buffer: str) -> str:
    return f"{_STORE}layers.{layer}.{buffer}"


def _fault(tensor: torch.Tensor | None, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> str:
    """What is wrong with a buffer, or ""."""
    if tensor is None:
        return "gone"
    if (tensor.shape, tensor.stride(), tensor.dtype) != (shape, stride, dtype):
        return f"{tensor.dtype} {list(tensor.shape)}, mapped as {dtype} {list(shape)}"
    if tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        return "its memory is released"
    return ""
