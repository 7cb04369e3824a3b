"""Qwen3.5-MoE's forward pass in plain torch, from the live parameters of SGLang's real model; as `forward`, which see.

Formulas are those of `transformers.models.qwen3_5_moe`, with which a test compares them. A gated delta net is computed
token by token, and its cache keeps the state behind every position: a row goes on from any of them, and what padding
left behind is written over by the tokens that come there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from weftmoe.rollout.forward import Cache, Decoder, dequantized, live_tensor, rotate

__all__ = ["HybridCache", "HybridDecoder", "decoder_of", "live_place"]

_HYBRID = "linear_num_value_heads"  # a field that only this family's configuration has
_EPS = 1e-6  # of the length of queries and keys


@dataclass(frozen=True)
class _Attention:
    """Query rows hold each head's query, then its gate."""

    qkv: torch.Tensor
    out: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor


@dataclass(frozen=True)
class _DeltaNet:
    """`project` holds the rows of query, key, value, z, b and a; `convolve` is ``[channels, kernel]``."""

    project: torch.Tensor
    convolve: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class _Block:
    """One layer's weights in FP32; norms as what they multiply by."""

    mixer: _Attention | _DeltaNet
    before_attention: torch.Tensor
    before_experts: torch.Tensor
    router: torch.Tensor
    fc1: torch.Tensor
    fc2: torch.Tensor
    shared_fc1: torch.Tensor
    shared_fc2: torch.Tensor
    shared_gate: torch.Tensor


class HybridCache(Cache):
    """Keys and values where a layer has attention, and where it has a gated delta net the inputs of its convolution
    ``[rows, kernel - 1 + length, channels]`` and its states ``[rows, 1 + length, heads, key width, value width]``.
    """

    def __init__(self, like: Mapping[int, tuple[tuple[int, ...], ...]]) -> None:
        self.keys = [torch.zeros(shapes[0]) for shapes in like.values()]
        self.values = [torch.zeros(shapes[1]) for shapes in like.values()]


class HybridDecoder(Decoder):
    """The model of one `ServedModel`; used as `Decoder`."""

    def __init__(self, served: Any) -> None:
        config = _text(served.hf_config)
        super().__init__(served, config)
        self._renormalize = True
        rope = config.get("rope_parameters") or {}
        share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
        self._rotated = int(self._dim * share)
        self._key_heads, self._key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
        self._value_heads, self._value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        self._kernel = config["linear_conv_kernel_dim"]
        self._blocks: list[_Block] | None = None

    def drop(self) -> None:
        super().drop()
        self._blocks = None

    @property
    def fresh(self) -> bool:
        return self._blocks is not None

    @torch.no_grad()
    def refresh(self) -> None:
        model = self._served.model
        self._blocks = [self._read_block(layer) for layer in model.model.layers]
        self._embedding = model.model.embed_tokens.weight.data[: self._vocabulary].float()
        self._norm = 1.0 + model.model.norm.weight.data.float()
        self._head = model.lm_head.weight.data[: self._vocabulary].float()

    def cache(self, rows: int, length: int) -> HybridCache:
        keys = (rows, self._kv_heads, length, self._dim)
        inputs = (rows, self._kernel - 1 + length, sum(self._mixed))
        states = (rows, 1 + length, self._value_heads, self._key_dim, self._value_dim)
        return HybridCache(
            {
                number: (keys, keys) if isinstance(block.mixer, _Attention) else (inputs, states)
                for number, block in enumerate(self._needed())
            }
        )

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor, start: torch.Tensor, cache: Cache) -> torch.Tensor:
        positions = start[:, None] + torch.arange(tokens.shape[1])
        hidden = F.embedding(tokens, self._embedding)
        for number, block in enumerate(self._needed()):
            normed = self._rms(hidden, block.before_attention)
            memory = cache.keys[number], cache.values[number]
            if isinstance(block.mixer, _Attention):
                hidden = hidden + self._look(block.mixer, normed, positions, *memory)
            else:
                hidden = hidden + self._recur(block.mixer, normed, positions, *memory)
            normed = self._rms(hidden, block.before_experts).flatten(0, 1)
            hidden = hidden + (self._experts(block, normed) + _shared(block, normed)).view_as(hidden)
        return F.linear(self._rms(hidden, self._norm), self._head)

    @property
    def _mixed(self) -> tuple[int, int, int]:
        """Channels of query, key and value of a gated delta net."""
        keys = self._key_heads * self._key_dim
        return keys, keys, self._value_heads * self._value_dim

    def _needed(self) -> list[_Block]:
        assert self._blocks is not None, "refresh comes before the first forward pass"
        return self._blocks

    def _read_block(self, layer: Any) -> _Block:
        mlp = layer.mlp
        return _Block(
            mixer=_delta_net(layer.linear_attn) if hasattr(layer, "linear_attn") else _attention(layer),
            before_attention=1.0 + layer.input_layernorm.weight.data.float(),
            before_experts=1.0 + layer.post_attention_layernorm.weight.data.float(),
            router=mlp.gate.weight.data.float(),
            fc1=dequantized(mlp.experts, "w13"),
            fc2=dequantized(mlp.experts, "w2"),
            shared_fc1=mlp.shared_expert.gate_up_proj.weight.data.float(),
            shared_fc2=mlp.shared_expert.down_proj.weight.data.float(),
            shared_gate=mlp.shared_expert_gate.weight.data.float(),
        )

    def _look(
        self, layer: _Attention, x: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Gated attention."""
        sizes = [2 * self._heads * self._dim, self._kv_heads * self._dim, self._kv_heads * self._dim]
        query, key, value = F.linear(x, layer.qkv).split(sizes, dim=-1)
        q, gate = query.unflatten(-1, (self._heads, 2, self._dim)).unbind(-2)
        k, v = (part.unflatten(-1, (self._kv_heads, self._dim)).transpose(1, 2) for part in (key, value))
        angle = positions[:, None, :, None].float() * self._frequencies()
        q = self._turned(self._rms(q.transpose(1, 2), layer.q_norm), angle)
        k = self._turned(self._rms(k, layer.k_norm), angle)
        place = positions[:, None, :, None].expand(-1, self._kv_heads, -1, self._dim)
        keys.scatter_(2, place, k)
        values.scatter_(2, place, v)
        seen = torch.arange(keys.shape[2])[None, None] <= positions[:, :, None]
        return F.linear(self._attend(q, keys, values, seen) * torch.sigmoid(gate.flatten(2)), layer.out)

    def _frequencies(self) -> torch.Tensor:
        frequency = 1.0 / self._theta ** (torch.arange(0, self._rotated, 2, dtype=torch.float32) / self._rotated)
        return torch.cat((frequency, frequency))

    def _turned(self, x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        """The first elements of each head rotated."""
        turned = rotate(x[..., : self._rotated], angle.cos(), angle.sin())
        return torch.cat((turned, x[..., self._rotated :]), dim=-1)

    def _recur(
        self, layer: _DeltaNet, x: torch.Tensor, positions: torch.Tensor, inputs: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """Gated delta net: state = decay * state + key (value - key . decayed state) * beta, seen through the query."""
        mixed, values = sum(self._mixed), self._mixed[2]
        sizes = [mixed, values, self._value_heads, self._value_heads]
        rows, (projected, z, b, a) = torch.arange(len(x))[:, None], F.linear(x, layer.project).split(sizes, dim=-1)
        inputs[rows, positions + self._kernel - 1] = projected
        window = inputs[rows[..., None], positions[..., None] + torch.arange(self._kernel)]
        convolved = F.silu((window * layer.convolve.T).sum(-2))
        q, k, v = convolved.split(self._mixed, dim=-1)
        share = self._value_heads // self._key_heads
        q, k = (_unit(part.unflatten(-1, (-1, self._key_dim))).repeat_interleave(share, 2) for part in (q, k))
        q, v = q * self._key_dim**-0.5, v.unflatten(-1, (-1, self._value_dim))
        beta, decay = b.sigmoid(), torch.exp(-layer.decay * F.softplus(a + layer.dt_bias))
        state = states[rows[:, 0], positions[:, 0]]
        seen = torch.empty_like(v)
        for step in range(x.shape[1]):
            state = state * decay[:, step, :, None, None]
            new = (v[:, step] - torch.einsum("rhkv,rhk->rhv", state, k[:, step])) * beta[:, step, :, None]
            state = state + k[:, step, :, :, None] * new[:, :, None]
            seen[:, step] = torch.einsum("rhkv,rhk->rhv", state, q[:, step])
            states[rows[:, 0], positions[:, step] + 1] = state
        gated = self._rms(seen, layer.norm) * F.silu(z.unflatten(-1, (-1, self._value_dim)))
        return F.linear(gated.flatten(2), layer.out)


def decoder_of(served: Any) -> Decoder:
    """The forward pass of a `ServedModel`, by its family."""
    return HybridDecoder(served) if _HYBRID in _text(served.hf_config) else Decoder(served)


def live_place(model: Any, config: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """As `forward.live_tensor`, for a model of either family: where a checkpoint's tensor lies in SGLang's parameters;
    None where that is not known here.
    """
    text = _text(config)
    if _HYBRID not in text:
        return live_tensor(model, config, name)
    name = name.replace("model.language_model.", "model.", 1).replace(".self_attn.", ".")
    module, _, last = name.removesuffix(".weight").rpartition(".")
    place = None if ".mlp.experts." in name else _joined_rows(text).get(last)
    if place is None:
        return live_tensor(model, text, name)
    joined, first, rows = place
    found = dict(model.named_parameters()).get(f"{module}.{joined}.weight")
    return None if found is None else found.data.narrow(0, first, rows)


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config.json that speaks of the language model, with what stands beside it."""
    return {**config, **(config.get("text_config") or {})}


def _joined_rows(text: Mapping[str, Any]) -> dict[str, tuple[str, int, int]]:
    """Module of a checkpoint to SGLang's, the first of its rows there, and their number."""
    heads, shared = text["linear_num_value_heads"], text["shared_expert_intermediate_size"]
    values = heads * text["linear_value_head_dim"]
    mixed = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + values
    queries, keys = (
        text["head_dim"] * count for count in (2 * text["num_attention_heads"], text["num_key_value_heads"])
    )
    return {
        "in_proj_qkv": ("in_proj_qkvz", 0, mixed),
        "in_proj_z": ("in_proj_qkvz", mixed, values),
        "in_proj_b": ("in_proj_ba", 0, heads),
        "in_proj_a": ("in_proj_ba", heads, heads),
        "q_proj": ("qkv_proj", 0, queries),
        "k_proj": ("qkv_proj", queries, keys),
        "v_proj": ("qkv_proj", queries + keys, keys),
        "gate_proj": ("gate_up_proj", 0, shared),
        "up_proj": ("gate_up_proj", shared, shared),
    }


def _attention(layer: Any) -> _Attention:
    return _Attention(
        qkv=layer.qkv_proj.weight.data.float(),
        out=layer.o_proj.weight.data.float(),
        q_norm=1.0 + layer.q_norm.weight.data.float(),
        k_norm=1.0 + layer.k_norm.weight.data.float(),
    )


def _delta_net(layer: Any) -> _DeltaNet:
    return _DeltaNet(
        project=torch.cat((layer.in_proj_qkvz.weight.data, layer.in_proj_ba.weight.data)).float(),
        convolve=layer.conv1d.weight.data.squeeze(1).float(),
        decay=layer.A_log.data.float().exp(),
        dt_bias=layer.dt_bias.data.float(),
        norm=layer.norm.weight.data.float(),
        out=layer.out_proj.weight.data.float(),
    )


def _shared(block: _Block, x: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, block.shared_fc1).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, block.shared_fc2) * torch.sigmoid(F.linear(x, block.shared_gate))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
