"""What a sealed generation is, and the handles that a step writes it through."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weftpub.checksums import Checksums
from weftpub.errors import GenerationError

__all__ = ["SealReport", "Step", "StoreWriter"]


@dataclass(frozen=True)
class SealReport:
    """One sealed generation.

    Attributes:
        generation: its number.
        matrices: matrices written, which is all of them.
        changed_bytes: published bytes (weights and scales) that differ from the previous generation's; all of them if
            there was none; None if the store was made with measure_change=False.
        total_bytes: published bytes.
        checksums: canonical name to 64-bit checksum.
    """

    generation: int
    matrices: int
    changed_bytes: int | None
    total_bytes: int
    checksums: Checksums

    @property
    def changed_share(self) -> float | None:
        """changed_bytes / total_bytes."""
        return None if self.changed_bytes is None else self.changed_bytes / self.total_bytes


class Step:
    """Handle of `ExpertStore.writing`."""

    def __init__(self) -> None:
        self._report: SealReport | None = None

    @property
    def report(self) -> SealReport:
        """The seal's report; GenerationError inside the block, or if it failed."""
        if self._report is None:
            raise GenerationError("the generation is not sealed; read the report after the block")
        return self._report

    def finish(self, report: SealReport) -> None:
        self._report = report


class StoreWriter:
    """Writes complete updated masters into the generation that is being written; one object serves every step."""

    def __init__(self, write: Callable[[str, torch.Tensor], None]) -> None:
        self._write = write

    def __call__(self, name: str, matrix: torch.Tensor) -> None:
        """Quantize, or round to BF16, `matrix` (float32 ``[M, N]`` on the store's device) into the store.

        All work is enqueued on the current stream, the same one for every matrix of a generation.

        Raises:
            ConfigError: the store holds no matrix of that name, or dtype, shape or device differ.
            StateError: no generation is being written. GenerationError: the matrix was already written in it.
        """
        self._write(name, matrix)
