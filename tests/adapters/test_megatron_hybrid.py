"""Qwen3.5-MoE in Megatron-core, with weights of a checkpoint, against transformers' own model: logits, names of both
checkpoint forms, and the bytes that are published of it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_checkpoints import LAYERS, make_model, multimodal_form, read_tensors, save_text_form
from megatron_support import megatron_ready

from weftpub.errors import CheckpointError, ConfigError
from weftpub_adapters.megatron import AttachSettings, Qwen35MoeFields, read_config, read_fields, read_hybrid_parameters

pytestmark = pytest.mark.isolated("megatron")

LENGTH = 70  # more than one chunk of the delta rule


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Path]]:
    """transformers' model, and its checkpoint in both forms."""
    megatron_ready()
    here = tmp_path_factory.mktemp("qwen35")
    model = make_model()
    save_text_form(model, here / "text")
    multimodal_form(here / "text", here / "multimodal")
    return model, {"text": here / "text", "multimodal": here / "multimodal"}


def built(directory: Path, **changes: Any) -> Any:
    """Megatron's model of the loop, filled by its loader."""
    from weftmoe import settings as composed
    from weftmoe.loop import model as loop_model
    from weftmoe.loop.weights import load_hf

    settings = composed.load("bf16", smoke="cpu")
    fields = read_fields(read_config(directory))
    original = loop_model.config_fields
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_model, "config_fields", lambda *given: {**original(*given), **changes})
        model = loop_model.build_model(settings, fields, torch.device("cpu"))
    load_hf(model, directory, fields, grouped=False)
    return model.eval()


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    rows, length = tokens.shape
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        found: torch.Tensor = model(tokens, torch.arange(length)[None].repeat(rows, 1), mask)
    return found


@pytest.mark.parametrize("form", ["text", "multimodal"])
def test_logits_are_those_of_transformers(forms: tuple[Any, dict[str, Path]], form: str) -> None:
    """Gated attention, partial rotary embedding, delta nets, shared expert, norms and routers, in FP32."""
    reference, directories = forms
    wide = {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32}
    model = built(directories[form], **wide)
    tokens = torch.randint(0, 96, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(input_ids=tokens).logits
    assert float(expected.std()) > 0.2
    torch.testing.assert_close(logits(model, tokens), expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("form", ["text", "multimodal"])
def test_what_is_published_of_it_is_the_checkpoint(forms: tuple[Any, dict[str, Path]], form: str) -> None:
    """Loader and publisher know the layouts apart from each other; together they change no bit."""
    from weftpub_adapters.awex import SourceMapping

    _, directories = forms
    directory = directories[form]
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    found = SourceMapping(built(directory), None, config).tensors()
    expected = read_tensors(directories["text"])
    for name, tensor in list(expected.items()):
        for whole in ("in_proj_qkv", "conv1d"):
            if f".{whole}." in name:
                del expected[name]
                part = whole.removesuffix("_qkv")
                keys, values = 2 * 16, 4 * 16
                for letter, rows in zip("qkv", tensor.split((keys, keys, values)), strict=True):
                    expected[name.replace(whole, f"{part}_{letter}")] = rows
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        wanted = tensor.to(torch.bfloat16).float()
        if name.endswith("linear_attn.norm.weight"):  # BF16 holds fewer numbers near one than near zero
            torch.testing.assert_close(found[name].float(), wanted, rtol=2**-8, atol=0)
        else:
            assert torch.equal(found[name].float(), wanted), name


def test_fields_of_both_forms_agree(forms: tuple[Any, dict[str, Path]]) -> None:
    _, directories = forms
    text, whole = (read_fields(read_config(directories[form])) for form in ("text", "multimodal"))
    assert isinstance(text, Qwen35MoeFields)
    assert isinstance(whole, Qwen35MoeFields)
    assert (text.multimodal, whole.multimodal) == (False, True)
    assert text.full == whole.full == tuple(kind == "full_attention" for kind in LAYERS)
    assert (text.rotary_percent, text.rope_theta, text.shared, text.kernel) == (0.25, 10000.0, 64, 4)
    assert {**vars(text), "multimodal": True} == vars(whole)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("expert", [1, 2])
def test_ranks_together_hold_the_whole(forms: tuple[Any, dict[str, Path]], tensor: int, expert: int) -> None:
    """Every element of the whole model's parameters lies on a rank, and the parts that several read are equal."""
    _, directories = forms
    tensors, fields = read_tensors(directories["text"]), read_fields(read_config(directories["text"]))
    assert isinstance(fields, Qwen35MoeFields)
    whole = dict(read_hybrid_parameters(tensors, fields))
    seen: dict[str, list[torch.Tensor]] = {}
    for rank in range(tensor):
        for block in range(expert):
            for name, part in read_hybrid_parameters(tensors, fields, tensor=(rank, tensor), expert=(block, expert)):
                head, local, tail = name.partition("local_experts.")
                if local:
                    number, _, rest = tail.partition(".")
                    name = f"{head}{local}{int(number) + block * fields.experts // expert}.{rest}"
                if block == 0 or local:
                    seen.setdefault(name, []).append(part)
    assert sorted(seen) == sorted(whole)
    for name, parts in seen.items():
        total = sum(part.numel() for part in parts)
        if total == whole[name].numel():
            assert torch.equal(torch.cat([p.flatten() for p in parts]).sort()[0], whole[name].flatten().sort()[0]), name
        else:
            assert total == tensor * whole[name].numel()
            assert all(torch.equal(part, whole[name]) for part in parts), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"model.layers.0.mlp.extra.weight": torch.ones(1)}), "1 unknown"),
        (lambda t: t.pop("model.layers.2.linear_attn.A_log"), r"1 tensors missing \['model.layers.2.linear_attn.A_log"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight: shape \(3,\)"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), "is torch.int8"),
        (lambda t: t.update({"model.language_model.norm.weight": torch.ones(64)}), "under two names"),
        (lambda t: t.update({"model.layers.1.linear_attn.A_log": torch.ones(4)}), "1 unknown"),
    ],
)
def test_a_wrong_checkpoint_is_named(forms: tuple[Any, dict[str, Path]], change: Any, message: str) -> None:
    _, directories = forms
    tensors, fields = read_tensors(directories["text"]), read_fields(read_config(directories["text"]))
    change(tensors)
    assert isinstance(fields, Qwen35MoeFields)
    with pytest.raises(CheckpointError, match=message):
        list(read_hybrid_parameters(tensors, fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"layer_types": ["full_attention"]}, "names 1 layers"),
        ({"linear_num_key_heads": None}, "linear_num_key_heads"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "Qwen3NextForCausalLM"),
        ({"quantization_config": {"quant_method": "fp8"}}, "already quantized"),
    ],
)
def test_other_models_are_refused(forms: tuple[Any, dict[str, Path]], change: dict[str, Any], message: str) -> None:
    _, directories = forms
    with pytest.raises(ConfigError, match=message):
        read_fields({**read_config(directories["text"]), **change})


def test_ranks_that_cannot_share_heads_are_refused(forms: tuple[Any, dict[str, Path]]) -> None:
    _, directories = forms
    tensors, fields = read_tensors(directories["text"]), read_fields(read_config(directories["text"]))
    assert isinstance(fields, Qwen35MoeFields)
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        list(read_hybrid_parameters(tensors, fields, tensor=(0, 4)))


def test_an_attachments_store_is_of_the_models_family() -> None:
    """An engine that shares the experts' memory compares it with its own."""
    assert AttachSettings(architecture="Qwen3_5MoeForCausalLM").architecture == "Qwen3_5MoeForCausalLM"
    with pytest.raises(ConfigError, match="'GptForCausalLM'; known: Qwen3MoeForCausalLM"):
        AttachSettings(architecture="GptForCausalLM")
