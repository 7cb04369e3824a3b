"""Save and resume of a trainer: masters, optimizer state and the store's bytes, one version, nothing pickled.

A state directory holds ``state.json`` (everything but the bytes), ``trainer*.safetensors`` (masters, optimizer state
and whatever the caller adds) and ``experts*.safetensors`` (the store's canonical tensors, bytes and scales as they are:
FP8 to BF16 and back would not give them back).

One version: the save holds the store's lease from before the optimizer's state is read until the last byte is on disk.
A step that begins meanwhile waits in `ExpertStore.begin`, and a save that is asked for during a step waits for its
seal, both with a deadline. So the optimizer must step only between begin and seal, as `ExpertStore.writing` does.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from weftpub.checkpoint.atomic import AtomicDirectory
from weftpub.checkpoint.files import DTYPE_NAMES, LazyTensors, ShardedWriter, read_json
from weftpub.checkpoint.tree import flatten, unflatten
from weftpub.errors import CheckpointError, ConfigError
from weftpub.masters import format_names
from weftpub.store import ExpertStore
from weftpub_kernels import checksum

__all__ = ["SavedState", "Stateful", "load_state", "save_state"]

_FORMAT = 1
_TRAINER, _EXPERTS = "trainer", "experts"


class Stateful(Protocol):
    """What an optimizer must offer: nested mappings of tensors and scalars."""

    def state_dict(self, *, copy: bool) -> Mapping[str, Any]:
        """The whole state; copy=False gives the live tensors, which are written before anything can change them."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Take the whole state over by copying; the tensors are mapped files."""
        ...


@dataclass(frozen=True)
class SavedState:
    """One saved trainer.

    Attributes:
        directory: where it is.
        version: the version that was published when it was saved.
        generation: the store's generation, which the masters belong to.
        extra: what the caller added (step counters, random state, learning rate), tensors included.
    """

    directory: Path
    version: int
    generation: int
    extra: Mapping[str, Any]


def save_state(
    directory: Path | str,
    *,
    optimizers: Mapping[str, Stateful],
    store: ExpertStore,
    version: int,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    timeout: float | None = None,
    max_shard_bytes: int = 4 << 30,
) -> SavedState:
    """Write one consistent state; the directory appears whole or not at all.

    Args:
        optimizers: name to optimizer, masters included.
        version: recorded; the store's own generation is recorded besides.
        extra: nested mappings, lists and tuples of tensors, numbers and strings.
        timeout: seconds to wait for the end of a running step; the store's lease_timeout by default.

    Raises:
        GenerationError, TornError, StateError: the store is empty, torn, or offloaded. DeadlineError: the step did not
            end.
        ChecksumError: the store's bytes are no longer those that were sealed. ConfigError: a leaf that cannot be saved.
        CheckpointError: the disk is full or fails; the target is untouched.
    """
    with store.reading(purpose=f"save of version {version}", timeout=timeout) as generation:
        store.verify()
        live = {name: optimizer.state_dict(copy=False) for name, optimizer in optimizers.items()}
        state, trainer = flatten(live, "optimizers")
        more, tensors = flatten(dict(extra or {}), "extra")
        trainer.update(tensors)
        experts = {item.name: item.tensor for item in store.canonical()}
        metadata = {"weftpub_version": str(version), "weftpub_generation": str(generation)}
        writers = [
            ShardedWriter(stem, group, metadata=metadata, max_shard_bytes=max_shard_bytes)
            for stem, group in ((_TRAINER, trainer), (_EXPERTS, experts))
        ]
        body = {
            "format": _FORMAT,
            "version": version,
            "generation": generation,
            "store": {**store.layout.to_json(), "preset": store.preset},
            "optimizers": state,
            "extra": more,
            "tensors": {
                _TRAINER: {name: _describe(tensor, checksum(tensor.contiguous())) for name, tensor in trainer.items()},
                _EXPERTS: {name: _describe(tensor, store.checksums[name]) for name, tensor in experts.items()},
            },
        }
        document = _seal_document(body)
        needed = len(document) + sum(writer.nbytes for writer in writers)
        with AtomicDirectory(Path(directory), needed=needed, overwrite=overwrite) as target:
            for writer in writers:
                writer.write(target)
            target.write("state.json", [document])
    return SavedState(target.target, version, generation, dict(extra or {}))


def load_state(directory: Path | str, *, optimizers: Mapping[str, Stateful], store: ExpertStore) -> SavedState:
    """Resume from `save_state`: masters, optimizer state and store become what they were, byte for byte. Opens a torn
    store.

    Everything is read and verified before anything changes. If the change itself then fails, the store is torn.

    Raises:
        CheckpointError: files are missing or damaged, a checksum differs, or the state is of another store layout;
            names tensor or field. The optimizer's and the store's own errors pass through.
    """
    directory = Path(directory)
    body = _open_document(directory / "state.json")
    _check_layout(directory, body["store"], {**store.layout.to_json(), "preset": store.preset})
    trainer = LazyTensors(directory, stem=_TRAINER)
    experts = LazyTensors(directory, stem=_EXPERTS)
    _verify(directory, trainer, body["tensors"][_TRAINER])
    _verify(directory, experts, body["tensors"][_EXPERTS])
    states: Mapping[str, Any] = unflatten(body["optimizers"], trainer)
    if set(states) != set(optimizers):
        raise CheckpointError(f"{directory}: holds optimizers {sorted(states)}, expected {sorted(optimizers)}")
    extra = unflatten(body["extra"], trainer)
    checksums = {name: int(entry["checksum"]) for name, entry in body["tensors"][_EXPERTS].items()}
    loaded: list[str] = []
    try:
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(states[name])
            loaded.append(name)
        store.load(int(body["generation"]), experts, checksums)
    except BaseException as error:
        # An optimizer that refuses its state with ConfigError has not changed anything yet.
        if loaded or not isinstance(error, ConfigError):
            store.mark_torn(f"loading {directory} failed half-way, after {format_names(loaded)}: {error}")
        raise
    return SavedState(directory, int(body["version"]), int(body["generation"]), extra)


def _describe(tensor: torch.Tensor, value: int) -> dict[str, Any]:
    # The checksum is a string: JSON readers other than Python's lose integers beyond 2^53.
    return {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "checksum": str(value)}


def _verify(directory: Path, found: Mapping[str, torch.Tensor], expected: Mapping[str, Any]) -> None:
    missing, unknown = set(expected) - set(found), set(found) - set(expected)
    if missing or unknown:
        raise CheckpointError(
            f"{directory}: state.json and the tensor files disagree: missing {format_names(missing)}, "
            f"unknown {format_names(unknown)}; use another checkpoint"
        )
    for name, entry in expected.items():
        tensor = found[name]
        described = _describe(tensor, checksum(tensor))
        if described != entry:
            wrong = ", ".join(
                f"{k} {described.get(k)}, saved {entry[k]}" for k in entry if described.get(k) != entry[k]
            )
            raise CheckpointError(
                f"{directory}: {name}: {wrong}; the file was damaged after it was saved, use another checkpoint"
            )


def _check_layout(directory: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    different = [key for key in wanted if saved.get(key) != wanted[key]]
    if different:
        raise CheckpointError(
            f"{directory}: saved from another store: "
            + "; ".join(f"{key} {saved.get(key)}, this store has {wanted[key]}" for key in different)
        )


def _seal_document(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    return f'{{"sha256":"{hashlib.sha256(text.encode()).hexdigest()}","state":{text}}}\n'.encode()


def _open_document(path: Path) -> dict[str, Any]:
    document = read_json(path, "a state that save_state wrote")
    body, digest = document.get("state"), document.get("sha256")
    if not isinstance(body, dict) or not isinstance(digest, str):
        raise CheckpointError(f"{path}: not a state that save_state wrote: expected 'sha256' and an object 'state'")
    body = cast("dict[str, Any]", body)
    try:
        sealed = _seal_document(body)
    except (ValueError, RecursionError):  # a NaN or a depth that save_state never writes
        sealed = b""
    if sealed != path.read_bytes() or digest != json.loads(sealed)["sha256"]:
        raise CheckpointError(f"{path}: its own SHA-256 does not match; the file was damaged, use another checkpoint")
    if body.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: format {body.get('format')!r}, this release reads {_FORMAT}")
    return body
