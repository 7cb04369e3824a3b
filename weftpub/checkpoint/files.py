"""Tensors to and from safetensors files, one at a time.

Writing streams: the header is computed from shapes alone, then each tensor's bytes follow, straight from host memory or
through one bounded staging buffer from a device, so no second copy of the model ever exists. Reading is lazy: a tensor
is mapped from its file when it is asked for.

File format: an 8-byte little-endian header length, a JSON header padded with spaces to a multiple of 8, the tensors'
bytes without gaps (https://github.com/huggingface/safetensors#format). Tensors of wider dtypes come first, so that
every tensor is aligned.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from weftpub.checkpoint.atomic import AtomicDirectory
from weftpub.errors import CheckpointError, ConfigError

__all__ = ["DTYPE_NAMES", "LazyTensors", "ShardedWriter", "read_json", "tensor_bytes"]

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}

_STAGING_BYTES = 64 << 20


@dataclass(frozen=True)
class _File:
    name: str
    tensors: tuple[str, ...]
    header: bytes


class ShardedWriter:
    """Plans the files for `tensors` and writes them into an `AtomicDirectory`.

    Args:
        stem: file name without suffix: one file ``stem.safetensors``, or ``stem-00001-of-0000N.safetensors`` and
            ``stem.safetensors.index.json``.
        tensors: name to tensor, on any device; read when written.
        metadata: strings for every file's header; ``format: pt`` is added, which transformers asks for.
        max_shard_bytes: a file holds at least one tensor and at most this many bytes of tensors.

    Raises:
        ConfigError: no tensors, or a dtype that safetensors does not know.
    """

    def __init__(
        self,
        stem: str,
        tensors: Mapping[str, torch.Tensor],
        *,
        metadata: Mapping[str, str],
        max_shard_bytes: int = 4 << 30,
    ) -> None:
        if not tensors:
            raise ConfigError(f"{stem}: no tensors to write")
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPE_NAMES:
                raise ConfigError(
                    f"{name}: safetensors cannot hold {tensor.dtype}; expected one of {[str(d) for d in DTYPE_NAMES]}"
                )
        self._tensors = tensors
        self._stem = stem
        self._metadata = {"format": "pt", **metadata}
        groups = _group(tensors, max_shard_bytes)
        self._files = tuple(
            _File(_file_name(stem, i, len(groups)), group, _header({n: tensors[n] for n in group}, self._metadata))
            for i, group in enumerate(groups)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all files together, the index included."""
        index = len(self._index()) if len(self._files) > 1 else 0
        return sum(len(file.header) for file in self._files) + sum(t.nbytes for t in self._tensors.values()) + index

    @property
    def file_of(self) -> dict[str, str]:
        """Tensor name to file name."""
        return {name: file.name for file in self._files for name in file.tensors}

    def write(self, directory: AtomicDirectory) -> None:
        """Write every file, and the index if there is more than one."""
        staging = _Staging()
        for file in self._files:
            directory.write(file.name, self._chunks(file, staging))
        if len(self._files) > 1:
            directory.write(f"{self._stem}.safetensors.index.json", [self._index()])

    def _chunks(self, file: _File, staging: "_Staging") -> Iterator[bytes | memoryview]:
        yield file.header
        for name in file.tensors:
            yield from staging.chunks(self._tensors[name])

    def _index(self) -> bytes:
        total = sum(t.nbytes for t in self._tensors.values())
        body = {"metadata": {**self._metadata, "total_size": total}, "weight_map": dict(sorted(self.file_of.items()))}
        return (json.dumps(body, indent=2) + "\n").encode()


class LazyTensors(Mapping[str, torch.Tensor]):
    """The tensors of one safetensors directory by name, read when asked for.

    Args:
        directory: holds ``stem.safetensors.index.json``, or ``stem.safetensors``.
        stem: "model" in every Hugging Face directory.

    Raises:
        CheckpointError: files are missing or damaged, or the index and the files disagree; names the file.
    """

    def __init__(self, directory: Path, *, stem: str = "model") -> None:
        self.directory = Path(directory)
        self._open: dict[str, safe_open] = {}
        self.file_of = self._read_index(stem)

    def __getitem__(self, name: str) -> torch.Tensor:
        file = self.file_of[name]
        try:
            return self._handle(file).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.directory / file}: {name} cannot be read: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __len__(self) -> int:
        return len(self.file_of)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop of the first dimension of `name`, without reading the others."""
        try:
            return self._handle(self.file_of[name]).get_slice(name)[start:stop]
        except SafetensorError as error:
            raise CheckpointError(f"{self.directory / self.file_of[name]}: {name} cannot be read: {error}") from error

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of `name`, from the header alone."""
        return tuple(self._handle(self.file_of[name]).get_slice(name).get_shape())

    def _read_index(self, stem: str) -> dict[str, str]:
        index, single = self.directory / f"{stem}.safetensors.index.json", f"{stem}.safetensors"
        if not index.exists():
            return dict.fromkeys(self._keys(single), single)
        weight_map = _weight_map(index)
        held = {name: file for file in sorted(set(weight_map.values())) for name in self._keys(file)}
        if held != weight_map:
            missing = sorted(set(weight_map) - set(held)) or sorted(set(held) - set(weight_map)) or sorted(weight_map)
            raise CheckpointError(
                f"{index}: index and files disagree about {missing[:4]}; the directory is incomplete, copy it again"
            )
        return held

    def _keys(self, file: str) -> list[str]:
        return list(self._handle(file).keys())

    def _handle(self, file: str) -> safe_open:
        if file not in self._open:
            path = self.directory / file
            try:
                self._open[file] = safe_open(str(path), framework="pt")
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"{path}: no such file; expected a safetensors file or an index beside it"
                ) from error
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not a whole safetensors file: {error}") from error
        return self._open[file]


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name to file name. Only files beside the index count: a downloaded directory must not read others."""
    document = read_json(index, "an index with a weight_map")
    found = document.get("weight_map")
    if not isinstance(found, dict):
        raise CheckpointError(f"{index}: not an index with a weight_map: found {type(found).__name__} in its place")
    weight_map = cast("dict[str, object]", found)
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file:
            raise CheckpointError(
                f"{index}: {name} is said to lie in {file!r}; expected the name of a file beside the index"
            )
    return cast("dict[str, str]", weight_map)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError, saying that it is not `what`, for anything else."""
    try:
        document: object = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(error.errno, f"{path}: not {what}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 is a ValueError too
        raise CheckpointError(f"{path}: not {what}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: not {what}: expected an object, found {type(document).__name__}")
    return cast("dict[str, Any]", document)


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, flat, as a uint8 view."""
    return tensor.detach().reshape(-1).view(torch.uint8)


class _Staging:
    """Hands out a tensor's bytes in host memory: directly, or from a device through one buffer that is reused for every
    chunk.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def chunks(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        data = tensor_bytes(tensor.detach().contiguous())
        if data.device.type == "cpu":
            if data.numel():
                yield memoryview(data.numpy())
            return
        if self._buffer is None:
            self._buffer = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        for piece in data.split(_STAGING_BYTES):
            host = self._buffer[: piece.numel()]
            host.copy_(piece)  # blocking: the bytes are in host memory before they are handed out
            yield memoryview(host.numpy())


def _group(tensors: Mapping[str, torch.Tensor], max_shard_bytes: int) -> list[tuple[str, ...]]:
    groups: list[tuple[str, ...]] = []
    current: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if current and size + tensor.nbytes > max_shard_bytes:
            groups.append(tuple(current))
            current, size = [], 0
        current.append(name)
        size += tensor.nbytes
    groups.append(tuple(current))
    return [tuple(sorted(group, key=lambda name: (-tensors[name].element_size(), name))) for group in groups]


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def _file_name(stem: str, index: int, count: int) -> str:
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"
