"""What the store exports is loaded by the engines' own code: transformers' fine-grained FP8 loader and SGLang's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint

from weftpub.checkpoint import export_hf
from weftpub.errors import ConfigError
from weftpub.store import ExpertStore
from weftpub_adapters.safetensors import HFDirectory
from weftpub_kernels import dequantize

pytestmark = pytest.mark.isolated("sglang")


def _export(source: Path, target: Path, *, format: str = "fp8") -> ExpertStore:
    """Read a BF16 directory as a trainer does, and export it with its experts from a store."""
    directory = HFDirectory(source)
    text = directory.config.get("text_config", directory.config)
    experts = text.get("num_experts", text.get("num_local_experts"))
    store = ExpertStore(
        range(text["num_hidden_layers"]),
        range(experts),
        text["hidden_size"],
        text["moe_intermediate_size"],
        format=format,
        family=directory.family,
    )
    with store.writing(0):
        for matrix in store.layout.matrices:
            store.writer()(matrix.name, directory.expert(matrix).float())
    export_hf(target, store, directory.others(), directory.config, version=1, expected=directory)
    return store


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


# transformers.


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers dequantizes where it finds no GPU; without its check of the machine it builds FP8 modules and loads
    bytes.
    """
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)


def _load(model_class: Any, path: Path) -> torch.nn.Module:
    model, problems = model_class.from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(problems.values()), problems
    return model


def _check_transformers(model: torch.nn.Module, store: ExpertStore, source: HFDirectory, *, fp8: bool) -> None:
    parameters = dict(model.named_parameters())
    for matrix in store.layout.matrices:
        view = store.matrix(matrix)
        module = store.layout.family.to_checkpoint(store.layout.family.experts_module(matrix.layer))
        stacked = f"{module}.{store.layout.family.stacked[matrix.projection]}"
        if fp8:
            assert torch.equal(_bits(parameters[stacked][matrix.expert]), _bits(view.w))
            assert torch.equal(parameters[f"{stacked}_scale_inv"][matrix.expert], view.scale)
        else:
            expected = dequantize(view.w, view.scale, torch.bfloat16) if view.scale is not None else view.w
            assert torch.equal(parameters[stacked][matrix.expert], expected)
    quantized = {name for name, module in model.named_modules() if type(module).__name__.startswith("FP8")}
    expert_modules = {
        store.layout.family.to_checkpoint(store.layout.family.experts_module(i)) for i in store.layout.layers
    }
    assert quantized == (expert_modules if fp8 else set())
    for name, tensor in source.others().items():
        if name in parameters:
            assert parameters[name].dtype == torch.bfloat16, name
            assert torch.equal(parameters[name], tensor.bfloat16()), name


@pytest.mark.parametrize("fp8", [True, False])
def test_transformers_loads_the_bytes(tmp_path: Path, hf_config: dict[str, Any], request: Any, fp8: bool) -> None:
    """With a GPU, FP8 modules get the store's codes and scales; without one, BF16 modules get code * scale."""
    from transformers import AutoModelForCausalLM

    write_checkpoint(tmp_path / "source", hf_config)
    store = _export(tmp_path / "source", tmp_path / "out")
    if fp8:
        request.getfixturevalue("as_on_a_gpu")
    model = _load(AutoModelForCausalLM, tmp_path / "out")
    _check_transformers(model, store, HFDirectory(tmp_path / "source"), fp8=fp8)


def test_transformers_loads_bf16_experts(tmp_path: Path, hf_config: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    write_checkpoint(tmp_path / "source", hf_config)
    store = _export(tmp_path / "source", tmp_path / "out", format="bf16")
    model = _load(AutoModelForCausalLM, tmp_path / "out")
    _check_transformers(model, store, HFDirectory(tmp_path / "source"), fp8=False)


def test_transformers_loads_a_tied_model(tmp_path: Path, hf_config: dict[str, Any], as_on_a_gpu: None) -> None:
    """A tied lm_head has no tensor of its own; left out of the exclude list, it became an FP8 linear over BF16
    bytes.
    """
    from transformers import AutoModelForCausalLM

    write_checkpoint(tmp_path / "source", {**hf_config, "tie_word_embeddings": True})
    store = _export(tmp_path / "source", tmp_path / "out")
    model = _load(AutoModelForCausalLM, tmp_path / "out")
    _check_transformers(model, store, HFDirectory(tmp_path / "source"), fp8=True)


def _write_qwen3_5(path: Path) -> Any:
    """A tiny Qwen3.5 as transformers saves it; returns its class."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text = {
        "vocab_size": 256,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "dtype": "bfloat16",
    }
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 256}
    config = Qwen3_5MoeConfig(
        text_config=text, vision_config=vision, architectures=["Qwen3_5MoeForConditionalGeneration"]
    )
    torch.manual_seed(0)
    original = Qwen3_5MoeForConditionalGeneration(config).to(torch.bfloat16)
    for parameter in original.parameters():
        parameter.data.normal_(0, 0.05)
    original.save_pretrained(path)
    return Qwen3_5MoeForConditionalGeneration


@pytest.mark.parametrize("fp8", [True, False])
def test_transformers_loads_qwen3_5(tmp_path: Path, request: Any, fp8: bool) -> None:
    """Shared experts, their gate [1, H], linear attention and a vision tower stay BF16; names lie one level deeper."""
    model_class = _write_qwen3_5(tmp_path / "source")
    store = _export(tmp_path / "source", tmp_path / "out")
    if fp8:
        request.getfixturevalue("as_on_a_gpu")
    model = _load(model_class, tmp_path / "out")
    _check_transformers(model, store, HFDirectory(tmp_path / "source"), fp8=fp8)


# SGLang.


def _sglang_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator

    return safetensors_weights_iterator(sorted(map(str, path.glob("*.safetensors"))))


def _serve(path: Path, **sizes: int) -> dict[str, torch.Tensor]:
    """SGLang's model, built from the exported config and loaded by its own loader; memory is NaN before."""
    from weftpub_adapters.sglang import build_model

    config = json.loads((path / "config.json").read_text())
    served = build_model(config, format="fp8" if "quantization_config" in config else "bf16", **sizes)
    parameters = dict(served.model.named_parameters())
    for parameter in parameters.values():
        parameter.data.view(torch.uint8).fill_(0xFF)
    with served.active():
        served.model.load_weights(_sglang_weights(path))
    return {name: parameter.data for name, parameter in parameters.items()}


@pytest.mark.parametrize(("tp_size", "ep_size", "rank"), [(1, 1, 0), (2, 2, 0), (2, 2, 1)])
def test_sglang_loads_the_bytes(
    tmp_path: Path, hf_config: dict[str, Any], tp_size: int, ep_size: int, rank: int
) -> None:
    write_checkpoint(tmp_path / "source", hf_config)
    store = _export(tmp_path / "source", tmp_path / "out")
    live = _serve(tmp_path / "out", tp_size=tp_size, ep_size=ep_size, rank=rank)
    each = len(store.layout.experts) // ep_size
    mine = slice(rank * each, (rank + 1) * each)
    for layer in store.layout.layers:
        buffers, at = store.layer(layer), f"model.layers.{layer}.mlp.experts"
        assert torch.equal(_bits(live[f"{at}.w13_weight"]), _bits(buffers.w13[mine]))
        assert torch.equal(_bits(live[f"{at}.w2_weight"]), _bits(buffers.w2[mine]))
        assert torch.equal(live[f"{at}.w13_weight_scale_inv"], buffers.w13_scale[mine])
        assert torch.equal(live[f"{at}.w2_weight_scale_inv"], buffers.w2_scale[mine])
    others = HFDirectory(tmp_path / "source").others()
    for name in ("model.norm.weight", "model.layers.1.mlp.gate.weight"):
        assert torch.equal(live[name], others[name])
    assert all(torch.isfinite(tensor.float()).all() for tensor in live.values()), (
        "memory that no tensor was loaded into"
    )


def test_sglang_loads_bf16_experts(tmp_path: Path, hf_config: dict[str, Any]) -> None:
    write_checkpoint(tmp_path / "source", hf_config)
    store = _export(tmp_path / "source", tmp_path / "out", format="bf16")
    live = _serve(tmp_path / "out")
    for layer in store.layout.layers:
        assert torch.equal(live[f"model.layers.{layer}.mlp.experts.w13_weight"], store.layer(layer).w13)
        assert torch.equal(live[f"model.layers.{layer}.mlp.experts.w2_weight"], store.layer(layer).w2)


def test_a_list_that_forgets_a_linear_would_be_noticed(tmp_path: Path, hf_config: dict[str, Any]) -> None:
    """The list decides: without one attention linear on it, SGLang makes that linear FP8 and this suite fails."""
    write_checkpoint(tmp_path / "source", hf_config)
    _export(tmp_path / "source", tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["modules_to_not_convert"].remove("model.layers.1.self_attn.o_proj")
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="o_proj"):
        _serve(tmp_path / "out")


def test_sglang_makes_only_the_experts_of_qwen3_5_fp8(tmp_path: Path) -> None:
    """SGLang asks about modules that it fused itself (qkv_proj, in_proj_qkvz); the list names what files hold."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.layers.quantization.utils import is_layer_skipped
    from sglang.srt.models.qwen3_5 import Qwen3_5MoeForConditionalGeneration as Served

    _write_qwen3_5(tmp_path / "source")
    _export(tmp_path / "source", tmp_path / "out")
    scheme = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = Fp8Config.from_config({**scheme, "packed_modules_mapping": Served.packed_modules_mapping})

    def fp8(module: str) -> bool:
        return not is_layer_skipped(module, config.ignored_layers, fused_mapping=config.packed_modules_mapping)

    shared = ["mlp.gate", "mlp.shared_expert_gate", "mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj"]
    linear = [f"linear_attn.{name}" for name in ("in_proj_qkvz", "in_proj_ba", "conv1d", "out_proj")]
    full = [f"self_attn.{name}" for name in ("qkv_proj", "o_proj")]
    for layer, kind in enumerate([linear, linear, linear, full]):
        at = f"model.language_model.layers.{layer}"
        assert fp8(f"{at}.mlp.experts")
        assert [name for name in (*shared, *kind) if fp8(f"{at}.{name}")] == []
    assert not fp8("lm_head")
