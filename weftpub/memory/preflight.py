"""Can this process share memory on this device at all? Tried for real, on the smallest amount, before anything is built
on it: what drivers and containers promise and what they do are two things.
"""

import os
import socket
from pathlib import Path

import torch

from weftpub.channel.address import unix_address
from weftpub.device import resolve_device
from weftpub.errors import WeftpubError
from weftpub.memory.pages import make_pages, open_pages
from weftpub.memory.vmm import vmm_obstacle

__all__ = ["sharing_obstacle"]

_REMEDY = "every publish copies the experts instead, which needs no setting"
_PATTERN = 0x5A


def sharing_obstacle(device: torch.device | str, folder: str | os.PathLike[str] | None = None) -> str | None:
    """What keeps this process from sharing memory, by the name of the call or rule that forbids it; None if nothing.

    Makes the smallest allocation, sends its descriptor through a socket, maps it a second time and looks whether bytes
    written through one mapping arrive in the other.

    Args:
        device: where the experts live.
        folder: where trainer and engine would meet; None leaves it unchecked.
    """
    try:
        where = resolve_device(device)
        if folder is not None:
            unix_address(Path(folder), "preflight-0123456789ab-01234567.s")
        if where.type == "cuda" and (obstacle := vmm_obstacle(where.index)) is not None:
            return f"{obstacle}; {_REMEDY}"
        return _try(where)
    except WeftpubError as error:
        return f"{error}; {_REMEDY}"


def _try(device: torch.device) -> str | None:
    first = make_pages(device, 1)
    try:
        second = open_pages(device, _through_a_socket(first.descriptor), first.nbytes)
    finally:
        first.close()
    second.close()
    first.tensor(0, first.nbytes).fill_(_PATTERN)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if not bool((second.tensor(0, second.nbytes) == _PATTERN).all()):
        return f"two mappings of one allocation on {device} show different bytes; {_REMEDY}"
    return None


def _through_a_socket(descriptor: int) -> int:
    """The descriptor as another process would get it: through a socket pair."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [descriptor])
        _, found, _, _ = socket.recv_fds(theirs, 1, 1, socket.MSG_CMSG_CLOEXEC)
    return found[0]
