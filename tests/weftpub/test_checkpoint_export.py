"""The exported directory: bytes, names, quantization_config, and what is refused before anything is written."""

import json
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_support import CONFIG, EXPERTS, LAYERS, model_store, other_tensors
from safetensors import safe_open
from safetensors.torch import load_file
from store_support import published, same_bytes

from weftpub.canonical import CanonicalTensor
from weftpub.checkpoint import LazyTensors, export_hf
from weftpub.errors import CheckpointError, ConfigError, DeadlineError, GenerationError, StateError, TornError

EXPERT = "model.layers.1.mlp.experts.2.up_proj"


def _read(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("preset", ["te_fp32", "te_pow2"])
def test_exported_bytes_are_the_stores(tmp_path: Path, preset: str) -> None:
    store, others = model_store(preset=preset), other_tensors()
    report = export_hf(tmp_path / "v7", store, others, CONFIG, version=7)
    tensors = _read(report.directory)
    experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    assert same_bytes({name: tensor.view(torch.uint8) for name, tensor in experts.items()}, published(store))
    assert {tensor.dtype for name, tensor in experts.items() if name.endswith(".weight")} == {torch.float8_e4m3fn}
    assert {tensor.dtype for name, tensor in experts.items() if name.endswith("_scale_inv")} == {torch.float32}
    assert all(torch.equal(tensors[name], others[name]) for name in others)
    assert tensors.keys() == others.keys() | published(store).keys()
    assert report.tensors == len(tensors)
    assert report.nbytes == sum(path.stat().st_size for path in report.directory.iterdir())
    with safe_open(report.directory / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "weftpub_version": "7"}


def test_config_says_what_engines_ask_for(tmp_path: Path) -> None:
    """An exported directory once had no quantization_config, and `weight_scale` instead of `weight_scale_inv`."""
    config = {**CONFIG, "quantization_config": {"quant_method": "stale"}}
    export_hf(tmp_path / "out", model_store(), other_tensors(), config, version=1)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = written.pop("quantization_config")
    assert written == CONFIG
    excluded = quantization.pop("modules_to_not_convert")
    assert quantization == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    linears = ["mlp.gate", *(f"self_attn.{part}_proj" for part in "kqvo")]
    assert excluded == sorted(
        ["lm_head", "model.embed_tokens", *(f"model.layers.{i}.{name}" for i in range(LAYERS) for name in linears)]
    )


def test_every_matrix_is_in_the_scheme_or_on_the_list(tmp_path: Path) -> None:
    """A router, a shared expert's gate [1, H] and an lm_head were once quantized by accident, because a list was kept
    by hand. Odd tensors land on the list by their shape, whatever they are called.
    """
    others = other_tensors()
    others["model.layers.0.mlp.shared_expert_gate.weight"] = torch.zeros(1, 256, dtype=torch.bfloat16)
    others["model.layers.0.mlp.shared_expert.gate_proj.weight"] = torch.zeros(128, 256, dtype=torch.bfloat16)
    others["model.layers.0.linear_attn.conv1d.weight"] = torch.zeros(64, 1, 4, dtype=torch.bfloat16)
    others["model.layers.0.router.bank"] = torch.zeros(2, 3, dtype=torch.bfloat16)
    report = export_hf(tmp_path / "out", model_store(), others, CONFIG, version=1)
    for name, tensor in _read(report.directory).items():
        if tensor.ndim < 2 or name.endswith("_scale_inv"):
            continue
        in_scheme = ".mlp.experts." in name
        listed = name.rpartition(".")[0] in report.excluded
        assert in_scheme != listed, name


def test_tied_lm_head_without_a_tensor_is_excluded_all_the_same(tmp_path: Path) -> None:
    others = other_tensors()
    del others["lm_head.weight"]
    report = export_hf(tmp_path / "out", model_store(), others, {**CONFIG, "tie_word_embeddings": True}, version=1)
    assert "lm_head" in report.excluded


def test_bf16_experts_need_no_quantization_config(tmp_path: Path) -> None:
    store = model_store(format="bf16")
    config = {**CONFIG, "quantization_config": {"quant_method": "fp8"}}
    report = export_hf(tmp_path / "out", store, other_tensors(), config, version=1)
    assert report.excluded == ()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG
    tensors = _read(report.directory)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert not any(name.endswith("_scale_inv") for name in tensors)


def test_large_models_are_split_into_shards_with_an_index(tmp_path: Path) -> None:
    store = model_store()
    report = export_hf(tmp_path / "out", store, other_tensors(), CONFIG, version=1, max_shard_bytes=200_000)
    shards = sorted(path.name for path in report.directory.glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((report.directory / "model.safetensors.index.json").read_text())
    tensors = _read(report.directory)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name, shard in index["weight_map"].items():
        with safe_open(report.directory / shard, framework="pt") as file:
            assert name in file.keys()  # noqa: SIM118
    lazy = LazyTensors(report.directory)
    assert same_bytes({n: lazy[n].view(torch.uint8) for n in published(store)}, published(store))


def test_experts_of_several_ranks_make_one_directory(tmp_path: Path) -> None:
    whole = model_store()
    items = list(whole.canonical())
    export_hf(tmp_path / "out", iter([*items[20:], *items[:20]]), other_tensors(), CONFIG, version=1)
    experts = {n: t for n, t in _read(tmp_path / "out").items() if ".experts." in n}
    assert same_bytes({n: t.view(torch.uint8) for n, t in experts.items()}, published(whole))
    with pytest.raises(ConfigError, match="given twice"):
        export_hf(tmp_path / "two", [*items, items[3]], other_tensors(), CONFIG, version=1)


def test_companion_files_come_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_text("must not be copied")
    (source / "config.json").write_text("must not be copied")
    export_hf(tmp_path / "out", model_store(), other_tensors(), CONFIG, version=1, companions=source)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"tokenizer.json", "config.json", "model.safetensors"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3_moe"


def test_expected_names_are_applied_names(tmp_path: Path) -> None:
    others = other_tensors()
    stacked = [f"model.layers.{i}.mlp.experts.{name}" for i in range(LAYERS) for name in ("gate_up_proj", "down_proj")]
    names = [*others, *published(model_store()), *stacked]
    export_hf(tmp_path / "out", model_store(), others, CONFIG, version=1, expected=names)
    del others["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"missing 'model\.norm\.weight'"):
        export_hf(tmp_path / "two", model_store(), others, CONFIG, version=1, expected=names)
    assert not (tmp_path / "two").exists()


def _edited(name: str, tensor: torch.Tensor | None) -> list[CanonicalTensor]:
    return [
        item if item.name != name else CanonicalTensor(name, tensor, item.role)
        for item in model_store().canonical()
        if item.name != name or tensor is not None
    ]


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (lambda: _edited(f"{EXPERT}.weight_scale_inv", None), rf"{EXPERT}.weight: FP8 without its scale"),
        (lambda: _edited(f"{EXPERT}.weight", None), r"1 scales without their weight"),
        (lambda: _edited(f"{EXPERT}.weight_scale_inv", torch.ones(1, 2).bfloat16()), "float32.*bfloat16"),
        (lambda: _edited(f"{EXPERT}.weight_scale_inv", torch.ones(2, 1)), r"\(1, 2\).*\(2, 1\)"),
        (lambda: _edited(f"{EXPERT}.weight", torch.zeros(128, 256)), "float32"),
        (lambda: _edited(f"{EXPERT}.weight", torch.zeros(128 * 256).to(torch.float8_e4m3fn)), "2-D"),
        (lambda: _edited(f"{EXPERT}.weight", torch.zeros(128, 256).bfloat16()), "a bfloat16 weight has no scale"),
        (lambda: _edited(f"{EXPERT}.weight", torch.zeros(128, 200).to(torch.float8_e4m3fn)), "ragged"),
        (list, "no expert tensors"),
        (
            lambda: [*model_store().canonical(), CanonicalTensor("model.norm.weight", torch.zeros(4), "weight")],
            "its name says role 'other'",
        ),
        (
            lambda: [CanonicalTensor(i.name.replace("_inv", ""), i.tensor, i.role) for i in model_store().canonical()],
            "weight_scale",
        ),
        (
            lambda: [i for i in model_store().canonical() if ".experts.3." not in i.name],
            r"6 expert tensors that the config promises are missing.*experts\.3\.",
        ),
    ],
)
def test_experts_that_do_not_fit_are_refused_before_anything_is_written(tmp_path: Path, experts, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export_hf(tmp_path / "out", experts(), other_tensors(), CONFIG, version=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": None}, "no 'architectures'"),
        ({"num_experts": EXPERTS - 1}, r"6 experts that the config does not know.*experts\.3\."),
        ({"num_experts": None}, "no number under num_experts or num_local_experts"),
        ({"moe_intermediate_size": 256}, r"the config says \(256, 256\), found \(256, 128\)"),
        ({"num_hidden_layers": 3}, "12 expert tensors that the config promises are missing"),
        ({"mlp_only_layers": [1]}, r"12 experts that the config does not know.*layers\.1"),
        ({"architectures": ["Qwen3_5MoeForCausalLM"]}, "the store was made for Qwen3MoeForCausalLM"),
        ({"hidden_act": torch.nn.SiLU()}, "not plain data"),
    ],
)
def test_config_and_store_must_agree(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export_hf(tmp_path / "out", model_store(), other_tensors(), {**CONFIG, **change}, version=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("lm_head.weight", torch.zeros(512, 256).to(torch.float8_e4m3fn), "only routed experts are FP8"),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", torch.ones(2, 2), "only routed experts are FP8"),
        (f"{EXPERT}.weight", torch.zeros(128, 256).bfloat16(), "given as expert and as other"),
        ("model.layers.1.mlp.experts.bias", torch.zeros(4, 256), "one layer's experts have one format"),
        ("model.layers.1.weight", torch.zeros(4, 256), "would also exclude the FP8 experts"),
        ("model.mlp.weight", torch.zeros(4, 256), "would also exclude the FP8 experts"),
        ("lm_head.bias", torch.zeros(4, dtype=torch.complex64), "safetensors cannot hold torch.complex64"),
    ],
)
def test_others_that_would_break_an_engine_are_refused(tmp_path: Path, name, tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export_hf(tmp_path / "out", model_store(), {**other_tensors(), name: tensor}, CONFIG, version=1)
    assert list(tmp_path.iterdir()) == []


def test_a_layer_with_bf16_experts_is_excluded_as_a_whole(tmp_path: Path) -> None:
    """Engines hold a layer's experts in one module: listing experts one by one would not keep it BF16."""
    store = model_store()
    items = [item for item in store.canonical() if ".layers.0." not in item.name]
    bf16 = {
        item.name: torch.zeros(item.tensor.shape, dtype=torch.bfloat16)
        for item in store.canonical()
        if ".layers.0." in item.name and item.role == "weight"
    }
    report = export_hf(tmp_path / "out", items, {**other_tensors(), **bf16}, CONFIG, version=1)
    assert "model.layers.0.mlp.experts" in report.excluded
    assert not any(".experts." in module for module in report.excluded)


def test_only_a_sealed_store_is_exported(tmp_path: Path) -> None:
    store = model_store()
    arguments = (tmp_path / "out", store, other_tensors(), CONFIG)
    store.begin(1)
    with pytest.raises(GenerationError, match="generation 1"):
        export_hf(*arguments, version=1)
    store.mark_torn("on purpose")
    with pytest.raises(TornError, match="on purpose"):
        export_hf(*arguments, version=1)
    offloaded = model_store()
    offloaded.offload()
    with pytest.raises(StateError, match="offloaded"):
        export_hf(tmp_path / "out", offloaded, other_tensors(), CONFIG, version=1)
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_begins_during_an_export_waits_for_its_end(tmp_path: Path) -> None:
    store, others = model_store(), other_tensors()
    reading, go_on = threading.Event(), threading.Event()

    class SlowTensors(dict):
        def items(self):
            reading.set()
            go_on.wait(30)
            return super().items()

    arguments = (tmp_path / "out", store, SlowTensors(others), CONFIG)
    export = threading.Thread(target=export_hf, args=arguments, kwargs={"version": 5}, daemon=True)
    export.start()
    reading.wait(30)
    with pytest.raises(DeadlineError, match="export of version 5"):
        store.begin(1, timeout=0.05)
    go_on.set()
    export.join(60)
    store.begin(1, timeout=0)
    assert _read(tmp_path / "out").keys() == others.keys() | {entry.name for entry in store.entries()}


def test_masters_and_store_are_only_read(tmp_path: Path) -> None:
    """Masters were once overwritten from dequantized FP8 at start-up. Exporting changes no byte of what it reads."""
    store, others = model_store(), other_tensors()
    before, copies = published(store), {name: tensor.clone() for name, tensor in others.items()}
    export_hf(tmp_path / "out", store, others, CONFIG, version=1)
    assert same_bytes(published(store), before)
    assert all(torch.equal(others[name], copies[name]) for name in others)
    store.check_wt()


def test_an_existing_directory_is_replaced_only_on_demand(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="overwrite=True"):
        export_hf(target, model_store(), other_tensors(), CONFIG, version=1)
    assert (target / "notes.txt").read_text() == "mine"
    export_hf(target, model_store(), other_tensors(), CONFIG, version=2, overwrite=True)
    assert {path.name for path in target.iterdir()} == {"config.json", "model.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
