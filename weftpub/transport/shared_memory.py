"""Host memory shared between processes of one user: a file in the shared memory folder, packed into by the trainer and
read by engines.

Names and leaks. A file's name carries user, run id, version and a nonce, and is removed as soon as every receiver of
the publish has opened it, at the latest when the publish ends; the memory itself goes with the last mapping. What a
crash leaves: the creator holds a lock on its open file, so anybody can tell an abandoned file from a used one, and
every sender removes its user's abandoned files when it starts. A receiver that loses its publisher removes the names
that it opened.

On a machine with CUDA both sides register the memory with the driver, so that copies to and from the GPU run at full
speed.
"""

import fcntl
import itertools
import os
import re
import secrets
from pathlib import Path
from typing import Any, cast

import torch

from weftpub.errors import TransportError
from weftpub.transport.base import SendBuffer, TransportKind
from weftpub.wire.offers import Offer, SharedMemoryOffer

__all__ = ["SharedMemoryReceive", "SharedMemorySend", "sweep_abandoned"]

FOLDER = Path("/dev/shm")
_PREFIX = "weftpub-"


def sweep_abandoned(folder: Path = FOLDER) -> list[str]:
    """Remove files of this user whose creator is gone; returns their names."""
    return [path.name for path in folder.glob(f"{_PREFIX}{os.getuid()}-*") if _remove_if_abandoned(path)]


def _remove_if_abandoned(path: Path) -> bool:
    """Remove a file whose creator no longer holds its lock; whether it was removed."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False  # its creator is alive, and will remove it
    finally:
        os.close(handle)
    return True


class SharedMemorySend:
    """Sender's side.

    Args:
        run_id, version: part of the names, for whoever looks into the folder.
        pin: register the memory with CUDA.
        folder: where the files go; all processes of a publish must see the same one.
    """

    kind: TransportKind = "shared_memory"

    def __init__(self, run_id: str, version: int, *, pin: bool, folder: Path = FOLDER) -> None:
        self._stem = (
            f"{_PREFIX}{os.getuid()}-{re.sub('[^A-Za-z0-9._-]', '_', run_id)}-v{version}-{secrets.token_hex(6)}"
        )
        self._folder = folder
        self._pin = pin
        self._numbers = itertools.count()
        self._segments: dict[str, tuple[torch.Tensor, int]] = {}
        sweep_abandoned(folder)

    def allocate(self, nbytes: int) -> SendBuffer:
        """Create a file of `nbytes`, owner-only, with its memory reserved, so that a full folder is an error here and
        not a crash later.
        """
        name, handle = self._create()
        path = self._folder / name
        try:
            os.posix_fallocate(handle, 0, nbytes)
            tensor = _map(handle, nbytes, self._pin)
        except OSError as error:
            os.close(handle)
            path.unlink(missing_ok=True)
            raise TransportError(
                f"{nbytes} bytes of shared memory do not fit into {self._folder} ({error.strerror}); give it more room "
                "(docker run --shm-size) or set a smaller max_staging_bytes"
            ) from error
        self._segments[name] = (tensor, handle)
        return SendBuffer(tensor, SharedMemoryOffer(allocation=name, nbytes=nbytes, keep=True, name=name))

    def _create(self) -> tuple[str, int]:
        """A new empty file, locked.

        A sweeper that sees it before the lock may take it for abandoned: then make another.
        """
        while True:
            name = f"{self._stem}-{next(self._numbers)}"
            path = self._folder / name
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise TransportError(f"shared memory {path} cannot be created: {error.strerror}") from error
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                return name, handle
            os.close(handle)

    def export(self, tensor: torch.Tensor, keep: bool) -> tuple[Offer, int]:
        """Other memory than its own cannot be shown to another process by name."""
        raise TransportError(f"a tensor on {tensor.device} is not in shared memory; it is packed instead")

    def everyone_opened(self, buffer: SendBuffer) -> None:
        """Remove the file's name; the memory stays."""
        (self._folder / buffer.offer.allocation).unlink(missing_ok=True)

    def free(self, buffer: SendBuffer) -> None:
        """Remove the name and unmap the memory."""
        self._free(buffer.offer.allocation)

    def end_publish(self) -> None:
        """Free every buffer: names and memory live for one publish."""
        self.close()

    def close(self) -> None:
        """Free every buffer."""
        for name in tuple(self._segments):
            self._free(name)

    def _free(self, name: str) -> None:
        segment = self._segments.pop(name, None)
        if segment is None:
            return
        (self._folder / name).unlink(missing_ok=True)
        tensor, handle = segment
        _unpin(tensor, self._pin)
        os.close(handle)


class SharedMemoryReceive:
    """Receiver's side.

    Args:
        pin: register the memory with CUDA.
        folder: the sender's folder.
    """

    kind: TransportKind = "shared_memory"

    def __init__(self, *, pin: bool, folder: Path = FOLDER) -> None:
        self._pin = pin
        self._folder = folder
        self._open: dict[str, torch.Tensor] = {}

    def open(self, offer: Offer) -> torch.Tensor:
        """Map the file, refusing one of another user or of another size."""
        if not isinstance(offer, SharedMemoryOffer):
            raise TransportError(
                f"allocation {offer.allocation} is offered over {offer.transport}, not over shared memory"
            )
        kept = self._open.get(offer.name)
        if kept is not None:
            return kept
        path = self._folder / offer.name
        try:
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(
                f"shared memory {path} cannot be opened ({error.strerror}); do trainer and engine run as one user and "
                f"see the same {self._folder}?"
            ) from error
        try:
            facts = os.fstat(handle)
            if facts.st_uid != os.getuid() or facts.st_size != offer.nbytes:
                raise TransportError(
                    f"shared memory {path} belongs to user {facts.st_uid} and has {facts.st_size} bytes; expected "
                    f"user {os.getuid()} "
                    f"and {offer.nbytes} bytes"
                )
            tensor = self._open[offer.name] = _map(handle, offer.nbytes, self._pin)
        finally:
            os.close(handle)
        return tensor

    def done(self, offer: Offer) -> None:
        """Unmap, unless the sender keeps the file for the rest of the publish."""
        if not offer.keep:
            self.drop((offer.allocation,))

    def drop(self, allocations: tuple[str, ...]) -> None:
        """Unmap the named files."""
        for name in allocations:
            tensor = self._open.pop(name, None)
            if tensor is not None:
                _unpin(tensor, self._pin)

    def end_publish(self) -> None:
        """Unmap everything, and remove names that a dead sender left."""
        for name in tuple(self._open):
            _remove_if_abandoned(self._folder / name)
        self.drop(tuple(self._open))

    def close(self) -> None:
        """As at the end of a publish."""
        self.end_publish()


def _map(handle: int, nbytes: int, pin: bool) -> torch.Tensor:
    """Map an open file; the tensor's storage unmaps it when it goes."""
    storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{handle}", shared=True, nbytes=nbytes)
    tensor = torch.empty(0, dtype=torch.uint8).set_(cast(torch.UntypedStorage, storage))
    if pin:
        status = int(_cudart().cudaHostRegister(tensor.data_ptr(), nbytes, 0))
        if status != 0:
            raise TransportError(
                f"CUDA could not page-lock {nbytes} bytes of shared memory (cudaHostRegister gave {status}); "
                "raise the memlock limit, or set a smaller max_staging_bytes"
            )
    return tensor


def _unpin(tensor: torch.Tensor, pinned: bool) -> None:
    if pinned:
        _cudart().cudaHostUnregister(tensor.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()
