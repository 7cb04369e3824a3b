"""One updated master into its place in the store: quantized to FP8, or rounded to BF16."""

from typing import Protocol

import torch

from weftpub.errors import ConfigError
from weftpub.store.layout import MatrixView, StoreLayout
from weftpub_kernels import PRESETS, NonFiniteMonitor, QuantizedPair, quantize_into, require_publishable

__all__ = ["Encoder", "make_encoder"]

_DEFAULT_PRESET = "te_fp32"


class Encoder(Protocol):
    """Writes matrices and remembers the first non-finite element; everything is enqueued on the current stream."""

    @property
    def preset(self) -> str | None: ...

    def write(self, index: int, master: torch.Tensor, view: MatrixView) -> torch.Tensor | None:
        """Fill `view` from `master`; returns tile sums of W's checksum if the kernel made them on the way."""
        ...

    def raise_if_nonfinite(self) -> None:
        """Wait for the device; NonFiniteError names matrix, row and column."""
        ...

    def reset(self) -> None: ...


def make_encoder(layout: StoreLayout, preset: str | None, device: torch.device) -> Encoder:
    """The encoder for the layout's format.

    Raises:
        ConfigError: a preset for BF16, a preset whose source is not FP32, or one that this device cannot run exactly.
            UnknownPresetError, UnfitPresetError: not known, or not fit for publishing.
    """
    names = [matrix.name for matrix in layout.matrices]
    if layout.format == "bf16":
        if preset is not None:
            raise ConfigError(
                f"preset {preset!r}: format 'bf16' has no quantizer; leave preset out, or use format='fp8'"
            )
        return _Bf16Encoder(names, device)
    name = _DEFAULT_PRESET if preset is None else preset
    require_publishable(name)
    recipe = PRESETS[name]
    if recipe.input_dtype != torch.float32:
        raise ConfigError(
            f"preset {name!r} quantizes {recipe.input_dtype}; masters are float32, use {_DEFAULT_PRESET!r}"
        )
    if device.type == "cpu" and not recipe.ieee:
        raise ConfigError(
            f"preset {name!r} has approximate operators and runs on a GPU only; use {_DEFAULT_PRESET!r} here"
        )
    return _Fp8Encoder(name, names, device)


class _Fp8Encoder:
    def __init__(self, preset: str, names: list[str], device: torch.device) -> None:
        self.preset = preset
        self._monitor = NonFiniteMonitor(device, names=names)
        self._pairs: dict[int, QuantizedPair] = {}

    def write(self, index: int, master: torch.Tensor, view: MatrixView) -> torch.Tensor | None:
        assert view.scale is not None, "an FP8 view has scales"
        assert view.scale_t is not None, "an FP8 view has transposed scales"
        if index not in self._pairs:
            self._pairs[index] = QuantizedPair(view.w, view.wt, view.scale, view.scale_t)
        pair = self._pairs[index]
        quantize_into(master, pair, self.preset, self._monitor)
        return pair.sums

    def raise_if_nonfinite(self) -> None:
        self._monitor.raise_if_set()

    def reset(self) -> None:
        self._monitor.reset()


class _Bf16Encoder:
    preset = None

    def __init__(self, names: list[str], device: torch.device) -> None:
        self._monitor = NonFiniteMonitor(device, names=names)

    def write(self, index: int, master: torch.Tensor, view: MatrixView) -> torch.Tensor | None:
        view.w.copy_(master)
        self._monitor.note(view.w, index)
        return None

    def raise_if_nonfinite(self) -> None:
        self._monitor.raise_if_set()

    def reset(self) -> None:
        self._monitor.reset()
