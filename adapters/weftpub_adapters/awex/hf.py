"""A Hugging Face `config.json` as the attribute object that AWEX's converters read, under this adapter's
architecture name.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from weftpub.errors import ConfigError
from weftpub_adapters.awex.seams import ARCHITECTURE, BASE_ARCHITECTURE

__all__ = ["hf_namespace"]


def hf_namespace(config: Mapping[str, Any]) -> SimpleNamespace:
    """The fields of `config` as attributes.

    Raises:
        ConfigError: another architecture, or no number of experts.
    """
    architectures = config.get("architectures") or [None]
    if architectures[0] != BASE_ARCHITECTURE:
        raise ConfigError(f"architectures[0] is {architectures[0]!r}; this adapter plans for {BASE_ARCHITECTURE!r}")
    experts = config.get("num_experts") or config.get("num_local_experts")
    if not experts:
        raise ConfigError("config.json has neither num_experts nor num_local_experts")
    heads = config["num_attention_heads"]
    return SimpleNamespace(
        **{
            **config,
            "architectures": [ARCHITECTURE],
            "num_experts": experts,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        }
    )
