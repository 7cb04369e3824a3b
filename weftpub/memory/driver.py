"""The CUDA driver through ctypes: the library, its errors and the context that PyTorch uses.

The few calls that memory between processes needs have had the same binary interface since CUDA 10.2, so they need
neither headers nor a binding package of the driver's own release.
"""

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

from weftpub.errors import TransportError

__all__ = ["check", "current", "device_attribute", "library"]


@cache
def library() -> Any:
    """The driver library, initialised; TransportError if there is none or it cannot start."""
    try:
        found = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportError(f"the CUDA driver cannot be loaded ({error}); memory on a GPU needs it") from error
    check(found.cuInit(0), "cuInit", found)
    return found


def check(status: int, call: str, driver: Any = None) -> None:
    """TransportError that names the call and the driver's own words, unless `status` is success."""
    if status == 0:
        return
    text = ctypes.c_char_p()
    (driver or library()).cuGetErrorString(status, ctypes.byref(text))
    words = text.value.decode() if text.value else "unknown error"
    raise TransportError(f"{call} failed: {words} (CUDA error {status})")


def device_attribute(index: int, attribute: int) -> int:
    """A number of `CUdevice_attribute` of device `index`."""
    device, value = ctypes.c_int(), ctypes.c_int()
    check(library().cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    check(library().cuDeviceGetAttribute(ctypes.byref(value), attribute, device), "cuDeviceGetAttribute")
    return value.value


@cache
def _primary_context(index: int) -> ctypes.c_void_p:
    """The device's primary context, retained for the life of the process as PyTorch itself does."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(library().cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    check(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    return context


@contextmanager
def current(index: int) -> Generator[Any]:
    """The driver, with the primary context of device `index` current inside the block."""
    driver = library()
    check(driver.cuCtxPushCurrent_v2(_primary_context(index)), "cuCtxPushCurrent")
    try:
        yield driver
    finally:
        check(driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())), "cuCtxPopCurrent")
