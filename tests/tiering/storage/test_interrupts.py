"""Ctrl-C in the instant of a submission: the transfer is noted, ordered, and over before its memory is used again.

And what is held back where no signal may cut in.
"""

from __future__ import annotations

import ctypes
import errno
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.signals import HANDLERS, RAISED
from tiering import _interrupts
from tiering._interrupts import DEFERRED_SIGNALS, StopRequest, atomic, deferred_interrupts
from tiering.errors import SwapError
from tiering.storage import tickets
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import PAGE, Arena, Lease
from tiering.storage.swap_space import Section, SwapSpace


class Interrupting:
    """The C library, whose next submission is interrupted just as it returns."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.armed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def aio_submit_vector(self, *arguments: Any) -> int:
        ticket: int = self.real.aio_submit_vector(*arguments)
        if self.armed:
            self.armed = False
            signal.raise_signal(signal.SIGINT)
        return ticket


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupting]:
    library = Interrupting(tickets.lib)
    monkeypatch.setattr(tickets, "lib", library)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield library
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def arena() -> Arena:
    return Arena.map(PAGE, "staging")


def space_on(engine: str, directory: Path, *faults: Fault) -> SwapSpace:
    aio = AioContext(engine=engine, fault=FaultPlan(faults))
    return SwapSpace({"state": Section(8 * PAGE, (directory,))}, aio)


def close(space: SwapSpace) -> None:
    space.slabs[0].aio.close()
    space.close()


def filled(arena: Arena, mark: bytes) -> Lease:
    lease = arena.lease(PAGE, "staging")
    lease.view[:] = mark * PAGE
    return lease


def test_an_interrupted_read_does_not_land_in_the_next_holders_memory(
    engine: str, tmp_path: Path, arena: Arena, ctrl_c: Interrupting
) -> None:
    space = space_on(engine, tmp_path, Fault("read", delay=0.1))
    extent = space.allocate(PAGE, ("w",), "state")
    lease = filled(arena, b"w")
    space.swap_out(extent, lease).wait()
    ctrl_c.armed = True
    with pytest.raises(KeyboardInterrupt):
        space.swap_in(extent, lease)
    space.settle(extent)
    assert space.slabs[0].aio.stats()[space.slabs[0].file].read.bytes == PAGE  # it was begun, and is over
    lease.release()
    close(space)


def test_an_interrupted_write_is_waited_for_by_those_who_read_it(
    engine: str, tmp_path: Path, arena: Arena, ctrl_c: Interrupting
) -> None:
    space = space_on(engine, tmp_path, Fault("write", first=2, delay=0.1))
    extent = space.allocate(PAGE, ("w",), "state")
    lease = filled(arena, b"o")
    space.swap_out(extent, lease).wait()
    lease.view[:] = b"n" * PAGE
    ctrl_c.armed = True
    with pytest.raises(KeyboardInterrupt):
        space.swap_out(extent, lease)
    back = Arena.map(PAGE, "back").lease(PAGE, "back")
    space.swap_in(extent, back).wait()
    assert bytes(back.view) == b"n" * PAGE
    close(space)


def test_an_interrupted_write_that_fails_is_told(
    engine: str, tmp_path: Path, arena: Arena, ctrl_c: Interrupting
) -> None:
    space = space_on(engine, tmp_path, Fault("write", error=errno.EIO))
    extent = space.allocate(PAGE, ("w",), "state")
    ctrl_c.armed = True
    with pytest.raises(KeyboardInterrupt):
        space.swap_out(extent, filled(arena, b"n"))
    space.settle(extent)
    with pytest.raises(SwapError, match="EIO"):
        space.swap_in(extent, Arena.map(PAGE, "back").lease(PAGE, "back"))
    close(space)


def test_nested_blocks_hold_one_interrupt_until_the_outermost_ends(ctrl_c: Interrupting) -> None:
    done = []

    def nested() -> None:
        with deferred_interrupts():
            with deferred_interrupts():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("polls", [False, True])
def test_no_signal_interrupts_an_atomic_block(ctrl_c: Interrupting, nested: bool, polls: bool) -> None:
    """Not even a second one, except where the block polls; it is handled at the end of the block."""
    done = []

    def press_twice() -> None:
        with deferred_interrupts() if nested else nullcontext():
            with atomic():
                with atomic():
                    signal.raise_signal(signal.SIGINT)
                    signal.raise_signal(signal.SIGINT)
                    done.append("inner")
                done.append("outer")
                if polls:
                    atomic.poll()
                    done.append("polled")
            done.append("end")

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert done == ["inner", "outer"]
    assert (atomic.depth, signal.getsignal(signal.SIGINT)) == (0, signal.default_int_handler)


def test_a_first_signal_in_an_atomic_block_waits_for_the_end_of_the_outer_one(ctrl_c: Interrupting) -> None:
    done = []

    def press() -> None:
        with deferred_interrupts():
            with atomic():
                signal.raise_signal(signal.SIGINT)
                atomic.poll()
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        press()
    assert done == ["whole"]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Handlers that raise."""
    before = {number: signal.signal(number, handler) for number, handler in HANDLERS.items()}
    yield
    assert {number: signal.getsignal(number) for number in HANDLERS} == HANDLERS
    for number, handler in before.items():
        signal.signal(number, handler)


def hold_for(seconds: float, *numbers: int) -> None:
    with deferred_interrupts():
        for number in numbers:
            signal.raise_signal(number)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass


@pytest.mark.parametrize("number", HANDLERS)
def test_every_signal_whose_handler_raises_waits(handlers: None, number: int) -> None:
    done = []

    def hold() -> None:
        with deferred_interrupts():
            signal.raise_signal(number)
            done.append("whole")

    with pytest.raises(RAISED):
        hold()
    assert done == ["whole"]


def test_every_signal_that_is_held_is_answered(handlers: None) -> None:
    numbers = []
    before = signal.signal(signal.SIGHUP, lambda number, frame: numbers.append(number))
    try:
        with pytest.raises(RAISED):
            hold_for(0, signal.SIGALRM, signal.SIGHUP, signal.SIGTERM)
        assert numbers == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_is_not_held_for_ever(handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog's would not come again: the block may hang."""
    monkeypatch.setattr(_interrupts, "GRACE_SECONDS", 0.05)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        hold_for(20, signal.SIGALRM)
    assert 0.05 <= time.monotonic() - began < 20
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C has no watchdog
        hold_for(0.2, signal.SIGINT)
    assert time.monotonic() - began >= 0.2


def test_a_handler_that_only_takes_note_is_called_at_once() -> None:
    request = StopRequest(["SIGUSR1"])
    try:
        with deferred_interrupts():
            signal.raise_signal(signal.SIGUSR1)
            assert request.received == "SIGUSR1"
    finally:
        request.restore()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_handler_in_c_stays(handlers: None, number: int) -> None:
    """As gdb stubs, MPI launchers and debuggers install one; Python does not know of it."""
    assert number in DEFERRED_SIGNALS
    libc, hits = ctypes.CDLL(None), []

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def note(caught: int) -> None:
        hits.append(caught)

    libc.signal.restype = ctypes.c_void_p
    before = libc.signal(number, note)
    try:
        with deferred_interrupts():
            signal.raise_signal(number)
            assert hits == [number]
        signal.raise_signal(number)
        assert hits == [number] * 2
    finally:
        libc.signal(number, ctypes.c_void_p(before))
