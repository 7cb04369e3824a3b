"""The torch sampler: its forward pass against Hugging Face's model, and how it draws and scores tokens."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoder_support import check_stretches, whole

from weftmoe.rollout import Request, Rollout
from weftmoe.rollout.checks import byte_check
from weftmoe.rollout.forward import Decoder
from weftmoe.rollout.sampling import Distribution, draw, score
from weftmoe.rollout.torch_sampler import SamplerSettings, TorchRollout
from weftpub.errors import ConfigError, StateError
from weftpub.publisher import PublishReport

# The forward pass. The real model of SGLang is used by the loop's tests; here is one of the same names, filled from
# Hugging Face's, whose logits are the truth.

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}


def holder(**tensors: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(**{name: SimpleNamespace(data=tensor) for name, tensor in tensors.items()})


@pytest.fixture(scope="module", params=[True, False], ids=["rescaled", "not rescaled"])
def twins(request: pytest.FixtureRequest) -> tuple[Any, Decoder]:
    """Hugging Face's model, and a decoder over its weights in SGLang's layout."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **CONFIG, norm_topk_prob=request.param, max_position_embeddings=64, tie_word_embeddings=False
    )
    model = Qwen3MoeForCausalLM._from_config(config, experts_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    layers = []
    for layer in model.model.layers:
        attention, experts = layer.self_attn, layer.mlp.experts
        qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).detach()
        layers.append(
            SimpleNamespace(
                self_attn=SimpleNamespace(
                    qkv_proj=holder(weight=qkv),
                    o_proj=attention.o_proj,
                    q_norm=attention.q_norm,
                    k_norm=attention.k_norm,
                ),
                input_layernorm=layer.input_layernorm,
                post_attention_layernorm=layer.post_attention_layernorm,
                mlp=SimpleNamespace(
                    gate=layer.mlp.gate,
                    experts=holder(w13_weight=experts.gate_up_proj.detach(), w2_weight=experts.down_proj.detach()),
                ),
            )
        )
    inner = SimpleNamespace(layers=layers, embed_tokens=model.model.embed_tokens, norm=model.model.norm)
    served = SimpleNamespace(
        hf_config={**CONFIG, "norm_topk_prob": request.param},
        parallel=SimpleNamespace(tp_size=1),
        model=SimpleNamespace(model=inner, lm_head=model.lm_head),
    )
    decoder = Decoder(served)
    decoder.refresh()
    return model, decoder


def test_logits_are_those_of_transformers(twins: tuple[Any, Decoder]) -> None:
    model, decoder = twins
    tokens = torch.randint(0, 50, (3, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    torch.testing.assert_close(whole(decoder, tokens), expected, rtol=1e-4, atol=1e-4)


def test_stretches_with_a_cache_are_the_whole(twins: tuple[Any, Decoder]) -> None:
    check_stretches(twins[1])


def test_a_split_model_is_refused() -> None:
    served = SimpleNamespace(hf_config=CONFIG, parallel=SimpleNamespace(tp_size=2))
    with pytest.raises(ConfigError, match=r"rollout\.tensor=1"):
        Decoder(served)


# Drawing, from a model that is a table: the next token's logits depend on the last token alone.


class Table:
    """`rows` of logits by last token."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def cache(self, rows: int, length: int) -> None:
        return None

    def __call__(self, tokens: torch.Tensor, start: torch.Tensor, cache: object) -> torch.Tensor:
        return self.rows[tokens]


TABLE = Table(torch.randn(6, 6, generator=torch.Generator().manual_seed(3)) * 2)


def test_tokens_are_drawn_with_their_probabilities() -> None:
    requests = [Request((1, 4), 1, seed) for seed in range(4000)]
    drawn = draw(TABLE, requests, Distribution(), frozenset())
    counts = Counter(one.tokens[0] for one in drawn)
    expected = TABLE.rows[4].softmax(-1)
    for token in range(6):
        assert counts[token] / 4000 == pytest.approx(float(expected[token]), abs=0.03)
    for one in drawn[:20]:
        assert one.logprobs[0] == pytest.approx(float(expected[one.tokens[0]].log()), abs=1e-6)


def test_a_request_does_not_depend_on_its_company() -> None:
    requests = [Request((seed % 6,) * (1 + seed % 3), 3 + seed % 5, seed) for seed in range(12)]
    together = draw(TABLE, requests, Distribution(), frozenset({5}))
    alone = [draw(TABLE, [request], Distribution(), frozenset({5}))[0] for request in requests]
    assert together == alone
    assert draw(TABLE, requests, Distribution(), frozenset({5})) == together


def test_end_tokens_and_limits_end_a_completion() -> None:
    sure = Table(torch.full((6, 6), -50.0) + 100.0 * torch.eye(6).roll(1, dims=1))  # always the next number
    ended: list[int] = []
    first, second = draw(
        sure, [Request((0,), 10, 0), Request((3,), 4, 1)], Distribution(), frozenset({2}), ended.append
    )
    assert (first.tokens, first.stopped) == ([1, 2], True)
    assert (second.tokens, second.stopped) == ([4, 5, 0, 1], False)
    assert sum(ended) == 2
    assert draw(sure, [], Distribution(), frozenset()) == []


def test_temperature_and_top_p_change_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    cut = Distribution(top_p=0.7).log_probabilities(logits)
    assert cut.exp().tolist() == pytest.approx([0.625, 0.375, 0.0])
    sharp = Distribution(temperature=0.5).log_probabilities(logits)
    assert sharp.exp().tolist() == pytest.approx([0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38])


def test_scores_are_what_drawing_reported() -> None:
    requests = [Request((1, 2, 3)[: 1 + seed % 3], 4, seed) for seed in range(5)]
    drawn = draw(TABLE, requests, Distribution(), frozenset())
    sequences = [((*r.tokens, *d.tokens), len(r.tokens)) for r, d in zip(requests, drawn, strict=True)]
    for found, one in zip(score(TABLE, sequences, Distribution()), drawn, strict=True):
        assert found == pytest.approx(one.logprobs, abs=1e-6)


# As a rollout.


def sampler(tmp_path: Any, **changes: Any) -> TorchRollout:
    settings: dict[str, Any] = {
        "model": tmp_path,
        "format": "fp8",
        "path": "weftpub",
        "stops": (2,),
        "temperature": 1.0,
        "top_p": 1.0,
        "work": tmp_path,
        "run_id": "run",
    }
    return TorchRollout(SamplerSettings(**settings | changes))


def test_a_log_says_that_no_server_ran(tmp_path: Any) -> None:
    rollout: Rollout = sampler(tmp_path)
    assert "never from the trainer's" in rollout.notes[0]
    assert "by weftpub" in rollout.notes[0]
    assert "SGLang's own loader" in sampler(tmp_path, path="native").notes[0]


def test_nothing_is_asked_before_the_start(tmp_path: Any) -> None:
    with pytest.raises(StateError, match="has not been started"):
        sampler(tmp_path).generate([Request((1,), 1, 0)])


def test_a_record_names_one_digest_over_all_pieces() -> None:
    report = PublishReport("run", 3, "digest", {}, 10, 1, 2, 0, {}, sha256={"b": "2", "a": "1"})
    check = byte_check(report)
    assert (check.method, check.pieces, check.bytes, check.matched, check.digest) == ("sha256", 2, 10, True, "digest")
    turned = PublishReport("run", 3, "digest", {}, 10, 1, 2, 0, {}, sha256={"a": "1", "b": "2"})
    assert byte_check(turned).sha256 == check.sha256
    other = PublishReport("run", 3, "digest", {}, 10, 1, 2, 0, {}, sha256={"a": "1", "b": "3"})
    assert byte_check(other).sha256 != check.sha256
    assert byte_check(PublishReport("run", 3, "digest", {}, 10, 1, 2, 0, {})).method == "checksum"


def test_a_record_says_what_was_copied_and_what_was_in_place() -> None:
    """All bytes are compared; those that both map were not moved for it."""
    check = byte_check(PublishReport("run", 3, "digest", {}, 10, 1, 2, 0, {}, shared_nbytes=90))
    assert (check.bytes, check.in_place) == (100, 90)
