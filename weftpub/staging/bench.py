"""How close staged steps come to what the bus can do: ``python -m weftpub.staging.bench --out FILE``.

First the results are checked, byte for byte, against the same updates without staging. Then, in one run: pinned copies
in, out and both ways at once (the ceiling), and full optimizer steps through the pipeline. A step of n matrices moves
``n * tensors * M * N * 4`` bytes each way (weight and states), and its share is those bytes, both ways, per second,
over the ceiling's. Everything that a step does counts: gradient checks, update, writer, change flags, final wait.

Writes JSON with GPU, driver, torch and commit. ``--check-only`` runs the checks alone, on a CPU too.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weftpub.device import pinned, resolve_device
from weftpub.masters import MasterSet
from weftpub.optim import AdamWHyperparameters, MuonHyperparameters, StagedAdamW, StagedMuon, StagedOptimizer
from weftpub.optim.base import MasterStep
from weftpub.staging.lanes import CudaLanes, Lane
from weftpub.staging.pipeline import StagedMaster, StagingPipeline

__all__ = ["Measurement", "check_results", "main"]

_STATES = {"muon": StagedMuon.STATES, "adamw": StagedAdamW.STATES}
_CEILING_BYTES = 1 << 30


@dataclass(frozen=True)
class Measurement:
    """One row of the result.

    Attributes:
        load: "muon" or "adamw".
        slots: slots in the pool.
        seconds: median wall time of a step.
        gb_s: bytes in plus bytes out per second, in 10^9.
        share: of the duplex ceiling of the same run.
    """

    load: str
    slots: int
    seconds: float
    gb_s: float
    share: float


def check_results(device: torch.device, shape: tuple[int, int], slots: Sequence[int]) -> list[str]:
    """Compares three staged steps with the same updates made directly on the device, and says what was compared.

    Raises:
        RuntimeError: a master, a state or what the writer saw differs in any bit.
    """
    done: list[str] = []
    for load in _STATES:
        for count in slots:
            masters = _masters(load, device, shape, 2 * count + 1)
            optimizer, seen = _optimizer(load, masters, device, count)
            expected = {
                name: {key: t.to(device, copy=True) for key, t in m.tensors().items()} for name, m in masters.items()
            }
            for step in range(1, 4):
                grads = _gradients(masters, device, seed=step)
                optimizer.step(grads)
                for name, tensors in expected.items():
                    staged = StagedMaster(name, tensors["weight"], {key: tensors[key] for key in masters.states})
                    settings = MasterStep(optimizer.hyperparameters.lr, optimizer.hyperparameters.weight_decay, step)
                    optimizer.run_one(staged, grads[name], settings)
            for name, tensors in expected.items():
                for key, tensor in tensors.items():
                    _require_equal(f"{load}, {count} slots: {key} of {name}", masters[name].tensors()[key], tensor)
                _require_equal(f"{load}, {count} slots: what the writer saw of {name}", seen[name], tensors["weight"])
            done.append(f"{load}, {count} slots, {len(masters)} matrices, 3 steps: bytes equal to unstaged updates")
    return done


def measure_ceilings(device: torch.device, repeat: int) -> dict[str, float]:
    """GB/s of pinned copies of 1 GiB: in, out, and the sum of both at once."""
    lanes = CudaLanes(device)
    count = _CEILING_BYTES // 4
    host_in, host_out = pinned(count), pinned(count)
    device_in, device_out = torch.zeros(2, count, device=device).unbind()

    def copy_in() -> None:
        device_in.copy_(host_in, non_blocking=True)

    def copy_out() -> None:
        host_out.copy_(device_out, non_blocking=True)

    def run(into: bool, out: bool) -> None:
        lanes.begin()
        for _ in range(4):
            if into:
                lanes.enqueue(Lane.IN, copy_in)
            if out:
                lanes.enqueue(Lane.OUT, copy_out)
        lanes.drain(60.0)

    kinds = {"in": (True, False), "out": (False, True), "duplex": (True, True)}
    result: dict[str, float] = {}
    for kind, (into, out) in kinds.items():
        run(into, out)
        seconds = statistics.median(_timed(lambda into=into, out=out: run(into, out)) for _ in range(repeat))
        result[kind] = 4 * (into + out) * _CEILING_BYTES / seconds / 1e9
    return result


def measure_load(
    load: str, masters: MasterSet, device: torch.device, slots: int, repeat: int, ceiling: float
) -> Measurement:
    """Median over ``repeat`` steps, after one that warms up."""
    optimizer, _ = _optimizer(load, masters, device, slots)
    grads = _gradients(masters, device, seed=0)
    optimizer.step(grads)
    seconds = statistics.median(_timed(lambda: optimizer.step(grads)) for _ in range(repeat))
    gb_s = 2 * masters.nbytes / seconds / 1e9
    return Measurement(load, slots, seconds, gb_s, gb_s / ceiling)


def describe_machine(device: torch.device) -> dict[str, str]:
    """GPU, driver, torch, CUDA and commit."""
    properties = torch.cuda.get_device_properties(device)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", f"GPU-{properties.uuid}"]
    return {
        "gpu": properties.name,
        "gpu_uuid": f"GPU-{properties.uuid}",
        "driver": _output(query),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "commit": _output(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m weftpub.staging.bench", description="Measure staged optimizer steps."
    )
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    parser.add_argument("--device", help="default: the GPU, or the CPU for --check-only without one")
    parser.add_argument("--shape", type=_shape, default=(1024, 2048), help="of each matrix (default: 1024x2048, 8 MiB)")
    parser.add_argument("--matrices", type=int, default=256, help="per step (default: 256)")
    parser.add_argument("--slots", type=int, nargs="+", default=[2, 3, 4], help="pool sizes (default: 2 3 4)")
    parser.add_argument("--repeat", type=int, default=5, help="timed repetitions; the median counts (default: 5)")
    parser.add_argument("--check-only", action="store_true", help="check results, measure nothing")
    arguments = parser.parse_args(argv)

    device = resolve_device(arguments.device)
    if device.type != "cuda" and not arguments.check_only:
        print("measuring needs a CUDA GPU; --check-only runs without one", file=sys.stderr)
        return 1
    checks = check_results(device, arguments.shape, arguments.slots)
    print("\n".join(f"ok    {line}" for line in checks))
    result: dict[str, Any] = {"checks": checks, "shape": list(arguments.shape), "matrices": arguments.matrices}
    if not arguments.check_only:
        result |= _measure(device, arguments.shape, arguments.matrices, arguments.slots, arguments.repeat)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _measure(
    device: torch.device, shape: tuple[int, int], matrices: int, slots: Sequence[int], repeat: int
) -> dict[str, Any]:
    ceilings = measure_ceilings(device, repeat)
    print("pinned copies, GB/s: " + ", ".join(f"{kind} {value:.1f}" for kind, value in ceilings.items()))
    rows: list[Measurement] = []
    for load in _STATES:
        masters = _masters(load, device, shape, matrices)
        for count in slots:
            row = measure_load(load, masters, device, count, repeat, ceilings["duplex"])
            rows.append(row)
            print(f"{load:6} {count} slots {row.seconds * 1e3:8.1f} ms {row.gb_s:6.1f} GB/s {row.share:.3f} of duplex")
    return describe_machine(device) | {"ceilings_gb_s": ceilings, "steps": [asdict(row) for row in rows]}


def _masters(load: str, device: torch.device, shape: tuple[int, int], matrices: int) -> MasterSet:
    """Random masters, drawn on the device: a host would take longer than all measurements."""
    masters = MasterSet({f"matrix.{i}": shape for i in range(matrices)}, _STATES[load])
    for name, values in _gradients(masters, device, seed=99).items():
        masters[name].weight.copy_(values.mul_(0.02))
    return masters


def _optimizer(
    load: str, masters: MasterSet, device: torch.device, slots: int
) -> tuple[StagedOptimizer[Any], dict[str, torch.Tensor]]:
    """The optimizer, and where its writer copies each matrix, as a store does."""
    written = {name: torch.empty(master.layout.shape, device=device) for name, master in masters.items()}

    def write(name: str, matrix: torch.Tensor) -> None:
        written[name].copy_(matrix)

    pipeline = StagingPipeline.for_masters(masters, device, slots=slots)
    if load == "muon":
        return StagedMuon(masters, pipeline, write, MuonHyperparameters(lr=0.02)), written
    return StagedAdamW(masters, pipeline, write, AdamWHyperparameters(lr=1e-3)), written


def _gradients(masters: MasterSet, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: torch.randn(master.layout.shape, generator=generator, device=device) for name, master in masters.items()
    }


def _require_equal(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    differing = int((found.cpu().view(torch.int32) != expected.cpu().view(torch.int32)).sum())
    if differing:
        raise RuntimeError(f"{what} differs in {differing} of {expected.numel()} elements")


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _shape(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    return int(rows), int(columns)


def _output(command: Sequence[str]) -> str:
    """First line that a command prints, or "unknown" where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
