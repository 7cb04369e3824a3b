"""Experts that never move, on one GPU: one physical W that a trainer's process writes and an engine's process serves.

    python tests/gpu/zero_copy.py --out OUT [--only pools,mechanism,speed,phases,kills,engine] [--tiny] [--cycles 12]

Writes OUT/zero_copy.json as it goes (`zero_copy_page.py` makes a page of it) and exits with 1 if any check fails.
Sections:

    pools       the allocator's calls of an engine's load, with torch-memory-saver in both of its modes: a few seconds
                that tell whether `engine` would come up, and at which step it would not
    mechanism   several processes map one allocation: the quantizer writes in one, a captured CUDA graph of the
                other sees it without a pointer changed; either side is killed at the worst moment and comes back; what
                the other may do meanwhile; a protected mapping catches a write at the wrong time; nothing is left
                behind on the GPU
    speed       the experts of Qwen3.5-35B-A3B at expert parallel size 8 (4.03e9 parameters), 3.3 GB of other weights:
                from the last matrix that the quantizer wrote to the engine serving the new version, checksums on.
                The other weights alone, experts shared, experts copied (CUDA IPC), SGLang's own update API; W^T stored
                and rebuilt
    phases      the same sizes: GPU memory of trainer and engine in each phase of a colocated step and bytes over the
                link to the host, for shared and copied experts and for a colocation in BF16
    kills       either side killed at random points of many steps, and started again; what is served is always one
                whole version
    engine      SGLang itself, CUDA graphs and memory saver on: cycles with release and resume, served bytes and tokens
                by version, trainer and engine killed at random points and started again

Where `pools` fails, `--keep-reserved` starts an engine all the same: its experts are made in the memory saver's pool,
whose memory is not given back.

`--tiny` runs all of it on the CPU as a check of this script: a memory file stands for the GPU's memory, and the engine
section uses tests/adapters/cpu_engine.py. `--beside` says that others use the GPU: then free memory is not judged.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from ran_on import need_gpu, ran_on
from zero_copy_base import MIDDLE, QWEN35, TINY, Report

SECTIONS = ("pools", "mechanism", "speed", "phases", "kills", "engine")


def main() -> int:
    """Run the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to check this script")
    parser.add_argument("--cycles", type=int, default=12, help="publishes of each variant of `speed`")
    parser.add_argument("--engine-cycles", type=int, default=50, help="cycles of the SGLang engine")
    parser.add_argument("--seed", type=int, default=1, help="of the points where processes are killed")
    parser.add_argument("--kills", type=int, default=10, help="processes killed in `kills`")
    parser.add_argument(
        "--keep-reserved", action="store_true", help="the engine makes its experts in the memory saver's pool"
    )
    parser.add_argument("--no-sglang", action="store_true", help="speed without SGLang's own update")
    parser.add_argument("--beside", action="store_true", help="others use this GPU")
    parser.add_argument("--commit", default="", help="what is measured, for the page")
    given = parser.parse_args()
    need_gpu(given.tiny)
    chosen = given.only.split(",")
    unknown = set(chosen) - set(SECTIONS)
    if unknown:
        raise SystemExit(f"no section is named {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.resolve()
    torch.set_num_threads(1)
    report = Report(out / "zero_copy.json", beside=given.beside)
    report.data["environment"] = ran_on("sglang", "triton", "torch-memory-saver") | {"commit": given.commit}
    big, small = (TINY, TINY) if given.tiny else (QWEN35, MIDDLE)
    report.data["sizes"] = {"big": asdict(big), "small": asdict(small)}
    report.data["seconds"] = {}

    def pools() -> None:
        from zero_copy_pools import pools

        pools(report, out)

    def mechanism() -> None:
        from zero_copy_mechanism import mechanism

        mechanism(report, small)

    def speed() -> None:
        from zero_copy_speed import speed

        speed(report, big, given.cycles, sglang=not given.no_sglang)

    def phases() -> None:
        from zero_copy_phases import phases

        phases(report, big)

    def kills() -> None:
        from zero_copy_kills import kills

        kills(report, small, given.kills, given.seed)

    def engine() -> None:
        from zero_copy_engine import engine_section

        engine_section(report, out, given.engine_cycles, given.seed, tiny=given.tiny, apart=not given.keep_reserved)

    sections: dict[str, Callable[[], None]] = {f.__name__: f for f in (pools, mechanism, speed, phases, kills, engine)}
    for name in chosen:
        report.progress(f"== {name}")
        start = time.perf_counter()
        try:
            sections[name]()
        except (Exception, SystemExit) as error:
            report.check(f"{name} ran to its end", False, f"{type(error).__name__}: {error}")
            if isinstance(error, Exception):
                traceback.print_exc()
        report.data["seconds"][name] = time.perf_counter() - start
        report.progress(f"== {name}: {report.data['seconds'][name]:.1f} s")
    print("FAILED: " + ", ".join(report.data["failed"]) if report.data["failed"] else "all checks passed", flush=True)
    return 1 if report.data["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
