"""The order in which blocks are visited: each once in a pass, and none twice among those under way."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.tierbench.load import block_order as walk
from tiering.tierbench.load.block_order import BlockOrder, BlockRange


def blocks_of(stretch: BlockRange, bs: int) -> list[int]:
    places = stretch.scattered or range(stretch.offset, stretch.offset + stretch.nbytes, bs)
    assert len(places) * bs == stretch.nbytes
    return [place // bs for place in places]


@given(
    first=st.integers(0, 100),
    count=st.integers(1, 200),
    amount=st.integers(1, 50),
    shuffled=st.booleans(),
    passes=st.integers(1, 3),
)
def test_a_pass_visits_each_block_once(
    first: int, count: int, amount: int, shuffled: bool, passes: int
) -> None:
    bs = 4096
    walk = BlockOrder(first, count, bs, shuffled=shuffled, seed=7)
    visited: list[int] = []
    for done in range(passes):
        order: list[int] = []
        while walk.passes == done:
            order += blocks_of(walk.next_blocks(amount), bs)
        assert sorted(order) == list(range(first, first + count))
        visited += order
    if not shuffled:
        assert visited == list(range(first, first + count)) * passes
    for at in range(len(visited) - count + 1):
        assert len(set(visited[at : at + count])) == count


def test_a_shuffled_walk_is_no_straight_one() -> None:
    visited = blocks_of(BlockOrder(0, 1000, 4096, shuffled=True).next_blocks(1000), 4096)
    assert sum(after == before + 1 for before, after in pairwise(visited)) < 20
    assert visited != blocks_of(BlockOrder(0, 1000, 4096, shuffled=True, seed=1).next_blocks(1000), 4096)


def test_of_very_many_blocks_some_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "MAX_SHUFFLED", 500)
    far = BlockOrder(10, 10**9, 4096, shuffled=True)
    visited = blocks_of(far.next_blocks(10**6), 4096)
    assert far.passes == 1
    assert len(set(visited)) == len(visited) == far.count <= 500
    assert far.count > 400
    assert max(visited) > 8 * 10**8
    assert min(visited) >= 10
