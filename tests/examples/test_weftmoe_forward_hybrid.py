"""The torch sampler's forward pass of Qwen3.5-MoE against Hugging Face's model, over weights in SGLang's layout."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoder_support import check_stretches, whole

from weftmoe.rollout import Request
from weftmoe.rollout.forward_hybrid import HybridDecoder, decoder_of
from weftmoe.rollout.sampling import Distribution, draw, score

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 50,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "default",
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}


def holder(*parts: torch.Tensor, name: str = "weight") -> SimpleNamespace:
    return SimpleNamespace(**{name: SimpleNamespace(data=torch.cat([part.detach() for part in parts]))})


def mixer(layer: Any) -> dict[str, Any]:
    """What SGLang's layer has in place of transformers' attention or delta net."""
    if layer.block_type == "full_attention":
        a = layer.self_attn
        qkv = holder(a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)
        return {"qkv_proj": qkv, "o_proj": a.o_proj, "q_norm": a.q_norm, "k_norm": a.k_norm}
    net = layer.linear_attn
    inner = SimpleNamespace(
        in_proj_qkvz=holder(net.in_proj_qkv.weight, net.in_proj_z.weight),
        in_proj_ba=holder(net.in_proj_b.weight, net.in_proj_a.weight),
        conv1d=net.conv1d,
        A_log=net.A_log,
        dt_bias=net.dt_bias,
        norm=net.norm,
        out_proj=net.out_proj,
    )
    return {"linear_attn": inner}


@pytest.fixture(scope="module")
def twins() -> tuple[Any, HybridDecoder]:
    """Hugging Face's model, and a decoder over its weights in SGLang's layout, of a multimodal model's config."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    torch.manual_seed(0)
    config = Qwen3_5MoeTextConfig(**CONFIG, max_position_embeddings=64, use_cache=False)
    model = Qwen3_5MoeForCausalLM._from_config(config, experts_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    layers = []
    for layer in model.model.layers:
        mlp = layer.mlp
        experts = SimpleNamespace(
            w13_weight=SimpleNamespace(data=mlp.experts.gate_up_proj.detach()),
            w2_weight=SimpleNamespace(data=mlp.experts.down_proj.detach()),
        )
        shared = SimpleNamespace(
            gate_up_proj=holder(mlp.shared_expert.gate_proj.weight, mlp.shared_expert.up_proj.weight),
            down_proj=mlp.shared_expert.down_proj,
        )
        layers.append(
            SimpleNamespace(
                **mixer(layer),
                input_layernorm=layer.input_layernorm,
                post_attention_layernorm=layer.post_attention_layernorm,
                mlp=SimpleNamespace(
                    gate=mlp.gate, experts=experts, shared_expert=shared, shared_expert_gate=mlp.shared_expert_gate
                ),
            )
        )
    inner = SimpleNamespace(layers=layers, embed_tokens=model.model.embed_tokens, norm=model.model.norm)
    served = SimpleNamespace(
        hf_config={"text_config": CONFIG},
        parallel=SimpleNamespace(tp_size=1),
        model=SimpleNamespace(model=inner, lm_head=model.lm_head),
    )
    decoder = decoder_of(served)
    assert isinstance(decoder, HybridDecoder)
    assert not decoder.fresh
    decoder.refresh()
    assert decoder.fresh
    return model, decoder


def test_logits_are_those_of_transformers(twins: tuple[Any, HybridDecoder]) -> None:
    model, decoder = twins
    tokens = torch.randint(0, 50, (3, 21), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    assert float(expected.std()) > 0.2
    torch.testing.assert_close(whole(decoder, tokens), expected, rtol=1e-4, atol=1e-4)


def test_stretches_with_a_cache_are_the_whole(twins: tuple[Any, HybridDecoder]) -> None:
    """Padding runs through the delta nets' states, too."""
    check_stretches(twins[1])


def test_what_is_drawn_is_scored_alike(twins: tuple[Any, HybridDecoder]) -> None:
    _, decoder = twins
    requests = [Request((1, 2, 3), 6, 5), Request((4,), 8, 6)]
    drawn = draw(decoder, requests, Distribution(), frozenset({0}))
    sequences = [((*r.tokens, *d.tokens), len(r.tokens)) for r, d in zip(requests, drawn, strict=True)]
    for one, values in zip(drawn, score(decoder, sequences, Distribution()), strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(values), rtol=1e-4, atol=1e-4)


def test_what_is_dropped_must_be_read_again(twins: tuple[Any, HybridDecoder]) -> None:
    _, decoder = twins
    decoder.drop()
    assert not decoder.fresh
    decoder.refresh()
    assert decoder.fresh
