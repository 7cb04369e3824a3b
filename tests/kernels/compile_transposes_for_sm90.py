"""Run by test_compiled_transposes.py in a process of its own: compiles the transposition for sm_90 without a GPU, plays
its PTX on the CPU, and reports what it found as JSON.
"""

import json
import re
import sys
from typing import Any

import numpy as np
import torch
from compile_for_sm90 import CompileOnly, machine_code
from ptx_machine import PtxMachine
from triton.runtime import driver

from weftpub_kernels.launch_transpose import Variant, compile_kernel, programs_of, strides_of, variant_of
from weftpub_kernels.pair import grid_of
from weftpub_kernels.selftest import check_turned
from weftpub_kernels.tuning import Turn

FAR = (1 << 24) + 16  # bytes from row to row: a tile spans more than 2^31


def play(
    w: torch.Tensor, wt: torch.Tensor, scale: torch.Tensor | None, scale_t: torch.Tensor | None, turn: Turn
) -> tuple[Variant, Any]:
    """Run every program of the launch that a GPU would be given."""
    strides = strides_of(w, wt, scale, scale_t)
    assert strides is not None
    variant = variant_of(w, wt, strides, scale is not None, turn)
    compiled, switches = compile_kernel(variant)
    machine = PtxMachine(compiled.asm["ptx"], 32 * compiled.metadata.num_warps)
    programs = programs_of(w, variant)
    buffers = [tensor for tensor in (w, wt, scale, scale_t) if tensor is not None]
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (w, wt, scale, scale_t)]
    kinds = compiled.src.signature.values()
    given = [
        v
        for v, kind in zip((*addresses, *w.shape[-2:], *strides, *switches), kinds, strict=True)
        if kind != "constexpr"
    ]
    for program in np.ndindex(programs):
        machine.run(program, programs, given, buffers)
    return variant, compiled


def report(even: bool, read_words: bool, write_words: bool, scales: bool, fields: dict[str, Any]) -> dict[str, Any]:
    """The self-test of a variant, on the PTX machine: it runs that variant and finds it right."""
    ran: list[tuple[Variant, Any]] = []
    check = check_turned.__globals__
    check["launch_turn"] = lambda *arguments: ran.append(play(*arguments))
    variant = Variant(even, read_words, write_words, scales, Turn(**fields))
    check_turned(variant, torch.device("cpu"))
    ((found, compiled),) = ran
    ptx = compiled.asm["ptx"]
    code = machine_code(compiled)
    return {
        "itself": found == variant,
        "read": sorted(set(re.findall(r"ld\.global\S*?\.(v\d\.b32|b8)", ptx))),
        "written": sorted(set(re.findall(r"st\.global\S*?\.(v\d\.b32|b8)", ptx))),
        "shared": "shared" in ptx,
        "registers": code["registers"],
        "stack": code["stack"],
    }


def layouts() -> dict[str, bool]:
    """W^T of memory laid out in other ways is right, and of rows so far apart that offsets pass 2^31."""
    generator = torch.Generator().manual_seed(3)

    def room(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def far() -> torch.Tensor:
        return torch.empty(129, FAR, dtype=torch.uint8)[:, :32]  # pages that nobody touches take no memory

    first = far()
    first.copy_(room(129, 32))
    cases = {
        "one element": (room(1, 1), room(1, 1)),
        "one row": (room(1, 300), room(300, 1)),
        "one column": (room(300, 1), room(1, 300)),
        "columns": (room(2, 144, 208).transpose(1, 2), room(2, 144, 208)),
        "both turned": (room(160, 48).t(), room(48, 160).t()),
        "parts of rows": (room(2, 130, 160)[:, :, 16:144], room(2, 130, 176)[:, 2:, 16:146]),
        "rows of 16, not in words": (room(128, 130)[:, :128], room(128, 128)),
        "far apart": (first, room(32, 129)),
        "written far apart": (room(32, 129), far()),
    }
    results: dict[str, bool] = {}
    for name, (w, wt) in cases.items():
        scale = torch.rand(*w.shape[:-2], *grid_of(w.shape), generator=generator)
        scale_t = torch.empty(*wt.shape[:-2], *grid_of(wt.shape))
        play(w, wt, scale, scale_t, Turn())
        results[name] = torch.equal(wt, w.transpose(-1, -2)) and torch.equal(scale_t, scale.transpose(-1, -2))
    return results


if __name__ == "__main__":
    driver.set_active(CompileOnly())
    print(json.dumps({"variants": [report(*case) for case in json.loads(sys.argv[1])], "layouts": layouts()}))
