"""An SGLang model as an engine that can be published to, offloaded and probed: one rank, one process or one of
several in a process.

Offloading here is the hardest case that SGLang knows: every parameter gets new storage, at another address, filled
with NaN bytes. Whoever kept a view or an address from before writes into memory that nobody reads, and shows.
"""

from collections.abc import Mapping

import torch

from weftpub.errors import ConfigError, StateError, TornError
from weftpub.receive import EngineDescription, Readiness
from weftpub_adapters.sglang.build import ServedModel
from weftpub_adapters.sglang.derived import post_process_weights
from weftpub_adapters.sglang.describe import describe_model, live_tensors
from weftpub_adapters.sglang.placement import require_placement
from weftpub_adapters.sglang.probe import LayerProbe, probe_layer

__all__ = ["SGLangEngine"]

_NAN_BYTE = 0xFF  # NaN in float8_e4m3fn, bfloat16 and float32


class SGLangEngine:
    """Implements `weftpub.receive.EngineSide` over one `ServedModel`.

    Args:
        served: the model; its weights count as undefined until the first commit.
        name: of the engine, shared by its ranks.
        rank: receiver rank in the plan; by default the rank inside the engine.
    """

    def __init__(self, served: ServedModel, *, name: str = "sglang", rank: int | None = None) -> None:
        self.served = served
        self.name = name
        self.version: int | None = None
        self._rank = rank
        self._placement: str | None = None
        self._paused = False
        self._resident = True
        self._intact = False
        self._fenced: str | None = None
        self._layout = {
            parameter: (tensor.shape, tensor.stride(), tensor.dtype) for parameter, tensor in self._parameters()
        }

    @property
    def serving(self) -> bool:
        """Whether requests would be answered: weights whole, resident, not paused, not fenced."""
        return self._intact and self._resident and not self._paused and self._fenced is None

    @property
    def fenced(self) -> str | None:
        """Why the engine refuses to serve, or None."""
        return self._fenced

    def describe(self) -> EngineDescription:
        """Describe this rank as it is now; StateError while its memory is offloaded."""
        self._require_resident("describe")
        description = describe_model(self.served, engine=self.name, rank=self._rank)
        self._placement = description.placement
        return description

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers as they are at this moment.

        Raises:
            StateError: their memory is offloaded. PlanError: experts were moved since this rank was described last, so
                that a plan would send them to the wrong slots.
        """
        self._require_resident("live_tensors")
        with self.served.active():
            require_placement(self.served.model, self._placement, self.name)
        return live_tensors(self.served.model)

    def weights_intact(self) -> bool:
        """False before the first commit, and from an offload until the next commit."""
        return self._intact

    def resident(self) -> bool:
        """Whether the parameters have memory."""
        return self._resident

    def readiness(self) -> Readiness:
        """Whether requests would be answered, and why not."""
        why_not = "" if self._intact else "no version is committed in its weights"
        if not self._resident:
            why_not = "the memory of its weights is offloaded"
        return Readiness(self._fenced or why_not, resting=self._paused)

    def pause(self) -> None:
        """Stop serving."""
        self._paused = True

    def resume(self) -> None:
        """Go on serving.

        Raises:
            TornError: the engine is fenced, or its weights hold no committed version. StateError: its memory is
                offloaded.
        """
        self._require_resident("resume")
        if self._fenced is not None:
            raise TornError(f"{self.name}: resume refused, the weights are torn: {self._fenced}; publish again in full")
        if not self._intact:
            raise TornError(f"{self.name}: resume refused, the weights hold no committed version; publish first")
        self._paused = False

    def offload(self) -> None:
        """Free the memory of every parameter. Buffers stay, as with SGLang's own release of weights.

        Raises:
            StateError: the engine is serving, or the memory is offloaded already.
        """
        if not self._paused:
            raise StateError(f"{self.name}: offload while serving; pause first")
        self._require_resident("offload")
        for _, parameter in self._parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self._resident, self._intact = False, False

    def reload(self) -> None:
        """Give every parameter new memory of its old layout, all bytes NaN; StateError unless offloaded."""
        if self._resident:
            raise StateError(f"{self.name}: reload, but the memory was never offloaded")
        for name, parameter in self._parameters():
            shape, stride, dtype = self._layout[name]
            parameter.data = _poisoned(shape, stride, dtype, self.served.device)
        self._resident = True

    def post_process(self) -> None:
        """Let SGLang's layers do what they do after loading, and prove that it moved no weight.

        Raises:
            ConfigError: a layer replaced, moved or reshaped a parameter; its backend cannot be published to.
        """
        self._require_resident("post_process")
        with self.served.active():
            post_process_weights(self.served.model)
        layout = {name: (tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in self._parameters()}
        changed = sorted(name for name in self._layout if layout.get(name) != self._layout[name])
        if changed:
            raise ConfigError(f"{self.name}: parameters have another layout than at the start: {changed[:4]}")

    def commit(self, version: int) -> None:
        """Make `version` the one that is served; lifts a fence."""
        self._require_resident("commit")
        self.version, self._intact, self._fenced = version, True, None

    def fence(self, reason: str) -> None:
        """Refuse to serve until the next commit."""
        self._paused, self._intact, self._fenced = True, False, reason

    def probe_layer(
        self,
        layer: int,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor | None = None,
        expert_weights: torch.Tensor | None = None,
    ) -> LayerProbe:
        """What this rank's experts of one layer compute from the live bytes; see `probe.probe_layer`."""
        self._require_resident("probe_layer")
        return probe_layer(self.served, layer, hidden, expert_ids, expert_weights)

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self.served.model.named_parameters())

    def _require_resident(self, action: str) -> None:
        if not self._resident:
            raise StateError(f"{self.name}: {action} refused, the weights' memory is offloaded; call reload first")


def _poisoned(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    torch.empty(0, dtype=torch.uint8, device=device).set_(tensor.untyped_storage()).fill_(_NAN_BYTE)
    return tensor
