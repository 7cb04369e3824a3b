"""What a served MoE layer computes from its live bytes, through SGLang's own dequantization: the answer that must
match the trainer's.

The arithmetic after dequantization is plain FP32, so the probe runs on any device and shows the weights, not a kernel.
"""

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weftpub.errors import ConfigError
from weftpub.masters import ExpertMatrix
from weftpub_adapters.sglang.build import ServedModel
from weftpub_adapters.sglang.placement import expert_slots

__all__ = ["LayerProbe", "probe_layer"]

_BLOCK = [128, 128]


@dataclass(frozen=True)
class LayerProbe:
    """One rank's share of a layer.

    Attributes:
        sha256: matrix name to the SHA-256 of this rank's dequantized BF16 weight, row-major: fc1 ``[2I, H]``, fc2
            ``[H, I]`` with I this rank's part of the intermediate size.
        output: FP32 ``[tokens, H]``; the routed experts' output is the sum over all ranks. Shared experts are left out.
        expert_ids, expert_weights: the routing used, ``[tokens, k]``.
    """

    sha256: dict[str, str]
    output: torch.Tensor
    expert_ids: torch.Tensor
    expert_weights: torch.Tensor


@torch.no_grad()
def probe_layer(
    served: ServedModel,
    layer: int,
    hidden: torch.Tensor,
    expert_ids: torch.Tensor | None = None,
    expert_weights: torch.Tensor | None = None,
) -> LayerProbe:
    """Run one rank's experts on `hidden`.

    Args:
        served: the rank's model.
        layer: decoder layer.
        hidden: ``[tokens, H]``, any float dtype.
        expert_ids, expert_weights: global experts of each token and their weights, ``[tokens, k]``; by default from
            the live router. Give both, or none: near-ties may route differently on the two sides, which says nothing
            about the weights.

    Raises:
        ConfigError: no such layer, a hidden state of another width, or half a routing.
    """
    block = _block(served, layer, hidden)
    if (expert_ids is None) != (expert_weights is None):
        raise ConfigError("give expert_ids and expert_weights together, or neither")
    x = hidden.to(served.device, torch.float32)
    if expert_ids is None or expert_weights is None:
        expert_ids, expert_weights = _route(served, block, x)
    expert_ids, expert_weights = expert_ids.to(x.device), expert_weights.to(x.device, torch.float32)
    w13, w2 = _dequantized(block.experts, "w13"), _dequantized(block.experts, "w2")
    slots = _slots(served, block.experts)
    digests: dict[str, str] = {}
    output = torch.zeros_like(x)
    for (expert, answers), fc1, fc2 in zip(slots, w13, w2, strict=True):
        digests[ExpertMatrix(layer, expert, "fc1").name] = _sha256(fc1)
        digests[ExpertMatrix(layer, expert, "fc2").name] = _sha256(fc2)
        if not answers:
            continue
        token, choice = torch.nonzero(expert_ids == expert, as_tuple=True)
        gate, up = F.linear(x[token], fc1.float()).chunk(2, dim=-1)
        contribution = F.linear(F.silu(gate) * up, fc2.float()) * expert_weights[token, choice, None]
        output.index_add_(0, token, contribution)
    return LayerProbe(digests, output, expert_ids, expert_weights)


def _slots(served: ServedModel, experts: torch.nn.Module) -> list[tuple[int, bool]]:
    """The expert in each slot, and whether the slot answers for it: of several slots with one expert the first does."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    with served.active():
        name = next(name for name, module in served.model.named_modules() if module is experts)
        held = expert_slots(served.model)[name]
        metadata = get_global_expert_location_metadata()
    if metadata is None:
        return [(expert, True) for expert in held]
    first = served.parallel.moe_ep_rank * len(held)
    row = metadata.physical_to_logical_map_cpu[experts.layer_id].tolist()
    return [(expert, row.index(expert) == first + local) for local, expert in enumerate(held)]


def _block(served: ServedModel, layer: int, hidden: torch.Tensor) -> torch.nn.Module:
    layers = served.model.model.layers
    if not 0 <= layer < len(layers):
        raise ConfigError(f"layer {layer}: the model has layers 0 to {len(layers) - 1}")
    width = served.target.config.get_text_config().hidden_size
    if hidden.ndim != 2 or hidden.shape[1] != width:
        raise ConfigError(f"hidden: expected [tokens, {width}], found {list(hidden.shape)}")
    return layers[layer].mlp


def _route(served: ServedModel, block: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, the k largest, rescaled to sum to one where the model says so."""
    probabilities = F.linear(x, block.gate.weight.float()).softmax(dim=-1)
    config = served.target.config.get_text_config()
    weights, ids = probabilities.topk(config.num_experts_per_tok, dim=-1)
    if config.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights


def _dequantized(experts: torch.nn.Module, name: str) -> torch.Tensor:
    """All local experts' weights in BF16, by SGLang's own function where they are FP8."""
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    weight = getattr(experts, f"{name}_weight").data
    if weight.dtype != torch.float8_e4m3fn:
        return weight
    return block_quant_dequant(weight, getattr(experts, f"{name}_weight_scale_inv").data, _BLOCK, torch.bfloat16)


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
