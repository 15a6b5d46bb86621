"""Contexts come and go: a thousand of them leave nothing behind, and an interpreter ends whatever is in flight."""

from __future__ import annotations

import errno
import gc
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tiering.errors import SwapError
from tiering.storage.aio import AioContext, Fault, FaultPlan

BLOCK = 65536


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


class Held(NamedTuple):
    descriptors: int
    threads: int
    rings: int  # libaio's and io_uring's, which live in the address space


def held_resources() -> Held:
    maps = Path("/proc/self/maps").read_text()
    return Held(
        len(list(Path("/proc/self/fd").iterdir())),
        len(list(Path("/proc/self/task").iterdir())),
        maps.count("[aio]") + maps.count("[io_uring]"),
    )


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


@pytest.mark.parametrize("rounds", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_is_left_behind(engine: str, swap_file: Any, memory: Any, rounds: int) -> None:
    """Contexts that end well, after an error, after a cancellation, and with operations still in flight."""
    fd, buffer = swap_file(), memory(4 * BLOCK)
    plans = [
        None,
        FaultPlan((Fault("write", error=errno.EIO),)),
        FaultPlan((Fault("write", count=0, delay=0.002),)),
    ]

    def live_once(index: int) -> None:
        context = AioContext(engine=engine, block_size=BLOCK, fault=plans[index % 3])
        file = context.add_file(fd, direct=True, name="swap")
        context.register(buffer)
        tickets = [context.write(file, buffer, 0, buffer.nbytes)]
        tickets.append(context.read(file, buffer, 0, buffer.nbytes, after=tickets))
        if index % 2:
            tickets[1].cancel()
        if index % 3 != 2:  # else it is closed at once, with blocks in flight
            for ticket in tickets:
                with suppress(SwapError):
                    ticket.wait()
        with suppress(SwapError):  # as close reports what nobody asked for
            context.close()

    for index in range(10):  # what is loaded and grown once
        live_once(index)
    # What earlier tests of this process have dropped.
    gc.collect()
    before, resident = held_resources(), resident_bytes()
    for index in range(rounds):
        live_once(index)
    # A joined thread leaves /proc a moment later, also one from before that was still counted.
    returned = until(lambda: all(now <= then for now, then in zip(held_resources(), before, strict=True)))
    assert returned, (before, held_resources())
    grown = resident_bytes() - resident
    assert grown < (4 << 20), f"{grown} bytes more after {rounds} rounds"


ENDING = """
import sys, threading, time
from child import Memory
from tiering.storage.aio import AioContext, Fault, FaultPlan
import os
plan = FaultPlan((Fault("any", count=0, delay=0.1),))
context = AioContext(engine=sys.argv[2], block_size=4096, queue_depth=8, fault=plan)
fd = os.open(sys.argv[1], os.O_RDWR | os.O_TMPFILE | os.O_DIRECT)
file = context.add_file(fd, direct=True, name="swap")
memory = Memory(1 << 16)
tickets = [context.write(file, memory, 0, 1 << 16) for _ in range(4)]
tickets += [context.read(file, memory, 0, 1 << 16, after=tickets) for _ in range(4)]
for number in range(int(sys.argv[3])):
    wait = (lambda: context.wait_any(tickets[number:])) if number % 2 else tickets[number].wait
    threading.Thread(target=wait, daemon=True).start()
while not context.stats()[file].write.in_flight:
    time.sleep(0.001)
print("busy", flush=True)
exec(sys.argv[4])
"""


@pytest.mark.one_of(4)
@pytest.mark.parametrize("ending", ["pass", "del context, tickets", "memory = None; sys.exit(0)"])
@pytest.mark.parametrize("waiters", [0, 8])
def test_an_interpreter_ends_with_operations_in_flight(
    engine: str, swap_file: Any, tmp_path: Path, run_child: Callable[..., str], waiters: int, ending: str
) -> None:
    """Nobody closes, daemon threads wait for tickets: it exits with 0 and says nothing."""
    swap_file()  # skips where there are no such files
    assert run_child(ENDING, tmp_path, engine, waiters, ending) == "busy\n"
