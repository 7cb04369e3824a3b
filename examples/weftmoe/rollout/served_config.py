"""The configuration under which an engine serves a checkpoint: its language model alone, in SGLang's words."""

from collections.abc import Mapping
from typing import Any

from weftpub.errors import ConfigError

__all__ = ["served_config"]

_INTERVAL = "full_attention_interval"


def served_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` as the engine is to see it.

    Of a multimodal model it builds the language model only: the trainer has nothing to publish for a vision tower, and
    prompts here are text. SGLang reads from the interval which layers have attention; transformers, when it saves a
    model, names each layer's kind instead.

    Raises:
        ConfigError: kinds of layers that no interval describes.
    """
    served = dict(config)
    if "text_config" in config:
        served |= {"language_model_only": True, "text_config": dict(config["text_config"])}
    text = served.get("text_config", served)
    kinds = text.get("layer_types") or []
    if "linear_attention" in kinds and _INTERVAL not in text:
        every = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
        if any((kind == "full_attention") != ((layer + 1) % every == 0) for layer, kind in enumerate(kinds)):
            raise ConfigError(f"layer_types={kinds}: SGLang knows attention in every n-th layer only")
        text[_INTERVAL] = every
    return served
