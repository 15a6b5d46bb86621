"""Tasks: calls of C between transfers, which one call of C runs, from a completion to the next submissions.

The GIL is released for a whole run of tasks, so other threads of Python do not delay it. All transfers of a run are
prepared before it and stored where their owners find them, as always: C stores the ticket of each when it submits it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tiering._aio import ffi, lib
from tiering._interrupts import atomic
from tiering.storage.request import Request
from tiering.storage.tickets import SLICE_NS, Ticket, Transfers

_CALL = ffi.typeof("int(*)(void *)")
_POINTER = ffi.typeof("void *")
_CELLS = ffi.typeof("int64_t *[]")
_SUBMISSIONS = ffi.typeof("aio_submission[]")
_TASKS = ffi.typeof("aio_task[]")


class Call(Protocol):
    """A function of C with its argument, as addresses; it returns 0 or -errno. The object keeps the argument alive."""

    @property
    def function(self) -> int: ...
    @property
    def argument(self) -> int: ...


@dataclass(eq=False)
class Task:
    """When all ``waits`` have succeeded: ``call``, then the submission of ``begins``, in order.

    Tickets of ``begins`` may be ordered after those before them. After the run, the times are nanoseconds of
    CLOCK_MONOTONIC: of the call, 0 if it was not made, and of the beginning of the idle time before it, 0 without any.
    ``answer`` is that of the call.
    """

    waits: Sequence[Ticket]
    call: Call
    begins: Sequence[Ticket]
    idle: int = 0
    began: int = 0
    ended: int = 0
    answer: int = 0


def run_tasks(transfers: Transfers, tasks: Sequence[Task]) -> None:
    """Run ``tasks``, each as soon as it can begin, the first of those that can.

    Returns when all have run, or no further one can because a transfer or a call has failed: then the tasks behind it
    have ``began == 0``, and their ``begins`` were not submitted. Raises the error of a refused submission.
    """
    requests = [ticket._request for task in tasks for ticket in task.begins]
    run = _Run(tasks, requests)
    transfers.keep(requests)
    try:
        idle = ffi.new("uint64_t *")
        # In slices, so that Ctrl-C is handled, and hung operations are logged.
        while (
            code := lib.aio_run(transfers.handle, run.tasks, len(tasks), SLICE_NS, idle)
        ) == -errno.ETIMEDOUT:
            transfers.warn_of_hangs()
            # The caller's block may be atomic, and this may last as long as the drive hangs.
            atomic.poll()
    finally:
        run.report(tasks, requests if transfers.is_recording else ())
        transfers.forget_unbegun(requests)
    if code < 0 and code != -errno.ECANCELED and not any(task.answer for task in tasks):
        raise transfers.refused(next(request for request in requests if not request.id), -code)


class _Run:
    """The tasks in the memory of C. ``requests`` are those of all ``begins``, in order."""

    def __init__(self, tasks: Sequence[Task], requests: Sequence[Request]) -> None:
        self._waits = ffi.new(_CELLS, [ticket._request.ticket for task in tasks for ticket in task.waits])
        self._after = ffi.new(_CELLS, [before.ticket for request in requests for before in request.after])
        self._vectors = [request.as_vector() for request in requests]
        self.submissions = ffi.new(_SUBMISSIONS, list(self._submissions(requests)))
        self.tasks = ffi.new(_TASKS, list(self._tasks(tasks)))

    def report(self, tasks: Sequence[Task], recorded: Sequence[Request]) -> None:
        """Store times and answers in ``tasks``, and the times of the submissions of ``recorded`` requests."""
        for raw, task in zip(self.tasks, tasks, strict=True):
            task.idle, task.answer = raw.idle_ns, raw.answer
            task.began, task.ended = raw.began_ns, raw.ended_ns
        for number, request in enumerate(recorded):
            request.submitted = self.submissions[number].submitted_ns

    def _submissions(self, requests: Sequence[Request]) -> Iterator[tuple[Any, ...]]:
        after = self._after + 0
        for request, vector in zip(requests, self._vectors, strict=True):
            count = len(request.after)
            yield (
                *(request.kind, request.priority, request.data, vector.array, len(vector)),
                *(after, count, request.ticket),
            )
            after += count

    def _tasks(self, tasks: Sequence[Task]) -> Iterator[tuple[Any, ...]]:
        waits, begins = self._waits + 0, self.submissions + 0
        for task in tasks:
            call, argument = ffi.cast(_CALL, task.call.function), ffi.cast(_POINTER, task.call.argument)
            yield waits, len(task.waits), call, argument, begins, len(task.begins)
            waits, begins = waits + len(task.waits), begins + len(task.begins)
