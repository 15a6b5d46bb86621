"""The driver's loop: what it takes first, what it remembers of a block under way, and when it sleeps.

Order is made visible by what a file holds in the end: of several writers of one page the last one wins.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from tiering.errors import SwapError
from tiering.storage.aio import Fault

PAGE, BLOCK = 4096, 65536
ENOUGH = 10  # seconds; only what hangs takes as long


def content_of(fd: int) -> bytes:
    return Path(f"/proc/self/fd/{fd}").read_bytes()


def wait_all(context: Any, file: int, tickets: list[Any]) -> None:
    """Wait for what must not hang. If it does, other work keeps the driver turning, so that close ends."""
    try:
        for ticket in tickets:
            assert ticket.wait(ENOUGH) == ticket.nbytes
    except TimeoutError:
        for ticket in tickets:
            while not ticket.done():
                context.flush(file).wait(ENOUGH)
        raise


@pytest.mark.parametrize("kind", ["read", "write"])
def test_progress_makes_up_for_stalls(
    open_context: Any, swap_file: Any, memory: Any, kind: Literal["read", "write"]
) -> None:
    """Every other operation on one long block moves less than a page: hopeless only if none moved more."""
    pages = 150
    stalls = [Fault(kind, first=1 + 2 * i, short=512) for i in range(pages)]
    context = open_context(*stalls, Fault(kind, count=0, short=PAGE), block_size=1 << 20)
    fd = swap_file()
    file = context.add_file(fd, direct=True, name="swap")
    content = os.urandom(pages * PAGE)
    context.write(file, memory(content), 0, len(content)).wait()
    back = memory(len(content))
    context.read(file, back, 0, len(content)).wait()
    assert back.bytes() == content_of(fd) == content
    stats = getattr(context.stats()[file], kind)
    assert (stats.ops, stats.errors, stats.retries) == (1, 0, 2 * pages - 1)


def test_the_first_error_is_the_one_reported(open_context: Any, swap_file: Any, memory: Any) -> None:
    """Of two blocks that fail: first in time, whichever comes first in the file."""
    late = 0.25
    context = open_context(
        Fault("write", first=1, file=0, error=errno.EIO),
        Fault("write", first=2, file=0, error=errno.ENOSPC, delay=late),
        Fault("write", first=1, file=1, error=errno.ENOSPC, delay=late),
        Fault("write", first=2, file=1, error=errno.EIO),
        queue_depth=2,
    )
    files = [context.add_file(swap_file(), direct=True, name=str(i)) for i in range(2)]
    tickets = [context.write(file, memory(2 * BLOCK), PAGE, 2 * BLOCK) for file in files]
    for file, offset in zip(files, [PAGE, PAGE + BLOCK], strict=True):
        with pytest.raises(SwapError) as caught:
            tickets[file].wait()
        assert (caught.value.errno, caught.value.offset) == (errno.EIO, offset)
        counted = context.stats()[file].write.errors_by_errno
        assert counted == {errno.EIO: 1, errno.ENOSPC: 1}  # both are known to have happened


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
def test_files_share_the_workers(open_context: Any, swap_file: Any, memory: Any) -> None:
    """Of 64 workers every one of two files gets a half, as deep as its queue may be."""
    context = open_context(Fault("write", file=0, count=0, delay=0.3), queue_depth=512)
    slow, fast = [context.add_file(swap_file(), direct=True, name=str(i)) for i in range(2)]
    page = memory(PAGE)
    tickets = [context.write(slow, page, i * PAGE, PAGE) for i in range(200)]
    assert context.write(fast, page, 0, PAGE).wait() == PAGE  # so the driver has seen all of the others
    assert context.stats()[slow].write.in_flight == 32
    assert not all(ticket.done() for ticket in tickets)
    context.close()  # takes back what was not begun


@pytest.mark.parametrize("engine", ["libaio"], indirect=True)
def test_libaio_has_workers_for_buffered_files(open_context: Any, swap_file: Any, memory: Any) -> None:
    """They share the workers; a direct file keeps the whole depth of its queue."""
    context = open_context(Fault("write", count=0, delay=0.3), queue_depth=64)
    assert "workers" not in context.info.flags
    direct = context.add_file(swap_file(), direct=True, name="direct")
    buffered = [context.add_file(swap_file(direct=False), direct=False, name=str(i)) for i in range(2)]
    page = memory(b"p" * PAGE)
    writes = [context.write(file, page, i * PAGE, PAGE) for file in (direct, *buffered) for i in range(64)]
    # The driver has begun all that it may begin when it does this one.
    last = context.add_file(swap_file(PAGE), direct=True, name="last")
    assert context.read(last, memory(PAGE), 0, PAGE).wait() == PAGE
    assert [file.write.in_flight for file in context.stats()] == [64, 32, 32, 0]
    assert [write.wait() for write in writes] == [PAGE] * 3 * 64
    back = memory(64 * PAGE)
    assert context.read(buffered[1], back, 0, back.nbytes).wait() == back.nbytes
    assert back.bytes() == b"p" * back.nbytes
    assert context.flush(buffered[0]).wait() == 0
    assert "workers" in context.info.flags


@pytest.mark.parametrize("engine", ["threads", "libaio"], indirect=True)
def test_a_path_that_hangs_leaves_workers_to_the_others(
    open_context: Any, swap_file: Any, memory: Any, small_disk: Callable[[int], Path]
) -> None:
    """For real: a frozen file system blocks whoever writes there. libaio alone would block in the driver."""
    freeze, thaw = 0xC0045877, 0xC0045878
    where = os.open(small_disk(16 << 20), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    hung_fd = os.open(f"/proc/self/fd/{where}", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    context = open_context(queue_depth=512)
    hung = context.add_file(hung_fd, direct=False, name="hung")
    other = context.add_file(swap_file(), direct=True, name="other")
    page = memory(PAGE)
    fcntl.ioctl(where, freeze, 0)
    try:
        stuck = [context.write(hung, page, i * PAGE, PAGE) for i in range(100)]
        for i in range(200):
            assert context.write(other, page, i * PAGE, PAGE).wait(ENOUGH) == PAGE
        assert not any(ticket.done() for ticket in stuck)
    finally:
        fcntl.ioctl(where, thaw, 0)
        context.close()
        os.close(hung_fd)
        os.close(where)
    assert stuck[0].wait() == PAGE


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_sums_that_wait_for_their_turn_are_made(
    open_context: Any, swap_file: Any, memory: Any, direct: bool
) -> None:
    """Sixteen blocks land together, and no completion is left to wake the driver: the workers must."""
    context = open_context(verify=True, block_size=PAGE, queue_depth=16)
    file = context.add_file(swap_file(direct=direct), direct=direct, name="swap")
    content = os.urandom(16 * PAGE)
    buffer = memory(content)
    for _ in range(60):
        wait_all(context, file, [context.write(file, buffer, 0, len(content))])
        back = memory(len(content))
        wait_all(context, file, [context.read(file, back, 0, len(content))])
        assert back.bytes() == content


def test_blocks_that_wait_for_their_sum_go_on(open_context: Any, swap_file: Any, memory: Any) -> None:
    """The first two of sixteen writes to a page are late; the others must not stand behind them."""
    context = open_context(
        Fault("write", file=0, count=2, delay=0.3), Fault("write", file=1, delay=0.1), verify=True
    )
    fd = swap_file()
    file = context.add_file(fd, direct=True, name="swap")
    gate_file = context.add_file(swap_file(), direct=True, name="gate")
    # The same page by another number: workers may sum blocks in another order than that of their requests.
    again = context.add_file(fd, direct=True, name="swap")
    gate = context.write(gate_file, memory(PAGE), 0, PAGE)
    writes = [context.write(file, memory(b"s" * PAGE), 0, PAGE, after=[gate]) for _ in range(2)]
    writes += [context.write(again, memory(b"f" * PAGE), 0, PAGE, after=[gate]) for _ in range(14)]
    wait_all(context, file, writes)
    assert content_of(fd) == b"s" * PAGE


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "short"])
def test_what_a_page_held_before_is_not_summed(
    open_context: Any, swap_file: Any, memory: Any, cut: bool
) -> None:
    """A read that ends in the padding leaves the rest of the engine's page as an earlier one filled it."""
    context = open_context(Fault("read", first=2, short=512), verify=True, queue_depth=1)
    fd = swap_file(direct=not cut)  # buffered, a read ends with the file to the byte
    file = context.add_file(fd, direct=True, name="swap")
    content = os.urandom(100)
    context.write(file, memory(content), 0, 100).wait()
    context.write(file, memory(b"\xff" * 4000), PAGE, 4000).wait()
    context.read(file, memory(4000), PAGE, 4000).wait()
    if cut:
        os.ftruncate(fd, 100)
    back = memory(100)
    assert context.read(file, back, 0, 100).wait() == 100
    assert back.bytes() == content


def test_pages_written_in_part_are_forgotten(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(verify=True)
    file = context.add_file(swap_file(direct=False), direct=False, name="swap")
    expected = bytearray(os.urandom(BLOCK + 2 * PAGE))
    back = memory(len(expected))
    context.write(file, memory(bytes(expected)), 0, len(expected)).wait()
    for start, end in [
        (100, PAGE + 50),
        (0, PAGE + 50),
        (100, 2 * PAGE),
        (PAGE - 1, PAGE),
        (PAGE, PAGE + 1),
        (7, 8),
        (BLOCK - 1, BLOCK + 1),
        (PAGE - 3, PAGE - 3 + BLOCK + 9),  # the second block begins in the middle of a page
    ]:
        expected[start:end] = os.urandom(end - start)
        context.write(file, memory(bytes(expected[start:end])), start, end - start).wait()
        assert context.read(file, back, 0, len(expected)).wait() == len(expected), (start, end)
        assert back.bytes() == expected
        context.write(file, back, 0, len(expected)).wait()  # known again


def test_urgency_reaches_the_beginning_of_a_chain(open_context: Any, swap_file: Any, memory: Any) -> None:
    """read <- second <- first: both writes overtake what was queued before them, queued or not yet."""
    context = open_context(Fault("write", delay=0.3), queue_depth=1)
    fd = swap_file(3 * PAGE)
    file = context.add_file(fd, direct=True, name="swap")
    blocker = context.write(file, memory(PAGE), 2 * PAGE, PAGE)
    patient = [context.write(file, memory(b"p" * 2 * PAGE), 0, 2 * PAGE) for _ in range(8)]
    first = context.write(file, memory(b"1" * PAGE), 0, PAGE)
    second = context.write(file, memory(b"2" * PAGE), PAGE, PAGE, after=[first])
    back = memory(2 * PAGE)
    read = context.read(file, back, 0, 2 * PAGE, priority=2, after=[second])
    assert not blocker.done()
    for ticket in [read, second, first, *patient, blocker]:
        assert ticket.wait(ENOUGH) == ticket.nbytes
    assert back.bytes() == b"1" * PAGE + b"2" * PAGE
    assert content_of(fd)[: 2 * PAGE] == b"p" * 2 * PAGE


def test_reads_and_writes_take_turns(open_context: Any, swap_file: Any, memory: Any) -> None:
    """At depth 1 half as long a request of the other kind gets to the second half of the file first."""
    half, whole = 8 * PAGE, 16 * PAGE
    context = open_context(Fault("flush", delay=0.1), queue_depth=1, block_size=PAGE)
    fds = [swap_file(whole) for _ in range(3)]
    written, read, gate_file = [context.add_file(fd, direct=True, name=str(fd)) for fd in fds]
    for file in (written, read):
        context.write(file, memory(b"o" * whole), 0, whole).wait()
    gate = context.flush(gate_file)
    behind, ahead = memory(half), memory(whole)
    tickets = [
        context.write(written, memory(b"n" * whole), 0, whole, after=[gate]),
        context.read(written, behind, half, half, after=[gate]),
        context.read(read, ahead, 0, whole, after=[gate]),
        context.write(read, memory(b"n" * half), half, half, after=[gate]),
    ]
    for ticket in tickets:
        assert ticket.wait(ENOUGH) == ticket.nbytes
    assert behind.bytes() == b"o" * half  # the long write had not come so far
    assert ahead.bytes() == b"o" * half + b"n" * half  # nor had the long read


def test_an_idle_context_sleeps(open_context: Any, swap_file: Any, memory: Any) -> None:
    """Also after it was woken: a wake-up that is not taken back would go on waking."""
    context = open_context()
    file = context.add_file(swap_file(), direct=True, name="swap")
    for _ in range(3):
        time.sleep(0.02)  # asleep by now
        context.write(file, memory(PAGE), 0, PAGE).wait()
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


BUSY = """
import ctypes, errno, os, struct, sys, time
from child import Memory, libc, skip
from tiering.storage.aio import AioContext
from tiering.errors import SwapError

numbers = {"x86_64": 209, "aarch64": 2}
if os.uname().machine not in numbers:
    skip("the number of io_submit on this machine is not known to this test")
try:
    AioContext(engine="libaio").close()
except SwapError as error:
    skip(f"libaio cannot start here anyway: {error}")

# io_submit of two at once answers EAGAIN: a request together with the poll that wakes, never one alone.
load, jump_equal, answer, second_argument = 0x20, 0x15, 0x06, 24
lines = [
    (load, 0, 0, 0), (jump_equal, 0, 3, numbers[os.uname().machine]),
    (load, 0, 0, second_argument), (jump_equal, 0, 1, 2), (answer, 0, 0, 0x00050000 | errno.EAGAIN),
    (answer, 0, 0, 0x7FFF0000),
]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_void_p)]
loaded = Filter(len(lines), ctypes.addressof(program))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(loaded)):
    skip("the kernel takes no seccomp filter here")

context = AioContext(engine="libaio")
file = context.add_file(os.open(sys.argv[1], os.O_RDWR | os.O_TMPFILE | os.O_DIRECT), direct=True, name="swap")
for _ in range(5):
    time.sleep(0.02)  # the driver sleeps by now; what wakes it is used up, and goes along with the request
    try:
        context.write(file, Memory(4096), 0, 4096).wait(10)
    except TimeoutError as error:
        print(error, flush=True)
        os._exit(1)
context.close()
print(context.stats()[file].write.ops)
"""


def test_a_ring_that_is_busy_with_nothing_is_asked_again(
    run_child: Callable[..., str], tmp_path: Path
) -> None:
    """libaio may be short of memory while nothing of ours is under way, whose end could tell of some."""
    assert run_child(BUSY, tmp_path) == "5\n"
