"""The kernels without a GPU: their machine code for Hopper has no known fault, and their PTX, played on the CPU, is
right."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

CASES = [
    ("te_fp32", "whole blocks", 80, "", "evict_first", ".cs", ".cs", True),
    ("te_fp32", "whole blocks", None, "", "", ".cs", "", False, True),
    ("te_fp32", "slices of a layer", 80, "", "evict_first", ".cs", ".cs", True, True),
    ("te_pow2", "slices of a layer", None, "", "", ".cs", ".cs", True),
    ("te_fp32", "batch", None, "", "", ".cs", ".cs", False, True),
    ("te_fp32", "batch", None, "", "", "", "", True, True),
    ("te_fp32", "batch", None, "", "", "", "", False, True, True),
    ("te_pow2", "slices of a layer", None, "", "", "", "", False, True, True),
    ("te_fp32", "slices of a layer", 80, "", "evict_first", "", "", True, True, True),
    ("awex_ue8m0", "whole blocks", None, "", "", "", "", False, False, True),
    ("te_pow2", "ragged batch", None, "", "", "", "", False, True, True),
    ("te_fp32", "ragged batch", None, "", "", ".cs", ".cs", True, True),
    ("te_fp32", "ragged, odd rows", None),
    ("te_pow2", "ragged batch", None, ".cg", "", "", ""),
    ("te_fp32", "one row", None),
    ("te_fp32", "slices of a layer", None),
    ("te_pow2", "whole blocks", None),
    ("awex_ue8m0", "whole blocks", None),
    ("sglang_ue8m0_bf16", "ragged batch", None),
]
RANGES = [(0, 1), (3, 20), (5, 70_000), (16, 65_552), (131_071, 262_145), (65_536, 196_608), (299_999, 300_000), (7, 7)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("compile_for_sm90.py")
    cases = json.dumps({"quantizers": CASES, "checksums": RANGES})
    result = subprocess.run(
        [sys.executable, str(program), cases], capture_output=True, text=True, env=environment, timeout=900
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i])))
def test_quantizer(compiled: dict[str, Any], index: int) -> None:
    limit = CASES[index][2]
    row = compiled["quantizers"][index]
    assert row["differ"] == dict.fromkeys(("w", "wt", "scale", "scale_t", "sums"), 0)
    assert row["non_finite"]
    assert row["wrong_merges"] == 0
    assert not row["flushes_subnormals"]
    assert not row["approximate_division"]
    assert row["tests_itself"]
    assert row["stack"] <= 16
    if limit is not None:
        assert row["registers"] <= limit


def test_checksum(compiled: dict[str, Any]) -> None:
    assert compiled["checksums"] == [True] * len(RANGES)
