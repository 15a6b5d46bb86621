"""Short transfers of every length around the edges of blocks and pages; errors in the middle of a request."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Literal

import pytest

from tiering.errors import SwapError
from tiering.storage.aio import Fault

PAGE, BLOCK = 4096, 8192
EDGES = [1, 511, 512, PAGE - 1, PAGE, PAGE + 1, BLOCK - 1, BLOCK, BLOCK + 1]
SECTORS = [512, PAGE - 512, PAGE, PAGE + 512, BLOCK - 512, BLOCK]  # a disk moves no part of a sector
LENGTHS = [0, *EDGES, 3 * BLOCK, 3 * BLOCK + PAGE + 513]
OFFSETS = {True: [0, PAGE, 3 * BLOCK], False: [0, 1, 511, PAGE - 1, PAGE, BLOCK + 1]}
Kind = Literal["read", "write"]


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("direct", "short"), [*((True, short) for short in SECTORS), *((False, short) for short in EDGES)]
)
def test_short_transfers_around_every_edge(
    open_context: Any, swap_file: Any, memory: Any, direct: bool, short: int
) -> None:
    """Two operations in three move at most ``short`` bytes; the file and the buffers hold what they should."""
    some = [
        Fault(kind, first=n, count=2, short=short) for kind in ("read", "write") for n in range(1, 2000, 3)
    ]
    context = open_context(*some, block_size=BLOCK, queue_depth=4)
    fd = swap_file(direct=direct)
    raw_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    file = context.add_file(fd, direct=direct, name="swap")
    retries = {"read": 0, "write": 0}
    try:
        for offset in OFFSETS[direct]:
            for nbytes in LENGTHS:
                end = offset + nbytes + (-nbytes % PAGE if direct else 0)
                os.pwrite(raw_fd, b"\xee" * (end + PAGE), 0)
                os.fsync(raw_fd)
                content = os.urandom(nbytes)
                assert context.write(file, memory(content), offset, nbytes).wait() == nbytes
                there = os.pread(raw_fd, end + PAGE, 0)
                assert there[offset : offset + nbytes] == content, (offset, nbytes)
                assert there[:offset] == b"\xee" * offset, (offset, nbytes)
                if short >= PAGE:  # the next test is about less
                    assert there[offset + nbytes : end] == bytes(end - offset - nbytes), (offset, nbytes)
                assert there[end:] == b"\xee" * PAGE, (offset, nbytes)
                back = memory(b"\x55" * (nbytes + 7))
                assert context.read(file, back, offset, nbytes).wait() == nbytes
                assert back.bytes() == content + b"\x55" * 7, (offset, nbytes)
                for kind in retries:
                    after = getattr(context.stats()[file], kind).retries
                    if nbytes >= 3 * BLOCK and short < BLOCK:  # of the whole blocks one at least was short
                        assert after > retries[kind], (offset, nbytes, kind)
                    retries[kind] = after
    finally:
        os.close(raw_fd)
    for kind in retries:
        stats = getattr(context.stats()[file], kind)
        assert stats.bytes == len(OFFSETS[direct]) * sum(LENGTHS)
        assert (stats.errors, stats.in_flight) == (0, 0)


@pytest.mark.parametrize("short", [512, PAGE - 512])
def test_padding_is_written_to_its_end(open_context: Any, swap_file: Any, memory: Any, short: int) -> None:
    """Else the rest of the block keeps what an earlier, longer write left there."""
    context = open_context(Fault("write", first=2, short=short))
    fd = swap_file()
    file = context.add_file(fd, direct=True, name="swap")
    context.write(file, memory(b"o" * PAGE), 0, PAGE).wait()
    assert context.write(file, memory(b"n" * 100), 0, 100).wait() == 100
    assert Path(f"/proc/self/fd/{fd}").read_bytes() == b"n" * 100 + bytes(PAGE - 100)


@pytest.mark.parametrize(("kind", "code"), [("read", errno.ENODATA), ("write", errno.EIO)])
@pytest.mark.parametrize("short", [512, PAGE - 512])
def test_a_direct_transfer_that_never_fills_a_page_ends(
    open_context: Any, swap_file: Any, memory: Any, failure: Any, kind: Kind, code: int, short: int
) -> None:
    context = open_context(Fault(kind, count=0, short=short))
    file = context.add_file(swap_file(PAGE), direct=True, name="swap")
    assert failure(getattr(context, kind)(file, memory(PAGE), 0, PAGE).wait)[0] == code
    stats = getattr(context.stats()[file], kind)
    assert (stats.errors, stats.in_flight, stats.bytes) == (1, 0, 0)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("code", [errno.ENXIO, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_an_error_in_the_middle_names_its_block(
    open_context: Any, swap_file: Any, memory: Any, code: int, direct: bool
) -> None:
    """One block after the other fails, also the padded tail; the offset is that block's, the rest is judged."""
    nbytes, start = 4 * BLOCK + 100, 2 * BLOCK
    remedy = {errno.ENXIO: "dmesg", errno.ENOSPC: "file system is full", errno.EDQUOT: "quota"}[code]
    # At depth 1 a request that fails at its nth block takes n operations: 1, and 2 more, and 3 more ...
    faults = [Fault(kind, first=n, error=code) for kind in ("read", "write") for n in (1, 3, 6, 10, 15)]
    context = open_context(*faults, block_size=BLOCK, queue_depth=1)
    file = context.add_file(swap_file(16 * BLOCK, direct=direct), direct=direct, name="/swap/rank3")
    for kind in ("read", "write"):
        for block in range(5):
            ticket = getattr(context, kind)(file, memory(nbytes), start, nbytes, names=("layers.2.w",))
            with pytest.raises(SwapError) as caught:
                ticket.wait()
            error = caught.value
            assert (error.errno, error.filename, error.names) == (code, "/swap/rank3", ("layers.2.w",))
            assert error.offset == start + block * BLOCK
            assert f"{kind} of 'layers.2.w'" in str(error)
            assert remedy in str(error)
        stats = getattr(context.stats()[file], kind)
        assert (stats.errors, stats.in_flight, stats.errors_by_errno) == (5, 0, {code: 5})
        assert stats.bytes == (0 + 1 + 2 + 3 + 4) * BLOCK


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN], ids=errno.errorcode.get)
@pytest.mark.parametrize("short", [0, PAGE, 512])
def test_interruptions_in_the_middle_are_passed_over(
    open_context: Any, swap_file: Any, memory: Any, kind: Kind, code: int, short: int
) -> None:
    faults = [Fault(kind, first=n, error=code) for n in (2, 3, 7)]
    rest = [Fault(kind, first=4, count=2, short=short)] if short else []
    context = open_context(*faults, *rest, block_size=BLOCK, queue_depth=2)
    fd = swap_file()
    file = context.add_file(fd, direct=True, name="swap")
    content = os.urandom(5 * BLOCK + 100)
    context.write(file, memory(content), PAGE, len(content)).wait()
    back = memory(len(content))
    context.read(file, back, PAGE, len(content)).wait()
    assert back.bytes() == content
    assert Path(f"/proc/self/fd/{fd}").read_bytes()[PAGE : PAGE + len(content)] == content
    stats = getattr(context.stats()[file], kind)
    assert (stats.errors, stats.bytes) == (0, len(content))
    assert 3 + bool(short) <= stats.retries <= 3 + 2 * bool(short)  # a tail of one page is not made short


def test_a_failed_request_is_over_only_when_its_last_block_is(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    """The blocks in flight beside the one that failed borrow the caller's memory: it must not be told yet."""
    context = open_context(
        Fault("write", first=2, error=errno.EIO), Fault("write", delay=0.15), block_size=BLOCK, queue_depth=4
    )
    fd = swap_file()
    file = context.add_file(fd, direct=True, name="swap")
    buffer = memory(b"1" * BLOCK + b"2" * BLOCK)
    assert failure(context.write(file, buffer, 0, 2 * BLOCK).wait)[0] == errno.EIO
    buffer.fill(b"x" * (2 * BLOCK))  # as a caller may, once it was told
    assert context.stats()[file].write.in_flight == 0
    assert Path(f"/proc/self/fd/{fd}").read_bytes() == b"1" * BLOCK
