"""GRPO's arithmetic: values by hand, slow straightforward formulations, and statistics that replay bit for bit."""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weftmoe.grpo import (
    CorrectionSettings,
    DynamicSampling,
    LossSettings,
    PromptSums,
    Sequence,
    SequenceSums,
    batch_loss,
    correct,
    deal,
    group_advantages,
    kl_covariance,
    microbatches,
    prompt_sums,
    select_groups,
    sequence_sums,
    summarize,
    token_loss,
    token_weights,
)
from weftpub.errors import ConfigError

# Advantages.


def test_advantages_by_hand() -> None:
    # mean 0.25, variance (3 * 0.0625 + 0.5625) / 4 = 0.1875
    group = group_advantages([1.0, 0.0, 0.0, 0.0], epsilon=0.0)
    assert group.mean == 0.25
    assert group.std == pytest.approx(math.sqrt(0.1875), rel=1e-15)
    assert group.advantages == pytest.approx((math.sqrt(3), *[-1 / math.sqrt(3)] * 3), rel=1e-15)


def test_mean_advantages_leave_the_scale() -> None:
    assert group_advantages([3.0, 1.0], normalize_std=False).advantages == (1.0, -1.0)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -7.3])
def test_a_group_of_equal_rewards_trains_nothing(reward: float) -> None:
    """0.1 three times has a mean that is an ulp off in plain sums; over a tiny deviation that would be an advantage."""
    group = group_advantages([reward] * 3, epsilon=0.0)
    assert group.advantages == (0.0, 0.0, 0.0)
    assert not group.informative


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16), st.randoms())
def test_advantages_do_not_depend_on_order(rewards: list[float], shuffle: random.Random) -> None:
    places = list(range(len(rewards)))
    shuffle.shuffle(places)
    straight = group_advantages(rewards).advantages
    turned = group_advantages([rewards[place] for place in places]).advantages
    assert turned == tuple(straight[place] for place in places)


@pytest.mark.parametrize("rewards", [[], [1.0, math.nan], [math.inf]])
def test_rewards_that_are_no_numbers_are_refused(rewards: list[float]) -> None:
    with pytest.raises(ConfigError):
        group_advantages(rewards)


# Dynamic sampling.


def test_groups_without_information_are_replaced() -> None:
    groups = [group_advantages(rewards) for rewards in ([1, 1], [1, 0], [0, 0], [0, 1], [1, 0])]
    settings = DynamicSampling(enabled=True, max_rounds=3)
    first = select_groups(groups[:3], 2, settings, 1)
    assert (first.kept, first.dropped, first.complete) == ((1,), (0, 2), False)
    second = select_groups(groups, 2, settings, 2)
    assert (second.kept, second.dropped, second.complete) == ((1, 3), (0, 2), True)
    assert select_groups(groups[:3], 2, settings, 3).complete, "after the last round the step goes on"
    off = select_groups(groups[:3], 2, DynamicSampling(), 1)
    assert (off.kept, off.complete) == ((0, 1, 2), True)


# Correction and loss.


def test_correction_by_hand() -> None:
    trainer = torch.log(torch.tensor([0.5, 0.6, 0.1, 0.9]))
    rollout = torch.log(torch.tensor([0.5, 0.2, 0.8, 0.1]))  # ratios 1, 3, 0.125, 9
    found = correct(trainer, rollout, CorrectionSettings(cap=2.0, reject_below=0.2, reject_above=8.0))
    assert found.weights.tolist() == pytest.approx([1.0, 2.0, 0.0, 0.0])
    assert found.truncated.tolist() == [False, True, False, False]
    assert found.rejected.tolist() == [False, False, True, True]


def test_no_correction_leaves_weights_one() -> None:
    found = correct(torch.tensor([-9.0]), torch.tensor([0.0]), CorrectionSettings(enabled=False))
    assert (found.weights.item(), found.truncated.item(), found.rejected.item()) == (1.0, False, False)


def test_a_token_that_the_engine_never_could_draw_is_rejected() -> None:
    """An engine that reports minus infinity for a drawn token would make the ratio infinite and the loss NaN."""
    found = correct(torch.tensor([-1.0]), torch.tensor([-math.inf]), CorrectionSettings())
    assert (found.weights.item(), found.rejected.item()) == (0.0, True)


def slow_loss(logp: float, old: float, advantage: float, weight: float, low: float, high: float) -> float:
    ratio = math.exp(logp - old)
    clipped = min(max(ratio, 1 - low), 1 + high)
    return -weight * min(ratio * advantage, clipped * advantage)


@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_against_the_slow_formulation(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    old = -torch.rand(40, generator=draw, dtype=torch.float64) * 3
    logp = (old + torch.randn(40, generator=draw, dtype=torch.float64) * 0.4).float()
    advantages, weights = torch.randn(40, generator=draw), torch.rand(40, generator=draw) * 2
    settings = LossSettings(0.2, 0.28)
    logp.requires_grad_()
    found = token_loss(logp, old.float(), advantages, weights, settings)
    found.values.sum().backward()
    assert logp.grad is not None
    step, seen = 1e-4, 0
    for i in range(40):
        arguments = (float(old[i].float()), float(advantages[i]), float(weights[i]), 0.2, 0.28)
        value = float(logp[i].detach())
        assert float(found.values[i].detach()) == pytest.approx(slow_loss(value, *arguments), rel=1e-5, abs=1e-6)
        slope = (slow_loss(value + step, *arguments) - slow_loss(value - step, *arguments)) / (2 * step)
        assert float(logp.grad[i]) == pytest.approx(slope, rel=2e-3, abs=2e-3)
        clipped = bool(found.clipped_low[i] or found.clipped_high[i])
        assert clipped == (slope == 0.0)
        seen += clipped
    assert seen > 3, "the case must reach the clipped region"


def test_importance_weights_are_constants() -> None:
    """A weight that was computed from log-probs with a gradient would push the policy towards the rollout, and not
    towards reward.
    """
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    weights = torch.tensor([0.5, 2.0], requires_grad=True)
    found = token_loss(logp, logp.detach(), torch.tensor([1.0, -1.0]), weights, LossSettings())
    found.values.sum().backward()
    assert weights.grad is None
    assert logp.grad.tolist() == [-0.5, 2.0]
    assert not correct(logp, torch.tensor([-1.5, -1.5]), CorrectionSettings()).weights.requires_grad


def test_clip_higher_lets_rising_tokens_rise_further() -> None:
    """A ratio of 1.25 is beyond 1 + 0.2 and within 1 + 0.28: only the lower bound is symmetric."""
    logp, zero, one = torch.log(torch.tensor([1.25])), torch.zeros(1), torch.ones(1)
    assert not token_loss(logp, zero, one, one, LossSettings(0.2, 0.28)).clipped_high.item()
    assert token_loss(logp, zero, one, one, LossSettings(0.2, 0.2)).clipped_high.item()


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ConfigError, match="one shape"):
        token_loss(torch.zeros(4), torch.zeros(4), torch.zeros(1), torch.zeros(4), LossSettings())


# Packing.


def made(index: int, prompt: int, completion: int) -> Sequence:
    tokens = tuple(100 * (index + 1) + place for place in range(prompt + completion))
    return Sequence(index, tokens, prompt, tuple(-0.1 * (place + 1) for place in range(completion)), float(index))


SEQUENCES = [made(0, 3, 2), made(1, 1, 4), made(2, 5, 1), made(3, 2, 2)]


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("budget", [5, 9, 100])
def test_every_completion_token_is_predicted_once(layout: str, budget: int) -> None:
    """The value picked for a completion token sits where its predecessor is the input, and the label is the token."""
    found: dict[int, list[tuple[int, int]]] = {}
    for batch in microbatches(SEQUENCES, budget=budget, layout=layout):
        assert batch.tokens.numel() <= budget
        inputs, labels = (batch.split(batch.pick(values)) for values in (batch.tokens, batch.labels))
        for sequence, before, after in zip(batch.sequences, inputs, labels, strict=True):
            assert sequence.index not in found
            found[sequence.index] = list(zip(before.tolist(), after.tolist(), strict=True))
    expected = {
        s.index: [(s.tokens[place - 1], s.tokens[place]) for place in range(s.prompt, len(s.tokens))] for s in SEQUENCES
    }
    assert found == expected
    assert list(found) == [0, 1, 2, 3], "in batch order"


def test_packed_boundaries_and_fill() -> None:
    (batch,) = microbatches(SEQUENCES, budget=100, layout="packed", pad_to=8)
    assert batch.starts == (0, 4, 8, 13, 16)
    assert batch.tokens.shape == (1, 16)
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]
    (filled,) = microbatches(SEQUENCES[:3], budget=100, layout="packed", pad_to=8)
    assert filled.starts == (0, 4, 8, 13, 16)
    assert len(filled.pick(filled.tokens)) == filled.trained == 7


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_what_is_filled_up_counts_in_the_budget(layout: str) -> None:
    """Filling up to the tensor-parallel size once came on top of the budget, so a microbatch could be larger than the
    memory that it was planned for."""
    for budget in range(8, 40):
        made = list(microbatches(SEQUENCES, budget=budget, layout=layout, pad_to=8))
        assert max(batch.tokens.numel() for batch in made) <= budget
        assert all(batch.tokens.shape[1] % 8 == 0 for batch in made)
        assert [s.index for batch in made for s in batch.sequences] == [0, 1, 2, 3]


def test_values_of_another_shape_are_refused() -> None:
    (batch,) = microbatches(SEQUENCES, budget=100, layout="packed")
    with pytest.raises(ConfigError, match="expected the microbatch's"):
        batch.pick(torch.zeros(1, 3))


def test_a_sequence_beyond_the_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="sequence 2 has 5 input tokens"):
        list(microbatches(SEQUENCES, budget=4, layout="packed"))


def test_deal_balances_tokens_and_keeps_order() -> None:
    draw = random.Random(0)
    sequences = [made(index, draw.randint(1, 40), draw.randint(1, 40)) for index in range(37)]
    shares = deal(sequences, 4)
    assert sorted(s.index for share in shares for s in share) == list(range(37))
    assert all([s.index for s in share] == sorted(s.index for s in share) for share in shares)
    loads = [sum(s.inputs for s in share) for share in shares]
    assert max(loads) - min(loads) <= max(s.inputs for s in sequences)
    assert [len(share) for share in deal(sequences[:2], 4)] == [1, 1, 0, 0]


@pytest.mark.parametrize(("prompt", "logprobs"), [(0, 3), (3, 0), (1, 1)])
def test_sequences_that_cannot_train_are_refused(prompt: int, logprobs: int) -> None:
    with pytest.raises(ConfigError):
        Sequence(0, (1, 2, 3), prompt, (-1.0,) * logprobs)


# Statistics.


def random_tokens(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(count, generator=draw) * 5
    return rollout + torch.randn(count, generator=draw) * 0.05, rollout


def test_statistics_by_hand() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    first = sequence_sums(
        0,
        torch.tensor([half, half], dtype=torch.float64),
        torch.tensor([half, quarter], dtype=torch.float64),
        loss=torch.tensor([1.0, 2.0]),
        truncated=torch.tensor([False, True]),
    )
    second = sequence_sums(
        1,
        torch.tensor([quarter], dtype=torch.float64),
        torch.tensor([half], dtype=torch.float64),
        loss=torch.tensor([6.0]),
        clipped_low=torch.tensor([True]),
        rejected=torch.tensor([True]),
    )
    found = summarize([second, first], 1)
    # d = 0, ln 2, -ln 2
    assert (found.tokens, found.sequences) == (3, 2)
    assert found.difference_mean == pytest.approx(0.0, abs=1e-16)
    assert found.difference_abs_mean == pytest.approx(2 * math.log(2) / 3)
    assert found.difference_std == pytest.approx(math.log(2) * math.sqrt(2 / 3))
    assert found.difference_abs_max == pytest.approx(math.log(2))
    assert found.kl == pytest.approx(((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 3)
    assert found.loss == 3.0
    assert (found.clip_low_fraction, found.truncated_fraction) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert (found.truncated_tokens, found.rejected_tokens) == (1, 1)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_replaying_a_batch_gives_the_same_bits(order: int) -> None:
    """Whatever rank summed a sequence, and in whatever order the sums arrive."""
    sums = [sequence_sums(index, *random_tokens(index, 50 + 13 * index), loss=random_tokens(7, 50 + 13 * index)[0])
            for index in range(20)]  # fmt: skip
    again = [sequence_sums(index, *random_tokens(index, 50 + 13 * index), loss=random_tokens(7, 50 + 13 * index)[0])
             for index in range(20)]  # fmt: skip
    random.Random(order).shuffle(again)
    one, other = summarize(sums, 4).plain(), summarize(again, 4).plain()
    assert {name: value.hex() for name, value in one.items() if isinstance(value, float)} == {
        name: value.hex() for name, value in other.items() if isinstance(value, float)
    }
    assert one == other


def test_statistics_are_float64_whatever_comes_in() -> None:
    """Ten thousand equal float32 differences: a float32 sum would be off in the fourth digit."""
    rollout = torch.zeros(10_000)
    trainer = torch.full((10_000,), 0.1)
    found = summarize([sequence_sums(0, trainer, rollout)], 1)
    assert found.difference_mean == pytest.approx(float(torch.tensor(0.1)), rel=1e-12)


def test_a_changed_token_changes_the_statistics() -> None:
    trainer, rollout = random_tokens(0, 100)
    before = summarize([sequence_sums(0, trainer, rollout)], 1)
    trainer[50] = torch.nextafter(trainer[50], torch.tensor(0.0))
    assert summarize([sequence_sums(0, trainer, rollout)], 1).kl != before.kl


def test_kl_estimates_the_true_divergence() -> None:
    """Tokens drawn from one distribution over three tokens, scored by another."""
    rollout_p, trainer_p = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    true = float((rollout_p * (rollout_p / trainer_p).log()).sum())
    drawn = torch.multinomial(rollout_p, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    found = summarize([sequence_sums(0, trainer_p.log()[drawn], rollout_p.log()[drawn])], 1)
    assert found.kl == pytest.approx(true, rel=0.05)
    assert found.kl_k1 == pytest.approx(true, rel=0.15)


@pytest.mark.parametrize("shared", [False, True], ids=["completions apart", "completions of a prompt alike"])
def test_the_error_of_the_kl_is_the_spread_of_repeated_draws(shared: bool) -> None:
    """Tokens of a completion share a shift: they are no independent draws. Nor are the completions of a prompt, which
    begin in one context: with completions as draws, the error of a KL of 64 prompts was a third of what it is."""
    draw = torch.Generator().manual_seed(1)
    completions, found, apart = 8, [], []
    for _ in range(150):
        sums = []
        for index in range(16 * completions):
            tokens = 1 + int(torch.randint(6, (1,), generator=draw))
            if not shared or index % completions == 0:
                shift = 0.1 * torch.randn(1, generator=draw)
            sums.append(sequence_sums(index, shift.expand(tokens), torch.zeros(tokens)))
        found.append(summarize(sums, completions))
        apart.append(summarize(sums, 1))
    spread = float(torch.tensor([one.kl for one in found]).std())
    stated, wrong = (
        float(torch.tensor([one.kl_error for one in several]).square().mean().sqrt()) for several in (found, apart)
    )
    assert stated == pytest.approx(spread, rel=0.15)
    assert wrong == pytest.approx(spread / (2.5 if shared else 1.0), rel=0.2)
    assert summarize([sequence_sums(0, torch.ones(3), torch.zeros(3))], 1).kl_error == 0.0


def test_a_prompts_completions_are_one_draw_in_the_order_of_the_batch() -> None:
    sums = [SequenceSums(index, 1 + index, 0.0, 0.0, 0.0, 0.0, float(2**index)) for index in (3, 0, 2, 1, 0)]
    assert prompt_sums(sums, 2) == (PromptSums(1.0 + 1.0 + 2.0, 1 + 1 + 2), PromptSums(4.0 + 8.0, 3 + 4))


def test_the_covariance_of_two_steps_by_hand() -> None:
    """Means 1 and 2 a token; what prompts add to them is -1/4 and 1/4, and -3/4 and 3/4."""
    first, second = (PromptSums(0.0, 1), PromptSums(4.0, 3)), (PromptSums(1.0, 2), PromptSums(7.0, 2))
    assert kl_covariance(first, first) == pytest.approx(2 * (0.25**2 + 0.25**2))
    assert kl_covariance(first, second) == pytest.approx(2 * (0.25 * 0.75 + 0.25 * 0.75))
    assert kl_covariance(first[:1], second[:1]) is None
    with pytest.raises(ConfigError, match="1 prompts in one step and 2 in the other"):
        kl_covariance(first[:1], second)


# The objective of a microbatch.


@pytest.mark.parametrize("rule", ["token", "sequence"])
def test_token_weights_sum_to_one(rule: str) -> None:
    weights = token_weights(SEQUENCES, rule)
    assert sum(weights[s.index] * s.trained for s in SEQUENCES) == pytest.approx(1.0)
    each = [weights[s.index] for s in SEQUENCES]
    assert each == ([1 / 9] * 4 if rule == "token" else [1 / (4 * s.trained) for s in SEQUENCES])


CORRECTION, CLIPPING = CorrectionSettings(cap=1.1, reject_below=0.4), LossSettings(0.2, 0.28)


def by_hand(sequence: Sequence, logp: torch.Tensor, old: torch.Tensor | None, weight: float) -> torch.Tensor:
    """One completion's part of the loss, token by token, from the formulas of the modules' docstrings."""
    total = torch.zeros((), dtype=torch.float64)
    for place, value in enumerate(logp.double()):
        before = value.detach() if old is None else old[place].double()
        importance = math.exp(before - sequence.rollout_logp[place])
        importance = 0.0 if importance < 0.4 else min(importance, 1.1)
        ratio = (value - before).exp()
        clipped = ratio.clamp(0.8, 1.28)
        total = total - weight * importance * torch.minimum(ratio * sequence.advantage, clipped * sequence.advantage)
    return total


@pytest.mark.parametrize("first", [True, False], ids=["first update", "later update"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("budget", [6, 100])
def test_the_loss_of_microbatches_is_that_of_their_tokens(layout: str, budget: int, first: bool) -> None:
    """Loss, gradient and statistics do not depend on how sequences are cut into microbatches, and are those of a sum
    over tokens."""
    generator = torch.Generator().manual_seed(5)
    sequences = [replace(s, advantage=(-1.0) ** s.index * (0.5 + s.index)) for s in SEQUENCES]
    values = {s.index: -torch.rand(s.trained, generator=generator) for s in sequences}
    old = None if first else {index: v + 0.6 * torch.randn(len(v), generator=generator) for index, v in values.items()}
    weights = token_weights(sequences, "sequence")
    leaves = {index: v.clone().requires_grad_() for index, v in values.items()}
    expected = sum(by_hand(s, leaves[s.index], old and old[s.index], weights[s.index]) for s in sequences)
    expected.backward()

    total, sums, gradients = 0.0, {}, {}
    for batch in microbatches(sequences, budget=budget, layout=layout):
        logp = torch.cat([values[s.index] for s in batch.sequences]).requires_grad_()
        loss, found = batch_loss(batch, logp, old, weights, CORRECTION, CLIPPING)
        loss.backward()
        total += loss.item()
        gradients.update(zip((s.index for s in batch.sequences), batch.split(logp.grad), strict=True))
        sums.update({one.index: one for one in found})
    assert total == pytest.approx(expected.item(), rel=1e-5)
    for sequence in sequences:
        torch.testing.assert_close(gradients[sequence.index], leaves[sequence.index].grad, rtol=1e-5, atol=1e-7)
        before = values[sequence.index] if old is None else old[sequence.index]
        apart = before.double() - torch.tensor(sequence.rollout_logp).double()
        one = sums[sequence.index]
        assert one.tokens == sequence.trained
        assert one.difference == pytest.approx(apart.sum().item())
        assert one.rejected == int((apart.exp() < 0.4).sum())
        assert one.truncated == int((apart.exp() > 1.1).sum())
    if not first:
        assert sum(one.clipped_low + one.clipped_high for one in sums.values()) > 0, "the case must clip"
    assert sum(one.truncated for one in sums.values()) > 0, "the case must cut weights off"


def test_a_placeholder_counts_nowhere_and_keeps_the_graph() -> None:
    """A rank with nothing to do still runs a backward pass, or the ranks that exchange experts with it would wait."""
    nobody = Sequence.nobody()
    for old in (None, {}):
        (batch,) = microbatches([nobody], budget=8, layout="packed")
        logp = torch.tensor([-0.5], requires_grad=True)
        loss, found = batch_loss(batch, logp, old, token_weights(SEQUENCES, "token"), CORRECTION, CLIPPING)
        loss.backward()
        assert (loss.item(), logp.grad.tolist(), found) == (0.0, [0.0], [])


def test_log_probs_of_another_length_are_refused() -> None:
    (batch,) = microbatches(SEQUENCES, budget=100, layout="packed")
    with pytest.raises(ConfigError, match="has 9 completion tokens"):
        batch_loss(batch, torch.zeros(8), None, {}, CORRECTION, CLIPPING)
