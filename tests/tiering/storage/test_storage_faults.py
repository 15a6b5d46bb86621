"""Swap space when things go wrong: slow disks, forks and kills in the middle of writing, two jobs in one place."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiering.storage.spaces import OpenSpace
from tiering.errors import SwapError
from tiering.storage import swap_file
from tiering.storage.aio import AioContext, Fault
from tiering.storage.arena import PAGE, Arena
from tiering.storage.slab_file import SlabFile

MIB = 1 << 20


@pytest.fixture
def arena() -> Arena:
    return Arena.map(2 * MIB, "host")


def until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("seed", [1, 2])
def test_urged_reads_never_overtake_slow_writes(
    engine: str, open_state: OpenSpace, arena: Arena, seed: int
) -> None:
    """Every block is written late, and what it replaces is read at once with the highest priority."""
    rng = random.Random(seed)
    space = open_state(32 * PAGE, Fault("write", count=0, delay=0.003))
    extents = [space.allocate(8 * PAGE, (f"e{index}",), "state") for index in range(4)]
    model = [bytearray(8 * PAGE) for _ in extents]
    for turn in range(50):
        writes, reads = [], []
        for number in rng.sample(range(4), 4):
            start = rng.randrange(8) if turn else 0
            nbytes = rng.randint(1, 8 - start) * PAGE if turn else 8 * PAGE
            lease = arena.lease(nbytes, "out")
            lease.view[:] = rng.randbytes(32) * (nbytes // 32)
            model[number][start * PAGE : start * PAGE + nbytes] = lease.view
            writes.append((space.swap_out(extents[number], lease, offset=start * PAGE), lease))
        for number in rng.choices(range(4), k=6):
            start = rng.randrange(8)
            nbytes = rng.randint(1, 8 - start) * PAGE
            lease = arena.lease(nbytes, "in")
            expected = bytes(model[number][start * PAGE : start * PAGE + nbytes])
            reads.append(
                (space.swap_in(extents[number], lease, offset=start * PAGE, priority=2), lease, expected)
            )
        rng.shuffle(reads)
        for ticket, lease, expected in reads:
            assert ticket.wait() == lease.nbytes
            assert bytes(lease.view) == expected, turn
            lease.release()
        for ticket, lease in writes:
            assert ticket.wait() == lease.nbytes
            lease.release()


@pytest.mark.parametrize("verify", [False, True], ids=["", "verify"])
def test_a_write_that_was_cut_is_not_read_until_its_bytes_are_written_again(
    engine: str, open_state: OpenSpace, arena: Arena, verify: bool
) -> None:
    """Canceled in the middle: some of its pages are on the disk, and the others are those of before."""
    space = open_state(8 * PAGE, Fault("write", first=9, count=8, delay=0.05), queue_depth=1, verify=verify)
    extent = space.allocate(8 * PAGE, ("w",), "state")
    whole, page = arena.lease(8 * PAGE, "whole"), arena.lease(PAGE, "page")
    behind = arena.lease(8 * PAGE, "behind")
    whole.view[:] = b"o" * whole.nbytes
    space.swap_out(extent, whole).wait()
    whole.view[:] = b"n" * whole.nbytes
    write = space.swap_out(extent, whole)
    assert until(lambda: space.slabs[0].aio.stats()[space.slabs[0].file].write.ops > 8)
    read = space.swap_in(extent, behind, priority=2)
    assert write.cancel()
    for ticket in (write, read):
        with pytest.raises(SwapError, match="ECANCELED"):
            ticket.wait()
    assert 8 < space.slabs[0].aio.stats()[space.slabs[0].file].write.ops < 16
    whole.view[:] = b"x" * whole.nbytes  # its memory belongs to its owner again
    for first, last in ((0, 8), (0, 1), (3, 5), (7, 8)):
        with pytest.raises(SwapError, match="canceled by cancel"):
            space.swap_in(extent, whole, offset=first * PAGE, nbytes=(last - first) * PAGE)
    page.view[:] = b"p" * PAGE
    space.swap_out(extent, page, offset=2 * PAGE).wait()
    page.view[:] = bytes(PAGE)
    space.swap_in(extent, page, offset=2 * PAGE).wait()
    assert bytes(page.view) == b"p" * PAGE
    for first in (0, 3):
        with pytest.raises(SwapError, match="canceled by cancel"):
            space.swap_in(extent, page, offset=first * PAGE)
    whole.view[:] = b"r" * whole.nbytes
    space.swap_out(extent, whole).wait()
    space.swap_in(extent, behind).wait()
    assert bytes(behind.view) == b"r" * behind.nbytes


def test_a_file_truncated_underneath_is_named(
    engine: str, open_state: OpenSpace, arena: Arena, tmp_path: Path
) -> None:
    space = open_state(16 * PAGE)
    extents = [space.allocate(8 * PAGE, (name,), "state") for name in ("layers.0.w", "layers.1.w")]
    lease = arena.lease(8 * PAGE, "state")
    lease.view[:] = b"w" * lease.nbytes
    for extent in extents:
        space.swap_out(extent, lease).wait()
    os.ftruncate(space.slabs[0].fd, 11 * PAGE)
    assert space.swap_in(extents[0], lease).wait() == 8 * PAGE
    assert bytes(lease.view) == b"w" * lease.nbytes
    with pytest.raises(SwapError) as caught:
        space.swap_in(extents[1], lease).wait()
    error = caught.value
    assert (error.errno, error.names, error.filename) == (errno.ENODATA, ("layers.1.w",), str(tmp_path))
    assert 11 * PAGE <= error.offset < 16 * PAGE
    assert "truncated" in str(error)


# What runs in processes of its own. Each is given a directory and an engine.

BUSY = """
import os, sys, threading, time, warnings
from pathlib import Path
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import Arena
from tiering.storage.swap_space import Section, SwapSpace
warnings.simplefilter("ignore", DeprecationWarning)  # newer interpreters dislike a fork beside threads
directory, engine = Path(sys.argv[1]), sys.argv[2]

def open_space(nbytes, *faults):
    plan = FaultPlan(faults) if faults else None
    aio = AioContext(engine=engine, block_size=65536, fault=plan)
    return aio, SwapSpace({"state": Section(nbytes, (directory,))}, aio)

def until(condition):
    while not condition():
        time.sleep(0.001)
"""

KILLED = (
    BUSY
    + """
import multiprocessing
size, piece = int(sys.argv[3]), 4 << 20
arena = Arena.map(piece, "host")
lease = arena.lease(piece, "out")
aio, space = open_space(size)
aio.register(lease)
extent = space.allocate(size, ("w",), "state")

def write_on():
    while True:
        for ticket in [space.swap_out(extent, lease, offset=at) for at in range(0, size, piece)]:
            ticket.wait()

threading.Thread(target=write_on, daemon=True).start()
until(lambda: aio.stats()[0].write.bytes >= size and aio.stats()[0].write.in_flight > 0)
forked = os.fork()
if forked == 0:
    time.sleep(600)
    os._exit(0)
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
worker.start()
until(lambda: aio.stats()[0].write.in_flight > 0)
print(forked, worker.pid, flush=True)
time.sleep(600)
"""
)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_kill_9_in_mid_write_frees_the_space_while_workers_live(
    engine: str, small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_file, "PATIENCE_SECONDS", 10.0)
    size = 48 * MIB
    disk = small_disk(64 * MIB)
    before = os.statvfs(disk).f_bfree
    workers: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(disk), engine, str(size)], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            workers += map(int, holder.stdout.readline().split())
            assert len(workers) == 2
            assert os.statvfs(disk).f_bfree <= before - size // os.statvfs(disk).f_frsize
            holder.kill()
            assert holder.wait() == -signal.SIGKILL
            with AioContext(engine=engine) as aio:  # at once
                SlabFile(disk, size, aio).close()
            assert until(lambda: os.statvfs(disk).f_bfree == before, 15)
            assert [is_alive(worker) for worker in workers] == [True, True]
            assert [path.name for path in disk.iterdir()] == ["lost+found"]
        finally:
            holder.kill()
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
            assert until(lambda: not any(map(is_alive, workers)))


FORKED = (
    BUSY
    + """
import signal
arena = Arena.map(1 << 20, "host")
aio, space = open_space(1 << 20, Fault("write", count=0, delay=0.2))
inode = os.fstat(space.slabs[0].fd).st_ino
extent = space.allocate(1 << 20, ("w",), "state")
lease = arena.lease(1 << 20, "state")
lease.view[:] = bytes(range(256)) * 4096
aio.register(lease)
write = space.swap_out(extent, lease)
until(lambda: aio.stats()[0].write.in_flight > 0)

def is_swap(fd):
    try:
        return os.stat(f"/proc/self/fd/{fd}").st_ino == inode
    except OSError:  # the one that listed the directory
        return False

children = []
for way_out in (sys.exit, os._exit):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a hang ends here, and shows in the exit status
        descriptors = [fd for fd in os.listdir("/proc/self/fd") if is_swap(fd)]
        rings = [line for line in Path("/proc/self/maps").read_text().splitlines() if "io_uring" in line]
        way_out(1 if descriptors or rings else 0)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
moved = write.wait()
lease.view[:] = bytes(1 << 20)
space.swap_in(extent, lease).wait()
print(*codes, moved, bytes(lease.view) == bytes(range(256)) * 4096)
aio.close()
space.close()
"""
)


def test_children_forked_while_writing_hold_nothing_and_disturb_nobody(engine: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path), engine]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout.split()) == (0, ["0", "0", str(MIB), "True"]), ran.stdout + ran.stderr


NEIGHBOUR = (
    BUSY
    + """
import random
size, rank = 4 << 20, int(sys.argv[3])
arena = Arena.map(2 * size, "host")
out, back = arena.lease(size, "out"), arena.lease(size, "in")
aio, space = open_space(size)
extent = space.allocate(size, ("w",), "state")
print("ready", flush=True)
sys.stdin.readline()
wrong = 0
for turn in range(8):
    out.view[:] = random.Random(f"{rank}-{turn}").randbytes(size)
    space.swap_out(extent, out)
    space.swap_in(extent, back).wait()
    wrong += back.view != out.view
print("wrong", wrong)
aio.close()
space.close()
"""
)


def test_two_processes_in_one_directory_never_meet(engine: str, tmp_path: Path) -> None:
    def start(rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", NEIGHBOUR, str(tmp_path), engine, str(rank)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start(0) as first, start(1) as other:
        for process in (first, other):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        assert list(tmp_path.iterdir()) == []
        for process in (first, other):
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in (first, other):
            assert process.communicate(timeout=60)[0] == "wrong 0\n"
            assert process.returncode == 0
