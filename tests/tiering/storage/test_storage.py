"""Swap space on real files: reserved, nameless, given back; and no read ever returns bytes that a write replaced."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.tiering.storage import spaces
from tests.tiering.storage.spaces import OpenSpace, filled
from tiering.errors import SwapError, SwapSpaceError
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import PAGE, Arena, Lease
from tiering.storage.slab_file import SlabFile
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.swap_file import free_bytes
from tiering.storage.swap_space import SwapSpace
from tiering.storage.tickets import Ticket

MIB = 1 << 20
OpenSlab = Callable[..., SlabFile]


@pytest.fixture
def arena() -> Arena:
    return Arena.map(2 * MIB, "host")


@pytest.fixture
def open_slab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenSlab]:
    """Slabs under ``tmp_path``, each with an I/O context of its own in blocks of a page; closed at the end."""
    uses_engine = "engine" in request.fixturenames
    name = request.getfixturevalue("engine") if uses_engine else "threads"
    with ExitStack() as stack:

        def open_one(nbytes: int, *faults: Fault) -> SlabFile:
            plan = FaultPlan(faults) if faults else None
            aio = AioContext(engine=name, block_size=PAGE, fault=plan)
            try:
                slab = SlabFile(tmp_path, nbytes, aio)
            except BaseException:
                aio.close()
                raise
            stack.callback(slab.close)
            stack.enter_context(aio)
            return slab

        yield open_one


def read(
    space: SwapSpace, extent: StripedExtent, arena: Arena, offset: int = 0, nbytes: int | None = None
) -> bytes:
    return spaces.read(space, extent, arena, offset, extent.nbytes - offset if nbytes is None else nbytes)


def until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# Space


def test_it_has_no_name_and_is_private(open_state: OpenSpace, arena: Arena, tmp_path: Path) -> None:
    space = open_state(4 * PAGE)
    extent = space.allocate(PAGE, ("w",), "state")
    space.swap_out(extent, filled(arena, b"x" * PAGE)).wait()
    status = os.fstat(space.slabs[0].fd)
    assert (status.st_nlink, status.st_mode & 0o777) == (0, 0o600)
    assert os.get_inheritable(space.slabs[0].fd) is False
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nbytes", [1, PAGE, 5 * PAGE + 1, 3 * MIB])
def test_its_space_is_reserved_up_front(open_slab: OpenSlab, nbytes: int) -> None:
    slab = open_slab(nbytes)
    status = os.fstat(slab.fd)
    assert slab.capacity == status.st_size == -(-nbytes // PAGE) * PAGE
    assert status.st_blocks * 512 >= slab.capacity
    assert (slab.used, slab.direct) == (0, True)


def test_space_comes_back_when_it_is_closed(open_slab: OpenSlab, tmp_path: Path) -> None:
    size = 512 * MIB
    before = free_bytes(tmp_path)
    slab = open_slab(size)
    assert until(lambda: free_bytes(tmp_path) < before - size // 2)
    slab.aio.close()
    slab.close()
    assert until(lambda: free_bytes(tmp_path) > before - size // 2)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(slab.fd)
    slab.close()


HOLDER = """
import sys, time
from pathlib import Path
from tiering.storage.aio import AioContext
from tiering.storage.slab_file import SlabFile
slab = SlabFile(Path(sys.argv[1]), int(sys.argv[2]), AioContext(engine="threads"))
print("ready", flush=True)
time.sleep(60)
"""


def test_space_comes_back_after_kill_9(tmp_path: Path) -> None:
    size = 512 * MIB
    before = free_bytes(tmp_path)
    command = [sys.executable, "-c", HOLDER, str(tmp_path), str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            assert until(lambda: free_bytes(tmp_path) < before - size // 2)
        finally:
            holder.kill()
        assert holder.wait() == -signal.SIGKILL
    assert until(lambda: free_bytes(tmp_path) > before - size // 2)
    assert list(tmp_path.iterdir()) == []


def test_extents_are_exact_disjoint_and_reused(open_slab: OpenSlab) -> None:
    slab = open_slab(4 * PAGE)
    extents = [slab.allocate(nbytes, (name,)) for nbytes, name in ((1, "a"), (PAGE, "b"), (PAGE + 1, "c"))]
    assert [(extent.offset, extent.nbytes) for extent in extents] == [
        (0, PAGE),
        (PAGE, PAGE),
        (2 * PAGE, 2 * PAGE),
    ]
    assert slab.used == 4 * PAGE
    with pytest.raises(SwapSpaceError) as caught:
        slab.allocate(PAGE, ("d", "e", "f", "g", "h"))
    assert f"no extent of {PAGE} bytes left for d, e, f and 2 more" in str(caught.value)
    assert f"({4 * PAGE} of {4 * PAGE} bytes used); raise nvme_budget" in str(caught.value)
    slab.free(extents[1])
    assert slab.used == 3 * PAGE
    assert slab.allocate(PAGE, ("d",)).offset == PAGE


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_extent_has_at_least_a_byte(open_slab: OpenSlab, nbytes: int) -> None:
    slab = open_slab(4 * PAGE)
    with pytest.raises(ValueError, match=rf"at least one byte, not {nbytes} \(layers\.0\.w\)"):
        slab.allocate(nbytes, ("layers.0.w",))
    assert slab.used == 0


def test_two_swap_spaces_in_one_directory_never_meet(
    engine: str, open_state: OpenSpace, arena: Arena
) -> None:
    two = [open_state(8 * PAGE), open_state(8 * PAGE)]
    assert os.fstat(two[0].slabs[0].fd).st_ino != os.fstat(two[1].slabs[0].fd).st_ino
    extents = [space.allocate(8 * PAGE, ("w",), "state") for space in two]
    for content in (b"1", b"2"):
        for space, extent, letter in zip(two, extents, (b"a", b"b"), strict=True):
            out = filled(arena, (letter + content) * (4 * PAGE))
            space.swap_out(extent, out).wait()
            out.release()
    for space, extent, letter in zip(two, extents, (b"a", b"b"), strict=True):
        assert read(space, extent, arena) == (letter + b"2") * (4 * PAGE)


FORKED = """
import errno, os, sys
from pathlib import Path
from tiering.storage.aio import AioContext
from tiering.storage.arena import Arena
from tiering.errors import EngineStateError
from tiering.storage.swap_space import Section, SwapSpace
arena = Arena.map(1 << 16, "host")
with AioContext(engine="threads") as aio:
    space = SwapSpace({"state": Section(8192, (Path(sys.argv[1]),))}, aio)
    (slab,) = space.slabs
    fd, inode = slab.fd, os.fstat(slab.fd).st_ino
    extent = space.allocate(8192, ("w",), "state")
    lease = arena.lease(8192, "state")
    lease.view[:] = b"w" * 8192
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.fstat(fd)
        except OSError as error:
            code = 0 if error.errno == errno.EBADF and slab.fd == -1 else 2
        try:
            space.swap_in(extent, lease)
            code = 3
        except EngineStateError:
            pass
        space.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.fstat(fd).st_ino == inode
    space.swap_out(extent, lease).wait()
    back = arena.lease(8192, "state")
    space.swap_in(extent, back).wait()
    assert bytes(back.view) == b"w" * 8192
space.close()
print("done")
"""


def test_a_forked_child_closes_its_copy(tmp_path: Path) -> None:
    done = subprocess.run(
        # Newer interpreters dislike a fork beside threads, which is what is tested here.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# Transfers


def test_an_extent_lies_where_it_says(engine: str, open_state: OpenSpace, arena: Arena) -> None:
    space = open_state(6 * PAGE)
    extents = [space.allocate(2 * PAGE, (name,), "state") for name in "abc"]
    for extent in extents:
        out = filled(arena, extent.names[0].encode() * (2 * PAGE))
        space.swap_out(extent, out).wait()
    space.swap_out(extents[1], filled(arena, b"B" * PAGE), offset=PAGE).wait()
    assert [read(space, extent, arena) for extent in extents] == [
        b"a" * (2 * PAGE),
        b"b" * PAGE + b"B" * PAGE,
        b"c" * (2 * PAGE),
    ]


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [((0, 8), (0, 8)), ((0, 4), (2, 4)), ((2, 4), (0, 4)), ((1, 6), (3, 2)), ((3, 1), (0, 8))],
    ids=["same", "tail", "head", "inside", "around"],
)
def test_a_read_right_behind_a_slow_write_returns_the_new_bytes(
    engine: str, open_state: OpenSpace, arena: Arena, wrote: tuple[int, int], reads: tuple[int, int]
) -> None:
    # The first eight pages go at once.
    space = open_state(10 * PAGE, Fault("write", first=9, count=0, delay=0.02))
    extent = space.allocate(8 * PAGE, ("w",), "state")
    space.swap_out(extent, filled(arena, b"o" * (8 * PAGE))).wait()
    expected = bytearray(b"o" * (8 * PAGE))
    expected[wrote[0] * PAGE : sum(wrote) * PAGE] = b"n" * (wrote[1] * PAGE)
    space.swap_out(extent, filled(arena, b"n" * (wrote[1] * PAGE)), offset=wrote[0] * PAGE)
    start, end = reads[0] * PAGE, sum(reads) * PAGE
    assert read(space, extent, arena, start, end - start) == expected[start:end]


def test_a_write_right_behind_a_slow_read_waits(engine: str, open_state: OpenSpace, arena: Arena) -> None:
    space = open_state(4 * PAGE, Fault("read", count=4, delay=0.05))
    extent = space.allocate(4 * PAGE, ("w",), "state")
    space.swap_out(extent, filled(arena, b"o" * (4 * PAGE))).wait()
    lease = arena.lease(4 * PAGE, "in")
    early = space.swap_in(extent, lease)
    space.swap_out(extent, filled(arena, b"n" * (4 * PAGE))).wait()
    early.wait()
    assert bytes(lease.view) == b"o" * (4 * PAGE)
    assert read(space, extent, arena) == b"n" * (4 * PAGE)


def test_writes_of_the_same_bytes_end_in_order(engine: str, open_state: OpenSpace, arena: Arena) -> None:
    space = open_state(PAGE, *(Fault("write", first=n, delay=0.02) for n in (1, 3, 5)))
    extent = space.allocate(PAGE, ("w",), "state")
    for content in b"abcdef":
        space.swap_out(extent, filled(arena, bytes([content]) * PAGE))
    assert read(space, extent, arena) == b"f" * PAGE


def test_what_does_not_overlap_does_not_wait(engine: str, open_state: OpenSpace, arena: Arena) -> None:
    space = open_state(8 * PAGE, Fault("write", first=9, count=0, delay=1.0))
    extents = [space.allocate(4 * PAGE, (name,), "state") for name in "ab"]
    for extent in extents:
        space.swap_out(extent, filled(arena, b"o" * (4 * PAGE))).wait()
    write = space.swap_out(extents[0], filled(arena, b"n" * PAGE), offset=PAGE)
    assert read(space, extents[0], arena, 2 * PAGE) == b"o" * (2 * PAGE)
    assert read(space, extents[0], arena, 0, PAGE) == b"o" * PAGE
    assert read(space, extents[1], arena) == b"o" * (4 * PAGE)
    concurrent = not write.done()
    write.wait()
    if not concurrent:
        pytest.skip("this machine slept through the delay of a second: the reads prove nothing")


@pytest.mark.parametrize("seed", range(4))
def test_random_interleavings_read_what_was_written_last(
    engine: str, open_state: OpenSpace, arena: Arena, seed: int
) -> None:
    """In the order of the calls, whatever the order in which the disk gets to them."""
    rng = random.Random(seed)
    late = [Fault("write", first=n, delay=rng.uniform(0.0005, 0.004)) for n in rng.sample(range(1, 400), 32)]
    space = open_state(24 * PAGE, *late, Fault("write", count=0, delay=0.0002))
    extents = [space.allocate(8 * PAGE, (f"e{index}",), "state") for index in range(3)]
    model = [bytearray(8 * PAGE) for _ in extents]
    for extent, content in zip(extents, model, strict=True):
        space.swap_out(extent, filled(arena, bytes(content))).wait()
    pending: list[tuple[Ticket, Lease, bytes | None]] = []
    for _ in range(200):
        number, start = rng.randrange(3), rng.randrange(8)
        offset, nbytes = start * PAGE, rng.randint(1, 8 - start) * PAGE
        lease = arena.lease(nbytes, "transfer")
        if rng.random() < 0.5:
            lease.view[:] = rng.randbytes(16) * (nbytes // 16)
            model[number][offset : offset + nbytes] = lease.view
            ticket = space.swap_out(extents[number], lease, offset=offset, priority=rng.randrange(3))
            pending.append((ticket, lease, None))
        else:
            ticket = space.swap_in(extents[number], lease, offset=offset, priority=rng.randrange(3))
            pending.append((ticket, lease, bytes(model[number][offset : offset + nbytes])))
        while len(pending) > rng.randrange(24):
            settle(*pending.pop(rng.randrange(len(pending))))
    for transfer in pending:
        settle(*transfer)
    assert [read(space, extent, arena) for extent in extents] == model


def settle(ticket: Ticket, lease: Lease, expected: bytes | None) -> None:
    assert ticket.wait() == lease.nbytes
    if expected is not None:
        assert bytes(lease.view) == expected
    lease.release()


# Failures


def poisoned(space: SwapSpace, extent: StripedExtent, arena: Arena) -> list[int]:
    """The pages of ``extent`` that cannot be read; the others hold what ``content`` put there."""
    pages = []
    for page in range(extent.nbytes // PAGE):
        try:
            data = read(space, extent, arena, page * PAGE, PAGE)
        except SwapError:
            pages.append(page)
        else:
            assert data == content(page, page + 1)
    return pages


def content(first: int, last: int) -> bytes:
    return b"".join(bytes([97 + page]) * PAGE for page in range(first, last))


def broken(open_state: OpenSpace, arena: Arena) -> tuple[SwapSpace, StripedExtent, SwapError]:
    """An extent of six pages, a to f, whose pages 2 to 4 a failed write has made unreadable."""
    space = open_state(8 * PAGE, Fault("write", first=7, count=3, error=errno.EIO))
    extent = space.allocate(6 * PAGE, ("layers.1.w",), "state")
    space.swap_out(extent, filled(arena, content(0, 6))).wait()
    with pytest.raises(SwapError) as caught:
        space.swap_out(extent, filled(arena, content(2, 5)), offset=2 * PAGE).wait()
    assert (caught.value.errno, caught.value.names) == (errno.EIO, ("layers.1.w",))
    return space, extent, caught.value


def test_a_failed_write_poisons_its_range_and_no_other(
    engine: str, open_state: OpenSpace, arena: Arena
) -> None:
    space, extent, error = broken(open_state, arena)
    assert poisoned(space, extent, arena) == [2, 3, 4]
    lease = arena.lease(6 * PAGE, "in")
    for offset, nbytes in ((0, 6), (1, 2), (4, 2), (3, 1)):
        with pytest.raises(SwapError) as caught:
            space.swap_in(extent, lease, offset=offset * PAGE, nbytes=nbytes * PAGE)
        assert caught.value.message == (
            f"{error.message}; the bytes are lost: if they are parameters or optimizer state, load a checkpoint"
        )
    other = space.allocate(2 * PAGE, ("other",), "state")
    space.swap_out(other, filled(arena, content(0, 2))).wait()
    assert poisoned(space, other, arena) == []


@pytest.mark.parametrize(
    ("first", "last", "pages"),
    [
        (2, 5, []),
        (0, 6, []),
        (0, 3, [3, 4]),
        (3, 4, [2, 4]),
        (4, 6, [2, 3]),
        (0, 2, [2, 3, 4]),
        (5, 6, [2, 3, 4]),
    ],
)
def test_rewriting_heals_what_it_covers(
    engine: str, open_state: OpenSpace, arena: Arena, first: int, last: int, pages: list[int]
) -> None:
    space, extent, _ = broken(open_state, arena)
    assert poisoned(space, extent, arena) == [2, 3, 4]
    space.swap_out(extent, filled(arena, content(first, last)), offset=first * PAGE).wait()
    assert poisoned(space, extent, arena) == pages


def test_a_write_that_is_refused_heals_nothing(open_state: OpenSpace, arena: Arena) -> None:
    space, extent, _ = broken(open_state, arena)
    lease = arena.lease(5 * PAGE, "out")
    with pytest.raises(SwapError, match="to be multiples of 4096"):
        space.swap_out(extent, lease.part(512, 3 * PAGE), offset=2 * PAGE)
    assert poisoned(space, extent, arena) == [2, 3, 4]


def test_a_read_behind_a_write_that_fails_does_not_return_the_old_bytes(
    engine: str, open_state: OpenSpace, arena: Arena
) -> None:
    space = open_state(PAGE, Fault("write", first=2, error=errno.EIO, delay=0.05))
    extent = space.allocate(PAGE, ("w",), "state")
    space.swap_out(extent, filled(arena, b"o" * PAGE)).wait()
    write = space.swap_out(extent, filled(arena, b"n" * PAGE))
    lease = arena.lease(PAGE, "in")
    with pytest.raises(SwapError):
        space.swap_in(extent, lease).wait()
    assert bytes(lease.view) == bytes(PAGE)
    with pytest.raises(SwapError):
        write.wait()
    with pytest.raises(SwapError) as caught:
        space.swap_in(extent, lease)
    assert caught.value.errno == errno.EIO


def test_a_failed_write_nobody_asked_about_still_poisons(
    engine: str, open_state: OpenSpace, arena: Arena
) -> None:
    space = open_state(PAGE, Fault("write", error=errno.ENOSPC))
    extent = space.allocate(PAGE, ("w",), "state")
    space.swap_out(extent, filled(arena, b"n" * PAGE))
    assert until(lambda: extent.order.is_idle)
    with pytest.raises(SwapError) as caught:
        space.swap_in(extent, arena.lease(PAGE, "in"))
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("error", [0, errno.EIO], ids=["succeeds", "fails"])
def test_an_extent_is_free_only_after_its_transfers(
    engine: str, open_state: OpenSpace, arena: Arena, error: int
) -> None:
    space = open_state(4 * PAGE, Fault("write", first=1, count=4, delay=0.05, error=error))
    extent = space.allocate(4 * PAGE, ("old",), "state")
    write = space.swap_out(extent, filled(arena, b"o" * (4 * PAGE)))
    space.free(extent)
    assert write.done()
    assert space.used == 0
    again = space.allocate(4 * PAGE, ("new",), "state")
    space.swap_out(again, filled(arena, b"n" * (4 * PAGE))).wait()
    assert read(space, again, arena) == b"n" * (4 * PAGE)
