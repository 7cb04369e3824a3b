"""What the doctor looks at, gathered once as plain data. Judging it is `rules`' work, which needs no machine.

Nothing here changes the machine. A thing that cannot be asked (no nvidia-smi, no /proc) is None, and judged as unknown.
"""

import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from weftpub.errors import WeftpubError
from weftpub.memory import sharing_obstacle
from weftpub.packages import installed
from weftpub.transport.cuda_ipc import export_obstacle
from weftpub_adapters.doctor.cudnn import Cudnn, find_cudnns

__all__ = ["Facts", "Gpu", "Limits", "Smi", "gather", "host_memory", "read_smi"]

PACKAGES = (
    "triton",
    "transformers",
    "emerging-optimizers",
    "megatron-bridge",
    "torch-memory-saver",
    "sglang-kernel",
    "deep-ep",
    "flash-linear-attention",
    "tilelang",
    "math-verify",
    "pyarrow",
)
_SMI_FIELDS = "uuid,driver_version,mig.mode.current,clocks.max.sm,power.limit,power.default_limit"


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it; bytes. `used` are bytes that other processes hold."""

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    total: int
    used: int


@dataclass(frozen=True)
class Smi:
    """One GPU as nvidia-smi sees it; MHz and watts, None where it does not say."""

    uuid: str
    driver: str
    mig: bool
    max_clock: float | None
    power_limit: float | None
    power_default: float | None


@dataclass(frozen=True)
class Limits:
    """Limits of this process; None is unlimited (or unknown for `shm`, `ptrace_scope`)."""

    memlock: int | None
    files: int | None
    shm: int | None
    ptrace_scope: int | None


@dataclass(frozen=True)
class Facts:
    """The machine, the packages and the environment, as found.

    Attributes:
        adapters: per adapter, the version that it accepts or the sentence with which it refuses.
        packages: versions of other packages; None where missing.
        ram, ram_free: bytes, the container's limit included.
        out: nearest existing folder of the output directory, its free bytes and whether it can be written.
        peers: pairs of GPU indices that cannot access each other.
        nvlinks: active NVLinks of GPU 0; None if unknown.
        infiniband: whether NCCL would find an InfiniBand or RoCE device.
        ipc, shared_memory: why CUDA IPC of torch's memory, and one allocation for two processes, are impossible.
        cudnns: torch's own, then the one that the dynamic loader would find, if that is another.
        port: the port that was asked about, and whether it can be had.
    """

    python: str
    torch: str
    cuda: str | None
    gpus: tuple[Gpu, ...]
    smi: tuple[Smi, ...]
    adapters: Mapping[str, tuple[bool, str]]
    packages: Mapping[str, str | None]
    limits: Limits
    ram: int
    ram_free: int
    out: tuple[str, int, bool]
    peers: tuple[tuple[int, int], ...] = ()
    nvlinks: int | None = None
    infiniband: bool = False
    ipc: str | None = None
    shared_memory: str | None = None
    cudnns: tuple[Cudnn, ...] = ()
    port: tuple[int, bool] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def gather(out: Path, environment: Mapping[str, str], port: int | None = None) -> Facts:
    """Look at this machine.

    Args:
        out: where a run would write; it need not exist.
        environment: variables of the run.
        port: a TCP port that the run would listen on.
    """
    gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count())) if torch.cuda.is_available() else ()
    ram, free = host_memory()
    return Facts(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        gpus=gpus,
        smi=read_smi(_run("nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits")),
        adapters=_adapters(),
        packages={name: installed(name) for name in PACKAGES},
        limits=Limits(
            _limit(resource.RLIMIT_MEMLOCK),
            _limit(resource.RLIMIT_NOFILE),
            shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
            _number(Path("/proc/sys/kernel/yama/ptrace_scope")),
        ),
        ram=ram,
        ram_free=free,
        out=_place(out),
        peers=tuple(
            (a, b)
            for a in range(len(gpus))
            for b in range(a + 1, len(gpus))
            if not torch.cuda.can_device_access_peer(a, b)
        ),
        nvlinks=_nvlinks() if len(gpus) > 1 else None,
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        ipc=export_obstacle(torch.empty(1 << 20, dtype=torch.uint8, device="cuda")) if gpus else None,
        shared_memory=sharing_obstacle("cuda") if gpus else None,
        cudnns=find_cudnns() if gpus else (),
        port=None if port is None else (port, _can_listen(port)),
        environment=dict(environment),
    )


def read_smi(text: str | None) -> tuple[Smi, ...]:
    """Rows of nvidia-smi's CSV answer; lines that are not rows (such as an error) are left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines()]
    return tuple(
        Smi(row[0], row[1], row[2] == "Enabled", _float(row[3]), _float(row[4]), _float(row[5]))
        for row in rows
        if len(row) == len(_SMI_FIELDS.split(","))
    )


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(index, properties.name, str(properties.uuid), (properties.major, properties.minor), total, total - free)


def _adapters() -> dict[str, tuple[bool, str]]:
    from weftpub_adapters import awex, megatron, sglang
    from weftpub_adapters.te import support as te

    checks = {
        "megatron-core": megatron.require_supported,
        "transformer-engine": te.require_supported,
        "sglang": sglang.require_supported,
        "awex": awex.require_supported,
    }
    results: dict[str, tuple[bool, str]] = {}
    for name, check in checks.items():
        try:
            results[name] = (True, check())
        except WeftpubError as error:
            results[name] = (False, str(error))
    return results


def _run(*command: str) -> str | None:
    """Output of a tool; None where it is missing, fails or does not end."""
    tool = shutil.which(command[0])
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, *command[1:]], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _nvlinks() -> int | None:
    answer = _run("nvidia-smi", "nvlink", "--status", "-i", "0")
    return None if answer is None else sum("GB/s" in line for line in answer.splitlines())


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def host_memory() -> tuple[int, int]:
    """Bytes of host memory and of those free, within the container's limit."""
    fields: dict[str, int] = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    total, free = fields["MemTotal"], fields["MemAvailable"]
    most = _number(Path("/sys/fs/cgroup/memory.max"))
    if most is not None:
        used = (_number(Path("/sys/fs/cgroup/memory.current")) or 0) - _reclaimable()
        total, free = min(total, most), min(free, max(0, most - used))
    return total, free


def _reclaimable() -> int:
    """Bytes of cached files in the container's account, which give way to whoever needs memory."""
    try:
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _place(out: Path) -> tuple[str, int, bool]:
    folder = out.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            writable = True
    except OSError:
        writable = False
    return str(folder), shutil.disk_usage(folder).free, writable and os.access(folder, os.X_OK)


def _can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
