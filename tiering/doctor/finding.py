"""What a check says, and what is said of a check that could not look."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tiering.text import counted

log = logging.getLogger(__name__)


class Verdict(StrEnum):
    OK = "ok"
    NOTE = "note"
    """It trains, but slower or less safely than it could; or somebody should know."""
    PROBLEM = "problem"
    """It will not train, or not as it was asked to."""


@dataclass(frozen=True)
class Finding:
    """What a check found. ``remedy`` is a command or a sentence, and there whenever the verdict is not OK."""

    found: str
    verdict: Verdict = Verdict.OK
    remedy: str = ""


@dataclass(frozen=True)
class Entry:
    """A finding under the name of its check, of a directory or (None) of the machine."""

    check: str
    directory: str | None
    finding: Finding


Check = Callable[[Path], Finding]
"""Looks at the machine whose root directory it is given."""


def note(found: str, remedy: str) -> Finding:
    return Finding(found, Verdict.NOTE, remedy)


def problem(found: str, remedy: str) -> Finding:
    return Finding(found, Verdict.PROBLEM, remedy)


def perform(
    checks: Mapping[str, Callable[[], Finding]], directory: str | None = None, *, seconds: float = 10
) -> list[Entry]:
    """All of ``checks``, in their order. One that raises, or has no answer after ``seconds`` in all, says so instead.

    They run in a thread of their own, which is left behind if it hangs: looking at a dead network file system does.
    """
    entries: list[Entry] = []

    def run() -> None:
        for name, check in checks.items():
            try:
                finding = check()
            except Exception as error:
                log.debug("the check of %s failed", name, exc_info=True)
                finding = note(
                    f"could not look: {type(error).__name__}: {error}",
                    "look at it by hand; if that is possible, this is a defect of the check: please report it",
                )
            entries.append(Entry(name, directory, finding))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    done = list(entries)
    if thread.is_alive() and len(done) < len(checks):
        stuck = list(checks)[len(done)]
        later = counted(len(checks) - len(done) - 1, "more check")
        found = f"no answer in {seconds:g} s; this left out {later}"
        done.append(
            Entry(stuck, directory, problem(found, "see dmesg for a disk or a server that does not answer"))
        )
    return done
