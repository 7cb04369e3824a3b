"""What a measurement must say about where it ran, and how results are written."""

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

__all__ = ["describe", "write"]


def describe(commit: str | None = None) -> dict[str, str]:
    """GPU, driver, torch, CUDA, triton, commit (asked of git where none is given) and date."""
    gpu = torch.cuda.current_device()
    return {
        "gpu": torch.cuda.get_device_name(gpu),
        "driver": _ask("nvidia-smi", f"--id={gpu}", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": triton.__version__,
        "commit": commit or _ask("git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def write(path: Path | None, document: dict[str, Any]) -> None:
    """Write a result as JSON, or nothing where no path was given."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
