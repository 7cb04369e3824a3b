"""Judges `Facts`: pure functions, one a subject, each yielding findings. `judge` runs them all in reading order.

A machine without a GPU is a warning everywhere: the smoke run and the demo work on it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from weftpub.packages import release
from weftpub_adapters.doctor.environment import environment_findings
from weftpub_adapters.doctor.facts import Facts, Gpu
from weftpub_adapters.doctor.findings import Finding, Level

__all__ = ["Wanted", "judge"]

GIB = 1 << 30
_TESTED_TORCH = "2.11.0"
# CUDA release of torch -> oldest driver (NVIDIA's CUDA release notes, Linux).
_DRIVERS = {13: 580, 12: 525}
# Releases that ran together with the adapters' own tables.
_TESTED = {
    "triton": "3.6.0",
    "transformers": "5.17.0",
    "emerging-optimizers": "0.3.0",
    "megatron-bridge": "0.6.2",
    "torch-memory-saver": "0.0.9.post1",
}
# Whose they are, where trainer and engine have environments of their own; what neither names is for both.
_TRAINER = ("megatron-core", "transformer-engine", "awex", "emerging-optimizers", "megatron-bridge")
_ENGINE = ("sglang", "torch-memory-saver")
# What reads prompts and judges answers: how it is installed, and what for.
_DATA = {
    "math-verify": ("pip install 'math-verify[antlr4_13_2]'; a smoke works without", "for mathematical answers"),
    "pyarrow": ("pip install pyarrow, or give prompts as JSON lines", "for parquet files of prompts"),
}
# SGLang's kernels, built for the tested torch.
_KERNELS = "0.4.5"


@dataclass(frozen=True)
class Wanted:
    """What the run needs.

    Attributes:
        variant: "baseline", "bf16" or "fp8"; None judges for any.
        gpus: GPUs of this node; None takes what is there.
        nodes: machines of the run.
        role: whose packages are needed here: trainer and engine may live in two environments.
        host_bytes, disk_bytes: memory and space that the run needs on this node.
        need_gpu: whether a missing GPU is a failure.
        delta_nets: whether the model has gated delta nets (Qwen3.5); None does not say.
    """

    variant: Literal["baseline", "bf16", "fp8"] | None = None
    gpus: int | None = None
    nodes: int = 1
    role: Literal["all", "trainer", "engine"] = "all"
    host_bytes: int = 0
    disk_bytes: int = 20 * GIB
    need_gpu: bool = False
    delta_nets: bool | None = None


def judge(facts: Facts, wanted: Wanted) -> list[Finding]:
    """All findings, in the order in which a person would fix them."""
    machine = (_python, _torch, _gpus, _smi, _peers, _sharing)
    subjects = (*machine, _packages, _delta_nets, _cudnn, _limits, _memory, _disk, _port)
    findings = [finding for subject in subjects for finding in subject(facts, wanted)]
    return findings + list(environment_findings(facts.environment, wanted.variant, gpu=bool(facts.gpus)))


def _python(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    ok = facts.python.startswith("3.12.")
    remedy = "" if ok else "make the environment with Python 3.12 (Megatron-core and Megatron-Bridge need it)"
    yield Finding("python", "ok" if ok else "fail", facts.python, "3.12", remedy)


def _torch(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    tested = facts.torch.split("+")[0] == _TESTED_TORCH
    level: Level = "ok" if tested else "warn" if release(facts.torch) >= (2, 11) else "fail"
    remedy = "" if level == "ok" else f"install torch=={_TESTED_TORCH}; other releases were not tested"
    yield Finding("torch", level, facts.torch, _TESTED_TORCH, remedy)
    if facts.gpus or facts.smi:
        yield _cuda(facts)


def _cuda(facts: Facts) -> Finding:
    driver = facts.smi[0].driver if facts.smi else "unknown"
    found = f"CUDA {facts.cuda or 'none'}, driver {driver}"
    if not facts.gpus:
        remedy = (
            "nvidia-smi lists GPUs that torch does not see: install a torch build with CUDA, a driver new enough for "
            "it, and look at CUDA_VISIBLE_DEVICES"
        )
        return Finding("cuda", "fail", found, "torch sees the GPUs", remedy)
    major = int((facts.cuda or "0").split(".")[0])
    oldest = _DRIVERS.get(major)
    number = int(driver.split(".")[0]) if driver.split(".")[0].isdigit() else None
    if oldest is None or number is None or number >= oldest:
        return Finding("cuda", "ok", found, f"driver {oldest} or newer" if oldest else "a driver that torch accepts")
    return Finding("cuda", "fail", found, f"driver {oldest} or newer", f"update the driver to {oldest} or newer")


def _gpus(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    count = len(facts.gpus)
    if not count:
        needed = wanted.need_gpu or bool(wanted.gpus)
        expected = f"{wanted.gpus} GPU(s)" if wanted.gpus else "a Hopper GPU"
        remedy = "real runs need a machine with GPUs; the demo and weftmoe's --smoke work without"
        yield Finding("gpus", "fail" if needed else "warn", "none: CPU only", expected, remedy)
        return
    if wanted.gpus and count < wanted.gpus:
        remedy = f"lower --gpus to {count}, or let CUDA_VISIBLE_DEVICES show more"
        yield Finding("gpus", "fail", str(count), str(wanted.gpus), remedy)
    else:
        yield Finding("gpus", "ok", str(count), str(wanted.gpus or "any number"))
    for gpu in facts.gpus[: wanted.gpus]:
        yield _gpu(gpu, wanted)
    if len({gpu.name for gpu in facts.gpus}) > 1:
        names = ", ".join(sorted({gpu.name for gpu in facts.gpus}))
        yield Finding("gpu models", "warn", names, "one model", "show equal GPUs only (CUDA_VISIBLE_DEVICES)")


def _gpu(gpu: Gpu, wanted: Wanted) -> Finding:
    name, found = f"gpu {gpu.index}", f"{gpu.name}, {gpu.total / GIB:.0f} GiB, {gpu.used / GIB:.1f} in use"
    if gpu.capability != (9, 0):
        found += f", capability {gpu.capability[0]}.{gpu.capability[1]}"
        level: Level = "fail" if wanted.variant == "fp8" else "warn"
        remedy = "use Hopper for variant fp8 (block-scaled FP8 GEMMs on the published bytes), or variant bf16"
        return Finding(name, level, found, "capability 9.0 (Hopper)", remedy)
    # A fresh context and the driver take half a GiB; more belongs to somebody else.
    if gpu.used > 2 * GIB:
        return Finding(name, "warn", found, "an idle GPU", "end what holds its memory, or show other GPUs")
    return Finding(name, "ok", found, "Hopper, idle")


def _smi(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    shown = {gpu.uuid.removeprefix("GPU-") for gpu in facts.gpus}
    rows = [row for row in facts.smi if not shown or row.uuid.removeprefix("GPU-") in shown]
    if any(row.mig for row in rows):
        remedy = "turn MIG off (nvidia-smi -mig 0): CUDA IPC and peer access need whole GPUs"
        yield Finding("mig", "fail", "enabled", "disabled", remedy)
    capped = [row for row in rows if row.power_limit and row.power_default and row.power_limit < row.power_default]
    if capped:
        found = f"{capped[0].power_limit:.0f} W of {capped[0].power_default:.0f} W on {len(capped)} GPU(s)"
        yield Finding("power", "warn", found, "the default limit", "nvidia-smi -pl; timings will be lower")
    clocks = {row.max_clock for row in rows if row.max_clock}
    if len(clocks) > 1:
        found = ", ".join(f"{clock:.0f} MHz" for clock in sorted(clocks))
        yield Finding("clocks", "warn", found, "one maximum", "reset locked clocks (nvidia-smi -rgc)")
    elif clocks and not capped:
        yield Finding("clocks", "ok", f"up to {clocks.pop():.0f} MHz, default power", "default clocks and power")


def _peers(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    if len(facts.gpus) < 2:
        return
    if facts.peers:
        pairs = ", ".join(f"{a}-{b}" for a, b in facts.peers[:4])
        remedy = "check the topology (nvidia-smi topo -m) and the container's devices; publishes go through host memory"
        yield Finding("peer access", "warn", f"impossible for {len(facts.peers)} pair(s): {pairs}", "all", remedy)
        return
    links = "NVLink unknown" if facts.nvlinks is None else f"{facts.nvlinks} NVLinks"
    level: Level = "ok" if facts.nvlinks is None or facts.nvlinks else "warn"
    remedy = "" if level == "ok" else "without NVLink expert exchange and publishes run over PCIe"
    yield Finding("peer access", level, f"all pairs, {links}", "all pairs over NVLink", remedy)


def _sharing(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    if not facts.gpus:
        return
    if facts.ipc is None:
        yield Finding("cuda ipc", "ok", "memory can be exported", "exportable")
    else:
        yield Finding("cuda ipc", "warn", facts.ipc, "exportable", "publishes use packed buffers, or host memory")
    if facts.shared_memory is None:
        yield Finding("one allocation for both", "ok", "possible", "possible")
    else:
        remedy = "leave publish.experts=copy"
        yield Finding("one allocation for both", "warn", facts.shared_memory, "possible", remedy)


def _packages(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    others = {"all": (), "trainer": _ENGINE, "engine": _TRAINER}[wanted.role]
    for name, (fits, words) in facts.adapters.items():
        if name in others:
            continue
        if fits:
            yield Finding(name, "ok", words, "a supported release")
            continue
        # TransformerEngine is for grouped experts on a GPU; without one it cannot even be built.
        if name == "transformer-engine" and not facts.gpus:
            yield Finding(name, "ok", "none, and none is needed without a GPU", "a supported release on a GPU")
            continue
        yield Finding(name, "fail", words, "a supported release", "see docs/reference/versions.md")
    for name, tested in _TESTED.items():
        if name in others:
            continue
        found = facts.packages.get(name)
        level = "ok" if found == tested else "warn"
        remedy = "" if level == "ok" else f"install {name}=={tested}; others were not tested"
        yield Finding(name, level, found or "not installed", tested, remedy)
    yield from _optional(facts, wanted)


def _optional(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    if facts.gpus and wanted.role != "trainer":
        found = facts.packages.get("sglang-kernel")
        remedy = f"pip install --no-deps sglang-kernel=={_KERNELS}: SGLang's kernels, built for torch {_TESTED_TORCH}"
        level: Level = "ok" if found == _KERNELS else "warn"
        yield Finding("sglang-kernel", level, found or "not installed", _KERNELS, "" if level == "ok" else remedy)
    for name, (command, use) in _DATA.items() if wanted.role != "engine" else ():
        found = facts.packages.get(name)
        yield Finding(name, "ok" if found else "warn", found or "not installed", use, "" if found else command)
    if wanted.variant == "baseline" and facts.gpus:
        found = facts.packages.get("deep-ep")
        remedy = "" if found else "install DeepEP for this torch and CUDA, or add train.dispatcher=alltoall"
        yield Finding("deep-ep", "ok" if found else "warn", found or "not installed", "for the flex dispatcher", remedy)


def _delta_nets(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    """Megatron-core has no kernels of its own for them; SGLang brings its own."""
    if not wanted.delta_nets or not facts.gpus or wanted.role == "engine":
        return
    from weftpub_adapters.megatron import wrong_gradient  # which loads much that other findings do without

    subject, needed = "flash-linear-attention", "for gated delta nets"
    found = facts.packages.get(subject)
    if not found:
        remedy = f"pip install {subject}: Megatron-core computes Qwen3.5's delta nets with it"
        yield Finding(subject, "fail", "not installed", needed, remedy)
        return
    triton, tilelang = facts.packages.get("triton"), facts.packages.get("tilelang")
    remedies = [wrong_gradient(gpu.capability, triton, tilelang) for gpu in facts.gpus]
    remedy = next((text for text in remedies if text), "")
    yield Finding(subject, "warn" if remedy else "ok", found, needed, remedy)


def _cudnn(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    """TransformerEngine's library is what would take parts of both."""
    if not facts.cudnns or not facts.adapters["transformer-engine"][0]:
        return
    own, *others = facts.cudnns
    if all(other.version == own.version for other in others):
        yield Finding("cudnn", "ok", own.version, "one release")
        return
    found = f"{own.version} of torch in {own.folder}, and " + ", ".join(f"{o.version} in {o.folder}" for o in others)
    remedy = (
        f"export LD_LIBRARY_PATH={own.folder}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}, or remove the other: a process "
        "that has used torch's cannot load TransformerEngine, which takes what is missing from the other; and one that "
        "has loaded TransformerEngine first runs on the other"
    )
    yield Finding("cudnn", "warn", found, "one release", remedy)


def _limits(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    limits = facts.limits
    if limits.memlock is None:
        yield Finding("locked memory", "ok", "unlimited", "unlimited")
    else:
        remedy = "ulimit -l unlimited (docker: --ulimit memlock=-1): InfiniBand registers pinned memory against it"
        level: Level = "fail" if wanted.nodes > 1 and facts.infiniband else "warn"
        yield Finding("locked memory", level, f"{limits.memlock / GIB:.2f} GiB", "unlimited", remedy)
    enough = limits.files is None or limits.files >= 65536
    files = "unlimited" if limits.files is None else str(limits.files)
    remedy = "" if enough else "ulimit -n 65536: torchrun, SGLang and NCCL open many"
    low: Level = "fail" if limits.files is not None and limits.files < 1024 else "warn"
    yield Finding("open files", "ok" if enough else low, files, "65536", remedy)
    if limits.shm is not None:
        small = limits.shm < GIB
        remedy = "docker: --shm-size=16g or --ipc=host; NCCL and the host transport need it" if small else ""
        yield Finding("/dev/shm", "warn" if small else "ok", f"{limits.shm / GIB:.1f} GiB", "1 GiB", remedy)
    if limits.ptrace_scope is not None and limits.ptrace_scope >= 2:
        remedy = "sysctl kernel.yama.ptrace_scope=1 lets processes of one user share CUDA memory by descriptor"
        yield Finding("ptrace scope", "warn", str(limits.ptrace_scope), "0 or 1", remedy)


def _memory(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    found = f"{facts.ram / GIB:.0f} GiB, {facts.ram_free / GIB:.0f} free"
    if not wanted.host_bytes:
        yield Finding("host memory", "ok", found, "see `weftpub plan`")
        return
    expected = f"{wanted.host_bytes / GIB:.0f} GiB"
    if facts.ram_free >= wanted.host_bytes * 1.1:
        yield Finding("host memory", "ok", found, expected)
    else:
        level: Level = "warn" if facts.ram_free >= wanted.host_bytes else "fail"
        remedy = "masters and optimizer state are pinned there: use Muon instead of AdamW, more nodes, or more memory"
        yield Finding("host memory", level, found, expected, remedy)


def _disk(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    folder, free, writable = facts.out
    if not writable:
        yield Finding("output", "fail", f"{folder} cannot be written", "a writable folder", "choose another --out")
        return
    enough = free >= wanted.disk_bytes
    remedy = "" if enough else "choose another --out, or checkpoint.save=off"
    found = f"{folder}: {free / GIB:.0f} GiB free"
    yield Finding("output", "ok" if enough else "warn", found, f"{wanted.disk_bytes / GIB:.0f} GiB", remedy)


def _port(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    if facts.port is None:
        return
    number, free = facts.port
    remedy = "" if free else "another process listens there: end it, or use another port"
    yield Finding(f"port {number}", "ok" if free else "fail", "free" if free else "taken", "free", remedy)
