"""Whether a process of this machine could get parts of two cuDNNs.

Torch loads the parts of the cuDNN beside it, as they are used. TransformerEngine's library names the parts that it
needs and leaves it to the dynamic loader where they are: a part that is loaded is taken, any other comes from the
loader's own path. Of two releases, parts do not fit together.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cudnn", "find_cudnns", "folder_and_major"]

# In a process without torch. The part is one that both take; the number is that of cudnnGetVersion, 91900 for 9.19.0.
_PROBE = """
import ctypes, sys
number = ctypes.CDLL(sys.argv[1]).cudnnGetVersion()
paths = [line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/libcudnn_graph.so" in line]
print(number, paths[0])
"""
_SHIM = re.compile(r"(/.*)/libcudnn\.so\.(\d+)[.\d]*$")


@dataclass(frozen=True)
class Cudnn:
    """One cuDNN.

    Attributes:
        version: such as "9.19.0".
        folder: where its parts lie.
    """

    version: str
    folder: str


def find_cudnns() -> tuple[Cudnn, ...]:
    """The cuDNN of this process's torch, and the one on the loader's path if that is another; empty if torch has none.

    LD_LIBRARY_PATH counts; both are asked for their version in processes of their own.
    """
    place = folder_and_major(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    if place is None:
        return ()
    folder, major = place
    name = f"libcudnn_graph.so.{major}"
    own, other = _probe(f"{folder}/{name}"), _probe(name)
    if own is None:
        return ()
    return (own,) if other is None or other == own else (own, other)


def folder_and_major(maps: Iterable[str]) -> tuple[str, str] | None:
    """Where a process has its cuDNN from, and its major release, by the lines of /proc/PID/maps; None without one."""
    for line in maps:
        match = _SHIM.search(line)
        if match is not None:
            return match.group(1), match.group(2)
    return None


def _probe(library: str) -> Cudnn | None:
    """The cuDNN that a fresh process gets under this name; None if it gets none."""
    command = [sys.executable, "-I", "-c", _PROBE, library]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    number, _, path = done.stdout.strip().partition(" ")
    major, rest = divmod(int(number), 10000)
    return Cudnn(f"{major}.{rest // 100}.{rest % 100}", str(Path(path).resolve().parent))
