"""`attach`: a Megatron trainer whose routed experts are a store's bytes, until `close`.

    prepared = prepare(model, variant="fp8")
    ddp = DistributedDataParallel(config, ddp_config, model)
    optimizer = get_megatron_optimizer(optimizer_config, [ddp])
    attachment = attach(ddp, optimizer)
    ...  # train as ever; every optimizer.step() writes the next generation
    attachment.close()

The order inside a step: Megatron reduces, unscales and clips gradients; all of them are checked to be finite; the
generation is begun, which waits
for publishes and checkpoints that still read; each inner optimizer moves its masters through the slots, where the
writer quantizes
them; the generation is sealed. Gradient norm, clipping, decay and schedules are Megatron's own code on Megatron's own
tensors.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from weftpub.canonical import CanonicalTensor
from weftpub.errors import ConfigError, NonFiniteGradientError, StateError, TornError, WeftpubError
from weftpub.optim import StepReport, gradient_norms
from weftpub.staging import Lanes, SlotPool, StagingPipeline, Writer, open_lanes
from weftpub.store import ExpertStore, SealReport, Step, StoreState
from weftpub.store.guard import GenerationGuard
from weftpub_adapters.megatron.attached.binding import Binding, bind
from weftpub_adapters.megatron.attached.buffers import ExpertMemory, ParameterMemory
from weftpub_adapters.megatron.attached.checkpointing import Checkpointing
from weftpub_adapters.megatron.attached.child import StagedChild
from weftpub_adapters.megatron.attached.forward import ExpertForward, connect_experts
from weftpub_adapters.megatron.attached.marks import set_mark
from weftpub_adapters.megatron.attached.offload import OffloadTags
from weftpub_adapters.megatron.attached.plain import FiniteWatch, PlainWriter
from weftpub_adapters.megatron.attached.prepare import Prepared, prepared_of, set_own_buffer
from weftpub_adapters.megatron.attached.published import (
    PublishedTensor,
    bf16_canonical,
    expert_items,
    make_store,
)
from weftpub_adapters.megatron.attached.refusals import check_optimizer_config, check_parallel, check_wrapper_config
from weftpub_adapters.megatron.attached.selection import ExpertLayer, chunks_of
from weftpub_adapters.megatron.attached.together import together
from weftpub_adapters.megatron.attached.variants import AttachSettings

__all__ = ["Attachment", "StepSummary", "attach"]

# How things stand when one of several ranks failed.
_UNCHANGED = "Nothing was changed on any rank."
_TORN = "No rank has sealed it; load the last checkpoint on all of them."


@dataclass(frozen=True)
class StepSummary:
    """What the last optimizer step did.

    Attributes:
        generation: the generation that it wrote.
        reports: of each inner optimizer.
        seal: of the store; None without one.
    """

    generation: int
    reports: tuple[StepReport, ...]
    seal: SealReport | None

    @property
    def changed_share(self) -> float | None:
        """Share of the published expert bytes that the step changed; None for the bf16 variant or if not measured."""
        return None if self.seal is None else self.seal.changed_share


def attach(ddp_model: Any, optimizer: Any, *, prepared: Prepared | None = None) -> "Attachment":
    """Put a store behind a prepared, wrapped model and its optimizer.

    Args:
        ddp_model: Megatron's DistributedDataParallel around the prepared model, or a list of them.
        optimizer: what `get_megatron_optimizer` returned for it, before its first step.
        prepared: what `prepare` returned; by default found on the parameters. Needed for the baseline variant, which
            marks none.

    Raises:
        ConfigError: a setting is refused by name, or model and optimizer were not built in the order above. Nothing
            is changed.
    """
    ddps = chunks_of(ddp_model)
    prepared = prepared if prepared is not None else prepared_of(ddps)
    settings = prepared.settings
    if not settings.staged:
        return Attachment(prepared, ddps, optimizer, [], None, None)
    for ddp in ddps:
        if not hasattr(ddp, "ddp_config"):
            raise ConfigError(
                f"attach needs DistributedDataParallel models, found {type(ddp).__name__}; wrap the prepared model "
                "first"
            )
        check_wrapper_config(ddp.ddp_config, settings)
    check_optimizer_config(optimizer.config, settings)
    check_parallel(prepared.layers, settings, optimizer.config)
    bindings = bind(optimizer)
    memory = (
        ExpertMemory(ddps, [item.parameter for item in expert_items(prepared.layers)])
        if settings.variant == "fp8"
        else None
    )
    attachment = Attachment(
        prepared, ddps, optimizer, bindings, memory, make_store(prepared) if memory is not None else None
    )
    attachment.open()
    return attachment


class Attachment(OffloadTags, Checkpointing):
    """The bond between a Megatron trainer and weftpub. Made by `attach`."""

    def __init__(
        self,
        prepared: Prepared,
        ddps: tuple[Any, ...],
        optimizer: Any,
        bindings: list[Binding],
        memory: ExpertMemory | None,
        store: ExpertStore | None,
    ) -> None:
        self.settings: AttachSettings = prepared.settings
        self.layers: tuple[ExpertLayer, ...] = prepared.layers
        self.dispatcher = prepared.dispatcher
        self.store = store
        self.last_step: StepSummary | None = None
        self._ddps = ddps
        self._optimizer = optimizer
        self._bindings = bindings
        self._memory = memory
        self._guard = GenerationGuard("attached BF16 experts", self.settings.lease_timeout)
        self._watch = FiniteWatch()
        self._forwards: list[ExpertForward] = []
        self._children: list[StagedChild] = []
        self._inner_step: Any = None
        self._inner_prepare: Any = None
        self._snapshot = False
        # Kept while slots come and go: cuBLAS gives every stream that it has ever met a workspace (32 MiB on Hopper),
        # for as long as the process lives.
        self._lanes: Lanes | None = None
        self._open = False
        self._generation = -1
        super().__init__(
            ParameterMemory(ddps, [item.parameter for item in expert_items(self.layers)] if memory is not None else [])
        )

    # What it is.

    @property
    def variant(self) -> str:
        """ "baseline", "bf16" or "fp8"."""
        return self.settings.variant

    @property
    def attached(self) -> bool:
        """Whether it is open. A baseline attachment never is: there is nothing to detach."""
        return self._open

    @property
    def generation(self) -> int:
        """Last sealed generation; 0 after `attach`, one more with every step."""
        self._require_open("generation")
        return self._generation

    @property
    def expert_storage_bytes(self) -> int:
        """Bytes of BF16 memory that the expert parameters own, flat buffers included: 0 while the fp8 variant is
        attached."""
        if self._memory is not None:
            return self._memory.nbytes
        storages = {
            item.parameter.untyped_storage()._cdata: item.parameter.untyped_storage()
            for item in expert_items(self.layers)
        }
        return sum(storage.nbytes() for storage in storages.values())

    @property
    def placeholders(self) -> dict[str, torch.nn.Parameter]:
        """Expert matrix name to its registered parameter."""
        return {item.matrix.name: item.parameter for item in expert_items(self.layers)}

    def masters(self) -> dict[str, torch.Tensor]:
        """Parameter or expert matrix name to its FP32 master in host memory: a view, or a joined copy for one kept in
        row blocks."""
        self._require_open("masters")
        return {unit.name: unit.read("weight", unit.shape) for child in self._children for unit in child.units}

    def metadata(self) -> list[PublishedTensor]:
        """Canonical expert tensors of this rank, without bytes."""
        self._require_open("metadata")
        if self.store is not None:
            return [PublishedTensor(e.name, e.dtype, e.shape, e.role) for e in self.store.entries()]
        return [
            PublishedTensor(c.name, c.tensor.dtype, tuple(c.tensor.shape), c.role) for c in bf16_canonical(self.layers)
        ]

    def canonical(self) -> Iterator[CanonicalTensor]:
        """Canonical expert tensors of the sealed generation as views; hold `reading` while they are used."""
        self._require_open("canonical")
        return self.store.canonical() if self.store is not None else bf16_canonical(self.layers)

    @contextmanager
    def reading(self, purpose: str = "reader", timeout: float | None = None) -> Iterator[int]:
        """Hold the sealed generation: the next step waits for the block to end, and yields its number.

        Raises:
            StateError, TornError, DeadlineError: as `ExpertStore.reading`.
        """
        self._require_open("reading")
        if self.store is not None:
            with self.store.reading(purpose=purpose, timeout=timeout) as held:
                yield held
        else:
            with self._guard.reading(purpose, None, timeout) as held:
                yield held

    # Opening and closing.

    def open(self) -> None:
        """Build masters and slots, write generation 0, connect the experts and release their memory. `attach` calls
        this."""
        slot = self.settings.slot_numel if self.settings.slot_numel is not None else self._largest_whole()
        try:
            self._children = [binding.make_child(slot) for binding in self._bindings]
            for child in self._children:
                child.snapshot = lambda: self._snapshot
            self.open_slots()
            for binding, child in zip(self._bindings, self._children, strict=True):
                binding.join(child)
            with self._writing(0):
                self._write_all()
            if self.store is not None:
                self._forwards = connect_experts(self.layers, self.store, self.settings)
                self._refresh()
        except BaseException:
            for binding in self._bindings:
                binding.leave()
            raise
        if self._memory is not None:
            self._memory.release()
        set_own_buffer(self.layers, False)
        self._inner_step = self._optimizer.step_with_ready_grads
        self._inner_prepare = self._optimizer.prepare_grads
        self._optimizer.step_with_ready_grads = self._step
        self._optimizer.prepare_grads = self._prepare_grads
        self._open = True

    @torch.no_grad()
    def close(self) -> None:
        """Detach: BF16 weights and GPU masters from the host masters, Megatron's own optimizers with the same state.

        Raises:
            StateError: closed before, or something is offloaded. DeadlineError: a publish or checkpoint still reads.
        """
        if not self.settings.staged:
            return
        self._require_open("close")
        self.require_loaded("close")
        with self.reading("close"):
            pass
        if self._memory is not None:
            self._memory.restore()
            self._fill_parameters()
        for forward in self._forwards:
            forward.disconnect()
        for child in self._children:
            child.shut()
        for binding in self._bindings:
            binding.close()
        del self._optimizer.step_with_ready_grads, self._optimizer.prepare_grads
        for ddp in self._ddps:
            for parameter in ddp.parameters():
                set_mark(parameter, None)
        self._open, self._forwards, self._children = False, [], []

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, unless an error is on its way: a torn or offloaded attachment cannot be closed, and would hide it."""
        if kind is None and self._open:
            self.close()

    # A step.

    def _prepare_grads(self) -> bool:
        """Stands for the optimizer's `prepare_grads`, the first thing of a step: offloaded gradients have no memory
        to read."""
        self._require_open("a step")
        self.require_loaded("a step")
        return bool(self._inner_prepare())

    @torch.no_grad()
    def _step(self) -> bool:
        """Stands for the optimizer's `step_with_ready_grads`: norms and clipping are done, nothing is written yet."""
        self._require_open("a step")
        self.require_loaded("a step")
        with self._together("checking gradients", _UNCHANGED, told=NonFiniteGradientError):
            for child in self._children:
                gradient_norms(child.gradients())
        with self._writing(self._generation + 1) as seal:
            success = bool(self._inner_step())
        reports = tuple(child.report for child in self._children if child.report is not None)
        with self._together(f"ending the step of generation {self._generation}", "Its bytes are written."):
            if any(report.none_changed for report in reports):
                raise StateError(
                    "the step changed not one byte of its masters although learning rates and gradients are not zero; "
                    "the updates are lost on their way, or the learning rate is below FP32's resolution"
                )
            self._refresh()
        self.last_step = StepSummary(self._generation, reports, seal.get("report"))
        return success

    def _together(
        self, doing: str, outcome: str, *, told: type[WeftpubError] = TornError
    ) -> AbstractContextManager[None]:
        return together(doing, self.device, outcome, told=told)

    @contextmanager
    def _writing(self, generation: int, *, recover: bool = False) -> Iterator[dict[str, SealReport]]:
        """One generation, sealed on all ranks or on none; if it fails half-way on one, or a master became NaN or Inf
        there, store and masters are torn on each.
        """
        outcome: dict[str, SealReport] = {}
        self._watch.reset()
        for child in self._children:
            child.fault = None
        with ExitStack() as stack:
            with self._together(f"beginning generation {generation}", _UNCHANGED, told=StateError):
                begun = stack.enter_context(self._begun(generation, recover))
            # What Megatron itself raises in here ends this rank alone: the others may be in an exchange of its own.
            yield outcome
            with self._together(f"writing generation {generation}", _TORN):
                for child in self._children:
                    child.raise_fault()
                self._watch.raise_if_nonfinite()
                if self.store is not None:
                    self.store.require_sealable()
        if begun is not None:
            outcome["report"] = begun.report
        self._generation = generation

    @contextmanager
    def _begun(self, generation: int, recover: bool) -> Iterator[Step | None]:
        """A generation of the store, or of the BF16 parameters, until it is sealed or torn."""
        if self.store is not None:
            try:
                with self.store.writing(generation, on_torn=self._tear_masters, recover=recover) as step:
                    yield step
            except BaseException as error:
                # Experts that nothing was written to are whole, and of another step than weights beside them that were.
                if self._watch.seen and self.store.state is not StoreState.TORN:
                    reason = f"generation {generation} failed half-way: {error}"
                    self.store.mark_torn(reason)
                    self._tear_masters(reason)
                raise
            return
        (self._guard.begin_recovery if recover else self._guard.begin)(generation)
        try:
            yield None
        except BaseException as error:
            if not (recover or self._watch.seen):
                self._guard.cancel()
                raise
            self._guard.tear(f"generation {generation} failed half-way: {error}")
            self._tear_masters(self._guard.torn_reason)
            raise
        self._guard.seal()

    def rewrite(self) -> None:
        """Write a new generation from the masters as they are, such as after a checkpoint was loaded.

        Opens a torn store: with `loading` around the load of a checkpoint, recovery is that one call.

        Raises:
            TornError: masters are torn; load a checkpoint first.
        """
        self._require_open("rewrite")
        self.require_loaded("rewrite")
        torn = self._guard.state is StoreState.TORN if self.store is None else self.store.state is StoreState.TORN
        with self._writing(self._generation + 1, recover=torn):
            self._write_all()
        self._refresh()

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for child in self._children:
                stack.enter_context(child.replacing())
            yield

    def _write_all(self) -> None:
        for child in self._children:
            child.write_all()

    def _refresh(self) -> None:
        for forward in self._forwards:
            forward.refresh()

    def _tear_masters(self, reason: str) -> None:
        for child in self._children:
            child.masters.mark_torn(reason)

    # Slots.

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return next(iter(expert_items(self.layers))).parameter.device

    def open_slots(self) -> None:
        """Allocate the staging slots and join them with the masters.

        Raises:
            ConfigError: a matrix fits no slot; names the size to set.
        """
        numel = self.settings.slot_numel if self.settings.slot_numel is not None else self._largest_whole()
        tensors = 1 + max(len(child.masters.states) for child in self._children)
        numel = max(numel, 1)
        pool = SlotPool(self.device, self.settings.slots, numel=numel, tensors_per_slot=tensors)
        if self._lanes is None:
            self._lanes = open_lanes(pool.device)
        pipeline = StagingPipeline(pool.device, pool, lanes=self._lanes)
        for binding, child in zip(self._bindings, self._children, strict=True):
            child.open(pipeline, binding.core, {unit.name: self._writer(unit) for unit in child.units})

    def close_slots(self) -> None:
        """Free the staging slots; the next step needs them again."""
        for child in self._children:
            child.shut()

    def _largest_whole(self) -> int:
        """Elements of the largest matrix that must not be cut: every expert, and everything that Muon updates."""
        whole = [
            unit.key.numel()
            for binding in self._bindings
            for unit in binding.units
            if unit.expert is not None or not binding.splits
        ]
        rows = [
            unit.key.numel() // unit.shape[0]
            for binding in self._bindings
            for unit in binding.units
            if len(unit.shape) > 1
        ]
        return max([*whole, *rows, 1])

    def _writer(self, unit: Any) -> Writer:
        if self.store is not None and unit.expert is not None:
            return self.store.writer()
        return PlainWriter(unit, self._watch)

    # BF16 weights.

    @torch.no_grad()
    def _fill_parameters(self) -> None:
        """Round the experts' masters into their parameters, which own memory again."""
        for child in self._children:
            for unit in child.units:
                if unit.expert is not None:
                    unit.target.detach().view(-1).copy_(unit.read("weight").reshape(-1))

    @contextmanager
    def materialized(self) -> Iterator[None]:
        """Inside, every expert parameter owns BF16 memory filled from its master, for code that reads parameters;
        forward still reads the store."""
        self._require_open("materialized")
        if self._memory is None:
            yield
            return
        self._memory.fill()
        try:
            self._fill_parameters()
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._memory.free()

    def _require_open(self, action: str) -> None:
        if not self._open:
            raise StateError(
                f"{action}: this attachment is not open (variant {self.variant!r}); prepare and attach a model"
            )
