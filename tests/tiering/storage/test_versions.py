"""Versions of each page: what is kept is not overwritten; a step's is current again after ``go_back``."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.tiering.storage.spaces import OpenSpace, at_places, read, write
from tiering.errors import SwapError
from tiering.storage.aio import Fault
from tiering.storage.arena import PAGE, Arena
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.swap_space import SwapSpace
from tiering.storage.versions import Kept, Versions

PAGES = 24


@pytest.mark.parametrize(
    ("purposes", "seed"),
    [
        ((Kept.STEP,), 1),
        ((Kept.STEP,), 2),
        ((Kept.SNAPSHOT,), 3),
        *((tuple(Kept), seed) for seed in (4, 5, 6)),
    ],
)
def test_any_order_of_writes_keeps_and_ways_back(
    engine: str,
    open_space: OpenSpace,
    arena: Arena,
    paths: list[Path],
    rates: Callable[..., None],
    small_rows: None,
    purposes: tuple[Kept, ...],
    seed: int,
) -> None:
    rates(3, 2, 1)
    draw = random.Random(seed)
    count = 1 + len(purposes)
    space = open_space({"state": (count * PAGES * PAGE, paths), "gradients": (PAGES * PAGE, paths)})
    extents = [space.allocate(PAGES // 2 * PAGE, (name,), "state", kept=purposes) for name in "ab"]
    plain = space.allocate(PAGES * PAGE, ("g",), "gradients")
    assert space.used == (count + 1) * PAGES * PAGE
    current = [bytearray(PAGES // 2 * PAGE) for _ in extents]
    for extent in extents:
        write(space, extent, arena, bytes(PAGES // 2 * PAGE))
    for purpose in purposes:
        space.keep(purpose)
    step = [bytearray(each) for each in current]
    snapshot, places = [bytes(each) for each in current], [[*each.places(0, each.nbytes)] for each in extents]
    other = draw.randbytes(PAGES * PAGE)
    write(space, plain, arena, other)
    actions = ["write", "write", "write", "read", *(f"keep {purpose.value}" for purpose in purposes)]
    for _ in range(60):
        which = draw.randrange(2)
        first = draw.randrange(PAGES // 2)
        last = draw.randint(first + 1, PAGES // 2)
        match draw.choice(actions + ["go back"] * (Kept.STEP in purposes)):
            case "write":
                content = draw.randbytes((last - first) * PAGE)
                write(space, extents[which], arena, content, first * PAGE)
                current[which][first * PAGE : last * PAGE] = content
            case "read":
                content = read(space, extents[which], arena, first * PAGE, (last - first) * PAGE)
                assert content == current[which][first * PAGE : last * PAGE]
            case "keep step":
                space.keep()
                step = [bytearray(each) for each in current]
            case "keep snapshot":
                space.keep(Kept.SNAPSHOT)
                snapshot = [bytes(each) for each in current]
                places = [[*each.places(0, each.nbytes)] for each in extents]
            case "go back":
                space.go_back()
                current = [bytearray(each) for each in step]
    for extent, content in zip(extents, current, strict=True):
        assert read(space, extent, arena, 0, len(content)) == content
    # Whatever was written since, the snapshot is where it was.
    for where, content in zip(places, snapshot, strict=True) if Kept.SNAPSHOT in purposes else ():
        assert b"".join(at_places(where)) == content
    if Kept.STEP in purposes:
        space.go_back()
        for extent, content in zip(extents, step, strict=True):
            assert read(space, extent, arena, 0, len(content)) == content
    assert read(space, plain, arena, 0, len(other)) == other


def kept(space: SwapSpace, arena: Arena) -> StripedExtent:
    """An extent of four pages with "a" in each, which are kept."""
    extent = space.allocate(4 * PAGE, ("w",), "state", kept=(Kept.STEP,))
    write(space, extent, arena, b"a" * 4 * PAGE)
    space.keep()
    return extent


def test_after_a_failed_write_the_kept_content_is_there(
    engine: str, open_state: OpenSpace, arena: Arena
) -> None:
    # The first four are of the content that is kept.
    space = open_state(8 * PAGE, Fault("write", first=5, error=errno.EIO))
    extent = kept(space, arena)
    write(space, extent, arena, b"b" * 2 * PAGE, PAGE)
    for _ in range(2):
        with pytest.raises(SwapError, match=r"\bw\b"):
            space.keep()
    with pytest.raises(SwapError):
        read(space, extent, arena, PAGE, PAGE)
    space.go_back()
    assert read(space, extent, arena, 0, 4 * PAGE) == b"a" * 4 * PAGE
    # The failed pages are written again: their other version is whole.
    space.keep()
    write(space, extent, arena, b"c" * 3 * PAGE)
    space.keep()
    assert read(space, extent, arena, 0, 4 * PAGE) == b"c" * 3 * PAGE + b"a" * PAGE


def test_a_write_that_does_not_begin_replaces_nothing(open_state: OpenSpace, arena: Arena) -> None:
    space = open_state(8 * PAGE)
    extent = kept(space, arena)
    unaligned = arena.lease(5 * PAGE, "out").part(512, 2 * PAGE)
    for again in range(2):
        with pytest.raises(SwapError, match="to be multiples of 4096"):
            space.swap_out(extent, unaligned, offset=PAGE)
        if again:
            space.keep()
        assert read(space, extent, arena, 0, 4 * PAGE) == b"a" * 4 * PAGE


def test_writes_in_flight_end_before_their_place_is_written_again(
    engine: str, open_state: OpenSpace, arena: Arena
) -> None:
    space = open_state(8 * PAGE, Fault("write", first=5, count=4, delay=0.1))
    extent = kept(space, arena)
    for letter in b"bcd":
        write(space, extent, arena, bytes([letter]) * 4 * PAGE)
        if letter != ord("d"):
            space.go_back()
    assert read(space, extent, arena, 0, 4 * PAGE) == b"d" * 4 * PAGE


def test_a_freed_extent_is_not_kept(open_state: OpenSpace, arena: Arena) -> None:
    space = open_state(8 * PAGE, Fault("write", first=5, error=errno.EIO))
    extent = kept(space, arena)
    write(space, extent, arena, b"b" * PAGE)
    space.free(extent)
    space.keep()
    assert space.used == 0


def test_a_write_goes_to_the_lowest_version_that_is_not_kept() -> None:
    """In every order of six actions on a page."""
    for actions in product(("write", "go back", *Kept), repeat=6):
        versions = Versions(PAGE, tuple(Kept))
        current, kept = 0, dict.fromkeys(Kept, 0)
        for action in actions:
            if isinstance(action, Kept):
                versions.keep(action)
                kept[action] = current
            elif action == "go back":
                versions.go_back(0, PAGE)
                current = kept[Kept.STEP]
            else:
                current = min({0, 1, 2} - {*kept.values()})
                assert versions.ranges(0, PAGE, writes=True) == ((current * PAGE, (current + 1) * PAGE),)
                versions.written(0, PAGE)
            assert versions.ranges(0, PAGE, writes=False) == ((current * PAGE, (current + 1) * PAGE),)
            for purpose, number in kept.items():
                at_kept = ((number * PAGE, (number + 1) * PAGE),)
                assert versions.ranges(0, PAGE, writes=False, kept=purpose) == at_kept


def test_parts_of_pages_are_in_the_version_of_each_page() -> None:
    versions, other = Versions(4 * PAGE, (Kept.STEP,)), 4 * PAGE
    for page in (1, 3):
        versions.written(page * PAGE, (page + 1) * PAGE)
    assert versions.ranges(PAGE - 8, 2 * PAGE + 8, writes=False) == (
        (PAGE - 8, PAGE),
        (other + PAGE, other + 2 * PAGE),
        (2 * PAGE, 2 * PAGE + 8),
    )
    versions.go_back(PAGE + 8, PAGE + 16)
    assert versions.ranges(0, 4 * PAGE, writes=False) == ((0, 3 * PAGE), (other + 3 * PAGE, other + 4 * PAGE))
