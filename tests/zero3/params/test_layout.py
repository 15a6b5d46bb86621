"""The flat layout: aligned, padded, without overlap, and the same bytes however it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from optim_cpu import kernels
from tiering.placement.group_sizes import QUANTUM, SQUARE_BLOCK, shard_quantum
from zero3.params.layout import (
    FlatLayout,
    Piece,
    in_elements_of,
    lay_out,
    product,
    segments,
    shard,
    shard_ranges,
    tiles,
)

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple) | st.sampled_from([(), (0,), (64, 65), (4097,)])
KEPT = [torch.uint8, torch.bool, torch.float8_e4m3fn, torch.int16, torch.int32, torch.int64, torch.complex64]
flags = st.lists(st.tuples(shapes, st.booleans()), max_size=12)


def laid_out(params: list[tuple[tuple[int, ...], bool]], itemsize: int, world_size: int) -> FlatLayout:
    named = [(10 + i, f"p{i}", shape, trainable) for i, (shape, trainable) in enumerate(params)]
    return lay_out(named, itemsize, world_size)


@given(
    params=st.lists(st.tuples(shapes, st.sampled_from(KEPT)), max_size=6),
    flat=st.sampled_from([torch.bfloat16, torch.float32]),
    world_size=st.integers(1, 5),
)
def test_parameters_that_keep_their_dtype(
    params: list[tuple[tuple[int, ...], torch.dtype]], flat: torch.dtype, world_size: int
) -> None:
    """Their bytes are those of the views, and each shard has whole elements: all of them, once, in order."""
    named = [(i, f"p{i}", shape, False) for i, (shape, _) in enumerate(params)]
    dtypes = {i: dtype for i, (_, dtype) in enumerate(params)}
    layout = lay_out([(9, "trained", (3,), True), *named], flat.itemsize, world_size, dtypes)
    whole = torch.zeros(layout.numel, dtype=flat)
    values = {
        i: torch.arange(product(shape)).to(dtype).view(shape) for i, (shape, dtype) in enumerate(params)
    }
    for piece in layout.pieces[1:]:
        packed = in_elements_of(flat, values[piece.index].flatten())
        assert packed.numel() == piece.numel
        # As integers: no rounding, and no other form of a NaN.
        bits = {2: torch.int16, 4: torch.int32}[flat.itemsize]
        whole.view(bits)[piece.start : piece.end] = packed.view(bits)
    for piece in layout.pieces[1:]:
        view = piece.view_of(whole)
        assert view.dtype is dtypes[piece.index]
        assert torch.equal(_bytes(view), _bytes(values[piece.index]))
        assert view.data_ptr() % 256 == whole.data_ptr() % 256 or not view.numel()
    elements: dict[int, list[int]] = {i: [] for i in values}
    for rank in range(world_size):
        prefix, rest = shard_ranges(layout, world_size, rank)
        part_of_whole = torch.cat((whole[prefix.start : prefix.stop], whole[rest.start : rest.stop]))
        for part in shard(layout, world_size, rank).pieces:
            if part.index in values:
                own = part.own_elements(part.first, part.numel, flat.itemsize)
                raw = _bytes(part_of_whole[part.start : part.end])
                expected = _bytes(values[part.index].flatten()[own.start : own.stop])
                assert torch.equal(raw[: expected.numel()], expected)
                assert raw.numel() - expected.numel() < flat.itemsize
                elements[part.index] += own
    assert elements == {i: list(range(value.numel())) for i, value in values.items()}


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def test_a_trained_parameter_has_the_dtype_of_its_group() -> None:
    with pytest.raises(AssertionError, match="'w' is trained"):
        lay_out([(0, "w", (2,), True)], 2, 1, {0: torch.int8})


@given(params=flags, itemsize=st.sampled_from([2, 4]), world_size=st.integers(1, 5))
def test_the_layout_keeps_its_promises(
    params: list[tuple[tuple[int, ...], bool]], itemsize: int, world_size: int
) -> None:
    layout = laid_out(params, itemsize, world_size)
    given_order = [(10 + i, f"p{i}", shape, trainable) for i, (shape, trainable) in enumerate(params)]
    expected = [p for p in given_order if p[3]] + [p for p in given_order if not p[3]]
    assert [(p.index, p.name, p.shape, p.trainable) for p in layout.pieces] == expected

    end = 0
    for piece in layout.pieces:
        assert piece.start * itemsize % 256 == 0
        assert piece.start >= end  # no overlap, in order
        assert piece.numel == product(piece.shape) == piece.end - piece.start
        assert (
            piece.end <= layout.trainable_numel if piece.trainable else piece.start >= layout.trainable_numel
        )
        end = piece.end
    assert end <= layout.numel

    trained, frozen = layout.trainable_numel, layout.numel - layout.trainable_numel
    for numel, kind in ((trained, True), (frozen, False)):
        assert numel % (QUANTUM * world_size) == 0
        assert QUANTUM * 2 % 4096 == 0  # every boundary is one of 4096 bytes, in the smallest dtype
        pieces = [p for p in layout.pieces if p.trainable is kind]
        used = sum(-(-p.numel * itemsize // 256) * 256 // itemsize for p in pieces)
        gaps = 0 if world_size == 1 else SQUARE_BLOCK * len(pieces)
        assert used <= numel + 256 // itemsize
        assert numel < used + gaps + shard_quantum(world_size) * world_size  # and no more padding than that


@given(params=flags, itemsize=st.sampled_from([2, 4]), world_size=st.sampled_from([2, 3, 4, 8]))
def test_no_shard_ends_inside_of_a_block_of_squares(
    params: list[tuple[tuple[int, ...], bool]], itemsize: int, world_size: int
) -> None:
    assert kernels.SQUARE_BLOCK == SQUARE_BLOCK
    layout = laid_out(params, itemsize, world_size)
    for rank in range(world_size):
        for piece in shard(layout, world_size, rank).pieces:
            assert piece.first % SQUARE_BLOCK == 0


@given(params=flags, data=st.data())
def test_segments_are_found_wherever_a_range_begins(
    params: list[tuple[tuple[int, ...], bool]], data: st.DataObject
) -> None:
    layout = laid_out(params, 2, 1)
    start, end = sorted(data.draw(st.tuples(st.integers(0, layout.numel), st.integers(0, layout.numel))))
    expected = [
        (piece.index, max(piece.start, start), min(piece.end, end) - max(piece.start, start))
        for piece in layout.pieces
        if max(piece.start, start) < min(piece.end, end)
    ]
    assert [
        (each.piece.index, each.start, each.numel) for each in segments(layout.pieces, start, end)
    ] == expected


def test_segments_look_at_few_pieces_of_a_large_group() -> None:
    class Watched(tuple[Piece, ...]):  # noqa: SLOT001 (it counts)
        looks = 0

        def __getitem__(self, at: int) -> Piece:  # type: ignore[override] # no slices are taken
            self.looks += 1
            return super().__getitem__(at)

        def __iter__(self) -> Iterator[Piece]:
            raise AssertionError("all pieces are looked at")

    layout = laid_out([((64, 64), True)] * 1000, 2, 1)
    pieces = Watched(layout.pieces)
    parts = list(segments(pieces, 900 * 4096 + 10, 900 * 4096 + 20))
    assert [(each.piece.index, each.numel) for each in parts] == [(910, 10)]
    assert pieces.looks < 20


@given(params=flags, world_size=st.integers(1, 4), tile=st.integers(1, 9).map(lambda n: n * 512))
def test_tiles_and_segments_cover_every_parameter_once(
    params: list[tuple[tuple[int, ...], bool]], world_size: int, tile: int
) -> None:
    layout = laid_out(params, 2, world_size)
    cut = list(tiles(layout.numel, tile))
    assert [start for start, _ in cut] == list(range(0, layout.numel, tile))
    assert [end for _, end in cut] == [start for start, _ in cut[1:]] + [layout.numel] * bool(cut)
    covered: dict[int, list[tuple[int, int]]] = {piece.index: [] for piece in layout.pieces}
    for start, end in cut:
        last = start
        for segment in segments(layout.pieces, start, end):
            assert last <= segment.start < segment.start + segment.numel <= end
            last = segment.start + segment.numel
            covered[segment.piece.index].append((segment.start, last))
    for piece in layout.pieces:
        parts = covered[piece.index]
        if piece.numel == 0:
            assert parts == []
            continue
        assert parts[0][0] == piece.start
        assert parts[-1][1] == piece.end
        assert all(before[1] == after[0] for before, after in pairwise(parts))


@given(params=flags, world_size=st.integers(1, 6))
def test_shards_are_equal_and_cover_everything(
    params: list[tuple[tuple[int, ...], bool]], world_size: int
) -> None:
    layout = laid_out(params, 4, world_size)
    ranges = [shard_ranges(layout, world_size, rank) for rank in range(world_size)]
    edges = (0, layout.trainable_numel, layout.numel)
    for part, (begin, end) in enumerate(pairwise(edges)):
        mine = [both[part] for both in ranges]
        assert (mine[0].start, mine[-1].stop) == (begin, end)
        assert all(before.stop == after.start for before, after in pairwise(mine))
        assert {len(share) for share in mine} == {(end - begin) // world_size}
        assert len(mine[0]) * 2 % 4096 == 0


@given(params=flags, world_size=st.integers(1, 6), trainable_only=st.booleans())
def test_shards_hold_every_element_of_every_parameter_once(
    params: list[tuple[tuple[int, ...], bool]], world_size: int, trainable_only: bool
) -> None:
    layout = laid_out(params, 4, world_size)
    whole = {piece.index: piece for piece in layout.pieces}
    indices: dict[int, list[int]] = {piece.index: [] for piece in layout.pieces}
    for rank in range(world_size):
        kept_shard = shard(layout, world_size, rank, trainable_only=trainable_only)
        prefix, rest = shard_ranges(layout, world_size, rank)
        assert kept_shard.trainable_numel == len(prefix)
        assert kept_shard.numel == len(prefix) + (0 if trainable_only else len(rest))
        for part in kept_shard.pieces:
            piece = whole[part.index]
            assert (part.name, part.shape, part.trainable) == (piece.name, piece.shape, piece.trainable)
            assert part.start * 4 % 256 == 0
            # What lies at ``start`` of the shard lies here in the whole.
            base = prefix.start if part.trainable else rest.start - len(prefix)
            assert base + part.start == piece.start + part.first
            assert part.end <= (kept_shard.trainable_numel if part.trainable else kept_shard.numel)
            indices[part.index] += range(part.first, part.first + part.numel)
    for index, elements in indices.items():
        is_held = whole[index].trainable or not trainable_only
        assert elements == (list(range(whole[index].numel)) if is_held else [])


def test_an_example_by_hand() -> None:
    params = [
        (0, "w", (10, 20), True),
        (1, "frozen", (3000,), False),
        (2, "b", (5,), True),
        (3, "s", (), True),
    ]
    assert lay_out(params, 2) == FlatLayout(
        (
            Piece(0, "w", 0, (10, 20), 200, True),
            Piece(2, "b", 256, (5,), 5, True),
            Piece(3, "s", 384, (), 1, True),
            Piece(1, "frozen", 2048, (3000,), 3000, False),
        ),
        trainable_numel=2048,
        numel=6144,
    )
    assert lay_out(params, 4).pieces[1].start == 256
    assert lay_out(params, 2, world_size=3).trainable_numel == 3 * 4096
    # Four of them lie in a block of squares; the third one would not lie in that of the first two.
    shapes = (200, 3000, 800, 5000, 3000, 200)
    pieces = lay_out([(i, f"p{i}", (n,), True) for i, n in enumerate(shapes)], 2, world_size=2).pieces
    assert [piece.start for piece in pieces] == [0, 256, 4096, 8192, 13312, 16384]
    assert lay_out([], 2) == FlatLayout((), 0, 0)


def test_segments_leave_padding_out() -> None:
    pieces = lay_out([(0, "w", (200,), True), (1, "b", (5,), True)], 2).pieces
    parts = [(s.piece.name, s.start, s.numel) for s in segments(pieces, 100, 260)]
    assert parts == [("w", 100, 100), ("b", 256, 4)]
    assert list(segments(pieces, 200, 256)) == []


def test_what_does_not_divide_is_caught() -> None:
    with pytest.raises(AssertionError, match="10 elements do not divide into 3 shards"):
        shard_ranges(FlatLayout((), 10, 10), 3, 0)


@pytest.mark.parametrize(
    ("shape", "numel"), [((), 1), ((0, 5), 0), ((2, 3, 4), 24), ((1 << 20, 1 << 20), 1 << 40)]
)
def test_product(shape: tuple[int, ...], numel: int) -> None:
    assert product(shape) == numel
