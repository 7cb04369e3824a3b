"""Bytes between host and GPU, counted twice: copies that PyTorch is asked for, and the GPU's own counters."""

import ctypes
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CopiedBytes", "LinkCounters"]

_TX, _RX = 197, 198  # NVML_FI_DEV_PCIE_COUNT_TX_BYTES and _RX_BYTES: what the GPU sent and received
_UNSIGNED_INT = 1  # NVML_VALUE_TYPE_UNSIGNED_INT
_PERIOD_S = 0.01  # a 32-bit counter goes round in 70 ms at 60 GB/s


class CopiedBytes(TorchDispatchMode):
    """Counts copies between devices of two types while it is entered, those of this thread.

    Attributes:
        to_gpu, to_host: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to_gpu = self.to_host = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.count(args[1], args[0])
        elif func is torch.ops.aten._to_copy.default:
            self.count(args[0], result)
        return result

    def count(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Note one copy."""
        nbytes = target.numel() * target.element_size()
        if (source.device.type, target.device.type) == ("cpu", "cuda"):
            self.to_gpu += nbytes
        elif (source.device.type, target.device.type) == ("cuda", "cpu"):
            self.to_host += nbytes


class _Value(ctypes.Union):
    _fields_ = (("whole", ctypes.c_ulonglong), ("double", ctypes.c_double))


class _FieldValue(ctypes.Structure):
    """`nvmlFieldValue_t`."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_uint),
        ("result", ctypes.c_uint),
        ("value", _Value),
    )


class LinkCounters:
    """The PCIe counters of a GPU, which count everybody's bytes, while it is entered.

    Args:
        uuid: of the GPU, "GPU-..."; "cpu" for none.

    Attributes:
        to_gpu, to_host: bytes; None where the driver does not tell.
    """

    def __init__(self, uuid: str) -> None:
        self.to_gpu: int | None = None
        self.to_host: int | None = None
        self._read = _reader(uuid)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._last = self._read()
        if self._last is not None:
            self.to_gpu = self.to_host = 0
            self._thread = threading.Thread(target=self._follow, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self.sample()

    def sample(self) -> None:
        """Add what was counted since the last sample."""
        now = self._read()
        if now is None or self._last is None or self.to_gpu is None or self.to_host is None:
            return
        sent, received, round_at = now
        self.to_host += (sent - self._last[0]) % round_at
        self.to_gpu += (received - self._last[1]) % round_at
        self._last = now

    def _follow(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self.sample()


def _reader(uuid: str) -> Callable[[], tuple[int, int, int] | None]:
    """What gives the bytes sent and received so far, and where the counters go round; None where nothing tells."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return lambda: None
    handle = ctypes.c_void_p()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return lambda: None
    fields = (_FieldValue * 2)()

    def read() -> tuple[int, int, int] | None:
        fields[0].field, fields[1].field = _TX, _RX
        if nvml.nvmlDeviceGetFieldValues(handle, 2, fields) or fields[0].result or fields[1].result:
            return None
        round_at = 1 << (32 if fields[0].kind == _UNSIGNED_INT else 64)
        return fields[0].value.whole % round_at, fields[1].value.whole % round_at, round_at

    return read
