"""Results of ``tierbench DIR --json`` beside each other: rates, latencies and CPU time by window, the first as base.

Only like is compared with like: a window has to be in both, and buffered figures are never held against direct ones.
Whatever else differs is named, for it may be what is asked about. The interval of a ratio is of what swung within the
two windows (``spread``); what changed between them is in no sample.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tiering.errors import ConfigError
from tiering.tierbench.display import figures
from tiering.tierbench.result import Latencies, Record, Result, Row
from tiering.tierbench.spread import Estimate, rate_ratio

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
APART = (
    "these runs are of different times: the intervals know what swung within a window, not what changed between them."
    " For a close call repeat both in turn, or use `tierbench compare --fio DIR`"
)


class LatencyRatios(Record):
    """Of the base's: above 1 is slower."""

    p50: float
    p99: float


class Side(Record):
    """A window of one result; ratios are of its figures by the base's."""

    label: str
    rate: float
    iops: float
    cpu_per_gb: float
    read_latency: Latencies | None = None
    write_latency: Latencies | None = None
    ratio: float = 1.0
    interval: Estimate | None = Field(default=None, description="None: too few samples for one.")
    cpu_ratio: float | None = None
    read_latency_ratios: LatencyRatios | None = None
    write_latency_ratios: LatencyRatios | None = None


class Window(Record):
    """A kind of load, as the base saw it and as the others that had it did."""

    name: str
    base: Side
    others: tuple[Side, ...]


class File(Record):
    """A result, and what it is called here."""

    label: str
    path: str
    date: str
    command: str


class Between(Record):
    """What ``tierbench compare A.json B.json ...`` says; the first file is the base."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["compare"] = "compare"
    files: tuple[File, ...]
    windows: tuple[Window, ...]
    notes: tuple[str, ...]


def compare(paths: Sequence[Path]) -> Between:
    """Raises ConfigError for what is no result, and for results that cannot be held against each other."""
    if len(paths) < 2:
        raise ConfigError(
            f"{len(paths)} of at least two results are named; give files of `tierbench DIR --json`, or --fio DIR"
        )
    results = {_label(number): (path, Result.load(path)) for number, path in enumerate(paths)}
    (base_label, (base_path, base)), *others = results.items()
    for _, (path, other) in others:
        if other.settings.direct != base.settings.direct:
            direct, buffered = (base_path, path) if base.settings.direct else (path, base_path)
            raise ConfigError(
                f"{direct} is of O_DIRECT and {buffered} of the page cache: these are not figures of one thing;"
                " measure both alike"
            )
    notes = [
        f"{label}: {difference}" for label, (_, other) in others for difference in _differences(base, other)
    ]
    notes += [f"{label} was interrupted" for label, (_, result) in results.items() if result.interrupted]
    windows = []
    named = {
        label: {name: row for name, row in figures.windows(result) if row.bytes}  # of none there is no ratio
        for label, (_, result) in results.items()
    }
    for name, row in named[base_label].items():
        beside = {label: rows[name] for label, rows in named.items() if label != base_label and name in rows}
        if beside:
            sides = tuple(_side(label, other, row) for label, other in beside.items())
            windows.append(Window(name=name, base=_side(base_label, row), others=sides))
    if not windows:
        raise ConfigError(
            "the results have no window in common: "
            + "; ".join(f"{label} has {', '.join(rows) or 'none'}" for label, rows in named.items())
        )
    for name in dict.fromkeys(itertools.chain(*named.values())):
        lacking = [label for label, rows in named.items() if name not in rows]
        if lacking:
            notes.append(f"{name}: not in {', '.join(lacking)}")
    return Between(
        files=tuple(
            File(label=label, path=str(path), date=result.date, command=result.command)
            for label, (path, result) in results.items()
        ),
        windows=tuple(windows),
        notes=(*notes, APART),
    )


def _label(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"#{number + 1}"


def _differences(base: Result, other: Result) -> Iterator[str]:
    """What was not the same, apart from the figures."""
    for key, value in base.settings:
        if (now := getattr(other.settings, key)) != value and key != "direct":
            yield f"{key} is {now} instead of {value}"
    if base.engine.ioengine != other.engine.ioengine:
        yield f"the engine was {other.engine.ioengine} instead of {base.engine.ioengine}"
    elif set(base.engine.flags) != set(other.engine.flags):
        yield f"the engine used {_listed(other.engine.flags)} instead of {_listed(base.engine.flags)}"
    for key, value in base.machine:
        if (now := getattr(other.machine, key)) != value:
            yield f"the machine's {key} is {now} instead of {value}"
    before, after = _places(base), _places(other)
    for what, value in before.items():
        if after[what] != value:
            yield f"the {what} are {_listed(after[what])} instead of {_listed(value)}"
    if base.version != other.version:
        yield f"measured by tierbench {other.version} instead of {base.version}"


def _places(result: Result) -> dict[str, list[str]]:
    targets = result.targets
    return {
        "directories": [target.directory for target in targets],
        "drives": [str(drive) for target in targets for drive in target.backing.drives],
        "file systems": [target.backing.file_system.type for target in targets],
    }


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _side(label: str, row: Row, base: Row | None = None) -> Side:
    side = Side(
        label=label,
        rate=row.rate,
        iops=row.iops,
        cpu_per_gb=row.cpu_per_gb,
        read_latency=row.read.latency,
        write_latency=row.write.latency,
    )
    if base is None:
        return side
    ratio = row.rate / base.rate
    return side.model_copy(
        update={
            "ratio": ratio,
            "interval": rate_ratio(_rates(base), _rates(row), point=ratio),
            "cpu_ratio": row.cpu_per_gb / base.cpu_per_gb if base.cpu_per_gb else None,
            "read_latency_ratios": _latency_ratios(row.read.latency, base.read.latency),
            "write_latency_ratios": _latency_ratios(row.write.latency, base.write.latency),
        }
    )


def _rates(row: Row) -> list[float]:
    """Of the samples; one that was cut short, as the last may be, says little."""
    ends = [sample.at for sample in row.samples]
    lengths = [end - begin for begin, end in itertools.pairwise([0.0, *ends])]
    usual = statistics.median(lengths) if lengths else 0.0
    return [sample.rate for sample, length in zip(row.samples, lengths, strict=True) if length >= usual / 2]


def _latency_ratios(latency: Latencies | None, base: Latencies | None) -> LatencyRatios | None:
    if latency is None or base is None or not (base.p50 and base.p99):
        return None
    return LatencyRatios(p50=latency.p50 / base.p50, p99=latency.p99 / base.p99)


def show(found: Between, console: Console) -> None:
    """Print it."""
    from tiering.figures_table import FiguresTable

    def put(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for file in found.files:
        put(f"{file.label}  {figures.legible(file.path)}, {file.date}")
        put(f"   {figures.legible(file.command)}")
    table = FiguresTable(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("", "", "GB/s", "GiB/s", "ratio (95 %)", "p50", "p99", "CPU s/GB"):
        table.add_column(column, justify="left" if column in ("", "ratio (95 %)") else "right", no_wrap=True)
    for window in found.windows:
        for side in (window.base, *window.others):
            table.add_row(window.name if side is window.base else "", *_cells(side, window))
    put("")
    console.print(table)
    put("")
    for window in found.windows:
        for side in window.others:
            put(f"{window.name}: {_said(side, window.base)}")
    for note in found.notes:
        put(f"note: {figures.legible(note)}")


def _cells(side: Side, window: Window) -> Iterator[str]:
    """The base's figures, and of others what they are of these."""
    yield side.label
    yield figures.gb(side.rate)
    yield figures.gib(side.rate)
    based = side is window.base
    yield "" if based else str(side.interval or f"{side.ratio:.3f}")
    directions = [
        (way, latency, ratios)
        for way, latency, ratios in (
            ("r", side.read_latency, side.read_latency_ratios),
            ("w", side.write_latency, side.write_latency_ratios),
        )
        if latency is not None
    ]
    for which in ("p50", "p99"):
        told = []
        for way, latency, ratios in directions:
            value = (
                figures.latency(getattr(latency, which))
                if ratios is None
                else f"x{getattr(ratios, which):.2f}"
            )
            told.append(f"{value} {way}" if len(directions) > 1 else value)
        yield "\n".join(told)
    if based or side.cpu_ratio is None:
        yield figures.number(side.cpu_per_gb)
    else:
        yield f"x{side.cpu_ratio:.2f}"


def _said(side: Side, base: Side) -> str:
    if side.interval is None:
        return f"{side.label} is {side.ratio:.3f} of {base.label}: too few samples to tell that from noise"
    return side.interval.of_rates(side.label, base.label)
