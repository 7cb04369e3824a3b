"""Run by test_compiled_checksums.py in a process of its own: compiles the kernel that finishes checksums for sm_90
without a GPU, plays its PTX on the CPU, and reports what it found as JSON.
"""

import json

import torch
from compile_for_sm90 import CompileOnly
from ptx_machine import PtxMachine
from triton.runtime import driver

from weftpub_kernels import triton_checksum as checksums
from weftpub_kernels.checksum import finish

MANY = 300  # more than two programs' worth, and no whole number of them
SAME = 77


def report(counts: bool) -> dict[str, object]:
    """Random sums with a byte count each, or one for all: what is written, and whether that is all that is."""
    generator = torch.Generator().manual_seed(3)
    sums = torch.randint(-(2**63), 2**63 - 1, (MANY,), generator=generator)
    each = torch.randint(0, 2**40, (MANY,), generator=generator)
    result = torch.full((MANY + 5,), 11)
    second, nbytes = (each, 0) if counts else (sums, SAME)
    kernel = checksums.finish_sums.warmup(
        sums, second, nbytes, result, MANY, COUNTS=counts, grid=(1,), num_warps=checksums.WARPS
    )
    machine = PtxMachine(kernel.asm["ptx"], 32 * checksums.WARPS)
    programs = -(-MANY // (32 * checksums.WARPS))
    arguments = [sums.data_ptr(), second.data_ptr(), nbytes, result.data_ptr(), MANY]
    for program in range(programs):
        machine.run((program, 0, 0), (programs, 1, 1), arguments, [sums, second, result])
    want = finish(sums, each if counts else SAME)
    return {"right": torch.equal(result[:MANY], want), "beside": bool((result[MANY:] == 11).all())}


if __name__ == "__main__":
    driver.set_active(CompileOnly())
    print(json.dumps({"counts": report(True), "same": report(False)}))
