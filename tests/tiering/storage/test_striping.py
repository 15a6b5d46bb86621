"""The stripe map: every byte in one place, in proportion, aligned; and what fits in sum fits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.storage.arena import PAGE
from tiering.storage.striping import (
    LARGEST_ROW,
    SMALLEST_SHARE,
    SMALLEST_STRIPED,
    Need,
    Piece,
    StripeMap,
    apportion,
    divide,
    row_bytes,
    shares_of,
)

MIB = 1 << 20
SHARES = st.lists(st.integers(0, 30_000).map(lambda pages: pages * PAGE), min_size=1, max_size=5).filter(any)
WEIGHTS = st.lists(st.integers(1, 10**10), min_size=1, max_size=5)


@given(SHARES)
def test_every_byte_lies_in_exactly_one_place(shares: list[int]) -> None:
    stripes = StripeMap(shares)
    at, filled = 0, [0] * len(shares)
    for piece in stripes.pieces(0, stripes.nbytes):
        assert (piece.start, piece.offset) == (at, filled[piece.path])  # no gap, no overlap, on either side
        assert piece.nbytes > 0 and piece.nbytes % PAGE == 0
        at += piece.nbytes
        filled[piece.path] += piece.nbytes
    assert (at, filled) == (sum(shares), shares)


@given(SHARES, st.data())
def test_a_range_goes_where_the_whole_does(shares: list[int], data: Any) -> None:
    stripes = StripeMap(shares)
    offset = data.draw(st.integers(0, stripes.nbytes - 1))
    nbytes = data.draw(st.integers(1, stripes.nbytes - offset))
    expected = []
    for piece in stripes.pieces(0, stripes.nbytes):
        first, last = max(offset, piece.start), min(offset + nbytes, piece.start + piece.nbytes)
        if first < last:
            expected.append(Piece(piece.path, piece.offset + first - piece.start, first, last - first))
    assert list(stripes.pieces(offset, nbytes)) == expected


@given(SHARES, st.data())
def test_any_range_uses_the_paths_in_proportion(shares: list[int], data: Any) -> None:
    stripes = StripeMap(shares)
    offset = data.draw(st.integers(0, stripes.nbytes - 1))
    nbytes = data.draw(st.integers(1, stripes.nbytes - offset))
    used = [0] * len(shares)
    for piece in stripes.pieces(offset, nbytes):
        used[piece.path] += piece.nbytes
    row = stripes.nbytes / stripes.rows + 2 * PAGE * len(shares)
    for share, of_range in zip(shares, used, strict=True):
        assert abs(of_range - nbytes * share / stripes.nbytes) <= row


@given(SHARES, st.data())
def test_a_transfer_of_some_rows_has_no_more_pieces_per_path(shares: list[int], data: Any) -> None:
    stripes = StripeMap(shares)
    nbytes = data.draw(st.integers(1, stripes.nbytes))
    pieces = list(stripes.pieces(0, nbytes))
    rows = -(-nbytes * stripes.rows // stripes.nbytes) + 1  # a row may end a page per path early
    for path in range(len(shares)):
        assert sum(piece.path == path for piece in pieces) <= rows
    assert all(piece.path != after.path for piece, after in pairwise(pieces)), (
        "adjoining pieces are one transfer"
    )


@pytest.mark.parametrize("shares", [[900 * MIB], [0, 900 * MIB, 0]])
def test_on_one_path_everything_is_one_piece(shares: list[int]) -> None:
    stripes = StripeMap(shares)
    path = shares.index(900 * MIB)
    assert list(stripes.pieces(0, 900 * MIB)) == [Piece(path, 0, 0, 900 * MIB)]
    assert list(stripes.pieces(3 * PAGE, 5)) == [Piece(path, 3 * PAGE, 3 * PAGE, 5)]


def test_the_rows_of_two_unequal_paths() -> None:
    stripes = StripeMap([24 * MIB, 8 * MIB])
    assert stripes.rows == 2
    assert list(stripes.pieces(0, 32 * MIB)) == [
        Piece(0, 0, 0, 12 * MIB),
        Piece(1, 0, 12 * MIB, 4 * MIB),
        Piece(0, 12 * MIB, 16 * MIB, 12 * MIB),
        Piece(1, 4 * MIB, 28 * MIB, 4 * MIB),
    ]
    assert list(stripes.pieces(13 * MIB, 4 * MIB)) == [
        Piece(1, MIB, 13 * MIB, 3 * MIB),
        Piece(0, 12 * MIB, 16 * MIB, MIB),
    ]


def test_a_path_with_less_than_a_page_per_row_cuts_only_the_rows_that_it_is_in() -> None:
    stripes = StripeMap([400 * MIB, PAGE])
    assert stripes.rows == 6
    assert list(stripes.pieces(0, stripes.nbytes)) == [
        Piece(0, 0, 0, 400 * MIB),
        Piece(1, 0, 400 * MIB, PAGE),
    ]
    stripes = StripeMap([PAGE, 400 * MIB, PAGE])
    last = 400 * MIB * 5 // 6 // PAGE * PAGE
    assert list(stripes.pieces(0, stripes.nbytes)) == [
        Piece(1, 0, 0, last),
        Piece(0, 0, last, PAGE),
        Piece(1, last, last + PAGE, 400 * MIB - last),
        Piece(2, 0, 400 * MIB + PAGE, PAGE),
    ]


@given(WEIGHTS)
def test_a_row_is_long_enough_for_the_slowest_but_not_endless(weights: list[int]) -> None:
    row = row_bytes(weights)
    assert row % PAGE == 0
    smallest = row * min(weights) / sum(weights)
    assert row == LARGEST_ROW or SMALLEST_SHARE - 1 <= smallest <= SMALLEST_SHARE + PAGE
    assert row <= LARGEST_ROW


@given(st.integers(0, 10**6), WEIGHTS)
def test_dividing_loses_nothing(total: int, weights: list[int]) -> None:
    parts = divide(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) < 1 + 1e-6
        assert total > sum(weights) or part <= weight


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    st.lists(st.integers(1, 3000), min_size=1, max_size=40),
)
def test_extents_fill_the_plan_to_the_last_page(planned: list[int], sizes: list[int]) -> None:
    plan = [pages * PAGE for pages in planned]
    room_left = plan[:]
    for pages in [*sizes, sum(planned)]:
        nbytes = min(pages * PAGE, sum(room_left))
        if not nbytes:
            break
        shares = shares_of(nbytes, room_left, plan)
        assert shares is not None and sum(shares) == nbytes
        assert all(
            0 <= share <= room and share % PAGE == 0 for share, room in zip(shares, room_left, strict=True)
        )
        before = room_left
        room_left = [room - share for room, share in zip(room_left, shares, strict=True)]
        if nbytes >= SMALLEST_STRIPED:
            for share, room in zip(shares, before, strict=True):
                assert abs(share - nbytes * room / sum(before)) < PAGE + 1
        elif max(before) >= nbytes:
            assert sorted(shares)[-1] == nbytes  # whole
    assert room_left == [0] * len(plan) or sum(sizes) < sum(planned)
    assert shares_of(sum(room_left) + PAGE, room_left, plan) is None


def test_small_extents_go_to_the_emptiest_path() -> None:
    plan = [40 * MIB, 10 * MIB]
    room_left, went = plan[:], []
    for _ in range(50):
        shares = shares_of(MIB, room_left, plan)
        assert shares is not None
        went.append(shares.index(MIB))
        room_left = [room - share for room, share in zip(room_left, shares, strict=True)]
        assert abs(room_left[0] / plan[0] - room_left[1] / plan[1]) <= MIB / 10 / MIB  # emptied at one pace
    assert (went.count(0), went.count(1)) == (40, 10)


@given(st.integers(1, 10**6), WEIGHTS, st.data())
def test_space_follows_weight_where_there_is_room(pages: int, weights: list[int], data: Any) -> None:
    paths = tuple(range(len(weights)))
    (placed,) = apportion([Need(pages * PAGE, paths)], weights, paths, dict.fromkeys(paths, 10**11)) or [{}]
    for path in paths:
        assert abs(placed[path] - pages * PAGE * weights[path] / sum(weights)) <= PAGE * (1 + 1e-6)


ROOMS = st.lists(st.integers(0, 60), min_size=4, max_size=4)
SUBSETS = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True).map(tuple)


@given(
    st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 30)),
    st.tuples(SUBSETS, SUBSETS),
    st.lists(st.integers(1, 100), min_size=4, max_size=4),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
    ROOMS,
)
def test_what_fits_in_sum_is_placed(
    pages: tuple[int, int, int],
    paths: tuple[tuple[int, ...], tuple[int, ...]],
    weights: list[int],
    disks: list[int],
    rooms: list[int],
) -> None:
    """Needs on two sets of paths fit exactly when those of each fit its disks, and all fit all (Hall's condition)."""
    needs = [Need(n * PAGE, p) for n, p in zip(pages, (*paths, paths[1]), strict=True)]
    room = {disk: nbytes * PAGE + 17 for disk, nbytes in enumerate(rooms)}

    def on(*some: tuple[int, ...]) -> int:
        return sum(rooms[disk] for disk in {disks[path] for paths in some for path in paths})

    fits = pages[0] <= on(paths[0]) and sum(pages[1:]) <= on(paths[1]) and sum(pages) <= on(*paths)
    placed = apportion(needs, weights, disks, room)
    assert (placed is not None) == fits
    if placed is None:
        return
    used = dict.fromkeys(room, 0)
    for need, by_path in zip(needs, placed, strict=True):
        assert set(by_path) == set(need.paths)
        assert sum(by_path.values()) == need.nbytes
        for path, nbytes in by_path.items():
            assert nbytes >= 0 and nbytes % PAGE == 0
            used[disks[path]] += nbytes
    assert all(used[disk] <= room[disk] for disk in room)


def test_who_has_another_place_makes_way() -> None:
    needs = [Need(10 * PAGE, (0, 1)), Need(18 * PAGE, (1, 2))]
    room = dict.fromkeys(range(3), 10 * PAGE)
    assert apportion(needs, [1, 9, 1], [0, 1, 2], room) == [
        {0: 8 * PAGE, 1: 2 * PAGE},  # by weight it would be 1 and 9
        {1: 8 * PAGE, 2: 10 * PAGE},
    ]
    assert apportion([needs[0], Need(21 * PAGE, (1, 2))], [1, 9, 1], [0, 1, 2], room) is None


def test_a_full_path_gives_its_share_to_the_others() -> None:
    need = Need(100 * PAGE, (0, 1, 2))
    assert apportion([need], [2, 1, 1], [7, 8, 9], {7: 10 * PAGE, 8: 99 * PAGE, 9: 99 * PAGE}) == [
        {0: 10 * PAGE, 1: 45 * PAGE, 2: 45 * PAGE}
    ]
    assert apportion([need], [2, 1, 1], [7, 7, 9], {7: 30 * PAGE, 9: 70 * PAGE}) == [
        {0: 20 * PAGE, 1: 10 * PAGE, 2: 70 * PAGE}
    ]
