"""Megatron-Bridge's real AutoBridge: a provider whose models are prepared before they are wrapped, and Hugging Face
checkpoints."""

import importlib.machinery
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from weftpub.errors import StateError

pytestmark = [pytest.mark.isolated("bridge"), pytest.mark.slow]


@pytest.fixture(scope="module")
def auto_bridge() -> Any:
    """AutoBridge on a CPU; one of its modules wants TransformerEngine's classes to exist when it is imported."""
    from attach_support import start

    start()
    import megatron.core.extensions.transformer_engine
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.transformer.moe.experts  # noqa: F401

    for name in ("transformer_engine", "transformer_engine.pytorch"):
        module = MagicMock(name=name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__, module.__name__, module.__version__ = [], name, "0.0.0"
        sys.modules[name] = module
    sys.modules["transformer_engine"].pytorch = sys.modules["transformer_engine.pytorch"]
    for name in ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNorm", "RMSNorm", "LayerNormMLP"):
        setattr(sys.modules["transformer_engine.pytorch"], name, type(name, (torch.nn.Module,), {}))
    from megatron.bridge import AutoBridge

    return AutoBridge


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, hf_config: dict[str, Any]) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("hf")
    small = {**hf_config, "num_experts": 4, "moe_intermediate_size": 128, "intermediate_size": 128}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**small)).bfloat16().save_pretrained(directory)
    return directory


def build(auto_bridge: Any, checkpoint: Path) -> tuple[Any, list[Any], Any, Any]:
    """Bridge, wrapped models, optimizer, preparation: fp8 variant, Muon."""
    from attach_support import optimizer_config
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import get_megatron_optimizer

    from weftpub_adapters.bridge import prepare_provider
    from weftpub_adapters.megatron.attached import AttachSettings

    bridge = auto_bridge.from_hf_pretrained(checkpoint)
    provider = bridge.to_megatron_provider(load_weights=True)
    settings = {
        "transformer_layer_spec": local_layer_spec,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
    }
    for name, value in settings.items():
        setattr(provider, name, value)
    before = (provider.moe_token_dispatcher_type, provider.moe_flex_dispatcher_backend)
    preparation = prepare_provider(provider, AttachSettings(variant="fp8"))
    with pytest.raises(StateError, match="not built"):
        _ = preparation.prepared
    provider.finalize()
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    models = provider.provide_distributed_model(ddp_config=ddp_config, wrap_with_ddp=True, use_cpu_initialization=True)
    assert (provider.moe_token_dispatcher_type, provider.moe_flex_dispatcher_backend) == before
    return bridge, models, get_megatron_optimizer(optimizer_config("muon", staged=True), models), preparation


def disk(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def test_bridge_models_train_attached_and_export_and_import(auto_bridge: Any, checkpoint: Path) -> None:
    from attach_support import train

    from weftpub_adapters.bridge import export_hf, load_hf
    from weftpub_adapters.megatron.attached import attach

    bridge, models, opt, preparation = build(auto_bridge, checkpoint)
    attachment = attach(models, opt, prepared=preparation.prepared)
    options = {"cpu": True, "show_progress": False}
    start = {name: tensor.clone() for name, tensor in export_hf(attachment, bridge, models, **options)}
    original = disk(checkpoint)
    assert set(start) == set(original)
    assert all(torch.equal(start[name], value) for name, value in original.items())

    first = attachment.store.sha256()
    train(models[0], opt)
    trained = attachment.store.sha256()
    assert trained != first
    found = {name: tensor.clone() for name, tensor in export_hf(attachment, bridge, models, **options)}
    assert attachment.expert_storage_bytes == 0
    masters = attachment.masters()
    down = masters["layers.1.experts.2.fc2"].bfloat16()
    assert torch.equal(found["model.layers.1.mlp.experts.2.down_proj.weight"], down)
    gate = masters["layers.0.experts.3.fc1"].bfloat16().chunk(2)[0]
    assert torch.equal(found["model.layers.0.mlp.experts.3.gate_proj.weight"], gate)

    load_hf(attachment, bridge, models, checkpoint)
    assert attachment.store.sha256() == first
    attachment.close()


def test_bridge_calls_the_parameters_of_qwen35_by_the_same_names(auto_bridge: Any, tmp_path: Path) -> None:
    """TransformerEngine's layers cannot be built on a CPU; Bridge knows what their parameters are called, and which
    tensors of a checkpoint they come from."""
    from fnmatch import fnmatchcase

    from hybrid_checkpoints import make_model, multimodal_form, read_tensors, save_text_form
    from megatron.bridge.models.qwen.qwen35_bridge import Qwen35MoEBridge

    from weftmoe.loop.weights import megatron_name, rank_parameters
    from weftpub_adapters.megatron import read_config, read_fields

    save_text_form(make_model(), tmp_path / "text")
    multimodal_form(tmp_path / "text", tmp_path / "whole")
    fields = read_fields(read_config(tmp_path / "whole"))
    mappings = Qwen35MoEBridge._get_moe_lm_mappings("model.language_model.", experts_packed=True)
    patterns = {mapping.megatron_param for mapping in mappings}
    tensors = read_tensors(tmp_path / "whole")
    found = {megatron_name(name, fields) for name, _ in rank_parameters(tensors, fields)}
    unknown = sorted(name for name in found if sum(fnmatchcase(name, pattern) for pattern in patterns) != 1)
    assert unknown == []
    used = [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in found)]
    # Bridge has two rows for experts: grouped ones, which these are, and one module an expert.
    assert {pattern for pattern in patterns if "local_experts" not in pattern} == set(used)
    sources = {
        name
        for mapping in mappings
        for name in (mapping.hf_param.values() if isinstance(mapping.hf_param, dict) else [mapping.hf_param])
    }
    left_out = ("mtp.", "model.visual.")
    assert all(any(fnmatchcase(t, s) for s in sources) for t in tensors if not t.startswith(left_out))
