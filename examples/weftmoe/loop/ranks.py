"""The trainer's ranks as the loop sees them: what rank 0 decides, all know; what each one measured, all get."""

from typing import Any

import torch

__all__ = ["Ranks"]


class Ranks:
    """All ranks of the default process group, or one alone before there is a group."""

    @property
    def rank(self) -> int:
        """This rank; 0 drives the engine, judges and writes."""
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    @property
    def world(self) -> int:
        """Number of ranks."""
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on all ranks. What a rank passes is ignored elsewhere."""
        if self.world == 1:
            return value
        held = [value]
        torch.distributed.broadcast_object_list(held, src=0)
        return held[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on all ranks, in their order."""
        if self.world == 1:
            return [value]
        held: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(held, value)
        return held

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            torch.distributed.barrier()
