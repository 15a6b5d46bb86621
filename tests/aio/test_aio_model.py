"""Random interleavings of everything a context can be asked, with faults, against a model in memory.

Requests that touch the same bytes are ordered by ``after``, as storage does it; then the outcome must be that of doing
them one by one in the order of submission. Which operation a fault meets depends on the engine's timing, so a run is
judged when it is over: each failure must have a cause, and what was written, read and left alone must follow from the
results. The bytes that a failed write may or may not have replaced are unknown until they are written anew. A canceled
write has replaced some of its pages, each as a whole, and their checksums are right.

A request is a range of one file, its pages in one scattered request, or a vector: every other page is of a second file.
Some are begun by a run of tasks. Direct files also appear to be on a device with blocks of 16 KiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tiering.errors import SwapError
from tiering.storage.aio import AioContext, Fault, FaultPlan, FilePiece
from tiering.storage.tasks import Task
from tiering.storage.tickets import Ticket

PAGE = 4096
BLOCK, FILE, SIZE = 2 * PAGE, 12 * PAGE, 16 * PAGE
SLOT = FILE + 2 * PAGE  # of memory, for one request
RETRIED = (errno.EINTR, errno.EAGAIN)


def padded(nbytes: int, direct: bool) -> int:
    return -(-nbytes // PAGE) * PAGE if direct else nbytes


@dataclass(eq=False)
class Request:
    kind: str
    nbytes: int
    pieces: list[FilePiece]  # without padding
    buffer: Any
    content: bytes  # what the buffer held when it was submitted
    ticket: Ticket
    after: list[Request]
    over: bool = False  # somebody saw that it was done
    cancelled: bool = False  # whole, or what the kernel did not have
    result: int = field(default=0)  # bytes or -errno, known in the end

    def touches(self, kind: str, pieces: list[FilePiece], direct: bool) -> bool:
        """Whether one of the two writes what the other transfers."""
        if "write" not in (kind, self.kind):
            return False
        return any(
            own.file == other.file
            and own.offset < other.offset + padded(other.nbytes, direct)
            and other.offset < own.offset + padded(own.nbytes, direct)
            for own, other in product(self.pieces, pieces)
        )

    def poisons(self, later: Request) -> bool:
        """Whether ``later``, which is ordered behind it, must not be issued: not for a read that was merely taken back.

        A write only had to wait for a read, which may have failed.
        """
        by_itself = self.kind == "read" and not self.poisoned
        return self.result < 0 and not (by_itself and (self.cancelled or later.kind == "write"))

    @property
    def poisoned(self) -> bool:
        return any(earlier.poisons(self) for earlier in self.after)


class Content:
    """What a file may hold: bytes that are known or not, and pages of which each is one of several."""

    def __init__(self) -> None:
        self._known: list[int | None] = [0] * SIZE
        self._pages: dict[int, set[bytes]] = {}  # by offset

    def replace(self, start: int, content: bytes) -> None:
        self._known[start : start + len(content)] = content
        self._forget_pages(start, start + len(content))

    def forget(self, start: int, end: int) -> None:
        self._known[start:end] = [None] * (end - start)
        self._forget_pages(start, end)

    def replace_some(self, start: int, content: bytes) -> None:
        """Each whole page was replaced or not."""
        for at in range(start, start + len(content), PAGE):
            old = self._known[at : at + PAGE]
            if at not in self._pages and None in old:
                self.forget(at, at + PAGE)
                continue
            known = bytes(byte for byte in old if byte is not None)
            pages = self._pages.get(at, {known}) | {content[at - start : at - start + PAGE]}
            self.forget(at, at + PAGE)
            self._pages[at] = pages

    def is_unknown(self, start: int, end: int) -> bool:
        """Whether a byte of these pages could have any value."""
        pages = range(start // PAGE * PAGE, end, PAGE)
        return any(None in self._known[at : at + PAGE] for at in pages if at not in self._pages)

    def holds(self, start: int, content: bytes) -> bool:
        """Whether it may hold this; from then on it does."""
        for at, pages in self._pages.items():
            first, end = max(at, start), min(at + PAGE, start + len(content))
            if first < end:
                found = content[first - start : end - start]
                self._pages[at] = {page for page in pages if page[first - at : end - at] == found}
                if not self._pages[at]:
                    return False
        known = self._known[start : start + len(content)]
        return all(h is None or h == g for h, g in zip(known, content, strict=True))

    def _forget_pages(self, start: int, end: int) -> None:
        self._pages = {at: pages for at, pages in self._pages.items() if at >= end or at + PAGE <= start}


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def succeed(argument: int | None) -> int:
    return 0


SUCCESS = SimpleNamespace(function=ctypes.cast(succeed, ctypes.c_void_p).value, argument=0)


class Run:
    """One context, the requests it was given, and the judgement."""

    def __init__(
        self, context: AioContext, fds: Sequence[int], arena: Arena, *, direct: bool, merges: bool
    ) -> None:
        self.context = context
        self.merges = merges  # writes may read first
        self.files = [context.add_file(fd, direct=direct, name=f"swap {fd}") for fd in fds]
        self.direct = direct
        self.arena = arena
        self.requests: list[Request] = []

    def submit(self, kind: Any, start: int, nbytes: int, shape: str, priority: int, extra: int) -> None:
        file = self.files[len(self.requests) % 2]
        nbytes = 0 if kind == "flush" else nbytes
        pages = range(start, start + nbytes, PAGE)
        pieces = [FilePiece(file, 0, start, nbytes)] if nbytes else []
        if shape == "vector":
            pieces = [
                FilePiece(self.files[n % 2], n * PAGE, at, min(PAGE, start + nbytes - at))
                for n, at in enumerate(pages)
            ]
        after = [
            earlier
            for index, earlier in enumerate(self.requests)
            if (not earlier.over and earlier.touches(kind, pieces, self.direct)) or extra >> index % 30 & 1
        ]
        buffer = self.arena.slot(len(self.requests), unaligned=not self.direct)
        content = random.Random(len(self.requests)).randbytes(nbytes) if kind == "write" else b"\x55" * SLOT
        buffer.fill(content)
        options: dict[str, Any] = {"priority": priority, "after": [earlier.ticket for earlier in after]}
        if kind == "flush":
            ticket = self.context.flush(file, after=options["after"])
        elif shape == "vector" and pieces:
            ticket = self.context.prepare_vector(kind, buffer, pieces, **options)
        elif shape == "scattered" and nbytes and nbytes % PAGE == 0:
            ticket = self.context.prepare_scattered(kind, file, buffer, pages, PAGE, **options)
        else:
            ticket = self.context.prepare(kind, file, buffer, start, nbytes, **options)
        if not ticket.has_begun and len(self.requests) % 3:
            ticket.begin()
        elif not ticket.has_begun:
            self.context.run([Task([], SUCCESS, [ticket])])
        self.requests.append(Request(kind, nbytes, pieces, buffer, content, ticket, after))

    def ask(self, action: str, number: int) -> None:
        if not self.requests:
            return
        request = self.requests[number % len(self.requests)]
        if action == "wait":
            self.settle(request)
        elif action == "poll":
            request.over |= request.ticket.done()
        elif action == "wait briefly":
            with contextlib.suppress(TimeoutError):
                self.settle(request, 0.0005)
        elif action == "cancel":
            request.cancelled |= request.ticket.cancel()
        elif action == "wait for any":
            some = self.requests[number % len(self.requests) :: 2]
            first = self.context.wait_any([each.ticket for each in some])
            (winner,) = [each for each in some if each.ticket is first]
            assert first.done()
            winner.over = True

    def settle(self, request: Request, timeout: float | None = None) -> None:
        try:
            request.result = request.ticket.wait(timeout)
        except SwapError as error:
            request.result = -(error.errno or 0)
        request.over = True

    def judge(self, faults: Sequence[Fault], view_fds: Sequence[int]) -> None:
        for request in self.requests:
            self.settle(request)
            assert request.ticket.done()
        errors = {(fault.kind, fault.error) for fault in faults if fault.error not in (0, *RETRIED)}
        for request in self.requests:
            self.judge_result(request, errors)
        contents = {file: Content() for file in self.files}
        for index, request in enumerate(self.requests):
            if request.kind == "write":
                self.judge_write(request, contents, may_fail=bool(errors))
            elif request.kind == "read":
                self.judge_read(request, contents, index)
        for file, view_fd in zip(self.files, view_fds, strict=True):
            assert contents[file].holds(0, os.pread(view_fd, SIZE, 0))
        self.judge_counters()

    def judge_result(self, request: Request, errors: set[tuple[str, int]]) -> None:
        # Of a vector, one file may fail and another one be canceled.
        several = request.cancelled and len({piece.file for piece in request.pieces}) > 1
        if request.poisoned or (request.cancelled and not several):
            assert request.result == -errno.ECANCELED
        elif request.result < 0:
            kinds = {request.kind, "any"} | ({"read"} if request.kind == "write" and self.merges else set())
            planned = {error for kind, error in errors if kind in kinds}
            # The reason for a mismatch is looked for below.
            mismatch = {errno.EBADMSG} if request.kind == "read" else set()
            assert -request.result in planned | mismatch | ({errno.ECANCELED} if several else set())
        else:
            assert not request.cancelled
            assert request.result == (0 if request.kind == "flush" else request.nbytes)

    def judge_write(self, request: Request, contents: dict[int, Content], *, may_fail: bool) -> None:
        if request.poisoned:
            return
        for file, at, start, nbytes in request.pieces:
            length = padded(nbytes, self.direct)
            content = request.content[at : at + nbytes].ljust(length, b"\0")
            if request.result >= 0:
                contents[file].replace(start, content)
            elif self.direct and not may_fail:
                contents[file].replace_some(start, content)
            else:
                contents[file].forget(start, start + length)

    def judge_read(self, request: Request, contents: dict[int, Content], index: int) -> None:
        content = request.buffer.bytes()
        assert content[request.nbytes :] == b"\x55" * (SLOT - request.nbytes), index
        if request.poisoned:
            assert content == b"\x55" * SLOT, index
        elif request.result >= 0:
            for file, at, start, nbytes in request.pieces:
                assert contents[file].holds(start, content[at : at + nbytes]), index
        # A write failed there, and left what it was to replace.
        elif request.result == -errno.EBADMSG:
            pieces = request.pieces
            assert any(contents[file].is_unknown(start, start + nbytes) for file, _, start, nbytes in pieces)

    def judge_counters(self) -> None:
        stats = [self.context.stats()[file] for file in self.files]
        for kind in ("read", "write", "flush"):
            mine = [request for request in self.requests if request.kind == kind]
            moved = sum(request.nbytes for request in mine if request.result >= 0)
            failed = [r for r in mine if r.result < 0 and r.result != -errno.ECANCELED]
            cut = failed + [r for r in mine if r.cancelled]
            counted = [getattr(each, kind) for each in stats]
            nbytes, errors = sum(each.bytes for each in counted), sum(each.errors for each in counted)
            assert [each.in_flight for each in counted] == [0, 0]
            assert nbytes == moved if not cut else nbytes >= moved
            assert errors >= len(failed)
            assert cut or errors == 0


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
    shapes = st.sampled_from(["range", "scattered", "vector"])
    return st.tuples(st.just("submit"), kinds, places, lengths, shapes, st.integers(0, 2), after)


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
        alignment=st.sampled_from([0, 16384]) if direct else st.just(0),
    )
    def interleave(
        steps: list[tuple[Any, ...]],
        faults: list[Fault],
        depth: int,
        registered: bool,
        verify: bool,
        alignment: int,
    ) -> None:
        for fd in fds:
            os.ftruncate(fd, 0)
            os.ftruncate(fd, SIZE)
        plan = FaultPlan(tuple(faults), alignment) if faults or alignment else None
        options: dict[str, Any] = {"block_size": BLOCK, "queue_depth": depth, "verify": verify}
        with AioContext(engine=engine, fault=plan, **options) as context:
            if registered:
                arena.register(context)
            run = Run(context, fds, arena, direct=direct, merges=alignment > 0)
            for step in steps:
                if step[0] == "submit":
                    run.submit(*step[1:])
                else:
                    run.ask(*step)
            run.judge(faults, view_fds)

    fds = [swap_file(direct=direct) for _ in range(2)]
    view_fds = [os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC) for fd in fds]
    try:
        interleave()
    finally:
        for view_fd in view_fds:
            os.close(view_fd)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_any_interleaving_agrees_with_the_model(engine: str, swap_file: Any, direct: bool) -> None:
    check(engine, swap_file, direct, 10 if engine == "libaio" else 30)  # its contexts close slowly


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_very_many_interleavings_agree_with_the_model(engine: str, swap_file: Any, direct: bool) -> None:
    check(engine, swap_file, direct, 500)
