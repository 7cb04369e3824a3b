"""What the GPU scripts say about where they ran."""

import contextlib
import os
import platform
from importlib import metadata
from typing import Any

import torch

__all__ = ["ran_on"]


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
