"""What an attachment refuses, by name, and the setting that works. Nothing is changed before these checks have passed.

One row per refused setting. `fp8` rows hold for the fp8 variant alone; the others for every staged variant.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from weftpub.errors import ConfigError
from weftpub_adapters.megatron.attached.selection import ExpertLayer
from weftpub_adapters.megatron.attached.variants import AttachSettings

__all__ = ["check_optimizer_config", "check_parallel", "check_transformer_config", "check_wrapper_config"]


@dataclass(frozen=True)
class _Row:
    """One refused setting: the values that work (or a test), what to write instead, and why."""

    name: str
    works: Callable[[Any], bool]
    instead: str
    why: str
    fp8_only: bool = False


def _only(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is allowed or value == allowed for allowed in values)


_TRANSFORMER = (
    _Row("moe_mlp_glu_interleave_size", _only(None), "None", "fc1 must hold gate rows over up rows"),
    _Row("moe_single_grouped_weight", _only(False), "False", "each expert needs a parameter of its own"),
    _Row("fp8_param", _only(False), "False", "masters and published bytes are kept by weftpub"),
    _Row(
        "fp8",
        _only(None),
        "None",
        "it would put FP8 autocast around attention too; weftpub puts it around the experts",
        True,
    ),
    _Row("fp4", _only(None), "None", "only block FP8 is published", True),
    _Row(
        "use_transformer_engine_op_fuser",
        _only(False),
        "False",
        "the fused expert MLP reads parameters, not the store",
        True,
    ),
    _Row(
        "delay_wgrad_compute", _only(False), "False", "delayed weight gradients bypass the placeholder parameters", True
    ),
    _Row(
        "overlap_dispatch_backward_with_experts_wgrad",
        _only(False),
        "False",
        "delayed weight gradients bypass the placeholder parameters",
        True,
    ),
    _Row("moe_latent_size", _only(None), "None", "experts must be as wide as the hidden state", True),
    _Row("gated_linear_unit", _only(True), "True", "published experts are gated", True),
    _Row(
        "cuda_graph_impl",
        _only("none", None),
        "'none'",
        "a captured graph would keep the addresses of offloaded weights",
        True,
    ),
    _Row("init_model_with_meta_device", _only(False), "False", "masters are made from the initial weights"),
)

_WRAPPER = (
    _Row("use_megatron_fsdp", _only(False), "False", "its buffers are not Megatron DDP's"),
    _Row("fp8_param_gather", _only(False), "False", "experts are not gathered; the store holds their bytes"),
    _Row("fp4_param_gather", _only(False), "False", "only block FP8 is published"),
    _Row(
        "reuse_grad_buf_for_mxfp8_param_ag", _only(False), "False", "parameters and gradients need memory of their own"
    ),
    _Row("nccl_ub", _only(False), "False", "user buffers registered with NCCL cannot be released", True),
)

_OPTIMIZER = (
    _Row("fp16", _only(False), "False with bf16=True", "loss scaling is not staged"),
    _Row("bf16", _only(True), "True", "masters are FP32 and parameters BF16"),
    _Row("optimizer_cuda_graph", _only(False), "False", "staged steps cannot be captured"),
    _Row("decoupled_weight_decay", _only(True), "True", "staged Adam is AdamW"),
    _Row("main_params_dtype", lambda dtype: str(dtype) == "torch.float32", "torch.float32", "masters are FP32"),
    _Row(
        "exp_avg_dtype",
        lambda dtype: str(dtype) != "torch.uint8",
        "torch.bfloat16",
        "FP8 moments need scales that are not kept",
    ),
    _Row(
        "exp_avg_sq_dtype",
        lambda dtype: str(dtype) != "torch.uint8",
        "torch.bfloat16",
        "FP8 moments need scales that are not kept",
    ),
    _Row("overlap_param_gather_with_optimizer_step", _only(False), "False", "one step writes one generation"),
    _Row(
        "use_layer_wise_distributed_optimizer",
        _only(False),
        "False",
        "it shards whole matrices over data-parallel ranks",
    ),
)

_ADAM = (
    _Row("use_distributed_optimizer", _only(True), "True", "the staged AdamW takes the place of its inner optimizer"),
    _Row("use_precision_aware_optimizer", _only(True), "True", "otherwise Megatron clones FP32 masters onto the GPU"),
    _Row("optimizer_cpu_offload", _only(True), "True", "this is the seam: weftpub replaces HybridDeviceOptimizer"),
    _Row("optimizer_offload_fraction", _only(1.0), "1.0", "all masters live in pinned memory"),
)

_MUON = (
    _Row(
        "use_distributed_optimizer",
        _only(False),
        "False",
        "it cuts matrices into flat shards, and Muon needs whole ones",
    ),
    _Row("optimizer_cpu_offload", _only(False), "False", "weftpub stages the masters itself"),
    _Row("muon_scalar_optimizer", _only("adam"), "'adam'", "scalars and vectors are staged with AdamW"),
)


def check_transformer_config(config: Any, settings: AttachSettings) -> None:
    """Refuse settings of a TransformerConfig; ConfigError names the field, its value and what works."""
    _check("TransformerConfig", config, _TRANSFORMER, settings)


def check_wrapper_config(ddp_config: Any, settings: AttachSettings) -> None:
    """Refuse settings of a DistributedDataParallelConfig."""
    _check("DistributedDataParallelConfig", ddp_config, _WRAPPER, settings)


def check_optimizer_config(config: Any, settings: AttachSettings) -> None:
    """Refuse optimizers other than Adam and Muon, and the settings that their staged versions need otherwise."""
    if config.optimizer not in ("adam", "muon"):
        raise ConfigError(f"OptimizerConfig.optimizer={config.optimizer!r} is not staged; use 'adam' or 'muon'")
    _check("OptimizerConfig", config, _OPTIMIZER + (_ADAM if config.optimizer == "adam" else _MUON), settings)


def check_parallel(layers: Iterable[ExpertLayer], settings: AttachSettings, optimizer_config: Any) -> None:
    """Refuse split experts for the fp8 variant. Replicas of an expert may be: each has the reduced gradient, whole, and
    writes the same bytes, which every publish proves.

    Raises:
        ConfigError: a pipeline, expert tensor parallelism, or a distributed optimizer that shares the experts' matrices
            out over their replicas.
    """
    from megatron.core import parallel_state

    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    if pipeline > 1:
        raise ConfigError(
            f"pipeline_model_parallel_size={pipeline} is not supported; set it to 1 and use expert parallelism"
        )
    if settings.variant != "fp8":
        return
    split = parallel_state.get_expert_tensor_parallel_world_size()
    if split > 1:
        raise ConfigError(
            f"expert_tensor_parallel_size is {split}: the fp8 variant needs whole experts; set "
            "expert_tensor_parallel_size=1, or use variant='bf16'"
        )
    if not optimizer_config.use_distributed_optimizer:
        return
    shared = parallel_state.get_expert_data_parallel_world_size(partial_expert_data_parallel=True)
    if shared > 1:
        size = parallel_state.get_expert_model_parallel_world_size()
        copies, count = parallel_state.get_expert_data_parallel_world_size(), len(next(iter(layers)).experts) * size
        raise ConfigError(
            f"the distributed optimizer shares each expert out over {shared} ranks, and the fp8 variant needs whole "
            f"ones: set num_distributed_optimizer_instances={copies}, in initialize_model_parallel and in "
            f"DistributedDataParallelConfig, or expert_model_parallel_size={size * copies} so that every expert lives "
            f"on one rank ({count} experts), or use optimizer='muon' or variant='bf16'"
        )


def _check(owner: str, config: Any, rows: Iterable[_Row], settings: AttachSettings) -> None:
    for row in rows:
        if row.fp8_only and settings.variant != "fp8":
            continue
        if not hasattr(config, row.name):
            continue
        value = getattr(config, row.name)
        if not row.works(value):
            raise ConfigError(
                f"{owner}.{row.name}={value!r} does not work with variant={settings.variant!r}: {row.why}; set it to "
                f"{row.instead}"
            )
