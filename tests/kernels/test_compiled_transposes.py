"""The transposition without a GPU: its PTX for Hopper, played on the CPU, moves every byte to its place and touches no
other, in words of 16 bytes where it may, and without shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

WORDS, BYTES = ["v4.b32"], ["b8"]
# even, words read, words written, scales, how it is compiled, and then what loads and stores it must have
CASES = [
    (True, True, True, True, {}, WORDS, WORDS),
    (True, True, True, True, {"down": 4, "down_first": True, "cache": ".cs"}, WORDS, WORDS),
    (True, True, True, False, {"columns": 8, "down": 4}, ["v2.b32"], WORDS),
    (True, True, True, True, {"columns": 4, "down": 4}, [], WORDS),  # words of four
    (False, True, True, True, {}, WORDS, WORDS),
    (False, False, True, True, {"columns": 4, "down": 4}, BYTES, WORDS),
    (False, True, False, True, {"columns": 4, "down": 4}, [], BYTES),
    (True, False, False, False, {"columns": 4, "down": 4}, BYTES, BYTES),
    (False, False, False, True, {"columns": 4, "down": 4}, BYTES, BYTES),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("compile_transposes_for_sm90.py")
    cases = json.dumps([case[:5] for case in CASES])
    result = subprocess.run(
        [sys.executable, str(program), cases], capture_output=True, text=True, env=environment, timeout=600
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i][:5])))
def test_variants(compiled: dict[str, Any], index: int) -> None:
    """Each has passed its own self-test here."""
    row = compiled["variants"][index]
    assert row["itself"]
    assert (row["read"], row["written"]) == CASES[index][5:]
    assert not row["shared"]
    assert row["stack"] == 0
    assert row["registers"] <= (112 if CASES[index][1] and CASES[index][2] else 168)


def test_layouts(compiled: dict[str, Any]) -> None:
    wrong = [name for name, right in compiled["layouts"].items() if not right]
    assert len(compiled["layouts"]) == 9
    assert not wrong
