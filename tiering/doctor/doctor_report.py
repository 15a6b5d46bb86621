"""The report of all findings: a table for a terminal, a text block for an issue, and JSON for a program."""

from __future__ import annotations

import contextlib
import getpass
import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiering._text import counted
from tiering.config.fields import legible
from tiering.doctor.finding import CheckResult, Finding, Verdict

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = 1
WIDTH = 80
RULE = "----"
_STYLES = {Verdict.PROBLEM: "bold red", Verdict.NOTE: "yellow"}


@dataclass(frozen=True)
class DoctorReport:
    entries: Sequence[CheckResult]

    @property
    def attention(self) -> list[CheckResult]:
        """The entries that are not OK, problems first."""
        entries = [entry for entry in self.entries if entry.finding.verdict is not Verdict.OK]
        return sorted(entries, key=lambda entry: entry.finding.verdict is not Verdict.PROBLEM)

    @property
    def problems(self) -> int:
        return sum(entry.finding.verdict is Verdict.PROBLEM for entry in self.entries)

    def counts(self) -> str:
        """The number of problems and notes: "1 problem, 2 notes"."""
        numbers = {"problem": self.problems, "note": len(self.attention) - self.problems}
        return ", ".join(counted(number, noun) for noun, number in numbers.items() if number)

    def as_dict(self, exit_code: int) -> dict[str, Any]:
        checks = [
            {
                "check": entry.check,
                "directory": entry.directory,
                "verdict": str(entry.finding.verdict),
                "found": entry.finding.found,
                "remedy": entry.finding.remedy,
            }
            for entry in self.entries
        ]
        return {"schema_version": SCHEMA_VERSION, "exit_code": exit_code, "checks": checks}

    def table(self) -> Table:
        """A table of ``attention`` with the remedies."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for header, ratio in (("check", 2), ("found", 4), ("remedy", 4)):
            table.add_column(header, ratio=ratio, overflow="fold")
        for entry in self.attention:
            style = _STYLES[entry.finding.verdict]
            name = Text(f"{entry.check}\n", style="bold").append(str(entry.finding.verdict), style=style)
            if entry.directory is not None:
                name.append(f"\n{legible(entry.directory)}", style="not bold")
            table.add_row(name, Text(legible(entry.finding.found)), Text(legible(entry.finding.remedy)))
        table.expand = True
        return table

    def block(self) -> str:
        """All findings, as plain text to paste into an issue."""
        lines = [RULE]
        for directory, entries in groupby(self.entries, key=lambda entry: entry.directory):
            lines.append(legible(directory or "tiering doctor"))
            for entry in entries:
                text = f"{entry.finding.verdict:<7} {entry.check}: {legible(entry.finding.found)}"
                lines += textwrap.wrap(
                    text,
                    WIDTH,
                    initial_indent="  ",
                    subsequent_indent=" " * 12,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
        return "\n".join([*lines, RULE])


def discreet(entries: Iterable[CheckResult]) -> list[CheckResult]:
    """``entries`` without the names of users and of this host: home directories become ~, other names "..."."""
    home = os.path.normpath(Path("~").expanduser())

    def anonymous_text(text: str, directory: str | None) -> str:
        if directory is not None:
            text = text.replace(directory, anonymous_path(directory))
        return text.replace(f"{home}/", "~/") if len(home) > 1 else text

    def anonymous_path(directory: str) -> str:
        parts = Path(directory).parts
        if len(home) > 1 and Path(directory).is_relative_to(home):
            parts = ("~", *Path(directory).relative_to(home).parts)
        return str(Path(*("..." if part in _names() else part for part in parts)))

    return [
        CheckResult(
            entry.check,
            None if entry.directory is None else anonymous_path(entry.directory),
            Finding(
                anonymous_text(entry.finding.found, entry.directory),
                entry.finding.verdict,
                anonymous_text(entry.finding.remedy, entry.directory),
            ),
        )
        for entry in entries
    ]


def _names() -> set[str]:
    names = {os.uname().nodename, os.uname().nodename.partition(".")[0]}
    # The user id may have no name.
    with contextlib.suppress(OSError, KeyError):
        names.add(getpass.getuser())
    return names
