"""What the GPU scripts say about where they ran."""

import contextlib
import os
import platform
from importlib import metadata
from typing import Any

import torch

__all__ = ["need_gpu", "ran_on"]


def need_gpu(without: bool, option: str = "--tiny") -> None:
    """End here without a GPU: at full size a CPU would work for hours, and measure nothing."""
    if not without and not torch.cuda.is_available():
        raise SystemExit(f"no CUDA GPU was found; {option} tries this script without one")


def ran_on(*packages: str) -> dict[str, Any]:
    """Python, torch, CPUs, the GPU and its CUDA if there is one, and the releases of those packages that are
    installed."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found
