"""The checksum is its definition, sees what it promises to see, and follows from the quantizer's tile sums."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weftpub_kernels import (
    DtypeError,
    QuantizedPair,
    ShapeError,
    checksum,
    checksum_many,
    checksum_rows_from_sums,
    quantize_pair,
)
from weftpub_kernels.checksum import MULTIPLIER, finish, power, powers, tile_sums

MASK = (1 << 64) - 1
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def by_definition(data: bytes) -> int:
    h, place = 0, 1
    for byte in data:
        h, place = (h + byte * place) & MASK, place * MULTIPLIER & MASK
    h = (h + len(data) * 0x9E3779B97F4A7C15) & MASK
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = ((h ^ h >> 33) * factor) & MASK
    h ^= h >> 33
    return h - (1 << 64) if h >> 63 else h


def of(data: bytes | bytearray, device: str = "cpu") -> int:
    return checksum(
        torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device) if data else torch.empty(0).to(device)
    )


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=600))
def test_it_is_its_definition(data: bytes) -> None:
    assert of(data) == by_definition(data)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 4095, 65535, 65536, 65537, 131072 + 5, 1_100_003])
def test_sizes_around_the_steps_of_the_algorithms(device: str, size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert checksum(torch.from_numpy(data).to(device)) == by_definition(data.tobytes())


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_one_changed_byte_is_seen(data: bytes, draw: st.DataObject) -> None:
    index = draw.draw(st.integers(0, len(data) - 1))
    changed = bytearray(data)
    changed[index] ^= draw.draw(st.integers(1, 255))
    assert of(changed) != of(data)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=2, max_size=300), st.data())
def test_two_swapped_bytes_are_seen(data: bytes, draw: st.DataObject) -> None:
    i, j = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(0, len(data) - 1))
    swapped = bytearray(data)
    swapped[i], swapped[j] = data[j], data[i]
    assert (of(swapped) != of(data)) == (data[i] != data[j])


def test_swaps_far_apart_cannot_cancel() -> None:
    """d * (A^n - 1) keeps at least one bit of the 64 for every distance below 2^55: the factors of two add up to 9 +
    v(n)."""
    assert MULTIPLIER % 8 == 5
    for n in [*range(1, 300), *(1 << k for k in range(55)), *(3 << k for k in range(53))]:
        difference = power(n) - 1
        twos = (difference & -difference).bit_length() - 1
        assert twos == 2 + ((n & -n).bit_length() - 1)
        assert 128 * difference % (1 << 64) != 0


def test_a_change_within_four_adjacent_bytes_is_seen() -> None:
    """No small relation between 1, A, A^2, A^3: all 511^4 differences, by meeting in the middle."""
    d = np.arange(-255, 256, dtype=np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        low = (d[:, None] + d[None, :] * np.uint64(MULTIPLIER)).reshape(-1)
        high = (np.uint64(0) - low) * np.uint64(MULTIPLIER**2 & MASK)
    common = np.intersect1d(low, high)
    assert common.tolist() == [0]
    assert (low == 0).sum() == 1


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=64), st.integers(1, 64))
def test_appended_zeros_are_seen(data: bytes, count: int) -> None:
    assert of(data + bytes(count)) != of(data)


def test_the_mix_is_invertible() -> None:
    """Undoing its steps gives h back, so equal checksums of equally many bytes mean equal h."""
    h = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1000))
    value = finish(h, 77).numpy().view(np.uint64)
    with np.errstate(over="ignore"):
        for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
            value ^= value >> np.uint64(33)
            value = value * np.uint64(pow(factor, -1, 1 << 64))
        value ^= value >> np.uint64(33)
        value = value - np.uint64(77 * 0x9E3779B97F4A7C15 & MASK)
    assert value.view(np.int64).tolist() == h.tolist()


def test_powers() -> None:
    assert powers(5, 7).tolist() == [power(7 * i) for i in range(5)]
    assert powers(0).tolist() == []
    assert power(-3) * power(3) & MASK == 1


@pytest.mark.parametrize("device", DEVICES)
def test_many_are_each_one(device: str) -> None:
    random = torch.Generator().manual_seed(0)
    memory = torch.randint(0, 256, (300_000,), dtype=torch.uint8, generator=random).to(device)
    cuts = [
        (0, 0),
        (0, 1),
        (3, 20),
        (5, 70_000),
        (70_000, 70_016),
        (16, 65_552),
        (131_071, 262_145),
        (299_999, 300_000),
    ]
    tensors = [memory[a:b] for a, b in cuts] + [memory[:64].view(torch.float32), memory[:128].view(8, 16)]
    sums = checksum_many(tensors)
    assert sums.device.type == device
    assert sums.tolist() == [by_definition(t.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()) for t in tensors]
    assert checksum_many([]).tolist() == []


def test_any_dtype_and_shape() -> None:
    data = torch.arange(64, dtype=torch.uint8)
    expected = by_definition(bytes(range(64)))
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64):
        assert checksum(data.view(dtype)) == expected
        assert checksum(data.view(dtype).view(2, -1)) == expected
    assert checksum(torch.tensor(1.5)) == by_definition(np.float32(1.5).tobytes())


def test_tensors_without_an_order_of_bytes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"tensor 1 \[4, 8\].*contiguous"):
        checksum_many([torch.ones(2), torch.ones(8, 4).t()])


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (200, 300), (3, 300, 200), (2, 2, 384, 128), (1, 1)])
def test_rows_from_tile_sums(shape: tuple[int, ...]) -> None:
    out = QuantizedPair.empty(shape, "cpu", sums=True)
    quantize_pair(torch.randn(shape), out=out)
    assert out.sums is not None
    rows = shape[-2]
    ranges = [(a, b) for a in range(0, rows, 128) for b in [*range(a + 128, rows, 128), rows]]
    for start, stop in ranges:
        got = checksum_rows_from_sums(out.sums, shape, start, stop)
        want = [checksum(w[start:stop].contiguous()) for w in out.w.reshape(-1, *shape[-2:])]
        assert got.reshape(-1).tolist() == want
    assert got.shape == shape[:-2]


def test_row_ranges_must_be_blocks() -> None:
    sums = tile_sums(torch.zeros(300, 256, dtype=torch.uint8))
    for start, stop in ((0, 100), (64, 128), (128, 128), (256, 400), (-128, 128)):
        with pytest.raises(ShapeError, match="whole blocks"):
            checksum_rows_from_sums(sums, (300, 256), start, stop)
    with pytest.raises(ShapeError, match=r"must be \[3, 2, 8\]"):
        checksum_rows_from_sums(sums.transpose(0, 1), (300, 256))


def test_released_memory_has_no_checksum() -> None:
    """The memory of an offloaded store was summed: address 0 went to the kernel, whose fault ends a CUDA process."""
    gone = torch.ones(4, 4)
    gone.untyped_storage().resize_(0)
    with pytest.raises(ShapeError, match=r"tensor 1 .* offloaded"):
        checksum_many([torch.ones(2), gone, torch.empty(0)])


def test_tile_sums_of_another_dtype_are_refused() -> None:
    with pytest.raises(DtypeError, match=r"int64.*int32"):
        checksum_rows_from_sums(torch.zeros(2, 2, dtype=torch.int32), (256, 256))
