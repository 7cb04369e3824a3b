"""An engine whose experts lie in memory that the trainer maps too: any `EngineSide`, with the allocation's header asked
and told at every step of the protocol.

    pause          the engine stops, then the header says so: the trainer may write
    weights_intact asks the header as well: a generation that is being written, or was left half-written by a trainer
                   that died, is no version
    post_process   before verification: reading is admitted
    commit         the sealed generation becomes the version that may be served
    resume         the header allows it, or the engine stays paused
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from weftpub.errors import StateError
from weftpub.memory import SharedAllocation, SharedState
from weftpub.memory.allocation import joined_allocations
from weftpub.plan.coincide import SETTINGS_KEY
from weftpub.plan.views import listing
from weftpub.receive.engine import EngineSide, Readiness
from weftpub.wire.description import EngineDescription
from weftpub.wire.identity import process_identity

__all__ = ["SharedEngineSide", "require_shared_by_a_trainer"]


def require_shared_by_a_trainer(live: Mapping[str, torch.Tensor]) -> None:
    """Refuse a publish that would copy into protected memory, before its first byte.

    Args:
        live: parameters that it writes.

    Raises:
        StateError: parameters lie in memory that this process has mapped for debugging, and no trainer has its bytes
            there: the publisher would send them, and writing them would end this process.
    """
    for memory in joined_allocations():
        # A trainer's store seals with the digest of its checksums; an engine that fills new memory has none.
        if not memory.protected or memory.standing().digest:
            continue
        inside = sorted(name for name, tensor in live.items() if memory.offset_of(tensor) is not None)
        if inside:
            raise StateError(
                f"{len(inside)} parameters lie in protected shared memory ({listing(inside)}), and no trainer shares "
                "it: a copy into it would end this process. Let the trainer share it (the same folder on this GPU), or "
                "start the engine without protected"
            )


class SharedEngineSide:
    """Implements `EngineSide` around another one.

    Args:
        engine: the engine rank; its live tensors lie in `memory` as far as they are shared.
        memory: what this process has joined.
    """

    def __init__(self, engine: EngineSide, memory: SharedAllocation) -> None:
        self.engine = engine
        self.memory = memory
        self._here = process_identity()  # asked for at every reply
        self._places: dict[str, Any] = {}

    def describe(self) -> EngineDescription:
        """The engine's own words, and where its parameters lie in shared memory."""
        description = self.engine.describe()
        if self.engine.resident():  # an engine without its memory gives no tensors out; what is shared does not move
            offsets = {name: self.memory.offset_of(tensor) for name, tensor in self.engine.live_tensors().items()}
            self._places = {name: [self.memory.id, at] for name, at in offsets.items() if at is not None}
        return description.model_copy(update={"settings": {**description.settings, SETTINGS_KEY: self._places}})

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        """See `EngineSide`."""
        return self.engine.live_tensors()

    def weights_intact(self) -> bool:
        """Whether the engine's own weights and the shared bytes both hold the committed version."""
        return self.engine.weights_intact() and self.memory.standing().servable

    def resident(self) -> bool:
        """See `EngineSide`; shared memory is always there."""
        return self.engine.resident()

    def readiness(self) -> Readiness:
        """See `EngineSide`; requests also wait while the shared bytes must not be served."""
        own = self.engine.readiness()
        return own if own.why_not else replace(own, why_not=self.memory.standing().obstacle(self._here) or "")

    def pause(self) -> None:
        """See `EngineSide`; then the trainer may write."""
        self.engine.pause()
        self.memory.stop_serving()

    def resume(self) -> None:
        """See `EngineSide`; TornError, and the engine stays paused, if the shared bytes are of no committed version."""
        self.memory.start_serving()
        try:
            self.engine.resume()
        except BaseException:
            self.memory.stop_serving()
            raise

    def post_process(self) -> None:
        """See `EngineSide`; what follows reads the bytes."""
        self.memory.admit_reading()
        self.engine.post_process()

    def commit(self, version: int) -> None:
        """See `EngineSide`; the header learns which version the bytes are.

        Where no living trainer keeps its store in this memory, the bytes came by copy, and this engine seals them.
        """
        if self.memory.standing().state is not SharedState.SEALED:
            self.memory.begin(version, recover=True)
            self.memory.seal()
        self.memory.commit(version)
        self.engine.commit(version)

    def fence(self, reason: str) -> None:
        """See `EngineSide`."""
        self.engine.fence(reason)
        self.memory.stop_serving()
