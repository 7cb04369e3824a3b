"""The three ways to train, and the settings of an attachment.

| variant  | masters and optimizer state | expert weights of the forward pass | unattached code that runs |
|----------|-----------------------------|------------------------------------|---------------------------|
| baseline | Megatron's, untouched       | BF16 parameters                    | all of it                 |
| bf16     | pinned host memory, staged  | BF16 parameters, written in slots  | forward, backward, norms  |
| fp8      | pinned host memory, staged  | the store's W and W^T              | as bf16, experts excepted |
"""

from dataclasses import dataclass
from typing import Literal, get_args

from weftpub.canonical import family_of
from weftpub.errors import ConfigError

__all__ = ["AttachSettings", "ScaleRule", "Variant"]

Variant = Literal["baseline", "bf16", "fp8"]
ScaleRule = Literal["fp32", "power_of_two"]


@dataclass(frozen=True, kw_only=True)
class AttachSettings:
    """What an attachment does.

    Attributes:
        variant: "baseline", "bf16" or "fp8".
        preset: quantizer of the expert weights, a name of `weftpub_kernels.PRESETS`; fp8 only.
        activation_scales: rule for the scales of activations and their gradients in FP8 GEMMs; the engine has to use
            the same one.
        slots: staging slots. Three overlap a load, an update and a store.
        slot_numel: elements of the largest matrix that a slot takes; None fits the largest matrix of the model.
        architecture: of the model in Hugging Face's words, a name of `weftpub.canonical.FAMILIES`; an engine that
            shares the experts' memory must be of the same one.
        measure_change: count the published bytes that each step changed; fp8 only.
        lease_timeout: seconds that a step waits for publishes and checkpoints that still read, and they for a step.
        shared_folder: where this trainer and the engine on the same GPU meet to share W and its scales, a folder of
            mode 0700 (see docs/howto/share-experts.md); None for memory of the trainer's own. Where sharing is
            impossible a warning says why, and publishes copy; fp8 only.
        shared_protected: for finding errors: that memory is read-only for this process outside of a step; whoever
            writes to it then is ended.

    Raises:
        ConfigError: an unknown variant, rule or architecture, or a number out of range.
    """

    variant: Variant = "fp8"
    preset: str = "te_fp32"
    activation_scales: ScaleRule = "fp32"
    slots: int = 3
    slot_numel: int | None = None
    architecture: str = "Qwen3MoeForCausalLM"
    measure_change: bool = True
    lease_timeout: float = 300.0
    shared_folder: str | None = None
    shared_protected: bool = False

    def __post_init__(self) -> None:
        family_of(self.architecture)
        for name, kind in (("variant", Variant), ("activation_scales", ScaleRule)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(get_args(kind))}"
                )
        if self.slots < 1 or (self.slot_numel is not None and self.slot_numel < 1) or self.lease_timeout <= 0:
            raise ConfigError(
                f"slots={self.slots}, slot_numel={self.slot_numel}, lease_timeout={self.lease_timeout}: must all be "
                "above zero"
            )

    @property
    def staged(self) -> bool:
        """Whether masters and optimizer state leave Megatron's hands."""
        return self.variant != "baseline"
