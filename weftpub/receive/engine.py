"""What an engine must offer to be published to, and how it describes itself: all that weftpub knows about a serving
engine.

One `EngineSide` stands for one engine rank (one process, one device). An adapter implements it; the receiver calls it
from its own thread, one call at a time, in the order of the protocol: describe, pause, (the engine's own offload and
resume of memory), live_tensors, post_process, commit, resume.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from weftpub.wire.description import EngineDescription

__all__ = ["EngineSide", "Readiness"]


@dataclass(frozen=True)
class Readiness:
    """Whether an engine rank computes requests, or would.

    Attributes:
        why_not: why it would compute none if it was told to go on now; "" if it would.
        resting: whether it computes none at this moment, because it was paused.
    """

    why_not: str = ""
    resting: bool = False


@runtime_checkable
class EngineSide(Protocol):
    """One engine rank, as the receiver drives it.

    Any exception that a method raises fails the publish: before the first byte the old version stays, after it the
    engine is fenced.
    """

    def describe(self) -> EngineDescription:
        """Describe this rank as it is now."""
        ...

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the engine computes with at this moment, by name: asked anew at every publish, never kept
        across publishes.
        """
        ...

    def weights_intact(self) -> bool:
        """Whether the live tensors still hold the version that was served last.

        False once an offload left their memory undefined.
        """
        ...

    def resident(self) -> bool:
        """Whether the live tensors' memory is there, and will stay until the receiver has ended what it has begun.

        Asked at every step of a receive, so it must cost nothing. An engine that is about to give the memory away
        says False first, and then waits for the receiver.
        """
        ...

    def readiness(self) -> Readiness:
        """Whether requests are computed, or would be."""
        ...

    def pause(self) -> None:
        """Stop computing with the weights and return when nothing reads them any more.

        Called again on a paused engine, it does nothing.
        """
        ...

    def resume(self) -> None:
        """Go on serving. Never called while the weights are torn."""
        ...

    def post_process(self) -> None:
        """Refresh whatever the engine derives from its weights.

        Called once per publish, behind the last byte and before verification. On a GPU the last copies may still be
        under way on the current stream: whatever reads the weights belongs on that stream.
        """
        ...

    def commit(self, version: int) -> None:
        """Make `version` the one that answers report.

        Called after every rank verified and the commit record is on disk.
        """
        ...

    def fence(self, reason: str) -> None:
        """The weights are torn: refuse to serve, giving `reason`, until the next `commit`.

        The engine is paused already.
        """
        ...
