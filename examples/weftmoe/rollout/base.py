"""What the loop needs of a rollout engine, and the plain data it speaks in.

The five calls of a colocated step, in their order; between them the trainer has the device's memory:

    drain      no request in flight reads weights any more
    release    the engine gives up the memory of weights and key/value cache
    publish    weights come back, are received, verified and committed as a version
    resume     the key/value cache comes back
    continue_  requests are answered again, from the new version
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from weftmoe.telemetry.record import ByteCheck
from weftpub.errors import StateError
from weftpub.plan import Shard
from weftpub.publisher import SourceBuffers

__all__ = [
    "PlanFor",
    "Published",
    "Request",
    "Rollout",
    "Sample",
    "ShardsFor",
    "Span",
    "Tensors",
    "plain_tensors",
    "require_spans",
]

type Tensors = Mapping[str, torch.Tensor] | SourceBuffers
# From what the engine's ranks say about themselves to a plan; collective over the trainer's ranks.
PlanFor = Callable[[Sequence[Any]], Any]
# To what all of the trainer's ranks hold; collective over them.
ShardsFor = Callable[[], Sequence[Shard]]


@dataclass(frozen=True)
class Request:
    """One completion that is wanted.

    Attributes:
        tokens: the prompt.
        limit: most tokens of the completion.
        seed: of its random numbers: a request's completion does not depend on its company where the engine allows.
    """

    tokens: tuple[int, ...]
    limit: int
    seed: int


@dataclass(frozen=True)
class Span:
    """Completion tokens `start` up to but not including `end` come from weights of `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """One completion.

    Attributes:
        tokens: with the end token, if it was drawn.
        logprobs: of each token under the sampling distribution.
        finish: "stop" or "length".
        spans: which weights made which tokens, in their order; `require_spans` looks whether they can be true.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    spans: tuple[Span, ...]

    @property
    def versions(self) -> set[int]:
        """All versions that made tokens of it."""
        return {span.version for span in self.spans}


@dataclass(frozen=True)
class Published:
    """A version that is served now: how long it took by phase, and how its bytes were checked."""

    version: int
    ms: Mapping[str, float]
    check: ByteCheck


class Rollout(Protocol):
    """The engines of a run, one a node. All trainer ranks call the same methods, but for `generate` and `dismiss`,
    which are rank 0's, and `attend`, the others'.
    """

    @property
    def description(self) -> str:
        """The engine in words, for the log."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the log must know about its samples."""
        ...

    def start(self) -> None:
        """Start the engine's processes; returns when it can be drained. It serves nothing before a first publish."""
        ...

    def connect(self, plan_for: PlanFor, shards_for: ShardsFor) -> None:
        """Let the engine receive: needed once, after the trainer's weights exist and before the first publish.

        Args:
            plan_for: for an engine that weftpub publishes to.
            shards_for: for one that takes whole tensors.
        """
        ...

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Complete all requests, in their order; other nodes do their shares while they `attend`."""
        ...

    def attend(self, seconds: float) -> BaseException | None:
        """Answer what rank 0 asks of this node's engine, until it dismisses this rank. On all ranks but 0.

        Args:
            seconds: that it may take.

        Returns:
            what this node's engine raised, which rank 0 raises as an error of this rank.
        """
        ...

    def dismiss(self) -> None:
        """Let the other nodes go on: nothing more is asked of them in this step. On rank 0."""
        ...

    def score(self, sequences: Sequence[tuple[tuple[int, ...], int]]) -> list[tuple[float, ...]]:
        """Log-probabilities of given tokens by the served weights.

        Args:
            sequences: (tokens, first): those from position `first` on are scored.
        """
        ...

    def drain(self) -> None: ...
    def release(self) -> None: ...

    def publish(self, version: int, sources: Tensors, checksums: Mapping[str, int] | None) -> Published:
        """Put a version into the engine.

        Args:
            version: its number, one above the last; a resumed run begins again at its checkpoint's.
            sources: this rank's tensors by canonical name; buffers with places in them only where weftpub publishes.
            checksums: those that are known already.
        """
        ...

    def resume(self) -> None: ...
    def continue_(self) -> None: ...

    def close(self) -> None:
        """End the engine's processes. May be called twice."""
        ...


def plain_tensors(sources: Tensors) -> Mapping[str, torch.Tensor]:
    """Sources of an engine that knows nothing of buffers; StateError if these are some."""
    if isinstance(sources, SourceBuffers):
        raise StateError("the engine's own update takes a tensor per name, and was given buffers with places in them")
    return sources


def require_spans(sample: Sample, where: str, published: Container[int]) -> None:
    """See that it is known of every token which version made it.

    Args:
        sample: the completion.
        where: which one it is, for messages.
        published: versions that this run has published so far.

    Raises:
        StateError: a token has no span, or two; versions go backwards; or one of them was never published.
    """
    told = ", ".join(f"version {span.version} from {span.start} to {span.end}" for span in sample.spans) or "no spans"
    end, version = 0, -1
    for span in sample.spans:
        if span.start != end or span.end <= span.start:
            raise StateError(
                f"{where}: its spans are not its {len(sample.tokens)} tokens, each once: expected one that begins at "
                f"{end}, found {told}; it is not known which weights made what"
            )
        if span.version < version:
            raise StateError(
                f"{where}: versions go backwards, {told}; an engine that began a completion with newer weights cannot "
                "end it with older ones"
            )
        if span.version not in published:
            raise StateError(
                f"{where}: {told}, and this run has published no version {span.version}; was another publisher at "
                "work, or did the engine come back with weights of its own?"
            )
        end, version = span.end, span.version
    if end != len(sample.tokens):
        raise StateError(
            f"{where}: its spans are not its {len(sample.tokens)} tokens, each once: they end at {end}, found {told}; "
            "it is not known which weights made what"
        )
