"""The records of a run's log: one header per start, one record per step.

Units: seconds, bytes, tokens, nats. Names are those of `weftpub report` and of TensorBoard.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["ByteCheck", "Counters", "KlByPrompt", "RunHeader", "StepRecord", "TurnLengths", "turn_lengths"]


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunHeader(_Plain):
    """One start of a run.

    Attributes:
        run_id: new at every start.
        variant: "baseline", "bf16" or "fp8".
        seed: of data order, sampling and made models.
        resumed_from: step of the checkpoint that this start went on from; None for a fresh one.
        rollout: which engine sampled, in words.
        notes: what a reader must know, such as that a machine without a GPU sampled in torch.
        settings: as resolved.
        versions: of packages.
    """

    kind: Literal["run"] = "run"
    run_id: str
    started: str
    variant: str
    seed: int
    model: str
    resumed_from: int | None
    rollout: str
    device: str
    notes: tuple[str, ...]
    settings: dict[str, Any]
    versions: dict[str, str]


class Counters(_Plain):
    """Tokens and completions of a step, or since the run's first step.

    Attributes:
        prompt, completion, completions: of everything that was sampled.
        trained: completion tokens of the groups that train: once, however many passes a step makes, and with those that
            the correction rejects (`before["tokens"]` counts a token in each pass).
    """

    prompt: int = 0
    completion: int = 0
    trained: int = 0
    completions: int = 0

    def plus(self, other: "Counters") -> "Counters":
        """The sum."""
        mine, theirs = self.model_dump(), other.model_dump()
        return Counters(**{name: mine[name] + theirs[name] for name in mine})


class TurnLengths(_Plain):
    """Prompt tokens up to and including one turn of the conversation, over a step's prompts."""

    turn: int
    mean: float
    longest: int
    prompts: int


class ByteCheck(_Plain):
    """How it was checked that the rollout serves the trainer's bytes.

    Attributes:
        method: "checksum" (every published piece, 64 bit), "sha256" (as well, on both sides' hosts), or "none" for a
            baseline whose engine loads what it is given.
        pieces, bytes: that were compared.
        in_place: bytes of them in memory that trainer and engine both map; the others were copied.
        matched: whether all agreed; a publish that disagrees raises, so a record with False is of a baseline.
        digest: of the manifest.
        sha256: one over all published tensors.
    """

    method: Literal["checksum", "sha256", "none"]
    pieces: int = 0
    bytes: int = 0
    in_place: int = 0
    matched: bool | None = None
    digest: str | None = None
    sha256: str | None = None


class KlByPrompt(_Plain):
    """What a standard error, and the comparison of two steps with the same prompts, are made of.

    Attributes:
        kl: sums over the trained tokens of each prompt's completions, as in `before["kl"]`, in the order of the batch.
        tokens: their numbers.
    """

    kl: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()


class StepRecord(_Plain):
    """One step.

    Attributes:
        served_version: the version that sampled the step's completions.
        published_version: what the engine serves after the step.
        counters, total: of this step, and since step 1.
        reward, reward_std: mean task reward over completions, and its standard deviation over them.
        prompt_lengths: per turn.
        completion_mean, completion_longest: tokens; `cut` is the share that reached the length limit.
        before, after: statistics of trainer against rollout over trained tokens, by the weights before and after the
            update (`weftmoe.grpo.StepStatistics`); `after` only where it is measured.
        by_prompt: of `before`; empty in a log from before it was kept.
        groups_kept, groups_dropped, rounds: of dynamic sampling.
        verdicts: outcome of judging to its number.
        seconds: by phase; "total" is the step's wall time. "train" is the updates alone: scores before the first of
            several are "score", the pass that gives `after` is "measure".
        flops_per_s: estimated training FLOP/s over the train phase, all ranks together.
        memory: bytes by name. "allocated", "reserved", "peak" and "offloaded" are those of torch's allocator in the
            trainer's process on rank 0; "device_used" is the most in use on any rank's GPU at the end of a phase, by
            whatever processes are there.
        changed_share: of the published expert bytes; None where nothing measures it.
    """

    kind: Literal["step"] = "step"
    step: int
    epoch: int
    served_version: int
    published_version: int
    byte_check: ByteCheck
    counters: Counters
    total: Counters
    reward: float
    reward_std: float
    prompt_lengths: tuple[TurnLengths, ...]
    completion_mean: float
    completion_longest: int
    cut: float
    before: dict[str, float]
    after: dict[str, float] | None
    by_prompt: KlByPrompt = KlByPrompt()
    grad_norm: float
    learning_rate: float
    groups_kept: int
    groups_dropped: int
    rounds: int
    verdicts: dict[str, int]
    seconds: dict[str, float]
    publish_ms: dict[str, float] = Field(default_factory=dict)
    flops_per_s: float
    memory: dict[str, int]
    generation: int | None
    changed_share: float | None
    fixed_logp_sha256: str | None = None

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Every number under a path such as "before/kl", for sinks that take scalars."""
        yield from _numbers("", self.model_dump(mode="json", exclude={"kind", "step", "prompt_lengths", "by_prompt"}))
        for turn in self.prompt_lengths:
            yield f"prompt_lengths/turn_{turn.turn}_mean", turn.mean
            yield f"prompt_lengths/turn_{turn.turn}_longest", float(turn.longest)


def turn_lengths(prompts: Iterable[Sequence[int]]) -> tuple[TurnLengths, ...]:
    """Summarize prompts.

    Args:
        prompts: per prompt its length in tokens after each turn, growing.
    """
    by_turn: dict[int, list[int]] = {}
    for lengths in prompts:
        for turn, length in enumerate(lengths, 1):
            by_turn.setdefault(turn, []).append(length)
    return tuple(
        TurnLengths(turn=turn, mean=sum(found) / len(found), longest=max(found), prompts=len(found))
        for turn, found in sorted(by_turn.items())
    )


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(f"{path}/{name}" if path else name, inner)
    elif isinstance(value, int | float):
        yield path, float(value)
