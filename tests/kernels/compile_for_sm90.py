"""Run by test_compiled_code.py in a process of its own: compile the kernel for sm_90 without a GPU, and report as
JSON."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from weftpub_kernels import PRESETS, QuantizedPair, launch
from weftpub_kernels.launch import Variant

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class CompileOnly:
    """A Triton driver that knows its target and nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_variant(preset: str, shape: tuple[int, int], aligned: bool) -> dict[str, object]:
    recipe = PRESETS[preset]
    x, out = torch.empty(shape, dtype=recipe.input_dtype), QuantizedPair.empty(shape, "cpu", sums=True)
    kept = {}
    honest = launch.quantize_tiles.warmup

    def keep(*arguments: object, **options: object) -> object:
        kept["kernel"] = honest(*arguments, **options)

        class NotLoaded:
            run = function = packed_metadata = None

        return NotLoaded

    launch.quantize_tiles.warmup = keep
    try:
        even = shape[0] % 128 == 0 and shape[1] % 128 == 0
        launch._plan(x, out, Variant(x.dtype, recipe.operators, even, True, True, aligned))
    finally:
        launch.quantize_tiles.warmup = honest
    kernel = kept["kernel"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _ask("cuobjdump", "-res-usage", file.name)
        code = _ask("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    ptx = kernel.asm["ptx"]
    return {
        "preset": preset,
        "registers": registers,
        "stack": stack,
        "local": local,
        "flushes_subnormals": ".ftz" in ptx,
        "approximate_division": "div.full" in ptx,
        "wrong_merges": wrong_merges(code),
        "conversions": code.count("F2FP.SATFINITE.E4M3"),
    }


def wrong_merges(code: str) -> int:
    """Conversions that merge with a register holding no freshly converted pair: what ptxas 12.8 does when it mixes
    them up."""
    last: dict[str, str] = {}
    wrong = 0
    for line in code.splitlines():
        found = re.search(r"\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)\s+(R\d+)(.*?);", line)
        if not found:
            continue
        operation, target, rest = found.groups()
        kind = operation
        if operation.startswith("F2FP") and "E4M3" in operation:
            merged = rest.split(",")[-1].strip().split(".")[0]
            wrong += merged != "RZ" and last.get(merged) != "pair"
            kind = "pair" if merged == "RZ" else "word"
        last[target] = kind
    return wrong


def _ask(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    driver.set_active(CompileOnly())
    cases = [tuple(case) for case in json.loads(sys.argv[1])]
    print(json.dumps([compile_variant(preset, tuple(shape), aligned) for preset, shape, aligned in cases]))
