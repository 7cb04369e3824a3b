"""Log-probabilities of given tokens from a Megatron model, a limited number of logits at a time.

Megatron hands hidden states to an `output_processor`; this one runs the output layer over stretches of them and keeps
one number per position. With more than one stretch the logits are computed again in the backward pass, so that those
of a stretch, and never of the whole microbatch, exist at once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from weftmoe.grpo import Microbatch

__all__ = ["log_probabilities"]

_LENGTHS = 64  # lengths of packed sequences are told apart in steps of this


def log_probabilities(
    model: Any,
    batch: Microbatch,
    device: torch.device,
    *,
    chunk_tokens: int,
    temperature: float = 1.0,
    masked: bool = True,
) -> torch.Tensor:
    """Run the model forward.

    Args:
        model: Megatron's, wrapped or not.
        batch: which tokens.
        device: where the model is.
        chunk_tokens: positions whose logits exist at once; 0 for all.
        temperature: that the engine divides logits by before it samples: both sides speak of one distribution.
        masked: whether attention must be told not to look ahead in padded rows; TransformerEngine's does not.

    Returns:
        float32 of the shape of ``batch.tokens``: log p(label) at each position, with gradient if enabled.
    """
    tokens, labels, positions = (tensor.to(device) for tensor in (batch.tokens, batch.labels, batch.positions))
    packed = _packed_parameters(batch, device) if batch.layout == "packed" else None
    result: torch.Tensor = model(
        tokens,
        positions,
        _causal_mask(batch, device) if masked and batch.layout == "padded" else None,
        labels=labels,
        packed_seq_params=packed,
        output_processor=_processor(chunk_tokens, temperature),
    )
    return result


def _processor(chunk_tokens: int, temperature: float) -> Callable[..., torch.Tensor]:
    def process(
        *,
        hidden_states: torch.Tensor,
        output_layer: Any,
        output_weight: torch.Tensor | None,
        labels: torch.Tensor,
        compute_language_model_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        # hidden_states [positions of this rank, rows, hidden]; with sequence parallelism each tensor-parallel rank has
        # its stretch of the positions, and the output layer gathers them.
        here, rows = hidden_states.shape[:2]
        parts = labels.shape[1] // here
        chunk = here if chunk_tokens == 0 else max(1, chunk_tokens // (rows * parts))

        def one(hidden: torch.Tensor, first: int) -> torch.Tensor:
            logits, _ = output_layer(hidden, weight=output_weight, runtime_gather_output=False)
            if temperature != 1.0:
                logits = logits.float() / temperature
            return -compute_language_model_loss(labels[:, _places(first, len(hidden), here, parts)], logits)

        if chunk >= here:
            return one(hidden_states, 0)
        result = labels.new_zeros(labels.shape, dtype=torch.float32)
        for first in range(0, here, chunk):
            hidden = hidden_states[first : first + chunk]
            values = checkpoint(one, hidden, first, use_reentrant=False)
            places = _places(first, len(hidden), here, parts).to(labels.device)
            result = result.index_copy(1, places, values.float())
        return result

    return process


def _places(first: int, count: int, here: int, parts: int) -> torch.Tensor:
    """Positions that the output layer answers for, in its order: a stretch of every tensor-parallel rank's share."""
    return torch.cat([torch.arange(part * here + first, part * here + first + count) for part in range(parts)])


def _causal_mask(batch: Microbatch, device: torch.device) -> torch.Tensor:
    """True where attention must not look. Padding comes last, so no real token sees it."""
    length = batch.tokens.shape[1]
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]


def _packed_parameters(batch: Microbatch, device: torch.device) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.tensor(batch.starts, dtype=torch.int32, device=device)
    longest = max(end - start for start, end in zip(batch.starts, batch.starts[1:], strict=False))
    # An upper bound is enough, and kernels are built anew for each one.
    longest += -longest % _LENGTHS
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
