"""What goes wrong is continued where it can be and told where it cannot: never silence."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from tiering.errors import SwapError
from tiering.storage.aio import Fault

PAGE, BLOCK = 4096, 65536
Kind = Literal["read", "write", "flush"]


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("block", [1, 3, 4])
def test_an_error_in_any_block_fails_the_request(
    open_context: Any, swap_file: Any, memory: Any, failure: Any, kind: Kind, block: int
) -> None:
    bad = errno.ENXIO
    context = open_context(Fault(kind, first=block, error=bad))
    file = context.add_file(swap_file(4 * BLOCK), direct=True, name="/swap/rank0")
    transfer = getattr(context, kind)
    ticket = transfer(file, memory(4 * BLOCK), 0, 4 * BLOCK, names=("layers.7.up.weight", "exp_avg"))
    code, message = failure(ticket.wait)
    assert code == bad
    where = f" at byte {(block - 1) * BLOCK} of the file" if block > 1 else ""
    assert message == (
        f"[TIER-IO] {kind} of 'layers.7.up.weight', 'exp_avg' (262144 bytes) at offset 0 GiB of /swap/rank0 "
        f"failed: ENXIO (No such device or address){where}; see dmesg"
    )
    stats = getattr(context.stats()[file], kind)
    assert (stats.errors, stats.in_flight) == (1, 0)
    assert transfer(file, memory(4 * BLOCK), 0, 4 * BLOCK).wait() == 4 * BLOCK  # and the next one is not hurt


def test_an_error_says_where(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(Fault("write", error=errno.EIO))
    file = context.add_file(swap_file(), direct=True, name="/swap/rank0")
    ticket = context.write(file, memory(4096), 3 << 29, 4096, names=("w",))
    with pytest.raises(SwapError) as caught:
        ticket.wait()
    error = caught.value
    assert (error.errno, error.filename, error.offset, error.names) == (
        errno.EIO,
        "/swap/rank0",
        3 << 29,
        ("w",),
    )
    assert "at offset 1.5 GiB" in error.args[0]
    assert error.args[0].endswith("the disk returned an I/O error: see dmesg and the drive's SMART log")
    assert isinstance(error, OSError)


def test_a_request_that_failed_issues_no_more_blocks(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    context = open_context(Fault("write", first=2, error=errno.ENOSPC), queue_depth=1)
    fd = swap_file()
    file = context.add_file(fd, direct=True, name="swap")
    code, message = failure(context.write(file, memory(b"x" * (8 * BLOCK)), 0, 8 * BLOCK).wait)
    assert code == errno.ENOSPC
    assert "file system is full" in message
    assert os.fstat(fd).st_size == BLOCK


def test_flush_reports_its_error(open_context: Any, swap_file: Any, failure: Any) -> None:
    context = open_context(Fault("flush", error=errno.EIO))
    file = context.add_file(swap_file(), direct=True, name="swap")
    code, message = failure(context.flush(file).wait)
    assert code == errno.EIO
    assert "flush of swap failed" in message
    assert context.flush(file).wait() == 0


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("short", [4096, 20480, 61440])
def test_short_transfers_are_continued(
    open_context: Any, swap_file: Any, memory: Any, kind: Kind, short: int
) -> None:
    context = open_context(Fault(kind, count=0, short=short))
    fd = swap_file()
    file = context.add_file(fd, direct=True, name="swap")
    nbytes = 4 * BLOCK + 100
    content = os.urandom(nbytes)
    assert context.write(file, memory(content), 0, nbytes).wait() == nbytes
    back = memory(nbytes)
    assert context.read(file, back, 0, nbytes).wait() == nbytes
    assert back.bytes() == content
    stats = getattr(context.stats()[file], kind)
    pieces = -(-BLOCK // short)
    assert (stats.bytes, stats.ops, stats.errors) == (nbytes, 5, 0)
    assert stats.retries == 4 * (pieces - 1)  # the padded tail is one page: never short here


@pytest.mark.parametrize("kind", ["read", "write"])
def test_short_transfers_of_odd_lengths_on_a_buffered_file(
    open_context: Any, swap_file: Any, memory: Any, kind: Kind
) -> None:
    context = open_context(Fault(kind, count=0, short=1001))
    file = context.add_file(swap_file(direct=False), direct=False, name="swap")
    content = os.urandom(BLOCK + 77)
    context.write(file, memory(content), 13, len(content)).wait()
    back = memory(len(content))
    context.read(file, back, 13, len(content)).wait()
    assert back.bytes() == content
    assert getattr(context.stats()[file], kind).retries == BLOCK // 1001


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_short_transfer_within_a_page_is_begun_again_at_the_page(
    open_context: Any, swap_file: Any, memory: Any, kind: Kind
) -> None:
    """512-byte sectors let the kernel stop there on a direct file; going on from there would be unaligned."""
    context = open_context(Fault(kind, count=2, short=512), Fault(kind, first=3, count=0, short=4096 + 512))
    file = context.add_file(swap_file(), direct=True, name="swap")
    content = os.urandom(BLOCK)
    context.write(file, memory(content), 0, BLOCK).wait()
    back = memory(BLOCK)
    context.read(file, back, 0, BLOCK).wait()
    assert back.bytes() == content
    # Two that get nowhere, then a page each time; going on from the sector would need one continuation less.
    assert getattr(context.stats()[file], kind).retries == 2 + BLOCK // 4096 - 1


@pytest.mark.parametrize("kind", ["read", "write", "flush"])
@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_interrupted_operations_are_submitted_again(
    open_context: Any, swap_file: Any, memory: Any, kind: Kind, code: int
) -> None:
    context = open_context(Fault(kind, count=5, error=code))
    file = context.add_file(swap_file(), direct=True, name="swap")
    context.write(file, memory(b"y" * 4096), 0, 4096).wait()
    back = memory(4096)
    context.read(file, back, 0, 4096).wait()
    context.flush(file).wait()
    assert back.bytes() == b"y" * 4096
    assert getattr(context.stats()[file], kind).retries == 5


MAY_PASS = [errno.EIO, errno.ETIMEDOUT, errno.ENOLINK]


@pytest.mark.one_of(4)
@pytest.mark.parametrize("code", MAY_PASS)
def test_a_read_that_fails_is_tried_twice_again(
    open_context: Any,
    swap_file: Any,
    memory: Any,
    failure: Any,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    """The second block fails in two of its three attempts, and then the third block in all of them."""
    context = open_context(
        *(Fault("read", first=first, count=count, error=code) for first, count in ((2, 2), (7, 3))),
        queue_depth=1,
    )
    file = context.add_file(swap_file(), direct=True, name="/swap/rank0")
    content = os.urandom(4 * BLOCK)
    context.write(file, memory(content), 0, 4 * BLOCK).wait()
    back = memory(4 * BLOCK)
    with caplog.at_level("INFO", "tiering.storage.tickets"):
        assert context.read(file, back, 0, 4 * BLOCK, names=("w",)).wait() == 4 * BLOCK
    assert back.bytes() == content
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "the read of 'w' (262144 bytes) at offset 0 GiB of /swap/rank0 had to"
    )
    assert errno.errorcode[code] in record.getMessage()
    read = context.stats()[file].read
    assert (read.rereads, read.retries, read.errors, read.ops) == (2, 2, 0, 4)
    caplog.clear()
    assert failure(context.read(file, back, 2 * BLOCK, 2 * BLOCK).wait)[0] == code
    assert caplog.records == []  # the error says it
    read = context.stats()[file].read
    assert (read.rereads, read.errors, read.ops) == (4, 1, 4)
    assert read.errors_by_errno == {code: 1}


def test_a_canceled_read_is_not_tried_again(open_context: Any, swap_file: Any, memory: Any) -> None:
    """A drive that hangs at the next attempt would keep its memory."""
    failing, hanging = Fault("read", error=errno.EIO), Fault("read", first=2, count=0, delay=30.0)
    context = open_context(failing, hanging, queue_depth=1, block_size=PAGE)
    file = context.add_file(swap_file(2 * PAGE), direct=True, name="swap")
    read = context.read(file, memory(2 * PAGE), 0, 2 * PAGE)
    while not context.stats()[file].read.rereads:
        pass
    assert read.cancel()
    with pytest.raises(SwapError, match="canceled by cancel"):
        read.wait(10)
    stats = context.stats()[file].read
    assert (stats.rereads, stats.ops, stats.errors, stats.in_flight) == (1, 0, 0, 0)


@pytest.mark.parametrize("kind", ["write", "flush"])
@pytest.mark.parametrize("code", MAY_PASS)
def test_what_changes_the_disk_is_not_tried_again(
    open_context: Any, swap_file: Any, memory: Any, failure: Any, kind: Kind, code: int
) -> None:
    context = open_context(Fault(kind, error=code))
    file = context.add_file(swap_file(), direct=True, name="swap")
    ticket = context.flush(file) if kind == "flush" else context.write(file, memory(4096), 0, 4096)
    assert failure(ticket.wait)[0] == code
    counted = getattr(context.stats()[file], kind)
    assert (counted.errors, counted.retries, counted.rereads) == (1, 0, 0)


@pytest.mark.slow  # it is patient for some ten seconds
def test_but_not_for_ever(open_context: Any, swap_file: Any, memory: Any, failure: Any) -> None:
    context = open_context(Fault("read", count=0, error=errno.EAGAIN))
    file = context.add_file(swap_file(BLOCK), direct=True, name="swap")
    assert failure(context.read(file, memory(4096), 0, 4096).wait)[0] == errno.EAGAIN


FILE_LIMIT = """
import os, resource, signal, sys
from types import SimpleNamespace
import ctypes, mmap
from tiering.storage.aio import AioContext
from tiering.errors import SwapError
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; by default it kills
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
memory = mmap.mmap(-1, 8 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
fd = os.open(sys.argv[1], os.O_RDWR | os.O_TMPFILE | os.O_DIRECT)
with AioContext(engine=sys.argv[2]) as context:
    file = context.add_file(fd, direct=True, name="limited")
    buffer = SimpleNamespace(address=address, nbytes=8 << 20)
    try:
        context.write(file, buffer, 0, 8 << 20, names=("w",)).wait()
    except SwapError as error:
        print(error.errno, "ulimit -f" in error.args[0], os.fstat(fd).st_size)
"""


def test_a_file_size_limit_is_an_error_not_a_signal(engine: str, swap_file: Any, tmp_path: Path) -> None:
    swap_file()  # skips where there are no such files
    command = [sys.executable, "-c", FILE_LIMIT, str(tmp_path), engine]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout.split()) == (0, [str(errno.EFBIG), "True", str(2 << 20)]), ran.stderr


def test_a_stand_in_takes_time_and_moves_nothing(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(Fault(count=0, rate=8 << 20, moves_none=True, file=0))
    stand_in = context.add_file(swap_file(), direct=True, name="stand-in")
    other = context.add_file(swap_file(16 * BLOCK), direct=True, name="other")
    ours, began = memory(b"x" * (16 * BLOCK)), time.monotonic()
    assert context.write(stand_in, ours, 0, 16 * BLOCK).wait() == 16 * BLOCK  # 1 MiB at 8 MiB/s
    assert time.monotonic() - began >= 0.125
    assert context.read(other, ours, 0, 16 * BLOCK).wait() == 16 * BLOCK
    assert ours.bytes() == bytes(16 * BLOCK)
    assert context.read(stand_in, ours, 0, 16 * BLOCK).wait() == 16 * BLOCK  # of a file of no bytes
    assert context.stats()[stand_in].read.ops == context.stats()[stand_in].write.ops == 16
