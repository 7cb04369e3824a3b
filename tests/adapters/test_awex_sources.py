"""The trainer's tensors, mapped once by AWEX's converter and bound at each publish without it."""

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import apart, random_tensors
from layouts import BASE, HYBRID
from megatron_support import bare_trainer, megatron_ready, write_generation

from weftpub.errors import GenerationError, PlanError
from weftpub.store import ExpertStore

pytestmark = pytest.mark.isolated("megatron")


@pytest.fixture(scope="module", autouse=True)
def _ready() -> None:
    megatron_ready()


def bridge(*names: str) -> dict[str, Callable[..., Any]]:
    """Functions of Megatron-Bridge that are pure torch; the package itself imports TransformerEngine."""
    import megatron.core

    source = Path(megatron.core.__file__).parents[1] / "bridge" / "models" / "conversion" / "param_mapping.py"
    wanted = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", "") in names]
    for node in wanted:
        for argument in node.args.args:
            argument.annotation = None
        node.returns = None
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(wanted, []), str(source), "exec"), scope)
    return {name: scope[name] for name in names}


def load_hybrid(model: Any, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill Megatron's model from a checkpoint as Megatron-Bridge does, by Bridge's own packing."""
    pack = bridge("merge_qkv_weights", "merge_gdn_linear_weights", "_fuse_gdn_separate_to_grouped")
    sizes = model.config
    parameters = {name.removeprefix("module."): parameter.data for name, parameter in model.named_parameters()}
    parameters["embedding.word_embeddings.weight"].copy_(tensors["model.embed_tokens.weight"])
    parameters["decoder.final_layernorm.weight"].copy_(tensors["model.norm.weight"])
    if "output_layer.weight" in parameters:
        parameters["output_layer.weight"].copy_(tensors["lm_head.weight"])
    layers = [(f"decoder.layers.{n}", f"model.layers.{n}", kind) for n, kind in enumerate(config["layer_types"])]
    if config.get("mtp_num_hidden_layers"):
        layers.append(("mtp.layers.0.mtp_model_layer", "mtp.layers.0", "full_attention"))
        for megatron, hugging_face in (
            ("eh_proj", "fc"), ("enorm", "pre_fc_norm_embedding"), ("hnorm", "pre_fc_norm_hidden"),
            ("final_layernorm", "norm"),
        ):  # fmt: skip
            parameters[f"mtp.layers.0.{megatron}.weight"].copy_(tensors[f"mtp.{hugging_face}.weight"])
        for expert in range(config["num_experts"]):
            gate, up, down = (
                tensors[f"mtp.layers.0.mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            held = f"mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.{expert}"
            parameters[f"{held}.linear_fc1.weight"].copy_(torch.cat([gate, up]))
            parameters[f"{held}.linear_fc2.weight"].copy_(down)
    for here, there, kind in layers:

        def hf(name: str, there: str = there) -> torch.Tensor:
            return tensors[f"{there}.{name}"]

        filled = {
            "input_layernorm.weight": hf("input_layernorm.weight"),
            "pre_mlp_layernorm.weight": hf("post_attention_layernorm.weight"),
            "mlp.router.weight": hf("mlp.gate.weight"),
            "mlp.shared_experts.gate_weight": hf("mlp.shared_expert_gate.weight"),
            "mlp.shared_experts.linear_fc1.weight": torch.cat(
                [hf("mlp.shared_expert.gate_proj.weight"), hf("mlp.shared_expert.up_proj.weight")]
            ),
            "mlp.shared_experts.linear_fc2.weight": hf("mlp.shared_expert.down_proj.weight"),
        }
        if kind == "full_attention":
            q, k, v = (hf(f"self_attn.{part}_proj.weight") for part in "qkv")
            filled |= {
                "self_attention.linear_qkv.weight": pack["merge_qkv_weights"](sizes, q, k, v),
                "self_attention.linear_proj.weight": hf("self_attn.o_proj.weight"),
                "self_attention.q_layernorm.weight": hf("self_attn.q_norm.weight"),
                "self_attention.k_layernorm.weight": hf("self_attn.k_norm.weight"),
            }
        else:
            fused = pack["_fuse_gdn_separate_to_grouped"](
                sizes, *(hf(f"linear_attn.in_proj_{part}.weight") for part in ("qkv", "z", "b", "a"))
            )
            filled |= {
                "self_attention.in_proj.weight": pack["merge_gdn_linear_weights"](sizes, *fused),
                "self_attention.conv1d.weight": hf("linear_attn.conv1d.weight"),
                "self_attention.A_log": hf("linear_attn.A_log"),
                "self_attention.dt_bias": hf("linear_attn.dt_bias"),
                "self_attention.out_norm.weight": hf("linear_attn.norm.weight") - 1,
                "self_attention.out_proj.weight": hf("linear_attn.out_proj.weight"),
            }
        for name, tensor in filled.items():
            parameters[f"{here}.{name}"].copy_(tensor)


def hybrid(format: str = "fp8", **changes: Any) -> tuple[Any, ExpertStore, dict[str, Any]]:
    config = {**HYBRID, **changes}
    model, store = bare_trainer(config, format)
    write_generation(store, 0, seed=1)
    return model, store, config


def dense_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: tensor for n, tensor in tensors.items() if ".experts." not in n or n.startswith("mtp.")}


@pytest.mark.parametrize(("tied", "mtp"), [(False, 0), (True, 0), (False, 1)])
def test_a_hybrid_model_comes_back_out_as_its_checkpoint(tied: bool, mtp: int) -> None:
    """Bridge packs the checkpoint into Megatron's parameters, AWEX and this adapter take it apart again, every bit in
    its place; A_log, which a trainer keeps in BF16, is FP32 as engines want it."""
    from weftpub_adapters.awex import canonical_sources

    model, store, config = hybrid(tie_word_embeddings=tied, mtp_num_hidden_layers=mtp)
    tensors = random_tensors(config)
    if not tied:
        tensors["lm_head.weight"] = torch.randn(config["vocab_size"], config["hidden_size"]).to(torch.bfloat16)
    # The norm after the delta rule is stored less one in BF16, which not every value survives; these do.
    tensors = {n: (t * 64).round() / 64 if n.endswith("linear_attn.norm.weight") else t for n, t in tensors.items()}
    load_hybrid(model, config, tensors)
    sources = canonical_sources(model, store, config)
    expected = apart(config, dense_of(tensors))
    if tied:
        expected["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    held = {item.name: item.tensor for item in store.canonical()}
    assert sources.keys() == expected.keys() | held.keys()
    for name, tensor in (expected | held).items():
        assert sources[name].dtype == tensor.dtype, name
        assert torch.equal(_bits(sources[name]), _bits(tensor)), name
        assert sources[name].is_contiguous(), name


def test_a_canonical_hybrid_joins_into_the_checkpoints_tensors() -> None:
    from weftpub.canonical import family_of

    tensors = dense_of(random_tensors(HYBRID))
    published = apart(HYBRID, tensors)
    joined = family_of("Qwen3_5MoeForCausalLM").join(published)
    assert joined.keys() == tensors.keys()
    assert all(torch.equal(joined[name], tensors[name]) for name in tensors)


def test_parts_of_a_projection_cost_no_copy() -> None:
    """AWEX packs a delta net's projection for one engine's ranks, which copies it; in parts it is viewed."""
    from weftpub_adapters.awex import SourceMapping

    model, store, config = hybrid()
    mapping = SourceMapping(model, store, config)
    made = {name for name, view in mapping.views.items() if view.param == name}
    assert {name.split(".", 3)[-1] for name in made} == {
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
        "linear_attn.norm.weight", "linear_attn.A_log",
    }  # fmt: skip


def test_a_publish_runs_no_awex(monkeypatch: pytest.MonkeyPatch) -> None:
    """A converter over 7680 tensors at every publish took longer than the copy of their bytes."""
    from awex.converter.mcore_converter import McoreToHFWeightConverter

    from weftpub_adapters.awex import SourceMapping, seams

    model, store, config = hybrid()
    mapping = SourceMapping(model, store, config)

    def broken(*args: object, **kwargs: object) -> Any:
        raise AssertionError("AWEX was called")

    monkeypatch.setattr(McoreToHFWeightConverter, "convert_param", broken)
    monkeypatch.setattr(seams, "require_supported", broken)
    views = mapping.views
    bound = mapping.buffers(in_place=True, keep=True)
    assert bound.views is views
    assert (bound.in_place, bound.keep) == (True, True)
    assert mapping.buffers().views is views, "what a publisher derives from the views is kept as long as the object"
    assert len(bound.buffers) < len(views) / 2
    assert mapping.tensors().keys() == views.keys()


def test_a_binding_has_todays_values() -> None:
    from weftpub_adapters.awex import SourceMapping

    model, store, config = hybrid()
    tensors = random_tensors(config)
    load_hybrid(model, config, tensors)
    mapping = SourceMapping(model, store, config)
    before = mapping.tensors()
    write_generation(store, 1, seed=2)
    later = random_tensors(config, seed=5)
    load_hybrid(model, config, later)
    after = mapping.tensors()
    expected = apart(config, dense_of(later))
    expected = {name: tensor for name, tensor in expected.items() if not name.endswith("linear_attn.norm.weight")}
    for name, tensor in expected.items():
        assert torch.equal(_bits(after[name]), _bits(tensor)), name
        assert after[name] is before[name], f"{name} was not moved, so its view is the same object"
    assert all(torch.equal(_bits(after[item.name]), _bits(item.tensor)) for item in store.canonical())


def test_moved_memory_is_seen() -> None:
    """A list of tensors from before an offload kept dead memory alive, and published it."""
    from weftpub_adapters.awex import SourceMapping

    model, store, config = hybrid()
    mapping = SourceMapping(model, store, config)
    before = mapping.tensors()
    name = "model.layers.3.self_attn.o_proj.weight"
    parameter = dict(model.named_parameters())["module.decoder.layers.3.self_attention.linear_proj.weight"]
    parameter.data = torch.full_like(parameter.data, 3)
    store.offload()
    store.reload()
    after = mapping.tensors()
    assert torch.all(after[name] == 3)
    assert after[name].data_ptr() == parameter.data_ptr() != before[name].data_ptr()
    held = {item.name: item.tensor for item in store.canonical()}
    assert all(after[key].data_ptr() == tensor.data_ptr() for key, tensor in held.items())
    kept = "model.layers.0.mlp.gate.weight"
    assert after[kept] is before[kept]


def test_memory_that_is_not_there_is_named() -> None:
    from weftpub_adapters.awex import SourceMapping

    model, store, config = hybrid()
    mapping = SourceMapping(model, store, config)
    parameter = dict(model.named_parameters())["module.decoder.layers.0.mlp.router.weight"]
    size = parameter.untyped_storage().nbytes()
    parameter.untyped_storage().resize_(0)
    with pytest.raises(PlanError, match=r"layers\.0\.mlp\.router\.weight \(its memory is released\)"):
        mapping.buffers()
    parameter.untyped_storage().resize_(size)
    mapping.buffers()
    parameter.data = parameter.data.float()
    with pytest.raises(PlanError, match=r"router\.weight \(torch\.float32 .*mapped as torch\.bfloat16"):
        mapping.buffers()


def test_only_a_sealed_generation_is_bound() -> None:
    from weftpub_adapters.awex import SourceMapping

    model, store = bare_trainer(dict(BASE))
    mapping = SourceMapping(model, store, BASE)
    with pytest.raises(GenerationError):
        mapping.buffers()
    write_generation(store, 0, seed=1)
    mapping.buffers()


def test_a_plans_names_are_enough() -> None:
    from weftpub_adapters.awex import SourceMapping

    model, store, config = hybrid(tie_word_embeddings=True)
    names = {"model.embed_tokens.weight", "model.layers.0.mlp.experts.3.gate_proj.weight"}
    mapping = SourceMapping(model, store, config, names=names)
    assert mapping.views.keys() == names
    assert len(mapping.buffers().buffers) == 2
    with pytest.raises(PlanError, match=r"1 planned tensors are not among this model's: model\.layers\.9"):
        SourceMapping(model, store, config, names={*names, "model.layers.9.mlp.gate.weight"})


def test_made_tensors_can_be_let_go_of() -> None:
    from weftpub_adapters.awex import SourceMapping

    model, store = bare_trainer(dict(BASE))
    write_generation(store, 0, seed=1)
    mapping = SourceMapping(model, store, BASE)
    name = "model.layers.0.self_attn.q_proj.weight"
    first = mapping.tensors()[name]
    assert mapping.tensors()[name].data_ptr() == first.data_ptr()
    mapping.release()
    second = mapping.tensors()[name]
    assert second is not first
    assert torch.equal(_bits(second), _bits(first))


def test_bf16_experts_come_from_the_models_own_parameters() -> None:
    """Where nothing is attached the experts are ordinary parameters."""
    from weftpub_adapters.awex import canonical_sources, trainer_shards

    model, _ = bare_trainer(dict(BASE))
    sources = canonical_sources(model, None, BASE)
    assert {shard.name for shard in trainer_shards(model, None, BASE).shards} == sources.keys()
    fc1 = dict(model.named_parameters())["module.decoder.layers.1.mlp.experts.local_experts.4.linear_fc1.weight"]
    up = sources["model.layers.1.mlp.experts.4.up_proj.weight"]
    assert up.data_ptr() == fc1.data_ptr() + fc1.nbytes // 2


def test_an_offloaded_trainer_is_planned_with_all_the_same() -> None:
    """An engine that joins while the trainer's weights are away: a trainer that viewed them died at their empty
    storage."""
    from weftpub_adapters.awex import trainer_shards

    model, store = bare_trainer(dict(BASE))
    expected = trainer_shards(model, store, BASE)
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)
    assert trainer_shards(model, store, BASE).shards == expected.shards


@pytest.mark.parametrize("prefix", ["module.", "module.module.language_model."])
def test_transformer_engines_names_mean_the_same(prefix: str) -> None:
    """Its layers keep the norm before attention inside the projection, and grouped experts number their weights."""
    from weftpub_adapters.awex import SourceMapping

    model, store, config = hybrid(mtp_num_hidden_layers=1)
    kinds = [*config["layer_types"], "full_attention"]

    def renamed(name: str) -> str:
        plain = name.removeprefix("module.")
        layer = -1 if plain.startswith("mtp.") else int(plain.split(".")[2]) if "decoder.layers." in plain else 0
        fused = "linear_qkv" if kinds[layer] == "full_attention" else "in_proj"
        plain = plain.replace(".input_layernorm.weight", f".self_attention.{fused}.layer_norm_weight")
        if ".local_experts." in plain:
            before, _, after = plain.partition(".local_experts.")
            expert, linear, _ = after.split(".")
            plain = f"{before}.{linear}.weight{expert}"
        return prefix + plain

    named = {renamed(name): parameter for name, parameter in model.named_parameters()}
    te = SimpleNamespace(config=model.config, named_parameters=named.items, named_buffers=lambda: ())
    there, here = (SourceMapping(m, store, config).views for m in (te, model))
    assert there.keys() == here.keys()
    for name, view in here.items():
        assert (there[name].offset, there[name].shape) == (view.offset, view.shape)
        same = view.param if view.param == name or view.param.startswith("store.") else renamed(view.param)
        assert there[name].param == same


def test_an_output_norm_that_is_not_zero_centred_is_refused() -> None:
    """AWEX adds one to it whatever the trainer's norms mean."""
    from weftpub_adapters.awex import SourceMapping

    model, store, config = hybrid()
    model.config.layernorm_zero_centered_gamma = False
    with pytest.raises(PlanError, match=r"out_norm.*layernorm_zero_centered_gamma=True"):
        SourceMapping(model, store, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.flip(0), None),
        (lambda rows: rows.repeat(2, 1), None),
        (lambda rows: rows * 2, "otherwise than by choosing rows"),
        (lambda rows: rows + rows.flip(0), "otherwise than by choosing rows"),
    ],
)
def test_what_a_converter_does_is_seen_or_refused(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor], message: str | None
) -> None:
    from awex.converter.mcore_converter import McoreToHFWeightConverter

    from weftpub_adapters.awex import SourceMapping

    original = McoreToHFWeightConverter._convert_attention_param

    def changed(self: Any, name: str, parameter: torch.Tensor, layer: str) -> Any:
        pairs = original(self, name, parameter, layer)
        return [(n, change(p)) if n == "self_attn.o_proj.weight" else (n, p) for n, p in pairs]

    monkeypatch.setattr(McoreToHFWeightConverter, "_convert_attention_param", changed)
    model, store = bare_trainer(dict(BASE))
    write_generation(store, 0, seed=1)
    if message is not None:
        with pytest.raises(PlanError, match=rf"o_proj\.weight: AWEX makes it of .*linear_proj.weight {message}"):
            SourceMapping(model, store, BASE)
        return
    sources = SourceMapping(model, store, BASE).tensors()
    parameter = dict(model.named_parameters())["module.decoder.layers.0.self_attention.linear_proj.weight"]
    assert torch.equal(_bits(sources["model.layers.0.self_attn.o_proj.weight"]), _bits(change(parameter.detach())))


def test_a_trainers_splits_follow_its_groups() -> None:
    from weftpub_adapters.awex.sharding import sharding_strategy

    def split(name: str, tp: int, expert_tp: int = 1) -> tuple[str, int, int]:
        rank = SimpleNamespace(tp_size=tp, attn_tp_size=tp)
        strategy = sharding_strategy()("mcore", False, False, tp, tp, 2, expert_tp, rank)
        kind, dimension, shards = strategy.get_sharding_strategy(f"model.layers.0.{name}")
        return kind.name, dimension, shards

    assert split("mlp.experts.3.down_proj.weight_scale_inv", 2) == ("NO_SHARDING", 1, 1)
    assert split("self_attn.o_proj.weight", 2) == ("TP_SHARDING", 1, 2)
    assert split("linear_attn.in_proj_z.weight", 4) == ("TP_SHARDING", 0, 4)
    assert split("linear_attn.A_log", 4) == ("TP_SHARDING", 0, 4)
    assert split("mlp.shared_expert.down_proj.weight", 2) == ("TP_SHARDING", 1, 2)
    for whole in (
        "mlp.shared_expert_gate.weight",
        "mlp.gate.weight",
        "input_layernorm.weight",
        "self_attn.q_norm.weight",
    ):
        assert split(whole, 2) == ("NO_SHARDING", 0, 1)
    with pytest.raises(PlanError, match="expert_tensor_parallel_size=1"):
        split("mlp.experts.3.down_proj.weight", 2, expert_tp=2)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_tensors_one_by_one_are_those_that_are_bound() -> None:
    from weftpub_adapters.awex import SourceMapping

    for tied in (False, True):
        model, store, config = hybrid(tie_word_embeddings=tied)
        load_hybrid(model, config, random_tensors(config))
        mapping = SourceMapping(model, store, config)
        bound = mapping.tensors()
        for copied in (False, True):
            found = mapping.one_by_one(copied=copied)
            assert list(found) == list(mapping.views)
            for name, tensor in found.items():
                assert torch.equal(_bits(tensor), _bits(bound[name])), name
                if copied:
                    assert tensor.untyped_storage().data_ptr() != bound[name].untyped_storage().data_ptr()
        with pytest.raises(KeyError):
            found["model.layers.9.self_attn.q_proj.weight"]
