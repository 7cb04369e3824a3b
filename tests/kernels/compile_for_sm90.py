"""Run by test_compiled_code.py in a process of its own: compiles the kernels for sm_90 without a GPU.

It looks at the machine code, plays the PTX on the CPU, and reports both as JSON.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from ptx_machine import PtxMachine
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from weftpub_kernels import PRESETS, NonFiniteError, NonFiniteMonitor, QuantizedPair, Recipe, selftest
from weftpub_kernels import triton_checksum as checksums
from weftpub_kernels.bench.shapes import SHAPE_CLASSES
from weftpub_kernels.checksum import _sum_of_bytes
from weftpub_kernels.fragments import sum_weights
from weftpub_kernels.launch import Variant, batch_strides, compile_kernel, settle
from weftpub_kernels.pair import grid_of
from weftpub_kernels.reference import quantize_reference
from weftpub_kernels.tuning import Tuning

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class CompileOnly:
    """A Triton driver that knows its target and nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


@dataclass
class Quantizer:
    """The compiled kernel for tensors of one layout, played on the CPU."""

    recipe: Recipe
    x: torch.Tensor
    out: QuantizedPair
    tuning: Tuning

    def __post_init__(self) -> None:
        x, out = self.x, self.out
        even = x.shape[-2] % 128 == 0 and x.shape[-1] % 128 == 0
        aligned = (x.data_ptr() | out.w.data_ptr() | out.wt.data_ptr()) & 15 == 0
        tuning, fixed = settle(x, out, self.tuning, None)
        self.variant = Variant(x.dtype, self.recipe.operators, even, True, True, aligned, tuning, fixed)
        self.weights = sum_weights(x.shape[-1])
        strides = batch_strides(x, out)
        assert strides is not None
        self.compiled, self.constants = compile_kernel(x, out, strides, self.variant, self.weights)
        self.machine = PtxMachine(self.compiled.asm["ptx"])

    def play(self, monitor: NonFiniteMonitor) -> None:
        buffers = [self.x, *self.out.present().values(), monitor.record]
        arguments = (*(t.data_ptr() for t in buffers), monitor.note(self.x.shape), *self.constants)
        kinds = self.compiled.src.signature.values()
        given = [value for value, kind in zip(arguments, kinds, strict=True) if kind != "constexpr"]
        grid = (math.prod(self.x.shape[:-2]), *grid_of(self.x.shape))
        for program in np.ndindex(grid):
            self.machine.run(program[::-1], grid[::-1], given, [*buffers, self.weights])


def report(preset: str, shape_class: str, registers: int | None, *rest: Any) -> dict[str, Any]:
    recipe = PRESETS[preset]
    shape = next(c for c in SHAPE_CLASSES if c.name == shape_class)
    tuning = Tuning(registers, *rest)
    kernel = Quantizer(recipe, shape.input(recipe.input_dtype, "cpu"), shape.output("cpu"), tuning)
    results = {"differ": differences(kernel), "non_finite": non_finite(kernel), "tests_itself": tests_itself(kernel)}
    return machine_code(kernel.compiled) | results


def differences(kernel: Quantizer) -> dict[str, int]:
    """Values of each buffer that are not the reference's."""
    monitor = NonFiniteMonitor("cpu")
    kernel.play(monitor)
    monitor.raise_if_set()
    want = QuantizedPair.empty(kernel.x.shape, "cpu", sums=True)
    quantize_reference(kernel.x, want, kernel.recipe)
    kinds = {1: torch.uint8, 4: torch.int32, 8: torch.int64}
    return {
        name: int((got.contiguous().view(kind) != want.present()[name].view(kind)).sum())
        for name, got in kernel.out.present().items()
        for kind in [kinds[got.element_size()]]
    }


class Seen(Exception):
    """Ends a self-test at its first launch."""


def tests_itself(kernel: Quantizer) -> bool:
    """The self-test launches the very kernel that is then used, where strides are compiled in; elsewhere one with as
    few."""

    def launch(x: torch.Tensor, out: QuantizedPair, *rest: Any) -> None:
        tuning, fixed = settle(x, out, rest[-1], None)
        variant = kernel.variant._replace(tuning=tuning, strides=fixed)
        strides = batch_strides(x, out)
        assert strides is not None
        compiled, _ = compile_kernel(x, out, strides, variant, kernel.weights)
        raise Seen(variant == kernel.variant and (compiled is kernel.compiled or not any(fixed)))

    selftest.launch = launch
    try:
        selftest.check_variant(kernel.variant, kernel.recipe, torch.device("cpu"))
    except Seen as seen:
        return seen.args[0]
    return False


def non_finite(kernel: Quantizer) -> bool:
    """The last element turned Inf is found where it is, and its block is void."""
    place = tuple(size - 1 for size in kernel.x.shape)
    monitor = NonFiniteMonitor("cpu")
    kernel.x[place] = -torch.inf
    kernel.play(monitor)
    try:
        monitor.raise_if_set()
    except NonFiniteError as error:
        found = (error.row, error.column, error.value) == (*place[-2:], -torch.inf)
        return found and bool(kernel.out.scale.reshape(-1)[-1].isnan()) and bool(kernel.out.w[place].float().isnan())
    return False


def machine_code(kernel: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _ask("cuobjdump", "-res-usage", file.name)
        code = _ask("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    ptx = kernel.asm["ptx"]
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "flushes_subnormals": ".ftz" in ptx,
        "approximate_division": "div.full" in ptx,
        "wrong_merges": wrong_merges(code),
    }


def wrong_merges(code: str) -> int:
    """Conversions that merge with a register holding no freshly converted pair: ptxas 12.8 at its worst."""
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


def report_checksum(cuts: list[tuple[int, int]]) -> list[bool]:
    """For each range of one buffer: the checksum kernel's sum is the reference's."""
    memory = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8))
    addresses = np.array([memory.data_ptr() + start for start, _ in cuts])
    counts = np.array([stop - start for start, stop in cuts])
    table, owner, first, programs = checksums.work(addresses, counts)
    tensors = [torch.from_numpy(part) for part in (table, owner, first)]
    tensors += [*checksums.places(torch.device("cpu")), torch.zeros(len(cuts), dtype=torch.int64)]
    kernel = checksums.sum_chunks.warmup(*tensors, grid=(1,), num_warps=checksums.WARPS)
    machine = PtxMachine(kernel.asm["ptx"], 32 * checksums.WARPS)
    for program in range(programs):
        machine.run((program, 0, 0), (programs, 1, 1), [t.data_ptr() for t in tensors], [*tensors, memory])
    return [int(h) == _sum_of_bytes(memory[start:stop]) for h, (start, stop) in zip(tensors[-1], cuts, strict=True)]


def _ask(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    driver.set_active(CompileOnly())
    cases = json.loads(sys.argv[1])
    quantizers = [report(*case) for case in cases["quantizers"]]
    print(json.dumps({"quantizers": quantizers, "checksums": report_checksum([tuple(c) for c in cases["checksums"]])}))
