"""Memory of an engine: which tag is resident, and how many bytes are really free.

SGLang ends its scheduler when a tag is released twice, resumed without having been released, or released while requests
run. `MemoryTags` refuses first. And release answers before the memory is free, so what is free is measured, never
inferred.
"""

import ctypes
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import StrEnum

import torch

from weftpub.errors import ConfigError, DeadlineError, StateError
from weftpub.wire.identity import device_index

__all__ = ["TAGS", "MemoryTags", "TagState", "free_bytes", "wait_for_free"]

TAGS = ("kv_cache", "weights", "cuda_graph")
_POLL_S = 0.05
_GIB = 1 << 30


class TagState(StrEnum):
    """Where the memory of one tag is.

    UNKNOWN: a call about it never answered; only a restarted engine is known again.
    """

    RESIDENT = "resident"
    RELEASED = "released"
    UNKNOWN = "unknown"


class MemoryTags:
    """State of every memory tag of one engine.

    Args:
        engine: its name, for messages.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._states = dict.fromkeys(TAGS, TagState.RESIDENT)

    def __getitem__(self, tag: str) -> TagState:
        return self._states[tag]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    @property
    def released(self) -> tuple[str, ...]:
        """Tags whose memory is away, in a fixed order."""
        return tuple(tag for tag, state in self._states.items() if state is TagState.RELEASED)

    @property
    def resident(self) -> bool:
        """Whether everything is where it belongs."""
        return all(state is TagState.RESIDENT for state in self._states.values())

    def check_release(self, tags: Sequence[str]) -> None:
        """Raises ConfigError for an unknown or repeated tag, StateError for one that is not resident."""
        self._check(tags, TagState.RESIDENT, "released")

    def check_resume(self, tags: Sequence[str]) -> None:
        """Raises ConfigError for an unknown or repeated tag, StateError for one that was not released."""
        self._check(tags, TagState.RELEASED, "resumed")

    def move(self, tags: Iterable[str], target: TagState) -> None:
        """Note where the memory of tags is now."""
        self._states.update(dict.fromkeys(tags, target))

    def read(self, away: Collection[str]) -> None:
        """Note what the engine itself says is away. An UNKNOWN tag stays: its call may yet be carried out."""
        for tag, state in self._states.items():
            if state is not TagState.UNKNOWN:
                self._states[tag] = TagState.RELEASED if tag in away else TagState.RESIDENT

    def _check(self, tags: Sequence[str], required: TagState, verb: str) -> None:
        unknown = [tag for tag in tags if tag not in self._states]
        if unknown or not tags or len(set(tags)) != len(tags):
            raise ConfigError(f"memory tags {list(tags)}: expected some of {', '.join(TAGS)}, each once")
        wrong = [f"{tag} is {self._states[tag]}" for tag in tags if self._states[tag] is not required]
        if wrong:
            lost = TagState.UNKNOWN in self._states.values()
            remedy = "restart the engine" if lost else "keep release and resume in pairs"
            raise StateError(
                f"engine {self._engine}: {'; '.join(wrong)} and cannot be {verb}, SGLang's scheduler would end; "
                f"{remedy}"
            )


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def free_bytes(device: str) -> int | None:
    """Free bytes of a GPU by its UUID, over all processes; None for "cpu", or if nothing here can measure it.

    NVML measures without a CUDA context, which would itself take half a gigabyte of that GPU.
    """
    if device == "cpu":
        return None
    measured = _nvml_free(device)
    if measured is not None:
        return measured
    index = device_index(device)
    return None if index is None else int(torch.cuda.mem_get_info(index)[0])


def _nvml_free(uuid: str) -> int | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, memory = ctypes.c_void_p(), _NvmlMemory()
    if nvml.nvmlInit_v2():
        return None
    try:
        if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return None
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        return int(memory.free)
    finally:
        nvml.nvmlShutdown()


def wait_for_free(
    needed: int,
    device: str,
    what: str,
    seconds: float,
    *,
    measure: Callable[[str], int | None] = free_bytes,
    remedy: str,
) -> int | None:
    """Wait until `needed` bytes are free on a GPU.

    Args:
        what: what they are needed for, or who should have freed them.
        measure: how free bytes are found; what it cannot measure is not waited for.
        remedy: what to do when they do not become free.

    Returns:
        the bytes found free, None if that cannot be measured.

    Raises:
        DeadlineError: names the bytes needed and found.
    """
    start = time.monotonic()
    while True:
        found = measure(device)
        if found is None or found >= needed:
            return found
        if time.monotonic() - start >= seconds:
            raise DeadlineError(
                f"{what}: {needed} bytes ({needed / _GIB:.2f} GiB) are needed on {device}, {found} bytes "
                f"({found / _GIB:.2f} GiB) are free after {seconds:g} s; {remedy}"
            )
        time.sleep(_POLL_S)
