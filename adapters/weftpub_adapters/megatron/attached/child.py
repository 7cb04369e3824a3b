"""One of Megatron's inner optimizers with its numbers in host memory: units, masters, and the core that updates them
in slots."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from weftpub.errors import StateError
from weftpub.masters import MasterSet
from weftpub.optim import Override, StagedOptimizer, StepReport
from weftpub.staging import StagingPipeline, Writer
from weftpub_adapters.megatron.attached.host_state import HostState, Unit
from weftpub_adapters.megatron.attached.plain import PlainWriter
from weftpub_adapters.megatron.attached.together import several_ranks

__all__ = ["MakeCore", "StagedChild", "StagedInner"]

MakeCore = Callable[[MasterSet, StagingPipeline, Mapping[str, Writer], Mapping[str, Unit]], StagedOptimizer[Any]]


class StagedChild:
    """Masters of one inner optimizer, made from the present weights, and how a step reaches them.

    Args:
        units: entries of the inner optimizer's parameter groups.
        states: names of the state tensors.
        slot_numel: elements that a slot takes; units that may be cut (`splits`) are cut into row blocks of at most
            this size.
        splits: whether this optimizer works element by element, so that dense parameters may be cut.
        decoupled: whether gradients stand in ``decoupled_grad`` instead of ``grad``.

    Raises:
        ConfigError: a weight holds NaN or Inf, or not enough memory can be page-locked.
    """

    def __init__(
        self, units: Sequence[Unit], states: Sequence[str], *, slot_numel: int | None, splits: bool, decoupled: bool
    ) -> None:
        self.units = list(units)
        self._decoupled = decoupled
        self._splits = splits
        self._pieces: dict[str, tuple[Unit, slice]] = {}
        weights: dict[str, torch.Tensor] = {}
        for unit in self.units:
            for name, flat in unit.pieces(slot_numel if splits else None):
                self._pieces[name] = (unit, flat)
                weights[name] = unit.target.detach().reshape(-1)[flat].view(unit.piece_shape(flat))
        self.masters = MasterSet.from_tensors(weights, states)
        for name, (unit, _) in self._pieces.items():
            unit.masters.append(self.masters[name])
        self.report: StepReport | None = None
        self.fault: Exception | None = None
        self.snapshot: Callable[[], bool] = _never
        self._core: StagedOptimizer[Any] | None = None

    @property
    def core(self) -> StagedOptimizer[Any]:
        """The staged optimizer; StateError while its slots are offloaded."""
        if self._core is None:
            raise StateError("the optimizer's slots are offloaded; reload('optimizer') first")
        return self._core

    def open(self, pipeline: StagingPipeline, make_core: MakeCore, writers: Mapping[str, Writer]) -> None:
        """Join masters and slots. `writers` by unit name."""
        per_master = {
            name: self._kept(_piece_writer(writers[unit.name], unit, flat))
            for name, (unit, flat) in self._pieces.items()
        }
        units = {name: unit for name, (unit, _) in self._pieces.items()}
        self._core = make_core(self.masters, pipeline, per_master, units)

    def shut(self) -> None:
        """Let go of the slots."""
        self._core = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Master name to gradient, as Megatron left it: reduced, and clipped if it clips.

        Raises:
            StateError: a parameter has none; DDP gives every parameter one, zeros for an expert without tokens.
        """
        found: dict[str, torch.Tensor] = {}
        for name, (unit, flat) in self._pieces.items():
            gradient = getattr(unit.key, "decoupled_grad" if self._decoupled else "grad", None)
            if gradient is None:
                raise StateError(
                    f"{unit.name} has no gradient; run a backward pass and finalize_model_grads before the step"
                )
            shape = self.masters[name].layout.shape
            found[name] = gradient.detach().reshape(-1)[flat].view(shape)
        return found

    def step(self) -> None:
        """Update every master and hand it to its writer; learning rates and decays are those of the groups now.

        With several ranks nothing is raised here: Megatron exchanges between ranks after it, and those that have no
        error would wait there. `raise_fault` says it when all are through. Only what is raised between the exchanges
        of tensor-parallel matrices ends this rank at once.
        """
        try:
            self._step()
        except Exception as error:  # raised by raise_fault
            if self._exchanges():
                raise
            self._keep(error)
        else:
            if self.fault is not None:
                self.masters.mark_torn(f"they were updated, and not all was written: {self.fault}")

    def raise_fault(self) -> None:
        """Raise the first error since the last call that was kept."""
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault

    def _step(self) -> None:
        core = self.core
        rates = {name: float(unit.group["lr"]) for name, (unit, _) in self._pieces.items()}
        core.overrides = {
            name: Override(weight_decay=float(unit.group["weight_decay"])) for name, (unit, _) in self._pieces.items()
        }
        self.report = core.step(self.gradients(), lr=rates)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Inside, a checkpoint is loaded. Torn masters are whole again if the block replaced every weight and every
        state tensor: Megatron hands them over one by one, and one that it left out is of the step that failed.
        """
        for unit in self.units:
            unit.replaced.clear()
        yield
        wanted = {"weight", *self.masters.states}
        if self.masters.torn is not None and all(wanted <= unit.replaced for unit in self.units):
            with self.masters.changing("loading an optimizer checkpoint"):
                pass

    def _kept(self, writer: Writer) -> Writer:
        """The same writer, whose error is kept, and after it nothing more is written."""

        def write(name: str, matrix: torch.Tensor, /) -> None:
            if self.fault is not None:
                return
            try:
                writer(name, matrix)
            except Exception as error:  # raised by raise_fault
                self._keep(error)

        return write

    def _exchanges(self) -> bool:
        """Whether a step of this optimizer has exchanges between ranks in it: Muon's of a tensor-parallel matrix."""
        from megatron.core import parallel_state

        return not self._splits and parallel_state.get_tensor_model_parallel_world_size() > 1

    def _keep(self, error: Exception) -> None:
        if not several_ranks():
            raise error
        self.fault = self.fault or error

    def write_all(self) -> None:
        """Show every master to its writer as it is; errors as in `step`."""
        try:
            self.core.write_all()
        except Exception as error:  # raised by raise_fault
            self._keep(error)


class StagedInner:
    """Mixin of the torch optimizers that Megatron holds: stock until a child is adopted, then a front for it.

    `awaiting` is true for an optimizer that was built for a prepared model and is not attached yet: it must not step.
    """

    staged: StagedChild | None = None
    awaiting: bool = False
    state_keys: Mapping[str, str] = {}
    step_in_state: bool = False

    def adopt(self, child: StagedChild) -> None:
        """Take a child's host memory as this optimizer's state."""
        self.staged, self.awaiting = child, False
        state: Any = self.state  # type: ignore[attr-defined]
        state.clear()
        for unit in child.units:
            state[unit.key] = HostState(unit, dict(self.state_keys), step=self.step_in_state, snapshot=child.snapshot)

    def abandon(self) -> None:
        """Let the child go; state and groups are the caller's to fill."""
        self.staged = None
        self.state.clear()  # type: ignore[attr-defined]

    def require_attached(self) -> None:
        """StateError between `prepare` and `attach`."""
        if self.awaiting:
            raise StateError(
                "this optimizer was built for a prepared model; call attach(ddp_model, optimizer) before the first step"
            )

    def load_staged(self, state_dict: Mapping[str, Any]) -> None:
        """What torch's `load_state_dict` does, into the host tensors: groups by position, state by parameter."""
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        saved_groups = state_dict["param_groups"]
        if len(saved_groups) != len(groups):
            raise StateError(f"the saved optimizer has {len(saved_groups)} parameter groups, this one {len(groups)}")
        for group, saved in zip(groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            keys = zip(saved["params"], group["params"], strict=True)
            for identifier, key in keys:
                self._load_one(key, state_dict["state"].get(identifier), group)

    def _load_one(self, key: torch.Tensor, saved: Any, group: Mapping[str, Any]) -> None:
        state = self.state[key]  # type: ignore[attr-defined]
        if saved is not None and saved is not state:
            for name, value in saved.items():
                if name in state:
                    state[name] = value
        if "step" in group and group["step"] is not None and "step" not in (saved or {}):
            for master in state.unit.masters:
                master.step = int(group["step"])


def _piece_writer(writer: Writer, unit: Unit, flat: slice) -> Writer:
    """Only what a `PlainWriter` writes is ever cut."""
    if flat.stop - flat.start == unit.key.numel():
        return writer
    return cast("PlainWriter", writer).block(flat)


def _never() -> bool:
    return False
