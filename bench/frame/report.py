"""Tables and verdicts of a benchmark, for the terminal and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table as RichTable


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was compared, what came out, the goal, and whether it holds."""

    what: str
    found: str
    goal: str
    holds: bool


@dataclass(slots=True)
class Table:
    """``notes`` stand below it."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """Everything that was found out, in printing order."""

    title: str
    facts: dict[str, str]
    tables: list[Table] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def show(self, console: Console) -> None:
        for name, fact in self.facts.items():
            console.print(f"{name}: {fact}", highlight=False, markup=False)
        for table in (*self.tables, self._verdict_table()):
            drawn = RichTable(title=table.title, title_justify="left")
            for number, column in enumerate(table.columns):
                drawn.add_column(column, justify="left" if number == 0 else "right")
            for row in table.rows:
                drawn.add_row(*row)
            console.print(drawn)
            for note in table.notes:
                console.print(note, highlight=False, markup=False)
        for line in self.skipped:
            console.print(f"skipped: {line}", highlight=False, markup=False)

    def markdown(self) -> str:
        lines = [f"# {self.title}", ""]
        lines += [f"- {name}: {fact}" for name, fact in self.facts.items()]
        for table in (*self.tables, self._verdict_table()):
            lines += ["", f"## {table.title}", "", _row(table.columns), "|---" * len(table.columns) + "|"]
            lines += [_row(row) for row in table.rows]
            lines += [line for note in table.notes for line in ("", note)]
        if self.skipped:
            lines += ["", "## Skipped", "", *(f"- {line}" for line in self.skipped)]
        return "\n".join(lines) + "\n"

    def _verdict_table(self) -> Table:
        table = Table("Goals", ("what", "measured", "goal", "holds"))
        for verdict in self.verdicts:
            table.rows.append((verdict.what, verdict.found, verdict.goal, "yes" if verdict.holds else "NO"))
        return table


def middle(values: Sequence[float], form: str = ".3f") -> str:
    """Median and range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
