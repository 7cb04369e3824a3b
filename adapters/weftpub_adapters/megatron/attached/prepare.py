"""`prepare`: what has to be known about a model before DistributedDataParallel wraps it and its optimizer is built.

At expert parallel size one Megatron counts experts as dense parameters and lays them into the same flat buffer, whose
memory could then
never be freed. `prepare` gives the managed experts a buffer of their own, through the dimension of Megatron's buffer
key that separates
parameters by who updates them (`is_managed_by_layer_wise_optimizer`). Choice made: this attribute, and not
`allreduce=False`, because
optimizers, parameter groups and checkpoint keys stay those of the unprepared model; cost: the attribute is taken back
at `attach`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from weftpub.errors import ConfigError, StateError
from weftpub_adapters.megatron.attached.dispatchers import check_dispatcher
from weftpub_adapters.megatron.attached.marks import Mark, mark_of, set_mark
from weftpub_adapters.megatron.attached.refusals import check_transformer_config
from weftpub_adapters.megatron.attached.selection import ExpertLayer, chunks_of, find_expert_layers
from weftpub_adapters.megatron.attached.variants import AttachSettings
from weftpub_adapters.megatron.names import plain_name
from weftpub_adapters.megatron.support import require_supported

__all__ = ["Prepared", "prepare", "prepared_of", "set_own_buffer"]

_OWN_BUFFER = "is_managed_by_layer_wise_optimizer"


@dataclass(frozen=True)
class Prepared:
    """A model between `prepare` and `attach`.

    Attributes:
        settings: what the attachment will do.
        layers: the expert layers of this rank.
        dispatcher: name of the token dispatcher, passed through as configured.
    """

    settings: AttachSettings
    layers: tuple[ExpertLayer, ...]
    dispatcher: str

    def metadata(self) -> NoReturn:
        """StateError: shapes and dtypes of what is published are known once the store exists."""
        raise StateError(
            "metadata of published tensors exists only after attach(ddp_model, optimizer); this model is "
            "prepared, not attached"
        )


def prepare(model: Any, settings: AttachSettings | None = None, **changes: Any) -> Prepared:
    """Mark a model's parameters, put the optimizer seams in place, and give its experts a buffer of their own.

    Call it on the bare model, or list of chunks, before DistributedDataParallel and `get_megatron_optimizer`. For the
    baseline variant
    nothing is changed.

    Args:
        model: GPTModel, HybridModel or Float16Module, on its device, with its initial weights.
        settings: what to do; by default `AttachSettings(**changes)`.

    Raises:
        ConfigError: a setting is refused by name, the model is wrapped or prepared already, or the dispatcher cannot
            run here.
    """
    require_supported()
    settings = settings if settings is not None else AttachSettings(**changes)
    chunks = chunks_of(model)
    layers = find_expert_layers(chunks)
    dispatcher = check_dispatcher(chunks[0].config)
    prepared = Prepared(settings, layers, dispatcher)
    if not settings.staged:
        return prepared
    check_transformer_config(chunks[0].config, settings)
    if any(hasattr(chunk, "ddp_config") for chunk in chunks):
        raise ConfigError(
            "prepare(model) must come before DistributedDataParallel wraps the model; unwrap it, or build it anew"
        )
    _refuse_tied_or_marked(chunks)
    from weftpub_adapters.megatron.attached import seams

    seams.install()
    experts = {id(item.parameter): item.matrix for layer in layers for item in layer.parameters}
    for name, parameter in _named(chunks):
        set_mark(parameter, Mark(prepared, plain_name(name), experts.get(id(parameter))))
    set_own_buffer(layers, True)
    return prepared


def prepared_of(model: Any) -> Prepared:
    """The `Prepared` that a model's parameters are marked with; ConfigError for an unprepared or closed one."""
    for _, parameter in _named(chunks_of(model)):
        mark = mark_of(parameter)
        if mark is not None:
            prepared: Prepared = mark.prepared
            return prepared
    raise ConfigError(
        "this model was not prepared (or its attachment is closed); call prepare(model) before "
        "DistributedDataParallel and the optimizer are built"
    )


def set_own_buffer(layers: tuple[ExpertLayer, ...], own: bool) -> None:
    """Ask Megatron for a separate buffer for the experts, or take the request back."""
    for layer in layers:
        for item in layer.parameters:
            if own:
                setattr(item.parameter, _OWN_BUFFER, True)
            elif hasattr(item.parameter, _OWN_BUFFER):
                delattr(item.parameter, _OWN_BUFFER)


def _refuse_tied_or_marked(chunks: tuple[Any, ...]) -> None:
    for name, parameter in _named(chunks):
        if mark_of(parameter) is not None:
            raise ConfigError(f"{name} is prepared already; attach or close before preparing it again")
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            raise ConfigError(f"{name} is {parameter.dtype}; masters start from bfloat16 or float32 (set bf16=True)")


def _named(chunks: tuple[Any, ...]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                yield name, parameter
