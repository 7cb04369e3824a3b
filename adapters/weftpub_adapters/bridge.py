"""Megatron-Bridge: preparing the models that a provider builds, and Hugging Face checkpoints of an attached trainer.

    provider = AutoBridge.from_hf_pretrained(path).to_megatron_provider(load_weights=True)
    preparation = prepare_provider(provider, AttachSettings(variant="fp8"))
    models = provider.provide_distributed_model(ddp_config=...)       # the hook prepares them before they are wrapped
    attachment = attach(models, optimizer, prepared=preparation.prepared)

The provider's token dispatcher is left as it is configured, a flex dispatcher of `apply_flex_dispatcher_backend`
included.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from weftpub.errors import StateError
from weftpub_adapters.megatron.attached import AttachSettings, Prepared, prepare

__all__ = ["Preparation", "export_hf", "load_hf", "prepare_provider", "save_hf"]


class Preparation:
    """The hook's other end: what it prepared."""

    def __init__(self) -> None:
        self._prepared: Prepared | None = None

    @property
    def prepared(self) -> Prepared:
        """What `prepare` returned; StateError before the provider built its models."""
        if self._prepared is None:
            raise StateError("the provider has not built its models yet; call provide_distributed_model first")
        return self._prepared

    def finish(self, prepared: Prepared) -> None:
        """Called by the hook, once."""
        if self._prepared is not None:
            raise StateError("the provider built models twice with one preparation; register a new one for each")
        self._prepared = prepared


def prepare_provider(provider: Any, settings: AttachSettings | None = None) -> Preparation:
    """Register a pre-wrap hook that prepares the provider's models, after the hooks that are there (such as loading
    weights).

    Args:
        provider: a Bridge model provider (anything with `register_pre_wrap_hook`) or model config (with
            `pre_wrap_hooks`).
        settings: as for `prepare`.
    """
    preparation = Preparation()

    def hook(models: list[Any]) -> list[Any]:
        preparation.finish(prepare(models, settings))
        return models

    if hasattr(provider, "register_pre_wrap_hook"):
        provider.register_pre_wrap_hook(hook)
    else:
        provider.pre_wrap_hooks.append(hook)
    return preparation


def export_hf(attachment: Any, bridge: Any, models: list[Any], **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face names and BF16 tensors of an attached trainer, experts rounded from the masters.

    One version: the next step waits until the iterator is exhausted or closed.

    Args:
        attachment: open.
        bridge: the AutoBridge of the model.
        models: the (wrapped) models.
        options: passed to `AutoBridge.export_hf_weights`.
    """
    with attachment.saving():
        yield from bridge.export_hf_weights(models, **options)


def save_hf(attachment: Any, bridge: Any, models: list[Any], directory: str | Path, **options: Any) -> None:
    """Write what `export_hf` gives as a checkpoint directory; Bridge wants nvidia-modelopt for that.

    Args:
        attachment, bridge, models: as for `export_hf`.
        directory: where to.
        options: passed to `AutoBridge.save_hf_pretrained`.
    """
    with attachment.saving():
        bridge.save_hf_pretrained(models, str(directory), **options)


def load_hf(attachment: Any, bridge: Any, models: list[Any], directory: str | Path, **options: Any) -> None:
    """Read a Hugging Face checkpoint into an attached trainer: weights, masters and published bytes; moments stay.

    Args:
        attachment, bridge, models: as for `save_hf`.
        directory: the checkpoint.
        options: passed to `AutoBridge.load_hf_weights`.
    """
    with attachment.loading(masters_from="model"):
        bridge.load_hf_weights(models, str(directory), **options)
