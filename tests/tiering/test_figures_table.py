"""Tables of figures in terminals of any width."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tiering._figures_table import FiguresTable


def table() -> FiguresTable:
    table = FiguresTable.plain(title="Drives", caption="all [of] them")
    table.add_column("drive", no_wrap=True)
    table.add_figures("GB/s", "")
    table.add_column("used for")
    table.add_row("nvme0", "12.34", "8 threads", "parameters 1.5 GiB\nstate 2 GiB")
    table.add_row("[red]", "-", "", Text("nothing yet"))
    table.add_row("", "0.5", "1 thread", "-")
    return table


def printed(width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table(), highlight=False)
    return [line.rstrip() for line in captured.get().splitlines()]


WIDE = [
    "Drives",
    "drive   GB/s             used for",
    "──────────────────────────────────────────",
    "nvme0  12.34  8 threads  parameters 1.5 GiB",
    "                         state 2 GiB",
]


def test_a_wide_terminal_shows_columns() -> None:
    rows = [line for line in printed(80) if "─" not in line]
    assert rows[:4] == [line for line in WIDE if "─" not in line]


def test_a_column_that_wraps_gives_way_first() -> None:
    assert printed(36)[3:5] == ["nvme0  12.34  8 threads  parameters", "                         1.5 GiB"]


def test_a_narrow_terminal_shows_a_list_without_empty_cells() -> None:
    assert printed(34) == [
        "Drives",
        "nvme0",
        "  GB/s: 12.34",
        "  8 threads",
        "  used for:",
        "    parameters 1.5 GiB",
        "    state 2 GiB",
        "[red]",
        "  used for: nothing yet",
        "  GB/s: 0.5",
        "  1 thread",
        "all [of] them",
    ]


def test_every_width_shows_every_figure() -> None:
    # 14 columns hold the longest word.
    for width in range(14, 80):
        words = " ".join(printed(width)).split()
        assert {"12.34", "0.5", "8", "1.5", "2", "parameters"} <= set(words), width
