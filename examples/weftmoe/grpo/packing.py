"""From sequences to microbatches: by a budget of tokens, and dealt evenly to the data-parallel ranks.

A microbatch has one of two layouts, and log-probabilities come back in the same per-sequence form from either:

    packed   [1, T]  sequences one after the other with their boundaries (THD): attention stays inside a sequence
    padded   [B, L]  one sequence a row, padding at the end, a causal mask: for attention without packed kernels.
                     Equivalent, since a token attends only to earlier ones of its row, padding comes after every real
                     token, and routed experts treat tokens one by one. Cost: padding is computed and thrown away.

Everything is a function of the sequences' lengths and order: the same batch gives the same microbatches.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Literal

import torch

from weftpub.errors import ConfigError

__all__ = ["Layout", "Microbatch", "Sequence", "deal", "microbatches"]

Layout = Literal["packed", "padded"]


@dataclass(frozen=True)
class Sequence:
    """One prompt with one completion.

    Attributes:
        index: position in the step's batch; statistics are summed in this order. Below zero for a placeholder.
        tokens: ids of prompt and completion.
        prompt: number of prompt tokens; the completion's tokens are trained, the prompt's never.
        rollout_logp: the engine's log-probability of each completion token.
        advantage: of the completion.
    """

    index: int
    tokens: tuple[int, ...]
    prompt: int
    rollout_logp: tuple[float, ...]
    advantage: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.prompt < len(self.tokens):
            raise ConfigError(
                f"sequence {self.index}: {self.prompt} prompt tokens of {len(self.tokens)}; both prompt and completion "
                "need at least one"
            )
        if len(self.rollout_logp) != self.trained:
            raise ConfigError(
                f"sequence {self.index}: {len(self.rollout_logp)} log-probs for {self.trained} completion tokens"
            )

    @classmethod
    def nobody(cls) -> "Sequence":
        """A placeholder, which only keeps a rank in step with ranks that have more to compute."""
        return cls(-1, (0, 0), 1, (0.0,))

    @property
    def placeholder(self) -> bool:
        """Whether it stands for nothing, and counts nowhere."""
        return self.index < 0

    @property
    def trained(self) -> int:
        """Number of completion tokens."""
        return len(self.tokens) - self.prompt

    @property
    def inputs(self) -> int:
        """Tokens that enter the model: all but the last, which is only predicted."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Microbatch:
    """Sequences of one forward pass.

    Attributes:
        sequences: in the order of rows or of packing.
        layout: see the module's docstring.
        tokens, labels, positions: int64 ``[1, T]`` packed or ``[B, L]`` padded; `labels` are the next tokens.
        starts: first position of each sequence in the flattened tensors, and the end; packed these are cu_seqlens,
            with one more sequence at the end where the length was filled up.
    """

    sequences: tuple[Sequence, ...]
    layout: Layout
    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    starts: tuple[int, ...]

    @property
    def trained(self) -> int:
        """Number of completion tokens."""
        return sum(sequence.trained for sequence in self.sequences)

    @property
    def longest(self) -> int:
        """Most input tokens of one sequence."""
        return max(sequence.inputs for sequence in self.sequences)

    @property
    def places(self) -> torch.Tensor:
        """Where the completion tokens stand in the flattened `tokens`: int64 ``[trained]``, sequence by sequence."""
        found = []
        for row, sequence in enumerate(self.sequences):
            first = self.starts[row] + sequence.prompt - 1
            found.append(torch.arange(first, first + sequence.trained))
        return torch.cat(found)

    def pick(self, values: torch.Tensor) -> torch.Tensor:
        """The values that belong to completion tokens, of all sequences one after the other.

        Args:
            values: one per position, of the shape of `tokens`.

        Returns:
            ``[trained]``; `split` cuts it.
        """
        if values.shape != self.tokens.shape:
            raise ConfigError(f"values {list(values.shape)}, expected the microbatch's {list(self.tokens.shape)}")
        return values.flatten().index_select(0, self.places.to(values.device))

    def split(self, values: torch.Tensor) -> Many[torch.Tensor]:
        """What `pick` gave, cut into one view ``[trained]`` per sequence."""
        return values.split([sequence.trained for sequence in self.sequences])


def microbatches(sequences: Many[Sequence], *, budget: int, layout: Layout, pad_to: int = 1) -> Iterator[Microbatch]:
    """Cut sequences into microbatches, in their order.

    Args:
        sequences: of this rank.
        budget: most positions of a microbatch, padding included.
        layout: see the module's docstring.
        pad_to: lengths, of a packed microbatch or of a padded one's rows, are rounded up to a multiple of this, with
            tokens that belong to no sequence's loss; sequence parallelism needs the tensor-parallel size here.

    Raises:
        ConfigError: one sequence alone exceeds the budget.
    """
    waiting: list[Sequence] = []
    for sequence in sequences:
        if _size([sequence], layout, pad_to) > budget:
            raise ConfigError(
                f"sequence {sequence.index} has {sequence.inputs} input tokens, the microbatch's budget is {budget}; "
                "raise the budget or shorten sequences"
            )
        if waiting and _size([*waiting, sequence], layout, pad_to) > budget:
            yield _make(waiting, layout, pad_to)
            waiting = []
        waiting.append(sequence)
    if waiting:
        yield _make(waiting, layout, pad_to)


def deal(sequences: Many[Sequence], ranks: int) -> list[list[Sequence]]:
    """Share sequences out to data-parallel ranks with nearly equal numbers of tokens, longest first.

    Each rank's share is in batch order. A rank may come out empty if there are fewer sequences than ranks.
    """
    loads, shares = [0] * ranks, [[] for _ in range(ranks)]
    for sequence in sorted(sequences, key=lambda s: (-s.inputs, s.index)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        loads[rank] += sequence.inputs
        shares[rank].append(sequence)
    return [sorted(share, key=lambda s: s.index) for share in shares]


def _size(sequences: Many[Sequence], layout: Layout, pad_to: int) -> int:
    if layout == "packed":
        return _filled(sum(sequence.inputs for sequence in sequences), pad_to)
    return len(sequences) * _filled(max(sequence.inputs for sequence in sequences), pad_to)


def _filled(length: int, pad_to: int) -> int:
    """The next multiple of `pad_to`."""
    return length + -length % pad_to


def _make(sequences: Many[Sequence], layout: Layout, pad_to: int) -> Microbatch:
    if layout == "padded":
        return _padded(tuple(sequences), pad_to)
    return _packed(tuple(sequences), pad_to)


def _packed(sequences: tuple[Sequence, ...], pad_to: int) -> Microbatch:
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    starts = [0]
    for sequence in sequences:
        tokens += sequence.tokens[:-1]
        labels += sequence.tokens[1:]
        positions += range(sequence.inputs)
        starts.append(len(tokens))
    fill = _filled(len(tokens), pad_to) - len(tokens)
    if fill:  # a sequence of its own, which nobody picks
        tokens += [0] * fill
        labels += [0] * fill
        positions += range(fill)
        starts.append(len(tokens))
    made = [torch.tensor([values]) for values in (tokens, labels, positions)]
    return Microbatch(sequences, "packed", *made, tuple(starts))


def _padded(sequences: tuple[Sequence, ...], pad_to: int) -> Microbatch:
    longest = _filled(max(sequence.inputs for sequence in sequences), pad_to)
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
    labels = torch.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        ids = torch.tensor(sequence.tokens)
        tokens[row, : sequence.inputs] = ids[:-1]
        labels[row, : sequence.inputs] = ids[1:]
    positions = torch.arange(longest)[None].repeat(len(sequences), 1)
    starts = tuple(longest * row for row in range(len(sequences) + 1))
    return Microbatch(sequences, "padded", tokens, labels, positions, starts)
