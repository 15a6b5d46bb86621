"""Bytes go out and come back, whatever their number and place, and the counters say how many."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiering.storage.aio import ALIGNMENT, AioContext

BLOCK = 65536
LENGTHS = [1, 511, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 4096, 5 * BLOCK - 17, 0]


@pytest.mark.parametrize("offset", [0, ALIGNMENT, 7 * BLOCK + ALIGNMENT])
def test_direct_round_trip(open_context: Any, swap_file: Any, memory: Any, offset: int) -> None:
    context = open_context()
    fd = swap_file(16 * BLOCK)
    file = context.add_file(fd, direct=True, name="swap")
    for nbytes in LENGTHS:
        background = memory(b"\xee" * (16 * BLOCK))
        context.write(file, background, 0, 16 * BLOCK).wait()
        content = os.urandom(nbytes)
        assert context.write(file, memory(content), offset, nbytes).wait() == nbytes
        back = memory(b"\x55" * (nbytes + 10))
        assert context.read(file, back, offset, nbytes).wait() == nbytes
        assert back.bytes() == content + b"\x55" * 10  # the padding is dropped, not written behind the end

        everything = memory(16 * BLOCK)
        context.read(file, everything, 0, 16 * BLOCK).wait()
        padding = -nbytes % ALIGNMENT
        expected = b"\xee" * offset + content + b"\0" * padding
        assert everything.bytes() == expected.ljust(16 * BLOCK, b"\xee")


@pytest.mark.parametrize(("offset", "shift"), [(0, 1), (1, 0), (4095, 3), (BLOCK + 1, 9)])
def test_buffered_files_take_any_address_and_offset(
    open_context: Any, swap_file: Any, memory: Any, offset: int, shift: int
) -> None:
    context = open_context()
    fd = swap_file(direct=False)
    file = context.add_file(fd, direct=False, name="swap")
    for nbytes in LENGTHS:
        content = os.urandom(nbytes)
        assert context.write(file, memory(content, shift), offset, nbytes).wait() == nbytes
        back = memory(nbytes, shift)
        assert context.read(file, back, offset, nbytes).wait() == nbytes
        assert back.bytes() == content
        assert os.pread(fd, nbytes, offset) == content
    assert os.fstat(fd).st_size == offset + max(LENGTHS)  # no padding where none is needed


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("block", [256 << 10, 1 << 20])
def test_large_blocks_are_handed_over_by_twos(
    open_context: Any, swap_file: Any, memory: Any, block: int, registered: bool
) -> None:
    context = open_context(block_size=block, queue_depth=8, registered=registered)
    fd = swap_file(16 * block)
    file = context.add_file(fd, direct=True, name="swap")
    nbytes = 11 * block + 5000
    out, back = memory(os.urandom(nbytes)), memory(nbytes)
    assert context.register(out) == (out.nbytes if registered and context.engine == "io_uring" else 0)
    wrote = context.write(file, out, 0, nbytes)
    small = [context.write(file, memory(b"s" * 4096), 15 * block + at, 4096) for at in range(0, 40960, 4096)]
    read = context.read(file, back, 0, nbytes, after=[wrote, *small])
    assert read.wait() == nbytes
    assert back.bytes() == out.bytes()
    assert Path(f"/proc/self/fd/{fd}").read_bytes()[15 * block :][:40960] == b"s" * 40960


@pytest.mark.one_of(3)
def test_more_than_two_gibibytes_in_one_request(engine: str, swap_file: Any) -> None:
    """The kernel ends a transfer at 2 GiB - 4 KiB; a hole is read into pages mapped many times over."""
    window, nbytes = 64 << 20, (2 << 30) + (64 << 20) + 12345
    marker = os.urandom(12345)
    fd = swap_file(nbytes)
    buffered = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    os.pwrite(buffered, marker, nbytes - len(marker))
    os.fsync(buffered)
    os.close(buffered)

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    number = ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    prot_none, map_fixed, map_noreserve = 0, 0x10, 0x4000
    reserved = nbytes + window
    base = libc.mmap(None, reserved, prot_none, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_noreserve, -1, 0)
    pages = os.memfd_create("pages")
    os.ftruncate(pages, 2 * window)
    last = nbytes // window * window
    for at in range(0, last + window, window):
        where = window if at == last else 0  # the last window has pages of its own, for the marker
        mapped = libc.mmap(base + at, window, 3, mmap.MAP_SHARED | map_fixed, pages, where)
        assert mapped == base + at

    try:
        with AioContext(engine=engine, block_size=16 << 20) as context:
            file = context.add_file(fd, direct=True, name="sparse")
            buffer = SimpleNamespace(address=base, nbytes=nbytes)
            assert context.read(file, buffer, 0, nbytes).wait() == nbytes
            read = context.stats()[0].read
            assert (read.bytes, read.ops) == (nbytes, nbytes // (16 << 20) + 2)
        assert os.pread(pages, len(marker), window + nbytes - last - len(marker)) == marker
    finally:
        libc.munmap(base, reserved)
        os.close(pages)


def test_a_file_may_end_anywhere_behind_the_last_byte(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context()
    fd = swap_file()
    file = context.add_file(fd, direct=True, name="swap")
    content = os.urandom(2 * BLOCK)
    context.write(file, memory(content), 0, 2 * BLOCK).wait()
    os.ftruncate(fd, BLOCK + 5000)
    back = memory(2 * BLOCK)
    for nbytes in (BLOCK + 4096, BLOCK + 4097, BLOCK + 5000):
        assert context.read(file, back, 0, nbytes).wait() == nbytes
        assert back.bytes()[:nbytes] == content[:nbytes]


@pytest.mark.parametrize("beyond", [1, 3000, 4096, 60000])
def test_a_read_behind_the_end_is_an_error(
    open_context: Any, swap_file: Any, memory: Any, failure: Any, beyond: int
) -> None:
    context = open_context()
    fd = swap_file(BLOCK + 5000)
    file = context.add_file(fd, direct=True, name="/swap/rank0")
    code, message = failure(context.read(file, memory(2 * BLOCK), 0, BLOCK + 5000 + beyond).wait)
    assert code == errno.ENODATA
    assert "ENODATA" in message
    assert "/swap/rank0" in message
    assert "truncated" in message
    assert 1 <= context.stats()[file].read.errors <= 2  # the last whole block, and the tail if there is one


def test_a_truncated_file_is_noticed(open_context: Any, swap_file: Any, memory: Any, failure: Any) -> None:
    context = open_context()
    fd = swap_file()
    file = context.add_file(fd, direct=True, name="swap")
    context.write(file, memory(b"x" * BLOCK), 0, BLOCK).wait()
    os.ftruncate(fd, 0)
    for nbytes in (1, 4096, BLOCK):
        assert failure(context.read(file, memory(BLOCK), 0, nbytes).wait)[0] == errno.ENODATA


@pytest.mark.parametrize(("offset", "shift"), [(512, 0), (0, 512), (1, 1)])
def test_unaligned_address_or_offset_on_a_direct_file(
    open_context: Any, swap_file: Any, memory: Any, failure: Any, offset: int, shift: int
) -> None:
    context = open_context()
    file = context.add_file(swap_file(BLOCK), direct=True, name="swap")
    for transfer in (context.read, context.write):
        buffer = memory(4096, shift)
        code, message = failure(lambda: transfer(file, buffer, offset, 4096))  # noqa: B023 (called at once)
        assert code == errno.EINVAL
        assert f"address ({buffer.address:#x}) and offset ({offset}) to be multiples of 4096" in message
    assert context.stats()[file].read.ops == context.stats()[file].write.ops == 0


def test_what_a_caller_gets_wrong(open_context: Any, swap_file: Any, memory: Any, failure: Any) -> None:
    context = open_context()
    file = context.add_file(swap_file(BLOCK), direct=True, name="swap")
    buffer = memory(4096)
    with pytest.raises(ValueError, match="buffer of 4096"):
        context.read(file, buffer, 0, 4097)
    with pytest.raises(ValueError, match="offset -4096"):
        context.read(file, buffer, -4096, 4096)
    with pytest.raises(ValueError, match="no such file"):
        context.read(file + 1, buffer, 0, 4096)
    with pytest.raises(ValueError, match="priority 3"):
        context.read(file, buffer, 0, 4096, priority=3)
    code, message = failure(lambda: context.add_file(987654, direct=True, name="closed"))
    assert code == errno.EBADF
    assert "'closed' (descriptor 987654)" in message


def test_counters_equal_the_bytes_moved(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context()
    first = context.add_file(swap_file(), direct=True, name="a")
    second = context.add_file(swap_file(direct=False), direct=False, name="b")
    context.write(first, memory(10 * BLOCK), 0, 10 * BLOCK).wait()
    context.read(first, memory(3 * BLOCK), BLOCK, 2 * BLOCK + 100).wait()
    context.write(second, memory(1000), 5, 1000).wait()
    context.flush(first).wait()
    a, b = context.stats()
    assert (a.name, a.direct, b.name, b.direct) == ("a", True, "b", False)
    assert (a.write.bytes, a.write.ops) == (10 * BLOCK, 10)
    assert (a.read.bytes, a.read.ops) == (2 * BLOCK + 100, 3)  # two blocks and a tail, padding not counted
    assert (a.flush.bytes, a.flush.ops) == (0, 1)
    assert (b.write.bytes, b.write.ops, b.read.ops, b.flush.ops) == (1000, 1, 0, 0)
    for stats in (a.read, a.write, a.flush, b.write):
        assert (stats.retries, stats.errors, stats.in_flight) == (0, 0, 0)
        assert sum(stats.latency) == stats.ops
        assert stats.busy_ns > 0
    assert b.read.busy_ns == 0


def test_unwritable_descriptor(open_context: Any, swap_file: Any, memory: Any, failure: Any) -> None:
    fd = os.open(f"/proc/self/fd/{swap_file(BLOCK)}", os.O_RDONLY | os.O_CLOEXEC)
    context = open_context()
    file = context.add_file(fd, direct=False, name="read-only")
    try:
        assert failure(context.write(file, memory(100), 0, 100).wait)[0] == errno.EBADF
        assert context.read(file, memory(100), 0, 100).wait() == 100
    finally:
        os.close(fd)
