"""The loop's parts that need neither Megatron nor an engine: collecting, names and shards of weights, logits in
stretches, optimizer settings, minibatches and checkpoints on disk.
"""

import json
import math
import os
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weftmoe import settings as composed
from weftmoe.data import PromptSampler, read_prompts, write_arithmetic
from weftmoe.grpo import (
    CorrectionSettings,
    LossSettings,
    Microbatch,
    Sequence,
    SequenceSums,
    group_advantages,
    microbatches,
    summarize,
)
from weftmoe.loop import checkpoint
from weftmoe.loop import run as run_module
from weftmoe.loop import trainer as trainer_module
from weftmoe.loop.collect import Collector
from weftmoe.loop.memory import DeviceMemory
from weftmoe.loop.model import config_fields, join_world
from weftmoe.loop.optimizer import learning_rate, optimizer_fields
from weftmoe.loop.prompts import EncodedPrompt, stop_tokens
from weftmoe.loop.ranks import Ranks
from weftmoe.loop.scoring import log_probabilities
from weftmoe.loop.step import FixedTokens, _minibatches, _over_ranks, publish_version, train_step
from weftmoe.loop.stop import StopNotice
from weftmoe.loop.trainer import MegatronGrpo
from weftmoe.loop.weights import megatron_name, tensor_parallel_part
from weftmoe.reward import Rewarder
from weftmoe.rollout import Request, Sample, Span
from weftmoe.schema import Settings
from weftmoe.telemetry import Counters, Timers
from weftpub.errors import CheckpointError, NonFiniteGradientError, StateError
from weftpub_adapters.megatron import Qwen3MoeFields

PUBLISHED = range(5)  # what the oracle answers from is the last of them


def settings(variant: str = "fp8", optimizer: str = "muon", *overrides: str) -> Settings:
    return composed.load(variant, optimizer=optimizer, smoke="cpu", overrides=list(overrides))


# Collecting.


class Digits:
    """A tokenizer whose tokens are their own text; 99 ends."""

    def decode(self, tokens: Many[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(str(token) for token in tokens if token != 99)


class Oracle:
    """A rollout that answers some completions rightly: those whose number in the group is below `right`."""

    def __init__(self, truths: dict[tuple[int, ...], str], right: Many[int]) -> None:
        self.truths, self.right, self.asked = truths, list(right), 0
        self.requests: list[list[Request]] = []

    def generate(self, requests: Many[Request]) -> list[Sample]:
        self.requests.append(list(requests))
        seen: dict[tuple[int, ...], int] = {}
        samples = []
        for request in requests:
            number = seen[request.tokens] = seen.get(request.tokens, -1) + 1
            if number == 0:
                self.asked += 1
            good = number < self.right[(self.asked - 1) % len(self.right)]
            text = self.truths[request.tokens] if good else "7777"
            tokens = (*(int(letter) for letter in text), 99)
            logprobs = tuple(-0.5 for _ in tokens)
            samples.append(Sample(tokens, logprobs, "stop" if good else "length", (Span(4, 0, len(tokens)),)))
        return samples


def collector(tmp_path: Path, right: Many[int], *overrides: str) -> tuple[Collector, Oracle, PromptSampler]:
    chosen = settings("fp8", "muon", "algorithm.prompts=4", "algorithm.completions=3", *overrides)
    write_arithmetic(tmp_path / "sums.jsonl", 40, seed=0)
    read = read_prompts(tmp_path / "sums.jsonl")
    encoded = {
        prompt.index: EncodedPrompt(prompt, (number, number), (2,)) for number, prompt in enumerate(read.prompts)
    }
    oracle = Oracle({one.tokens: one.prompt.ground_truth for one in encoded.values()}, right)
    sampler = PromptSampler(read.prompts, seed=1, epochs=1)
    return Collector(chosen, sampler, encoded, Digits(), Rewarder()), oracle, sampler


def test_a_step_is_collected(tmp_path: Path) -> None:
    made, oracle, sampler = collector(tmp_path, [1, 3, 0, 2])
    advanced: list[int] = []
    found = made.collect(5, oracle, Timers(), advanced.append, published=PUBLISHED)
    assert found is not None
    assert found.rewards == (1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0)
    assert [s.index for s in found.sequences] == list(range(12))
    advantages = [round(s.advantage, 3) for s in found.sequences]
    assert advantages[:3] == [1.414, -0.707, -0.707]
    assert advantages[3:9] == [0.0] * 6
    assert found.versions == {4}
    assert (found.kept, found.dropped, found.rounds, found.completions) == (4, 0, 1, 12)
    assert found.prompt_tokens == 24
    assert found.completion_tokens == sum(found.completion_lengths)
    assert found.cut == 6, "wrong ones ran into the limit"
    assert sum(advanced) == 12
    assert sampler.drawn == 4
    total = settings().length.total
    assert all(request.limit == total - 2 for request in oracle.requests[0])
    assert len({request.seed for request in oracle.requests[0]}) == 12


def test_seeds_follow_from_the_step(tmp_path: Path) -> None:
    """A resumed run must ask for the very completions that the unbroken one asked for."""
    first, one, _ = collector(tmp_path, [1])
    again, other, _ = collector(tmp_path, [1])
    later, third, _ = collector(tmp_path, [1])
    first.collect(2, one, Timers(), published=PUBLISHED)
    again.collect(2, other, Timers(), published=PUBLISHED)
    later.collect(3, third, Timers(), published=PUBLISHED)
    assert one.requests == other.requests
    assert {r.seed for r in one.requests[0]}.isdisjoint(r.seed for r in third.requests[0])


def test_seeds_can_repeat(tmp_path: Path) -> None:
    """Two steps on the same prompts then differ by their weights alone."""
    repeated = ("rollout.sampling.repeat=true", "train.deterministic=true")
    first, one, _ = collector(tmp_path, [1], *repeated)
    later, other, _ = collector(tmp_path, [1], *repeated)
    first.collect(1, one, Timers(), published=PUBLISHED)
    later.collect(2, other, Timers(), published=PUBLISHED)
    assert one.requests == other.requests
    assert len({request.seed for request in one.requests[0]}) == 12


def test_dynamic_sampling_draws_more_prompts(tmp_path: Path) -> None:
    on = ("algorithm.dynamic_sampling=true", "algorithm.max_resamples=2")
    made, oracle, sampler = collector(tmp_path, [0, 3, 1, 0], *on)  # one informative group in four
    found = made.collect(1, oracle, Timers(), published=PUBLISHED)
    assert found is not None
    assert (found.kept, found.dropped, found.rounds) == (3, 9, 3), "three rounds of four, then what there is"
    assert sampler.drawn == 12
    assert len(found.sequences) == 9
    assert len(found.rewards) == found.completions == 36, "the reward is that of everything sampled"
    assert len({request.seed for round in oracle.requests for request in round}) == 36


def test_dynamic_sampling_asks_whether_answers_are_right_and_not_how_long_they_are(tmp_path: Path) -> None:
    """With the punishment of long answers the rewards of a group that was wrong throughout differed. It was kept, and
    what it taught was to be wrong in few words."""
    on = ("algorithm.dynamic_sampling=true", "algorithm.max_resamples=0")
    punished = ("data.max_prompt_tokens=2", "algorithm.overlong_tokens=90")
    made, oracle, _ = collector(tmp_path, [0, 1, 3, 2], *on, *punished)
    generate = oracle.generate

    def of_many_lengths(requests: Many[Request]) -> list[Sample]:
        cut = [((s.tokens * 90)[: 90 - 5 * n], s) for n, s in enumerate(generate(requests))]
        return [Sample(t, (-1.0,) * len(t), s.finish, (Span(4, 0, len(t)),)) for t, s in cut]

    judge = made._rewarder.judge
    right = iter([0, 0, 0, 1, 0, 0, 1, 1, 1, 1, 1, 0])
    made._rewarder.judge = lambda jobs: ([float(next(right)) for _ in jobs], judge(jobs)[1])  # type: ignore[method-assign]
    oracle.generate = of_many_lengths  # type: ignore[method-assign]
    found = made.collect(1, oracle, Timers(), published=PUBLISHED)
    assert found is not None
    assert (found.kept, found.dropped) == (2, 2)


def test_a_step_without_information_says_so(tmp_path: Path) -> None:
    """Every group was all wrong. A run reported that its completions came from no version, and asked about other
    publishers."""
    made, oracle, _ = collector(tmp_path, [0], "algorithm.dynamic_sampling=true", "algorithm.max_resamples=1")
    with pytest.raises(StateError, match="none of the 8 groups of 2 rounds has rewards that differ"):
        made.collect(1, oracle, Timers(), published=PUBLISHED)


def test_data_that_ends_without_information_ends_the_run(tmp_path: Path) -> None:
    made, oracle, sampler = collector(tmp_path, [0], "algorithm.dynamic_sampling=true", "algorithm.max_resamples=99")
    assert made.collect(1, oracle, Timers(), published=PUBLISHED) is None
    assert sampler.left == 0


def test_the_data_ends(tmp_path: Path) -> None:
    made, oracle, _ = collector(tmp_path, [1])
    steps = [made.collect(step, oracle, Timers(), published=PUBLISHED) for step in range(1, 12)]
    assert steps[9] is not None
    assert steps[10] is None, "40 prompts are ten steps of four"


def test_long_completions_are_punished_softly(tmp_path: Path) -> None:
    """The last 90 tokens before the limit cost up to 1; the task reward stays what the verifier said."""
    made, oracle, _ = collector(tmp_path, [1], "data.max_prompt_tokens=2", "algorithm.overlong_tokens=90")
    found = made.collect(1, oracle, Timers(), published=PUBLISHED)
    assert found is not None
    assert found.rewards[:3] == (1.0, 0.0, 0.0)
    free = settings().length.total - 2 - 90
    punished = [max(0, length - free) / 90 for length in found.completion_lengths[:3]]
    assert punished[1] > 0
    expected = group_advantages([reward - cost for reward, cost in zip(found.rewards, punished, strict=False)])
    assert tuple(s.advantage for s in found.sequences[:3]) == expected.advantages


def test_an_engine_without_logprobs_is_named(tmp_path: Path) -> None:
    made, oracle, _ = collector(tmp_path, [1])
    generate = oracle.generate
    oracle.generate = lambda requests: [Sample(s.tokens, (), s.finish, s.spans) for s in generate(requests)]  # type: ignore[method-assign]
    with pytest.raises(StateError, match="log-probs"):
        made.collect(1, oracle, Timers(), published=PUBLISHED)


def test_an_engine_that_computes_nan_ends_the_run(tmp_path: Path) -> None:
    """An engine whose weights held NaN gave NaN as log-probs. The correction rejects such tokens, each for itself:
    every token was rejected, the loss and its gradient were zero, and the run went on for hours without training.
    """
    made, oracle, _ = collector(tmp_path, [1])
    generate = oracle.generate
    oracle.generate = (
        lambda requests: [  # type: ignore[method-assign]
            Sample(s.tokens, (*s.logprobs[:-1], math.nan), s.finish, s.spans) for s in generate(requests)
        ]
    )
    with pytest.raises(StateError, match="completion 1 of 3: the engine gave NaN as the log-prob of token"):
        made.collect(5, oracle, Timers(), published=PUBLISHED)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(4, 0, 1), (4, 2, 4)], "expected one that begins at 1, found version 4 from 0 to 1, version 4 from 2 to 4"),
        ([(4, 0, 3), (4, 2, 4)], "expected one that begins at 3"),
        ([(4, 1, 4)], "expected one that begins at 0"),
        ([(4, 0, 3), (4, 3, 2)], "expected one that begins at 3"),
        ([(4, 0, 3)], "its 4 tokens, each once: they end at 3"),
        ([(4, 0, 5)], "its 4 tokens, each once: they end at 5"),
        ([], "they end at 0, found no spans"),
        ([(4, 0, 1), (3, 1, 4)], "versions go backwards, version 4 from 0 to 1, version 3 from 1 to 4"),
        ([(3, 0, 1), (5, 1, 4)], "this run has published no version 5"),
        ([(-1, 0, 4)], "version"),
    ],
)
@pytest.mark.parametrize("dynamic", ["true", "false"])
def test_spans_that_cannot_be_true_name_their_sample(
    tmp_path: Path, spans: list[tuple[int, int, int]], message: str, dynamic: str
) -> None:
    """A completion came with spans that left out its middle. The versions in them were the right ones, so it was
    trained on, whatever had made the tokens between; now it is named, also if it would have been left out."""
    made, oracle, _ = collector(
        tmp_path, [1, 3, 0, 2], f"algorithm.dynamic_sampling={dynamic}", "algorithm.max_resamples=0"
    )
    generate = oracle.generate

    def wrong(requests: Many[Request]) -> list[Sample]:
        samples = generate(requests)
        bad = Sample((7, 7, 7, 99), (-1.0,) * 4, "stop", tuple(Span(*span) for span in spans))
        return [*samples[:7], bad, *samples[8:]]  # the second of the third prompt, whose answers are all wrong

    oracle.generate = wrong  # type: ignore[method-assign]
    with pytest.raises(StateError, match=rf"^prompt \S+, completion 2 of 3: .*{message}"):
        made.collect(1, oracle, Timers(), published=PUBLISHED)


def test_spans_of_several_versions_may_be_true(tmp_path: Path) -> None:
    made, oracle, _ = collector(tmp_path, [1])
    generate = oracle.generate
    oracle.generate = lambda requests: [  # type: ignore[method-assign]
        Sample(s.tokens, s.logprobs, s.finish, (Span(2, 0, 1), Span(4, 1, len(s.tokens)))) for s in generate(requests)
    ]
    found = made.collect(1, oracle, Timers(), published=PUBLISHED)
    assert found is not None
    assert found.versions == {2, 4}


def test_end_tokens_come_from_every_place(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}), encoding="utf-8")
    tokenizer: Any = type("T", (), {"eos_token_id": 5})
    assert stop_tokens(tokenizer, {"eos_token_id": 2}, tmp_path) == (2, 3, 4, 5)
    assert stop_tokens(tokenizer, {"text_config": {"eos_token_id": 6}}, tmp_path) == (3, 4, 5, 6)


# Weights.


@pytest.mark.parametrize(
    ("local", "grouped"),
    [
        ("decoder.layers.3.input_layernorm.weight", "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"),
        ("decoder.layers.3.pre_mlp_layernorm.weight", "decoder.layers.3.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.0.mlp.experts.local_experts.12.linear_fc1.weight",
            "decoder.layers.0.mlp.experts.linear_fc1.weight12",
        ),
        ("decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.router.weight"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
    ],
)
def test_names_in_transformer_engines_layers(local: str, grouped: str) -> None:
    assert megatron_name(local) == grouped


def test_tensor_parallel_parts() -> None:
    tensor = torch.arange(24).reshape(4, 6)
    rows, columns = (
        "decoder.layers.1.self_attention.linear_qkv.weight",
        "decoder.layers.1.self_attention.linear_proj.weight",
    )
    assert torch.equal(tensor_parallel_part(rows, tensor, 1, 2), tensor[2:])
    assert torch.equal(tensor_parallel_part(columns, tensor, 1, 2), tensor[:, 3:])
    expert = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"
    assert tensor_parallel_part(expert, tensor, 1, 2) is tensor
    with pytest.raises(CheckpointError, match="cannot be split over 3"):
        tensor_parallel_part("output_layer.weight", tensor, 0, 3)


# Logits in stretches.


class Model:
    """Hidden states from an embedding, and an output layer, behind Megatron's `output_processor`.

    With `parts`, this is rank 0 of so many tensor-parallel ranks with sequence parallelism: it has the first share of
    the positions, and its output layer gathers the same stretch of every rank's share.
    """

    def __init__(self, parts: int = 1) -> None:
        torch.manual_seed(0)
        self.embedding = torch.randn(30, 8, requires_grad=True)
        self.weight = torch.randn(30, 8, requires_grad=True)
        self.parts = parts
        self.most = 0

    def __call__(
        self, tokens: torch.Tensor, positions: Any, mask: Any, *, labels: Any, output_processor: Any, **_: Any
    ) -> torch.Tensor:
        # The position travels with the hidden state, so that the output layer knows which stretch it was given.
        places = torch.arange(tokens.shape[1], dtype=torch.float32)[:, None, None].expand(-1, len(tokens), 1)
        hidden = torch.cat([self.embedding[tokens].transpose(0, 1), places], dim=-1)
        shares = hidden.chunk(self.parts)

        def output_layer(part: torch.Tensor, *, weight: Any, runtime_gather_output: bool) -> tuple[torch.Tensor, None]:
            start = int(part[0, 0, -1])
            others = [share[start : start + len(part)] for share in shares[1:]]
            logits = torch.cat([part, *others])[..., :-1] @ self.weight.t()
            self.most = max(self.most, logits.shape[0] * logits.shape[1])
            return logits, None

        def loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return -logits.log_softmax(-1).gather(-1, labels.t()[..., None])[..., 0].t()

        return output_processor(
            hidden_states=shares[0],
            output_layer=output_layer,
            output_weight=None,
            labels=labels,
            compute_language_model_loss=loss,
        )


def padded() -> Microbatch:
    sequences = [Sequence(n, tuple(range(n, n + 9 + n)), 3, (-1.0,) * (6 + n)) for n in range(3)]
    (batch,) = microbatches(sequences, budget=1000, layout="padded", pad_to=2)
    return batch


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("chunk", [3, 6, 9, 1000])
def test_stretches_give_the_same_values_and_gradients(chunk: int, parts: int) -> None:
    batch, cpu = padded(), torch.device("cpu")
    whole, cut = Model(), Model(parts)
    expected = log_probabilities(whole, batch, cpu, chunk_tokens=0)
    found = log_probabilities(cut, batch, cpu, chunk_tokens=chunk)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    expected.sum().backward()
    found.sum().backward()
    for one, other in ((whole.weight, cut.weight), (whole.embedding, cut.embedding)):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-5)
    assert cut.most <= max(3 * parts, min(chunk, 30))


@pytest.mark.parametrize("chunk", [0, 3])
def test_log_probs_are_of_the_temperature_that_was_sampled_at(chunk: int) -> None:
    """Completions were drawn at temperature 0.7, and the trainer scored them at 1: every importance weight was off."""
    batch, cpu = padded(), torch.device("cpu")
    hot, cold = Model(), Model()
    with torch.no_grad():
        cold.weight /= 0.7
    found = log_probabilities(hot, batch, cpu, chunk_tokens=chunk, temperature=0.7)
    torch.testing.assert_close(found, log_probabilities(cold, batch, cpu, chunk_tokens=chunk), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, log_probabilities(hot, batch, cpu, chunk_tokens=chunk))


def test_the_trainer_scores_at_the_engines_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = object.__new__(MegatronGrpo)
    trainer._settings = settings("fp8", "muon", "rollout.sampling.temperature=0.7")
    trainer.ddp, trainer.device = None, torch.device("cpu")
    said: dict[str, Any] = {}
    monkeypatch.setattr(trainer_module, "log_probabilities", lambda *_, **options: said.update(options))
    trainer._log_probabilities(padded())
    assert said["temperature"] == 0.7


# The optimizer.


def test_optimizer_fields_of_the_variants() -> None:
    muon = optimizer_fields(settings("fp8"))
    assert (muon["optimizer"], muon["use_distributed_optimizer"], muon["muon_scale_mode"]) == (
        "muon",
        False,
        "spectral",
    )
    assert "optimizer_cpu_offload" not in muon
    staged = optimizer_fields(settings("fp8", "adamw"))
    assert (staged["optimizer"], staged["use_distributed_optimizer"]) == ("adam", True)
    assert staged["optimizer_cpu_offload"]
    assert staged["optimizer_offload_fraction"] == 1.0
    plain = optimizer_fields(settings("baseline", "adamw", "optimizer.cpu_offload=false"))
    assert "optimizer_cpu_offload" not in plain
    # Its HybridDeviceOptimizer ended a smoke without a GPU with a KeyError: it looks for the GPU's copy.
    assert settings("baseline", "adamw").optimizer.cpu_offload
    assert "optimizer_cpu_offload" not in optimizer_fields(settings("baseline", "adamw"))
    on_gpu = composed.load("baseline", optimizer="adamw", smoke="gpu")
    assert optimizer_fields(on_gpu)["optimizer_cpu_offload"]


def test_the_learning_rate_rises_over_the_warm_up() -> None:
    optimizer = settings("fp8", "muon", "optimizer.lr=0.4", "optimizer.warmup_steps=4").optimizer
    assert [learning_rate(optimizer, step) for step in range(1, 6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert learning_rate(settings("fp8", "muon", "optimizer.lr=0").optimizer, 7) == 0.0


class Optimizer:
    """Stands for Megatron's: its groups, and a step that says what norm it found."""

    def __init__(self, norm: float) -> None:
        # As Megatron builds them: the whole decay everywhere, and a factor that its own scheduler would apply.
        self.param_groups = [
            {"lr": 9.0, "weight_decay": 0.1, "wd_mult": 1.0, "lr_mult": 1.0},
            {"lr": 9.0, "weight_decay": 0.1, "wd_mult": 0.0, "lr_mult": 1.0},
        ]
        self.norm = norm

    def zero_grad(self) -> None: ...

    def step(self) -> tuple[bool, float, None]:
        return True, self.norm, None


def updating(monkeypatch: pytest.MonkeyPatch, optimizer: Optimizer, batches: Any = lambda *_: iter(())) -> Any:
    """A trainer without a model; unless `batches` says otherwise it has nothing to compute."""
    distributed = pytest.importorskip("megatron.core.distributed")
    monkeypatch.setattr(distributed, "finalize_model_grads", lambda *_: None)
    monkeypatch.setattr(MegatronGrpo, "_batches", batches)
    monkeypatch.setattr(MegatronGrpo, "data_parallel", (0, 1))
    trainer: Any = object.__new__(MegatronGrpo)
    trainer._settings = settings("baseline", "adamw", "optimizer.weight_decay=0.1")
    trainer.ddp, trainer.optimizer = SimpleNamespace(zero_grad_buffer=lambda: None, no_sync=nullcontext), optimizer
    return trainer


def averaged_gradient(monkeypatch: pytest.MonkeyPatch, sequences: Many[Sequence], ranks: int, budget: int) -> Any:
    """The gradient of the logits of a model without a context, as Megatron leaves it: averaged over the ranks."""
    logits = torch.linspace(-1.0, 1.0, 12).requires_grad_()
    for rank in range(ranks):
        trainer = updating(monkeypatch, Optimizer(norm=1.0), batches=MegatronGrpo._batches)
        monkeypatch.setattr(MegatronGrpo, "data_parallel", (rank, ranks))
        trainer._settings = settings("fp8", "muon", f"length.microbatch_tokens={budget}")
        trainer._ranks = SimpleNamespace(gather=lambda mine: [mine, 7])
        trainer._correction, trainer._loss = CorrectionSettings(), LossSettings()
        trainer._log_probabilities = lambda batch: logits.log_softmax(0)[batch.labels]
        trainer.update(sequences, None, lr=0.5)
    assert logits.grad is not None
    return logits.grad / ranks


@pytest.mark.parametrize(("ranks", "budget"), [(1, 100), (2, 10000), (4, 100)])
def test_every_token_counts_the_same_whatever_the_ranks_and_microbatches(
    monkeypatch: pytest.MonkeyPatch, ranks: int, budget: int
) -> None:
    """A mean over each rank's, or each microbatch's, own tokens weighs a token by the company it came in: with
    completions of unequal lengths that is another gradient. Here the ranks have unequal numbers of tokens and of
    microbatches, and one of four has nothing but a placeholder."""
    drawn = torch.Generator().manual_seed(1)
    sequences = [
        Sequence(n, (0, *torch.randint(12, (n,), generator=drawn).tolist()), 1, (-2.0,) * n, advantage)
        for n, advantage in ((3, 1.0), (90, -1.0), (41, 0.5))
    ]
    whole = averaged_gradient(monkeypatch, sequences, 1, 10000)
    found = averaged_gradient(monkeypatch, sequences, ranks, budget)
    assert whole.abs().max() > 0.01
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-7)
    # By hand: importance weights are constants, the ratio is one, and a token of n counts one in all tokens.
    logits = torch.linspace(-1.0, 1.0, 12).requires_grad_()
    tokens = [(s.advantage, torch.tensor(s.tokens[1:])) for s in sequences]
    logp = [logits.log_softmax(0)[labels] for _, labels in tokens]
    kept = [(value.detach() + 2.0).exp().clamp(max=2.0) for value in logp]
    terms = [(weight * a * value).sum() for (a, _), value, weight in zip(tokens, logp, kept, strict=True)]
    (-torch.stack(terms).sum() / 134).backward()
    torch.testing.assert_close(whole, logits.grad, rtol=1e-4, atol=1e-7)


def test_vectors_do_not_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron notes in a group that the weights of norms do not decay, and leaves it to its scheduler to act on it. A
    loop that sets rates by itself had every norm shrink with the matrices."""
    optimizer = Optimizer(norm=1.0)
    updating(monkeypatch, optimizer).update([Sequence(0, (1, 2), 1, (-1.0,))], None, lr=0.5)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.1), (0.5, 0.0)]


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_baselines_gradient_that_is_not_finite_ends_the_run(monkeypatch: pytest.MonkeyPatch, norm: float) -> None:
    """Without a loss scaler Megatron's optimizers look for no NaN: they apply it, and report that all went well."""
    trainer = updating(monkeypatch, Optimizer(norm))
    with pytest.raises(NonFiniteGradientError, match="goes on from its last checkpoint"):
        trainer.update([Sequence(0, (1, 2), 1, (-1.0,))], None, lr=0.5)


def test_minibatches_keep_groups_together() -> None:
    sequences = [Sequence(n, (1, 2), 1, (-1.0,)) for n in range(12)]
    parts = _minibatches(sequences, 2, 3, (1, 2, 0))
    assert sorted(s.index for part in parts for s in part) == list(range(12))
    for part in parts:
        assert len(part) == 6
        groups = [{s.index // 3 for s in part[first : first + 3]} for first in (0, 3)]
        assert all(len(group) == 1 for group in groups)
    assert parts == _minibatches(sequences, 2, 3, (1, 2, 0))
    assert parts != _minibatches(sequences, 2, 3, (1, 3, 0)) or parts != _minibatches(sequences, 2, 3, (1, 4, 0))


def test_updates_are_counted_and_not_taken_from_the_settings() -> None:
    """Dynamic sampling may end with fewer groups than a step wants, and then there are fewer minibatches: the log said
    four updates where three were made.
    """
    made: list[list[int]] = []

    class Trainer:
        def score(self, sequences: Many[Sequence]) -> dict[int, torch.Tensor]:
            return {s.index: torch.zeros(s.trained) for s in sequences}

        def update(self, sequences: Many[Sequence], old: Any, *, lr: float) -> Any:
            made.append([s.index for s in sequences])
            return SimpleNamespace(grad_norm=1.0, sums=())

    chosen = settings("fp8", "muon", "algorithm.prompts=4", "algorithm.completions=3", "algorithm.minibatches=4")
    sequences = [Sequence(n, (1, 2), 1, (-1.0,)) for n in range(9)]
    trainer: Any = Trainer()
    trained = train_step(chosen, trainer, sequences, 1, Ranks(), Timers(), measure_after=False)
    assert trained.updates == len(made) == 3
    assert sorted(index for part in made for index in part) == list(range(9))


def test_a_sequence_counts_once_a_pass_whoever_trained_it() -> None:
    """Minibatches are dealt anew in every epoch. A sequence that went to another rank in the second epoch was taken for
    a tensor-parallel copy of the first epoch's, and left out of the statistics."""

    def sums(*indices: int, kl: float) -> list[SequenceSums]:
        return [SequenceSums(index, 1, 0.0, 0.0, 0.0, 0.0, kl) for index in indices]

    class Two:
        """Rank 0's view of two data-parallel ranks with two tensor-parallel copies each."""

        def gather(self, mine: Any) -> list[Any]:
            other = [sums(1, kl=1.0), sums(0, kl=2.0)]
            return [mine, mine, other, other]

    ranks: Any = Two()
    found = summarize(_over_ranks([sums(0, kl=1.0), sums(1, kl=2.0)], ranks), 1)
    assert (found.sequences, found.tokens, found.kl) == (4, 4, 1.5)


def test_passes_that_train_nothing_are_no_training_time() -> None:
    """Scores before several updates and the measurement after them were timed as training, while the FLOPs of a step
    did not count them: every tenth step seemed to train a third slower."""
    timers = Timers()

    class Trainer:
        def score(self, sequences: Many[Sequence]) -> dict[int, torch.Tensor]:
            timers.add("inside score", 0.0)
            assert "train" not in timers._spent
            return {s.index: torch.zeros(s.trained) for s in sequences}

        def update(self, sequences: Many[Sequence], old: Any, *, lr: float) -> Any:
            assert "score" in timers._spent
            return SimpleNamespace(grad_norm=1.0, sums=(SequenceSums(0, 1, 0.0, 0.0, 0.0, 0.0, 0.5),))

        def compare(self, sequences: Many[Sequence]) -> Any:
            assert "train" in timers._spent
            return (SequenceSums(0, 1, 0.0, 0.0, 0.0, 0.0, 0.25),)

    chosen = settings("fp8", "muon", "algorithm.prompts=2", "algorithm.completions=2", "algorithm.minibatches=2")
    sequences = [Sequence(n, (1, 2), 1, (-1.0,)) for n in range(4)]
    trainer: Any = Trainer()
    trained = train_step(chosen, trainer, sequences, 1, Ranks(), timers, measure_after=True)
    assert set(timers.take()) == {"score", "inside score", "train", "measure"}
    assert trained.after is not None
    assert (trained.after.kl, trained.before.kl) == (0.25, 0.5)
    assert [(one.kl, one.tokens) for one in trained.prompts] == [(1.0, 2)], "a prompt's passes are one draw"


def test_measurements_after_the_update_come_as_often_as_set() -> None:
    assert settings().telemetry.measure_every == 1, "a smoke affords them at every step"
    assert composed.load("fp8").telemetry.measure_every == 10


def test_memory_in_use_counts_what_other_processes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine, contexts and libraries were invisible: torch's allocator of the trainer's rank 0 was all of it."""
    free = iter((90, 40, 70, 60, 80))

    class Two:
        """Rank 0's view, where the other rank's GPU holds 55 at most."""

        def gather(self, mine: int) -> list[int]:
            return [mine, 55]

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 100))
    ranks: Any = Two()
    memory = DeviceMemory(torch.device("cuda", 0))
    memory.look()
    memory.look()
    assert memory.take(ranks) == {"device_used": 60}
    memory.look()
    assert memory.take(ranks) == {"device_used": 55}, "of this step alone, on whichever GPU"
    assert DeviceMemory(torch.device("cpu")).take(Ranks()) == {}


# Fixed tokens.


def test_fixed_tokens_see_a_single_bit(tmp_path: Path) -> None:
    made, oracle, _ = collector(tmp_path, [1])
    collected = made.collect(1, oracle, Timers(), published=PUBLISHED)
    assert collected is not None
    fixed = FixedTokens.of(collected, count=4)
    asked: list[Any] = []

    class Scorer:
        value = -1.0

        def score(self, sequences: Any) -> Any:
            asked.append(sequences)
            return [(self.value,) * (len(tokens) - first) for tokens, first in sequences]

    scorer: Any = Scorer()
    before = fixed.digest(scorer)
    assert fixed.digest(scorer) == before
    scorer.value = math.nextafter(-1.0, 0.0)
    assert fixed.digest(scorer) != before
    assert len(asked[0]) == 4


# The model's settings.


@pytest.mark.parametrize("attention", ["auto", "flash", "fused", "unfused"])
@pytest.mark.parametrize("variant", composed.VARIANTS)
@pytest.mark.parametrize("kind", ["smoke", "8k"])
def test_megatron_takes_the_settings_of_every_gpu_run(
    monkeypatch: pytest.MonkeyPatch, kind: str, variant: str, attention: str
) -> None:
    """Runs died on the GPU after their engines had come up: a setting of the run met the shared one of its name, on a
    branch that no machine without a GPU takes."""
    pytest.importorskip("megatron.core")
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    # Of TransformerEngine only its existence is asked for here.
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", print)
    place: Any = "gpu" if kind == "smoke" else None
    chosen = composed.load(variant, smoke=place, overrides=[f"train.attention={attention}"])
    shape = Qwen3MoeFields(2, 256, 512, 96, 8, 4, 64, 8, 2, 256, True, 1e4, 1e-6, False)
    fields = config_fields(chosen, shape, torch.device("cuda"))
    config = TransformerConfig(**fields)
    assert {name: getattr(config, name) for name in fields} == fields
    assert config.attention_backend.name == attention
    assert config.apply_rope_fusion
    assert config.deterministic_mode == (kind == "smoke")
    assert config.sequence_parallel == (kind == "8k")


@pytest.mark.parametrize("hybrid", [True, False])
def test_a_baselines_optimizer_moves_only_where_its_state_is_on_the_gpu(hybrid: bool) -> None:
    """Megatron's HybridDeviceOptimizer holds views of the flat parameter buffer. `offload_to_cpu` replaces them by
    copies, and on a GPU every later update went to the copies: a run that looked well, and learned nothing."""
    calls: list[str] = []

    class Recorder:
        attached = False

        def __getattr__(self, name: str) -> Any:
            return lambda *tags: calls.append(" ".join((name, *sorted(tags))))

    trainer: Any = object.__new__(MegatronGrpo)
    trainer._settings = settings("baseline", "adamw", f"optimizer.cpu_offload={str(hybrid).lower()}")
    trainer._away = frozenset()
    trainer.attachment = trainer.optimizer = Recorder()
    trainer.offload("optimizer", "gradients")
    trainer.offload("weights")
    trainer.reload()
    moved = ["offload gradients", "offload weights", "reload gradients weights"]
    own = [] if hybrid else ["offload_to_cpu", "restore_from_cpu"]
    assert sorted(calls) == sorted([*moved, *own])


def test_ranks_agree_on_the_number_of_microbatches_before_they_compute_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks had two and three microbatches to score. The first asked how many there are once it was through, and
    waited there; the other waited for it in the exchange of experts of its third. Neither ever came back."""
    asked: list[int] = []

    class Three:
        """This rank, and another one that has three microbatches."""

        def gather(self, mine: int) -> list[int]:
            asked.append(mine)
            return [mine, 3]

    trainer: Any = object.__new__(MegatronGrpo)
    trainer._settings, trainer._ranks = settings("fp8", "muon", "length.microbatch_tokens=96"), Three()
    monkeypatch.setattr(MegatronGrpo, "data_parallel", (0, 2))
    batches = trainer._batches([Sequence(n, (1,) * 90, 3, (-1.0,) * 87) for n in range(2)])
    first = next(batches)
    assert asked == [1], "the ranks agree before anyone computes"
    assert not first.sequences[0].placeholder
    assert [batch.sequences[0].placeholder for batch in batches] == [True, True]


def test_ranks_wait_for_the_first_as_long_as_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 draws the completions, and may take an hour a round. The others waited in a broadcast, where torch's half
    an hour ended the run in the middle of a long rollout."""
    made: list[timedelta] = []
    dist = torch.distributed
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, *, timeout: made.append(timeout))
    for extra in ((), ("algorithm.dynamic_sampling=true", "algorithm.max_resamples=9")):
        join_world(composed.load("fp8", overrides=list(extra)), torch.device("cuda"))
    one, ten = (timeout.total_seconds() for timeout in made)
    rollout = composed.load("fp8").rollout
    assert one > rollout.generate_timeout
    assert ten > 10 * rollout.generate_timeout


# Memory: who has the device when.


def test_a_checkpoint_is_read_before_communicators_and_engine_hold_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery read its checkpoint after a first publish: engine and NCCL's communicators held the memory by then,
    and the run that had died of memory could not come back.
    """
    events: list[str] = []
    run = run_module._Run

    def noted(name: str) -> Any:
        def method(*_: Any) -> Any:
            events.append(name)
            return SimpleNamespace(model=None, step=7, fixed=())

        return method

    for name in ("_make_inputs", "_make_meeting", "_start_engine", "_load", "_connect", "_make_collector"):
        monkeypatch.setattr(run, name, noted(name))
    monkeypatch.setattr(run, "_open_telemetry", lambda *_: None)
    monkeypatch.setattr(run_module, "load_tokenizer", lambda model: None)
    monkeypatch.setattr(run_module.checkpoint, "latest", lambda out: Path("step-000007"))
    monkeypatch.setattr(run_module, "await_file", lambda path: events.append(str(path)))
    read: list[bool] = []

    class Trainer:
        def __init__(self, *_: Any, read_weights: bool, shared: Any) -> None:
            read.append(read_weights)
            events.append("trainer")

        def close(self) -> None:
            events.append("close")

    monkeypatch.setattr(run_module, "MegatronGrpo", Trainer)
    with ExitStack() as stack:
        run(settings(), torch.device("cpu"), stack, StopNotice(1.0))
    assert events.index("step-000007/loop.json") < events.index("_start_engine"), "rank 0 has found it, all see it"
    assert events.index("_start_engine") < events.index("trainer") < events.index("_load") < events.index("_connect")
    assert read == [False], "what the checkpoint brings is not read from the model's directory first"
    assert checkpoint.step_of(Path("checkpoints/step-000007")) == 7
    monkeypatch.setattr(run_module.checkpoint, "latest", lambda out: None)
    with ExitStack() as stack:
        run(settings(), torch.device("cpu"), stack, StopNotice(1.0))
    assert read == [False, True]


def test_ranks_exchange_plain_data_without_a_communicator_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes a communicator where it is used first, with half a gigabyte a rank: a broadcast of prompts must not be
    what takes it from a checkpoint that is about to be read.
    """
    made: list[str] = []
    dist = torch.distributed
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: made.append(backend))
    join_world(composed.load("fp8"), torch.device("cuda"))
    join_world(composed.load("fp8", smoke="cpu"), torch.device("cpu"))
    assert made == ["cpu:gloo,cuda:nccl", "gloo"]


def test_ranks_agree_about_what_they_publish_without_a_communicator_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first publish of a baseline made one that nothing else needs, for a single number."""
    from weftpub_adapters.megatron.attached import together as module

    asked: list[str] = []
    trainer: Any = object.__new__(MegatronGrpo)
    trainer.device, trainer._mapping = torch.device("cuda"), SimpleNamespace(release=lambda: None)
    trainer.attachment = SimpleNamespace(store=None, attached=False)
    trainer._sources = lambda checksums: "made"
    monkeypatch.setattr(module, "several_ranks", lambda: True)
    monkeypatch.setattr(module, "_exchange", lambda failed, device: asked.append(device.type) or [])
    with trainer.sources() as sources:
        assert sources == "made"
    assert asked == ["cpu"]


def test_a_publish_hands_the_memory_over_in_order() -> None:
    """Weights of the engine came back while the trainer's gradients and slots were still there, and its cache while the
    trainer's weights were: either side ran out of memory, by who was quicker.
    """
    events: list[str] = []

    class Trainer:
        def offload(self, *tags: str) -> None:
            events.append(f"offload {' '.join(tags)}")

        @contextmanager
        def sources(self) -> Any:
            events.append("sources")
            yield SimpleNamespace(tensors={"a": 1}, checksums={"a": 2})
            events.append("let go of sources")

    class Engine:
        def publish(self, version: int, tensors: Any, checksums: Any) -> str:
            events.append(f"publish {version} {tensors} {checksums}")
            return "published"

        def __getattr__(self, name: str) -> Any:
            return lambda: events.append(name)

    trainer: Any = Trainer()
    engine: Any = Engine()
    assert publish_version(trainer, engine, 3, Timers()) == "published"
    assert events == [
        "offload optimizer gradients",
        "sources",
        "publish 3 {'a': 1} {'a': 2}",
        "let go of sources",
        "offload weights",
        "resume",
        "continue_",
    ]


# Checkpoints on disk.


def checkpoint_folder(out: Path, step: int, *, whole: bool = True) -> Path:
    path = out / "checkpoints" / f"step-{step:06d}"
    (path / "trainer").mkdir(parents=True)
    if whole:
        state = {"step": step, "data": {}, "total": Counters().model_dump(), "identity": {}}
        (path / "loop.json").write_text(json.dumps(state), encoding="utf-8")
    return path


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    """A run was killed while it saved step 30: what lies there has no loop.json, or the name of a part."""
    assert checkpoint.latest(tmp_path) is None
    checkpoint_folder(tmp_path, 10)
    newest = checkpoint_folder(tmp_path, 20)
    checkpoint_folder(tmp_path, 30, whole=False)
    (tmp_path / "checkpoints" / ".step-000040.part").mkdir()
    assert checkpoint.latest(tmp_path) == newest
    assert checkpoint.read_state(newest).step == 20


def test_fixed_tokens_come_back(tmp_path: Path) -> None:
    """A resumed run with learning rate 0 chose other tokens to score, and their digests said nothing about those from
    before."""
    path = tmp_path / "loop.json"
    state = checkpoint.LoopState(2, {"drawn": 8}, Counters(), {}, (((1, 2, 3), 1), ((4, 5), 1)))
    checkpoint._write_state(path, state)
    assert checkpoint.read_state(tmp_path) == state


@pytest.mark.parametrize(
    ("full", "said"),
    [
        ("before", r"the disk is too full, and nothing was written; free: \d+ MiB, 1099511627776 MiB are needed"),
        ("trainer", r"rank 0: Worker failure; free: \d+ MiB, 3 MiB are needed"),
        ("state", r"loop\.json: No space left on device; free: \d+ MiB, 3 MiB are needed"),
    ],
)
def test_a_full_disk_is_one_message_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str, said: str
) -> None:
    """Megatron's writers end in torch's CheckpointException, which is no Exception: it went through every handler and
    ended the run in a traceback of the launcher's."""
    whole = checkpoint_folder(tmp_path, 10)

    def write_trainer(trainer: Any, path: Path, announce: Callable[[int], None]) -> None:
        announce(1 << 60 if full == "before" else 3 << 20)
        (path / "shard").write_bytes(b"half")
        if full == "trainer":
            raise checkpoint._NotWritten("rank 0: Worker failure")

    def write_state(path: Path, state: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "_save_trainer", write_trainer)
    monkeypatch.setattr(checkpoint, "_write_state", write_state)
    trainer: Any = None
    state = checkpoint.LoopState(20, {}, Counters(), {})
    with pytest.raises(CheckpointError, match=rf"step-000020 could not be written: .*{said}\. Free space, "):
        checkpoint.save(tmp_path, trainer, state, Ranks())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [whole.name]


def test_a_failed_writer_of_megatrons_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core.dist_checkpointing")
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    def save(state: Any, path: str) -> None:
        raise CheckpointException("write", {0: (RuntimeError("Worker failure"), [])})

    monkeypatch.setattr(dist_checkpointing, "save", save)
    with pytest.raises(checkpoint._NotWritten, match="rank 0: Worker failure"):
        checkpoint._write_trainer({}, tmp_path)


def solo_save(out: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(checkpoint, "_save_trainer", lambda trainer, path, announce: (path / "new").touch())
    ranks: Any = SimpleNamespace(first=True, barrier=lambda: None)
    trainer: Any = None
    return checkpoint.save(out, trainer, checkpoint.LoopState(step, {}, Counters(), {}), ranks)


def test_a_run_that_is_killed_while_it_replaces_a_checkpoint_leaves_no_half_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run came to a step that an earlier start had saved. The old one was removed file by file, with the file
    that calls it whole somewhere among them.
    """
    checkpoint_folder(tmp_path, 10)
    checkpoint_folder(tmp_path, 20)

    def killed(path: Any, **_: Any) -> None:
        if Path(path).name == "step-000020":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            solo_save(tmp_path, 20, patch)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert newest.name == "step-000010"
    made = solo_save(tmp_path, 20, monkeypatch)
    assert checkpoint.latest(tmp_path) == made
    assert (made / "trainer" / "new").exists()


def test_a_checkpoints_name_is_on_the_disk_when_older_ones_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut the newest checkpoint had its part's name, and those before had been removed."""
    synced: list[tuple[str, list[str]]] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if place.is_dir():
            synced.append((place.name, [path.name for path in place.iterdir()]))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    solo_save(tmp_path, 3, monkeypatch)
    assert synced == [("checkpoints", ["step-000003"])]


def test_old_checkpoints_go(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        checkpoint_folder(tmp_path, step)
    checkpoint.delete_old(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000020", "step-000030"]


def test_a_damaged_state_names_its_file(tmp_path: Path) -> None:
    path = checkpoint_folder(tmp_path, 10)
    (path / "loop.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"loop\.json cannot be read"):
        checkpoint.read_state(path)
