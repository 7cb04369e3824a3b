"""Names: the golden map of a tiny model, building and reading, and that gate lies over up."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from store_support import fill, make_store

from weftpub.canonical import FAMILIES, ExpertName, family_of
from weftpub.errors import ConfigError
from weftpub.masters import ExpertMatrix
from weftpub.store import StoreLayout

GOLDEN = Path(__file__).parents[1] / "golden" / "canonical"
QWEN3 = FAMILIES["Qwen3MoeForCausalLM"]


def _map(architecture: str, form: str) -> list[dict[str, object]]:
    layout = StoreLayout((0, 1), (0, 3), 256, 128, form, family_of(architecture))
    return [
        {
            "name": entry.name,
            "checkpoint_name": layout.family.to_checkpoint(entry.name),
            "role": entry.role,
            "dtype": str(entry.dtype).removeprefix("torch."),
            "shape": list(entry.shape),
            "matrix": entry.matrix.name,
            "rows": [
                layout.family.rows(entry.matrix, entry.part, layout.shape(entry.matrix.projection)[0]).start,
                layout.family.rows(entry.matrix, entry.part, layout.shape(entry.matrix.projection)[0]).stop,
            ],
        }
        for entry in layout.entries()
    ]


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_map_of_a_tiny_model_is_the_golden_one(architecture: str, form: str, request: pytest.FixtureRequest) -> None:
    path = GOLDEN / f"{architecture}.{form}.json"
    found = _map(architecture, form)
    if request.config.getoption("--update-golden"):
        path.write_text("[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n")
    assert found == json.loads(path.read_text())


@given(
    st.sampled_from(list(FAMILIES)),
    st.integers(0, 200),
    st.integers(0, 1000),
    st.sampled_from([("fc1", "gate_proj"), ("fc1", "up_proj"), ("fc2", "down_proj")]),
    st.sampled_from(["weight", "scale"]),
)
def test_every_built_name_is_read_back(architecture, layer, expert, place, role) -> None:
    family = FAMILIES[architecture]
    matrix = ExpertMatrix(layer, expert, place[0])
    name = family.name(matrix, place[1], role)
    assert family.parse(name) == ExpertName(matrix, place[1], role)
    assert family.role(name) == role
    assert family.from_checkpoint(family.to_checkpoint(name)) == name


def test_scale_name_is_the_one_that_engines_look_for() -> None:
    name = QWEN3.name(ExpertMatrix(3, 17, "fc1"), "up_proj", "scale")
    assert name == "model.layers.3.mlp.experts.17.up_proj.weight_scale_inv"


def test_wrong_scale_suffix_is_refused_and_not_passed_on_as_another_tensor() -> None:
    """An export once wrote `weight_scale` instead of `weight_scale_inv`; the engine ignored the unknown name and served
    uninitialised scales, with a success message."""
    with pytest.raises(ConfigError, match="weight_scale_inv"):
        QWEN3.parse("model.layers.0.mlp.experts.0.gate_proj.weight_scale")
    with pytest.raises(ConfigError, match="gate_up_proj"):
        QWEN3.role("model.layers.0.mlp.experts.0.gate_up_proj.weight")


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_expert.gate_proj.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "mtp.layers.0.mlp.experts.0.gate_proj.weight",
    ],
)
def test_everything_else_is_other(name: str) -> None:
    assert QWEN3.parse(name) is None
    assert QWEN3.role(name) == "other"


def test_multimodal_checkpoints_keep_the_language_model_one_level_deeper() -> None:
    family = FAMILIES["Qwen3_5MoeForConditionalGeneration"]
    pairs = {
        "model.layers.0.mlp.gate.weight": "model.language_model.layers.0.mlp.gate.weight",
        "model.embed_tokens.weight": "model.language_model.embed_tokens.weight",
        "model.visual.blocks.0.attn.qkv.weight": "model.visual.blocks.0.attn.qkv.weight",
        "lm_head.weight": "lm_head.weight",
    }
    assert {name: family.to_checkpoint(name) for name in pairs} == pairs
    assert {family.from_checkpoint(there): there for there in pairs.values()} == pairs


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*Qwen3MoeForCausalLM"):
        family_of("LlamaForCausalLM")


def test_part_of_the_other_matrix_is_refused() -> None:
    with pytest.raises(ConfigError, match="down_proj"):
        QWEN3.name(ExpertMatrix(0, 0, "fc1"), "down_proj", "weight")


def test_gate_rows_lie_over_up_rows_and_are_views() -> None:
    """A gathered fc1 once arrived as [g0|u0|g1|u1]. Gate filled with 1 and up with 2 must come out so."""
    store = make_store()
    masters = {m.name: torch.ones(store.layout.shape(m.projection)) for m in store.layout.matrices}
    for name, master in masters.items():
        if name.endswith("fc1"):
            master[128:] = 2.0
    fill(store, 0, masters)
    tensors = {item.name: item.tensor for item in store.canonical()}
    w13 = store.layer(3).w13
    for expert, position in ((4, 0), (7, 2)):
        prefix = f"model.layers.3.mlp.experts.{expert}."
        for part, value, rows in (("gate_proj", 1.0, slice(0, 128)), ("up_proj", 2.0, slice(128, 256))):
            weight, scale = tensors[f"{prefix}{part}.weight"], tensors[f"{prefix}{part}.weight_scale_inv"]
            assert torch.all(weight.float() * scale.repeat_interleave(128, 1) == value)
            assert weight.data_ptr() == w13[position, rows].data_ptr()
            assert weight.is_contiguous()
            assert scale.is_contiguous()
            assert scale.dtype == torch.float32


def test_parts_of_a_delta_net_are_joined_for_a_checkpoint() -> None:
    family = family_of("Qwen3_5MoeForConditionalGeneration")
    at = "model.layers.2.linear_attn"
    rows = {letter: torch.full((n, 4), float(n)) for letter, n in zip("qkv", (2, 2, 3), strict=True)}
    tensors = {f"{at}.in_proj_{letter}.weight": part for letter, part in rows.items()}
    tensors[f"{at}.in_proj_z.weight"] = z = torch.ones(3, 4)
    joined = family.join(dict(reversed(tensors.items())))
    there = "model.language_model.layers.2.linear_attn"
    assert joined.keys() == {f"{there}.in_proj_qkv.weight", f"{there}.in_proj_z.weight"}
    assert torch.equal(joined[f"{there}.in_proj_qkv.weight"], torch.cat(list(rows.values())))
    assert joined[f"{there}.in_proj_z.weight"] is z


@pytest.mark.parametrize("absent", ["q", "k", "v"])
def test_a_missing_part_is_named(absent: str) -> None:
    parts = {f"model.layers.0.linear_attn.conv1d_{x}.weight": torch.ones(1, 1, 4) for x in "qkv" if x != absent}
    with pytest.raises(ConfigError, match="missing"):
        family_of("Qwen3_5MoeForCausalLM").join(parts)


def test_families_without_fused_tensors_join_nothing() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    assert QWEN3.join({name: torch.ones(1)}).keys() == {name}
