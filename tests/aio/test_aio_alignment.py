"""Devices with blocks of 16 and 64 KiB: direct files, pieces of any pages, and no neighbour that is overwritten."""

from __future__ import annotations

import errno
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiering._aio import lib
from tiering.errors import SwapError
from tiering.storage.aio import AioContext, Fault

PAGE = 4096
ALIGNMENTS = [16384, 65536]


def content_of(fd: int) -> bytes:
    return Path(f"/proc/self/fd/{fd}").read_bytes()


@pytest.mark.parametrize("verify", [False, True], ids=["", "verify"])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_neighbours_in_one_block_do_not_overwrite_each_other(
    open_context: Any, swap_file: Any, memory: Any, alignment: int, verify: bool
) -> None:
    """All pages are written at once: a block is read for one of them only when it holds the one before."""
    context = open_context(Fault("write", count=9, delay=0.01), alignment=alignment, verify=verify)
    count = 3 * alignment // PAGE
    fd = swap_file(count * PAGE)
    file = context.add_file(fd, direct=True, name="swap")
    content = os.urandom(count * PAGE)
    order = random.Random(1).sample(range(count), count)
    pieces = [memory(content[page * PAGE : (page + 1) * PAGE]) for page in range(count)]
    writes = [context.write(file, pieces[page], page * PAGE, PAGE) for page in order]
    back = memory(len(content))
    assert context.read(file, back, 0, len(content), after=writes).wait() == len(content)
    assert back.bytes() == content == content_of(fd)
    for start, nbytes in ((PAGE, alignment), (3 * PAGE, 2 * alignment), (0, alignment + 5), (5 * PAGE, 100)):
        assert context.read(file, back, start, nbytes).wait() == nbytes
        assert back.bytes()[:nbytes] == content[start : start + nbytes]
    stats = context.stats()[file]
    assert (stats.write.bytes, stats.write.ops, stats.read.errors) == (len(content), count, 0)


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("start", [0, PAGE, 3 * PAGE])
@pytest.mark.parametrize("nbytes", [100, PAGE, 5 * PAGE + 7, 200_000])
def test_the_file_grows_to_whole_blocks(
    open_context: Any, swap_file: Any, memory: Any, alignment: int, start: int, nbytes: int
) -> None:
    context = open_context(Fault("any", count=5, short=512), alignment=alignment)
    fd = swap_file()
    file = context.add_file(fd, direct=True, name="swap")
    content = os.urandom(nbytes)
    context.write(file, memory(content), start, nbytes).wait()
    end = -(-(start + nbytes) // alignment) * alignment
    assert content_of(fd) == (bytes(start) + content).ljust(end, b"\0")
    context.write(file, memory(b"t"), start, 1).wait()  # fills its page with zeros, and changes no other
    after = (bytes(start) + b"t".ljust(PAGE, b"\0")) + (bytes(start) + content).ljust(end, b"\0")[
        start + PAGE :
    ]
    assert content_of(fd) == after


def test_a_block_that_cannot_be_read_is_not_written(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(Fault("read", error=errno.ENXIO), alignment=16384)
    fd = swap_file(16384)
    file = context.add_file(fd, direct=True, name="swap")
    with pytest.raises(SwapError) as caught:
        context.write(file, memory(b"w" * PAGE), 2 * PAGE, PAGE).wait()
    assert (caught.value.errno, caught.value.offset) == (errno.ENXIO, 2 * PAGE)
    stats = context.stats()[file]
    assert (stats.write.errors, stats.read.errors) == (1, 0)
    assert content_of(fd) == bytes(16384)
    assert context.write(file, memory(b"w" * PAGE), 2 * PAGE, PAGE).wait() == PAGE


def test_a_canceled_write_has_written_whole_blocks(open_context: Any, swap_file: Any, memory: Any) -> None:
    """It is canceled while its first block of the device is read: that is still merged and written."""
    context = open_context(Fault("read", delay=0.3), alignment=16384, queue_depth=1, verify=True)
    file = context.add_file(swap_file(), direct=True, name="swap")
    before, after = b"b" * 32768, b"a" * 24576
    context.write(file, memory(before), 0, len(before)).wait()
    write = context.write(file, memory(after), PAGE, len(after))
    while not context.stats()[file].write.in_flight:
        pass
    assert write.cancel()
    with pytest.raises(SwapError, match="canceled by cancel"):
        write.wait()
    back = memory(len(before))
    assert context.read(file, back, 0, len(before)).wait() == len(before)
    assert back.bytes() == before[:PAGE] + after[: 3 * PAGE] + before[16384:]


def test_pieces_that_overlap_in_one_block_lose_no_other_bytes(
    open_context: Any, swap_file: Any, memory: Any
) -> None:
    """A merge would write back what it has read before the whole block was written."""
    context = open_context(Fault("write", first=2, count=0, delay=0.1), alignment=16384)
    file = context.add_file(swap_file(32768), direct=True, name="swap")
    content = b"1" * 16384 + b"2" * 16384
    context.write_scattered(file, memory(content), [0, PAGE], 16384).wait()
    back = memory(32768)
    assert context.read(file, back, 0, 32768).wait() == 32768
    assert back.bytes()[:PAGE] == b"1" * PAGE
    assert back.bytes()[16384:] == b"2" * PAGE + bytes(3 * PAGE)
    assert set(back.bytes()[PAGE:16384]) in ({ord("1")}, {ord("2")})


@pytest.mark.parametrize("alignment", [1, 2048, 12288, 131072])
def test_an_alignment_that_no_device_has_is_refused(open_context: Any, alignment: int) -> None:
    with pytest.raises(SwapError, match="EINVAL"):
        open_context(alignment=alignment)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[str]:
    """A loop device with blocks of 16 KiB; the kernel refuses operations on other ranges."""
    image = tmp_path / "image"
    image.touch()
    os.truncate(image, 4 << 20)
    command = ("losetup", "--find", "--show", "--sector-size", "16384", str(image))
    try:
        ran = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("losetup is not installed (Debian: package mount)")
    if ran.returncode:
        pytest.skip(f"no loop device with blocks of 16 KiB (root, Linux 6.15): {ran.stderr.strip()}")
    yield ran.stdout.strip()
    subprocess.run(("losetup", "--detach", ran.stdout.strip()), check=True)


def test_a_real_device_is_used_directly(engine: str, device: str, memory: Any) -> None:
    fd = os.open(device, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        assert lib.aio_direct_alignment(fd) == 16384
        content = bytearray(os.urandom(1 << 20))
        back = memory(len(content))
        with AioContext(engine=engine, block_size=65536, verify=True) as context:
            file = context.add_file(fd, direct=True, name=device)
            context.write(file, memory(bytes(content)), 0, len(content)).wait()
            for start, nbytes in ((PAGE, PAGE), (3 * PAGE, 70_000), (16384, 32768), (5 * PAGE, 9)):
                piece = os.urandom(nbytes)
                context.write(file, memory(piece), start, nbytes).wait()
                content[start : start + nbytes] = piece
                content[start + nbytes : -(-(start + nbytes) // PAGE) * PAGE] = bytes(-nbytes % PAGE)
            assert context.read(file, back, 0, len(content)).wait() == len(content)
            assert back.bytes() == content
            assert context.read(file, back, PAGE, 8 * PAGE + 3).wait() == 8 * PAGE + 3
            assert back.bytes()[: 8 * PAGE + 3] == content[PAGE : 9 * PAGE + 3]
    finally:
        os.close(fd)
