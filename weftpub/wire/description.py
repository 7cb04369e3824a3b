"""How an engine rank describes itself: plain data, enough to build meta tensors of its parameters elsewhere and to
plan.
"""

from collections.abc import Mapping

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from weftpub.plan import ParameterSpec, dtype_name, layout_digest
from weftpub.plan.types import digest_of

__all__ = ["EngineDescription", "parameter_specs"]


class EngineDescription(BaseModel):
    """One engine rank as plain data.

    Attributes:
        engine: name of the engine; all ranks of one engine share it, and a version belongs to it.
        rank: receiver rank in the plan, counted through all engines.
        world_size: number of ranks of this engine.
        device: "cpu", or the UUID of the GPU that holds the parameters.
        parameters: every live parameter and every buffer whose content the engine needs.
        exempt: names that a publish need not write wholly, each with the reason (restored by the engine itself,
            padding).
        placement: digest of whatever else decides where a tensor lies, such as a map of experts that moves them; "" if
            nothing does.
        settings: whatever else the adapter's planner needs: parallel sizes, model config. Plain data.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str = Field(min_length=1, max_length=200)
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    device: str = Field(max_length=200)
    parameters: tuple[ParameterSpec, ...]
    exempt: dict[str, str] = Field(default_factory=dict)
    placement: str = Field(default="", max_length=200)
    settings: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def layout_digest(self) -> str:
        """Digest of parameter layouts and placement, to be put into `Plan.layouts` by whoever plans from this."""
        layouts = layout_digest(self.parameters)
        return digest_of([layouts, self.placement]) if self.placement else layouts

    def layout(self) -> dict[str, ParameterSpec]:
        """Parameter layouts by name, as `check_plan` takes them."""
        return {parameter.name: parameter for parameter in self.parameters}


def parameter_specs(tensors: Mapping[str, torch.Tensor]) -> tuple[ParameterSpec, ...]:
    """Layouts of named tensors, in their order."""
    return tuple(
        ParameterSpec(name, tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))
        for name, tensor in tensors.items()
    )
