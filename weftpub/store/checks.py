"""What is handed to a store, checked before a byte changes."""

from collections.abc import Iterable, Mapping

import torch

from weftpub.errors import ChecksumError, ConfigError
from weftpub.masters import ExpertMatrix, format_names
from weftpub.store.layout import CanonicalEntry, StoreLayout

__all__ = ["check_master", "check_saved", "compare_checksums"]


def check_master(layout: StoreLayout, matrix: ExpertMatrix, master: torch.Tensor, device: torch.device) -> None:
    """ConfigError unless `master` is the float32 matrix that `matrix` names, on `device`."""
    shape = layout.shape(matrix.projection)
    if master.dtype != torch.float32 or tuple(master.shape) != shape or master.device != device:
        raise ConfigError(
            f"{matrix.name}: expected a float32 master {list(shape)} on {device}, found {master.dtype} "
            f"{list(master.shape)} on {master.device}; a converted copy would change the bytes"
        )


def check_saved(entries: Iterable[CanonicalEntry], tensors: Mapping[str, torch.Tensor]) -> None:
    """ConfigError unless `tensors` are exactly the canonical tensors of `entries`, in dtype and shape."""
    expected = {entry.name: entry for entry in entries}
    missing, unknown = set(expected) - set(tensors), set(tensors) - set(expected)
    if missing or unknown:
        raise ConfigError(
            f"these are not the tensors of this store: missing {format_names(missing)}, "
            f"unknown {format_names(unknown)}; nothing was changed"
        )
    for name, entry in expected.items():
        found = tensors[name]
        if found.dtype != entry.dtype or tuple(found.shape) != entry.shape:
            raise ConfigError(
                f"{name}: expected {entry.dtype} {list(entry.shape)}, found {found.dtype} {list(found.shape)}; "
                "nothing was changed"
            )


def compare_checksums(expected: Mapping[str, int], found: Mapping[str, int], action: str) -> None:
    """ChecksumError naming every tensor of `found` whose checksum is not the expected one."""
    wrong = [name for name, value in found.items() if expected.get(name) != value]
    if wrong:
        raise ChecksumError(
            f"{action}: the bytes of {len(wrong)} of {len(found)} tensors are not those that were sealed: "
            f"{format_names(wrong)}; load the last checkpoint"
        )
