"""The whole path on the eight GPUs of one host, in one repeatable command.

    python tests/gpu/eight_gpus.py --out OUT [--gpus 8] [--only train,publish,staging,smoke] [--tiny]

Writes OUT/eight_gpus.json after every section, one row for each rank's checks, and exits with 1 if any failed.

    train     TP2 x DP4, EP8, ETP1: hidden 3072, intermediate 1024, 256 experts, top-k 8, two layers, 128 tokens a rank,
              two updates, full recomputation. Muon FP8, AdamW BF16, AdamW FP8, AdamW FP8 with the other way of moving
              flat buffers: no BF16 expert memory, W and W^T those of the reference quantizer on every rank, masters
              beside unattached Megatron's, offload and reload, ordinary updates after close
    publish   from that trainer into SGLang DP8/EP8 with DP attention, and into TP8/EP8 without: sha256 of every tensor,
              the phases' times, and their share of what the copies and the links of this machine could do
    staging   optimizer steps of all GPUs at once against pinned copies both ways of all GPUs at once; the pages' NUMA
              nodes
    smoke     the tiny FP8 run of examples/weftmoe on these GPUs, by its run.sh
    plan      (if asked for) the plans of `publish` at full size, proven without a GPU: `--only plan --gpus 8`

`--gpus 2` scales it down to TP2 x DP1, EP2 with as many experts a GPU, `--gpus 1` to one rank. `--tiny` tries the
script without a GPU: two processes over gloo, Megatron's local layers, tests/adapters/cpu_engine.py, the torch sampler.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from eight_gpus_config import CONFIGURATIONS, LAYOUTS
from eight_gpus_numa import gpu_nodes, node_count

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SECTIONS = ("train", "publish", "staging", "smoke")
PLUGIN = "[sglang.srt.plugins]\nweftpub = weftpub_adapters.sglang.plugin:register\n"
# Per expert and rank as on the reference's machine; key/value heads that eight engine ranks can share.
REFERENCE = {
    "hidden": 3072,
    "intermediate": 1024,
    "experts_per_rank": 32,
    "top_k": 8,
    "layers": 2,
    "heads": 24,
    "kv_heads": 8,
    "head_dim": 128,
    "vocab": 8192,
    "tokens": 128,
    "positions": 2048,
}
TINY = {
    **REFERENCE,
    "hidden": 256,
    "intermediate": 512,  # on a CPU SGLang pads experts that its ranks could not share in whole blocks
    "experts_per_rank": 4,
    "top_k": 2,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 32,
    "vocab": 512,
    "tokens": 16,
    "positions": 128,
}


class Report:
    """What all sections found."""

    def __init__(self, path: Path, began: float) -> None:
        self._path, self._began = path, began
        self.data: dict[str, Any] = {"sections": {}, "failed": [], "unknown": []}

    def section(self, name: str, found: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Add a section: a row for each rank, and what failed in any of them."""
        for row in rows:
            for kind in ("failed", "unknown"):
                self.data[kind] += [f"{name}, rank {row['rank']}: {check}" for check in row.get(kind, ())]
        self.data["sections"][name] = {**found, "rows": rows}
        self.data["seconds"] = round(time.monotonic() - self._began, 1)
        self.write()

    def write(self) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1), encoding="utf-8")
        part.replace(self._path)


def run_ranks(report: Report, options: argparse.Namespace, name: str, settings: Path) -> None:
    """A section whose ranks torchrun starts: nothing of one section is left in the next."""
    out: Path = options.out
    for old in out.glob(f"{name}-rank*.json"):
        old.unlink()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={options.ranks}", "--max-restarts=0"]
    command += [str(HERE / "eight_gpus_ranks.py"), name, str(settings)]
    began = time.monotonic()
    status = watched(command, environment(options, name), options.limit)
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob(f"{name}-rank*.json"))]
    for row in rows:
        if not row["finished"] and not row["failed"]:
            row["failed"].append("it did not come to its end: it was stopped, or waited for a rank that failed")
    for rank in range(options.ranks):
        if rank not in {row["rank"] for row in rows}:
            rows.append({"rank": rank, "checks": {}, "failed": ["it wrote no account"]})
    found = {"exit": status, "seconds": round(time.monotonic() - began, 1)}
    report.section(name, found, sorted(rows, key=lambda row: row["rank"]))
    say(f"{name}: exit {status} after {found['seconds']} s, {sum(len(row['failed']) for row in rows)} failed checks")


def run_smoke(report: Report, options: argparse.Namespace) -> None:
    """weftmoe's own script, and what its log says."""
    out, steps = options.out / "smoke", options.smoke_steps
    shutil.rmtree(out, ignore_errors=True)  # it would go on from a checkpoint there
    command = [str(ROOT / "examples" / "weftmoe" / "run.sh"), "fp8", "--smoke", "--no-doctor", "--out", str(out)]
    command += ["--steps", str(steps), "telemetry.tensorboard=false", *smoke_sizes(options)]
    began = time.monotonic()
    status = watched(command, environment(options, "smoke"), options.limit)
    row: dict[str, Any] = {"rank": "all", "checks": {}, "failed": [], "command": command[1:]}

    def check(name: str, passed: bool, detail: Any) -> None:
        row["checks"][name] = {"passed": passed, "detail": detail}
        if not passed:
            row["failed"].append(name)
        say(f"{'ok  ' if passed else 'FAIL'} smoke/{name}: {detail}")

    check("run.sh ends with 0", status == 0, status)
    try:
        sys.path[:0] = [str(ROOT / part) for part in ("", "kernels", "adapters", "examples")]
        from weftmoe.report.summary import summarize_run
        from weftmoe.telemetry import read_log

        summary = summarize_run(read_log(out))
        row["summary"] = summary.model_dump(mode="json")
        check("all steps were made", summary.steps == steps, summary.steps)
        check("bytes were checked at every step", summary.bytes_checked == steps, summary.bytes_checked)
        check("versions are in order", summary.versions_in_order, summary.versions_in_order)
    except Exception as error:  # a run that failed early has no log
        check("its log can be read", False, f"{type(error).__name__}: {error}")
    report.section("smoke", {"exit": status, "seconds": round(time.monotonic() - began, 1)}, [row])


def smoke_sizes(options: argparse.Namespace) -> list[str]:
    """Overrides that spread the tiny run over the GPUs."""
    if options.tiny:
        return ["--gpus", "0", "algorithm.prompts=4", "algorithm.completions=4", "smoke.warmup_steps=20"]
    tensor = 2 if options.ranks % 2 == 0 else 1
    return [
        "--gpus",
        str(options.ranks),
        f"train.tensor={tensor}",
        f"train.sequence_parallel={str(tensor > 1).lower()}",
        "rollout.dp_attention=true",
        f"rollout.data={options.ranks}",
        "rollout.attention_backend=triton",
        "rollout.cuda_graph=false",
        f"smoke.experts={max(8, 2 * options.ranks)}",
    ]


def watched(command: list[str], variables: dict[str, str], limit: float) -> int:
    """Run a command in a process group of its own, end it at the limit; its exit status."""
    say(" ".join(command))
    process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        say(f"stopped after {limit:.0f} s")
        return 124
    finally:
        if process.poll() is None:
            end_group(process)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it started."""
    for sent, seconds in ((signal.SIGTERM, 45.0), (signal.SIGKILL, 20.0)):  # torchrun gives its workers 30 s
        try:
            os.killpg(process.pid, sent)
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def environment(options: argparse.Namespace, name: str) -> dict[str, str]:
    """Of the ranks: packages of this checkout, the engine's plugin as an installed package would show it, and what
    libraries read when they are imported."""
    folders = [ROOT / part for part in ("", "kernels", "adapters", "examples", "tests/adapters")]
    folders += [HERE, options.out / "site"]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    cores = max(1, (os.cpu_count() or 1) // options.ranks)
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([*map(str, folders), *inherited])),
        "PYTHONUNBUFFERED": "1",
        # All of it is on one host, whose name may mean nothing to itself.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        # Ranks of the trainer need not leave the same memory free on every GPU.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        # The Rust tree is built for another torch.
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "PYTHON": sys.executable,
    }
    if name != "smoke":  # weftmoe sets its own
        variables |= {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(min(16, cores))),
        }
    if options.tiny:
        variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return variables


def prepare(options: argparse.Namespace) -> Path:
    """Settings for the ranks, and the plugin's entry point."""
    shape: dict[str, Any] = dict(TINY if options.tiny else REFERENCE)
    shape["experts"] = shape.pop("experts_per_rank") * options.ranks
    settings = {
        "out": str(options.out),
        "shape": shape,
        "tensor": 2 if options.ranks % 2 == 0 else 1,
        "configurations": options.configurations,
        "layouts": options.layouts,
        "publish_layers": options.publish_layers or shape["layers"],
        "cycles": options.cycles,
        "ranks": options.ranks,
        "tiny": options.tiny,
        "nodes": [] if options.tiny else gpu_nodes()[: options.ranks],
        "node_count": node_count(),
    }
    info = options.out / "site" / "weftpub_eight_gpus-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weftpub_eight_gpus\nVersion: 0\n", encoding="utf-8")
    cpu = "cpu_engine = cpu_engine:register\n" if options.tiny else ""
    (info / "entry_points.txt").write_text(PLUGIN + cpu, encoding="utf-8")
    path: Path = options.out / "settings.json"
    path.write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return path


def say(what: str) -> None:
    """A line of progress."""
    print(f"== {what}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, help="default 8; with --tiny the number of processes, default 2")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS), help="of train; default all")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="attention of publish's engines; default both")
    parser.add_argument("--publish-layers", type=int, help="layers of publish, if more bytes are wanted; default 2")
    parser.add_argument("--cycles", type=int, default=10, help="timed publishes into each engine")
    parser.add_argument("--smoke-steps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=540.0, help="most seconds of one section")
    parser.add_argument("--commit", default="unknown", help="what this tree was made from, for the record")
    parser.add_argument("--tiny", action="store_true", help="two processes without a GPU, to try this script")
    options = parser.parse_args()
    began = time.monotonic()
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    options.ranks = options.gpus or (2 if options.tiny else 8)
    chosen = options.only.split(",")
    options.configurations, options.layouts = options.configurations.split(","), options.layouts.split(",")
    for what, found, known in (
        ("section", chosen, (*SECTIONS, "plan")),
        ("configuration", options.configurations, tuple(CONFIGURATIONS)),
        ("layout", options.layouts, LAYOUTS),
    ):
        for name in found:
            if name not in known:
                parser.error(f"unknown {what} {name}; choose from {', '.join(known)}")
    if not options.tiny and set(chosen) & set(SECTIONS):
        import torch

        if (there := torch.cuda.device_count()) < options.ranks:
            parser.error(f"{options.ranks} GPUs are wanted and {there} found; give --gpus N, or --tiny without any")
    settings = prepare(options)
    from ran_on import ran_on

    report = Report(options.out / "eight_gpus.json", began)
    packages = ("megatron-core", "transformer-engine", "sglang", "awex", "triton", "emerging-optimizers")
    where = ran_on(*packages)
    gpus = options.ranks if "gpu" in where and not options.tiny else 0
    report.data["environment"] = where | {"commit": options.commit, "gpus": gpus, "ranks": options.ranks}
    report.data["settings"] = json.loads(settings.read_text(encoding="utf-8"))
    for name in chosen:
        say(name)
        if name == "smoke":
            run_smoke(report, options)
        else:
            run_ranks(report, options, name, settings)
    print(json.dumps({key: report.data[key] for key in ("failed", "unknown", "seconds")}), flush=True)
    return 1 if report.data["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
