"""Streamed safetensors files: what the reference library reads is what was given, and reading is lazy."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from weftpub.checkpoint.atomic import AtomicDirectory
from weftpub.checkpoint.files import DTYPE_NAMES, LazyTensors, ShardedWriter
from weftpub.errors import CheckpointError, ConfigError


def _write(directory: Path, tensors: dict[str, torch.Tensor], **settings: int) -> ShardedWriter:
    writer = ShardedWriter("model", tensors, metadata={"made by": 'a "quoted" füßchen'}, **settings)
    with AtomicDirectory(directory, needed=writer.nbytes) as target:
        writer.write(target)
    return writer


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 255, (24, 8), generator=generator, dtype=torch.uint8)
    tensors = {}
    for dtype in DTYPE_NAMES:
        tensors[str(dtype)] = raw % 2 == 0 if dtype == torch.bool else raw.view(dtype)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 4)
    tensors["strided"] = torch.arange(12, dtype=torch.float32).view(3, 4).t()
    tensors["part"] = torch.arange(100, dtype=torch.int16)[7:21]
    return tensors


def test_the_reference_library_reads_what_was_written(tmp_path: Path) -> None:
    tensors = _tensors()
    writer = _write(tmp_path / "out", tensors)
    path = tmp_path / "out" / "model.safetensors"
    assert path.stat().st_size == writer.nbytes
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].contiguous().view(-1).view(torch.uint8).tolist() == list(
            tensor.contiguous().view(-1).view(torch.uint8).tolist()
        ), name
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "made by": 'a "quoted" füßchen'}


def test_every_tensor_starts_at_a_multiple_of_its_element(tmp_path: Path) -> None:
    _write(tmp_path / "out", {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(2, dtype=torch.float64)})
    lazy = LazyTensors(tmp_path / "out")
    assert lazy["b"].data_ptr() % 8 == 0


def test_lazy_reading_reads_rows_and_shapes(tmp_path: Path) -> None:
    stacked = torch.arange(4 * 3 * 2, dtype=torch.float32).view(4, 3, 2)
    _write(tmp_path / "out", {"stacked": stacked, "other": torch.ones(2)}, max_shard_bytes=1)
    lazy = LazyTensors(tmp_path / "out")
    assert len(lazy) == 2
    assert set(lazy) == {"stacked", "other"}
    assert lazy.file_of["stacked"] == "model-00001-of-00002.safetensors"
    assert torch.equal(lazy.rows("stacked", 2, 3), stacked[2:3])
    assert lazy.shape("stacked") == (4, 3, 2)
    with pytest.raises(KeyError):
        lazy["third"]


def test_files_of_other_writers_are_read(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    assert torch.equal(LazyTensors(tmp_path)["x"], torch.ones(2, 2))


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    _write(tmp_path / "out", {"a": torch.ones(4), "b": torch.ones(4)}, max_shard_bytes=16)
    (tmp_path / "out" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: no such file"):
        LazyTensors(tmp_path / "out")
    save_file({"c": torch.ones(4)}, tmp_path / "out" / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"disagree about \['b'\]"):
        LazyTensors(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="weight_map"):
        LazyTensors(tmp_path / "out")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ('{"weight_map": {"a": "../other/model.safetensors"}}', r"a is said to lie in '\.\./other/model\.safetensors'"),
        ('{"weight_map": {"a": "%s/other/model.safetensors"}}', "the name of a file beside the index"),
        ('{"weight_map": {"a": ".."}}', "the name of a file beside the index"),
        ('{"weight_map": {"a": ""}}', "the name of a file beside the index"),
        ('{"weight_map": {"a": 3, "b": "x"}}', "a is said to lie in 3"),
        ('{"weight_map": ["a"]}', "not an index with a weight_map: found list"),
        ('{"weight_map": null}', "not an index with a weight_map: found NoneType"),
        ("[" * 100_000, "not an index with a weight_map: not JSON"),
        ("\udcff", "not an index with a weight_map: not JSON"),
    ],
)
def test_an_index_leads_nowhere_else(tmp_path: Path, document: str, message: str) -> None:
    """The index of a downloaded model named a file outside of its directory, and that file was read as the model's.
    Other bad indices ended in errors that named neither file nor remedy."""
    (tmp_path / "other").mkdir()
    save_file({"a": torch.ones(4)}, tmp_path / "other" / "model.safetensors")
    (tmp_path / "model").mkdir()
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(document.replace("%s", str(tmp_path)), errors="surrogateescape")
    with pytest.raises(CheckpointError, match=message) as caught:
        LazyTensors(tmp_path / "model")
    assert str(index) in str(caught.value)


def test_a_link_beside_the_index_is_followed(tmp_path: Path) -> None:
    """Download caches keep the files elsewhere, and link them into the model's directory."""
    _write(tmp_path / "out", {"a": torch.ones(4), "b": torch.ones(4)}, max_shard_bytes=16)
    (tmp_path / "blob").write_bytes((tmp_path / "out" / "model-00002-of-00002.safetensors").read_bytes())
    (tmp_path / "out" / "model-00002-of-00002.safetensors").unlink()
    (tmp_path / "out" / "model-00002-of-00002.safetensors").symlink_to(tmp_path / "blob")
    assert set(LazyTensors(tmp_path / "out")) == {"a", "b"}


def test_nothing_and_unknown_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="no tensors"):
        ShardedWriter("model", {}, metadata={})
    with pytest.raises(ConfigError, match=r"x: .*complex64"):
        ShardedWriter("model", {"x": torch.zeros(1, dtype=torch.complex64)}, metadata={})
