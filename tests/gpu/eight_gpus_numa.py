"""Which NUMA node a GPU hangs on, and on which nodes the pages of a buffer lie. No torch: it is used before its import.

A machine may not tell: a virtual one has one node, or gives its GPUs none.
"""

import ctypes
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

__all__ = ["bind_to_node", "cpus_of", "gpu_nodes", "node_count", "page_nodes"]

_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")
_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}  # numbers of the system call, which asks where pages are, too
_SAMPLES = 256
_RANGE = re.compile(r"^([0-9a-f]+) .*")


def node_count(root: Path = _NODES) -> int:
    """NUMA nodes of this machine; one where the kernel does not say."""
    return max(1, len(list(root.glob("node[0-9]*"))))


def gpu_nodes(pci: Path = _PCI) -> list[int | None]:
    """NUMA node of every GPU in the order of nvidia-smi; None where the machine does not tell."""
    query = ["nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []
    return [_node_of(pci / bus_id.lower()[-12:]) for bus_id in found]  # nvidia-smi writes the domain with eight digits


def cpus_of(node: int, root: Path = _NODES) -> set[int]:
    """CPUs of a node."""
    cpus: set[int] = set()
    for part in (root / f"node{node}" / "cpulist").read_text().strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def bind_to_node(node: int | None) -> str:
    """Keep this process on a node's CPUs, so that its pages land there; says what was done."""
    allowed = os.sched_getaffinity(0)
    if node is None:
        return f"not bound, {len(allowed)} CPUs: the GPU's NUMA node is not known"
    wanted = cpus_of(node) & allowed
    if not wanted:
        return f"not bound: this process may use no CPU of node {node}"
    os.sched_setaffinity(0, wanted)
    return f"bound to the {len(wanted)} CPUs of node {node}"


def page_nodes(address: int, nbytes: int) -> dict[int, int] | None:
    """NUMA nodes of a sample of a buffer's pages: node to count. None if the kernel does not let it be known."""
    page = os.sysconf("SC_PAGE_SIZE")
    first, count = address // page, max(1, -(-nbytes // page))
    step = max(1, count // _SAMPLES)
    return _asked([page * (first + number) for number in range(0, count, step)]) or _mapped(address)


def _node_of(device: Path) -> int | None:
    try:
        node = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _asked(pages: list[int]) -> dict[int, int] | None:
    """By the system call that moves pages, given no targets. A container may refuse it."""
    number = _MOVE_PAGES.get(os.uname().machine)
    if number is None:
        return None
    addresses = (ctypes.c_void_p * len(pages))(*pages)
    status = (ctypes.c_int * len(pages))()
    failed = ctypes.CDLL(None).syscall(number, 0, ctypes.c_ulong(len(pages)), addresses, None, status, 0)
    found = Counter(node for node in status if node >= 0)
    return None if failed or not found else dict(found)


def _mapped(address: int) -> dict[int, int] | None:
    """By the kernel's account of the mapping that holds the address."""
    best: str | None = None
    try:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        match = _RANGE.match(line)
        if match and int(match[1], 16) <= address:
            best = line
    found = {int(node): int(count) for node, count in re.findall(r"\bN(\d+)=(\d+)", best or "")}
    return found or None
