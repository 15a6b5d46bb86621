"""Vector requests: pieces of several files under one ticket, and all else as for a request of one file."""

from __future__ import annotations

import errno
import os
import random
from typing import Any

import pytest

from tiering.errors import SwapError
from tiering.storage.aio import Fault, FilePiece

PAGE, BLOCK = 4096, 8192


def pieces_in(files: list[int], seed: int) -> list[FilePiece]:
    """Pieces of several sizes, whose places in memory and in the files are shuffled; the last has an odd tail."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 5) * PAGE for _ in range(11)] + [3 * PAGE + 77]
    ends = dict.fromkeys(files, 0)
    pieces, at = [], 0
    for nbytes in sizes:
        file = rng.choice(files)
        pieces.append(FilePiece(file, at, ends[file], nbytes))
        at += nbytes
        ends[file] += -(-nbytes // PAGE) * PAGE + rng.randint(0, 2) * PAGE
    rng.shuffle(pieces)
    return pieces


@pytest.mark.parametrize("verify", [False, True], ids=["", "verify"])
@pytest.mark.parametrize("short", [0, PAGE + 512], ids="short {}".format)
def test_every_piece_goes_where_it_belongs(
    open_context: Any, swap_file: Any, memory: Any, short: int, verify: bool
) -> None:
    faults = [Fault("any", first=n, count=2, short=short) for n in range(1, 100, 3)] if short else []
    context = open_context(*faults, block_size=BLOCK, queue_depth=4, verify=verify)
    fds = [swap_file(direct=direct) for direct in (True, True, False)]
    files = [context.add_file(fd, direct=fd != fds[2], name=f"drive {fd}") for fd in fds]
    pieces = pieces_in(files, seed=short + verify)
    total = sum(piece.nbytes for piece in pieces)
    content = os.urandom(total)
    assert {piece.file for piece in pieces} == set(files)
    write = context.prepare_vector("write", memory(content), pieces)
    assert not write.has_begun
    back = memory(total + 1)
    read = context.prepare_vector("read", back, pieces, after=[write.begin()], priority=2)
    assert (read.begin().wait(), write.wait(), read.nbytes) == (total, total, total)
    assert back.bytes() == content + b"\0"
    for file, fd in zip(files, fds, strict=True):
        stored = os.pread(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY), 1 << 20, 0)
        own = [piece for piece in pieces if piece.file == file]
        for piece in own:
            expected = content[piece.at : piece.at + piece.nbytes]
            assert stored[piece.offset : piece.offset + piece.nbytes] == expected
        stats = context.stats()[file]
        for counted in (stats.read, stats.write):
            assert (counted.bytes, counted.errors, counted.in_flight) == (sum(p.nbytes for p in own), 0, 0)


def test_a_transfer_of_no_pieces_is_done(open_context: Any, memory: Any) -> None:
    ticket = open_context().prepare_vector("read", memory(BLOCK), [])
    assert ticket.done() and ticket.wait() == 0 and not ticket.has_begun and not ticket.cancel()


def test_a_failure_names_its_piece_and_the_other_files_go_on(
    open_context: Any, swap_file: Any, memory: Any
) -> None:
    context = open_context(Fault("write", first=2, error=errno.EIO, file=1), block_size=BLOCK)
    files = [context.add_file(swap_file(), direct=True, name=f"/drive{number}") for number in range(2)]
    pieces = [FilePiece(files[n % 2], n * BLOCK, n // 2 * BLOCK + PAGE, BLOCK) for n in range(6)]
    write = context.prepare_vector("write", memory(b"n" * (6 * BLOCK)), pieces, names=("w",)).begin()
    read = context.prepare_vector("read", memory(6 * BLOCK), pieces, after=[write]).begin()
    with pytest.raises(SwapError) as caught:
        write.wait()
    error = caught.value
    assert (error.errno, error.filename, error.offset) == (errno.EIO, "/drive1", BLOCK + PAGE)
    assert (
        f"write of 'w' ({6 * BLOCK} bytes in 6 pieces, the first) at offset 3.8147e-06 GiB of /drive0 failed: EIO"
        f" (Input/output error) at byte {BLOCK + PAGE} of /drive1;" in str(error)
    )
    with pytest.raises(SwapError, match="because an earlier transfer failed"):
        read.wait()
    assert [stats.write.bytes for stats in context.stats()] == [3 * BLOCK, 2 * BLOCK]


def test_a_slow_file_delays_no_other_and_what_it_has_not_begun_is_canceled(
    open_context: Any, swap_file: Any, memory: Any
) -> None:
    context = open_context(Fault("write", delay=1.0, file=1), block_size=BLOCK, queue_depth=1)
    files = [context.add_file(swap_file(), direct=True, name=f"/drive{number}") for number in range(2)]
    context.start_recording()
    first = context.write(files[1], memory(b"s" * BLOCK), 0, BLOCK)
    pieces = [FilePiece(file, n * BLOCK, 0, BLOCK) for n, file in enumerate(files)]
    canceled = context.prepare_vector("write", memory(2 * BLOCK), pieces).begin()
    while context.stats()[files[0]].write.ops < 1:
        pass
    assert not first.done() and not canceled.done()
    assert canceled.cancel()
    with pytest.raises(SwapError) as caught:
        canceled.wait()
    assert caught.value.errno == errno.ECANCELED
    assert first.wait() == BLOCK
    last = context.prepare_vector("write", memory(2 * BLOCK), pieces, names=("w",)).begin()
    records = context.end_recording()
    # Files of which nothing was issued are left out.
    assert sorted((record.file, record.nbytes, record.error) for record in records[:2]) == [
        ("/drive0", BLOCK, 0),
        ("/drive1", BLOCK, 0),
    ]
    assert sorted((record.file, record.offset, record.names) for record in records[2:]) == [
        ("/drive0", 0, ("w",)),
        ("/drive1", 0, ("w",)),
    ]
    assert last.done() and not last.cancel()


def test_what_is_refused(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context()
    files = [context.add_file(swap_file(), direct=True, name=f"/drive{number}") for number in range(2)]
    buffer = memory(4 * PAGE)
    good = FilePiece(files[0], 0, 0, PAGE)
    for piece, message in (
        (
            FilePiece(files[1], PAGE, 512, PAGE),
            r"needs address .* and offset \(512\) to be multiples of 4096",
        ),
        (FilePiece(7, PAGE, 0, PAGE), r"no such file index \(7\)"),
        (FilePiece(files[1], 3 * PAGE, 0, 2 * PAGE), "outside of a buffer of 16384 bytes"),
        (FilePiece(files[1], PAGE, 1 << 64, PAGE), "64 bits do not hold it"),
    ):
        with pytest.raises((ValueError, SwapError), match=message):
            context.prepare_vector("write", buffer, [good, piece]).begin()
    assert context.prepare_vector("write", buffer, [good]).begin().wait() == PAGE
    assert [stats.write.bytes for stats in context.stats()] == [PAGE, 0]
