"""Megatron-core: a Hugging Face Qwen3-MoE as its real modules, experts behind placeholder parameters, staged steps.

Importing this package does not import Megatron; building a model does.
"""

from weftpub_adapters.megatron.experts import ExpertAttachment
from weftpub_adapters.megatron.fields import Qwen3MoeFields, read_config
from weftpub_adapters.megatron.linear import StoreLinear, StoreMatrix
from weftpub_adapters.megatron.loader import fill_parameters, read_parameters
from weftpub_adapters.megatron.model import build_model, initialize_parallel, transformer_config
from weftpub_adapters.megatron.probe import TrainerProbe, probe_layer
from weftpub_adapters.megatron.support import SUPPORTED_VERSIONS, require_supported
from weftpub_adapters.megatron.trainer import MegatronTrainer, TrainerSettings, TrainerStep

__all__ = [
    "SUPPORTED_VERSIONS",
    "ExpertAttachment",
    "MegatronTrainer",
    "Qwen3MoeFields",
    "StoreLinear",
    "StoreMatrix",
    "TrainerProbe",
    "TrainerSettings",
    "TrainerStep",
    "build_model",
    "fill_parameters",
    "initialize_parallel",
    "probe_layer",
    "read_config",
    "read_parameters",
    "require_supported",
    "transformer_config",
]
