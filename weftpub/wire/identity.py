"""Who is speaking: host, process, user and visible GPUs, so that errors name peers and transports are chosen by facts.

GPUs are known by UUID. An index means nothing to another process: CUDA_VISIBLE_DEVICES may list, reorder or hide
devices in each of them.
"""

import os
import socket
from functools import cache
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field

from weftpub.errors import ConfigError

__all__ = [
    "Identity",
    "device_index",
    "gpu_uuid",
    "local_identity",
    "process_alive",
    "process_ended",
    "process_identity",
]


class Identity(BaseModel):
    """One process.

    Attributes:
        host: host name, for messages.
        boot: id of the running kernel: equal for processes that share a kernel.
        pid_space: id of the process namespace; process ids mean the same only within one.
        pid, uid: process and user id.
        started: when the process started, in clock ticks of its kernel: tells a process from a later one with its id.
        gpus: UUIDs of the GPUs that the process can use.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(max_length=300)
    boot: str = Field(max_length=100)
    pid_space: str = Field(max_length=100)
    pid: int
    started: int
    uid: int
    gpus: tuple[str, ...] = ()

    def same_host(self, other: "Identity") -> bool:
        """Whether both processes run on one kernel."""
        return bool(self.boot) and self.boot == other.boot

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"


@cache
def gpu_uuid(index: int) -> str:
    """UUID of the CUDA device that this process calls `index`.

    Raises:
        ConfigError: the device is a MIG slice, whose memory CUDA IPC cannot share.
    """
    properties = torch.cuda.get_device_properties(index)
    if " MIG " in f" {properties.name} ":
        raise ConfigError(f"cuda:{index} is a MIG slice ({properties.name}); run trainer and engine on whole GPUs")
    return f"GPU-{str(properties.uuid).removeprefix('GPU-')}"


def device_index(uuid: str) -> int | None:
    """The index by which this process knows the GPU with `uuid`, None if it cannot see it."""
    if not torch.cuda.is_available():
        return None
    return next((index for index in range(torch.cuda.device_count()) if gpu_uuid(index) == uuid), None)


def local_identity() -> Identity:
    """This process."""
    gpus = tuple(gpu_uuid(index) for index in range(torch.cuda.device_count())) if torch.cuda.is_available() else ()
    return process_identity().model_copy(update={"gpus": gpus})


def process_identity() -> Identity:
    """This process without its GPUs: asks no driver."""
    return Identity(
        host=socket.gethostname(),
        boot=_read("/proc/sys/kernel/random/boot_id"),
        pid_space=_link("/proc/self/ns/pid"),
        pid=os.getpid(),
        started=_process(os.getpid())[1],
        uid=os.getuid(),
    )


def process_alive(peer: Identity, here: Identity) -> bool:
    """Whether the peer's process exists, as far as this process can tell: True for processes of other hosts and
    namespaces.

    One that was killed exists until its last thread is gone: until then the kernel has not closed its files, so its
    work on a GPU may go on and write to memory that others map.
    """
    if not here.same_host(peer) or not here.pid_space or here.pid_space != peer.pid_space:
        return True
    try:
        state, started, threads = _process(peer.pid)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return started == peer.started and not _reapable(state, threads)


def process_ended(pid: int) -> bool:
    """Whether nothing is left of the process of this id in this namespace, or only what waits to be reaped; False if
    that cannot be told (a `pid` of 0 is of another namespace).
    """
    if pid <= 0:
        return False
    try:
        state, _, threads = _process(pid)
    except OSError as error:
        return isinstance(error, FileNotFoundError | ProcessLookupError)
    return _reapable(state, threads)


def _reapable(state: str, threads: int) -> bool:
    """Whether a process only waits to be reaped: a zombie, unless it is the first of several threads."""
    return state in ("Z", "X") and threads <= 1


def _process(pid: int) -> tuple[str, int, int]:
    """State letter of a process' first thread, its start time, and how many threads it has.

    Its command may hold spaces and parentheses; both come after the last one.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19]), int(fields[17])


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
