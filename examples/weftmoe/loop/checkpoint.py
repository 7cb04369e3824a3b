"""Checkpoints of a run: Megatron's distributed checkpoint of the trainer, and one file with everything else.

    OUT/checkpoints/step-000020/trainer/      model, FP32 masters, optimizer state
    OUT/checkpoints/step-000020/loop.json     step, version, data position, token counters, the settings that must agree

A checkpoint is written beside its place and renamed when it is whole, so a killed run never leaves half of one under a
name that is looked for; the next start removes what it leaves under another (`weftmoe.rundir`). Random numbers of the
loop need no state: every draw of a step comes from the run's seed, the step, and the prompt. An engine's own samples do
so with `train.deterministic` only; else it samples on from its start's seed after a resume. The version that a
checkpoint holds is its step's, and a resumed run publishes it first, before it samples.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weftmoe.disk import MIB, free_bytes_at
from weftmoe.loop.ranks import Ranks
from weftmoe.loop.trainer import MegatronGrpo
from weftmoe.telemetry.record import Counters
from weftpub.errors import CheckpointError

__all__ = ["LoopState", "delete_old", "latest", "load", "save", "state_path", "step_of"]

_STATE = "loop.json"
_TRAINER = "trainer"
_PREFIX = "step-"


@dataclass(frozen=True)
class LoopState:
    """Where the loop stands after a step.

    Attributes:
        step: finished steps; also the version that the trainer holds.
        data: position of the prompt sampler.
        total: token counters since step 1.
        identity: settings that a resumed run must share: variant, optimizer, seed, model.
        fixed: (tokens, first) that are scored after every publish of a run with learning rate 0.
    """

    step: int
    data: dict[str, int | str]
    total: Counters
    identity: dict[str, str]
    fixed: tuple[tuple[tuple[int, ...], int], ...] = ()


def latest(out: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    folder = out / "checkpoints"
    found = sorted(path for path in folder.glob(f"{_PREFIX}*") if (path / _STATE).is_file()) if folder.is_dir() else []
    return found[-1] if found else None


def state_path(path: Path) -> Path:
    """The file that says that a checkpoint is whole."""
    return path / _STATE


def step_of(path: Path) -> int:
    """The step whose state a checkpoint of `latest` has, by its name."""
    return int(path.name.removeprefix(_PREFIX))


def read_state(path: Path) -> LoopState:
    """The loop's part of a checkpoint; CheckpointError if it is damaged."""
    try:
        data = json.loads((path / _STATE).read_text(encoding="utf-8"))
        fixed = tuple((tuple(tokens), first) for tokens, first in data.get("fixed", ()))
        return LoopState(data["step"], data["data"], Counters(**data["total"]), data["identity"], fixed)
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path / _STATE} cannot be read: {error}; remove {path} to resume from an older one"
        ) from None


def save(out: Path, trainer: MegatronGrpo, state: LoopState, ranks: Ranks) -> Path:
    """Write a checkpoint; collective. The trainer's memory must be loaded.

    Raises:
        CheckpointError: it could not be written; older checkpoints are untouched.
    """
    target = out / "checkpoints" / f"{_PREFIX}{state.step:06d}"
    part = target.with_name(f".{target.name}.part")
    room = _Room(out)
    try:
        if ranks.first:
            shutil.rmtree(part, ignore_errors=True)
            (part / _TRAINER).mkdir(parents=True)
        ranks.barrier()
        _save_trainer(trainer, part / _TRAINER, lambda nbytes: room.require(sum(ranks.gather(nbytes)), ranks))
        ranks.barrier()
        if ranks.first:
            _write_state(part / _STATE, state)
            if target.exists():  # of an earlier start that went further than the checkpoint which this one resumed
                _remove(target)
            part.rename(target)
            _sync_folder(target.parent)
    except (OSError, _NotWritten) as error:
        # Before its part is removed, which makes room again.
        message = f"{target} could not be written: {_reason(error)}; {room}"
        if ranks.first:
            shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(message) from error
    ranks.barrier()
    return target


def load(path: Path, trainer: MegatronGrpo, identity: dict[str, str]) -> LoopState:
    """Read a checkpoint into the trainer; collective.

    Raises:
        CheckpointError: it is damaged, or of a run with other settings.
    """
    state = read_state(path)
    if state.identity != identity:
        wrong = {name: (state.identity.get(name), identity[name]) for name in identity}
        differing = {name: pair for name, pair in wrong.items() if pair[0] != pair[1]}
        raise CheckpointError(
            f"{path} is of other settings: {differing} (saved, now); set them back, or start in another --out"
        )
    _load_trainer(trainer, path / _TRAINER)
    return state


def delete_old(out: Path, keep: int) -> None:
    """Remove all checkpoints but the newest ones."""
    whole = sorted(path for path in (out / "checkpoints").glob(f"{_PREFIX}*") if (path / _STATE).is_file())
    for path in whole[:-keep]:
        _remove(path)


def _remove(path: Path) -> None:
    (path / _STATE).unlink(missing_ok=True)  # first: a half-removed one must not be found
    shutil.rmtree(path)


def _sync_folder(path: Path) -> None:
    """A name is on the disk once its folder is."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _NotWritten(Exception):
    """Megatron's writers failed, or would; on every rank."""


class _Room:
    """What a checkpoint needs of its disk, and what is free there, in words.

    Args:
        out: a folder on that disk.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._needed: int | None = None

    def require(self, needed: int, ranks: Ranks) -> None:
        """_NotWritten on every rank if `needed` bytes are more than rank 0 finds to be free: Megatron's writers would
        find out one after the other, each in words of its own.
        """
        self._needed = needed
        free: int | None = ranks.broadcast(free_bytes_at(self._out))
        if free is not None and free < needed:
            raise _NotWritten("the disk is too full, and nothing was written")

    def __str__(self) -> str:
        free = free_bytes_at(self._out)
        room = "unknown" if free is None else f"{free // MIB} MiB"
        needed = "" if self._needed is None else f", {-(-self._needed // MIB)} MiB are needed"
        return (
            f"free: {room}{needed}. Free space, or make {self._out} writable, and start again with the same --out: "
            "older checkpoints are whole, and the run goes on from the newest"
        )


def _reason(error: OSError | _NotWritten) -> str:
    """Without the number of the operating system's errors, and with the file."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def _write_state(path: Path, state: LoopState) -> None:
    plain = {
        "step": state.step,
        "data": state.data,
        "total": state.total.model_dump(),
        "identity": state.identity,
        "fixed": state.fixed,
    }
    with path.open("w", encoding="utf-8") as file:
        json.dump(plain, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _save_trainer(trainer: MegatronGrpo, path: Path, announce: Callable[[int], None]) -> None:
    """`announce` is told the bytes that this rank will write, and may refuse."""
    attachment = trainer.attachment
    with attachment.saving() if attachment.attached else contextlib.nullcontext():
        state = _sharded(trainer, loading=False)
        announce(_nbytes(state))
        _write_trainer(state, path)


def _nbytes(state: dict[str, Any]) -> int:
    """Bytes of the tensors that this rank writes: of replicas one does."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica

    return sum(
        value.data.nbytes
        for value in nested_values(state)
        if isinstance(value, ShardedTensor | ShardedTensorFactory)
        and value.data is not None
        and is_main_replica(value.replica_id)
    )


def _write_trainer(state: dict[str, Any], path: Path) -> None:
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        dist_checkpointing.save(state, str(path))
    except CheckpointException as error:  # no Exception, so nobody above would take it for a failed save
        causes = {f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items()}
        raise _NotWritten("; ".join(sorted(causes))) from error


def _load_trainer(trainer: MegatronGrpo, path: Path) -> None:
    if trainer.attachment.attached:
        with trainer.attachment.loading():
            _read(trainer, path)
    else:
        _make_state(trainer.optimizer)
        _read(trainer, path)


def _make_state(optimizer: Any) -> None:
    """Let torch's own AdamW be read, which is inside of Megatron's DistributedOptimizer where there is no
    TransformerEngine.

    Megatron asks it for the number of its steps before it has read one, so it makes its state here; all of that is read
    afterwards. And it looks for that number among what is saved for each parameter, where it never puts it: nothing is
    found, and nothing set.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = one.optimizer
        if not isinstance(one, DistributedOptimizer) or not isinstance(inner, torch.optim.AdamW) or inner.state:
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        inner.step()
        inner.zero_grad()
        one._set_main_param_and_optimizer_states = partial(_set_all_but_step, one._set_main_param_and_optimizer_states)


def _set_all_but_step(set_all: Callable[[Any, dict[str, Any]], None], parameter: Any, tensors: dict[str, Any]) -> None:
    set_all(parameter, {"step": None, **tensors})


def _read(trainer: MegatronGrpo, path: Path) -> None:
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(_sharded(trainer, loading=True), str(path))
    trainer.model.module.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])


def _sharded(trainer: MegatronGrpo, *, loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    metadata = {
        # Keeps its keys when the flat buffers are laid out otherwise, as an attached trainer's are.
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = trainer.model.module.sharded_state_dict(metadata=metadata)
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}
