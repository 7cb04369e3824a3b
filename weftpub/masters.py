"""FP32 master weights and optimizer state in host memory, one block per matrix, all blocks in one arena.

A master is the only authority on a weight: everything else (FP8 bytes, scales, exports) is made from it, and only an
optimizer step or :meth:`MasterSet.load_state_dict` changes it. Reading, exporting and hashing never do.

Layout: the weight and its state tensors lie side by side in one flat block, so staging moves a master with one copy in
and one copy out::

    block:  [ weight | pad ][ state 1 | pad ][ state 2 | pad ]      each part padded to 64 elements (256 bytes)
    arena:  [ block of master 0 ][ block of master 1 ] ...          page-locked on a machine with CUDA

One arena instead of thousands of allocations: page-locking is a system call per allocation, and costs per page besides.
"""

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import torch

from weftpub.device import pinned
from weftpub.errors import ConfigError, TornError

__all__ = ["BlockLayout", "ExpertMatrix", "Master", "MasterSet", "find_nonfinite", "format_names"]

_ALIGN = 64
_EXPERT_NAME = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.(fc1|fc2)")


@dataclass(frozen=True)
class ExpertMatrix:
    """One projection of one routed expert.

    Attributes:
        layer: index of the transformer layer.
        expert: global expert id (never an id local to an expert-parallel rank).
        projection: ``fc1`` is [gate; up] ``[2 * intermediate, hidden]``, ``fc2`` is down ``[hidden, intermediate]``.
    """

    layer: int
    expert: int
    projection: Literal["fc1", "fc2"]

    def __post_init__(self) -> None:
        if self.layer < 0 or self.expert < 0 or self.projection not in ("fc1", "fc2"):
            raise ConfigError(f"{self!r}: layer and expert count from 0, and projection is 'fc1' or 'fc2'")

    @property
    def name(self) -> str:
        """``layers.{layer}.experts.{expert}.{projection}``."""
        return f"layers.{self.layer}.experts.{self.expert}.{self.projection}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """The matrix of a name that :attr:`name` made; ConfigError for any other."""
        found = _EXPERT_NAME.fullmatch(name)
        if found is None:
            raise ConfigError(f"{name!r} names no expert matrix; expected layers.<layer>.experts.<expert>.fc1 or .fc2")
        projection: Any = found[3]
        return cls(int(found[1]), int(found[2]), projection)


@dataclass(frozen=True)
class BlockLayout:
    """Where a master's tensors lie in its flat block; the same for its host memory and for a slot.

    Attributes:
        shape: shape of the weight and of every state tensor (2-D; 1-D and scalars for AdamW).
        states: names of the state tensors, in order.
    """

    shape: tuple[int, ...]
    states: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Elements of one tensor."""
        return math.prod(self.shape)

    @property
    def stride(self) -> int:
        """Elements from the start of one tensor to the start of the next."""
        return -(-self.numel // _ALIGN) * _ALIGN

    @property
    def tensors(self) -> int:
        return 1 + len(self.states)

    @property
    def total(self) -> int:
        """Elements of the block."""
        return self.tensors * self.stride

    def split(self, flat: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Views of the weight and the states in a flat buffer of at least :attr:`total` elements."""
        views = [flat.narrow(0, i * self.stride, self.numel).view(self.shape) for i in range(self.tensors)]
        return views[0], dict(zip(self.states, views[1:], strict=True))


class Master:
    """One FP32 master weight with its optimizer state; all tensors are views of ``block`` in host memory.

    Attributes:
        name: unique in its set.
        layout: shape and state names.
        block: flat FP32 ``[layout.total]``, what staging copies.
        weight: FP32 ``[M, N]`` (or ``[N]``, or a scalar).
        state: state name -> FP32 tensor of the weight's shape.
        step: updates done so far; AdamW's bias correction counts with it.
    """

    __slots__ = ("block", "layout", "name", "state", "step", "weight")

    def __init__(self, name: str, layout: BlockLayout, block: torch.Tensor) -> None:
        self.name = name
        self.layout = layout
        self.block = block
        self.weight, self.state = layout.split(block)
        self.step = 0

    def __repr__(self) -> str:
        return f"Master({self.name!r}, shape={list(self.layout.shape)}, step={self.step})"

    def tensors(self) -> dict[str, torch.Tensor]:
        """``weight`` and every state tensor, by name."""
        return {"weight": self.weight, **self.state}


class MasterSet(Mapping[str, Master]):
    """The masters of one optimizer on one rank, in the order in which steps visit them.

    A set is *torn* while a step or a load changes it, and stays torn when that fails half-way: some masters are new,
    some old, and nobody knows which. A torn set refuses steps and saves until :meth:`load_state_dict` has rewritten it.
    """

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], states: Sequence[str] = (), *, pin: bool | None = None
    ) -> None:
        """Allocates zeroed masters.

        Args:
            shapes: name -> shape of the weight: 2-D matrices, or 1-D and scalar parameters (AdamW only).
            states: names of the FP32 state tensors of every master (``StagedMuon.STATES``, ``StagedAdamW.STATES``).
            pin: page-lock the arena; None does where CUDA is available.

        Raises:
            ConfigError: no masters, an empty or more than 2-D shape, bad state names, or not enough lockable memory.
        """
        if not shapes:
            raise ConfigError("a set of masters needs at least one; got none")
        if "weight" in states or len(set(states)) != len(states):
            raise ConfigError(f"state names must be unique and not 'weight'; got {list(states)}")
        layouts = {name: BlockLayout(tuple(shape), tuple(states)) for name, shape in shapes.items()}
        for name, layout in layouts.items():
            _check_shape(name, layout.shape)
        arena = pinned(sum(layout.total for layout in layouts.values()), pin=pin)
        self._arena = arena
        self._masters: dict[str, Master] = {}
        self._torn: str | None = None
        start = 0
        for name, layout in layouts.items():
            self._masters[name] = Master(name, layout, arena.narrow(0, start, layout.total))
            start += layout.total

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor], states: Sequence[str] = (), *, pin: bool | None = None
    ) -> Self:
        """Masters that start from given weights (FP32 or BF16, any device); the values are copied, the states are zero.

        Raises:
            ConfigError: as the constructor, or a weight of another dtype, or one that holds NaN or Inf.
        """
        for name, tensor in tensors.items():
            if tensor.dtype not in (torch.float32, torch.bfloat16):
                raise ConfigError(
                    f"master {name!r} must start from float32 or bfloat16, got {tensor.dtype}; "
                    "an FP8 weight has lost the bits that a master keeps: start from the original checkpoint"
                )
        masters = cls({name: tuple(tensor.shape) for name, tensor in tensors.items()}, states, pin=pin)
        for name, tensor in tensors.items():
            _require_finite(tensor, f"initial weight of master {name!r}")
            masters[name].weight.copy_(tensor.detach())
        return masters

    def __getitem__(self, name: str) -> Master:
        return self._masters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masters)

    def __len__(self) -> int:
        return len(self._masters)

    @property
    def is_pinned(self) -> bool:
        """Whether the arena is page-locked."""
        return torch.cuda.is_available() and self._arena.is_pinned()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory: 4 * (1 + states) per element, and padding."""
        return self._arena.numel() * self._arena.itemsize

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the state tensors that every master carries."""
        return next(iter(self._masters.values())).layout.states

    @property
    def torn(self) -> str | None:
        """Why the set is torn, or None."""
        return self._torn

    def mark_torn(self, reason: str) -> None:
        """Declare the masters unusable, e.g. because the store found NaN in a matrix that they just wrote."""
        self._torn = reason

    def require_whole(self, action: str) -> None:
        """Raises TornError, naming the refused action, while the set is torn."""
        if self._torn is not None:
            raise TornError(
                f"{action} refused: the masters are torn ({self._torn}). "
                "Recover all of them with load_state_dict from the last checkpoint"
            )

    def changing(self, action: str, progress: Callable[[], str] | None = None) -> AbstractContextManager["_Change"]:
        """Context in which masters change: torn inside, whole again only when the block ends without an exception.

        Args:
            action: what is being done, for the torn reason.
            progress: asked how far it came when it fails.
        """
        return _Change(self, action, progress)

    def sha256(self) -> dict[str, str]:
        """Name -> hex SHA-256 of the weight's bytes (little-endian FP32, row-major; the state is not part of it)."""
        return {name: hashlib.sha256(_raw_bytes(master.weight)).hexdigest() for name, master in self.items()}

    def state_dict(self, *, copy: bool = True) -> dict[str, dict[str, Any]]:
        """Name -> {"step": int, "weight": tensor, state name: tensor}, all tensors FP32 in host memory.

        Args:
            copy: False returns the live tensors, for a caller that writes them to disk at once and holds none of them.

        Raises:
            TornError: the set is torn, so there is no one state to save.
        """
        self.require_whole("saving masters")
        return {
            name: {"step": master.step} | {key: t.clone() if copy else t for key, t in master.tensors().items()}
            for name, master in self.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces every weight, state and step count by those of :meth:`state_dict`; heals a torn set.

        Everything is checked before the first byte changes.

        Raises:
            ConfigError: names, state names, shapes or dtypes differ, a weight holds NaN or Inf, or a tensor is missing.
            TornError: the set is torn and the state is a view of the torn memory itself (``state_dict(copy=False)``).
        """
        missing, unknown = set(self) - set(state), set(state) - set(self)
        if missing or unknown:
            raise ConfigError(
                f"saved masters do not match this set: missing {format_names(missing)}, unknown {format_names(unknown)}"
            )
        for name, master in self.items():
            self._check_saved(master, state[name])
        with self.changing("loading masters"):
            for name, master in self.items():
                for key, tensor in master.tensors().items():
                    tensor.copy_(state[name][key])
                master.step = state[name]["step"]

    def _check_saved(self, master: Master, saved: Mapping[str, Any]) -> None:
        expected = {"step", *master.tensors()}
        if set(saved) != expected:
            raise ConfigError(f"saved master {master.name!r} holds {sorted(saved)}, expected {sorted(expected)}")
        if type(saved["step"]) is not int or saved["step"] < 0:
            raise ConfigError(f"saved master {master.name!r}: step must be an int from 0, got {saved['step']!r}")
        for key in master.tensors():
            tensor = saved[key]
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(f"saved {key!r} of master {master.name!r} must be a tensor, not {type(tensor)}")
            if tensor.dtype != torch.float32 or tuple(tensor.shape) != master.layout.shape:
                raise ConfigError(
                    f"saved {key!r} of master {master.name!r} is {tensor.dtype} {list(tensor.shape)}, "
                    f"expected torch.float32 {list(master.layout.shape)}"
                )
            if self._torn is not None and self._owns(tensor):
                raise TornError(
                    f"loading masters refused: {key!r} of {master.name!r} is a view of the torn memory itself; "
                    "load a checkpoint, or a state_dict() that copied"
                )
        _require_finite(saved["weight"], f"saved weight of master {master.name!r}")

    def _owns(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._arena.untyped_storage().data_ptr()


class _Change(AbstractContextManager["_Change"]):
    """Marks a set torn while its block runs; see :meth:`MasterSet.changing`."""

    def __init__(self, masters: MasterSet, action: str, progress: Callable[[], str] | None) -> None:
        self._masters = masters
        self._action = action
        self._progress = progress

    def __enter__(self) -> Self:
        self._masters.mark_torn(f"{self._action} has begun and not ended")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._masters._torn = None
            return
        where = "" if self._progress is None else f", {self._progress()}"
        self._masters.mark_torn(f"{self._action} failed{where}: {kind.__name__}: {error}")


def find_nonfinite(tensor: torch.Tensor) -> tuple[int, int, float] | None:
    """Row, column and value of the first NaN or Inf of a tensor of at most two dimensions, or None.

    A 1-D tensor is one row. The answer is read on the host, so this waits for a GPU.
    """
    table = tensor.detach().reshape(1, -1) if tensor.ndim < 2 else tensor.detach()
    bad = ~torch.isfinite(table)
    if not bool(bad.any()):
        return None
    row, column = divmod(int(bad.flatten().to(torch.uint8).argmax()), table.shape[1])
    return row, column, float(table[row, column])


def format_names(names: Collection[str], limit: int = 5) -> str:
    """``none``, or the first names in order and how many more there are."""
    if not names:
        return "none"
    shown = ", ".join(repr(name) for name in sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) > 2:
        raise ConfigError(f"master {name!r} has shape {list(shape)}: give a matrix (2-D), or a 1-D or scalar parameter")
    if any(size < 1 for size in shape):
        raise ConfigError(f"master {name!r} has shape {list(shape)}: it is empty")


def _require_finite(tensor: torch.Tensor, what: str) -> None:
    found = find_nonfinite(tensor)
    if found is not None:
        row, column, value = found
        raise ConfigError(f"{what} is {value} at row {row}, column {column}; nothing was changed by it")


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
