"""Runs of tasks: calls between transfers, each as soon as its transfers are done, and nothing lost when one fails."""

from __future__ import annotations

import ctypes
import errno
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tiering.errors import SwapError
from tiering.storage.aio import Fault
from tiering.storage.tasks import Task

PAGE = 4096


class Calling:
    """A call of C that runs ``action``, which returns its answer."""

    def __init__(self, action: Callable[[], int]) -> None:
        self._called = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: action())
        self.function = ctypes.cast(self._called, ctypes.c_void_p).value or 0
        self.argument = 0


@pytest.fixture
def on_file(open_context: Any, swap_file: Any, memory: Any) -> Callable[..., tuple[Any, int]]:
    """A context with these faults, and a file of 8 pages: page n is full of byte n."""

    def make(*faults: Fault) -> tuple[Any, int]:
        context = open_context(Fault("write"), *faults)
        file = context.add_file(swap_file(), direct=True, name="swap")
        content = b"".join(bytes([number]) * PAGE for number in range(8))
        context.write(file, memory(content), 0, 8 * PAGE).wait()
        return context, file

    return make


def test_each_runs_when_its_reads_are_done_and_its_slot_goes_on(on_file: Any, memory: Any) -> None:
    context, file = on_file(Fault("read", delay=1.0))
    slots = [memory(PAGE), memory(PAGE)]
    calls: list[int] = []

    def call(number: int) -> Calling:
        def act() -> int:
            calls.append(slots[number % 2].bytes()[0])
            slots[number % 2].fill(bytes([10 + number]) * PAGE)
            return 0

        return Calling(act)

    def prepare(kind: Any, number: int, **options: Any) -> Any:
        return context.prepare(kind, file, slots[number % 2], number * PAGE, PAGE, **options)

    reads = {number: prepare("read", number).begin() for number in (0, 1)}  # the first is late
    writes = {number: prepare("write", number) for number in range(4)}
    reads |= {number: prepare("read", number, after=[writes[number - 2]]) for number in (2, 3)}
    context.start_recording()
    tasks = [Task([reads[n]], call(n), [writes[n], reads[n + 2]] if n < 2 else [writes[n]]) for n in range(4)]
    context.run(tasks)
    assert sorted(calls) == [0, 1, 2, 3] and calls[:2] == [1, 3]
    records = context.end_recording()
    assert sorted((r.kind, r.offset // PAGE) for r in records) == [
        *(("read", number) for number in range(4)),
        *(("write", number) for number in range(4)),
    ]
    for record in records:
        if record.kind == "write":
            task = tasks[record.offset // PAGE]
            assert task.began <= task.ended <= record.submitted <= record.issued
    # The first to run behind the late read ended a wait.
    assert tasks[3].ended <= tasks[0].idle < tasks[0].began
    back = memory(4 * PAGE)
    assert context.read(file, back, 0, 4 * PAGE).wait() == 4 * PAGE
    assert back.bytes() == b"".join(bytes([10 + number]) * PAGE for number in range(4))


@pytest.mark.parametrize("failing", ["read", "call", "submission", "interrupt"])
def test_what_fails_stops_it_and_leaves_the_rest_as_it_was(on_file: Any, memory: Any, failing: str) -> None:
    faults = {
        "read": [Fault("read", first=2, error=errno.ENXIO)],
        "interrupt": [Fault("read", first=2, delay=1.0)],
    }
    context, file = on_file(*faults.get(failing, []))
    slots = [memory(PAGE) for _ in range(3)]
    reads = [context.read(file, slots[0], 0, PAGE)]
    reads[0].wait()
    reads += [context.read(file, slot, n * PAGE, PAGE) for n, slot in enumerate(slots[1:], 1)]
    begins = [
        context.prepare("write", file, slot, n * PAGE + (failing == "submission" and n == 1), PAGE)
        for n, slot in enumerate(slots)
    ]
    answers = {1: -errno.EDOM} if failing == "call" else {}
    # Each waits for all reads before its own.
    tasks = [
        Task(reads[: n + 1], Calling(lambda n=n: slots[n].fill(b"x" * PAGE) or answers.get(n, 0)), [write])
        for n, write in enumerate(begins)
    ]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupted)
    try:
        if failing == "interrupt":
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                context.run(tasks)
        elif failing == "submission":
            with pytest.raises(SwapError, match=r"offset \(4097\) to be multiples of 4096"):
                context.run(tasks)
        else:
            context.run(tasks)
    finally:
        signal.signal(signal.SIGALRM, before)
    ran = failing in ("call", "submission")
    assert [bool(task.ended) for task in tasks] == [True, ran, False]
    assert [task.answer for task in tasks] == [0, answers.get(1, 0), 0]
    assert [ticket.has_begun for ticket in begins] == [True, False, False]
    assert begins[0].wait() == PAGE
    if failing == "read":
        with pytest.raises(SwapError, match="ENXIO"):
            reads[1].wait()
    back = memory(2 * PAGE)
    assert context.read(file, back, 0, 2 * PAGE).wait() == 2 * PAGE
    assert back.bytes() == b"x" * PAGE + b"\x01" * PAGE
