"""What staged optimizers share: checks before the first write, the slots, the report, exact resume.

A step, in order: the gradients are checked; every master goes through a slot, where ``run_one`` updates it and its
writer reads the result; the step counts move on. An exception after the checks leaves the masters torn (see
:class:`weftpub.masters.MasterSet`).

An integration that lives inside another framework's optimizer collects ``{name: gradient}`` and calls ``step``; one
that wants its own arithmetic in the slots overrides ``run_one``, which knows neither slots nor streams nor hosts.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import torch

from weftpub.errors import ConfigError
from weftpub.masters import MasterSet, format_names
from weftpub.optim.gradients import check_gradients, gradient_norms, joint_norm
from weftpub.staging import StagedMaster, StagingPipeline, Work, Writer

__all__ = ["Hyperparameters", "MasterStep", "Override", "StagedOptimizer", "StepReport"]


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What every optimizer has.

    Attributes:
        lr: learning rate, unless a step or an override says otherwise.
        weight_decay: decay coefficient, unless an override says otherwise.
    """

    lr: float
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        require_number("lr", self.lr)
        require_number("weight_decay", self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class Override:
    """Own settings of one master; None keeps the optimizer's."""

    lr: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        require_number("lr", 0.0 if self.lr is None else self.lr)
        require_number("weight_decay", 0.0 if self.weight_decay is None else self.weight_decay)


@dataclass(frozen=True, slots=True)
class MasterStep:
    """One master's settings for one step.

    Attributes:
        lr: learning rate.
        weight_decay: decay coefficient.
        step: number of this update, from 1.
    """

    lr: float
    weight_decay: float
    step: int


@dataclass(frozen=True)
class StepReport:
    """What a step did.

    Attributes:
        step: number of the step, from 1.
        updated: matrices that went through a slot and back (all of them).
        grad_norm: joint Euclidean norm of the gradients as given to ``step``.
        grad_norms: name -> norm; zero only for a gradient of zeros.
        learning_rates: name -> learning rate used.
        master_changed: name -> whether any byte of the weight differs from before the step.
    """

    step: int
    updated: int
    grad_norm: float
    grad_norms: Mapping[str, float]
    learning_rates: Mapping[str, float]
    master_changed: Mapping[str, bool]

    @property
    def stalled(self) -> tuple[str, ...]:
        """Masters with learning rate > 0 and a gradient that is not zero, of which no byte changed."""
        return tuple(
            name
            for name, changed in self.master_changed.items()
            if not changed and self.learning_rates[name] > 0 and self.grad_norms[name] > 0
        )

    @property
    def none_changed(self) -> bool:
        """Whether some master should have changed and not one did: the updates do not reach the masters."""
        return bool(self.stalled) and not any(self.master_changed.values())


class StagedOptimizer[H: Hyperparameters](ABC):
    """An optimizer whose masters and state live in host memory and are updated in slots.

    Class attributes:
        KIND: name in checkpoints and messages.
        STATES: state tensors that its masters must carry.
    """

    KIND: ClassVar[str]
    STATES: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        masters: MasterSet,
        pipeline: StagingPipeline,
        writers: Writer | Mapping[str, Writer],
        hyperparameters: H,
        *,
        overrides: Mapping[str, Override] | None = None,
    ) -> None:
        """Joins masters, pipeline and writers; moves nothing.

        Args:
            masters: built with ``states=STATES``.
            pipeline: the slots to use; it may be shared with other optimizers.
            writers: one for all masters, or exactly one per master.
            hyperparameters: the settings.
            overrides: own learning rate or weight decay of some masters.

        Raises:
            ConfigError: wrong states, names that do not match, a matrix that fits no slot or that this optimizer
                does not take, or masters outside pinned memory for a CUDA pipeline.
        """
        self.check_masters(masters)
        self.masters = masters
        self.pipeline = pipeline
        self.hyperparameters = hyperparameters
        self.overrides = dict(overrides) if overrides is not None else {}
        self._writers = _writer_per_master(masters, writers)
        unknown = set(self.overrides) - set(masters)
        if unknown:
            raise ConfigError(f"overrides name no master: {format_names(unknown)}")
        pipeline.require_fit(masters)

    def check_masters(self, masters: MasterSet) -> None:
        """Raises ConfigError for masters that the optimizer does not take; the base asks for its states."""
        if masters.states != self.STATES:
            raise ConfigError(
                f"{self.KIND} needs masters with states {list(self.STATES)}, got {list(masters.states)}: "
                f"build them with states={type(self).__name__}.STATES"
            )

    @abstractmethod
    def run_one(self, staged: StagedMaster, gradient: torch.Tensor, settings: MasterStep) -> None:
        """Updates one master in place, on whatever device its tensors are.

        Args:
            staged: FP32 weight and state.
            gradient: FP32, contiguous, on the same device; it belongs to the caller and must not be changed.
            settings: this master's settings for this step.
        """

    @torch.no_grad()
    def step(self, grads: Mapping[str, torch.Tensor], *, lr: float | Mapping[str, float] | None = None) -> StepReport:
        """Updates every master and hands it to its writer; returns when all are back in host memory.

        Args:
            grads: name -> gradient of the master's shape, FP32, BF16, FP16 or FP64, on any CPU or GPU. Left unchanged.
            lr: learning rate of this step; None takes that of the hyperparameters. Overrides keep their own. A mapping
                gives every master its own.

        Raises:
            ConfigError: names, shapes, dtypes or learning rates are wrong; nothing was changed.
            NonFiniteGradientError: NaN or Inf in a gradient, or FP64 beyond the range of FP32; nothing was changed.
            TornError: an earlier step or load failed half-way.
            Exception: whatever a writer or the device raised; the masters are torn then.
        """
        self.masters.require_whole(f"a step of {self.KIND}")
        check_gradients(self.masters, grads)
        settings = self._settings(lr)
        norms = gradient_norms(grads, in_fp32=True)
        number = max(setting.step for setting in settings.values())
        changed = torch.zeros(len(self.masters), dtype=torch.bool, device=self.pipeline.device)
        with self.masters.changing(f"{self.KIND} step {number}", lambda: self.pipeline.progress):
            self.pipeline.run(self._works(grads, settings, changed))
            flags = changed.tolist()
            for name, master in self.masters.items():
                master.step = settings[name].step
        return StepReport(
            step=number,
            updated=len(self.masters),
            grad_norm=joint_norm(norms.values()),
            grad_norms=norms,
            learning_rates={name: setting.lr for name, setting in settings.items()},
            master_changed=dict(zip(self.masters, flags, strict=True)),
        )

    def write_all(self) -> int:
        """Shows every master to its writer as it is: the first filling of a store, or its refilling after a recovery.

        Masters, state and step counts stay untouched. Returns the number of matrices.

        Raises:
            TornError: the masters are torn.
        """
        self.masters.require_whole(f"writing the masters of {self.KIND}")
        self.pipeline.run(Work(master, self._writers[name]) for name, master in self.masters.items())
        return len(self.masters)

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Everything that the next step depends on: tensors, and values that JSON can hold.

        ``{"kind", "hyperparameters", "overrides", "masters"}``; ``masters`` and ``copy`` are those of
        :meth:`weftpub.masters.MasterSet.state_dict`.

        Raises:
            TornError: the masters are torn.
        """
        return {
            "kind": self.KIND,
            "hyperparameters": asdict(self.hyperparameters),
            "overrides": {name: asdict(override) for name, override in self.overrides.items()},
            "masters": self.masters.state_dict(copy=copy),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the whole state, hyperparameters included; the next step gives the bytes that it gave there.

        Heals torn masters. What was written from them (a store) is not touched: call :meth:`write_all` next.

        Raises:
            ConfigError: saved by another kind of optimizer, or anything that does not fit; nothing was changed.
            TornError: the state views the torn memory itself.
        """
        expected = {"kind", "hyperparameters", "overrides", "masters"}
        if set(state) != expected:
            raise ConfigError(f"optimizer state holds {sorted(state)}, expected {sorted(expected)}")
        if state["kind"] != self.KIND:
            raise ConfigError(f"this state was saved by optimizer {state['kind']!r}, it does not fit {self.KIND!r}")
        hyperparameters = _rebuild(type(self.hyperparameters), state["hyperparameters"])
        overrides = {name: _rebuild(Override, saved) for name, saved in state["overrides"].items()}
        unknown = set(overrides) - set(self.masters)
        if unknown:
            raise ConfigError(f"saved overrides name no master: {format_names(unknown)}")
        self.masters.load_state_dict(state["masters"])
        self.hyperparameters = hyperparameters
        self.overrides = overrides

    def _works(
        self, grads: Mapping[str, torch.Tensor], settings: Mapping[str, MasterStep], changed: torch.Tensor
    ) -> Iterator[Work]:
        for (name, master), flag in zip(self.masters.items(), changed.unbind(), strict=True):
            yield Work(master, self._writers[name], self._update(settings[name], flag), grads[name])

    def _update(self, settings: MasterStep, flag: torch.Tensor) -> Any:
        def update(staged: StagedMaster, gradient: torch.Tensor) -> None:
            before = staged.weight.clone()
            self.run_one(staged, gradient, settings)
            # Bits, not values: -0.0 differs from 0.0 here, and NaN equals itself.
            torch.any(before.view(torch.int32) != staged.weight.view(torch.int32), out=flag)

        return update

    def _settings(self, lr: float | Mapping[str, float] | None) -> dict[str, MasterStep]:
        if isinstance(lr, Mapping) and set(lr) != set(self.masters):
            raise ConfigError(
                f"learning rates do not match the masters: missing {format_names(set(self.masters) - set(lr))}, "
                f"unknown {format_names(set(lr) - set(self.masters))}"
            )
        return {
            name: MasterStep(
                lr=require_number("lr", self._learning_rate(name, lr)),
                weight_decay=self._weight_decay(name),
                step=master.step + 1,
            )
            for name, master in self.masters.items()
        }

    def _learning_rate(self, name: str, lr: float | Mapping[str, float] | None) -> float:
        if isinstance(lr, Mapping):
            return lr[name]
        own = self.overrides[name].lr if name in self.overrides else None
        if own is not None:
            return own
        return self.hyperparameters.lr if lr is None else lr

    def _weight_decay(self, name: str) -> float:
        own = self.overrides[name].weight_decay if name in self.overrides else None
        return self.hyperparameters.weight_decay if own is None else own


def require_number(setting: str, value: float, below: float = math.inf) -> float:
    """The value, if it is a number from 0 to under ``below``; else ConfigError naming the setting."""
    if not isinstance(value, int | float) or not 0.0 <= value < below:  # pyright: ignore[reportUnnecessaryIsInstance]
        limit = "" if below == math.inf else f" and below {below}"
        raise ConfigError(f"{setting} must be a finite number from 0{limit}, got {value!r}")
    return value


def _writer_per_master(masters: MasterSet, writers: Writer | Mapping[str, Writer]) -> dict[str, Writer]:
    if not isinstance(writers, Mapping):
        if not callable(writers):
            raise ConfigError(f"writers must be callable or a mapping of them, got {type(writers).__name__}")
        return dict.fromkeys(masters, writers)
    missing, unknown = set(masters) - set(writers), set(writers) - set(masters)
    if missing or unknown:
        raise ConfigError(
            f"writers do not match the masters: missing {format_names(missing)}, unknown {format_names(unknown)}; "
            "a master without one would never reach the forward pass"
        )
    return dict(writers)


def _rebuild[T](kind: type[T], saved: Mapping[str, Any]) -> T:
    known: Any = kind
    expected = {field.name for field in fields(known)}
    if set(saved) != expected:
        raise ConfigError(f"saved {kind.__name__} holds {sorted(saved)}, expected {sorted(expected)}")
    return kind(**saved)
