"""The output directory of a run: one run at a time, and a resumed run is the one that was begun.

settings.yaml    the resolved settings, which every rank reads
run.lock         held while the run goes on
stopped.json     the run was told to end, and did: where it goes on when it is started again, which removes this
codes            exit codes of a Slurm job's nodes
starts           Slurm's starts since the newest checkpoint, and its name: `slurm.sbatch` writes and reads it
going            this start has come to its steps: if a rank or an engine is lost now, another start is worth its while
changed.json     settings that were changed since the log's last start, which the next one's header repeats
before-1, ...    what runs wrote that were given up: a start with `checkpoint.resume` false sets it aside
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weftmoe import settings as composed
from weftmoe.disk import MIB, free_bytes_at
from weftmoe.schema import Settings
from weftpub.errors import ConfigError

__all__ = [
    "EXIT_AGAIN",
    "EXIT_LOST",
    "apart",
    "claim",
    "differences",
    "forget_changes",
    "going_path",
    "note_stop",
    "settings_path",
    "stopped_path",
    "unsaid_changes",
]

EXIT_AGAIN = 75  # of a run that stopped because it was told to, and goes on where it is started again
# Of a run that lost a rank, an engine or a peer. Of the codes of several nodes srun gives the largest; those of signals
# end at 192.
EXIT_LOST = 200

# What a run leaves behind for the next start or for a reader.
_LEFT = ("checkpoints", "steps.jsonl", "tensorboard", "wandb")
# What may change between two starts of one run, keys or whole blocks: how, where and how long it runs. All else says
# what is learned, or how a checkpoint is laid out. Kernels and microbatches may: sums are rounded otherwise, no more.
_FREE = (
    "steps",
    "out",
    "checkpoint",
    "telemetry",
    "roles",
    # The data themselves are compared by the position in them.
    "model.path",
    "data.path",
    "data.split",
    "data.epochs",
    "length.context",
    "length.microbatch_tokens",
    "cluster.numa_binding",
    "rollout.tensor",
    "rollout.data",
    "rollout.expert",
    "rollout.dp_attention",
    "rollout.moe_runner",
    "rollout.fp8_gemm_runner",
    "rollout.moe_a2a",
    "rollout.attention_backend",
    "rollout.memory_fraction",
    "rollout.max_running",
    "rollout.cuda_graph",
    "rollout.cuda_graph_max_batch",
    "rollout.cuda_graph_batches",
    "rollout.radix_cache",
    "rollout.drain",
    "rollout.ready_timeout",
    "rollout.generate_timeout",
    "train.attention",
    "train.dispatcher",
    "train.flex_backend",
    "train.recompute",
    "train.overlap_grad_reduce",
    "train.logit_chunk_tokens",
    "train.deterministic",
    "train.offload",
    "optimizer.slots",
    "optimizer.slot_numel",
    "algorithm.max_resamples",
    "reward.workers",
    "publish.experts",
    "publish.staging_mib",
    "publish.bucket_mib",
    "publish.verify_sha256",
    "publish.deadline",
)
# Of those, what nobody wants to read about in a log.
_UNSAID = ("steps", "out", "checkpoint", "telemetry")
# What may differ between the nodes of one start: where the same files lie, and how its network is called.
_OF_A_NODE = ("model.path", "data.path", "roles")


def settings_path(out: Path, node_rank: int = 0) -> Path:
    """Where the settings for the ranks of one node stand."""
    return out / ("settings.yaml" if node_rank == 0 else f"settings-node-{node_rank}.yaml")


def stopped_path(out: Path) -> Path:
    """The note of a run that stopped before its last step because it was told to."""
    return out / "stopped.json"


def going_path(out: Path) -> Path:
    """There from the first step of a start on, until an error that another start would meet again."""
    return out / "going"


def unsaid_changes(out: Path) -> tuple[str, ...]:
    """Settings that were changed since the start that the log has last, as `key: old -> new`: also those of starts that
    ended before they had a log.
    """
    path = _changed_path(out)
    return tuple(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else ()


def forget_changes(out: Path) -> None:
    """The log has them."""
    _changed_path(out).unlink(missing_ok=True)


def note_stop(out: Path, step: int) -> None:
    """Leave the note: a resumed run goes on after `step`."""
    stopped_path(out).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")


def claim(settings: Settings, node_rank: int = 0) -> int | None:
    """Make the directory, take its lock for the rest of this process (torchrun inherits it), write the settings.

    Args:
        settings: of the run.
        node_rank: node 0 owns the directory; the others only write the settings for their own ranks.

    Returns:
        The lock's file descriptor, on node 0.

    Raises:
        ConfigError: it cannot be made or written, another run has it, or what it holds was begun with other settings.
    """
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={settings.out} cannot be made: {error.strerror}; choose another --out") from None
    path = settings_path(settings.out, node_rank)
    if node_rank != 0:
        # An earlier start's; this one makes its own when all nodes have met. Node 0 may fail before it removes it.
        going_path(settings.out).unlink(missing_ok=True)
        _write_settings(settings, path)
        return None
    lock = _lock(settings.out / "run.lock")
    try:
        changed = _require_same(settings, path)
        _remove_unfinished(settings.out / "checkpoints")
        if not settings.checkpoint.resume:
            _set_aside(settings.out)
        for note in (stopped_path(settings.out), going_path(settings.out)):
            note.unlink(missing_ok=True)
        _write_settings(settings, path, changed)
    except BaseException:
        os.close(lock)
        raise
    return lock


def differences(old: Settings, new: Settings) -> list[str]:
    """Settings that two starts of one run must agree on and do not, as `key: old -> new`."""
    return [words for key, words in _differing(old, new) if not _among(_FREE, key)]


def apart(first: Settings, other: Settings) -> list[str]:
    """Settings that two nodes of one start must agree on and do not, as `key: first's -> other's`."""
    return [words for key, words in _differing(first, other) if not _among(_OF_A_NODE, key)]


def _differing(old: Settings, new: Settings) -> Iterator[tuple[str, str]]:
    before, after = (dict(_flat(one.model_dump(mode="json"))) for one in (old, new))
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            yield key, f"{key}: {before.get(key)!r} -> {after.get(key)!r}"


def _among(names: tuple[str, ...], key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _changed_path(out: Path) -> Path:
    return out / "changed.json"


def _write_settings(settings: Settings, path: Path, changed: Sequence[str] = ()) -> None:
    try:
        if changed:
            words = [*unsaid_changes(settings.out), *changed]
            _changed_path(settings.out).write_text(json.dumps(words) + "\n", encoding="utf-8")
        composed.write(settings, path)
    except OSError as error:
        free = free_bytes_at(path)
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; {'?' if free is None else free // MIB} MiB are free there. "
            "Free space, or choose another --out"
        ) from None


def _require_same(settings: Settings, path: Path) -> list[str]:
    """What differs and may, in a run that is resumed."""
    if not (path.exists() and settings.checkpoint.resume and _began(settings.out)):
        return []
    old = composed.read(path)
    changes = differences(old, settings)
    if changes:
        raise ConfigError(
            f"{settings.out} holds a run with other settings: {'; '.join(changes)}. Resume it with its own, choose "
            "another --out, or start anew there with checkpoint.resume=false"
        )
    return [words for key, words in _differing(old, settings) if not _among(_UNSAID, key)]


def _lock(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another --out") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(f"another run is at work in {path.parent}; choose another --out, or wait") from None
    os.set_inheritable(descriptor, True)
    return descriptor


def _set_aside(out: Path) -> None:
    """Move what an earlier run left: a new one would drop its own checkpoints as older than those, its next start would
    resume the run that was given up, and its log would go on with the other's steps.
    """
    left = [out / name for name in _LEFT if (out / name).exists()]
    if not left:
        return
    number = 1
    while (out / f"before-{number}").exists():
        number += 1
    folder = out / f"before-{number}"
    folder.mkdir()
    for path in left:
        path.rename(folder / path.name)


def _remove_unfinished(checkpoints: Path) -> None:
    """What a run left that was killed while it saved a checkpoint, or removed an old one: nobody else would ever remove
    it, unless it saved the same step again.
    """
    removed = [path for path in checkpoints.glob("step-*") if not (path / "loop.json").exists()]
    for path in (*checkpoints.glob(".step-*.part"), *removed):
        shutil.rmtree(path, ignore_errors=True)


def _began(out: Path) -> bool:
    """Whether a whole checkpoint lies there: without one, nothing is resumed."""
    return any((out / "checkpoints").glob("step-*/loop.json"))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
