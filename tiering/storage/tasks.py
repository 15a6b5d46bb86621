"""Tasks: calls of C between transfers, which one call of C runs, from a completion to the next submissions.

The GIL is released for a whole run of tasks, so other threads of Python do not delay it. All transfers of a run are
prepared before it and stored where their owners find them, as always: C stores the ticket of each when it submits it.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tiering._aio import ffi, lib
from tiering.storage.request import Request
from tiering.storage.tickets import SLICE_NS, Ticket, Transfers

_CALL = ffi.typeof("int(*)(void *)")
_CELLS = ffi.typeof("int64_t *[]")


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
    run = _Run(tasks)
    transfers.keep(requests)
    try:
        idle = ffi.new("uint64_t *")
        # In slices, so that Ctrl-C is handled, and hung operations are logged.
        while (
            code := lib.aio_run(transfers.handle, run.tasks, len(tasks), SLICE_NS, idle)
        ) == -errno.ETIMEDOUT:
            transfers.warn_of_hangs()
    finally:
        run.report(tasks, recording=transfers.is_recording)
        transfers.forget_unbegun(requests)
    failed = any(task.answer for task in tasks)
    if code < 0 and code != -errno.ECANCELED and not failed:
        raise transfers.refused(next(request for request in requests if not request.id), -code)


class _Run:
    """The tasks in the memory of C."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = ffi.new("aio_task[]", len(tasks))
        self._kept: list[Any] = []
        for raw, task in zip(self.tasks, tasks, strict=True):
            raw.waits, raw.n_waits = self._cells([ticket._request for ticket in task.waits]), len(task.waits)
            raw.call = ffi.cast(_CALL, task.call.function)
            raw.argument = ffi.cast("void *", task.call.argument)
            raw.submissions = self._keep(ffi.new("aio_submission[]", len(task.begins)))
            raw.n_submissions = len(task.begins)
            for submission, ticket in zip(raw.submissions[0 : len(task.begins)], task.begins, strict=True):
                self._fill(submission, ticket._request)

    def report(self, tasks: Sequence[Task], *, recording: bool) -> None:
        """Store times and answers in ``tasks``, and the times of submissions if transfers are recorded."""
        for raw, task in zip(self.tasks, tasks, strict=True):
            task.idle, task.answer = raw.idle_ns, raw.answer
            task.began, task.ended = raw.began_ns, raw.ended_ns
            for number, ticket in enumerate(task.begins if recording else ()):
                ticket._request.submitted = raw.submissions[number].submitted_ns

    def _fill(self, submission: Any, request: Request) -> None:
        pieces = self._keep(request.as_pieces())
        submission.kind, submission.priority = request.kind, request.priority
        submission.pieces, submission.n = pieces, len(pieces)
        submission.after, submission.n_after = self._cells(request.after), len(request.after)
        submission.ticket = request.ticket

    def _cells(self, requests: Sequence[Request]) -> Any:
        return self._keep(ffi.new(_CELLS, [request.ticket for request in requests]))

    def _keep(self, made: Any) -> Any:
        self._kept.append(made)
        return made
