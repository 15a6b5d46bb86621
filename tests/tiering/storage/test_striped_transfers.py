"""Transfers over several directories: in the order of the calls, and their failures."""

from __future__ import annotations

import errno
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.tiering.storage.spaces import OpenSpace, filled, on_disk, read, write
from tiering._aio import lib
from tiering.errors import SwapError
from tiering.storage import tickets
from tiering.storage.aio import Fault
from tiering.storage.arena import PAGE, Arena, Lease
from tiering.storage.tickets import Ticket

MIB = 1 << 20


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
