"""Checksums of many tensors by name, held as one array: a mapping for whoever wants one of them, an array for whoever
wants all.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from weftpub.errors import ConfigError

__all__ = ["Checksums"]


class Checksums(Mapping[str, int]):
    """Name to 64-bit checksum (signed, as `weftpub_kernels.checksum`). Does not change.

    Args:
        names: all of them, in order.
        values: int64 [n].

    Raises:
        ConfigError: more or fewer values than names.
    """

    def __init__(self, names: tuple[str, ...], values: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
        if values.dtype != np.int64 or values.shape != (len(names),):
            raise ConfigError(
                f"{len(names)} names need as many int64 checksums, found {values.dtype} {list(values.shape)}"
            )
        self.names = names
        self.values_in_order = values.copy()
        self.values_in_order.flags.writeable = False

    @classmethod
    def of(cls, found: Mapping[str, int], like: "Mapping[str, int] | None" = None) -> "Checksums":
        """The checksums of a mapping.

        Args:
            found: signed 64-bit checksums by name.
            like: earlier checksums, perhaps of the same names in the same order; then their names are shared, so that
                who has matched names once sees at a glance that they are the same.
        """
        names = tuple(found)
        if isinstance(like, Checksums) and like.names == names:
            names = like.names
        return cls(names, np.fromiter(found.values(), dtype=np.int64, count=len(names)))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def __getitem__(self, name: str) -> int:
        return int(self.values_in_order[self._places[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Checksums of {len(self)} tensors"
