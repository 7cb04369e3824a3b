"""Writers of parameters that no quantizer looks at: they round a master into BF16, and remember whether it is finite.

A store's quantizer finds a NaN or Inf of an FP8 expert by itself. Embeddings, norms, routers and attention, and every
expert of the bf16 variant, are published as they are rounded here, so here they are looked at: of what was rounded,
because BF16 overflows before FP32 does.
"""

import torch

from weftpub.masters import find_nonfinite
from weftpub.staging import Writer
from weftpub_adapters.megatron.attached.host_state import Unit
from weftpub_kernels import NonFiniteError

__all__ = ["FiniteWatch", "PlainWriter"]


class FiniteWatch:
    """What was written in one generation, and whether all of it is finite. Nothing waits for the device until
    `raise_if_nonfinite`.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._any = False

    def reset(self) -> None:
        """Forget what was seen; a generation begins."""
        self._seen.clear()
        self._any = False

    @property
    def seen(self) -> bool:
        """Whether anything was written since `reset`."""
        return self._any

    def note(self, name: str, written: torch.Tensor) -> None:
        """Look at what was written, ``[M, N]`` or ``[N]``, on the current stream."""
        self._any = True
        self._seen[name] = written, written.isfinite().all()

    def raise_if_nonfinite(self) -> None:
        """NonFiniteError, naming row and column, for the first tensor that holds NaN or Inf; waits for the device
        once.
        """
        if not self._seen:
            return
        flags = torch.stack([finite for _, finite in self._seen.values()]).tolist()
        for (name, (written, _)), finite in zip(self._seen.items(), flags, strict=True):
            spot = None if finite else find_nonfinite(written)
            if spot is not None:
                row, column, value = spot
                raise NonFiniteError(name, row, column, value)
        self._seen.clear()


class PlainWriter:
    """Writes one unit's master, or a row block of it, into the parameter that the forward pass reads.

    Args:
        unit: whose parameter.
        watch: told of everything that is written.
    """

    def __init__(self, unit: Unit, watch: FiniteWatch) -> None:
        self._unit = unit
        self._watch = watch

    def __call__(self, name: str, matrix: torch.Tensor, /) -> None:
        self._write(name, matrix, slice(0, self._unit.key.numel()))

    def block(self, flat: slice) -> Writer:
        """The writer of a row block."""
        return lambda name, matrix: self._write(name, matrix, flat)

    def _write(self, name: str, matrix: torch.Tensor, flat: slice) -> None:
        target = self._unit.target.detach().view(-1)[flat].view(matrix.shape)
        target.copy_(matrix, non_blocking=True)
        self._watch.note(name, target)
