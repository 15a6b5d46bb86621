"""Scattered requests: each piece goes where it belongs, and all else is as for a request of one piece."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any, Literal

import pytest

from tiering.errors import SwapError
from tiering.storage.aio import Fault

PAGE, BLOCK = 4096, 8192
Kind = Literal["read", "write"]


def places(n: int, each: int, step: int, first: int = 0) -> list[int]:
    """Where n pieces may begin, shuffled, so that none overlap."""
    offsets = [first + i * max(each, step) for i in range(n)]
    random.Random(n * each).shuffle(offsets)
    return offsets


@pytest.mark.parametrize("verify", [False, True], ids=["", "verify"])
@pytest.mark.parametrize("short", [0, 512, PAGE + 512], ids="short {}".format)
@pytest.mark.parametrize(
    ("direct", "each"),
    [(True, PAGE), (True, 5 * PAGE), (False, 1), (False, PAGE + 1), (False, 2 * BLOCK)],
    ids=lambda value: str(value),
)
def test_every_piece_goes_where_it_belongs(
    open_context: Any, swap_file: Any, memory: Any, direct: bool, each: int, short: int, verify: bool
) -> None:
    """Pieces of less than a block and of several; what the kernel transfers short is continued within its piece."""
    faults = [Fault("any", first=n, count=2, short=short) for n in range(1, 200, 3)] if short else []
    context = open_context(*faults, block_size=BLOCK, queue_depth=4, verify=verify)
    fd = swap_file(direct=direct)
    file = context.add_file(fd, direct=direct, name="swap")
    offsets = places(11, each, step=3 * PAGE if direct else 3001)
    content = os.urandom(11 * each)
    end = max(offsets) + each
    os.ftruncate(fd, end)
    assert context.write_scattered(file, memory(content), offsets, each).wait() == 11 * each
    expected = bytearray(end)
    for i, offset in enumerate(offsets):
        expected[offset : offset + each] = content[i * each : (i + 1) * each]
    assert Path(f"/proc/self/fd/{fd}").read_bytes() == expected

    offsets.reverse()
    back = memory(b"\x55" * (11 * each + 7))
    assert context.read_scattered(file, back, offsets, each).wait() == 11 * each
    assert back.bytes() == b"".join(expected[at : at + each] for at in offsets) + b"\x55" * 7
    stats = context.stats()[file]
    for counted in (stats.read, stats.write):
        assert (counted.bytes, counted.ops) == (11 * each, 11 * -(-each // BLOCK))
        assert (counted.errors, counted.in_flight) == (0, 0)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_error_names_the_block_of_the_piece_that_failed(
    open_context: Any, swap_file: Any, memory: Any, failure: Any, kind: Kind
) -> None:
    """And what is ordered behind the request is not issued, if it is a write."""
    context = open_context(Fault(kind, first=4, error=errno.ENXIO), block_size=BLOCK, queue_depth=1)
    file = context.add_file(swap_file(16 * BLOCK), direct=True, name="/swap/rank0")
    offsets = [6 * BLOCK, 12 * BLOCK, 0]
    ticket = getattr(context, f"{kind}_scattered")(file, memory(6 * BLOCK), offsets, 2 * BLOCK, names=("w",))
    behind = context.read_scattered(file, memory(2 * PAGE), [0, BLOCK], PAGE, after=[ticket])
    with pytest.raises(SwapError) as caught:
        ticket.wait()
    assert (caught.value.errno, caught.value.offset) == (errno.ENXIO, 13 * BLOCK)
    assert "of 'w' (49152 bytes in 3 pieces, the first) at offset" in str(caught.value)
    assert f"at byte {13 * BLOCK} of the file" in str(caught.value)
    assert failure(behind.wait)[0] == errno.ECANCELED
    stats = getattr(context.stats()[file], kind)
    assert (stats.ops, stats.errors) == (3, 1)  # and no more of it was issued


def test_a_bad_page_in_a_piece_is_found(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(verify=True, block_size=BLOCK)
    fd = swap_file()
    file = context.add_file(fd, direct=True, name="swap")
    offsets = places(8, 3 * PAGE, step=5 * PAGE, first=PAGE)
    context.write_scattered(file, memory(os.urandom(24 * PAGE)), offsets, 3 * PAGE).wait()
    bad = offsets[5] + 2 * PAGE
    with Path(f"/proc/self/fd/{fd}").open("r+b", buffering=0) as other:
        byte = os.pread(other.fileno(), 1, bad)[0]
        os.pwrite(other.fileno(), bytes([byte ^ 1]), bad)
        os.fsync(other.fileno())
    with pytest.raises(SwapError) as caught:
        context.read_scattered(file, memory(24 * PAGE), offsets, 3 * PAGE).wait()
    assert (caught.value.errno, caught.value.offset) == (errno.EBADMSG, bad)


def test_its_pieces_that_the_kernel_does_not_have_are_taken_back(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    context = open_context(Fault("write", count=0, delay=0.02), block_size=BLOCK, queue_depth=2)
    fd = swap_file()
    file = context.add_file(fd, direct=True, name="swap")
    offsets = places(6, PAGE, step=2 * PAGE)
    begun = context.write_scattered(file, memory(b"b" * (6 * PAGE)), offsets, PAGE)
    while context.stats()[file].write.in_flight == 0:
        pass
    queued = context.write_scattered(file, memory(b"q" * (6 * PAGE)), offsets, PAGE, after=[begun])
    assert begun.cancel()
    assert failure(begun.wait)[0] == failure(queued.wait)[0] == errno.ECANCELED
    written = Path(f"/proc/self/fd/{fd}").read_bytes()
    assert 2 * PAGE <= written.count(b"b") < 6 * PAGE
    assert written.count(b"q") == 0
    rest = context.write_scattered(file, memory(b"r" * (40 * PAGE)), places(40, PAGE, step=2 * PAGE), PAGE)
    while context.stats()[file].write.in_flight == 0:
        pass
    context.close()
    assert failure(rest.wait)[0] == errno.ECANCELED
    assert 2 * PAGE <= Path(f"/proc/self/fd/{fd}").read_bytes().count(b"r") < 40 * PAGE


def test_what_is_asked_for_wrongly_is_refused(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context()
    direct = context.add_file(swap_file(BLOCK), direct=True, name="direct")
    buffered = context.add_file(swap_file(BLOCK, direct=False), direct=False, name="buffered")
    buffer = memory(3 * PAGE)
    for file, offsets, each, message in (
        (direct, [0, PAGE + 512, PAGE], PAGE, rf"offset \({PAGE + 512}\)"),
        (direct, [0, PAGE], 512, r"length of a piece \(512\)"),
        (buffered, [0, -PAGE], PAGE, "64 bits"),
        (buffered, [0, 1 << 64], PAGE, "64 bits"),
        (buffered, [0, (1 << 63) - PAGE + 1], PAGE, "EINVAL"),
        (buffered, [0, PAGE], 2 * PAGE, "with a buffer of"),
        (buffered, [0, PAGE], -1, "with a buffer of"),
        (buffered + 1, [0, PAGE], PAGE, "no such file"),
    ):
        with pytest.raises((SwapError, ValueError), match=message):
            context.read_scattered(file, buffer, offsets, each)
    for offsets, each in (([], PAGE), ([0, PAGE], 0)):
        assert context.write_scattered(direct, buffer, offsets, each).wait() == 0
    assert context.read_scattered(buffered, buffer, [0, 0, 512], PAGE).wait() == 3 * PAGE
