"""Megatron-core: a Hugging Face Qwen3-MoE or Qwen3.5-MoE as its real modules, experts behind placeholder parameters,
staged steps.

Importing this package does not import Megatron; building a model does.
"""

from typing import TYPE_CHECKING, Any

from weftpub_adapters.megatron.attached import AttachSettings, Prepared, prepare
from weftpub_adapters.megatron.delta_nets import require_delta_net_kernels, wrong_gradient
from weftpub_adapters.megatron.experts import ExpertAttachment
from weftpub_adapters.megatron.fields import Qwen3MoeFields, Qwen35MoeFields, read_config, read_fields
from weftpub_adapters.megatron.hybrid_loader import read_hybrid_parameters
from weftpub_adapters.megatron.hybrid_model import hybrid_settings, hybrid_spec
from weftpub_adapters.megatron.linear import StoreLinear, StoreMatrix
from weftpub_adapters.megatron.loader import fill_parameters, read_parameters
from weftpub_adapters.megatron.model import base_settings, build_model, initialize_parallel, transformer_config
from weftpub_adapters.megatron.probe import TrainerProbe, probe_layer
from weftpub_adapters.megatron.support import SUPPORTED_VERSIONS, require_supported
from weftpub_adapters.megatron.trainer import MegatronTrainer, TrainerSettings, TrainerStep

if TYPE_CHECKING:
    from weftpub_adapters.megatron.attached import Attachment, attach

__all__ = [
    "SUPPORTED_VERSIONS",
    "AttachSettings",
    "Attachment",
    "ExpertAttachment",
    "MegatronTrainer",
    "Prepared",
    "Qwen3MoeFields",
    "Qwen35MoeFields",
    "StoreLinear",
    "StoreMatrix",
    "TrainerProbe",
    "TrainerSettings",
    "TrainerStep",
    "attach",
    "base_settings",
    "build_model",
    "fill_parameters",
    "hybrid_settings",
    "hybrid_spec",
    "initialize_parallel",
    "prepare",
    "probe_layer",
    "read_config",
    "read_fields",
    "read_hybrid_parameters",
    "read_parameters",
    "require_delta_net_kernels",
    "require_supported",
    "transformer_config",
    "wrong_gradient",
]


def __getattr__(name: str) -> Any:
    # Their modules subclass Megatron's optimizers, so importing them imports Megatron.
    if name in ("Attachment", "attach"):
        from weftpub_adapters.megatron import attached

        return getattr(attached, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
