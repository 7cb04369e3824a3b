"""Megatron's real modules built from a checkpoint, and their experts attached to a store."""

from typing import Any

import pytest
import torch
from checkpoints import random_tensors
from megatron_support import attached_model, batch, dequantized, megatron_ready, write_generation

from weftpub.errors import ConfigError, StateError
from weftpub.store import ExpertStore

pytestmark = pytest.mark.isolated("megatron")


@pytest.fixture(scope="module", autouse=True)
def _ready() -> None:
    megatron_ready()


@pytest.fixture(scope="module")
def fields(hf_config: dict[str, Any]) -> Any:
    from weftpub_adapters.megatron.fields import Qwen3MoeFields

    return Qwen3MoeFields.from_hf(hf_config)


def loaded_model(hf_config: dict[str, Any], fields: Any, **overrides: Any) -> Any:
    from weftpub_adapters.megatron import build_model, fill_parameters, read_parameters

    model = build_model(fields, overrides)
    fill_parameters(model, read_parameters(random_tensors(hf_config), fields))
    return model


@pytest.mark.parametrize("norm_topk", [True, False])
def test_logits_are_those_of_transformers(hf_config: dict[str, Any], norm_topk: bool) -> None:
    """The name table, head order, rotary base, norms and routing in one number, in FP32."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from weftpub_adapters.megatron.fields import Qwen3MoeFields

    config = {**hf_config, "norm_topk_prob": norm_topk}
    reference = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).eval()
    packed = _packed_experts(random_tensors(config), config, reference.state_dict())
    reference.load_state_dict(packed, strict=True)
    plain = {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32}
    model = loaded_model(config, Qwen3MoeFields.from_hf(config), **plain)
    tokens, _ = batch(2, 24, config["vocab_size"])
    positions = torch.arange(24).expand_as(tokens)
    mask = torch.ones(24, 24, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        ours = model(tokens, positions, mask)
        theirs = reference(tokens).logits
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


def test_the_tables_names_are_the_models_names(hf_config: dict[str, Any], fields: Any) -> None:
    from weftpub_adapters.megatron.names import parameter_sources, plain_name

    model = loaded_model(hf_config, fields)
    assert {plain_name(name) for name, _ in model.named_parameters()} == {
        source.name for source in parameter_sources(fields)
    }


def test_an_unknown_override_and_a_refused_one_are_named(fields: Any) -> None:
    from weftpub_adapters.megatron import build_model

    with pytest.raises(ConfigError, match="no_such_field"):
        build_model(fields, {"no_such_field": 1})
    with pytest.raises(ConfigError, match="moe_grouped_gemm"):
        build_model(fields, {"moe_grouped_gemm": True})


def test_a_world_that_replicates_experts_is_refused() -> None:
    from weftpub_adapters.megatron import initialize_parallel

    with pytest.raises(ConfigError, match="expert_parallel=2 in a world of 1"):
        initialize_parallel(expert_parallel=2)


@pytest.mark.parametrize("format", ["fp8", "bf16"])
def test_attached_experts_own_no_memory_and_compute_with_the_store(
    hf_config: dict[str, Any], fields: Any, format: str
) -> None:
    model, store, attachment = attached_model(hf_config, fields, format)
    assert attachment.storage_bytes == 0
    assert len(attachment.placeholders) == len(store.layout.matrices) == 32
    plain = loaded_model(hf_config, fields)
    for name, parameter in _experts(plain):
        parameter.data.copy_(dequantized(store, name))
    tokens, labels = batch(2, 16, fields.vocab)
    assert torch.equal(_loss(model, tokens, labels), _loss(plain, tokens, labels))
    assert attachment.storage_bytes == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_main_gradients_equal_those_of_ordinary_experts(
    hf_config: dict[str, Any], fields: Any, overlap: bool, recompute: bool
) -> None:
    """Under DDP, over three microbatches: hooks fire, nothing counts twice, FP32 sums."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    overrides = full if recompute else {}
    model, store, attachment, ddp = attached_model(hf_config, fields, "fp8", overlap=overlap, overrides=overrides)
    plain = loaded_model(hf_config, fields, **overrides)
    for name, parameter in _experts(plain):
        parameter.data.copy_(dequantized(store, name))
    plain_ddp = _ddp(plain, overlap)
    for wrapped in (ddp, plain_ddp):
        wrapped.zero_grad_buffer()
        for seed in range(3):
            tokens, labels = batch(2, 16, fields.vocab, seed)
            if seed < 2:
                with wrapped.no_sync():
                    _loss(wrapped, tokens, labels).mean().backward()
            else:
                _loss(wrapped, tokens, labels).mean().backward()
        wrapped.finish_grad_sync()
    ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    for name, parameter in theirs.items():
        # An ordinary linear rounds each microbatch's weight gradient to BF16 first; the store's adds it in FP32.
        error = (ours[name].main_grad - parameter.main_grad).norm() / (parameter.main_grad.norm() + 1e-12)
        assert error < 0.01, name
        assert ours[name].grad is None, name
    assert attachment.storage_bytes == 0


def test_detaching_leaves_an_ordinary_model_from_the_masters(hf_config: dict[str, Any], fields: Any) -> None:
    model, store, attachment = attached_model(hf_config, fields, "fp8")
    masters = {matrix.name: torch.randn(store.layout.shape(matrix.projection)) for matrix in store.layout.matrices}
    with pytest.raises(ConfigError, match="expected a weight of shape"):
        attachment.detach({name: master for name, master in masters.items() if "experts.3" not in name})
    assert attachment.storage_bytes == 0
    attachment.detach(masters)
    assert not attachment.attached
    for name, parameter in attachment.placeholders.items():
        assert torch.equal(parameter, masters[name].to(torch.bfloat16))
    write_generation(store, 1, seed=9)
    plain = loaded_model(hf_config, fields)
    for name, parameter in _experts(plain):
        parameter.data.copy_(masters[name])
    tokens, labels = batch(2, 16, fields.vocab)
    assert torch.equal(_loss(model, tokens, labels), _loss(plain, tokens, labels))
    with pytest.raises(StateError, match="detached already"):
        attachment.detach(masters)


def test_what_cannot_be_attached_is_refused_and_left_alone(hf_config: dict[str, Any], fields: Any) -> None:
    from weftpub_adapters.megatron import ExpertAttachment

    model = loaded_model(hf_config, fields)
    small = ExpertStore(range(2), range(4), 256, 512)
    with pytest.raises(ConfigError, match=r"layers\.0\.experts\.4\.fc1.*the store holds experts \[0, 1, 2, 3\] only"):
        ExpertAttachment(model, small)
    narrow = ExpertStore(range(2), range(8), 256, 256)
    with pytest.raises(ConfigError, match=r"\[1024, 256\]: the store holds \[512, 256\]"):
        ExpertAttachment(model, narrow)
    assert all(parameter.untyped_storage().nbytes() for _, parameter in _experts(model))
    store = ExpertStore(range(2), range(8), 256, 512)
    ExpertAttachment(model, store)
    with pytest.raises(ConfigError, match="already attached"):
        ExpertAttachment(model, store)


def test_experts_in_a_flat_buffer_are_refused(hf_config: dict[str, Any], fields: Any) -> None:
    """A distributed optimizer makes parameters views of one buffer; freeing one view's storage would free them all."""
    from weftpub_adapters.megatron import ExpertAttachment

    model = loaded_model(hf_config, fields)
    flat = torch.zeros(2 * 1024 * 256, dtype=torch.bfloat16)
    name, parameter = next(iter(_experts(model)))
    parameter.data = flat[: parameter.numel()].view(parameter.shape)
    with pytest.raises(ConfigError, match=f"{name}.*use_distributed_optimizer=False"):
        ExpertAttachment(model, ExpertStore(range(2), range(8), 256, 512))
    assert flat.untyped_storage().nbytes() > 0


def _experts(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    from weftpub_adapters.megatron.experts import expert_parameters

    return [(matrix.name, parameter) for matrix, parameter in expert_parameters(model, 0)]


def _loss(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    length = tokens.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    return model(tokens, torch.arange(length).expand_as(tokens), mask, labels=labels)


def _ddp(model: Any, overlap: bool) -> Any:
    from megatron_support import wrap

    return wrap(model, overlap)


def _packed_experts(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], wanted: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Experts as transformers keeps them in memory: one tensor for all gate and up rows, one for all down rows."""
    state = {name: tensor.float() for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp.experts"
        experts = range(config["num_experts"])
        stacked = [
            torch.cat([tensors[f"{at}.{e}.gate_proj.weight"], tensors[f"{at}.{e}.up_proj.weight"]]) for e in experts
        ]
        state[f"{at}.gate_up_proj"] = torch.stack(stacked).float()
        state[f"{at}.down_proj"] = torch.stack([tensors[f"{at}.{e}.down_proj.weight"] for e in experts]).float()
    assert state.keys() == wanted.keys(), "transformers names its experts otherwise now"
    return state
