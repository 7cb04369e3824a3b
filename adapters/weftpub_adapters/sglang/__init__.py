"""SGLang: its real Qwen3-MoE built for one rank, described as plain data, and served as an engine that can be
published to.

Importing this package imports neither SGLang (that happens when a model is built) nor any planner: AWEX never enters
an engine process.
"""

from weftpub_adapters.sglang.build import ServedModel, build_model
from weftpub_adapters.sglang.derived import kept_parameters, post_process_weights
from weftpub_adapters.sglang.describe import describe_live, describe_model, plain_config
from weftpub_adapters.sglang.draft import with_draft
from weftpub_adapters.sglang.engine import SGLangEngine
from weftpub_adapters.sglang.parallel import ParallelSizes, parallel_sizes
from weftpub_adapters.sglang.placement import expert_slots, placement_digest, require_placement
from weftpub_adapters.sglang.probe import LayerProbe, probe_layer
from weftpub_adapters.sglang.quantized import quantization_config, unquantized_modules
from weftpub_adapters.sglang.support import SUPPORTED_VERSIONS, check_backends, require_supported

__all__ = [
    "SUPPORTED_VERSIONS",
    "LayerProbe",
    "ParallelSizes",
    "SGLangEngine",
    "ServedModel",
    "build_model",
    "check_backends",
    "describe_live",
    "describe_model",
    "expert_slots",
    "kept_parameters",
    "parallel_sizes",
    "placement_digest",
    "plain_config",
    "post_process_weights",
    "probe_layer",
    "quantization_config",
    "require_placement",
    "require_supported",
    "unquantized_modules",
    "with_draft",
]
