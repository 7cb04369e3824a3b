"""What the trainer's own MoE layer computes: the other half of the comparison with a served layer."""

import hashlib
from dataclasses import dataclass

import torch

from weftpub.errors import ConfigError
from weftpub.masters import ExpertMatrix
from weftpub_adapters.megatron.linear import StoreMatrix
from weftpub_adapters.megatron.trainer import MegatronTrainer

__all__ = ["TrainerProbe", "probe_layer"]


@dataclass(frozen=True)
class TrainerProbe:
    """One layer of one rank.

    Attributes:
        sha256: matrix name to the SHA-256 of the BF16 weight that forward multiplies with, row-major.
        output: FP32 ``[tokens, H]``, the layer's output.
        expert_ids, expert_weights: the router's choice, ``[tokens, k]``; hand them to the served layer's probe.
    """

    sha256: dict[str, str]
    output: torch.Tensor
    expert_ids: torch.Tensor
    expert_weights: torch.Tensor


@torch.no_grad()
def probe_layer(trainer: MegatronTrainer, layer: int, hidden: torch.Tensor) -> TrainerProbe:
    """Run Megatron's own MoE layer on `hidden` ``[tokens, H]``.

    Raises:
        ConfigError: no such layer, or a hidden state of another width.
    """
    fields = trainer.fields
    if not 0 <= layer < fields.layers or hidden.ndim != 2 or hidden.shape[1] != fields.hidden:
        raise ConfigError(
            f"layer {layer}, hidden {list(hidden.shape)}: expected a layer below {fields.layers} and [tokens, "
            f"{fields.hidden}]"
        )
    moe = trainer.model.module.decoder.layers[layer].mlp
    x = hidden.to(trainer.device, trainer.model_config.params_dtype)[:, None, :]
    probabilities, _ = moe.router(x)
    weights, ids = probabilities.float().topk(fields.top_k, dim=-1)
    output, _ = moe(x)
    digests: dict[str, str] = {}
    for expert in trainer.store.layout.experts:
        for projection in ("fc1", "fc2"):
            matrix = ExpertMatrix(layer, expert, projection)
            weight, _ = StoreMatrix(trainer.store, matrix).forward_weight(torch.bfloat16)
            digests[matrix.name] = hashlib.sha256(
                weight.contiguous().view(torch.uint8).cpu().numpy().tobytes()
            ).hexdigest()
    return TrainerProbe(digests, output[:, 0].float(), ids, weights)
