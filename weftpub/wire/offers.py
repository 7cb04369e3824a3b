"""What a sender says about memory it offers: plain data, one model per transport.

An offer names one allocation and how to open it. It carries no object and no pickle; a CUDA IPC handle is 64 raw bytes
that only the driver reads. The allocation's name is unique on its host: a receiver may keep an allocation open under
that name while `keep` says that the sender leaves it in place.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["CudaIpcOffer", "InProcessOffer", "Offer", "SharedMemoryOffer", "SharedStoreOffer"]

_PLAIN = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_bytes="base64", val_json_bytes="base64")


class _OfferBase(BaseModel):
    """Fields that every offer has.

    Attributes:
        allocation: name of the allocation, unique on the host.
        nbytes: its size.
        keep: whether it stays allocated at the same place until the sender says goodbye, so that the receiver may keep
            it open.
    """

    model_config = _PLAIN

    allocation: str = Field(min_length=1, max_length=200)
    nbytes: int = Field(ge=1)
    keep: bool


class InProcessOffer(_OfferBase):
    """Memory of this very process, found by its name in a table of the process `pid`."""

    transport: Literal["inprocess"] = "inprocess"
    pid: int


class SharedMemoryOffer(_OfferBase):
    """A file in the host's shared memory folder, owner-only."""

    transport: Literal["shared_memory"] = "shared_memory"
    name: str = Field(pattern=r"^weftpub-[A-Za-z0-9._-]{1,200}$")


class CudaIpcOffer(_OfferBase):
    """A CUDA allocation of another process on this host.

    Attributes:
        gpu: UUID of the GPU that holds it.
        handle: the driver's 64-byte handle of the whole allocation.
    """

    transport: Literal["cuda_ipc"] = "cuda_ipc"
    gpu: str = Field(min_length=1, max_length=100)
    handle: bytes = Field(min_length=64, max_length=64)


class SharedStoreOffer(_OfferBase):
    """Memory that both processes have joined (`weftpub.memory.SharedAllocation`), known to both by its id.

    Attributes:
        gpu: UUID of the GPU that holds it, or "cpu".
    """

    transport: Literal["shared_store"] = "shared_store"
    gpu: str = Field(min_length=1, max_length=100)


Offer = Annotated[
    InProcessOffer | SharedMemoryOffer | CudaIpcOffer | SharedStoreOffer, Field(discriminator="transport")
]
