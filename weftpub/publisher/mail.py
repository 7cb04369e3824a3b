"""Bytes of any size under a key of a torch store, where another rank finds them."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["StoreMail"]

_LARGEST_VALUE = 4 << 20  # torch's TCP store refuses values above 8 MiB, and closes the connection


class StoreMail:
    """Posts and takes. What torch's store raises passes: RuntimeError, its timeouts among them.

    Args:
        store: of torch.distributed.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    def of_group(cls, process_group: Any = None) -> "StoreMail":
        """Over the store of a process group; None is the default one."""
        group: Any = dist.group.WORLD if process_group is None else process_group
        return cls(dist.distributed_c10d._get_process_group_store(group))

    def post(self, key: str, payload: bytes) -> None:
        """Put bytes under a key."""
        parts = range(_LARGEST_VALUE, len(payload), _LARGEST_VALUE)
        for number, start in enumerate(parts, 1):
            self._store.set(f"{key}/{number}", payload[start : start + _LARGEST_VALUE])
        # Last: whoever finds it finds the others.
        self._store.set(key, len(parts).to_bytes(4, "big") + payload[:_LARGEST_VALUE])

    def arrived(self, key: str) -> bool:
        """Whether there is something under a key."""
        return bool(self._store.check([key]))

    def wait(self, key: str, seconds: float) -> None:
        """Return once there is something under a key."""
        self._store.wait([key], timedelta(seconds=max(seconds, 0.001)))

    def take(self, key: str) -> bytes:
        """What is under a key, which is removed."""
        first = bytes(self._store.get(key))
        keys = [key, *(f"{key}/{number}" for number in range(1, int.from_bytes(first[:4], "big") + 1))]
        found = first[4:] + b"".join(bytes(self._store.get(part)) for part in keys[1:])
        for part in keys:
            self._store.delete_key(part)
        return found
