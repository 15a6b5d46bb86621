"""Transfers that are recorded: each once, with the times at which C issued it and was done with it."""

from __future__ import annotations

import errno
import threading
import time
from itertools import pairwise
from typing import Any

import pytest

from tiering.errors import SwapError
from tiering.storage.aio import Fault

BLOCK = 65536
DELAY = 0.05


def test_times_are_those_of_the_transfer_however_late_it_is_asked_for(
    open_context: Any, swap_file: Any, memory: Any
) -> None:
    context = open_context(Fault("write", count=0, delay=DELAY))
    file = context.add_file(swap_file(), direct=True, name="swap")
    context.start_recording()
    before = time.monotonic_ns()
    ticket = context.write(file, memory(4 * BLOCK), 8192, 4 * BLOCK, names=("weight",))
    after = time.monotonic_ns()
    while context.stats()[file].write.bytes < 4 * BLOCK:
        time.sleep(0.001)
    over = time.monotonic_ns()
    time.sleep(DELAY)
    assert ticket.wait() == 4 * BLOCK
    (record,) = context.end_recording()
    assert (record.kind, record.file, record.names) == ("write", "swap", ("weight",))
    assert (record.offset, record.nbytes, record.error) == (8192, 4 * BLOCK, 0)
    assert before <= record.submitted <= after
    assert record.submitted <= record.issued
    assert record.issued + DELAY * 1e9 <= record.done <= over


def test_what_is_ordered_after_another_is_issued_after_it_was_done(
    open_context: Any, swap_file: Any, memory: Any
) -> None:
    context = open_context(Fault("write", delay=DELAY))
    file = context.add_file(swap_file(BLOCK), direct=True, name="swap")
    context.start_recording()
    write = context.write(file, memory(4096), 0, 4096)
    read = context.read(file, memory(4096), 0, 4096, after=[write])
    flush = context.flush(file, after=[read])
    records = context.end_recording()  # which waits for them
    assert [record.kind for record in records] == ["write", "read", "flush"]
    for earlier, later in pairwise(records):
        assert earlier.done <= later.issued <= later.done
    assert all(ticket.done() for ticket in (write, read, flush))
    counted = context.stats()[file]
    assert [record.nbytes for record in records] == [counted.write.bytes, counted.read.bytes, 0]


def test_only_what_was_issued_and_ended_while_recording_is_kept(
    open_context: Any, swap_file: Any, memory: Any
) -> None:
    context = open_context(Fault("write", first=2, delay=DELAY), Fault("write", first=3, error=errno.EIO))
    file = context.add_file(swap_file(BLOCK), direct=True, name="swap")
    context.write(file, memory(4096), 0, 4096).wait()
    straddles = context.write(file, memory(8192), 0, 8192)
    context.start_recording()
    fails = context.write(file, memory(4096), 8192, 4096, after=[straddles])
    canceled = context.read(file, memory(4096), 8192, 4096, after=[fails])
    nothing = context.read(file, memory(4096), 0, 0)
    first, second = context.end_recording()
    assert (first.nbytes, first.submitted, first.error) == (8192, 0, 0)
    assert (second.offset, second.error) == (8192, errno.EIO)
    for ticket in (fails, canceled):  # the failures are still told
        with pytest.raises(SwapError):
            ticket.wait()
    assert nothing.wait() == 0
    context.read(file, memory(4096), 0, 4096).wait()
    assert context.end_recording() == []


def test_a_transfer_that_many_threads_wait_for_is_recorded_once(
    open_context: Any, swap_file: Any, memory: Any
) -> None:
    context = open_context(Fault("read", count=0, delay=DELAY))  # so that all of them sleep when it ends
    file = context.add_file(swap_file(BLOCK), direct=True, name="swap")
    context.start_recording()
    tickets = [context.read(file, memory(4096), 0, 4096) for _ in range(20)]

    def wait_for_all() -> None:
        for ticket in tickets:
            ticket.wait()

    threads = [threading.Thread(target=wait_for_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(context.end_recording()) == 20
