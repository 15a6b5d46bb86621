"""A failure is told truthfully: to whoever waits, or at the latest when the context closes."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiering.errors import SwapError
from tiering.storage import request as request_module
from tiering.storage.aio import FEW_BEGUN, AioContext, Fault, FaultPlan
from tiering.storage.arena import Arena
from tiering.storage.tasks import Task
from tiering.storage.tickets import AllOf, Ticket

PAGE = 4096


def test_a_failure_that_was_only_polled_is_raised_by_close(engine: str, swap_file: Any, memory: Any) -> None:
    context = AioContext(engine=engine, fault=FaultPlan((Fault("read", error=errno.ENXIO),)))
    ticket = context.read(context.add_file(swap_file(PAGE), direct=True, name="swap"), memory(PAGE), 0, PAGE)
    while not ticket.done():
        pass
    with pytest.raises(SwapError, match="ENXIO"):
        context.close()
    with pytest.raises(SwapError, match="ENXIO"):  # who asks later is told, too
        ticket.wait()


def test_a_failure_that_was_told_is_not_raised_again(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(Fault("read", error=errno.ENXIO))
    ticket = context.read(context.add_file(swap_file(PAGE), direct=True, name="swap"), memory(PAGE), 0, PAGE)
    with pytest.raises(SwapError):
        ticket.wait()
    context.close()


@pytest.mark.parametrize(
    "arguments", [{"offset": 2**64}, {"offset": 2**64, "nbytes": 0}, {"priority": 2**40}]
)
def test_numbers_that_c_cannot_hold_are_refused_and_leave_nothing(
    open_context: Any, swap_file: Any, memory: Any, arguments: dict[str, int]
) -> None:
    context = open_context()
    file = context.add_file(swap_file(PAGE), direct=True, name="swap")
    buffer = memory(PAGE)
    reference = weakref.ref(buffer)
    with pytest.raises(ValueError, match="64 bits do not hold it"):
        context.read(file, buffer, **{"offset": 0, "nbytes": PAGE, **arguments})
    del buffer
    gc.collect()
    assert reference() is None


def test_what_was_never_issued_tells_its_own_place_and_why(
    open_context: Any, swap_file: Any, memory: Any, failure: Callable[..., tuple[int, str]]
) -> None:
    context = open_context(Fault("write", error=errno.EIO, delay=0.05))
    file = context.add_file(swap_file(64 * PAGE), direct=True, name="swap")
    write = context.write(file, memory(PAGE), 16 * PAGE, PAGE)
    behind = context.read(file, memory(PAGE), 32 * PAGE, PAGE, after=[write])
    taken_back = context.read(file, memory(PAGE), 48 * PAGE, PAGE, after=[write])
    assert taken_back.cancel()
    for ticket, offset, reason in (
        (write, 16 * PAGE, "failed: EIO"),
        (behind, 32 * PAGE, "it was never issued, because an earlier transfer failed: [TIER-IO] write"),
        (taken_back, 48 * PAGE, "it was canceled by cancel()"),
    ):
        with pytest.raises(SwapError) as caught:
            ticket.wait()
        assert caught.value.offset == offset
        assert reason in str(caught.value)
        assert "at byte" not in str(caught.value)


def test_the_cause_of_a_long_chain_is_found_in_its_length(
    open_context: Any, swap_file: Any, memory: Any
) -> None:
    """Each comes after all before it: as many paths lead back as there are subsets."""
    context = open_context(Fault("write", first=1, delay=0.2))
    file = context.add_file(swap_file(PAGE), direct=True, name="swap")
    tickets = [context.write(file, memory(PAGE), 0, PAGE)]
    tickets.append(context.write(file, memory(PAGE), 0, PAGE, after=tickets))
    assert tickets[1].cancel()
    for _ in range(60):
        tickets.append(context.write(file, memory(PAGE), 0, PAGE, after=tickets))
    with pytest.raises(
        SwapError, match=r"because an earlier transfer failed: .* it was canceled by cancel\(\)"
    ):
        tickets[-1].wait()


FORKED_IN_CLOSE = """
import os, sys, threading, time, warnings
from child import Memory
from tiering.storage.aio import FEW_BEGUN, AioContext, Fault, FaultPlan
warnings.simplefilter("ignore", DeprecationWarning)  # newer interpreters dislike a fork beside threads
fd = os.open(sys.argv[1], os.O_RDWR | os.O_TMPFILE | os.O_DIRECT)
context = AioContext(engine=sys.argv[2], fault=FaultPlan((Fault("write", delay=0.4),)))
file = context.add_file(fd, direct=True, name="swap")
buffer = Memory(4096)
context.write(file, buffer, 0, 4096)
while context.stats()[file].write.in_flight == 0:
    pass
closing = threading.Thread(target=context.close)
closing.start()
while not context._closed:
    pass
time.sleep(0.05)
child = os.fork()
if child == 0:
    links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name != "3"
             and os.path.exists(f"/proc/self/fd/{name}")]
    os._exit(sum("io_uring" in link or "eventfd" in link for link in links))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
closing.join()
"""


def test_a_child_forked_during_close_holds_nothing(
    engine: str, run_child: Callable[..., str], tmp_path: Path
) -> None:
    """An io_uring holds the files it knows, and with them the swap space."""
    assert run_child(FORKED_IN_CLOSE, tmp_path, engine) == "0\n"


def test_a_dropped_failure_is_raised_in_the_thread_that_began_it(
    open_context: Any, swap_file: Any, memory: Any
) -> None:
    context = open_context(Fault("write", error=errno.EIO))
    file = context.add_file(swap_file(PAGE), direct=True, name="swap")
    errors: list[SwapError] = []
    dropped, looked = threading.Event(), threading.Event()

    def begin() -> None:
        context.write(file, memory(PAGE), 0, PAGE, names=("w",))
        dropped.set()
        assert looked.wait(20)
        try:
            for _ in range(FEW_BEGUN):
                context.read(file, memory(PAGE), 0, PAGE).wait()
        except SwapError as error:
            errors.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    assert dropped.wait(20)
    while not context.stats()[file].write.errors:
        time.sleep(0.001)
    for _ in range(2 * FEW_BEGUN):  # an innocent thread
        assert context.read(file, memory(PAGE), 0, PAGE).wait() == PAGE
    looked.set()
    thread.join()
    assert [error.names for error in errors] == [("w",)]


def test_a_dropped_failure_of_a_thread_that_is_gone_is_raised_by_close(
    engine: str, swap_file: Any, memory: Any
) -> None:
    context = AioContext(engine=engine, fault=FaultPlan((Fault("write", error=errno.EIO),)))
    file = context.add_file(swap_file(PAGE), direct=True, name="swap")
    thread = threading.Thread(target=lambda: context.write(file, memory(PAGE), 0, PAGE))
    thread.start()
    thread.join()
    assert context.read(file, memory(PAGE), 0, PAGE).wait() == PAGE
    with pytest.raises(SwapError, match="EIO"):
        context.close()


def test_writes_that_are_cancelled_use_nothing_up(engine: str, swap_file: Any, memory: Any) -> None:
    late = FaultPlan((Fault("write", first=1, delay=0.5),))
    with AioContext(engine=engine, queue_depth=1, fault=late) as context:
        file, buffer = context.add_file(swap_file(PAGE), direct=True, name="swap"), memory(PAGE)
        before = context.write(file, buffer, 0, PAGE)
        slots, cancelled = set(), 0
        while not before.done():
            write = context.write(file, buffer, 0, PAGE)
            if write.cancel():
                with pytest.raises(SwapError, match="canceled by cancel"):
                    write.wait()
                with pytest.raises(SwapError, match="canceled by cancel"):  # as long as it can be named
                    context.read(file, buffer, 0, PAGE, after=[write]).wait()
                slots.add(write._request.id & 0xFFFFF)
                cancelled += 1
        assert len(slots) < 16 < cancelled


def wait_for_ticket(context: AioContext, ticket: Ticket) -> None:
    ticket.wait()


def wait_for_any(context: AioContext, ticket: Ticket) -> None:
    context.wait_any([ticket])


def wait_for_room(context: AioContext, ticket: Ticket) -> None:
    arena = Arena.map(PAGE, "host")
    arena.lease(PAGE, "read").retire(AllOf([ticket]))
    arena.lease(PAGE, "next")


def wait_in_a_run(context: AioContext, ticket: Ticket) -> None:
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda argument: 0)
    function = ctypes.cast(call, ctypes.c_void_p).value
    task = Task([ticket], SimpleNamespace(function=function, argument=0), [])
    context.run([task])
    assert task.idle < task.began <= task.ended


def read_counters(context: AioContext, ticket: Ticket) -> None:
    while not ticket.done():
        context.stats()
        time.sleep(0.01)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("wait", [wait_for_ticket, wait_for_any, wait_for_room, wait_in_a_run, read_counters])
def test_a_hung_operation_is_logged_whoever_waits(
    swap_file: Any,
    memory: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wait: Callable[[AioContext, Ticket], None],
) -> None:
    # The write takes longer than that in all, and each of its parts much less, also on a busy machine.
    monkeypatch.setattr(request_module, "HANG_SECONDS", 0.7)
    hang, slow = Fault("read", first=1, count=1, delay=1.5), Fault("write", count=0, delay=0.12)
    with AioContext(block_size=PAGE, queue_depth=1, fault=FaultPlan((hang, slow))) as context:
        file = context.add_file(swap_file(8 * PAGE), direct=True, name="the drive")
        with caplog.at_level(logging.WARNING, "tiering.storage.tickets"):
            context.write(file, memory(8 * PAGE), 0, 8 * PAGE).wait()
            assert caplog.messages == []
            ticket = context.read(file, memory(PAGE), 0, PAGE, names=("w",))
            wait(context, ticket)
            assert ticket.wait() == PAGE
    (message,) = caplog.messages
    assert message.startswith(
        "the read of 'w' (4096 bytes) at offset 0 GiB of the drive is not done, because"
    )
    assert "the drive, or the network behind it, may hang; see dmesg" in message


@pytest.mark.one_of(3)
def test_a_hang_is_logged_again_and_beside_transfers_that_end(
    engine: str,
    swap_file: Any,
    memory: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A part of the drive hangs, and the other part works: whoever waits for that names what hangs."""
    monkeypatch.setattr(request_module, "HANG_SECONDS", 0.1)
    plan = FaultPlan((Fault("read", first=1, delay=1.2),))
    with AioContext(engine=engine, block_size=PAGE, fault=plan) as context:
        file = context.add_file(swap_file(2 * PAGE), direct=True, name="the drive")
        hung = context.read(file, memory(PAGE), 0, PAGE, names=("hung",))
        with caplog.at_level(logging.WARNING, "tiering.storage.tickets"):
            while not hung.done():
                context.write(file, memory(PAGE), PAGE, PAGE, names=("quick",)).wait()
                context.stats()
    of_the_hung = [message for message in caplog.messages if "the read of 'hung'" in message]
    assert len(of_the_hung) == 2  # after once and six times HANG_SECONDS


CRASHES = """
import ctypes, faulthandler, mmap, os, sys
from types import SimpleNamespace
from tiering.storage.aio import AioContext
faulthandler.enable()
content = os.open(sys.argv[1], os.O_TMPFILE | os.O_RDWR, 0o600)
os.ftruncate(content, 4096)
mapping = mmap.mmap(content, 4096)
memory = SimpleNamespace(address=ctypes.addressof(ctypes.c_char.from_buffer(mapping)), nbytes=4096)
os.ftruncate(content, 0)  # who reads the memory meets a bus error; here that is the thread that sums what is written
context = AioContext(engine="threads", verify=True)
file = context.add_file(os.open(sys.argv[1], os.O_TMPFILE | os.O_RDWR, 0o600), direct=False, name="swap")
context.write(file, memory, 0, 4096).wait()
"""


def test_a_crash_in_a_thread_of_ours_is_told(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CRASHES, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in ran.stderr
