"""A Hugging Face `config.json` as the attribute object that AWEX's converters read, under this adapter's
architecture name.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from weftpub.errors import ConfigError
from weftpub_adapters.awex.seams import base_of

__all__ = ["hf_namespace"]


def hf_namespace(config: Mapping[str, Any]) -> SimpleNamespace:
    """The fields of the language model's config as attributes; those of a multimodal model lie in its `text_config`.

    Raises:
        ConfigError: another architecture, attention without its gate where the family has one, or no number of experts.
    """
    architectures = config.get("architectures") or [None]
    base = base_of(architectures[0])
    text = {**config, **(config.get("text_config") or {})}
    text.pop("text_config", None)
    experts = text.get("num_experts") or text.get("num_local_experts")
    if not experts:
        raise ConfigError("config.json has neither num_experts nor num_local_experts")
    if base.hybrid and not text.get("attn_output_gate", True):
        raise ConfigError(f"attn_output_gate=False: {base.architecture} is published with gated attention only")
    heads = text["num_attention_heads"]
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return SimpleNamespace(
        **{
            **text,
            "architectures": [base.name],
            "num_experts": experts,
            "head_dim": text.get("head_dim") or text["hidden_size"] // heads,
            "num_key_value_heads": text.get("num_key_value_heads") or heads,
            "tie_word_embeddings": bool(tied),
        }
    )
