"""The copy kernel without a GPU: its PTX for Hopper, played on the CPU, moves the right bytes, in words as wide as it
may."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("compile_copies_for_sm90.py")
    result = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment, timeout=600
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize(("word", "accesses"), [(16, ["v4.b32"]), (4, []), (1, ["b8"])])
def test_copies(compiled: dict[str, Any], word: int, accesses: list[str]) -> None:
    row = compiled[str(word)]
    assert row["right"]
    assert row["programs"] > 3
    assert row["accesses"] == accesses
