"""Swap space over several directories: bytes where they belong, in the order of the calls, and within the room."""

from __future__ import annotations

import errno
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tiering._aio import lib
from tiering.errors import SwapError, SwapSpaceError
from tiering.storage import bandwidth, path_speeds, striping, swap_space, tickets
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import PAGE, Arena, Lease
from tiering.storage.swap_file import free_bytes
from tiering.storage.swap_space import Section, StripedExtent, SwapSpace
from tiering.storage.tickets import Ticket

MIB = 1 << 20
OpenSpace = Callable[..., SwapSpace]


@pytest.fixture
def arena() -> Arena:
    return Arena.map(4 * MIB, "host")


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few pages, so that small extents are striped many times."""
    monkeypatch.setattr(striping, "SMALLEST_STRIPED", PAGE)
    monkeypatch.setattr(striping, "SMALLEST_SHARE", PAGE)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    directories = [tmp_path / name for name in "abc"]
    for path in directories:
        path.mkdir()
    return directories


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``rates(3, 1)`` is what measuring says from here on, in GB/s."""

    def say(*rates: int) -> None:
        def measure(aio: AioContext, files: list[tuple[int, int]]) -> list[int]:
            assert len(files) == len(rates)
            return [rate * 10**9 for rate in rates]

        monkeypatch.setattr(swap_space, "measure", measure)

    return say


@pytest.fixture
def open_space(request: pytest.FixtureRequest) -> Iterator[OpenSpace]:
    uses_engine = "engine" in request.fixturenames
    name = request.getfixturevalue("engine") if uses_engine else "threads"
    with ExitStack() as stack:

        def open_one(sections: dict[str, tuple[int, list[Path]]], *faults: Fault) -> SwapSpace:
            aio = AioContext(engine=name, block_size=PAGE, fault=FaultPlan(faults) if faults else None)
            stack.callback(aio.close)
            space = SwapSpace({kind: Section(n, tuple(where)) for kind, (n, where) in sections.items()}, aio)
            stack.callback(space.close)
            stack.callback(aio.close)
            return space

        yield open_one


def filled(arena: Arena, content: bytes) -> Lease:
    lease = arena.lease(len(content), "out")
    lease.view[: len(content)] = content
    return lease


def write(space: SwapSpace, extent: StripedExtent, arena: Arena, content: bytes, offset: int = 0) -> Ticket:
    lease = filled(arena, content)
    ticket = space.swap_out(extent, lease, offset=offset, nbytes=len(content))
    lease.retire(ticket)
    return ticket


def read(space: SwapSpace, extent: StripedExtent, arena: Arena, offset: int, nbytes: int) -> bytes:
    lease = arena.lease(nbytes, "in")
    ticket = None
    try:
        ticket = space.swap_in(extent, lease, offset=offset, nbytes=nbytes)
        assert ticket.wait() == nbytes
        return bytes(lease.view[:nbytes])
    finally:
        assert ticket is None or ticket.done()
        lease.release()


def on_disk(extent: StripedExtent) -> bytes:
    """The extent's bytes as they lie in the files."""
    raw = bytearray(extent.nbytes)
    for piece in extent.stripes.pieces(0, extent.nbytes):
        part = extent.parts[piece.path]
        with Path(f"/proc/self/fd/{part.slab.fd}").open("rb") as file:
            file.seek(part.extent.offset + piece.offset)
            raw[piece.start : piece.start + piece.nbytes] = file.read(piece.nbytes)
    return bytes(raw)


# One path


def test_on_one_path_a_transfer_is_one_ticket(
    open_space: OpenSpace, arena: Arena, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_space, "measure", None)  # nothing to compare with
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
    monkeypatch.setattr(swap_space, "free_by_file_system", lambda _: {number: 20 * PAGE + 5})
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
    monkeypatch.setattr(swap_space, "SlabFile", None)
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
    monkeypatch.setattr(swap_space, "measure", fails)
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


# Order


@pytest.mark.parametrize("seed", range(4))
def test_random_interleavings_read_what_was_written_last(
    engine: str,
    open_space: OpenSpace,
    arena: Arena,
    paths: list[Path],
    rates: Callable[..., None],
    small_rows: None,
    seed: int,
) -> None:
    """In the order of the calls, whatever the order in which the disks get to their pieces."""
    rng = random.Random(seed)
    late = [Fault("write", first=n, delay=rng.uniform(0.0005, 0.004)) for n in rng.sample(range(1, 800), 32)]
    rates(1, rng.randint(1, 5), rng.randint(1, 5))
    space = open_space({"state": (72 * PAGE, paths)}, *late, Fault("write", count=0, delay=0.0001))
    extents = [space.allocate(24 * PAGE, (f"e{index}",), "state") for index in range(3)]
    assert all(len(extent.parts) == 3 for extent in extents)
    model = [bytearray(24 * PAGE) for _ in extents]
    for extent, content in zip(extents, model, strict=True):
        write(space, extent, arena, bytes(content)).wait()
    pending: list[tuple[Ticket, Lease, bytes]] = []
    for _ in range(150):
        number, start = rng.randrange(3), rng.randrange(24)
        offset, nbytes = start * PAGE, rng.randint(1, min(12, 24 - start)) * PAGE
        if rng.random() < 0.5:
            content = rng.randbytes(16) * (nbytes // 16)
            model[number][offset : offset + nbytes] = content
            write(space, extents[number], arena, content, offset)
        else:
            lease = arena.lease(nbytes, "in")
            ticket = space.swap_in(extents[number], lease, offset=offset, priority=rng.randrange(3))
            pending.append((ticket, lease, bytes(model[number][offset : offset + nbytes])))
        while len(pending) > rng.randrange(24):
            settle(*pending.pop(rng.randrange(len(pending))))
    for transfer in pending:
        settle(*transfer)
    assert [read(space, extent, arena, 0, extent.nbytes) for extent in extents] == model
    arena.drain()
    assert [on_disk(extent) for extent in extents] == model


def settle(ticket: Ticket, lease: Lease, expected: bytes) -> None:
    assert ticket.wait() == lease.nbytes
    assert bytes(lease.view) == expected
    lease.release()


def test_writes_by_two_threads_come_in_one_order_on_every_path(
    engine: str,
    open_space: OpenSpace,
    arena: Arena,
    paths: list[Path],
    rates: Callable[..., None],
    small_rows: None,
) -> None:
    """Else an extent could end up with one thread's bytes on one path and the other's on another."""
    rates(1, 1, 1)
    space = open_space({"state": (24 * PAGE, paths)})
    extent = space.allocate(24 * PAGE, ("e",), "state")
    marks = [filled(arena, mark * extent.nbytes) for mark in (b"a", b"b")]
    # A failure of one thread ends the other.
    start = threading.Barrier(2, timeout=60)

    def write_often(lease: Lease) -> None:
        for _ in range(60):
            start.wait()
            space.swap_out(extent, lease).wait()
            start.wait()
            content = on_disk(extent)
            assert content in (b"a" * extent.nbytes, b"b" * extent.nbytes)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(write_often, marks))
    finally:
        sys.setswitchinterval(switch)


def test_transfers_must_fit_extent_and_buffer(
    open_space: OpenSpace, arena: Arena, paths: list[Path], rates: Callable[..., None], small_rows: None
) -> None:
    rates(1, 1)
    space = open_space({"state": (4 * PAGE, paths[:2])})
    extent = space.allocate(4 * PAGE, ("layers.0.w",), "state")
    lease = arena.lease(8 * PAGE, "state")
    for offset, nbytes in ((-PAGE, PAGE), (0, 0), (0, 5 * PAGE), (PAGE, 4 * PAGE), (4 * PAGE, None), (0, -1)):
        for transfer in (space.swap_in, space.swap_out):
            with pytest.raises(ValueError, match=r"does not fit an extent of 16384 bytes .*\(layers\.0\.w\)"):
                transfer(extent, lease, offset=offset, nbytes=nbytes)
    with pytest.raises(ValueError, match="a buffer of 4096 bytes"):
        space.swap_out(extent, lease.part(0, PAGE), nbytes=2 * PAGE)
    assert space.swap_out(extent, lease).wait() == 4 * PAGE  # by default: what fits
    assert space.swap_in(extent, lease, offset=PAGE).wait() == 3 * PAGE


def test_a_slow_path_delays_only_what_lies_on_it(
    engine: str,
    open_space: OpenSpace,
    arena: Arena,
    paths: list[Path],
    rates: Callable[..., None],
    small_rows: None,
) -> None:
    rates(1, 1)
    space = open_space({"state": (64 * PAGE, paths[:2])}, Fault(count=0, delay=1.0, file=1))
    striped = space.allocate(16 * PAGE, ("striped",), "state")
    others = [space.allocate(PAGE, (f"small{index}",), "state") for index in range(20)]
    fast = [extent for extent in others if extent.parts[0].slab is space.slabs[0]]
    assert len(fast) == 10
    ticket = write(space, striped, arena, b"s" * (16 * PAGE))
    quick = [piece for piece in striped.stripes.pieces(0, striped.nbytes) if piece.path == 0]
    assert len(quick) == 8
    while space.slabs[0].aio.stats()[0].write.ops < len(quick):
        time.sleep(0.001)
    for extent in fast:
        write(space, extent, arena, b"f" * PAGE).wait()
        assert read(space, extent, arena, 0, PAGE) == b"f" * PAGE
    ahead = [stats.write.ops for stats in space.slabs[0].aio.stats()]
    concurrent = not ticket.done()
    ticket.wait()
    assert read(space, striped, arena, 0, PAGE) == b"s" * PAGE
    if not concurrent:
        pytest.skip("this machine slept through the delay of a second: this proves nothing")
    assert ahead == [18, 0]


def test_a_cancelled_transfer_ends_with_all_its_parts_over(
    engine: str,
    open_space: OpenSpace,
    arena: Arena,
    paths: list[Path],
    rates: Callable[..., None],
    small_rows: None,
) -> None:
    rates(1, 1)
    space = open_space({"state": (64 * PAGE, paths[:2])}, Fault("write", first=65, count=0, delay=0.02))
    extent = space.allocate(64 * PAGE, ("w",), "state")
    write(space, extent, arena, b"o" * (64 * PAGE)).wait()
    first = write(space, extent, arena, b"1" * (64 * PAGE))
    lease = filled(arena, b"2" * (64 * PAGE))
    second = space.swap_out(extent, lease)
    assert second.cancel()
    with pytest.raises(SwapError) as caught:
        second.wait()
    assert caught.value.errno == errno.ECANCELED
    assert first.wait() == 64 * PAGE
    assert second.done()
    assert not first.cancel()
    with pytest.raises(SwapError):  # nobody knows which bytes are there
        read(space, extent, arena, 0, 64 * PAGE)
    write(space, extent, arena, b"3" * (64 * PAGE)).wait()
    assert read(space, extent, arena, 0, 64 * PAGE) == b"3" * (64 * PAGE)


# Failures


def test_a_piece_that_fails_is_raised_when_all_are_over(
    engine: str,
    open_space: OpenSpace,
    arena: Arena,
    paths: list[Path],
    rates: Callable[..., None],
    small_rows: None,
) -> None:
    rates(1, 1)
    space = open_space({"state": (8 * PAGE, paths[:2])}, Fault("write", first=9, error=errno.EIO, delay=0.01))
    extent = space.allocate(8 * PAGE, ("w",), "state")
    write(space, extent, arena, b"o" * (8 * PAGE)).wait()
    ticket = write(space, extent, arena, b"n" * (8 * PAGE))
    with pytest.raises(SwapError) as caught:
        ticket.wait()
    assert caught.value.errno == errno.EIO
    assert ticket.done()
    with pytest.raises(SwapError, match="EIO"):
        arena.drain()  # the lease that the write had is told, and free
    assert arena.used == 0
    with pytest.raises(SwapError, match="EIO"):
        read(space, extent, arena, 0, 8 * PAGE)
    write(space, extent, arena, b"N" * (8 * PAGE)).wait()
    assert read(space, extent, arena, 0, 8 * PAGE) == b"N" * (8 * PAGE)


@pytest.mark.parametrize("interrupt", [None, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["in", "out"])
def test_a_transfer_that_is_not_submitted_leaves_all_as_it_was(
    open_space: OpenSpace,
    arena: Arena,
    paths: list[Path],
    rates: Callable[..., None],
    small_rows: None,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    interrupt: type[BaseException] | None,
) -> None:
    rates(1, 1)
    space = open_space({"state": (8 * PAGE, paths[:2])}, Fault("write", first=9, count=8, error=errno.EIO))
    extent = space.allocate(8 * PAGE, ("w",), "state")
    write(space, extent, arena, b"o" * (8 * PAGE)).wait()

    lease = filled(arena, b"n" * (8 * PAGE))

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

        def aio_submit_vector(self, *_: object) -> int:
            if interrupt is not None:
                raise interrupt
            return -errno.ENOMEM

    def transfer() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(tickets, "lib", Refusing())
            with pytest.raises(interrupt or SwapError):
                (space.swap_in if kind == "in" else space.swap_out)(extent, lease)

    transfer()
    assert read(space, extent, arena, 0, 8 * PAGE) == b"o" * (8 * PAGE)
    with pytest.raises(SwapError, match="EIO"):
        space.swap_out(extent, lease).wait()
    if kind == "out":
        transfer()
    with pytest.raises(SwapError, match="EIO"):  # also after a write that was not submitted
        read(space, extent, arena, 0, 8 * PAGE)


# Bandwidth


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


def test_measuring_stays_within_the_span_and_its_bounds(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "MAX_BYTES", MIB)  # any disk gets there before the time is up
    with AioContext(engine=engine) as aio:
        spans = [3 * MIB + PAGE, 5 * PAGE]
        files = []
        for number, span in enumerate(spans):
            fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
            os.ftruncate(fd, span)
            files.append((aio.add_file(fd, direct=True, name=str(number)), span, fd))
        rates = bandwidth.measure(aio, [(file, span) for file, span, _ in files])
        assert all(rate > 0 for rate in rates)
        for (_, span, fd), stats in zip(files, aio.stats(), strict=True):
            assert os.fstat(fd).st_size == span
            assert 0 < stats.read.bytes < MIB + span, "more than the block that reaches beyond"
            assert 0 < stats.write.bytes < 2 * (MIB + span)
            assert stats.read.in_flight == stats.write.in_flight == 0
    for _, _, fd in files:
        os.close(fd)


@pytest.mark.parametrize("first", [1, 2, 30, 100])
def test_measuring_that_fails_has_nothing_in_flight_any_more(
    engine: str, tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are closed next: what is still under way would go to whatever gets their numbers."""
    monkeypatch.setattr(bandwidth, "SECONDS", 10.0)  # the failure ends it, however busy the machine is
    fault = FaultPlan((Fault("write", first=first, count=3, error=errno.EIO), Fault(count=0, delay=0.002)))
    with AioContext(engine=engine, block_size=64 << 10, fault=fault) as aio:
        fds = [os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600) for _ in range(2)]
        files = [(aio.add_file(fd, direct=True, name="x"), 4 * MIB) for fd in fds]
        with pytest.raises(SwapError, match="EIO"):
            bandwidth.measure(aio, files)
        assert [stats.write.in_flight for stats in aio.stats()] == [0, 0]
    for fd in fds:
        os.close(fd)


def test_python_submits_few_large_requests(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C divides them into blocks: so Python does not limit what a fast path reaches."""
    monkeypatch.setattr(bandwidth, "MAX_BYTES", 64 * MIB)
    monkeypatch.setattr(bandwidth, "SECONDS", 60.0)  # memory gets to these bytes before the time is up
    sizes: dict[str, list[int]] = {"read": [], "write": []}

    class Counted(AioContext):
        def prepare(self, kind: Any, file: int, buffer: Any, offset: int, nbytes: int, **options: Any) -> Any:
            sizes[kind].append(nbytes)
            return super().prepare(kind, file, buffer, offset, nbytes, **options)

    fd = os.memfd_create("path")
    with Counted(engine=engine) as aio:
        bandwidth.measure(aio, [(aio.add_file(fd, direct=False, name="x"), 64 * MIB)])
        (stats,) = aio.stats()
    os.close(fd)
    # They double, up to what may be in flight, and the last one may be cancelled.
    assert sizes["read"][:3] == [256 << 10] * 3 and 4 * MIB <= max(sizes["read"]) <= 32 * MIB
    assert stats.read.ops > 2 * len(sizes["read"]) and len(sizes["read"]) < 40
    assert 16 * MIB < stats.read.bytes <= sum(sizes["read"])


def test_with_checksums_little_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has room for the checksums of 64 MiB. All pages that are read are as they were written."""
    monkeypatch.setattr(bandwidth, "MAX_CHECKSUMMED_BYTES", MIB)
    with AioContext(verify=True) as aio:
        assert bandwidth.max_bytes(aio) == MIB
        spans, files = [8 * MIB, 8 * MIB, 5 * PAGE], []
        for span in spans:
            fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
            files.append((aio.add_file(fd, direct=True, name="x"), span, fd))
        bandwidth.measure(aio, [(file, span) for file, span, _ in files])
        assert all(os.fstat(fd).st_size <= MIB for _, _, fd in files)
    for _, _, fd in files:
        os.close(fd)


def test_new_extents_get_less_of_a_path_that_becomes_slow(
    open_space: OpenSpace,
    arena: Arena,
    paths: list[Path],
    rates: Callable[..., None],
    small_rows: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first 300 transfers of the second path begin 5 ms late."""
    monkeypatch.setattr(path_speeds, "INTERVAL_OPS", 32)
    rates(1, 1)
    space = open_space(
        {"state": (64 * PAGE, paths[:2]), "activations": (4000 * PAGE, paths[:2])},
        Fault(count=300, delay=0.005, file=1),
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
    assert fast + less == 100 and less < 40 and less <= 100 * slow.share
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


def test_absurd_ratios_are_cut_off() -> None:
    assert bandwidth.weights([6400, 3200, 101, 99, 0]) == [6400, 3200, 101, 100, 100]
    assert bandwidth.weights([0, 0]) == [1, 1]
    assert bandwidth.weights([]) == []
