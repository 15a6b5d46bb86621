"""The result of a check, and the execution of checks that may fail or hang."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tiering._text import counted

log = logging.getLogger(__name__)


class Verdict(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Training works, but slower or less safely than possible; or a fact that the user should know."""
    PROBLEM = "problem"
    """Training does not start, or does not use the requested settings."""


@dataclass(frozen=True)
class Finding:
    """The result of a check. ``remedy`` is a command or a sentence; it is empty only if the verdict is OK."""

    found: str
    verdict: Verdict = Verdict.OK
    remedy: str = ""


@dataclass(frozen=True)
class CheckResult:
    """A finding with the name of its check, about a directory or, if that is None, about the machine."""

    check: str
    directory: str | None
    finding: Finding


Check = Callable[[Path], Finding]
"""A check of the machine with the given root directory."""


def note(found: str, remedy: str) -> Finding:
    return Finding(found, Verdict.NOTE, remedy)


def problem(found: str, remedy: str) -> Finding:
    return Finding(found, Verdict.PROBLEM, remedy)


def perform(
    checks: Mapping[str, Callable[[], Finding]], directory: str | None = None, *, seconds: float = 10
) -> list[CheckResult]:
    """Run ``checks`` in order. A check that raises becomes a note; one that hangs, a problem that ends the list.

    ``seconds`` is the limit for all checks together. They run in a daemon thread, which is abandoned if it hangs: an
    access to a dead network file system may block forever.
    """
    entries: list[CheckResult] = []

    def run() -> None:
        for name, check in checks.items():
            try:
                finding = check()
            except Exception as error:
                log.debug("the check of %s failed", name, exc_info=True)
                finding = note(
                    f"check failed: {type(error).__name__}: {error}",
                    "check it manually; if that works, the check has a defect: please report it",
                )
            entries.append(CheckResult(name, directory, finding))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    # A copy: an abandoned thread may still append to entries.
    finished = list(entries)
    if thread.is_alive() and len(finished) < len(checks):
        hanging = list(checks)[len(finished)]
        skipped = counted(len(checks) - len(finished) - 1, "more check")
        text = f"no answer in {seconds:g} s; skipped {skipped}"
        finished.append(
            CheckResult(
                hanging, directory, problem(text, "see dmesg for a disk or a server that does not answer")
            )
        )
    return finished
