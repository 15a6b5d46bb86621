"""How a run ends: finished, failed or preempted, and of which error, as its page says last.

Three roads lead here. ``close()`` and ``with engine:`` know the error that is under way. Where a script just ends, the
page is closed at the exit of the interpreter: then ``sys.last_value`` is an exception that nobody has caught, and the
code that ``sys.exit`` was called with has been noted. A process that is killed says nothing, and its page shows that.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from tiering.errors import DistributedError, TieringError
from tiering.interrupts import EXIT_SAVED
from tiering.telemetry import EndStatus, Snapshot, as_text

LONGEST_TEXT = 1000  # characters

_exit_code: object = None
"""What ``sys.exit`` was called with last; None before."""


def note_exit_codes() -> None:
    """From now on note what ``sys.exit`` is called with: at the exit of the interpreter nothing else has it."""
    exit_before: Callable[..., NoReturn] = sys.exit
    if getattr(exit_before, "notes_code", False):
        return

    @functools.wraps(exit_before)
    def noting_exit(status: object = None, /) -> NoReturn:
        global _exit_code
        if threading.current_thread() is threading.main_thread():  # another one ends alone
            _exit_code = status
        exit_before(status)

    noting_exit.notes_code = True  # type: ignore[attr-defined]
    sys.exit = noting_exit


@dataclass
class Totals:
    """What a rank has counted by the end of its last step, for whoever outlives the engine."""

    step: int = 0
    global_step: int = 0
    samples: int = 0
    skipped_steps: int = 0
    global_skipped_steps: int = 0
    loss: float | None = None


class Ending:
    """Fills in the last snapshot of a rank. Keeps nothing of the engine, which may be gone by then.

    ``began_with`` gives the rank that a failure of several ranks began with, if it is known.
    """

    def __init__(self, rank: int, began_with: Callable[[], int | None] = lambda: None) -> None:
        self.totals = Totals()
        self._rank = rank
        self._began_with = began_with
        self._status: EndStatus | None = None
        note_exit_codes()

    def went_on(self) -> None:
        """A step has ended: a ``sys.exit`` before it has not ended the program."""
        global _exit_code
        _exit_code = None

    def settle(self, error: BaseException | None, *, stopped_by: str = "", broken: str = "") -> None:
        """The engine ends now, because of ``error`` if there is one. The first call counts.

        ``stopped_by`` is the name of a signal that has asked for it, ``broken`` why training could not go on.
        """
        if self._status is None:
            self._status = self._of(error, stopped_by, broken)

    def final_snapshot(self, newest: Snapshot) -> Snapshot:
        """``newest`` with the figures of the last step, and with how the run ended."""
        status = self._status or self._at_exit(newest.broken)
        return (
            replace(newest, ended=status, **vars(self.totals))
            if self.totals.step
            else replace(newest, ended=status)
        )

    def _at_exit(self, broken: str) -> EndStatus:
        interactive = hasattr(sys, "ps1")  # where last_value is of any line that was ever typed
        error = None if interactive else getattr(sys, "last_value", None)
        if error is None and _exit_code is not None:
            error = SystemExit(_exit_code)
        return self._of(error, "", broken)

    def _of(self, error: BaseException | None, stopped_by: str, broken: str) -> EndStatus:
        if isinstance(error, (StopIteration, StopAsyncIteration, GeneratorExit)):
            error = None  # the end of the data
        asked = isinstance(error, KeyboardInterrupt) or (
            isinstance(error, SystemExit) and error.code == EXIT_SAVED
        )
        if asked or (stopped_by and error is None):
            return EndStatus("preempted", stopped_by or "SIGINT", rank=self._rank)
        if isinstance(error, SystemExit):
            return self._exited(error.code, broken)
        if error is not None:
            words = error.message if isinstance(error, TieringError) else str(error)
            code = error.code if isinstance(error, TieringError) else type(error).__name__
            return self._failed(code, words, of_ranks=isinstance(error, DistributedError))
        return self._failed("", broken) if broken else EndStatus("finished", rank=self._rank)

    def _exited(self, code: object, broken: str) -> EndStatus:
        if not code:
            return self._of(None, "", broken)
        return (
            self._failed(f"exit code {code}", "")
            if isinstance(code, int)
            else self._failed("SystemExit", str(code))
        )

    def _failed(self, code: str, text: str, *, of_ranks: bool = False) -> EndStatus:
        began = self._began_with() if of_ranks else None
        rank = self._rank if began is None else began
        return EndStatus("failed", as_text(code), as_text(text[:LONGEST_TEXT]), rank)


def error_under_way() -> BaseException | None:
    """That of an ``except`` or ``finally`` block from which the caller was called."""
    return sys.exc_info()[1]
