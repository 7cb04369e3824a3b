"""A part of a step that all ranks end together: what one of them raises, every rank raises, and says whose error it is.

A rank that raised alone left the others waiting: in the next collective, or for a publish that it never joined, until
somebody's deadline was over, and with nothing to read but that a rank was late. So each part ends with one number that
all ranks reduce; reasons travel only if there are any.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weftpub.errors import TornError, WeftpubError

__all__ = ["several_ranks", "together"]

_REASON_BYTES = 1024  # of each rank's error, in its message to the others


def several_ranks() -> bool:
    """Whether there are ranks to fail together with."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


@contextmanager
def together(doing: str, device: torch.device, outcome: str, *, told: type[WeftpubError] = TornError) -> Iterator[None]:
    """The block ends well on all ranks of the default group, or raises on all; every rank enters it.

    Args:
        doing: names the part in the errors of the ranks that were told.
        device: that the default group can reduce on.
        outcome: how things stand once a rank has failed, and what to do.
        told: what those ranks raise.

    Raises:
        what the block raised on this rank, with the other ranks that failed as notes; `told` where it did not raise.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:  # told to the other ranks, then raised below
        failed = error
    if several_ranks():
        reasons = _exchange(failed, device)
        others = [f"rank {rank}: {reason}" for rank, reason in reasons if rank != torch.distributed.get_rank()]
        if failed is None and others:
            raise told(f"{doing} failed on {'; '.join(others)}. {outcome}")
        if failed is not None:
            for other in others:
                failed.add_note(f"also on {other}")
    if failed is not None:
        raise failed


def _exchange(failed: Exception | None, device: torch.device) -> list[tuple[int, str]]:
    """Ranks that failed, with their errors; collective."""
    flag = torch.tensor([failed is not None], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    if not flag.item():
        return []
    own = b"" if failed is None else f"{type(failed).__name__}: {failed}".encode()[:_REASON_BYTES]
    mine = torch.tensor(list(own.ljust(_REASON_BYTES, b"\0")), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(gathered, mine)
    texts = [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in gathered]
    return [(rank, text) for rank, text in enumerate(texts) if text]
