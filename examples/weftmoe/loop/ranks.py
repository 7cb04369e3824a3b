"""The trainer's ranks as the loop sees them: what rank 0 decides, all know; what each one measured, all get."""

from dataclasses import dataclass
from typing import Any

import torch

from weftpub.errors import ConfigError

__all__ = ["Place", "Ranks"]


@dataclass(frozen=True)
class Place:
    """Where a rank stands among the nodes: torchrun numbers ranks node by node.

    Attributes:
        rank: of the world.
        nodes: machines, each with an engine.
        each: ranks of one node.
    """

    rank: int
    nodes: int
    each: int

    @classmethod
    def here(cls, nodes: int) -> "Place":
        """This process's; ConfigError if the ranks cannot be dealt to the nodes."""
        ranks = Ranks()
        if ranks.world % nodes:
            raise ConfigError(f"{ranks.world} ranks on {nodes} nodes: expected as many on each; start them with run.sh")
        return cls(ranks.rank, nodes, ranks.world // nodes)

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return self.rank // self.each

    @property
    def words(self) -> str:
        """Of a run on several nodes, what a description of its engines begins with."""
        return "" if self.nodes == 1 else f"{self.nodes} nodes: "

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its node, which has the node's engine."""
        return self.rank % self.each == 0

    @property
    def hosts(self) -> tuple[range, ...]:
        """The ranks of every node."""
        return tuple(range(node * self.each, (node + 1) * self.each) for node in range(self.nodes))

    def named(self, name: str) -> str:
        """A name of this node's own, and the name itself where there is one node only."""
        return name if self.nodes == 1 else f"{name}-node-{self.node}"


class Ranks:
    """All ranks of the default process group, or one alone before there is a group."""

    @property
    def rank(self) -> int:
        """This rank; 0 draws the prompts, judges and writes."""
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
