"""A worker's live model as the engine side of a publish: one rank of a serving engine.

Two threads meet here. The scheduler's thread computes, pauses, releases memory and asks `may_serve` before it goes on.
The receiver's thread writes weights, and only while the scheduler rests. What the scheduler does to memory is told by
hooks (`memory_released`, `memory_resumed`); nothing is inferred from a tensor's address, which SGLang keeps through a
release.
"""

import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from weftpub.errors import StateError, TornError
from weftpub.plan.types import digest_of
from weftpub.receive import EngineDescription, Readiness
from weftpub_adapters.sglang.derived import post_process_weights
from weftpub_adapters.sglang.describe import describe_live, live_tensors, plain_config
from weftpub_adapters.sglang.parallel import parallel_sizes
from weftpub_adapters.sglang.placement import require_placement
from weftpub_adapters.sglang.plugin.checks import faults_of
from weftpub_adapters.sglang.plugin.settings import ReceiverSettings

__all__ = ["LiveEngine"]

_POLL_S = 0.005


class LiveEngine:
    """Implements `weftpub.receive.EngineSide` over a scheduler's model runner.

    Args:
        scheduler: SGLang's `Scheduler` of this worker.
        settings: whose engine this is, and which version its weights hold.
    """

    def __init__(self, scheduler: Any, settings: ReceiverSettings) -> None:
        self._scheduler = scheduler
        self._runner = scheduler.tp_worker.model_runner
        self._model: torch.nn.Module = self._runner.model
        self._settings = settings
        self._hf_config = plain_config(self._runner.model_config.hf_config)
        self._rank = settings.first_rank + parallel_sizes().rank
        self._placement: str | None = None
        self._lock = threading.Lock()
        # Held while the scheduler decides to go on and does, and while `pause` finds it at rest and keeps it there:
        # between the two halves of either, the other would let requests be computed while weights are written.
        self.turn = threading.Lock()
        self._resident = "weights" not in scheduler.weight_updater.offload_tags
        self._intact = self._resident and settings.version is not None
        self._open = self._intact
        self._fenced = ""
        self._releases = 0  # how often the weights' memory was released
        self._processed_at = -1  # `_releases` when the last bytes were post-processed
        self.device = next(self._model.parameters()).device

    @property
    def rank(self) -> int:
        """Receiver rank of this worker."""
        return self._rank

    @property
    def fenced(self) -> str:
        """Why the weights are torn, "" if they are not."""
        return self._fenced

    @property
    def may_serve(self) -> bool:
        """Whether a request may be computed: committed weights, all memory there, told to resume."""
        with self._lock:
            return not self.why_not()

    def why_not(self) -> str:
        """Why it may not serve, in words; "" if it may."""
        away = sorted(self._scheduler.weight_updater.offload_tags)
        if self._fenced:
            return f"the weights are torn: {self._fenced}"
        if away or not self._resident:
            return f"the memory of {', '.join(away) or 'weights'} is released"
        if not self._intact:
            return "no version is committed in its weights"
        return "" if self._open else "its publisher has not let it resume"

    def resident(self) -> bool:
        """See `EngineSide`. False from the moment at which a release was asked for."""
        return self._resident

    def readiness(self) -> Readiness:
        """See `EngineSide`; at rest is a scheduler that SGLang has paused."""
        return Readiness(self.why_not(), resting=bool(self._scheduler._engine_paused))

    def describe(self) -> EngineDescription:
        """This rank as it is now; ConfigError if it cannot be published to.

        Layouts are there without their memory, too: a driver that was restarted while it is away learns so from this.
        """
        found = describe_live(self._model, hf_config=self._hf_config, engine=self._settings.engine, rank=self._rank)
        self._placement = found.placement
        plugin = {
            "faults": faults_of(self._scheduler, self.device),
            "pid": os.getpid(),
            "released": sorted(self._scheduler.weight_updater.offload_tags),
            "planner_loaded": "awex" in sys.modules,
            "addresses": digest_of({name: p.data_ptr() for name, p in self._model.named_parameters()}),
            "memory_saver": bool(self._scheduler.memory_saver_adapter.enabled),
        }
        return found.model_copy(update={"settings": {**found.settings, "plugin": plugin}})

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers as they are now.

        Raises:
            StateError: their memory is released. PlanError: experts have moved since this rank described itself.
        """
        self._require_resident("live_tensors")
        require_placement(self._model, self._placement, self._who)
        return live_tensors(self._model)

    def weights_intact(self) -> bool:
        """False before the first commit, and from a release of the weights' memory until the next commit."""
        return self._intact

    def pause(self) -> None:
        """Prove that the scheduler rests, and keep it at rest until `resume`.

        Ranks of one engine must stop at the same step, so only SGLang's own pause can stop them; this waits for it.

        Raises:
            StateError: the scheduler was not paused, or requests still hold its cache.
        """
        until = time.monotonic() + self._settings.pause
        while not self._kept_at_rest(until):
            if time.monotonic() >= until:
                doing = "still works on requests" if self._scheduler._engine_paused else "was not paused"
                raise StateError(
                    f"{self._who}: its scheduler {doing} after {self._settings.pause:g} s; drain the engine before a "
                    "publish (ColocatedEngine.drain, or SGLang's pause_generation with mode 'retract')"
                )
            time.sleep(_POLL_S)

    def resume(self) -> None:
        """Let the scheduler go on when SGLang is told to continue.

        Raises:
            TornError: the weights are torn or hold no committed version. StateError: their memory is released.
        """
        self._require_resident("resume")
        if self._fenced or not self._intact:
            raise TornError(f"{self._who}: resume refused, {self.why_not()}; publish a complete version")
        with self._lock:
            self._open = True

    def post_process(self) -> None:
        """Let SGLang's layers do what they do after loading.

        Raises:
            ConfigError: a layer replaced, moved or reshaped a parameter; its backend cannot be published to in place.
        """
        self._require_resident("post_process")
        releases = self._releases
        post_process_weights(self._model)
        self._processed_at = releases

    def commit(self, version: int) -> None:
        """Make `version` the one that the weights hold; lifts a fence.

        Raises:
            StateError: the weights' memory was released after they were verified; it holds nothing.
        """
        with self._lock:
            if not self._resident or self._processed_at != self._releases:
                raise StateError(
                    f"{self._who}: the memory of its weights was released after version {version} was verified; "
                    "publish again"
                )
            self._intact, self._fenced = True, ""

    def fence(self, reason: str) -> None:
        """Refuse to serve until the next commit."""
        with self._lock:
            self._open, self._intact, self._fenced = False, False, reason

    def memory_released(self) -> None:
        """The scheduler is about to release the weights' memory: from here on no receive begins, and it holds nothing
        that may be served. One that has begun still has its memory; see `WorkerReceiver.await_quiet`.
        """
        with self._lock:
            self._resident, self._intact = False, False
            self._releases += 1

    def memory_resumed(self) -> None:
        """The scheduler has brought the weights' memory back, with undefined content."""
        with self._lock:
            self._resident = True

    @property
    def _who(self) -> str:
        return f"engine {self._settings.engine} receiver rank {self._rank}"

    def _kept_at_rest(self, until: float) -> bool:
        """Keep a scheduler that rests at rest; False if it does not rest, or is going on at this moment."""
        if not self.turn.acquire(timeout=max(0.0, until - time.monotonic())):
            return False
        try:
            rests = self._rests()
            if rests:
                with self._lock:
                    self._open = False
            return rests
        finally:
            self.turn.release()

    def _rests(self) -> bool:
        return bool(self._scheduler._engine_paused) and bool(self._scheduler.is_fully_idle(ignore_waiting=True))

    def _require_resident(self, action: str) -> None:
        if not self._resident:
            raise StateError(f"{self._who}: {action} refused, the memory of its weights is released; resume it first")
