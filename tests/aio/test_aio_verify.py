"""Checksums: a page that is not what was written is never handed out; and what they are is what everybody computes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optim_cpu import kernels
from tiering._aio import ffi, lib
from tiering.errors import SwapError
from tiering.storage.aio import Fault

PAGE, BLOCK = 4096, 65536


def crc32c(data: bytes) -> int:
    """As RFC 3720 has it, bit by bit through a table."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ TABLE[value & 255 ^ byte]
    return value ^ 0xFFFFFFFF


def table_entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


TABLE = [table_entry(byte) for byte in range(256)]

SUMS = """
import sys
from child import Memory
from tiering._aio import ffi, lib
pages, content = Memory(7 * 4096), bytes.fromhex(sys.argv[1]) * 896
pages.view[:] = content
for n in (1, 2, 3, 4, 7):
    sums = ffi.new("uint32_t[]", n)
    lib.aio_checksum(ffi.cast("void *", pages.address), n, sums)
    print(*sums)
"""


@pytest.mark.parametrize("code", ["", "portable"])
def test_the_checksum_is_crc32c(
    run_child: Callable[..., str], monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """By the processor's instruction and by the table, however many pages lie side by side."""
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C in every catalogue
    monkeypatch.setenv("TIERING_CRC32C", code)
    row = os.urandom(32)
    whole = row * 896
    expected = [crc32c(whole[at : at + PAGE]) for at in range(0, 7 * PAGE, PAGE)]
    lines = run_child(SUMS, row.hex()).splitlines()
    assert [[int(word) for word in line.split()] for line in lines] == [expected[:n] for n in (1, 2, 3, 4, 7)]


def test_pages_are_summed_apart() -> None:
    pages = os.urandom(5 * PAGE)
    sums = ffi.new("uint32_t[]", 5)
    lib.aio_checksum(ffi.from_buffer(pages), 5, sums)
    assert list(sums) == [crc32c(pages[at : at + PAGE]) for at in range(0, 5 * PAGE, PAGE)]


def flip(fd: int, at: int) -> None:
    """Change one bit of the file, past the context."""
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    (byte,) = os.pread(other, 1, at)
    os.pwrite(other, bytes([byte ^ 1]), at)
    os.fsync(other)
    os.close(other)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("at", [0, PAGE - 1, PAGE, BLOCK + 5 * PAGE + 17, 3 * BLOCK - 1])
def test_one_flipped_bit_is_found(
    open_context: Any, swap_file: Any, memory: Any, at: int, direct: bool
) -> None:
    context = open_context(verify=True)
    assert "verify" in context.info.flags
    fd = swap_file(direct=direct)
    file = context.add_file(fd, direct=direct, name="/swap/rank0")
    content = os.urandom(3 * BLOCK)
    context.write(file, memory(content), 0, len(content)).wait()
    back = memory(len(content))
    assert context.read(file, back, 0, len(content)).wait() == len(content)
    flip(fd, at)
    with pytest.raises(SwapError) as caught:
        context.read(file, back, 0, len(content), names=("layers.4.w",)).wait()
    error = caught.value
    assert (error.errno, error.names) == (errno.EBADMSG, ("layers.4.w",))
    assert (error.offset, error.filename) == (at // PAGE * PAGE, "/swap/rank0")
    assert "differ from the bytes written" in str(error)
    assert context.stats()[file].read.errors_by_errno == {errno.EBADMSG: 1}

    for page in range(0, 3 * BLOCK, PAGE):  # every other page is as good as before, alone and in company
        if page != at // PAGE * PAGE:
            assert context.read(file, back, page, PAGE).wait() == PAGE
            assert back.bytes()[:PAGE] == content[page : page + PAGE]
    new = memory(b"n" * PAGE)
    context.write(file, new, at // PAGE * PAGE, PAGE).wait()  # and written anew, it is good again
    assert context.read(file, back, 0, len(content)).wait() == len(content)


@pytest.mark.parametrize("nbytes", [1, 100, PAGE - 1, PAGE + 1, BLOCK + 100])
def test_a_padded_tail_is_covered(
    open_context: Any, swap_file: Any, memory: Any, failure: Any, nbytes: int
) -> None:
    context = open_context(verify=True)
    fd = swap_file()
    file = context.add_file(fd, direct=True, name="swap")
    content = os.urandom(nbytes)
    context.write(file, memory(content), PAGE, nbytes).wait()
    back = memory(nbytes)
    context.read(file, back, PAGE, nbytes).wait()
    assert back.bytes() == content
    flip(fd, PAGE + nbytes - 1)
    assert failure(context.read(file, memory(nbytes), PAGE, nbytes).wait)[0] == errno.EBADMSG


def test_shorts_and_retries_do_not_confuse_it(open_context: Any, swap_file: Any, memory: Any) -> None:
    some = [Fault("any", first=n, count=2, short=512 * (n % 9 + 1)) for n in range(1, 200, 4)]
    context = open_context(*some, Fault("any", first=3, count=0, short=3 * PAGE), verify=True)
    file = context.add_file(swap_file(), direct=True, name="swap")
    content = os.urandom(2 * BLOCK + 77)
    for _ in range(3):
        context.write(file, memory(content), 0, len(content)).wait()
        back = memory(len(content))
        context.read(file, back, 0, len(content)).wait()
        assert back.bytes() == content
    assert context.stats()[file].read.errors == context.stats()[file].write.errors == 0


def test_another_context_compares_the_same_checksums(open_context: Any, swap_file: Any, memory: Any) -> None:
    content, fd = os.urandom(3 * PAGE), swap_file(direct=True)
    writer = open_context(verify=True)
    file = writer.add_file(fd, direct=True, name="swap")
    writer.write(file, memory(content), PAGE, 3 * PAGE).wait()
    sums = writer.checksums(file, 0, 6)
    pages = [crc32c(content[at : at + PAGE]) for at in range(0, 3 * PAGE, PAGE)]
    assert [*memoryview(sums).cast("I")] == [0, *pages, 0, 0]
    writer.close()
    flip(fd, 2 * PAGE + 9)
    reader, back = open_context(verify=True), memory(3 * PAGE)
    file = reader.add_file(fd, direct=True, name="swap")
    reader.read(file, back, PAGE, 3 * PAGE).wait()
    reader.set_checksums(file, 0, sums)
    assert reader.checksums(file, 0, 6) == sums
    reader.read(file, back, PAGE, PAGE).wait()
    with pytest.raises(SwapError) as caught:
        reader.read(file, back, PAGE, 3 * PAGE).wait()
    assert (caught.value.errno, caught.value.offset) == (errno.EBADMSG, 2 * PAGE)
    reader.set_checksums(file, 2, bytes(4))
    reader.read(file, back, PAGE, 3 * PAGE).wait()
    with pytest.raises(SwapError, match="EINVAL"):
        reader.checksums(7, 0, 1)
    with pytest.raises(SwapError, match="ENOTSUP"):
        open_context().checksums(0, 0, 1)


def test_without_it_nothing_is_noticed(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context()
    assert "verify" not in context.info.flags
    fd = swap_file()
    file = context.add_file(fd, direct=True, name="swap")
    context.write(file, memory(bytes(PAGE)), 0, PAGE).wait()
    flip(fd, 5)
    back = memory(PAGE)
    assert context.read(file, back, 0, PAGE).wait() == PAGE
    assert back.bytes()[5] == 1


def test_what_was_not_written_here_is_not_judged(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(verify=True)
    fd = swap_file(4 * PAGE)
    file = context.add_file(fd, direct=True, name="swap")
    context.write(file, memory(b"w" * PAGE), PAGE, PAGE).wait()
    flip(fd, 3)
    flip(fd, 2 * PAGE)
    back = memory(4 * PAGE)
    assert context.read(file, back, 0, 4 * PAGE).wait() == 4 * PAGE
    assert back.bytes() == (b"\0\0\0\1".ljust(PAGE, b"\0") + b"w" * PAGE + b"\1".ljust(2 * PAGE, b"\0"))
    assert Path(f"/proc/self/fd/{fd}").read_bytes() == back.bytes()


@pytest.mark.parametrize("shorts", [1, 5])
def test_a_short_read_of_the_padding_is_read_again(
    open_context: Any, swap_file: Any, memory: Any, shorts: int
) -> None:
    """The tail's page holds more than was asked for, and its sum is of all of it."""
    context = open_context(Fault("read", count=shorts, short=512), verify=True)
    file = context.add_file(swap_file(), direct=True, name="swap")
    context.write(file, memory(b"w" * 600), 0, 600).wait()
    back = memory(PAGE)
    assert context.read(file, back, 0, 100).wait() == 100
    assert back.bytes() == b"w" * 100 + bytes(PAGE - 100)
    assert context.stats()[file].read.retries == shorts


@pytest.mark.parametrize("engine", ["io_uring"], indirect=True)  # others have workers for other work, too
def test_checksums_take_no_more_threads_than_the_kernels(
    open_context: Any, swap_file: Any, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are within the affinity mask, the CPU quota and the share of a rank."""
    monkeypatch.setattr(kernels, "thread_count", lambda: 1)
    context = open_context(verify=True)
    file = context.add_file(swap_file(), direct=True, name="swap")
    content = memory(os.urandom(256 * BLOCK))
    context.write(file, content, 0, content.nbytes).wait()
    context.read(file, content, 0, content.nbytes).wait()
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert names.count("tiering-aio-w\n") == 1


FAR_AWAY = """
import os, resource, sys
from child import Memory
from tiering.storage.aio import AioContext
from tiering.errors import SwapError
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # else it would take 17 GB, page by page
fd = os.open(sys.argv[1], os.O_RDWR | os.O_TMPFILE | os.O_DIRECT)
with AioContext(engine="threads", verify=True) as context:
    file = context.add_file(fd, direct=True, name="swap")
    try:
        context.write(file, Memory(4096), 1 << 55, 4096).wait()
    except SwapError as error:
        print(error.errno)
"""


def test_an_absurd_offset_costs_no_memory(run_child: Callable[..., str], tmp_path: Path) -> None:
    """No file system has such files: that is the kernel's answer, and no table is made for it."""
    assert run_child(FAR_AWAY, tmp_path) == f"{errno.EFBIG}\n"
