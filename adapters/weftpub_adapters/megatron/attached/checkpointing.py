"""Saving and loading an attached trainer with Megatron's distributed checkpoint, with Megatron-Bridge, or with
anything that reads parameters.

    with attachment.saving():                       # BF16 experts exist; one version, held until the block ends
        sharded = {"model": ddp.sharded_state_dict()}
        sharded["optimizer"] = optimizer.sharded_state_dict(sharded["model"])
        dist_checkpointing.save(sharded, directory)

Keys, shapes and dtypes are those of an unattached trainer, so either can load what the other saved. Masters and
moments are handed over as
the host memory that they are; BF16 experts are rounded from the masters. Inside the block the sealed generation is
held like a publish holds
it: a step on another thread waits, and a publish at the same time reads the same version.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from weftpub.errors import ConfigError

__all__ = ["Checkpointing"]


class Checkpointing:
    """The checkpoint half of an attachment."""

    _snapshot: bool
    _optimizer: Any

    @abstractmethod
    def reading(self, purpose: str = "reader", timeout: float | None = None) -> AbstractContextManager[int]: ...

    @abstractmethod
    def materialized(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def require_loaded(self, action: str) -> None: ...

    @abstractmethod
    def rewrite(self) -> None: ...

    @abstractmethod
    def _replacing(self) -> AbstractContextManager[None]: ...

    @contextmanager
    def saving(self, *, asynchronous: bool = False, timeout: float | None = None) -> Iterator[int]:
        """Hold one version and give the experts BF16 memory; build and save the state dicts inside. Yields the
        generation.

        Args:
            asynchronous: the files are written after the block. Masters and state are then given as copies, which
                later steps do
                not change; schedule the request inside the block, where its copy of the GPU's tensors is made.
            timeout: seconds to wait for a step that is running.

        Raises:
            StateError: something is offloaded. TornError: the last step failed half-way; there is no one version to
                save.
        """
        self.require_loaded("saving a checkpoint")
        with self.reading("checkpoint", timeout) as generation, self.materialized():
            self._snapshot = asynchronous
            try:
                yield generation
            finally:
                self._snapshot = False

    @contextmanager
    def loading(self, *, masters_from: Literal["optimizer", "model"] = "optimizer") -> Iterator[None]:
        """Load model and optimizer inside; after it, the experts' bytes are written anew, as a generation of their own.

        Args:
            masters_from: "optimizer" when the optimizer's state is loaded too: masters are then exact, and the next
                step gives the bytes of
                an uninterrupted run. "model" when only BF16 weights are loaded: masters start from them, moments stay.
        """
        if masters_from not in ("optimizer", "model"):
            raise ConfigError(f"masters_from={masters_from!r}; choose 'optimizer' or 'model'")
        self.require_loaded("loading a checkpoint")
        with self.materialized(), self._replacing():
            yield
            if masters_from == "model":
                self._optimizer.reload_model_params()
        self.rewrite()
