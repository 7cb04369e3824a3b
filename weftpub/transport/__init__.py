"""Transports: how one process shows memory to another. None where both map it; in process, host shared memory, IPC."""

from weftpub.transport.base import ReceiveTransport, SendBuffer, SendTransport, TransportKind
from weftpub.transport.choose import TransportWish, find_candidates, open_receive_transports, open_send_transport
from weftpub.transport.cuda_ipc import CudaIpcReceive, CudaIpcSend, export_obstacle
from weftpub.transport.inprocess import InProcessReceive, InProcessSend
from weftpub.transport.regions import CopyTable, RegionTable
from weftpub.transport.shared_memory import SharedMemoryReceive, SharedMemorySend, sweep_abandoned
from weftpub.transport.shared_store import SharedStoreReceive, offer_of, shared_exports, source_places
from weftpub.transport.tensors import FlatTensors, enqueued, narrow_view, settle, wait_for_devices

__all__ = [
    "CopyTable",
    "CudaIpcReceive",
    "CudaIpcSend",
    "FlatTensors",
    "InProcessReceive",
    "InProcessSend",
    "ReceiveTransport",
    "RegionTable",
    "SendBuffer",
    "SendTransport",
    "SharedMemoryReceive",
    "SharedMemorySend",
    "SharedStoreReceive",
    "TransportKind",
    "TransportWish",
    "enqueued",
    "export_obstacle",
    "find_candidates",
    "narrow_view",
    "offer_of",
    "open_receive_transports",
    "open_send_transport",
    "settle",
    "shared_exports",
    "source_places",
    "sweep_abandoned",
    "wait_for_devices",
]
