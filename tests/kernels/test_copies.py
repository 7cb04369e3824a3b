"""Copies by address move exactly the bytes that their table names, whatever the alignment, and checksums by address are
those of the tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weftpub_kernels import ShapeError, SpanChecksums, SpanCopies, checksum, checksum_many, checksum_spans, copy_spans
from weftpub_kernels.copies import by_word

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZE = 1 << 18


def memory(seed: int, device: str) -> torch.Tensor:
    data = np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)
    return torch.from_numpy(data).to(device)


def table(rows: list[tuple[int, ...]], source: torch.Tensor, target: torch.Tensor) -> np.ndarray:
    """Rows of (source offset, target offset, width, rows, source pitch, target pitch), as addresses."""
    found = np.array(rows, dtype=np.int64).reshape(-1, 6)
    found[:, 0] += source.data_ptr()
    found[:, 1] += target.data_ptr()
    return found


def expected(rows: list[tuple[int, ...]], source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    found = target.cpu().clone()
    origin = source.cpu()
    for start, place, width, count, source_pitch, target_pitch in rows:
        for i in range(count):
            a, b = start + i * source_pitch, place + i * target_pitch
            found[b : b + width] = origin[a : a + width]
    return found


ROWS = {
    "dense": [(0, 0, SIZE, 1, 0, 0)],
    "dense, ragged end": [(16, 32, 100_003, 1, 0, 0)],
    "words of four": [(4, 8, 70_000, 1, 0, 0)],
    "bytes": [(1, 0, 70_001, 1, 0, 0), (90_001, 90_002, 3, 1, 0, 0)],
    "columns": [(64, 0, 256, 300, 768, 256), (1 << 17, 1 << 17, 48, 1000, 64, 96)],
    "columns of four": [(4, 0, 12, 5000, 20, 12)],
    "columns of bytes": [(3, 5, 7, 3001, 9, 11)],
    "one element": [(77, 99, 1, 1, 0, 0)],
    "nothing": [(0, 0, 0, 5, 16, 16), (0, 0, 16, 0, 16, 16)],
    "all kinds": [(0, 16, 65_536, 1, 0, 0), (65_537, 70_001, 33, 9, 40, 50), (70_004, 80_000, 1204, 1, 0, 0)],
    "none": [],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ROWS)
def test_the_named_bytes_and_no_others(device: str, kind: str) -> None:
    source, target = memory(1, device), memory(2, device)
    want = expected(ROWS[kind], source, target)
    copy_spans(table(ROWS[kind], source, target), target.device)
    assert torch.equal(target.cpu(), want)
    assert torch.equal(source.cpu(), memory(1, "cpu"))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_rows(data: st.DataObject) -> None:
    rows, place = [], 0
    for _ in range(data.draw(st.integers(1, 5))):
        width, count = data.draw(st.integers(0, 70)), data.draw(st.integers(0, 6))
        pitches = [width + data.draw(st.integers(0, 9)) for _ in range(2)]
        place += data.draw(st.integers(0, 20))
        rows.append((data.draw(st.integers(0, 1000)), place, width, count, *pitches))
        place += max(pitches) * count
    source, target = memory(3, "cpu"), memory(4, "cpu")
    want = expected(rows, source, target)
    copy_spans(table(rows, source, target), target.device)
    assert torch.equal(target, want)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 100)] * 6), max_size=6))
def test_splitting_by_words_keeps_every_byte(rows: list[tuple[int, ...]]) -> None:
    given_rows = np.array(rows, dtype=np.int64).reshape(-1, 6)
    parts = by_word(given_rows)
    assert (
        sum(int((part[:, 2] * part[:, 3]).sum()) for part in parts.values())
        == (given_rows[:, 2] * given_rows[:, 3]).sum()
    )
    for word, part in parts.items():
        assert not (part[:, :3] % word).any()
        assert not (part[part[:, 3] > 1, 4:] % word).any()


@pytest.mark.parametrize("device", DEVICES)
def test_one_object_serves_changing_tables(device: str) -> None:
    copies = SpanCopies(torch.device(device))
    for rows in (ROWS["dense"], ROWS["columns"], ROWS["columns"], ROWS["none"], ROWS["dense"]):
        source, target = memory(5, device), memory(6, device)
        want = expected(rows, source, target)
        copies.copy(table(rows, source, target))
        assert torch.equal(target.cpu(), want)


@pytest.mark.parametrize("bad", [np.zeros((2, 5), dtype=np.int64), np.array([[0, 0, 4, 1, 0, 0]]), -np.ones((1, 6))])
def test_tables_that_cannot_be_right(bad: np.ndarray) -> None:
    """An offloaded tensor has the address of its offset: copying from there would read whatever lies at address 0."""
    with pytest.raises(ShapeError, match="table of copies"):
        copy_spans(bad, torch.device("cpu"))


@pytest.mark.parametrize("device", DEVICES)
def test_checksums_by_address(device: str) -> None:
    data = memory(7, device)
    spans = [(0, SIZE), (0, 0), (1, 1), (3, 70_000), (65_536, 65_536), (16, 200_000), (SIZE - 5, 5)]
    sums = SpanChecksums(data.device)
    offsets, counts = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
    want = checksum_many([data[a : a + n] for a, n in spans])
    for _ in range(2):
        assert sums.compute(data.data_ptr() + offsets, counts).tolist() == want.tolist()
    shifted = data.roll(1)  # another address, and other heads of the same spans
    want = checksum_many([shifted[a + 1 : a + 1 + n] for a, n in spans[1:-1]])
    assert sums.compute(shifted.data_ptr() + 1 + offsets[1:-1], counts[1:-1]).tolist() == want.tolist()
    assert checksum_spans(np.array([data.data_ptr()]), np.array([9]), data.device).tolist() == [checksum(data[:9])]


@pytest.mark.parametrize(("addresses", "counts"), [([8], [4]), ([1 << 45], [-1]), ([1 << 45, 1 << 45], [4])])
def test_spans_that_cannot_be_right(addresses: list[int], counts: list[int]) -> None:
    with pytest.raises(ShapeError, match="is a tensor offloaded"):
        checksum_spans(np.array(addresses), np.array(counts), torch.device("cpu"))
