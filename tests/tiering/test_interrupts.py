"""Ctrl-C in the instant of a submission: the transfer is noted, ordered, and over before its memory is used again."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiering import aio as aio_module
from tiering.aio import AioContext, Fault, FaultPlan
from tiering.arena import PAGE, Arena, Lease
from tiering.errors import SwapError
from tiering.interrupts import deferred_interrupts
from tiering.storage import SlabFile


class Interrupting:
    """The C library, whose next submission is interrupted just as it returns."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.armed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def aio_submit(self, *arguments: Any) -> int:
        ticket: int = self.real.aio_submit(*arguments)
        if self.armed:
            self.armed = False
            signal.raise_signal(signal.SIGINT)
        return ticket


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupting]:
    library = Interrupting(aio_module.lib)
    monkeypatch.setattr(aio_module, "lib", library)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield library
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def arena() -> Arena:
    return Arena.map(PAGE, "staging")


def slab_on(engine: str, directory: Path, *faults: Fault) -> SlabFile:
    return SlabFile(directory, 8 * PAGE, AioContext(engine=engine, fault=FaultPlan(faults)))


def close(slab: SlabFile) -> None:
    slab.aio.close()
    slab.close()


def filled(arena: Arena, mark: bytes) -> Lease:
    lease = arena.lease(PAGE, "staging")
    lease.view[:] = mark * PAGE
    return lease


def test_an_interrupted_read_does_not_land_in_the_next_holders_memory(
    engine: str, tmp_path: Path, arena: Arena, ctrl_c: Interrupting
) -> None:
    slab = slab_on(engine, tmp_path, Fault("read", delay=0.1))
    extent = slab.allocate(PAGE, ("w",))
    lease = filled(arena, b"w")
    slab.swap_out(extent, lease).wait()
    ctrl_c.armed = True
    with pytest.raises(KeyboardInterrupt):
        slab.swap_in(extent, lease)
    slab.settle(extent)
    assert slab.aio.stats()[slab.file].read.bytes == PAGE  # it was begun, and is over
    lease.release()
    close(slab)


def test_an_interrupted_write_is_waited_for_by_those_who_read_it(
    engine: str, tmp_path: Path, arena: Arena, ctrl_c: Interrupting
) -> None:
    slab = slab_on(engine, tmp_path, Fault("write", first=2, delay=0.1))
    extent = slab.allocate(PAGE, ("w",))
    lease = filled(arena, b"o")
    slab.swap_out(extent, lease).wait()
    lease.view[:] = b"n" * PAGE
    ctrl_c.armed = True
    with pytest.raises(KeyboardInterrupt):
        slab.swap_out(extent, lease)
    back = Arena.map(PAGE, "back").lease(PAGE, "back")
    slab.swap_in(extent, back).wait()
    assert bytes(back.view) == b"n" * PAGE
    close(slab)


def test_an_interrupted_write_that_fails_is_told(
    engine: str, tmp_path: Path, arena: Arena, ctrl_c: Interrupting
) -> None:
    slab = slab_on(engine, tmp_path, Fault("write", error=errno.EIO))
    extent = slab.allocate(PAGE, ("w",))
    ctrl_c.armed = True
    with pytest.raises(KeyboardInterrupt):
        slab.swap_out(extent, filled(arena, b"n"))
    slab.settle(extent)
    with pytest.raises(SwapError, match="EIO"):
        slab.swap_in(extent, Arena.map(PAGE, "back").lease(PAGE, "back"))
    close(slab)


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
