"""Coverage of boxes against a count of every element, and pieces against the moves they were cut from."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from publish_world import World

from weftpub.errors import ConfigError
from weftpub.plan import cut_pieces
from weftpub.plan.boxes import coverage, intersect
from weftpub.plan.pieces import ALIGNMENT

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


@st.composite
def boxes_in_shape(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    shape = draw(SHAPES)
    boxes = []
    for _ in range(draw(st.integers(0, 5))):
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        boxes.append((start, tuple(draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True))))
    return shape, boxes


@settings(max_examples=300, deadline=None)
@given(boxes_in_shape())
def test_coverage_equals_a_count_of_elements(case: tuple) -> None:
    shape, boxes = case
    counts = np.zeros(shape, dtype=int)
    for start, extent in boxes:
        counts[tuple(slice(s, s + n) for s, n in zip(start, extent, strict=True))] += 1
    assert coverage(boxes, shape) == (counts.min(), counts.max())


def test_intersections() -> None:
    assert intersect(((0, 0), (4, 4)), ((2, 3), (4, 4))) == ((2, 3), (2, 1))
    assert intersect(((0,), (4,)), ((4,), (4,))) is None
    assert intersect(((), ()), ((), ())) == ((), ())


@pytest.mark.parametrize("limit", [64, 1000, 4096, 1 << 20])
def test_pieces_tile_their_moves_and_fit(limit: int) -> None:
    """A fused tensor of several GiB was built during a sync. No piece and no chunk is larger than the limit, and one
    huge tensor is cut by rows."""
    part = World(experts=2, ep=1).plan().for_receiver(0)
    table = cut_pieces(part, limit)
    boxes: dict[int, list] = {}
    for piece in table.pieces:
        assert 0 < piece.nbytes <= limit
        assert piece.whole == (part.moves[piece.move].nbytes <= limit)
        boxes.setdefault(piece.move, []).append((piece.start, piece.shape))
    for index, move in enumerate(part.moves):
        assert coverage(boxes[index], move.shape) == (1, 1)
        assert sum(math.prod(shape) for _, shape in boxes[index]) == math.prod(move.shape)


def test_pieces_are_dense_in_their_move() -> None:
    """Row-major order and one run each, so that a piece of a dense tensor is one copy."""
    table = cut_pieces(World(experts=1, ep=1).plan().for_receiver(0), 1000)
    for piece in table.pieces:
        move = table.part.moves[piece.move]
        first = next((d for d, n in enumerate(piece.shape) if n != 1), len(piece.shape))
        assert piece.shape[first + 1 :] == move.shape[first + 1 :]


def test_chunks_hold_every_piece_once_within_the_limit() -> None:
    table = cut_pieces(World(experts=4, ep=1, send_ep=2).plan().for_receiver(0), 100_000)
    seen: list[int] = []
    for sender, chunks in table.chunks.items():
        for chunk in chunks:
            assert chunk.nbytes <= 100_000
            ends = 0
            for index, offset in zip(chunk.pieces, chunk.offsets, strict=True):
                piece = table.pieces[index]
                assert table.part.moves[piece.move].send_rank == sender
                assert offset % ALIGNMENT == 0
                assert offset >= ends
                ends = offset + piece.nbytes
            assert ends == chunk.nbytes
            seen += chunk.pieces
    assert sorted(seen) == list(range(len(table.pieces)))


def test_a_limit_that_holds_no_element_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_staging_bytes"):
        cut_pieces(World().plan().for_receiver(0), 8)


def test_a_piece_says_what_it_is() -> None:
    table = cut_pieces(World(experts=1, ep=1).plan().for_receiver(0), 100_000)
    names = [table.describe(index) for index in range(len(table.pieces))]
    assert "model.norm.weight" in names
    assert "model.embed_tokens.weight[195:300, 0:256]" in names
