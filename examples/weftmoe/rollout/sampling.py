"""Draws completions from a `Decoder`: seeds of their own for every request, log-probabilities of every drawn token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weftmoe.rollout.base import Request

__all__ = ["Distribution", "Drawn", "draw", "score"]


@dataclass(frozen=True)
class Distribution:
    """What tokens are drawn from: softmax of ``logits / temperature``, cut to the smallest set of tokens that holds
    `top_p` of it.
    """

    temperature: float = 1.0
    top_p: float = 1.0

    def log_probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """float32, over the last dimension; minus infinity outside of the set."""
        logp = (logits.float() / self.temperature).log_softmax(-1)
        if self.top_p >= 1.0:
            return logp
        ordered, order = logp.exp().sort(dim=-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= self.top_p
        cut = torch.zeros_like(outside).scatter_(-1, order, outside)
        return logp.masked_fill(cut, float("-inf")).log_softmax(-1)


@dataclass(frozen=True)
class Drawn:
    """Tokens of one completion, their log-probabilities, and whether an end token was drawn."""

    tokens: list[int]
    logprobs: list[float]
    stopped: bool


class _Decoder(Protocol):
    def cache(self, rows: int, length: int) -> Any: ...
    def __call__(self, tokens: torch.Tensor, start: torch.Tensor, cache: Any) -> torch.Tensor: ...


@torch.no_grad()
def draw(
    decoder: _Decoder,
    requests: Sequence[Request],
    distribution: Distribution,
    stops: frozenset[int],
    done: Callable[[int], None] = lambda count: None,
) -> list[Drawn]:
    """Complete requests, all in one batch.

    The random numbers of a request come from its own seed, one vector per token: whoever else is in the batch changes
    nothing but the last bits of the logits.

    Args:
        decoder: the model.
        requests: what is wanted.
        distribution: what to draw from.
        stops: tokens that end a completion; they belong to it.
        done: called with the number of requests that have ended, as they end.
    """
    if not requests:
        return []
    lengths = torch.tensor([len(request.tokens) for request in requests])
    room = max(len(request.tokens) + request.limit for request in requests)
    prompts = torch.zeros(len(requests), int(lengths.max()), dtype=torch.int64)
    for row, request in enumerate(requests):
        prompts[row, : len(request.tokens)] = torch.tensor(request.tokens)
    cache = decoder.cache(len(requests), room)
    logits = decoder(prompts, torch.zeros_like(lengths), cache)[torch.arange(len(requests)), lengths - 1]
    generators = [torch.Generator().manual_seed(request.seed) for request in requests]
    found = [Drawn([], [], False) for _ in requests]
    # Rows that have ended stay in the batch, so that nobody's arithmetic changes with the others' lengths.
    running, position = set(range(len(requests))), lengths.clone()
    while True:
        logp = distribution.log_probabilities(logits)
        noise = torch.stack([_exponential(generator, logp.shape[-1]) for generator in generators])
        tokens = (logp - noise.log()).argmax(-1)
        chosen = logp.gather(-1, tokens[:, None])[:, 0].tolist()
        for row, token in enumerate(tokens.tolist()):
            if row not in running:
                continue
            one = found[row]
            one.tokens.append(token)
            one.logprobs.append(chosen[row])
            if token in stops or len(one.tokens) == requests[row].limit:
                found[row] = Drawn(one.tokens, one.logprobs, token in stops)
                running.discard(row)
                done(1)
        if not running:
            return found
        logits = decoder(tokens[:, None], position.clamp(max=room - 1), cache)[:, 0]
        position += 1


@torch.no_grad()
def score(
    decoder: _Decoder, sequences: Sequence[tuple[Sequence[int], int]], distribution: Distribution
) -> list[list[float]]:
    """Log-probabilities of the tokens of each sequence from a position on; (tokens, first) as in `Rollout.score`."""
    longest = max(len(tokens) for tokens, _ in sequences)
    batch = torch.zeros(len(sequences), longest, dtype=torch.int64)
    for row, (tokens, _) in enumerate(sequences):
        batch[row, : len(tokens)] = torch.tensor(tokens)
    logits = decoder(batch, torch.zeros(len(sequences), dtype=torch.int64), decoder.cache(len(sequences), longest))
    logp = distribution.log_probabilities(logits[:, :-1]).gather(-1, batch[:, 1:, None])[..., 0]
    return [logp[row, first - 1 : len(tokens) - 1].tolist() for row, (tokens, first) in enumerate(sequences)]


def _exponential(generator: torch.Generator, count: int) -> torch.Tensor:
    return torch.empty(count).exponential_(generator=generator)
