"""What one run of the demo is asked to do, and the shape of the model that it makes when it is given none."""

import math
import os
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weftpub.errors import ConfigError

__all__ = ["DemoConfig", "Device", "ModelShape", "OptimizerName", "Variant", "require_packages", "shipped_text"]


_DAY_S = 86_400.0
# Module -> distribution, of what the demo runs and the core does without.
_PACKAGES = {"megatron": "megatron-core", "sglang": "sglang", "transformers": "transformers"}


class Variant(StrEnum):
    """Which bytes the experts live in, and whether weftpub carries them."""

    FP8 = "fp8"
    BF16 = "bf16"
    BASELINE = "baseline"


class OptimizerName(StrEnum):
    """The update rule of the expert matrices."""

    MUON = "muon"
    ADAMW = "adamw"


class Device(StrEnum):
    """Where trainer and engine compute; `auto` takes CUDA where there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class ModelShape:
    """A Qwen3-MoE small enough for two CPU cores; every matrix of an expert is a whole number of 128 x 128 blocks."""

    layers: int = 2
    experts: int = 8
    experts_per_token: int = 2
    hidden: int = 256
    expert_intermediate: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocabulary: int = 256  # one token per byte

    def check(self) -> None:
        """Raise ConfigError unless the demo's two expert-parallel receivers can hold this model."""
        if self.layers < 2 or self.experts < 8 or self.experts % 2:
            raise ConfigError(
                f"the demo needs 2 or more layers and an even number of 8 or more experts, "
                f"got {self.layers} layers and {self.experts} experts"
            )
        for name in ("hidden", "expert_intermediate"):
            size = getattr(self, name)
            if size <= 0 or size % 128:
                raise ConfigError(f"{name} is {size}; block scales need a positive multiple of 128")


@dataclass(frozen=True)
class DemoConfig:
    """Settings of one run.

    `limit_s` bounds each single wait for a receiver (start-up, one publish, one probe), in seconds.
    """

    out: Path
    model: Path | None = None
    text: Path | None = None
    variant: Variant = Variant.FP8
    optimizer: OptimizerName = OptimizerName.MUON
    preset: str = "te_fp32"
    device: Device = Device.AUTO
    steps: int = 8
    lr: float | None = None
    seed: int = 0
    batch: int = 2
    sequence: int = 128
    limit_s: float = 180.0
    shape: ModelShape = field(default_factory=ModelShape)

    @property
    def work(self) -> Path:
        """Where the made checkpoint, the receivers' logs and the commit record go; the report stands beside it."""
        return self.out / "demo-out"

    def check(self) -> None:
        """Raise ConfigError for settings that cannot work, before anything is written or started."""
        if self.steps < 5:
            raise ConfigError(f"--steps is {self.steps}; the demo needs at least 5 to show that bytes keep changing")
        if self.text is not None and not self.text.is_file():
            raise ConfigError(f"--text {self.text} is not a file")
        if self.model is not None and not (self.model / "config.json").is_file():
            raise ConfigError(f"--model {self.model} holds no config.json; give a Hugging Face checkpoint directory")
        if not 0 < self.limit_s < _DAY_S:
            raise ConfigError(f"--limit is {self.limit_s} s; every wait needs a deadline above 0 and below a day")
        if self.lr is not None and not 0 <= self.lr < math.inf:
            raise ConfigError(f"--lr is {self.lr}; a learning rate is a finite number from 0")
        above = next(folder for folder in (self.out, *self.out.absolute().parents) if os.path.lexists(folder))
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise ConfigError(f"--out {self.out}: {above} is no directory that can be written to; give another one")
        self.shape.check()

    def plain(self) -> dict[str, Any]:
        """The settings as JSON-ready values, for the report."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}


def require_packages(variant: Variant, optimizer: OptimizerName) -> None:
    """Raise ConfigError naming what is not installed of the systems that the demo runs; none of them is loaded."""
    wanted = dict(_PACKAGES)
    if variant is not Variant.BASELINE:
        wanted["awex"] = "awex"
    if optimizer is OptimizerName.MUON:
        wanted["emerging_optimizers"] = "emerging-optimizers"
    missing = [distribution for module, distribution in wanted.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"the demo runs {', '.join(missing)}, which this environment lacks; in a checkout `make demo` or "
            "`requirements/install.sh .venv run` installs all of it, in releases that work together"
        )


def shipped_text() -> bytes:
    """The text that comes with the demo (data/SOURCE.md names it)."""
    return files("weftpub_demo").joinpath("data", "text.txt").read_bytes()
