"""A table whose figures are never cut, in a terminal of any width."""

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
    """A table that becomes a list in a terminal that is too narrow for the columns.

    Rich would cut the cells of a column that does not wrap. In the list, each row is its first cell, followed by a line
    for each other cell with the heading of its column.
    """

    @classmethod
    def plain(cls, **options: Any) -> Self:
        """A table with a line below the headings and no other lines. ``options`` are those of Table."""
        defaults = {"box": SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "collapse_padding": True}
        return cls(**{"title_justify": "left", "caption_justify": "left", **defaults, **options})

    def add_figures(self, *headings: str) -> None:
        """Add columns of figures, right-aligned and without wrapping."""
        for heading in headings:
            self.add_column(heading, justify="right", no_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._min_width(console, options) <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield from self._list()

    def _min_width(self, console: Console, options: ConsoleOptions) -> int:
        """The terminal width below which a cell would be cut: a column that wraps needs its longest word."""
        width = super().__rich_measure__(console, options.update(max_width=_UNBOUNDED)).maximum
        for column in self.columns:
            if not column.no_wrap:
                cells = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
                width -= max(cell.maximum for cell in cells) - max(cell.minimum for cell in cells)
        return width

    def _list(self) -> Iterator[RenderableType]:
        if self.title:
            yield _text(self.title, "table.title")
        for index, row in enumerate(self.rows):
            (_, name), *figures = ((column.header, [*column.cells][index]) for column in self.columns)
            if (title := _text(name, row.style)).plain:
                yield title
            for heading, cell in figures:
                yield from _entry(heading, _text(cell, row.style))
        if self.caption:
            yield _text(self.caption, "table.caption")


def _entry(heading: RenderableType, figure: Text) -> Iterator[RenderableType]:
    """The lines of a cell below the name of its row; none for an empty cell."""
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
    """``cell`` as text of its own width. Brackets in a string are not markup."""
    text = cell.copy() if isinstance(cell, Text) else Text(str(cell))
    text.stylize_before(style or "")
    return text
