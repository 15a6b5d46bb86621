"""Taking requests back, and waiting for whichever of many is done first."""

from __future__ import annotations

import errno
import signal
import threading
from pathlib import Path
from typing import Any, Literal

import pytest

from tiering.errors import SwapError
from tiering.storage.aio import Fault

BLOCK = 65536
OLD, NEW = b"o" * BLOCK, b"n" * BLOCK


def until_begun(context: Any, kind: str, ticket: Any) -> None:
    while not getattr(context.stats()[0], kind).in_flight and not ticket.done():
        pass


def slow(
    open_context: Any,
    swap_file: Any,
    kind: Literal["read", "write"] = "write",
    *,
    seconds: float = 0.25,
    direct: bool = True,
) -> Any:
    """A context at depth 1, whose first operation of a kind is late; and its file, of one block "o"."""
    context = open_context(Fault(kind, first=2 if kind == "write" else 1, delay=seconds), queue_depth=1)
    fd = swap_file()
    file = context.add_file(fd, direct=True, name="swap")
    return context, file, Path(f"/proc/self/fd/{fd}")


def test_a_cancelled_write_leaves_the_old_bytes(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    context, file, path = slow(open_context, swap_file)
    context.write(file, memory(OLD), 0, BLOCK).wait()
    blocker = context.write(file, memory(BLOCK), BLOCK, BLOCK)
    until_begun(context, "write", blocker)
    write = context.write(file, memory(NEW), 0, BLOCK)
    flush = context.flush(file, after=[write])
    read = context.read(file, memory(BLOCK), 0, BLOCK, after=[write])
    apart = context.read(file, memory(BLOCK), 0, BLOCK)
    assert write.cancel()
    for ticket in (write, flush, read):
        assert failure(ticket.wait)[0] == errno.ECANCELED
    assert not write.cancel()  # it is done now
    assert [ticket.wait() for ticket in (blocker, apart)] == [BLOCK, BLOCK]
    assert path.read_bytes() == OLD + bytes(BLOCK)
    stats = context.stats()[file]
    assert (stats.write.bytes, stats.read.bytes, stats.flush.ops) == (2 * BLOCK, BLOCK, 0)
    assert (stats.write.errors, stats.read.errors) == (0, 0)  # never begun: no operation failed


def test_a_cancelled_read_holds_nobody_up(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    context, file, path = slow(open_context, swap_file)
    context.write(file, memory(OLD), 0, BLOCK).wait()
    blocker = context.write(file, memory(OLD), BLOCK, BLOCK)
    until_begun(context, "write", blocker)
    back = memory(BLOCK)
    read = context.read(file, back, 0, BLOCK, after=[blocker])
    write = context.write(file, memory(NEW), 0, BLOCK, after=[read])
    assert read.cancel()
    assert not read.done() or blocker.done()  # a ticket that is done says that all before it is over
    assert write.wait() == BLOCK
    assert blocker.done()
    assert failure(read.wait)[0] == errno.ECANCELED
    assert back.bytes() == bytes(BLOCK)
    assert path.read_bytes() == NEW + OLD


def test_what_comes_after_a_cancelled_read_still_heeds_a_failure(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    """The read is taken back, the write that it waited for fails: who relied on that order must not run."""
    context = open_context(Fault("write", error=errno.EIO, delay=0.1))
    file = context.add_file(swap_file(BLOCK), direct=True, name="swap")
    write = context.write(file, memory(NEW), 0, BLOCK)
    read = context.read(file, memory(BLOCK), 0, BLOCK, after=[write])
    late = context.read(file, memory(BLOCK), 0, BLOCK, after=[read])
    assert read.cancel()
    assert failure(late.wait)[0] == errno.ECANCELED
    assert failure(write.wait)[0] == errno.EIO


def test_what_the_kernel_has_as_a_whole_cannot_be_taken_back(
    open_context: Any, swap_file: Any, memory: Any
) -> None:
    context, file, path = slow(open_context, swap_file)
    context.write(file, memory(OLD), 0, BLOCK).wait()
    write = context.write(file, memory(NEW), 0, BLOCK)
    until_begun(context, "write", write)
    assert not write.cancel()
    assert write.wait() == BLOCK
    assert not write.cancel()
    assert path.read_bytes() == NEW


def test_the_blocks_of_a_write_that_the_kernel_does_not_have_are_taken_back(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    context = open_context(Fault("write", first=5, count=0, delay=0.25), queue_depth=1)
    fd = swap_file()
    file, path = context.add_file(fd, direct=True, name="swap"), Path(f"/proc/self/fd/{fd}")
    context.write(file, memory(OLD * 4), 0, 4 * BLOCK).wait()
    write = context.write(file, memory(NEW * 4), 0, 4 * BLOCK)
    until_begun(context, "write", write)
    read = context.read(file, memory(BLOCK), 0, BLOCK, after=[write])
    assert write.cancel()
    assert write.cancel() or write.done()
    for ticket in (write, read):  # half of it is there: nobody may read it as a whole
        assert failure(ticket.wait)[0] == errno.ECANCELED
    assert context.stats()[file].write.in_flight == 0  # a ticket that is done leaves the memory to its owner
    assert context.stats()[file].write.errors == 0
    written = path.read_bytes()
    new = written.count(b"n")
    assert written == (NEW * 4)[:new] + (OLD * 4)[new:]
    assert new % BLOCK == 0 and BLOCK <= new < 4 * BLOCK


def test_what_comes_after_a_read_that_was_cut_goes_on(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    context, file, path = slow(open_context, swap_file, "read")
    context.write(file, memory(OLD * 4), 0, 4 * BLOCK).wait()
    back = memory(4 * BLOCK)
    read = context.read(file, back, 0, 4 * BLOCK)
    until_begun(context, "read", read)
    write = context.write(file, memory(NEW * 4), 0, 4 * BLOCK, after=[read])
    assert read.cancel()
    assert write.wait() == 4 * BLOCK
    assert failure(read.wait)[0] == errno.ECANCELED
    assert set(back.bytes()) == set(b"o\0")  # it has read no byte of the write
    assert path.read_bytes() == NEW * 4


def test_a_cancelled_ticket_may_be_dropped(open_context: Any, swap_file: Any, memory: Any) -> None:
    context, file, _ = slow(open_context, swap_file)
    context.write(file, memory(OLD), 0, BLOCK).wait()
    until_begun(context, "write", context.write(file, memory(OLD), 0, BLOCK))
    ticket = context.read(file, memory(BLOCK), 0, BLOCK)
    assert ticket.cancel()
    del ticket
    context.close()  # nothing to report: its owner knows


def test_wait_any_returns_what_is_done_and_raises_nothing(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    context = open_context(Fault("write", delay=0.3), Fault("read", first=2, error=errno.ENXIO))
    file = context.add_file(swap_file(4 * BLOCK), direct=True, name="swap")
    late = context.write(file, memory(BLOCK), 0, BLOCK)
    with pytest.raises(TimeoutError, match="none of 1 transfers is done after 0"):
        context.wait_any([late], 0)
    good = context.read(file, memory(BLOCK), BLOCK, BLOCK)
    assert context.wait_any([late, good]) is good
    bad = context.read(file, memory(BLOCK), BLOCK, BLOCK)
    assert context.wait_any([late, bad]) is bad
    assert failure(bad.wait)[0] == errno.ENXIO
    assert context.wait_any([late, bad, good]) is bad  # the first of several, collected or not
    assert context.wait_any([late]) is late
    assert late.wait() == BLOCK
    with pytest.raises(ValueError, match="at least one ticket"):
        context.wait_any([])
    other = open_context()
    with pytest.raises(ValueError, match="another AioContext"):
        other.wait_any([good])


def test_every_waiter_for_any_wakes(open_context: Any, swap_file: Any, memory: Any) -> None:
    """Sixteen threads wait for overlapping choices of tickets, while others wait for single ones."""
    context = open_context(Fault("write", count=0, delay=0.05), queue_depth=4)
    file = context.add_file(swap_file(), direct=True, name="swap")
    tickets = [context.write(file, memory(4096), i * 4096, 4096) for i in range(16)]
    answers: list[object] = []

    def ask(number: int) -> None:
        try:
            if number % 4 == 3:
                answers.append(tickets[number].wait() == 4096)
            else:
                answers.append(context.wait_any(tickets[number : number + 3]).done())
        except BaseException as error:
            answers.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 16


def test_a_waiter_for_any_survives_close(open_context: Any, swap_file: Any, memory: Any) -> None:
    context, file, _ = slow(open_context, swap_file, "read", seconds=0.5)
    context.write(file, memory(4 * BLOCK), 0, 4 * BLOCK).wait()
    begun = context.read(file, memory(BLOCK), 0, BLOCK)
    queued = [context.read(file, memory(BLOCK), 0, BLOCK) for _ in range(3)]
    until_begun(context, "read", begun)
    answers: list[object] = []
    waiter = threading.Thread(target=lambda: answers.append(context.wait_any(queued)))
    waiter.start()
    context.close()
    waiter.join()
    assert answers[0] in queued
    assert begun.wait() == BLOCK
    for ticket in queued:
        with pytest.raises(SwapError, match="context was closed"):
            ticket.wait()
        assert not ticket.cancel()


def test_a_signal_is_heard_while_waiting_for_any(open_context: Any, swap_file: Any, memory: Any) -> None:
    context, file, _ = slow(open_context, swap_file, "read", seconds=0.6)
    context.write(file, memory(BLOCK), 0, BLOCK).wait()
    ticket = context.read(file, memory(BLOCK), 0, BLOCK)

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError("alarm")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptedError, match="alarm"):
            context.wait_any([ticket])
        assert not ticket.done()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ticket.wait() == BLOCK
