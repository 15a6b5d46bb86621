"""Runs of tiles: their tiles, and how they are parted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiering.placement.plan import SubGroup, TileRun
from tiering.placement.workload import Tier


def test_a_run_lists_its_tiles() -> None:
    run = TileRun(3, 10, 31, 8, Tier.HOST, visits=True)
    assert list(run.sub_groups()) == [
        SubGroup(3, 10, 18, Tier.HOST, True),
        SubGroup(3, 18, 26, Tier.HOST, True),
        SubGroup(3, 26, 31, Tier.HOST, True),
    ]
    assert (run.numel, run.largest) == (21, 8)
    assert TileRun(0, 0, 5, 8, Tier.HOST).largest == 5


@given(st.integers(0, 50), st.integers(1, 200), st.integers(1, 30), st.integers(1, 250))
def test_parts_have_whole_tiles_and_no_more_than_needed(
    start: int, count: int, step: int, numel: int
) -> None:
    run = TileRun(0, start, start + count, step, Tier.NVME)
    first, rest = run.parted(numel)
    parts = [first] if rest is None else [first, rest]
    assert [tile for part in parts for tile in part.sub_groups()] == list(run.sub_groups())
    assert first.numel >= min(numel, count)
    # One tile less would be too few.
    assert first.numel - (first.end - first.start - 1) % step - 1 < numel
