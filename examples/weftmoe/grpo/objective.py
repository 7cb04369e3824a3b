"""The loss of a microbatch, from the log-probabilities that the model gave: what it counts, and what is said about it.

A step's loss is a mean over the trained tokens ("token", DAPO), or over completions of the mean over their tokens
("sequence", as GRPO was first written), of all ranks and microbatches together. `token_weights` says what that makes of
one token; `batch_loss` sums the weighted token losses of one microbatch, so the sum over microbatches and ranks is the
step's loss.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Literal

import torch

from weftmoe.grpo.correction import CorrectionSettings, correct
from weftmoe.grpo.loss import LossSettings, token_loss
from weftmoe.grpo.packing import Microbatch, Sequence
from weftmoe.grpo.statistics import SequenceSums, sequence_sums
from weftpub.errors import ConfigError

__all__ = ["batch_loss", "token_weights"]


def token_weights(sequences: Many[Sequence], rule: Literal["token", "sequence"]) -> dict[int, float]:
    """What one token of each sequence counts, by the sequence's index; over all tokens the weights sum to one.

    Args:
        sequences: of an update, of all ranks.
        rule: "token" weighs every trained token alike, "sequence" every completion.
    """
    if rule == "sequence":
        return {s.index: 1.0 / (s.trained * len(sequences)) for s in sequences}
    total = sum(s.trained for s in sequences)
    return {s.index: 1.0 / total for s in sequences}


def batch_loss(
    batch: Microbatch,
    logp: torch.Tensor,
    old: Mapping[int, torch.Tensor] | None,
    weights: Mapping[int, float],
    correction: CorrectionSettings,
    clipping: LossSettings,
) -> tuple[torch.Tensor, list[SequenceSums]]:
    """A microbatch's part of the loss, and the sums of its sequences against the rollout.

    Args:
        batch: the sequences; placeholders count nothing.
        logp: ``[batch.trained]`` with gradient, log-probabilities of the completion tokens, as `Microbatch.pick` gives
            them.
        old: log-probabilities before the step's first update by sequence index, ``[trained]`` each; None where `logp`
            are those.
        weights: of `token_weights`.
        correction, clipping: settings of the importance weights and of the ratio's range.

    Returns:
        the loss, a scalar that depends on all of `logp` whatever the batch holds, and the sums.

    Raises:
        ConfigError: `logp` has another length.
    """
    if logp.shape != (batch.trained,):
        raise ConfigError(f"log-probs {list(logp.shape)}, the microbatch has {batch.trained} completion tokens")
    lengths = torch.tensor([s.trained for s in batch.sequences])
    rollout = torch.tensor([value for s in batch.sequences for value in s.rollout_logp])
    each = torch.tensor([[s.advantage, weights.get(s.index, 0.0)] for s in batch.sequences])
    rollout, advantages, weighed = torch.cat((rollout[None], each.repeat_interleave(lengths, 0).T)).to(logp.device)
    before = logp.detach() if old is None else _joined(batch, old, logp)
    importance = correct(before, rollout, correction)
    tokens = token_loss(logp, before, advantages, importance.weights, clipping)
    loss = (tokens.values * weighed).sum()
    flags = (tokens.clipped_low, tokens.clipped_high, importance.truncated, importance.rejected)
    # Statistics are sums on the host: all of it crosses at once.
    host = torch.stack((before.float(), rollout, tokens.values.detach(), *(flag.float() for flag in flags))).cpu()
    parts = host.split(lengths.tolist(), dim=1)
    return loss, [
        _sums(sequence, part) for sequence, part in zip(batch.sequences, parts, strict=True) if not sequence.placeholder
    ]


def _joined(batch: Microbatch, old: Mapping[int, torch.Tensor], logp: torch.Tensor) -> torch.Tensor:
    found = [torch.zeros(s.trained) if s.placeholder else old[s.index].float().cpu() for s in batch.sequences]
    return torch.cat(found).to(logp.device)


def _sums(sequence: Sequence, part: torch.Tensor) -> SequenceSums:
    before, rollout, loss, low, high, truncated, rejected = part
    return sequence_sums(
        sequence.index,
        before,
        rollout,
        loss=loss,
        clipped_low=low,
        clipped_high=high,
        truncated=truncated,
        rejected=rejected,
    )
