"""How a run ends: finished, failed or preempted, and by which error, for the last snapshot of its status file.

``close()`` and ``with engine:`` pass the error that is being handled. If a script ends without them, the status file is
closed at the exit of the interpreter: ``sys.last_value`` is then an uncaught exception, and the code that ``sys.exit``
was called with has been noted. A process that is killed writes no ending, so its status file has none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from tiering._interrupts import EXIT_SAVED, note_exit_codes, noted_exit_code
from tiering.errors import DistributedError, TieringError
from tiering.telemetry import EndStatus, Snapshot, as_text

LONGEST_TEXT = 1000  # characters


@dataclass
class Totals:
    """The counters of a rank at the end of its last step, which remain after the engine was freed."""

    step: int = 0
    global_step: int = 0
    samples: int = 0
    skipped_steps: int = 0
    global_skipped_steps: int = 0
    loss: float | None = None


class Ending:
    """Fills in the last snapshot of a rank. Has no reference to the engine, which may have been freed by then.

    ``began_with`` returns the rank on which a failure of several ranks began, if it is known.
    """

    def __init__(self, rank: int, began_with: Callable[[], int | None] = lambda: None) -> None:
        self.totals = Totals()
        self._rank = rank
        self._began_with = began_with
        self._status: EndStatus | None = None
        note_exit_codes()

    def settle(self, error: BaseException | None, *, stopped_by: str = "", broken: str = "") -> None:
        """Note that the engine ends now, by ``error`` if there is one. Only the first call has an effect.

        ``stopped_by`` is the name of the signal that requested it, ``broken`` the reason why training cannot continue.
        """
        if self._status is None:
            self._status = self._of(error, stopped_by, broken)

    def final_snapshot(self, newest: Snapshot) -> Snapshot:
        """``newest`` with the figures of the last step, and with the ending."""
        status = self._status or self._at_exit(newest.broken)
        return (
            replace(newest, ended=status, **vars(self.totals))
            if self.totals.step
            else replace(newest, ended=status)
        )

    def _at_exit(self, broken: str) -> EndStatus:
        # In an interactive interpreter, last_value may be the error of any earlier line.
        interactive = hasattr(sys, "ps1")
        error = None if interactive else getattr(sys, "last_value", None)
        if error is None and (code := noted_exit_code()) is not None:
            error = SystemExit(code)
        return self._of(error, "", broken)

    def _of(self, error: BaseException | None, stopped_by: str, broken: str) -> EndStatus:
        if isinstance(error, (StopIteration, StopAsyncIteration, GeneratorExit)):
            # The data has ended.
            error = None
        is_requested = isinstance(error, KeyboardInterrupt) or (
            isinstance(error, SystemExit) and error.code == EXIT_SAVED
        )
        if is_requested or (stopped_by and error is None):
            return EndStatus("preempted", stopped_by or "SIGINT", rank=self._rank)
        if isinstance(error, SystemExit):
            return self._exited(error.code, broken)
        if error is not None:
            text = error.message if isinstance(error, TieringError) else str(error)
            code = error.code if isinstance(error, TieringError) else type(error).__name__
            return self._failed(code, text, of_ranks=isinstance(error, DistributedError))
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
    """The exception that is handled by an ``except`` or ``finally`` block around the call; None outside of one."""
    return sys.exc_info()[1]
