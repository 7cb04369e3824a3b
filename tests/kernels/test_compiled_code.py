"""The machine code for Hopper, made without a GPU: no spills, no flushed subnormals, no merged conversions gone
wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [
    ("te_fp32", (256, 384), True),
    ("slime", (256, 384), True),
    ("te_fp32", (200, 300), False),
]
pytestmark = pytest.mark.slow

LEAN = 80
"""Registers at which three programs of 256 threads share a multiprocessor's 65536."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("compile_for_sm90.py")
    result = subprocess.run(
        [sys.executable, str(program), json.dumps(CASES)], capture_output=True, text=True, env=environment, timeout=240
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{CASES[i][1]}")
def test_machine_code(compiled: list[dict[str, object]], index: int) -> None:
    preset, shape, _ = CASES[index]
    row = compiled[index]
    assert row["preset"] == preset
    assert row["local"] == 0
    assert not row["flushes_subnormals"]
    assert row["approximate_division"] == (preset == "slime")
    assert row["wrong_merges"] == 0
    assert row["conversions"] == 32
    if shape == (256, 384):
        assert row["registers"] <= LEAN
        assert row["stack"] == 0
