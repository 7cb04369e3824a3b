"""The layer check: trainer and receivers compute one layer, on the same tokens and routing, from what each holds.

The bound. Both sides multiply the same weight bytes by the same inputs. The trainer computes in BF16 and rounds the
gate, up and down products, the activation and the weighted sum, each by at most 2^-9 of its value; the receivers stay
in FP32. Errors inside the sums partly cancel, so 2^-6 of the layer's largest output covers the five roundings with
room.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weftpub_adapters.megatron import TrainerProbe
from weftpub_demo.checks import CheckBook

__all__ = ["BOUND", "compare", "probe_request", "probe_tokens"]

BOUND = 2.0**-6
_TOKENS = 16


def probe_tokens(hidden: int, seed: int) -> torch.Tensor:
    """Random hidden states, FP32 `[tokens, hidden]`, exact in BF16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(_TOKENS, hidden, generator=generator).to(torch.bfloat16).float()


def probe_request(layer: int, tokens: torch.Tensor, probe: TrainerProbe) -> dict[str, Any]:
    """What a receiver needs to compute the same layer: the trainer's tokens and routing."""
    return {
        "layer": layer,
        "hidden": tokens.tolist(),
        "expert_ids": probe.expert_ids.tolist(),
        "expert_weights": probe.expert_weights.tolist(),
    }


def compare(layer: int, probe: TrainerProbe, answers: Sequence[Mapping[str, Any]], book: CheckBook) -> None:
    """Check what the receivers of one engine answered against the trainer's layer.

    Raises:
        CheckError: a matrix is missing, held twice or not bit-equal, or the summed outputs leave the bound.
    """
    found: dict[str, str] = {}
    for answer in answers:
        doubled = sorted(found.keys() & answer["sha256"].keys())
        book.require("weights", not doubled, f"two receivers hold {doubled[:3]}")
        found.update(answer["sha256"])
    names = probe.sha256.keys() | found.keys()
    wrong = sorted(name for name in names if probe.sha256.get(name) != found.get(name))
    book.require("weights", not wrong, f"{len(wrong)} of {len(names)} matrices of layer {layer} differ: {wrong[:4]}")
    book.passed("weights", len(names) - 1)
    output = torch.stack([torch.tensor(answer["output"], dtype=torch.float32) for answer in answers]).sum(dim=0)
    expected = probe.output.cpu()
    largest = float(expected.abs().max())
    difference = float((output - expected).abs().max())
    book.require(
        "outputs",
        difference <= BOUND * largest,
        f"layer {layer} differs by {difference:.3e}, allowed is {BOUND * largest:.3e} (2^-6 of {largest:.3e})",
    )
