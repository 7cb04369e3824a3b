"""The order of prompts: every epoch a new permutation, made from seed and epoch alone; and a position to resume."""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence

from weftmoe.data.prompts import Prompt
from weftpub.errors import CheckpointError, ConfigError

__all__ = ["PromptSampler"]


class PromptSampler:
    """Draws prompts without end, or for a number of epochs.

    Args:
        prompts: the data set.
        seed: of all permutations.
        epochs: how often each prompt is drawn; None for no end.
        shuffle: False draws them as they lie, in every epoch.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, epochs: int | None = None, shuffle: bool = True
    ) -> None:
        if not prompts:
            raise ConfigError("there are no prompts to draw from")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._epochs = epochs
        self._shuffle = shuffle
        self._drawn = 0
        self._order: tuple[int, list[int]] | None = None
        self._identity: dict[str, int | str] = {
            "seed": seed,
            "size": len(self._prompts),
            "shuffle": int(shuffle),
            "prompts": _digest(self._prompts),
        }

    @property
    def drawn(self) -> int:
        """Prompts drawn so far; the whole state."""
        return self._drawn

    @property
    def epoch(self) -> int:
        """Which pass over the data the next prompt belongs to, from 0."""
        return self._drawn // len(self._prompts)

    @property
    def left(self) -> int | None:
        """Prompts left to draw; None for no end."""
        return None if self._epochs is None else self._epochs * len(self._prompts) - self._drawn

    def next(self, count: int) -> list[Prompt]:
        """The next prompts; fewer than `count`, or none, at the end of the last epoch."""
        left = self.left
        count = count if left is None else min(count, left)
        return [self._one() for _ in range(count)]

    def state(self) -> dict[str, int | str]:
        """What `restore` takes: plain data."""
        return {**self._identity, "drawn": self._drawn}

    def restore(self, state: Mapping[str, int | str]) -> None:
        """Go on where another sampler of the same data, order and seed stood.

        Raises:
            CheckpointError: the state is of other data or another seed. As many other prompts, or the same ones in
                another order, are other data: some would be drawn twice in an epoch, and some never.
        """
        mine = self._identity
        theirs = {name: state.get(name) for name in mine}
        if mine != theirs:
            raise CheckpointError(
                f"the checkpoint's data position is of {theirs}, this run has {mine}; resume with the "
                "same data and seed"
            )
        self._drawn = int(state["drawn"])

    def _one(self) -> Prompt:
        epoch, place = divmod(self._drawn, len(self._prompts))
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self._prompts)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        self._drawn += 1
        return self._prompts[self._order[1][place]]


def _digest(prompts: Sequence[Prompt]) -> str:
    """Of the questions and answers, in their order."""
    found = hashlib.sha256()
    for prompt in prompts:
        found.update(json.dumps([prompt.index, prompt.messages, prompt.ground_truth]).encode())
    return found.hexdigest()[:16]
