"""What ``tierbench tune`` has found: everything for programs, for people a table and what it comes to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from tiering.config.fields import format_size
from tiering.text import counted
from tiering.tierbench.display import figures
from tiering.tierbench.result import Record, Run
from tiering.tierbench.tuning.search import FEWEST, SAME, Cell, Reading, Standing, Sweep
from tiering.tierbench.words import ReadWrite, brief

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ROWS = 12
CHEAPER = 0.75  # of the CPU per byte: worth telling where the rate is the same
NOISY = 0.15
WIDE = 96  # columns

_WHAT = {"rw": "reads and writes at once", "read": "reads", "write": "writes"}


class Ratio(Record):
    """To the rate of the defaults, with the 95 % interval."""

    point: float
    low: float
    high: float


class Tried(Record):
    """A setting, and what was read of it."""

    ioengine: str
    bs: int
    iodepth: int
    registered: bool
    in_flight: int = Field(description="Bytes, per directory.")
    ratio: Ratio
    rate: float = Field(description="Bytes per second: the median of the readings that count.")
    cpu_per_gb: float = Field(description="CPU seconds per 10^9 bytes.")
    p99: float = Field(description="Seconds: the median of the readings'.")
    readings: tuple[Reading, ...]

    @property
    def cell(self) -> Cell:
        return Cell(self.ioengine, self.bs, self.iodepth, self.registered)


class Tuned(Run):
    """A run of ``tierbench tune``. ``tried`` is best first, the defaults among them."""

    kind: Literal["tune"] = "tune"
    rw: ReadWrite
    size: int = Field(description="Bytes of each file that were used.")
    window: float
    tried: tuple[Tried, ...]
    defaults_at: int = Field(description="Place in ``tried``.")
    recommended_at: int
    best_at: int = Field(description="The fastest of those that were measured often enough to tell.")
    why: str
    alike: int = Field(description="How many are as fast as that, or slower by SAME at most.")
    flat_bs: tuple[int, int] = Field(
        description="Block sizes from ... to that are as fast as the best, at the depth recommended."
    )
    flat_iodepth: tuple[int, int]
    front: tuple[int, ...] = Field(
        description="Places in ``tried`` that no other beats in rate, CPU and memory at once."
    )
    noise: float = Field(description="Scatter of the logarithm of a single ratio.")
    left_out: dict[str, str] = Field(description="What was not measured, and why.")
    seconds: float
    config: dict[str, Any]
    ended: str = Field(description="Why no more was measured.")

    @property
    def defaults(self) -> Tried:
        return self.tried[self.defaults_at]

    @property
    def recommended(self) -> Tried:
        return self.tried[self.recommended_at]

    @property
    def best(self) -> Tried:
        return self.tried[self.best_at]


def found(sweep: Sweep, left_out: dict[str, str], **told: Any) -> Tuned:
    """What ``sweep`` comes to, with what it does not know."""
    verdict = sweep.verdict()

    def tried(standing: Standing) -> Tried:
        cell = standing.cell
        of_defaults = standing is verdict.reference
        return Tried(
            **cell._asdict(),
            in_flight=cell.in_flight,
            ratio=Ratio(point=standing.ratio.point, low=standing.ratio.low, high=standing.ratio.high),
            rate=standing.rate,
            cpu_per_gb=standing.cpu_per_gb,
            p99=standing.p99,
            readings=tuple(sweep.reference if of_defaults else sweep.readings[cell]),
        )

    front = verdict.front
    return Tuned(
        tried=tuple(map(tried, verdict.standings)),
        defaults_at=verdict.standings.index(verdict.reference),
        recommended_at=verdict.standings.index(verdict.recommended),
        best_at=verdict.standings.index(verdict.best),
        why=verdict.why,
        alike=len(verdict.alike),
        flat_bs=verdict.flat("bs"),
        flat_iodepth=verdict.flat("iodepth"),
        front=tuple(place for place, each in enumerate(verdict.standings) if each in front),
        noise=verdict.noise,
        left_out=left_out
        | {str(cell): why for cell, why in sweep.left_out.items()}
        | dict.fromkeys(
            map(str, sweep.unknown()), "the drive changed, or stood still, in each of their windows"
        ),
        **told,
    )


def show(tuned: Tuned, console: Console) -> None:
    """Print ``tuned``."""
    from tiering.tierbench.display.screen import block

    def say(text: str) -> None:
        console.print(figures.legible(text), markup=False, highlight=False)

    if tuned.interrupted:
        say("interrupted: this is what was measured until then")
        console.print()
    say(f"{', '.join(each.directory for each in tuned.targets)}: {_WHAT[tuned.rw]}")
    console.print()
    console.print(_table(tuned, console.width))
    console.print()
    for sentence in _sentences(tuned):
        say(sentence)
    if tuned.interrupted:
        return
    console.print()
    say("to have this in a configuration:")
    console.print(block(tuned.config, console.width), soft_wrap=True, markup=False, highlight=False)


def shown(tuned: Tuned) -> list[Tried]:
    """What a table has room for: what no other beats, the best of each engine, the defaults, what is recommended."""
    ways: dict[tuple[str, bool], Tried] = {}
    for each in tuned.tried:
        if len(each.readings) >= FEWEST:
            ways.setdefault((each.ioengine, each.registered), each)
    needed = {tuned.defaults.cell, tuned.recommended.cell, *(each.cell for each in ways.values())}
    unbeaten = [tuned.tried[place].cell for place in tuned.front if tuned.tried[place].cell not in needed]
    needed |= set(unbeaten[: max(0, ROWS - len(needed))])
    return [each for each in tuned.tried if each.cell in needed]


def _table(tuned: Tuned, width: int) -> Table:
    from tiering.figures_table import FiguresTable

    table = FiguresTable.plain(collapse_padding=False, padding=(0, 1) if width >= WIDE else 0)
    table.add_column("engine", no_wrap=True)
    table.add_figures("block", "depth", "GB/s", "to the defaults", "CPU s/GB", "p99", "in flight")
    for each in shown(tuned):
        ratio = each.ratio
        table.add_row(
            each.ioengine + ("" if each.registered else ", unreg."),
            brief(each.bs),
            str(each.iodepth),
            figures.gb(each.rate),
            "the defaults"
            if each.cell == tuned.defaults.cell
            else f"{ratio.point:.2f} ({ratio.low:.2f}-{ratio.high:.2f})",
            figures.number(each.cpu_per_gb, 2),
            figures.latency(each.p99),
            brief(each.in_flight),
            style="bold" if each.cell == tuned.recommended.cell else None,
        )
    return table


def _sentences(tuned: Tuned) -> Iterator[str]:
    rows = {each.cell for each in shown(tuned)}
    rest = [each.ratio.point for each in tuned.tried if each.cell not in rows]
    if rest:
        yield (
            f"{len(rest)} more, {min(rest):.2f} to {max(rest):.2f} of the defaults' rate, that others match with no"
            " more CPU and memory, or that were measured once or twice: --json has them."
        )
    chosen, defaults = tuned.recommended, tuned.defaults
    if tuned.interrupted and chosen is defaults:
        measured = counted(len(tuned.tried) - 1, "setting")
        yield f"Nothing is recommended: it was interrupted after {measured}."
    elif chosen is defaults:
        yield f"Keep the defaults, {defaults.cell}: {tuned.why}."
    else:
        yield (
            f"Use {chosen.cell}: {tuned.why}. It has {brief(chosen.in_flight)} in flight, the defaults"
            f" {brief(defaults.in_flight)}, and a p99 of {figures.latency(chosen.p99)}, theirs"
            f" {figures.latency(defaults.p99)}."
        )
    best = "the defaults" if tuned.best is defaults else str(tuned.best.cell)
    yield (
        f"{tuned.alike} of {len(tuned.tried)} settings are as fast as {best}, or at most {SAME:.0%} slower;"
        f" {_flat(tuned)}."
    )
    cheaper = [
        each
        for each in tuned.tried
        if len(each.readings) >= FEWEST
        and each.ratio.point >= 1 - SAME
        and each.cpu_per_gb < CHEAPER * chosen.cpu_per_gb
    ]
    if cheaper and chosen is defaults:
        least = min(cheaper, key=lambda each: each.cpu_per_gb)
        yield (
            f"{least.cell} takes {least.cpu_per_gb / chosen.cpu_per_gb:.0%} of their CPU time per byte at"
            f" {least.ratio.point:.2f} of their rate."
        )
    scatter = f"The ratio of a single window scatters by {tuned.noise:.0%} here"
    yield scatter + (": a longer --runtime tells more." if tuned.noise > NOISY else ".")
    for why in dict.fromkeys(tuned.left_out.values()):
        named = [what for what, reason in tuned.left_out.items() if reason == why]
        more = f" and {len(named) - 2} more" if len(named) > 2 else ""
        yield f"Left out: {', '.join(named[:2])}{more}: {why}."
    yield from (f"Note: {note}." for note in tuned.notes)
    yield (
        f"Ended after {figures.duration(tuned.seconds)}, as {tuned.ended}; wrote"
        f" {figures.nbytes(tuned.written_bytes)}, read {figures.nbytes(tuned.read_bytes)}, on"
        f" {format_size(tuned.size)} of each directory."
    )


def _flat(tuned: Tuned) -> str:
    """From where to where it makes no difference."""
    cell = tuned.recommended.cell
    (small, large), (shallow, deep) = tuned.flat_bs, tuned.flat_iodepth
    told = []
    if small < large:
        told.append(f"blocks of {brief(small)} .. {brief(large)} (at depth {cell.iodepth})")
    if shallow < deep:
        told.append(f"depths {shallow} .. {deep} (at {brief(cell.bs)})")
    return f"{' and '.join(told)} are all the same" if told else f"none of them is next to {cell}"
