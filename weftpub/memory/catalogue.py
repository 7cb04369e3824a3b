"""What lies where in a shared allocation: names, shapes, dtypes and byte offsets, the same for everybody who maps it.

The catalogue travels in the header of the allocation, so whoever joins reads what is there instead of computing it, and
a process that expected something else says what differs before it reads a byte.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from weftpub.errors import ConfigError
from weftpub.plan import dtype_name, torch_dtype

__all__ = ["Catalogue", "Entry"]

_ALIGNMENT = 512  # bytes between tensors: what CUDA's own allocators give, and more than any kernel asks for


@dataclass(frozen=True)
class Entry:
    """One tensor in the allocation.

    Attributes:
        shape: dense, row-major.
        dtype: torch dtype name, such as ``float8_e4m3fn``.
        offset: bytes from the start of the allocation.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Catalogue:
    """All tensors of an allocation.

    Attributes:
        entries: by offset, not overlapping.
        about: plain data that says what they are, such as a store's layout; equal for everybody.
    """

    entries: tuple[Entry, ...]
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def pack(
        cls, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]], about: Mapping[str, Any] | None = None
    ) -> "Catalogue":
        """Place tensors one after the other; ConfigError for none at all, or one without elements."""
        entries: list[Entry] = []
        end = 0
        for name, (shape, dtype) in tensors.items():
            entry = Entry(name, tuple(shape), dtype_name(dtype), -(-end // _ALIGNMENT) * _ALIGNMENT)
            if entry.nbytes == 0:
                raise ConfigError(f"{name}: shape {list(shape)} has no elements")
            entries.append(entry)
            end = entry.offset + entry.nbytes
        if not entries:
            raise ConfigError("a shared allocation needs at least one tensor")
        return cls(tuple(entries), dict(about or {}))

    @property
    def nbytes(self) -> int:
        """Where the last tensor ends."""
        return self.entries[-1].offset + self.entries[-1].nbytes

    @cached_property
    def by_name(self) -> Mapping[str, Entry]:
        """The entries by name."""
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def digest(self) -> str:
        """sha256 of the text: equal digests mean equal catalogues."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def difference(self, other: "Catalogue") -> str | None:
        """In words, the first thing in which `other` differs from this one; None if nothing does."""
        if self.digest == other.digest:
            return None
        for key in sorted({*self.about, *other.about}):
            mine, theirs = self.about.get(key), other.about.get(key)
            if mine != theirs:
                return f"{key}: expected {mine}, found {theirs}"
        for name in (*self.by_name, *other.by_name):
            mine, theirs = self.by_name.get(name), other.by_name.get(name)
            if mine != theirs:
                return f"{name}: expected {_words(mine)}, found {_words(theirs)}"
        return "the same tensors in another order"

    def to_json(self) -> str:
        """Canonical text, read back by `from_json`."""
        rows = [[e.name, list(e.shape), e.dtype, e.offset] for e in self.entries]
        return json.dumps({"about": dict(self.about), "entries": rows}, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes, limit: int) -> "Catalogue":
        """Read a catalogue of an allocation of `limit` bytes; ConfigError if the text is not one."""
        try:
            data = json.loads(text)
            entries = tuple(
                Entry(str(name), tuple(int(n) for n in shape), str(dtype), int(offset))
                for name, shape, dtype, offset in data["entries"]
            )
            found = cls(entries, dict(data["about"]))
            end = 0
            for entry in entries:
                if entry.offset < end or any(n < 1 for n in entry.shape):
                    raise ValueError(f"{entry.name} lies across its neighbour, or is empty")
                end = entry.offset + entry.nbytes
            if not entries or end > limit:
                raise ValueError(f"its tensors end at byte {end} of {limit}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"the catalogue of a shared allocation cannot be read: {error}") from None
        return found


def _words(entry: Entry | None) -> str:
    return "nothing" if entry is None else f"{entry.dtype} {list(entry.shape)} at byte {entry.offset}"
