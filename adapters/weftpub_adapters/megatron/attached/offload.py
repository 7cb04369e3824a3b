"""What an attachment gives up while an engine has the GPU, tag by tag, and takes back.

    weights    offload: W and scales to the host (or dropped), W^T dropped; other parameters to the host
               reload:  W and scales back and checked, W^T made from W
    optimizer  offload: the staging slots are freed; masters and state are in host memory always
               reload:  slots are allocated
    gradients  offload: freed
               reload:  allocated, zero

Each tag is loaded or offloaded; a move that it is not in the state for is refused before anything happens.
"""

from abc import abstractmethod
from typing import Any, Literal, get_args

import torch

from weftpub.errors import ChecksumError, ConfigError, StateError
from weftpub_adapters.megatron.attached.buffers import BufferApi, ParameterMemory

__all__ = ["OffloadTags", "Tag"]

Tag = Literal["weights", "optimizer", "gradients"]


class OffloadTags:
    """The offloading half of an attachment.

    Args:
        parameters: mover of the parameters that the store does not hold.
    """

    store: Any
    generation: int

    def __init__(self, parameters: ParameterMemory) -> None:
        self._parameters = parameters
        self._offloaded: set[str] = set()
        self._kept = True

    @property
    def offloaded(self) -> frozenset[str]:
        """Tags that are away now."""
        return frozenset(self._offloaded)

    @abstractmethod
    def open_slots(self) -> None: ...

    @abstractmethod
    def close_slots(self) -> None: ...

    @abstractmethod
    def masters(self) -> dict[str, torch.Tensor]: ...

    @torch.no_grad()
    def offload(self, *tags: Tag, api: BufferApi = "buffer", keep: bool = True) -> None:
        """Free the device memory of some tags.

        Args:
            tags: which; all that are still there if none is given.
            api: how parameters that weftpub does not manage are moved, see
                `weftpub_adapters.megatron.attached.buffers`.
            keep: keep W and scales on the host; False makes `reload` quantize them again from the masters, and checks
                the bytes.

        Raises:
            StateError: a named tag is offloaded already. ConfigError: Megatron captures CUDA graphs, which would keep
                the addresses of weights and gradients. DeadlineError: a publish or checkpoint still reads.
        """
        chosen = self._chosen(tags) if tags else tuple(tag for tag in get_args(Tag) if tag not in self._offloaded)
        for tag in chosen:
            if tag in self._offloaded:
                raise StateError(f"{tag!r} is offloaded already; reload it first")
        moving = [tag for tag in chosen if tag != "optimizer"]
        if moving:
            self._parameters.require_movable(" and ".join(moving))
        if "gradients" in chosen:
            self._parameters.offload_gradients()
        if "optimizer" in chosen:
            self.close_slots()
        if "weights" in chosen:
            if self.store is not None:
                self.store.offload(keep=keep)
            self._parameters.offload(api)
        self._offloaded.update(chosen)

    @torch.no_grad()
    def reload(self, *tags: Tag) -> None:
        """Take back the device memory of some tags, in the same tensors.

        Args:
            tags: which; all that are away if none is given.

        Raises:
            StateError: a named tag is not offloaded. ChecksumError: expert bytes are not those of the sealed
                generation. All memory is back then, and the store is torn: a load of a checkpoint heals it.
        """
        chosen = self._chosen(tags) if tags else tuple(tag for tag in get_args(Tag) if tag in self._offloaded)
        for tag in chosen:
            if tag not in self._offloaded:
                raise StateError(f"{tag!r} is not offloaded; there is nothing to reload")
        damaged: ChecksumError | None = None
        if "weights" in chosen:
            if self.store is not None:
                device = self.store.device
                masters = self.masters()
                try:
                    self.store.reload(lambda name: masters[name].to(device))
                except ChecksumError as error:
                    damaged = error
            self._parameters.reload()
            self._offloaded.discard("weights")
            if damaged is None:
                self._refresh()
        if "optimizer" in chosen:
            self.open_slots()
        if "gradients" in chosen:
            self._parameters.reload_gradients()
        self._offloaded.difference_update(chosen)
        if damaged is not None:
            raise damaged

    def require_loaded(self, action: str) -> None:
        """StateError, naming the tags, while something is offloaded."""
        if self._offloaded:
            raise StateError(f"{action} refused, {', '.join(sorted(self._offloaded))} offloaded; call reload() first")

    @abstractmethod
    def _refresh(self) -> None: ...

    @staticmethod
    def _chosen(tags: tuple[Tag, ...]) -> tuple[str, ...]:
        unknown = set(tags) - set(get_args(Tag))
        if unknown:
            raise ConfigError(f"unknown tags {sorted(unknown)}; choose from {', '.join(get_args(Tag))}")
        return tags
