"""What the demo starts from: settings, text, and a checkpoint that Hugging Face's own code loads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import weftpub_demo.config as demo_config
import weftpub_demo.run as demo_run
from weftpub.errors import ConfigError
from weftpub_demo.checkpoint import hf_config, read_shape, tensor_shapes, write_checkpoint
from weftpub_demo.config import DemoConfig, Device, ModelShape, OptimizerName, Variant, require_packages, shipped_text
from weftpub_demo.corpus import ByteCorpus
from weftpub_demo.progress import Progress
from weftpub_kernels import KernelError

SMALL = ModelShape(hidden=128, expert_intermediate=128, heads=2, kv_heads=2, head_dim=64)


def test_the_checkpoint_is_a_qwen3_moe_for_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_checkpoint(tmp_path, SMALL, seed=1)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert {key: value for key, value in info.items() if value} == {}
    logits = model(torch.arange(12)[None]).logits
    assert logits.shape == (1, 12, 256)
    assert torch.isfinite(logits).all()


def test_one_seed_gives_one_checkpoint(tmp_path: Path) -> None:
    written = [
        (write_checkpoint(tmp_path / name, SMALL, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert written[0] == written[1]
    assert written[0] != written[2]


def test_every_tensor_of_the_shape_is_written_in_bf16(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, seed=1)
    written = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == dict(tensor_shapes(SMALL))
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}


def test_a_shape_is_read_back_from_its_checkpoint(tmp_path: Path) -> None:
    assert read_shape(write_checkpoint(tmp_path, SMALL, seed=1)) == SMALL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"mlp_only_layers": [0]}, "dense"),
        ({"decoder_sparse_step": 2}, "dense"),
        ({"quantization_config": {"quant_method": "fp8"}}, "already quantized"),
        ({"num_experts": 4}, "8 or more experts"),
        ({"num_hidden_layers": 1}, "2 or more layers"),
        ({"moe_intermediate_size": 192}, "expert_intermediate is 192"),
        ({"hidden_size": 200}, "hidden is 200"),
        ({"vocab_size": 100}, "vocab_size is 100"),
    ],
)
def test_a_model_that_the_demo_cannot_run_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(SMALL) | change))
    with pytest.raises(ConfigError, match=message):
        read_shape(tmp_path)


def test_a_config_without_experts_is_refused(tmp_path: Path) -> None:
    config = hf_config(SMALL)
    del config["num_experts"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="num_experts"):
        read_shape(tmp_path)


def test_labels_are_the_next_bytes() -> None:
    text = bytes(range(200))
    tokens, labels = ByteCorpus(text, batch=3, sequence=16, seed=0).next()
    assert tokens.shape == labels.shape == (3, 16)
    assert torch.equal(labels, tokens + 1)


def test_a_text_of_one_window_is_enough_and_a_shorter_one_is_refused() -> None:
    tokens, labels = ByteCorpus(b"x" * 16 + b"y", batch=1, sequence=16, seed=0).next()
    assert (tokens[0, 0].item(), labels[0, -1].item()) == (ord("x"), ord("y"))
    with pytest.raises(ConfigError, match="16 bytes; one window needs 17"):
        ByteCorpus(b"x" * 16, batch=1, sequence=16, seed=0)


def test_the_seed_decides_the_windows() -> None:
    def draw(seed: int) -> list[int]:
        return ByteCorpus(shipped_text(), batch=2, sequence=32, seed=seed).next()[0].flatten().tolist()

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_the_shipped_text_is_plain_prose_of_a_useful_size() -> None:
    text = shipped_text()
    assert 20_000 < len(text) < 40_000
    assert text.isascii()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 4}, "--steps is 4"),
        ({"text": Path("no-such-file")}, "--text no-such-file is not a file"),
        ({"model": Path("no-such-directory")}, "no config.json"),
        ({"limit_s": 0.0}, "--limit is 0"),
        ({"limit_s": float("nan")}, "--limit is nan"),
        ({"limit_s": float("inf")}, "--limit is inf"),
        ({"lr": float("nan")}, "--lr is nan"),
        ({"lr": -1.0}, r"--lr is -1\.0"),
        ({"out": Path(__file__)}, "no directory that can be written to"),
        ({"out": Path(__file__) / "below"}, "no directory that can be written to"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    """A deadline of nan was found out a minute later, an output folder that is a file by a traceback at the end."""
    config = DemoConfig(out=tmp_path)
    config.check()
    with pytest.raises(ConfigError, match=message):
        replace(config, **change).check()


@pytest.mark.parametrize(
    ("preset", "message"),
    [("nothing", "no preset is named 'nothing'"), ("hf", "may not be published"), ("slime", "runs on a GPU only")],
)
def test_a_preset_that_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, message: str
) -> None:
    """The store found it out, after receivers had been started and Megatron-core loaded; later, with a traceback. And a
    mistyped preset replaced the report of the good run before it by one of no steps.
    """
    monkeypatch.setattr(demo_run, "start_receivers", lambda *_, **__: pytest.fail("receivers were started"))
    (tmp_path / "report.json").write_text("of the run before")
    with pytest.raises((ConfigError, KernelError), match=message):
        demo_run.run(DemoConfig(out=tmp_path, preset=preset, device=Device.CPU), Progress("", 1))
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert (tmp_path / "report.json").read_text() == "of the run before"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """/proc looks writable and is not: the demo ended in three tracebacks."""
    (tmp_path / "demo-out").touch()
    with pytest.raises(ConfigError, match=r"--out .*demo-out cannot be made: File exists; give another one"):
        demo_run.run(DemoConfig(out=tmp_path, device=Device.CPU), Progress("", 1))


@pytest.mark.parametrize(
    ("variant", "optimizer", "missing"),
    [
        (Variant.FP8, OptimizerName.MUON, "megatron-core, awex, emerging-optimizers"),
        (Variant.BASELINE, OptimizerName.ADAMW, "megatron-core"),
    ],
)
def test_an_environment_without_the_systems_is_told_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, variant: Variant, optimizer: OptimizerName, missing: str
) -> None:
    """`pip install .` brings the command, and no Megatron: `weftpub demo` ended in a ModuleNotFoundError."""
    require_packages(variant, optimizer)
    absent = {"megatron", "awex", "emerging_optimizers"}
    monkeypatch.setattr(demo_config, "find_spec", lambda name: None if name in absent else name)
    with pytest.raises(ConfigError, match=rf"the demo runs {missing}, which this environment lacks"):
        require_packages(variant, optimizer)
