"""Copies between tensors and packed buffers are exact for every layout and dtype, and cost one copy where neighbours
allow.
"""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

import weftpub_kernels
from weftpub.errors import PlanError, TransportError
from weftpub.plan import ViewSpec, dtype_name
from weftpub.transport import CopyTable, FlatTensors, RegionTable, narrow_view
from weftpub.transport.tensors import bits_dtype

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns, NaN payloads and subnormals included."""
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (count,), dtype=torch.uint8).view(dtype).view(shape)


def spec(name: str, tensor: torch.Tensor, base: torch.Tensor) -> ViewSpec:
    """A view of `base` as a ViewSpec."""
    offset = tensor.storage_offset() - base.storage_offset()
    return ViewSpec(name, offset, tuple(tensor.shape), tensor.stride(), dtype_name(tensor.dtype))


def layouts(base: torch.Tensor) -> dict[str, torch.Tensor]:
    """Ways to lie in a [6, 8, 10] tensor."""
    return {
        "whole": base,
        "expert": base[2],
        "rows": base[1, 2:5],
        "columns": base[1, :, 3:7],
        "transposed": base[3].T,
        "every-other": base[::2, 1::3],
        "element": base[5, 7, 9],
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", list(layouts(torch.empty(6, 8, 10))))
def test_gather_and_scatter_are_exact(dtype: torch.dtype, layout: str) -> None:
    source, target = random_bits((6, 8, 10), dtype), random_bits((6, 8, 10), dtype)
    view = spec("t", layouts(source)[layout], source)
    expected = target.clone()
    layouts(expected.view(bits_dtype(dtype_name(dtype))))[layout].copy_(
        layouts(source.view(bits_dtype(dtype_name(dtype))))[layout]
    )
    table = CopyTable.compile([view], [16])
    buffer = torch.zeros(16 + source.nbytes, dtype=torch.uint8)
    table.gather(FlatTensors({"t": source}, ["t"]), [buffer])
    table.scatter(FlatTensors({"t": target}, ["t"]), [buffer])
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))


def test_tensors_may_start_inside_their_storage_and_be_strided() -> None:
    storage = torch.arange(100, dtype=torch.int16)
    tensor = storage[10:70].view(6, 10).T  # first element is not the storage's, strides are swapped
    view = spec("t", tensor[2:4], tensor)
    buffer = torch.zeros(24, dtype=torch.uint8)
    CopyTable.compile([view], [0]).gather(FlatTensors({"t": tensor}, ["t"]), [buffer])
    assert torch.equal(buffer.view(torch.int16).view(2, 6), tensor[2:4])


def test_neighbours_on_both_sides_are_one_copy() -> None:
    """Scales and weights alternated in one batch and defeated packing: twelve copies instead of one. Bytes are bytes:
    what lies together is copied together, and a layer whose experts lie alike costs one copy."""
    experts = torch.zeros(64, 8, 10, dtype=torch.uint8)
    views = [spec("w", experts[e], experts) for e in range(64)]
    assert len(CopyTable.compile(views, [80 * e for e in range(64)])) == 1
    assert len(CopyTable.compile(views, [80 * e + (e > 31) for e in range(64)])) == 2
    assert len(CopyTable.compile(views, [80 * (63 - e) for e in range(64)])) == 64
    assert len(CopyTable.compile(views, [80 * e for e in range(64)], [0] * 32 + [1] * 32)) == 2


def test_a_buffer_that_is_too_short_is_refused() -> None:
    tensor = torch.zeros(8, dtype=torch.uint8)
    table = CopyTable.compile([spec("t", tensor, tensor)], [10])
    with pytest.raises(TransportError, match="bytes 10 to 18 are not inside the offered 16"):
        table.gather(FlatTensors({"t": tensor}, ["t"]), [torch.zeros(16, dtype=torch.uint8)])


def test_moved_tensors_are_noticed() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    live = {"p": parameter}
    flat = FlatTensors(live, ["p"])
    assert flat.moved(live) == []
    parameter.data = torch.zeros(4)
    assert flat.moved(live) == ["p"]
    assert flat.moved({}) == ["p"]
    with pytest.raises(PlanError, match="not there any more"):
        FlatTensors(live, ["q"])


@pytest.mark.parametrize("scratch", [1, 1 << 20])
def test_checksums_and_sha256_are_those_of_the_dense_bytes(scratch: int) -> None:
    tensors = {str(dtype): random_bits((6, 8, 10), dtype) for dtype in DTYPES}
    views, dense = [], []
    for name, tensor in tensors.items():
        for part in layouts(tensor).values():
            views.append(spec(name, part, tensor))
            dense.append(part.contiguous())
    flat = FlatTensors(tensors, tensors)
    table = RegionTable(views)
    found = table.checksums(flat, scratch)
    assert found.dtype == np.uint64
    assert found.tolist() == [weftpub_kernels.checksum(t) % 2**64 for t in dense]
    expected = [hashlib.sha256(t.view(torch.uint8).reshape(-1).numpy().tobytes()).hexdigest() for t in dense if t.dim()]
    assert [d for d, t in zip(table.sha256(flat), dense, strict=True) if t.dim()] == expected
    assert table.checksums(flat, scratch, [3, 1]).tolist() == found[[3, 1]].tolist()
    assert len(RegionTable([]).checksums(flat, scratch)) == 0


def test_boxes_of_views() -> None:
    base = torch.zeros(6, 8, 10)
    view = spec("t", base[1:5, :, 2:9], base)
    assert narrow_view(view, (1, 3, 2), (2, 4, 5)) == spec("t", base[2:4, 3:7, 4:9], base)


def test_elements_that_are_too_wide_are_refused() -> None:
    with pytest.raises(PlanError, match="16 bytes wide"):
        bits_dtype("complex128")


def test_tensors_without_memory_are_refused() -> None:
    """A released source was published: torch quietly put new memory of undefined content behind it when its bytes were
    viewed, and the checksums, computed of the same memory, agreed."""
    released = torch.ones(4, 4)
    released.untyped_storage().resize_(0)
    with pytest.raises(PlanError, match=r"a: .* has no memory behind it, it was released"):
        FlatTensors({"a": released}, ["a"])
    for other in (torch.ones(4, 4, device="meta"), torch.eye(4).to_sparse()):
        with pytest.raises(PlanError, match=r"a: .* expected a dense tensor on a CPU or GPU"):
            FlatTensors({"a": other}, ["a"])


class TestWhatIsKnown:
    """What was found out about tensors holds for others of the same layout at the same address, and for no others."""

    MEMORY = bytearray(range(64))

    def at(self, offset: int, count: int, start: int = 0) -> torch.Tensor:
        """Bytes from `offset + start` on, of a storage that begins at `offset`."""
        return torch.frombuffer(self.MEMORY, dtype=torch.uint8, offset=offset, count=count)[start:]

    def test_new_tensors_where_others_were(self) -> None:
        """Engines give out their parameters' `.data`, another object every time."""
        first = FlatTensors({"a": self.at(8, 16)}, ["a"])
        again = FlatTensors({"a": self.at(8, 16)}, ["a"], first.known)
        assert not first.seen
        assert again.seen
        assert again.known is first.known

    @pytest.mark.parametrize(
        "other",
        [
            pytest.param(lambda t: t.at(8, 16).view(4, 4), id="shape"),
            pytest.param(lambda t: t.at(8, 16)[:8], id="shorter"),
            pytest.param(lambda t: t.at(8, 32)[::2], id="stride"),
            pytest.param(lambda t: t.at(8, 16).view(torch.int8), id="dtype"),
            pytest.param(lambda t: t.at(0, 24, 8), id="start"),
            pytest.param(lambda t: t.at(8, 24)[:16], id="storage"),
            pytest.param(lambda t: t.at(9, 16), id="address"),
        ],
    )
    def test_others_are_looked_at(self, other: Callable[["TestWhatIsKnown"], torch.Tensor]) -> None:
        known = FlatTensors({"a": self.at(8, 16)}, ["a"]).known
        tensor = other(self)
        flat = FlatTensors({"a": tensor}, ["a"], known)
        assert not flat.seen
        view = ViewSpec("a", 0, tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."))
        assert torch.equal(flat.box(view).view(torch.uint8), tensor.view(torch.uint8))
        assert flat.run("a", 0, 1).item() == tensor.view(torch.uint8).reshape(-1)[0]

    def test_no_memory_at_all(self) -> None:
        known = FlatTensors({"a": self.at(8, 16)}, ["a"]).known
        for tensor in (torch.eye(4).to_sparse(), torch.empty(16, dtype=torch.uint8, device="meta")):
            with pytest.raises(PlanError, match="expected a dense tensor on a CPU or GPU"):
                FlatTensors({"a": tensor}, ["a"], known)
