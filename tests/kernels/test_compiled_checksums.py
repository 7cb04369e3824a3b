"""The kernel that finishes checksums, without a GPU: its PTX for Hopper, played on the CPU, makes the checksums that
the definition makes, and writes nothing beside them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_finished_checksums(tmp_path: Path) -> None:
    program = Path(__file__).with_name("compile_checksums_for_sm90.py")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment, timeout=600
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(result.stdout) == {
        "counts": {"right": True, "beside": True},
        "same": {"right": True, "beside": True},
    }
