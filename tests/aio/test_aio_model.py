"""Random interleavings of everything a context can be asked, with faults, against a model in memory.

Requests that touch the same bytes are ordered by ``after``, as storage does it; then the outcome must be that of doing
them one by one in the order of submission. Which operation a fault meets depends on the engine's timing, so a run is
judged when it is over: each failure must have a cause, and what was written, read and left alone must follow from the
results. The bytes that a failed write may or may not have replaced are unknown until they are written anew.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tiering.errors import SwapError
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.tickets import Ticket

PAGE = 4096
BLOCK, FILE = 2 * PAGE, 12 * PAGE
SLOT = FILE + 2 * PAGE  # of memory, for one request
RETRIED = (errno.EINTR, errno.EAGAIN)


def padded(nbytes: int, direct: bool) -> int:
    return -(-nbytes // PAGE) * PAGE if direct else nbytes


@dataclass(eq=False)
class Request:
    kind: str
    start: int
    nbytes: int
    buffer: Any
    content: bytes  # what the buffer held when it was submitted
    ticket: Ticket
    after: list[Request]
    over: bool = False  # somebody saw that it was done
    cancelled: bool = False  # whole, or what the kernel did not have
    result: int = field(default=0)  # bytes or -errno, known in the end

    def touches(self, kind: str, start: int, nbytes: int, direct: bool) -> bool:
        """Whether one of the two writes what the other transfers."""
        if "write" not in (kind, self.kind) or "flush" in (kind, self.kind):
            return False
        end = start + (padded(nbytes, direct) if kind == "write" else nbytes)
        own_end = self.start + (padded(self.nbytes, direct) if self.kind == "write" else self.nbytes)
        return nbytes > 0 and self.nbytes > 0 and self.start < end and start < own_end

    @property
    def poisons(self) -> bool:
        """Whether what is ordered behind it must not be issued: not for a read that was merely taken back."""
        return self.result < 0 and not (self.cancelled and self.kind == "read" and not self.poisoned)

    @property
    def poisoned(self) -> bool:
        return any(earlier.poisons for earlier in self.after)


class Run:
    """One context, the requests it was given, and the judgement."""

    def __init__(self, context: AioContext, fd: int, direct: bool, arena: Arena) -> None:
        self.context = context
        self.file = context.add_file(fd, direct=direct, name="swap")
        self.direct = direct
        self.arena = arena
        self.requests: list[Request] = []

    def submit(self, kind: str, start: int, nbytes: int, priority: int, extra: int) -> None:
        nbytes = 0 if kind == "flush" else nbytes
        after = [
            earlier
            for index, earlier in enumerate(self.requests)
            if (not earlier.over and earlier.touches(kind, start, nbytes, self.direct))
            or extra >> index % 30 & 1
        ]
        buffer = self.arena.slot(len(self.requests), unaligned=not self.direct)
        content = random.Random(len(self.requests)).randbytes(nbytes) if kind == "write" else b"\x55" * SLOT
        buffer.fill(content)
        tickets = [earlier.ticket for earlier in after]
        if kind == "flush":
            ticket = self.context.flush(self.file, after=tickets)
        else:
            order: dict[str, Any] = {"priority": priority, "after": tickets}
            # The same transfer, submitted page by page.
            if nbytes and nbytes % PAGE == 0 and len(self.requests) % 2:
                pages = range(start, start + nbytes, PAGE)
                ticket = getattr(self.context, f"{kind}_scattered")(self.file, buffer, pages, PAGE, **order)
            else:
                ticket = getattr(self.context, kind)(self.file, buffer, start, nbytes, **order)
        self.requests.append(Request(kind, start, nbytes, buffer, content, ticket, after))

    def ask(self, action: str, number: int) -> None:
        if not self.requests:
            return
        request = self.requests[number % len(self.requests)]
        if action == "wait":
            self.settle(request)
        elif action == "poll":
            request.over |= request.ticket.done()
        elif action == "wait briefly":
            try:
                request.ticket.wait(0.0005)
            except TimeoutError:
                return
            except SwapError:
                pass
            request.over = True
        elif action == "cancel":
            request.cancelled |= request.ticket.cancel()
        elif action == "wait for any":
            some = self.requests[number % len(self.requests) :: 2]
            first = self.context.wait_any([each.ticket for each in some])
            (winner,) = [each for each in some if each.ticket is first]
            assert first.done()
            winner.over = True

    def settle(self, request: Request) -> None:
        request.over = True
        try:
            request.result = request.ticket.wait()
        except SwapError as error:
            request.result = -(error.errno or 0)

    def judge(self, faults: Sequence[Fault], view_fd: int) -> None:
        for request in self.requests:
            self.settle(request)
            assert request.ticket.done()
        for request in self.requests:
            self.judge_result(request, faults)
        self.judge_bytes(view_fd)
        self.judge_counters()

    def judge_result(self, request: Request, faults: Sequence[Fault]) -> None:
        if request.cancelled or request.poisoned:
            assert request.result == -errno.ECANCELED
        elif request.result < 0:
            planned = {fault.error for fault in faults if fault.kind in (request.kind, "any")}
            # The reason for a mismatch is looked for below.
            mismatch = {errno.EBADMSG} if request.kind == "read" else set()
            assert -request.result in planned.difference({0}, RETRIED) | mismatch
        else:
            assert request.result == (0 if request.kind == "flush" else request.nbytes)

    def judge_bytes(self, view_fd: int) -> None:
        expected: list[int | None] = [0] * (FILE + BLOCK)  # None: unknown
        for index, request in enumerate(self.requests):
            end = request.start + request.nbytes
            if request.kind == "write":
                stop = request.start + padded(request.nbytes, self.direct)
                if request.result >= 0:
                    expected[request.start : stop] = request.content.ljust(stop - request.start, b"\0")
                elif request.result != -errno.ECANCELED or (request.cancelled and not request.poisoned):
                    expected[request.start : stop] = [None] * (stop - request.start)
            elif request.kind == "read":
                content = request.buffer.bytes()
                if request.result >= 0:
                    assert agree(expected[request.start : end], content[: request.nbytes]), index
                    assert content[request.nbytes :] == b"\x55" * (SLOT - request.nbytes), index
                elif request.poisoned:
                    assert content == b"\x55" * SLOT, index
                elif request.cancelled:
                    assert content[request.nbytes :] == b"\x55" * (SLOT - request.nbytes), index
                # A write failed there, and left what it was to replace.
                elif request.result == -errno.EBADMSG:
                    assert None in expected[request.start : end // PAGE * PAGE + PAGE], index
        assert agree(expected, os.pread(view_fd, FILE + BLOCK, 0))

    def judge_counters(self) -> None:
        stats = self.context.stats()[self.file]
        for kind in ("read", "write", "flush"):
            mine = [request for request in self.requests if request.kind == kind]
            moved = sum(request.nbytes for request in mine if request.result >= 0)
            failed = [r for r in mine if r.result < 0 and r.result != -errno.ECANCELED]
            cut = failed + [r for r in mine if r.cancelled]
            counted = getattr(stats, kind)
            assert counted.in_flight == 0
            assert counted.bytes == moved if not cut else counted.bytes >= moved
            assert counted.errors >= len(failed)
            assert cut or counted.errors == 0


def agree(expected: list[int | None], content: bytes) -> bool:
    return len(expected) == len(content) and all(
        h is None or h == g for h, g in zip(expected, content, strict=True)
    )


class Slot(SimpleNamespace):
    """A buffer of SLOT bytes."""

    def fill(self, content: bytes) -> None:
        self.memory[self.at : self.at + len(content)] = content

    def bytes(self) -> bytes:
        return bytes(self.memory[self.at : self.at + SLOT])


class Arena:
    """Memory for the requests of one run; of what is registered, some slots lie inside, outside or across the edge."""

    nbytes = 64 * (SLOT + PAGE)

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, self.nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def slot(self, index: int, *, unaligned: bool) -> Slot:
        at = index * (SLOT + PAGE) + (index * 7 % 5 if unaligned else 0)
        return Slot(memory=self.memory, at=at, address=self.address + at, nbytes=SLOT)

    def register(self, context: AioContext) -> None:
        third = self.nbytes // 3 // PAGE * PAGE
        context.register(SimpleNamespace(address=self.address + third, nbytes=third))
        context.register(SimpleNamespace(address=self.address + 2 * third, nbytes=PAGE))


EDGES = (0, 1, 511, 512, PAGE - 1, PAGE, PAGE + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 513)


def transfers(direct: bool) -> st.SearchStrategy[tuple[Any, ...]]:
    places = st.integers(0, 7).map(lambda page: page * PAGE)
    if not direct:
        places = st.one_of(places, st.integers(0, 7 * PAGE))
    lengths = st.one_of(st.sampled_from(EDGES), st.integers(0, 5 * PAGE))
    # The earlier transfers that it waits for, in addition to those it must wait for.
    after = st.one_of(st.just(0), st.integers(0, (1 << 30) - 1))
    kinds = st.sampled_from(["read", "write", "write", "read", "flush"])
    return st.tuples(st.just("submit"), kinds, places, lengths, st.integers(0, 2), after)


QUESTIONS = st.tuples(
    st.sampled_from(["wait", "poll", "wait briefly", "cancel", "wait for any"]), st.integers(0, 60)
)


def misfortunes(direct: bool) -> st.SearchStrategy[Fault]:
    kinds = st.sampled_from(["read", "write", "flush", "any"])
    shorts = st.sampled_from([512, PAGE, PAGE + 512]) if direct else st.integers(1, BLOCK)
    errors = st.sampled_from([errno.EIO, errno.ENOSPC, *RETRIED])
    first, count, many = st.integers(1, 12), st.integers(1, 3), st.integers(1, 9)
    return st.one_of(
        st.builds(Fault, kind=kinds, first=first, count=count, error=errors),
        st.builds(Fault, kind=kinds, first=first, count=many, short=shorts),
        st.builds(Fault, kind=kinds, first=first, count=count, delay=st.sampled_from([0.001, 0.003])),
        st.builds(Fault, kind=kinds, first=first, count=count, error=errors, delay=st.just(0.002)),
    )


def check(engine: str, swap_file: Any, direct: bool, examples: int) -> None:
    arena = Arena()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(
        # Not fewer: what goes wrong needs company. Shrinking makes the steps simple, not few.
        steps=st.lists(st.one_of(transfers(direct), transfers(direct), QUESTIONS), min_size=16, max_size=60),
        faults=st.one_of(st.just([]), st.lists(misfortunes(direct), min_size=2, max_size=6)),
        depth=st.integers(1, 6),
        registered=st.booleans(),
        verify=st.booleans(),
    )
    def interleave(
        steps: list[tuple[Any, ...]], faults: list[Fault], depth: int, registered: bool, verify: bool
    ) -> None:
        os.ftruncate(fd, 0)
        os.ftruncate(fd, FILE + BLOCK)
        plan = FaultPlan(tuple(faults)) if faults else None
        options: dict[str, Any] = {"block_size": BLOCK, "queue_depth": depth, "verify": verify}
        with AioContext(engine=engine, fault=plan, **options) as context:
            if registered:
                arena.register(context)
            run = Run(context, fd, direct, arena)
            for step in steps:
                if step[0] == "submit":
                    run.submit(*step[1:])
                else:
                    run.ask(*step)
            run.judge(faults, view_fd)

    fd = swap_file(direct=direct)
    view_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        interleave()
    finally:
        os.close(view_fd)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_any_interleaving_agrees_with_the_model(engine: str, swap_file: Any, direct: bool) -> None:
    check(engine, swap_file, direct, 10 if engine == "libaio" else 30)  # its contexts close slowly


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_very_many_interleavings_agree_with_the_model(engine: str, swap_file: Any, direct: bool) -> None:
    check(engine, swap_file, direct, 500)
