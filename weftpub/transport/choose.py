"""Which transport connects two processes: the best one that their facts allow, with the reasons against the better
ones.

The facts (same process, same kernel, same user, GPU visible) only rule out; whether a transport works is found by a
probe, one small buffer that the receiver opens before the first publish. A transport that fails there is passed over,
and the report says why.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from weftpub.errors import TransportError
from weftpub.transport.base import ReceiveTransport, SendTransport, TransportKind
from weftpub.transport.cuda_ipc import CudaIpcReceive, CudaIpcSend
from weftpub.transport.inprocess import InProcessReceive, InProcessSend
from weftpub.transport.shared_memory import SharedMemoryReceive, SharedMemorySend
from weftpub.transport.shared_store import SharedStoreReceive
from weftpub.wire.identity import Identity, device_index, gpu_uuid

__all__ = ["Candidates", "TransportWish", "find_candidates", "open_receive_transports", "open_send_transport"]

TransportWish = Literal["auto", "inprocess", "shared_memory", "cuda_ipc"]


@dataclass
class Candidates:
    """Transports to try, best first, and why better ones are left out."""

    kinds: list[TransportKind] = field(default_factory=list[TransportKind])
    obstacles: dict[TransportKind, str] = field(default_factory=dict[TransportKind, str])


def find_candidates(
    here: Identity, peer: Identity, device: torch.device, offered: tuple[str, ...], wish: TransportWish
) -> Candidates:
    """Transports that can connect a sender with a receiver.

    Args:
        here, peer: the two processes.
        device: where the sender's tensors are.
        offered: kinds that the receiver has.
        wish: "auto", or the only kind to use.

    Raises:
        TransportError: none is left, with all reasons.
    """
    found = Candidates()
    for kind in ("inprocess", "cuda_ipc", "shared_memory"):
        if wish not in ("auto", kind):
            continue
        obstacle = _obstacle(kind, here, peer, device)
        if obstacle is None and kind not in offered:
            obstacle = "the receiver does not have it"
        if obstacle is None:
            found.kinds.append(kind)
        else:
            found.obstacles[kind] = obstacle
    if not found.kinds:
        reasons = "; ".join(f"{kind}: {obstacle}" for kind, obstacle in found.obstacles.items())
        raise TransportError(f"no transport reaches {peer} from {here}: {reasons}")
    return found


def _obstacle(kind: TransportKind, here: Identity, peer: Identity, device: torch.device) -> str | None:
    if kind == "inprocess":
        same = here.same_host(peer) and (here.pid, here.started, here.pid_space) == (
            peer.pid,
            peer.started,
            peer.pid_space,
        )
        return None if same else "trainer and engine are two processes"
    if not here.same_host(peer):
        return f"trainer and engine run on two hosts, {here.host} and {peer.host}"
    if here.uid != peer.uid:
        return f"trainer and engine run as two users, {here.uid} and {peer.uid}"
    if kind == "shared_memory":
        return None
    if device.type != "cuda":
        return "the trainer's tensors are on the CPU"
    if (here.pid, here.started) == (peer.pid, peer.started) and here.pid_space == peer.pid_space:
        return "CUDA does not open a handle in the process that exported it"
    gpu = gpu_uuid(device.index)
    if gpu not in peer.gpus:
        return f"the engine cannot see {gpu}; it sees {', '.join(peer.gpus) or 'no GPU'}"
    return None


def open_send_transport(kind: TransportKind, device: torch.device, run_id: str, version: int) -> SendTransport:
    """The sender's side of a transport."""
    if kind == "inprocess":
        return InProcessSend(device)
    if kind == "cuda_ipc":
        return CudaIpcSend(device)
    return SharedMemorySend(run_id, version, pin=device.type == "cuda")


def open_receive_transports(device: str) -> Mapping[TransportKind, ReceiveTransport]:
    """All transports that a receiver can offer whose parameters are on `device`: "cpu", or the UUID of a GPU."""
    transports: dict[TransportKind, ReceiveTransport] = {
        "inprocess": InProcessReceive(),
        "shared_memory": SharedMemoryReceive(pin=device != "cpu"),
        "shared_store": SharedStoreReceive(),
    }
    if device != "cpu":
        index = device_index(device)
        transports["cuda_ipc"] = CudaIpcReceive(None if index is None else torch.device("cuda", index))
    return transports
