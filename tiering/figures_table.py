"""A table whose figures are whole in a terminal of any width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

_UNBOUNDED = 10_000
"""Columns: wider than any table."""


class FiguresTable(Table):
    """A table that is a list, a paragraph for each row, where the terminal is too narrow for it.

    Rich would cut the cells of a column that does not wrap. In the list a row is its first cell, and under it a line
    for each other cell, with the column's heading.
    """

    @classmethod
    def plain(cls, **options: Any) -> Self:
        """One with no lines but that under its headings. ``options`` are those of Table."""
        usual = {"box": SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "collapse_padding": True}
        return cls(**{"title_justify": "left", "caption_justify": "left", **usual, **options})

    def add_figures(self, *headings: str) -> None:
        """Add columns of figures: to the right, and in one line."""
        for heading in headings:
            self.add_column(heading, justify="right", no_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._least_width(console, options) <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield from self._list()

    def _least_width(self, console: Console, options: ConsoleOptions) -> int:
        """Columns of a terminal in which no cell is cut: those that wrap may be as narrow as their longest word."""
        whole = super().__rich_measure__(console, options.update(max_width=_UNBOUNDED)).maximum
        for column in self.columns:
            if not column.no_wrap:
                cells = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
                whole -= max(cell.maximum for cell in cells) - max(cell.minimum for cell in cells)
        return whole

    def _list(self) -> Iterator[RenderableType]:
        if self.title:
            yield _text(self.title, "table.title")
        for place, row in enumerate(self.rows):
            (_, name), *figures = ((column.header, [*column.cells][place]) for column in self.columns)
            if (named := _text(name, row.style)).plain:
                yield named
            for heading, cell in figures:
                yield from _entry(heading, _text(cell, row.style))
        if self.caption:
            yield _text(self.caption, "table.caption")


def _entry(heading: RenderableType, figure: Text) -> Iterator[RenderableType]:
    """A cell below the name of its row; nothing of one that says nothing."""
    if figure.plain in ("", "-"):
        return
    label = Text(f"{heading}: " if heading else "")
    if label and "\n" in figure.plain:
        yield _indented(label, 2)
        yield _indented(figure, 4)
    else:
        yield _indented(label + figure, 2)


def _indented(text: Text, columns: int) -> Padding:
    return Padding(text, (0, 0, 0, columns), expand=False)


def _text(cell: RenderableType, style: StyleType | None) -> Text:
    """``cell`` without a column's width; brackets in a string are as they are."""
    text = cell.copy() if isinstance(cell, Text) else Text(str(cell))
    text.stylize_before(style or "")
    return text
