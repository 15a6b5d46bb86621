"""Swap space over several directories: bytes where they belong, and within the room."""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiering.storage.spaces import OpenSpace, on_disk, read, write
from tiering.errors import SwapError, SwapSpaceError
from tiering.storage import path_speeds, slabs
from tiering.storage.aio import AioContext, Fault
from tiering.storage.arena import PAGE, Arena
from tiering.storage.swap_file import free_bytes
from tiering.storage.swap_space import Section, SwapSpace

MIB = 1 << 20


# One path


def test_on_one_path_a_transfer_is_one_ticket(
    open_space: OpenSpace, arena: Arena, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "measure", None)  # nothing to compare with
    space = open_space({"parameters": (8 * PAGE, paths[:1]), "optimizer state": (5 * PAGE, paths[:1])})
    assert (len(space.slabs), space.capacity, space.weights) == (1, 13 * PAGE, {})
    extent = space.allocate(8 * PAGE, ("w",), "parameters")
    other = space.allocate(5 * PAGE, ("m",), "optimizer state")
    content = random.Random(1).randbytes(8 * PAGE)
    ticket = write(space, extent, arena, content)
    ticket.wait()
    assert read(space, extent, arena, PAGE, 3 * PAGE) == content[PAGE : 4 * PAGE]
    assert (on_disk(extent), on_disk(other)) == (content, bytes(5 * PAGE))
    assert space.used == space.capacity
    assert extent.place_of(PAGE + 3) == f"byte {PAGE + 3} of the swap file in {paths[0]}"
    assert other.place_of(0) == f"byte {8 * PAGE} of the swap file in {paths[0]}"


def test_an_extent_has_at_least_a_byte(open_space: OpenSpace, paths: list[Path]) -> None:
    space = open_space({"parameters": (PAGE, paths[:1])})
    with pytest.raises(ValueError, match=r"at least one byte, not 0 \(w\)"):
        space.allocate(0, ("w",), "parameters")


def test_a_disk_that_is_too_full_says_what_it_has(
    open_space: OpenSpace, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    number = paths[0].stat().st_dev
    monkeypatch.setattr(slabs, "free_by_file_system", lambda _: {number: 20 * PAGE + 5})
    with pytest.raises(SwapSpaceError) as caught:
        open_space({"parameters": (12 * PAGE, paths[:1]), "gradients": (9 * PAGE, paths[:1])})
    assert str(caught.value) == (
        f"[TIER-SPACE] the swap file needs {21 * PAGE} bytes but {paths[0]} has {20 * PAGE + 5} free; free"
        f" {PAGE - 5} bytes, name another nvme_path, or raise host_budget so that less is swapped"
    )
    with pytest.raises(SwapSpaceError) as caught:
        open_space({"parameters": (12 * PAGE, paths[:2]), "gradients": (9 * PAGE, paths[1:2])})
    assert str(caught.value) == (
        f"[TIER-SPACE] the swap files need {12 * PAGE} bytes for parameters in {paths[0]} and {paths[1]},"
        f" {9 * PAGE} bytes for gradients in {paths[1]}, but the free space is {20 * PAGE + 5} in the file"
        f" system of {paths[0]}; free some space, name more directories in nvme_path, or raise host_budget so that"
        " less is swapped"
    )
    assert all(list(path.iterdir()) == [] for path in paths)


# Several paths


@pytest.mark.parametrize("weights", [(1, 1, 1), (6, 3, 1), (1, 50, 2)])
def test_bytes_lie_where_the_stripes_say(
    engine: str,
    open_space: OpenSpace,
    arena: Arena,
    paths: list[Path],
    rates: Callable[..., None],
    small_rows: None,
    weights: tuple[int, int, int],
) -> None:
    rates(*weights)
    space = open_space({"state": (300 * PAGE, paths)})
    shares = [slab.capacity for slab in space.slabs]
    assert sum(shares) == 300 * PAGE
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - 300 * PAGE * weight / sum(weights)) <= PAGE
    extents = [space.allocate(nbytes, (f"w{nbytes}",), "state") for nbytes in (151 * PAGE - 7, 98 * PAGE)]
    assert [extent.nbytes for extent in extents] == [151 * PAGE, 98 * PAGE]
    rng = random.Random(2)
    contents = [rng.randbytes(extent.nbytes) for extent in extents]
    for extent, content in zip(extents, contents, strict=True):
        ticket = write(space, extent, arena, content)
        assert (ticket.nbytes, ticket.wait()) == (extent.nbytes, extent.nbytes)
    assert [on_disk(extent) for extent in extents] == contents
    for _ in range(40):
        number = rng.randrange(2)
        offset = rng.randrange(extents[number].nbytes // PAGE) * PAGE
        nbytes = rng.randint(1, extents[number].nbytes - offset)  # tails of any length
        assert (
            read(space, extents[number], arena, offset, nbytes) == contents[number][offset : offset + nbytes]
        )
    space.allocate(51 * PAGE, ("last",), "state")
    assert space.used == space.capacity
    with pytest.raises(SwapSpaceError) as caught:
        space.allocate(1, ("too", "much"), "state")
    assert (
        f"swap space for state in {paths[0]}, {paths[1]}, {paths[2]}: no extent of {PAGE} bytes left for too, much"
        f" (0 of {300 * PAGE} bytes left); raise nvme_budget" in str(caught.value)
    )


def test_the_bandwidth_is_kept_and_told(
    open_space: OpenSpace, paths: list[Path], rates: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rates(3, 1)
    space = open_space({"state": (400 * PAGE, paths[:2]), "parameters": (7 * PAGE, paths[2:])})
    assert space.weights == {paths[0]: 3 * 10**9, paths[1]: 10**9}
    assert [slab.capacity for slab in space.slabs] == [300 * PAGE, 100 * PAGE, 7 * PAGE]
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert messages == [
        f"swap space in {paths[0]}: 1.17 MiB, 2.79 GiB/s measured",
        f"swap space in {paths[1]}: 400.00 KiB, 953.67 MiB/s measured",
        f"swap space in {paths[2]}: 28.00 KiB, not measured",
    ]
    (shared,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert shared == (
        f"nvme_path {paths[0]} and {paths[1]} are on one disk: striping over them is not faster than using one of them"
    )


def test_sections_that_share_their_paths_are_warned_about_once(
    open_space: OpenSpace, paths: list[Path], rates: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    rates(1, 1)
    open_space({"state": (40 * PAGE, paths[:2]), "parameters": (40 * PAGE, paths[1::-1])})
    assert caplog.text.count("are on one disk") == 1


def test_sections_with_other_paths_stay_there(
    open_space: OpenSpace, paths: list[Path], rates: Callable[..., None], small_rows: None
) -> None:
    rates(1, 1)
    space = open_space({"parameters": (10 * PAGE, paths[:1]), "state": (20 * PAGE, paths[1:])})
    param = space.allocate(10 * PAGE, ("w",), "parameters")
    state = space.allocate(20 * PAGE, ("m",), "state")
    assert [part.slab.directory for part in param.parts] == paths[:1]
    assert [part.slab.directory for part in state.parts] == paths[1:]
    with pytest.raises(SwapSpaceError, match="swap space for parameters in"):
        space.allocate(PAGE, ("w",), "parameters")


def test_sections_may_share_a_path(
    open_space: OpenSpace, paths: list[Path], rates: Callable[..., None], small_rows: None
) -> None:
    rates(1, 1, 1)
    space = open_space({"parameters": (40 * PAGE, paths[:2]), "state": (60 * PAGE, paths[1:])})
    assert [slab.capacity // PAGE for slab in space.slabs] == [20, 20 + 30, 30]
    mine = [space.allocate(10 * PAGE, ("w",), "parameters") for _ in range(4)]
    for _ in range(6):
        space.allocate(10 * PAGE, ("m",), "state")
    assert space.used == space.capacity
    for extent in mine:
        space.free(extent)
    assert space.used == 60 * PAGE
    for _ in range(4):
        space.allocate(10 * PAGE, ("w",), "parameters")
    assert space.used == space.capacity


def test_a_link_does_not_name_a_directory_twice(open_space: OpenSpace, paths: list[Path]) -> None:
    link = paths[0].parent / "link"
    link.symlink_to(paths[0])
    with pytest.raises(SwapSpaceError, match=f"names {paths[0]} twice; name each directory once"):
        open_space({"state": (PAGE, [paths[0], link])})


def test_a_directory_that_will_not_do_is_refused_before_anything_is_made(
    open_space: OpenSpace, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "SlabFile", None)
    with pytest.raises(SwapSpaceError, match="missing does not exist"):
        open_space({"state": (PAGE, [paths[0], paths[1] / "missing"])})


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_start_that_fails_leaves_nothing(
    open_space: OpenSpace, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> list[int]:
        raise SwapError("planted", errno=errno.EIO, filename="x", offset=0)

    open_space({"state": (PAGE, paths[:1])})
    before, free = open_descriptors(), free_bytes(paths[0])
    monkeypatch.setattr(slabs, "measure", fails)
    with AioContext(engine="threads") as aio:
        within = open_descriptors()
        with pytest.raises(SwapError, match="planted"):
            SwapSpace({"state": Section(64 * MIB, tuple(paths))}, aio)
        assert open_descriptors() == within
    assert open_descriptors() == before
    assert free_bytes(paths[0]) > free - 48 * MIB  # others use this disk too
    assert all(list(path.iterdir()) == [] for path in paths)


def test_a_smaller_disk_gets_less_and_the_plan_still_fits(
    small_disk: Callable[[int], Path], paths: list[Path], rates: Callable[..., None], open_space: OpenSpace
) -> None:
    disk = small_disk(16 * MIB)
    room = free_bytes(disk)
    rates(1, 1)
    need = 2 * room + 8 * MIB
    space = open_space({"state": (need // PAGE * PAGE, [disk, paths[0]])})
    small, large = (slab.capacity for slab in space.slabs)
    assert small == room // PAGE * PAGE
    assert small + large == need // PAGE * PAGE
    assert free_bytes(disk) < PAGE
    extent = space.allocate(need // PAGE * PAGE, ("m",), "state")
    assert space.used == extent.nbytes
    space.slabs[0].aio.close()
    space.close()  # before the disk goes


def test_a_path_without_room_is_left_out_with_a_warning(
    small_disk: Callable[[int], Path],
    paths: list[Path],
    rates: Callable[..., None],
    open_space: OpenSpace,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = small_disk(16 * MIB)
    with (disk / "full").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_bytes(disk) // PAGE * PAGE)
    rates(1, 1)
    space = open_space({"state": (8 * MIB, [disk, paths[0]])})
    assert [slab.capacity for slab in space.slabs] == [0, 8 * MIB]
    assert (
        f"nvme_path {disk} is not used: by its speed and free space, none of the swap space is placed on it"
        in caplog.text
    )
    space.slabs[0].aio.close()
    space.close()  # before the disk goes


def test_directories_on_one_full_disk_trade_their_room(
    small_disk: Callable[[int], Path], rates: Callable[..., None], open_space: OpenSpace
) -> None:
    disk = small_disk(16 * MIB)
    halves = [disk / "one", disk / "two", disk / "three"]
    for half in halves:
        half.mkdir()
    room = (free_bytes(disk) - 16 * PAGE) // PAGE * PAGE
    rates(8, 1, 1)
    space = open_space({"state": (room, halves)})
    capacities = [slab.capacity for slab in space.slabs]
    assert sum(capacities) == room
    assert capacities == pytest.approx([0.8 * room, 0.1 * room, 0.1 * room], abs=PAGE)
    space.slabs[0].aio.close()
    space.close()  # before the disk goes


# Speeds of paths


def test_a_slow_path_is_given_less(
    open_space: OpenSpace, paths: list[Path], small_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured for real, by counters: every transfer of the second path begins 50 ms late."""
    space = open_space({"state": (32 * MIB, paths[:2])}, Fault(count=0, delay=0.05, file=1))
    fast, slow = space.slabs
    assert space.weights[paths[0]] > 2 * space.weights[paths[1]]
    assert fast.capacity > 2 * slow.capacity > 0
    assert fast.capacity + slow.capacity == 32 * MIB
    moved = [stats.write.bytes + stats.read.bytes for stats in fast.aio.stats()]
    assert moved[0] > 2 * moved[1] > 0  # and it was not waited for: each had the same time


def test_new_extents_get_less_of_a_path_that_becomes_slow(
    open_space: OpenSpace,
    arena: Arena,
    paths: list[Path],
    rates: Callable[..., None],
    small_rows: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first 300 transfers of the second path begin 20 ms late."""
    monkeypatch.setattr(path_speeds, "INTERVAL_OPS", 32)
    rates(1, 1)
    space = open_space(
        {"state": (64 * PAGE, paths[:2]), "activations": (4000 * PAGE, paths[:2])},
        Fault(count=300, delay=0.02, file=1),
    )
    fixed = space.allocate(64 * PAGE, ("w",), "state")

    def shares() -> list[int]:
        lent = space.allocate(100 * PAGE, ("a",), "activations")
        pages = [part.extent.nbytes // PAGE for part in lent.parts]
        space.free(lent)
        return pages

    def steps(until: Callable[[], bool]) -> None:
        for number in range(200):
            content = bytes([number % 251]) * fixed.nbytes
            write(space, fixed, arena, content).wait()
            assert read(space, fixed, arena, 0, fixed.nbytes) == content
            space.observe(space.slabs[0].aio.stats())
            if until():
                return
        raise AssertionError("the path was not judged")

    assert shares() == [50, 50]
    slow = space.speeds.paths[str(paths[1])]
    steps(lambda: slow.is_slow)
    (warning,) = [each.getMessage() for each in caplog.records if "has become slow" in each.getMessage()]
    assert (
        warning.startswith(f"nvme_path {paths[1]} has become slow (")
        and "953.67 MiB/s were measured" in warning
    )
    fast, less = shares()
    assert fast + less == 100 and less < 40 and less < 100 * slow.share + 1  # whole pages
    # New room, too.
    before = [slab.capacity for slab in space.slabs]
    space.grow("activations", 100 * PAGE)
    grown = [slab.capacity - old for slab, old in zip(space.slabs, before, strict=True)]
    assert sum(grown) >= 100 * PAGE and grown[0] > 1.4 * grown[1]
    # All room of the other path is used: the rest still fits.
    whole = space.allocate(4000 * PAGE, ("a",), "activations")
    assert whole.parts[1].extent.nbytes > 1000 * PAGE
    space.free(whole)
    caplog.set_level(logging.INFO)
    steps(lambda: not slow.is_slow)
    assert f"nvme_path {paths[1]} is as fast as the other paths again" in caplog.text


def test_a_few_pages_on_a_slow_path_alone_can_grow(
    open_space: OpenSpace, paths: list[Path], rates: Callable[..., None]
) -> None:
    rates(1, 1)
    space = open_space({"state": (4 * MIB, paths[:2]), "activations": (PAGE, paths[:1])})
    space.speeds.paths[str(paths[0])].share = 0.5
    with pytest.raises(SwapSpaceError, match="no extent of 12288 bytes left"):
        space.allocate(3 * PAGE, ("a",), "activations")
    space.grow("activations", 3 * PAGE)
    assert [part.slab for part in space.allocate(3 * PAGE, ("a",), "activations").parts] == [space.slabs[0]]
