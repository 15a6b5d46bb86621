"""What waits for what: dependencies hold, failures poison, priorities never overtake a dependency."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from tiering.storage.aio import Fault

BLOCK = 65536
OLD, NEW = b"o" * BLOCK, b"n" * BLOCK


def written(context: Any, file: int, buffer: Any) -> None:
    assert context.write(file, buffer, 0, buffer.nbytes).wait() == buffer.nbytes


def test_a_read_after_a_slow_write_returns_the_new_bytes(
    open_context: Any, swap_file: Any, memory: Any
) -> None:
    context = open_context(Fault("write", first=2, delay=0.3))
    file = context.add_file(swap_file(), direct=True, name="swap")
    written(context, file, memory(OLD))
    write = context.write(file, memory(NEW), 0, BLOCK)
    early, late = memory(BLOCK), memory(BLOCK)
    context.read(file, early, 0, BLOCK).wait()
    if not write.done():  # else this machine slept through the delay, and the read proves nothing
        assert early.bytes() == OLD
    context.read(file, late, 0, BLOCK, priority=2, after=[write]).wait()
    assert write.done()
    assert late.bytes() == NEW


def test_dependencies_cross_files_and_may_be_many(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(Fault("write", count=0, delay=0.02))
    files = [context.add_file(swap_file(), direct=True, name=str(i)) for i in range(3)]
    writes = [context.write(file, memory(bytes([65 + file]) * BLOCK), 0, BLOCK) for file in files]
    flushes = [context.flush(file, after=[write]) for file, write in zip(files, writes, strict=True)]
    backs = [memory(BLOCK) for _ in files]
    reads = [context.read(file, backs[file], 0, BLOCK, after=writes + flushes) for file in files]
    for file, read in zip(files, reads, strict=True):
        read.wait()
        assert all(ticket.done() for ticket in writes + flushes)
        assert backs[file].bytes() == bytes([65 + file]) * BLOCK


def test_a_chain_runs_in_order(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context()
    file = context.add_file(swap_file(), direct=True, name="swap")
    ticket = context.write(file, memory(4096), 0, 4096)
    for i in range(50):  # each replaces what the one before wrote; queue depth alone would let them race
        ticket = context.write(file, memory(bytes([i]) * 4096), 0, 4096, priority=i % 3, after=[ticket])
    back = memory(4096)
    context.read(file, back, 0, 4096, after=[ticket]).wait()
    assert back.bytes() == bytes([49]) * 4096


def test_a_failed_write_poisons_what_comes_after(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    context = open_context(Fault("write", first=2, error=errno.EIO, delay=0.05))
    file = context.add_file(swap_file(), direct=True, name="swap")
    written(context, file, memory(OLD))
    write = context.write(file, memory(NEW), 0, BLOCK)
    back = memory(BLOCK)
    read = context.read(file, back, 0, BLOCK, after=[write])
    flush = context.flush(file, after=[read])
    for ticket in (read, flush):
        code, message = failure(ticket.wait)
        assert code == errno.ECANCELED
        assert "never issued, because an earlier transfer failed" in message
        assert "EIO" in message
    assert back.bytes() == bytes(BLOCK)  # not issued at all
    assert failure(write.wait)[0] == errno.EIO
    assert context.stats()[file].read.ops == context.stats()[file].flush.ops == 0


@pytest.mark.parametrize("collected", [False, True])
def test_a_write_goes_on_after_a_read_that_failed(
    open_context: Any, swap_file: Any, memory: Any, failure: Any, collected: bool
) -> None:
    """It only had to wait for it. What reads after that read does not."""
    context = open_context(Fault("read", count=3, error=errno.EIO))  # it is tried three times
    file = context.add_file(swap_file(), direct=True, name="swap")
    written(context, file, memory(OLD))
    failed = context.read(file, memory(BLOCK), 0, BLOCK)
    if collected:
        assert failure(failed.wait)[0] == errno.EIO
    write = context.write(file, memory(NEW), 0, BLOCK, after=[failed])
    read = context.read(file, memory(BLOCK), 0, BLOCK, after=[failed])
    assert write.wait() == BLOCK
    assert failure(read.wait)[0] == errno.ECANCELED
    assert failure(failed.wait)[0] == errno.EIO
    back = memory(BLOCK)
    context.read(file, back, 0, BLOCK, after=[write]).wait()
    assert back.bytes() == NEW[:BLOCK]
    # A read that was not issued may have had to wait for a write that failed.
    behind = context.write(file, memory(OLD), 0, BLOCK, after=[read])
    assert failure(behind.wait)[0] == errno.ECANCELED


def test_a_failure_poisons_after_it_was_collected(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    context = open_context(Fault("write", error=errno.EIO))
    file = context.add_file(swap_file(BLOCK), direct=True, name="swap")
    write = context.write(file, memory(NEW), 0, BLOCK)
    assert failure(write.wait)[0] == errno.EIO
    for _ in range(600):  # its place in the table must not go to another one
        context.read(file, memory(4096), 0, 4096).wait()
    read = context.read(file, memory(BLOCK), 0, BLOCK, after=[write])
    assert failure(read.wait)[0] == errno.ECANCELED
    assert failure(context.read(file, memory(BLOCK), 0, BLOCK, after=[read]).wait)[0] == errno.ECANCELED


def test_a_collected_success_is_no_obstacle(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context()
    file = context.add_file(swap_file(), direct=True, name="swap")
    first = context.write(file, memory(OLD), 0, BLOCK)
    first.wait()
    assert context.read(file, memory(BLOCK), 0, BLOCK, after=[first]).wait() == BLOCK  # its place is free
    for _ in range(10):
        context.read(file, memory(4096), 0, 4096).wait()
    assert context.read(file, memory(BLOCK), 0, BLOCK, after=[first, first]).wait() == BLOCK  # and taken


def test_a_dependent_waits_for_all_even_when_one_failed(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    context = open_context(Fault("write", first=1, error=errno.EIO), Fault("write", first=2, delay=0.2))
    file = context.add_file(swap_file(), direct=True, name="swap")
    broken = context.write(file, memory(4096), 0, 4096)
    slow = context.write(file, memory(4096), 4096, 4096)
    read = context.read(file, memory(4096), 4096, 4096, after=[broken, slow])
    assert failure(read.wait)[0] == errno.ECANCELED
    assert slow.done()
    assert failure(broken.wait)[0] == errno.EIO


def test_long_chains_are_poisoned_without_recursion(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    context = open_context(Fault("write", error=errno.EIO, delay=0.2))
    file = context.add_file(swap_file(), direct=True, name="swap")
    buffer = memory(4096)
    chain = [context.write(file, buffer, 0, 4096)]
    for _ in range(20_000):
        chain.append(context.read(file, buffer, 0, 4096, after=[chain[-1]]))
    assert failure(chain[-1].wait)[0] == errno.ECANCELED
    assert failure(chain[0].wait)[0] == errno.EIO


def test_tickets_of_another_context(open_context: Any, swap_file: Any, memory: Any) -> None:
    context, other = open_context(), open_context()
    fd = swap_file()
    ticket = context.write(context.add_file(fd, direct=True, name="a"), memory(4096), 0, 4096)
    file = other.add_file(fd, direct=True, name="b")
    with pytest.raises(ValueError, match="another AioContext"):
        other.read(file, memory(4096), 0, 4096, after=[ticket])
    ticket.wait()


def test_higher_priorities_are_issued_first(open_context: Any, swap_file: Any, memory: Any) -> None:
    """At depth 1 the order of issue is the order of writing, and the last writer of a block is what stays."""
    context = open_context(Fault("write", first=1, delay=0.3), queue_depth=1)
    fd = swap_file(4 * BLOCK)
    file = context.add_file(fd, direct=True, name="swap")
    blocker = context.write(file, memory(BLOCK), 3 * BLOCK, BLOCK)
    order = [(0, b"0"), (0, b"1"), (2, b"2"), (1, b"3"), (2, b"4")]
    queued = [context.write(file, memory(mark * BLOCK), 0, BLOCK, priority=p) for p, mark in order]
    probe = memory(BLOCK)
    middle = context.read(file, probe, 0, BLOCK, priority=1)  # behind "4", in turn with "3", before "0"
    assert not blocker.done()
    for ticket in [blocker, middle, *queued]:
        assert ticket.wait() == BLOCK
    assert probe.bytes()[:1] == b"4"
    last = memory(BLOCK)
    context.read(file, last, 0, BLOCK).wait()
    assert last.bytes() == b"1" * BLOCK


def test_a_low_priority_is_not_starved_across_files(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(queue_depth=1)
    # So many files cannot all reach their depth.
    files = [context.add_file(swap_file(), direct=True, name=str(i)) for i in range(12)]
    content = {file: os.urandom(3 * BLOCK) for file in files}
    writes = [context.write(file, memory(content[file]), 0, 3 * BLOCK, priority=file % 3) for file in files]
    backs = {file: memory(3 * BLOCK) for file in files}
    reads = [context.read(file, backs[file], 0, 3 * BLOCK, after=[writes[file]]) for file in files]
    assert [read.wait() for read in reads] == [3 * BLOCK] * 12
    assert {file: backs[file].bytes() for file in files} == content
