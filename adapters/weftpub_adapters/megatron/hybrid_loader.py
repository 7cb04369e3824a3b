"""Reads a Hugging Face Qwen3.5-MoE checkpoint into Megatron-core parameters, for any tensor and expert parallel rank.

Both forms of a checkpoint are read: of the text model, and of a multimodal one, whose language model lies one level
deeper. Names are those of Megatron's local layer spec with SequentialMLP experts, as in `names`; what tensor parallel
ranks share is cut before it is joined, because a rank's rows of a joined parameter are its rows of each part. Every
tensor of the language model is used, and every other one is left out by name: the vision tower, and the layers of
multi-token prediction, which are not trained. Norm weights are Megatron's zero-centred ones, as most of the
checkpoint's are; that of a gated delta net is counted from one there.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from weftpub.errors import CheckpointError, ConfigError
from weftpub_adapters.megatron.fields import Qwen35MoeFields

__all__ = ["LEFT_OUT", "read_hybrid_parameters"]

# First words of tensors that are not trained.
LEFT_OUT = ("mtp.", "model.mtp.", "model.language_model.mtp.", "model.visual.", "visual.")
_FLOAT_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_DEEPER = "model.language_model."

type _Cut = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Rank:
    """One tensor parallel rank."""

    rank: int
    size: int

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._part(tensor, 0)

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._part(tensor, 1)

    def _part(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        if tensor.shape[dimension] % self.size:
            raise CheckpointError(
                f"dimension {dimension} of {tuple(tensor.shape)} cannot be split over {self.size} tensor-parallel ranks"
            )
        return tensor.chunk(self.size, dim=dimension)[self.rank]


def read_hybrid_parameters(
    tensors: Mapping[str, torch.Tensor],
    fields: Qwen35MoeFields,
    *,
    tensor: tuple[int, int] = (0, 1),
    expert: tuple[int, int] = (0, 1),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's parameters by name, one at a time; a tensor is read when its parameter is due.

    Args:
        tensors: the checkpoint by name, read lazily (`weftpub.checkpoint.LazyTensors`) or a plain dict. Routed experts
            may be stacked, ``[experts, rows, columns]``, or lie one by one.
        fields: of its config.json.
        tensor, expert: this rank's place among the tensor and the expert parallel ranks, and their number.

    Raises:
        ConfigError: sizes that the ranks cannot share.
        CheckpointError: a tensor is missing, unknown, of a shape that the config does not give, or no floating-point
            one; a tied output layer differs from the embedding.
    """
    _check_sizes(fields, tensor[1], expert)
    reader = _Reader(tensors, fields)
    split = _Rank(*tensor)
    yield "embedding.word_embeddings.weight", split.rows(reader.take("model.embed_tokens.weight", fields.vocab))
    for layer in range(fields.layers):
        yield from _layer(reader, layer, split, expert)
    yield "decoder.final_layernorm.weight", reader.take("model.norm.weight", fields.hidden)
    if not fields.tied:
        yield "output_layer.weight", split.rows(reader.take("lm_head.weight", fields.vocab))
    reader.finish()


class _Reader:
    """Hands out a checkpoint's tensors by the text model's names, and knows which are left."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], fields: Qwen35MoeFields) -> None:
        self._tensors, self.fields = tensors, fields
        self._names: dict[str, str] = {}
        for name in tensors:
            if name.startswith(LEFT_OUT):
                continue
            plain = f"model.{name.removeprefix(_DEEPER)}" if name.startswith(_DEEPER) else name
            if plain in self._names:
                raise CheckpointError(f"{name} and {self._names[plain]} are the same tensor under two names")
            self._names[plain] = name
        self._left = set(self._names)
        self._check()

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor whose shape begins with `shape`."""
        if name not in self._names:
            raise CheckpointError(f"the checkpoint does not match its config.json: it has no {name}")
        tensor = self._tensors[self._names[name]]
        self._left.discard(name)
        if tuple(tensor.shape[: len(shape)]) != shape:
            raise CheckpointError(f"{name}: shape {tuple(tensor.shape)}, expected {shape} by the config.json")
        if tensor.dtype not in _FLOAT_DTYPES:
            raise CheckpointError(f"{name} is {tensor.dtype}; expected one of {[str(d) for d in _FLOAT_DTYPES]}")
        return tensor

    def experts(self, layer: int, first: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """fc1 ``[2I, H]``, gate rows over up rows, and fc2 ``[H, I]`` of `count` experts from `first`."""
        fields, at = self.fields, f"model.layers.{layer}.mlp.experts"
        wide, hidden = fields.intermediate, fields.hidden
        if f"{at}.gate_up_proj" in self._names:
            fc1 = self._rows(f"{at}.gate_up_proj", first, count, (fields.experts, 2 * wide, hidden))
            fc2 = self._rows(f"{at}.down_proj", first, count, (fields.experts, hidden, wide))
            yield from zip(fc1, fc2, strict=True)
            return
        for expert in range(fields.experts):
            names = [f"{at}.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
            if not first <= expert < first + count:
                self._left.difference_update(names)  # another rank's
                continue
            gate, up = (self.take(name, wide, hidden) for name in names[:2])
            yield torch.cat((gate, up)), self.take(names[2], hidden, wide)

    def finish(self) -> None:
        """Every tensor has been used."""
        if self._left:
            raise CheckpointError(
                f"{len(self._left)} tensors of the checkpoint were not used: {sorted(self._left)[:8]}"
            )

    def _check(self) -> None:
        """Names, before the first tensor is read."""
        needed = set(_names(self.fields, stacked=any(n.endswith(".mlp.experts.gate_up_proj") for n in self._names)))
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if self.fields.tied and head in self._left:  # some releases repeat the tied embedding under this name
            self._left.discard(head)
            if not torch.equal(self._tensors[self._names[head]], self._tensors[self._names[embedding]]):
                raise CheckpointError(f"{head} differs from {embedding} although tie_word_embeddings is true")
        missing, unknown = sorted(needed - self._left), sorted(self._left - needed)
        if missing or unknown:
            raise CheckpointError(
                f"the checkpoint does not match its config.json: {len(missing)} tensors missing {missing[:8]}, "
                f"{len(unknown)} unknown {unknown[:8]}"
            )

    def _rows(self, name: str, first: int, count: int, shape: tuple[int, int, int]) -> torch.Tensor:
        rows = getattr(self._tensors, "rows", None)
        if rows is None:
            return self.take(name, *shape)[first : first + count]
        found: torch.Tensor = rows(self._names[name], first, first + count)
        self._left.discard(name)
        if tuple(found.shape) != (count, *shape[1:]):
            raise CheckpointError(f"{name}: experts of shape {tuple(found.shape[1:])}, expected {shape[1:]}")
        return found


# What a layer consists of, beside its routed experts.
_COMMON = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "mlp.gate.weight",
    "mlp.shared_expert.gate_proj.weight",
    "mlp.shared_expert.up_proj.weight",
    "mlp.shared_expert.down_proj.weight",
    "mlp.shared_expert_gate.weight",
)
_FULL = tuple(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"))
_LINEAR = (
    *(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
    *(f"linear_attn.{name}" for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight", "out_proj.weight")),
)


def _names(fields: Qwen35MoeFields, *, stacked: bool) -> Iterator[str]:
    yield from ("model.embed_tokens.weight", "model.norm.weight")
    if not fields.tied:
        yield "lm_head.weight"
    for layer, full in enumerate(fields.full):
        at = f"model.layers.{layer}."
        yield from (at + name for name in (*_COMMON, *(_FULL if full else _LINEAR)))
        if stacked:
            yield from (f"{at}mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))
        else:
            parts = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
            yield from (f"{at}mlp.experts.{expert}.{part}" for expert in range(fields.experts) for part in parts)


def _layer(reader: _Reader, layer: int, split: _Rank, expert: tuple[int, int]) -> Iterator[tuple[str, torch.Tensor]]:
    fields, there, here = reader.fields, f"model.layers.{layer}", f"decoder.layers.{layer}"
    hidden, shared = fields.hidden, fields.shared
    yield f"{here}.input_layernorm.weight", reader.take(f"{there}.input_layernorm.weight", hidden)
    attention = _attention if fields.full[layer] else _delta_net
    for name, parameter in attention(reader, there, split):
        yield f"{here}.self_attention.{name}", parameter
    yield f"{here}.pre_mlp_layernorm.weight", reader.take(f"{there}.post_attention_layernorm.weight", hidden)
    yield f"{here}.mlp.router.weight", reader.take(f"{there}.mlp.gate.weight", fields.experts, hidden)
    gate, up = (reader.take(f"{there}.mlp.shared_expert.{part}_proj.weight", shared, hidden) for part in ("gate", "up"))
    down = reader.take(f"{there}.mlp.shared_expert.down_proj.weight", hidden, shared)
    yield f"{here}.mlp.shared_experts.linear_fc1.weight", torch.cat((split.rows(gate), split.rows(up)))
    yield f"{here}.mlp.shared_experts.linear_fc2.weight", split.columns(down)
    yield (
        f"{here}.mlp.shared_experts.gate_weight",
        reader.take(f"{there}.mlp.shared_expert_gate.weight", 1, hidden),
    )
    rank, ranks = expert
    count = fields.experts // ranks
    for number, (fc1, fc2) in enumerate(reader.experts(layer, rank * count, count)):
        yield f"{here}.mlp.experts.local_experts.{number}.linear_fc1.weight", fc1
        yield f"{here}.mlp.experts.local_experts.{number}.linear_fc2.weight", fc2


def _attention(reader: _Reader, there: str, split: _Rank) -> Iterator[tuple[str, torch.Tensor]]:
    """linear_qkv: for every key/value head its query heads, their gates, the key head and the value head. In the
    checkpoint each query head is followed by its gate.
    """
    fields, at = reader.fields, f"{there}.self_attn"
    width, hidden, keys = fields.head_dim, fields.hidden, fields.kv_heads * fields.head_dim
    query = split.rows(reader.take(f"{at}.q_proj.weight", 2 * fields.heads * width, hidden))
    key, value = (split.rows(reader.take(f"{at}.{name}_proj.weight", keys, hidden)) for name in ("k", "v"))
    groups = fields.kv_heads // split.size
    queries, gates = query.view(groups, -1, 2, width, hidden).unbind(2)
    parts = [part.reshape(groups, -1, hidden) for part in (queries, gates, key, value)]
    yield "linear_qkv.weight", torch.cat(parts, dim=1).reshape(-1, hidden)
    out = reader.take(f"{at}.o_proj.weight", hidden, fields.heads * width)
    yield "linear_proj.weight", split.columns(out)
    yield "q_layernorm.weight", reader.take(f"{at}.q_norm.weight", width)
    yield "k_layernorm.weight", reader.take(f"{at}.k_norm.weight", width)


def _delta_net(reader: _Reader, there: str, split: _Rank) -> Iterator[tuple[str, torch.Tensor]]:
    """in_proj: this rank's rows of query, key, value, gate z, b and a; conv1d: its channels of the first three."""
    fields, at = reader.fields, f"{there}.linear_attn"
    keys, values = fields.key_heads * fields.key_dim, fields.value_heads * fields.value_dim
    heads, hidden, three = fields.value_heads, fields.hidden, (keys, keys, values)
    mixed = reader.take(f"{at}.in_proj_qkv.weight", sum(three), hidden).split(three)
    others = [
        reader.take(f"{at}.in_proj_{name}.weight", rows, hidden)
        for name, rows in (("z", values), ("b", heads), ("a", heads))
    ]
    yield "in_proj.weight", torch.cat([split.rows(part) for part in (*mixed, *others)])
    channels = reader.take(f"{at}.conv1d.weight", sum(three), 1, fields.kernel).split(three)
    yield "conv1d.weight", torch.cat([split.rows(part) for part in channels])
    yield "A_log", split.rows(reader.take(f"{at}.A_log", heads))
    yield "dt_bias", split.rows(reader.take(f"{at}.dt_bias", heads))
    yield "out_norm.weight", reader.take(f"{at}.norm.weight", fields.value_dim).float() - 1.0
    yield "out_proj.weight", split.columns(reader.take(f"{at}.out_proj.weight", hidden, values))


def _check_sizes(fields: Qwen35MoeFields, tensor: int, expert: tuple[int, int]) -> None:
    rank, ranks = expert
    if fields.experts % ranks or not 0 <= rank < ranks:
        raise ConfigError(f"rank {rank} of {ranks} cannot hold an equal block of {fields.experts} experts")
    counts = {
        "num_attention_heads": fields.heads,
        "num_key_value_heads": fields.kv_heads,
        "linear_num_key_heads": fields.key_heads,
        "linear_num_value_heads": fields.value_heads,
        "shared_expert_intermediate_size": fields.shared,
        "vocab_size": fields.vocab,
    }
    uneven = {name: count for name, count in counts.items() if count % tensor}
    if uneven:
        raise ConfigError(f"{tensor} tensor-parallel ranks cannot share {uneven} equally; choose a divisor of all")
