"""What an engine must offer to be published to, and how it describes itself: all that weftpub knows about a serving
engine.

One `EngineSide` stands for one engine rank (one process, one device). An adapter implements it; the receiver calls it
from its own thread, one call
at a time, in the order of the protocol: describe, pause, (the engine's own offload and resume of memory), live_tensors,
post_process, commit, resume.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from weftpub.plan import ParameterSpec, dtype_name, layout_digest

__all__ = ["EngineDescription", "EngineSide", "parameter_specs"]


class EngineDescription(BaseModel):
    """One engine rank as plain data, enough to build meta tensors of its parameters elsewhere and to plan.

    Attributes:
        engine: name of the engine; all ranks of one engine share it, and a version belongs to it.
        rank: receiver rank in the plan, counted through all engines.
        world_size: number of ranks of this engine.
        device: "cpu", or the UUID of the GPU that holds the parameters.
        parameters: every live parameter and every buffer whose content the engine needs.
        exempt: names that a publish need not write wholly, each with the reason (restored by the engine itself,
            padding).
        settings: whatever else the adapter's planner needs: parallel sizes, model config. Plain data.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str = Field(min_length=1, max_length=200)
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    device: str = Field(max_length=200)
    parameters: tuple[ParameterSpec, ...]
    exempt: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def layout_digest(self) -> str:
        """Digest of the parameter layouts, to be put into `Plan.layouts` by whoever plans from this description."""
        return layout_digest(self.parameters)

    def layout(self) -> dict[str, ParameterSpec]:
        """Parameter layouts by name, as `check_plan` takes them."""
        return {parameter.name: parameter for parameter in self.parameters}


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

        Called once per publish, after the last byte and before verification.
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


def parameter_specs(tensors: Mapping[str, torch.Tensor]) -> tuple[ParameterSpec, ...]:
    """Layouts of named tensors, in their order."""
    return tuple(
        ParameterSpec(name, tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))
        for name, tensor in tensors.items()
    )
