"""What the sampler's decoders of every model family must do, for their tests."""

import torch

from weftmoe.rollout.forward import Decoder

__all__ = ["check_stretches", "whole"]


def whole(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of whole sequences, in one pass."""
    return decoder(tokens, torch.zeros(len(tokens), dtype=torch.int64), decoder.cache(*tokens.shape))


def check_stretches(decoder: Decoder) -> None:
    """Rows of different lengths, right-padded prompts first and then a token at a time, as sampling does it, have the
    logits of the whole."""
    tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(2))
    expected = whole(decoder, tokens)
    lengths, cache = torch.tensor([3, 6]), decoder.cache(2, 9)
    prompts = tokens[:, :6].clone()
    prompts[0, 3:] = 49  # padding, which must not be seen afterwards
    first = decoder(prompts, torch.zeros(2, dtype=torch.int64), cache)
    torch.testing.assert_close(first[0, :3], expected[0, :3], rtol=1e-4, atol=1e-4)
    for step in range(3):
        places = lengths + step
        found = decoder(tokens[torch.arange(2), places][:, None], places, cache)[:, 0]
        torch.testing.assert_close(found, expected[torch.arange(2), places], rtol=1e-4, atol=1e-4)
