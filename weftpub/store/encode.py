"""One updated master into its place in the store: quantized to FP8, or rounded to BF16. Nothing here waits for the
device.
"""

from typing import Protocol

import torch

from weftpub.canonical import Projection
from weftpub.errors import ConfigError
from weftpub.store.layout import BLOCK, BUFFERS, MatrixView, StoreLayout
from weftpub_kernels import (
    PRESETS,
    NonFiniteError,
    NonFiniteMonitor,
    QuantizedPair,
    quantize_into,
    require_publishable,
)
from weftpub_kernels.recipe import TILE_PARTS

__all__ = ["Encoder", "check_preset", "make_encoder"]

_DEFAULT_PRESET = "te_fp32"


class Encoder(Protocol):
    """Writes matrices and notes the first non-finite element; everything is enqueued on the current stream."""

    @property
    def preset(self) -> str | None: ...

    def write(self, index: int, master: torch.Tensor, view: MatrixView) -> None:
        """Fill `view`, of matrix `index` of the layout, from `master`."""
        ...

    def tile_sums(self, projection: Projection) -> torch.Tensor | None:
        """What the quantizer left of W's checksums, int64 ``[layers * experts, M/128, N/128, 8]``; None in BF16."""
        ...

    def raise_if_nonfinite(self) -> None:
        """Wait for the device; NonFiniteError names matrix, row and column of what was written since `reset`."""
        ...

    def reset(self) -> None: ...


def make_encoder(layout: StoreLayout, preset: str | None, device: torch.device) -> Encoder:
    """The encoder for the layout's format.

    Raises:
        ConfigError: a preset for BF16, a preset whose source is not FP32, or one that this device cannot run exactly.
        UnknownPresetError, UnfitPresetError, ShapeError (weftpub_kernels): not known, not fit for publishing, or not
            for matrices of this shape.
    """
    if layout.format == "bf16":
        if preset is not None:
            raise ConfigError(f"preset {preset!r}: format 'bf16' has no quantizer; leave it out, or use format='fp8'")
        return _Bf16Encoder(layout, device)
    name = check_preset(preset, device)
    for projection in BUFFERS:
        PRESETS[name].check_shape(*layout.shape(projection))
    return _Fp8Encoder(name, layout, device)


def check_preset(preset: str | None, device: torch.device) -> str:
    """The name of the preset, te_fp32 for None, if an FP8 store on `device` can use it.

    Raises:
        ConfigError: its source is not FP32, or this device cannot run it exactly.
        UnknownPresetError, UnfitPresetError (weftpub_kernels): not known, or not fit for publishing.
    """
    name = _DEFAULT_PRESET if preset is None else preset
    recipe = require_publishable(name)
    if recipe.input_dtype != torch.float32:
        raise ConfigError(f"preset {name!r} quantizes {recipe.input_dtype}, masters are float32; use 'te_fp32'")
    if device.type == "cpu" and not recipe.ieee:
        raise ConfigError(f"preset {name!r} has approximate operators and runs on a GPU only; use 'te_fp32' here")
    return name


class _Fp8Encoder:
    def __init__(self, preset: str, layout: StoreLayout, device: torch.device) -> None:
        self.preset = preset
        self._names = [matrix.name for matrix in layout.matrices]
        self._monitor = NonFiniteMonitor(device)
        self._sums: dict[Projection, torch.Tensor] = {}
        for projection in BUFFERS:
            rows, columns = layout.shape(projection)
            shape = (len(layout.layers) * len(layout.experts), -(-rows // BLOCK), -(-columns // BLOCK), TILE_PARTS)
            self._sums[projection] = torch.zeros(shape, dtype=torch.int64, device=device)
        self._sums_of = [self._sums[matrix.projection][i // len(BUFFERS)] for i, matrix in enumerate(layout.matrices)]
        self._pairs: dict[int, QuantizedPair] = {}

    def write(self, index: int, master: torch.Tensor, view: MatrixView) -> None:
        if index not in self._pairs:  # checked once; the views stay what they are
            assert view.scale is not None, "an FP8 view has scales"
            assert view.scale_t is not None, "an FP8 view has transposed scales"
            self._pairs[index] = QuantizedPair(view.w, view.wt, view.scale, view.scale_t, self._sums_of[index])
        quantize_into(master, self._pairs[index], self.preset, self._monitor, self._names[index])

    def tile_sums(self, projection: Projection) -> torch.Tensor | None:
        return self._sums[projection]

    def raise_if_nonfinite(self) -> None:
        self._monitor.raise_if_set()

    def reset(self) -> None:
        self._monitor.reset()


class _Bf16Encoder:
    preset = None

    def __init__(self, layout: StoreLayout, device: torch.device) -> None:
        self._names = [matrix.name for matrix in layout.matrices]
        self._columns = [layout.shape(matrix.projection)[1] for matrix in layout.matrices]
        self._first = torch.empty(len(self._names), dtype=torch.int64, device=device)  # flat index, -1 for none
        self._value = torch.empty(len(self._names), dtype=torch.float32, device=device)
        self.reset()

    def write(self, index: int, master: torch.Tensor, view: MatrixView) -> None:
        view.w.copy_(master)
        # What was written is looked at, not the master: rounding may overflow to Inf.
        flat = view.w.reshape(-1)
        bad = ~torch.isfinite(flat)
        first = bad.to(torch.uint8).argmax().view(1)
        self._first[index : index + 1] = torch.where(bad.gather(0, first), first, -1)
        self._value[index : index + 1] = flat.gather(0, first).float()

    def tile_sums(self, projection: Projection) -> torch.Tensor | None:
        return None

    def raise_if_nonfinite(self) -> None:
        found = self._first.tolist()
        index = next((i for i, first in enumerate(found) if first >= 0), None)
        if index is not None:
            row, column = divmod(found[index], self._columns[index])
            raise NonFiniteError(self._names[index], row, column, float(self._value[index]))

    def reset(self) -> None:
        self._first.fill_(-1)
