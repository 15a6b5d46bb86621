"""The result of ``tierbench tune``: all readings as JSON, and a table with its conclusions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from tiering._text import counted
from tiering.config.fields import format_size
from tiering.tierbench.display import figures
from tiering.tierbench.result import CommandResult, ResultPart
from tiering.tierbench.tuning.search import EQUAL_SHARE, MIN_READINGS, Cell, Reading, Standing, Sweep
from tiering.tierbench.words import ReadWrite, brief

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ROWS = 12
CHEAPER_SHARE = 0.75  # of the CPU per byte; a setting below it is reported if it is as fast
NOISY_SCATTER = 0.15
WIDE_COLUMNS = 96  # columns

_LOAD_NAMES = {"rw": "reads and writes at once", "read": "reads", "write": "writes"}


class Ratio(ResultPart):
    """The ratio to the rate of the defaults, with its 95 % confidence interval."""

    point: float
    low: float
    high: float


class TriedSetting(ResultPart):
    """A setting and its readings."""

    ioengine: str
    bs: int
    iodepth: int
    registered: bool
    in_flight: int = Field(description="Bytes in flight per directory.")
    ratio: Ratio
    rate: float = Field(description="Bytes per second: the median of the valid readings.")
    cpu_per_gb: float = Field(description="CPU seconds per 10^9 bytes.")
    p99: float = Field(description="99th percentile of the latency in seconds, the median of the readings.")
    readings: tuple[Reading, ...]

    @property
    def cell(self) -> Cell:
        return Cell(self.ioengine, self.bs, self.iodepth, self.registered)


class TuningResult(CommandResult):
    """A run of ``tierbench tune``. ``tried`` is best first and includes the defaults."""

    kind: Literal["tune"] = "tune"
    rw: ReadWrite
    size: int = Field(description="Bytes of each file that were used.")
    window: float = Field(description="Duration of one measurement in seconds.")
    tried: tuple[TriedSetting, ...]
    defaults_at: int = Field(description="Index of the defaults in ``tried``.")
    recommended_at: int
    best_at: int = Field(description="Index in ``tried`` of the fastest setting that has enough readings.")
    why: str = Field(description="The reason for the recommendation.")
    alike: int = Field(description="Number of settings that are at most 5 % slower than the best.")
    flat_bs: tuple[int, int] = Field(
        description="Range of block sizes that are as fast as the best, at the recommended depth."
    )
    flat_iodepth: tuple[int, int]
    front: tuple[int, ...] = Field(
        description="Indices in ``tried`` of settings that no other beats in rate, CPU and memory at once."
    )
    noise: float = Field(description="Standard deviation of the logarithm of a single ratio.")
    left_out: dict[str, str] = Field(description="Settings that were not measured, with reasons.")
    seconds: float
    config: dict[str, Any]
    ended: str = Field(description="The reason for the end of the search.")

    @property
    def defaults(self) -> TriedSetting:
        return self.tried[self.defaults_at]

    @property
    def recommended(self) -> TriedSetting:
        return self.tried[self.recommended_at]

    @property
    def best(self) -> TriedSetting:
        return self.tried[self.best_at]


def result_of(sweep: Sweep, left_out: dict[str, str], **header_fields: Any) -> TuningResult:
    """The result of ``sweep``, with the common fields of a result."""
    verdict = sweep.verdict()

    def tried(standing: Standing) -> TriedSetting:
        cell = standing.cell
        of_defaults = standing is verdict.reference
        return TriedSetting(
            **cell._asdict(),
            in_flight=cell.in_flight,
            ratio=Ratio(point=standing.ratio.point, low=standing.ratio.low, high=standing.ratio.high),
            rate=standing.rate,
            cpu_per_gb=standing.cpu_per_gb,
            p99=standing.p99,
            readings=tuple(sweep.reference if of_defaults else sweep.readings[cell]),
        )

    front = verdict.front
    return TuningResult(
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
            map(str, sweep.cells_without_reading()),
            "the drive changed or stalled during each of their measurements",
        ),
        **header_fields,
    )


def show(tuned: TuningResult, console: Console) -> None:
    """Print ``tuned``."""
    from tiering.tierbench.display.screen import block

    def say(text: str) -> None:
        console.print(figures.legible(text), markup=False, highlight=False)

    if tuned.interrupted:
        say("interrupted: these are the measurements so far")
        console.print()
    say(f"{', '.join(each.directory for each in tuned.targets)}: {_LOAD_NAMES[tuned.rw]}")
    console.print()
    console.print(_table(tuned, console.width))
    console.print()
    for sentence in _sentences(tuned):
        say(sentence)
    if tuned.interrupted:
        return
    console.print()
    say("to paste into a configuration:")
    console.print(block(tuned.config, console.width), soft_wrap=True, markup=False, highlight=False)


def table_rows(tuned: TuningResult) -> list[TriedSetting]:
    """The rows of the table: unbeaten settings, the best of each engine, the defaults, the recommended setting."""
    ways: dict[tuple[str, bool], TriedSetting] = {}
    for each in tuned.tried:
        if len(each.readings) >= MIN_READINGS:
            ways.setdefault((each.ioengine, each.registered), each)
    needed = {tuned.defaults.cell, tuned.recommended.cell, *(each.cell for each in ways.values())}
    unbeaten = [tuned.tried[place].cell for place in tuned.front if tuned.tried[place].cell not in needed]
    needed |= set(unbeaten[: max(0, ROWS - len(needed))])
    return [each for each in tuned.tried if each.cell in needed]


def _table(tuned: TuningResult, width: int) -> Table:
    from tiering._figures_table import FiguresTable

    table = FiguresTable.plain(collapse_padding=False, padding=(0, 1) if width >= WIDE_COLUMNS else 0)
    table.add_column("engine", no_wrap=True)
    table.add_figures("block", "depth", "GB/s", "vs. defaults", "CPU s/GB", "p99", "in flight")
    for each in table_rows(tuned):
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


def _sentences(tuned: TuningResult) -> Iterator[str]:
    listed = {each.cell for each in table_rows(tuned)}
    unlisted_ratios = [each.ratio.point for each in tuned.tried if each.cell not in listed]
    if unlisted_ratios:
        yield (
            f"{len(unlisted_ratios)} more settings have {min(unlisted_ratios):.2f} to {max(unlisted_ratios):.2f} times"
            " the rate of the defaults. Other settings are as fast with no more CPU time and memory, or these were"
            " measured only once or twice. --json lists them."
        )
    chosen, defaults = tuned.recommended, tuned.defaults
    if tuned.interrupted and chosen is defaults:
        measured = counted(len(tuned.tried) - 1, "setting")
        yield f"No recommendation: the search was interrupted after {measured}."
    elif chosen is defaults:
        yield f"Keep the defaults, {defaults.cell}: {tuned.why}."
    else:
        yield (
            f"Use {chosen.cell}: {tuned.why}. It has {brief(chosen.in_flight)} in flight and a p99 of"
            f" {figures.latency(chosen.p99)}; the defaults have {brief(defaults.in_flight)} and"
            f" {figures.latency(defaults.p99)}."
        )
    best = "the defaults" if tuned.best is defaults else str(tuned.best.cell)
    yield (
        f"{tuned.alike} of {len(tuned.tried)} settings are as fast as {best}, or at most {EQUAL_SHARE:.0%} slower;"
        f" {_flat(tuned)}."
    )
    cheaper = [
        each
        for each in tuned.tried
        if len(each.readings) >= MIN_READINGS
        and each.ratio.point >= 1 - EQUAL_SHARE
        and each.cpu_per_gb < CHEAPER_SHARE * chosen.cpu_per_gb
    ]
    if cheaper and chosen is defaults:
        cheapest = min(cheaper, key=lambda each: each.cpu_per_gb)
        yield (
            f"{cheapest.cell} takes {cheapest.cpu_per_gb / chosen.cpu_per_gb:.0%} of the CPU time of the"
            f" defaults per byte, at {cheapest.ratio.point:.2f} times their rate."
        )
    scatter = f"A single ratio has a standard deviation of {tuned.noise:.0%} here"
    yield scatter + (": a longer --runtime reduces the error." if tuned.noise > NOISY_SCATTER else ".")
    for why in dict.fromkeys(tuned.left_out.values()):
        names = [setting for setting, reason in tuned.left_out.items() if reason == why]
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        yield f"Not measured: {', '.join(names[:2])}{more}: {why}."
    yield from (f"Note: {note}." for note in tuned.notes)
    yield (
        f"Ended after {figures.duration(tuned.seconds)}: {tuned.ended}. Written: {figures.nbytes(tuned.written_bytes)},"
        f" read: {figures.nbytes(tuned.read_bytes)}, with {format_size(tuned.size)} in each directory."
    )


def _flat(tuned: TuningResult) -> str:
    """The ranges of block size and depth with an equal rate."""
    cell = tuned.recommended.cell
    (small, large), (shallow, deep) = tuned.flat_bs, tuned.flat_iodepth
    ranges = []
    if small < large:
        ranges.append(f"blocks of {brief(small)} .. {brief(large)} (at depth {cell.iodepth})")
    if shallow < deep:
        ranges.append(f"depths {shallow} .. {deep} (at {brief(cell.bs)})")
    return f"{' and '.join(ranges)} are equally fast" if ranges else f"none of them is next to {cell}"
