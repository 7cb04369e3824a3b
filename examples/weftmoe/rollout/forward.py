"""Qwen3-MoE's forward pass in plain torch, from the live parameters of SGLang's real model.

For machines where SGLang's kernels cannot run. Weights are the bytes that were received: BF16 parameters, and experts
through SGLang's own `block_quant_dequant` where they are FP8. Arithmetic is FP32, one rank holds the whole model.
Formulas are those of `transformers.models.qwen3_moe`, with which a test compares them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from weftpub.errors import ConfigError

__all__ = ["Cache", "Decoder", "dequantized", "live_tensor", "rotate"]

_BLOCK = [128, 128]
# Parts of SGLang's fused parameters: which of a layer's, and which part in their order.
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_EXPERT_PARTS = {"gate_proj": ("w13_weight", 0), "up_proj": ("w13_weight", 1), "down_proj": ("w2_weight", None)}


@dataclass(frozen=True)
class _Layer:
    """One layer's weights in FP32."""

    qkv: torch.Tensor
    out: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    before_attention: torch.Tensor
    before_experts: torch.Tensor
    router: torch.Tensor
    fc1: torch.Tensor
    fc2: torch.Tensor


class Cache:
    """Keys and values of a batch, ``[rows, kv_heads, length, head_dim]`` per layer."""

    def __init__(self, layers: int, rows: int, kv_heads: int, length: int, head_dim: int) -> None:
        shape = (rows, kv_heads, length, head_dim)
        self.keys = [torch.zeros(shape) for _ in range(layers)]
        self.values = [torch.zeros(shape) for _ in range(layers)]


class Decoder:
    """The model of one `ServedModel`.

    `refresh` reads the live parameters and must be called after every publish; `drop` forgets what was read.

    Args:
        served: holds the model.
        sizes: the part of its config.json that speaks of the language model; by default all of it.

    Raises:
        ConfigError: the model is split over ranks.
    """

    def __init__(self, served: Any, sizes: Mapping[str, Any] | None = None) -> None:
        config = served.hf_config if sizes is None else sizes
        if served.parallel.tp_size != 1:
            raise ConfigError(
                f"the torch sampler computes whole models, this one is split over {served.parallel.tp_size} ranks; set "
                "rollout.tensor=1"
            )
        rope = config.get("rope_parameters") or {}
        self._served = served
        self._heads = config["num_attention_heads"]
        self._kv_heads = config["num_key_value_heads"]
        self._dim = config.get("head_dim") or config["hidden_size"] // self._heads
        self._eps = config["rms_norm_eps"]
        self._top_k = config["num_experts_per_tok"]
        self._renormalize = bool(config.get("norm_topk_prob", False))
        self._theta = float(rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"])
        self._vocabulary = config["vocab_size"]
        self._layers: list[_Layer] | None = None
        self._embedding = self._norm = self._head = torch.empty(0)

    def drop(self) -> None:
        """Forget the weights; the engine's memory is about to go."""
        self._layers = None
        self._embedding = self._norm = self._head = torch.empty(0)

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the live parameters as they are now."""
        model = self._served.model
        self._layers = [self._read(layer) for layer in model.model.layers]
        self._embedding = model.model.embed_tokens.weight.data[: self._vocabulary].float()
        self._norm = model.model.norm.weight.data.float()
        self._head = model.lm_head.weight.data[: self._vocabulary].float()

    @property
    def fresh(self) -> bool:
        """Whether weights were read since the last `drop`."""
        return self._layers is not None

    def cache(self, rows: int, length: int) -> Cache:
        """An empty cache."""
        return Cache(len(self._required()), rows, self._kv_heads, length, self._dim)

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor, start: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Compute a stretch of every row.

        Args:
            tokens: int64 ``[rows, stretch]``. Padding may follow a row's real tokens: what it writes into the cache is
                never seen, as later tokens of the row overwrite it.
            start: int64 ``[rows]``, position of each row's first token here; the cache holds all before it.
            cache: is extended.

        Returns:
            logits, float32 ``[rows, stretch, vocabulary]``.
        """
        rows, stretch = tokens.shape
        positions = start[:, None] + torch.arange(stretch)
        cosine, sine = self._rotation(positions)
        hidden = F.embedding(tokens, self._embedding)
        seen = torch.arange(cache.keys[0].shape[2])[None, None] <= positions[:, :, None]
        for number, layer in enumerate(self._required()):
            normed = self._rms(hidden, layer.before_attention)
            q, k, v = self._project(layer, normed, cosine, sine)
            place = positions[:, None, :, None].expand(-1, self._kv_heads, -1, self._dim)
            cache.keys[number].scatter_(2, place, k)
            cache.values[number].scatter_(2, place, v)
            hidden = hidden + F.linear(self._attend(q, cache.keys[number], cache.values[number], seen), layer.out)
            normed = self._rms(hidden, layer.before_experts).reshape(rows * stretch, -1)
            hidden = hidden + self._experts(layer, normed).view_as(hidden)
        return F.linear(self._rms(hidden, self._norm), self._head)

    def _required(self) -> list[_Layer]:
        assert self._layers is not None, "refresh comes before the first forward pass"
        return self._layers

    def _read(self, layer: Any) -> _Layer:
        attention, block = layer.self_attn, layer.mlp
        return _Layer(
            qkv=attention.qkv_proj.weight.data.float(),
            out=attention.o_proj.weight.data.float(),
            q_norm=attention.q_norm.weight.data.float(),
            k_norm=attention.k_norm.weight.data.float(),
            before_attention=layer.input_layernorm.weight.data.float(),
            before_experts=layer.post_attention_layernorm.weight.data.float(),
            router=block.gate.weight.data.float(),
            fc1=dequantized(block.experts, "w13"),
            fc2=dequantized(block.experts, "w2"),
        )

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * weight

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frequency = 1.0 / self._theta ** (torch.arange(0, self._dim, 2, dtype=torch.float32) / self._dim)
        angle = positions[:, None, :, None].float() * frequency
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()

    def _project(
        self, layer: _Layer, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = [self._heads * self._dim, self._kv_heads * self._dim, self._kv_heads * self._dim]
        q, k, v = (
            part.unflatten(-1, (-1, self._dim)).transpose(1, 2) for part in F.linear(x, layer.qkv).split(sizes, dim=-1)
        )
        q, k = self._rms(q, layer.q_norm), self._rms(k, layer.k_norm)
        return rotate(q, cosine, sine), rotate(k, cosine, sine), v

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        share = self._heads // self._kv_heads
        keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
        scores = q @ keys.transpose(-1, -2) * self._dim**-0.5
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        return (weights @ values).transpose(1, 2).flatten(2)

    def _experts(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        weights, experts = F.linear(x, layer.router).softmax(-1).topk(self._top_k, dim=-1)
        if self._renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(x)
        for expert, (fc1, fc2) in enumerate(zip(layer.fc1, layer.fc2, strict=True)):
            token, choice = torch.nonzero(experts == expert, as_tuple=True)
            if len(token):
                gate, up = F.linear(x[token], fc1).chunk(2, dim=-1)
                result.index_add_(0, token, F.linear(F.silu(gate) * up, fc2) * weights[token, choice, None])
        return result


def live_tensor(model: Any, config: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """Where a Hugging Face tensor of a whole BF16 model lies in SGLang's parameters, which join several of them; None
    where that is not known here.

    Args:
        model: SGLang's, of one rank.
        config: its config.json.
        name: such as ``model.layers.0.mlp.experts.3.up_proj.weight``.
    """
    live = dict(model.named_parameters())
    before, _, rest = name.partition(".mlp.experts.")
    parent, _, last = name.removesuffix(".weight").rpartition(".")
    if rest:
        expert, projection, _ = rest.split(".")
        parameter, half = _EXPERT_PARTS[projection]
        matrices = live.get(f"{before}.mlp.experts.{parameter}")
        if matrices is None:
            return None
        return matrices.data[int(expert)] if half is None else matrices.data[int(expert)].chunk(2)[half]
    if last in _PROJECTIONS and f"{parent}.qkv_proj.weight" in live:
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // heads
        sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
        joined = live[f"{parent}.qkv_proj.weight"].data
        return joined.split(sizes)[_PROJECTIONS.index(last)] if len(joined) == sum(sizes) else None
    if name not in live:
        return None
    tensor = live[name].data
    # Rows of the vocabulary are padded.
    return tensor[: config["vocab_size"]] if last in ("embed_tokens", "lm_head") else tensor


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary embedding: the first half of the elements is rotated against the second."""
    low, high = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-high, low), dim=-1) * sine


def dequantized(experts: Any, name: str) -> torch.Tensor:
    """All experts' weights in FP32; FP8 ones as SGLang dequantizes them, which rounds to BF16."""
    weight = getattr(experts, f"{name}_weight").data
    if weight.dtype == torch.float8_e4m3fn:
        from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

        scale = getattr(experts, f"{name}_weight_scale_inv").data
        weight = block_quant_dequant(weight, scale, _BLOCK, torch.bfloat16)
    return weight.float()
