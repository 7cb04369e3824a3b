"""Run by test_compiled_copies.py in a process of its own: compiles the copy kernel for sm_90 without a GPU, plays its
PTX on the CPU, and reports what it found as JSON.
"""

import json
import re
from typing import Any

import numpy as np
import torch
from compile_for_sm90 import CompileOnly
from ptx_machine import PtxMachine
from triton.runtime import driver

from weftpub_kernels import triton_copy as copies

SIZE = 300_000


def report(word: int) -> dict[str, Any]:
    """A long dense piece, columns of a matrix, and one word: the bytes, and how they are read and written."""
    source = torch.from_numpy(np.random.default_rng(word).integers(0, 256, SIZE, dtype=np.uint8))
    target, want = torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    a, b = source.data_ptr(), target.data_ptr()
    pieces = [
        (0, 0, word * 5000, 1, 0, 0),
        (word * 6000, word * 7000, word * 5, 17, word * 9, word * 6),
        (word * 6500, word * 7500, word, 1, 0, 0),
    ]
    for start, place, width, rows, source_pitch, target_pitch in pieces:
        for row in range(rows):
            x, y = start + row * source_pitch, place + row * target_pitch
            want[y : y + width] = source[x : x + width]
    table = np.array([(a + s, b + t, *rest) for s, t, *rest in pieces], dtype=np.int64)
    owner, first, programs = copies.work(table, word)
    tensors = [torch.from_numpy(array.copy()) for array in (table, owner, first)]
    kernel = copies.copy_chunks.warmup(*tensors, WORD=word, grid=(1,), num_warps=copies.WARPS)
    machine = PtxMachine(kernel.asm["ptx"], 32 * copies.WARPS)
    for program in range(programs):
        arguments = [tensor.data_ptr() for tensor in tensors]
        machine.run((program, 0, 0), (programs, 1, 1), arguments, [*tensors, source, target])
    accesses = sorted(set(re.findall(r"(?:ld|st)\.global\.(v4\.b32|b8)", kernel.asm["ptx"])))
    return {"right": torch.equal(target, want), "programs": programs, "accesses": accesses}


if __name__ == "__main__":
    driver.set_active(CompileOnly())
    print(json.dumps({word: report(word) for word in (16, 4, 1)}))
