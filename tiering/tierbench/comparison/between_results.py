"""Comparison of results of ``tierbench DIR --json``: rates, latencies and CPU time, with the first result as base.

An interval is compared only if both results have it, and buffered results are never compared with direct ones. Other
differences are reported, because they may be the purpose of the comparison. The confidence interval of a ratio comes
from the samples within the two measurement intervals (``spread``); it does not include changes between them.
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
from tiering.tierbench.result import Latencies, Result, ResultPart, Row
from tiering.tierbench.spread import Estimate, rate_ratio

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
TIME_NOTE = (
    "these runs are of different times: the confidence intervals do not include changes between the runs. If a result"
    " is close, repeat both runs alternately, or use `tierbench compare --fio DIR`"
)


class LatencyRatios(ResultPart):
    """Ratios to the base's latencies; above 1 is slower."""

    p50: float
    p99: float


class IntervalFigures(ResultPart):
    """The figures of one interval of a result; ratios are its figures divided by the base's."""

    label: str
    rate: float
    iops: float
    cpu_per_gb: float
    read_latency: Latencies | None = None
    write_latency: Latencies | None = None
    ratio: float = 1.0
    interval: Estimate | None = Field(
        default=None, description="95 % confidence interval of ``ratio``; None if there are too few samples."
    )
    cpu_ratio: float | None = None
    read_latency_ratios: LatencyRatios | None = None
    write_latency_ratios: LatencyRatios | None = None


class ComparedInterval(ResultPart):
    """One kind of load, with the figures of the base and of the other results that have it."""

    name: str
    base: IntervalFigures
    others: tuple[IntervalFigures, ...]


class ResultFile(ResultPart):
    """A result file and its label."""

    label: str
    path: str
    date: str
    command: str


class ResultsComparison(ResultPart):
    """The result of ``tierbench compare A.json B.json ...``; the first file is the base."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["compare"] = "compare"
    files: tuple[ResultFile, ...]
    windows: tuple[ComparedInterval, ...]
    notes: tuple[str, ...]


def compare(paths: Sequence[Path]) -> ResultsComparison:
    """Compare the results in ``paths``. Raises ConfigError for an invalid file, and for results that do not compare."""
    if len(paths) < 2:
        raise ConfigError(
            f"at least two results are needed, not {len(paths)}; give files of `tierbench DIR --json`, or --fio DIR"
        )
    results = {_label(number): (path, Result.load(path)) for number, path in enumerate(paths)}
    (base_label, (base_path, base)), *other_results = results.items()
    for _, (path, other) in other_results:
        if other.settings.direct != base.settings.direct:
            direct, buffered = (base_path, path) if base.settings.direct else (path, base_path)
            raise ConfigError(
                f"{direct} was measured with O_DIRECT and {buffered} through the page cache, so they cannot be"
                " compared; measure both with the same --direct"
            )
    notes = [
        f"{label}: {difference}"
        for label, (_, other) in other_results
        for difference in _differences(base, other)
    ]
    notes += [f"{label} was interrupted" for label, (_, result) in results.items() if result.interrupted]
    intervals = []
    # A row without bytes has no ratio.
    rows_by_name = {
        label: {name: row for name, row in figures.named_rows(result) if row.bytes}
        for label, (_, result) in results.items()
    }
    for name, row in rows_by_name[base_label].items():
        rows_of_name = {
            label: rows[name] for label, rows in rows_by_name.items() if label != base_label and name in rows
        }
        if rows_of_name:
            sides = tuple(_side(label, other, row) for label, other in rows_of_name.items())
            intervals.append(ComparedInterval(name=name, base=_side(base_label, row), others=sides))
    if not intervals:
        raise ConfigError(
            "the results have no kind of load in common: "
            + "; ".join(f"{label} has {', '.join(rows) or 'none'}" for label, rows in rows_by_name.items())
        )
    for name in dict.fromkeys(itertools.chain(*rows_by_name.values())):
        missing = [label for label, rows in rows_by_name.items() if name not in rows]
        if missing:
            notes.append(f"{name}: not in {', '.join(missing)}")
    return ResultsComparison(
        files=tuple(
            ResultFile(label=label, path=str(path), date=result.date, command=result.command)
            for label, (path, result) in results.items()
        ),
        windows=tuple(intervals),
        notes=(*notes, TIME_NOTE),
    )


def _label(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"#{number + 1}"


def _differences(base: Result, other: Result) -> Iterator[str]:
    """The differences in settings, engine, machine, targets and version."""
    for key, value in base.settings:
        if (other_value := getattr(other.settings, key)) != value and key != "direct":
            yield f"{key} is {other_value} instead of {value}"
    if base.engine.ioengine != other.engine.ioengine:
        yield f"the engine was {other.engine.ioengine} instead of {base.engine.ioengine}"
    elif set(base.engine.flags) != set(other.engine.flags):
        yield f"the engine used {_listed(other.engine.flags)} instead of {_listed(base.engine.flags)}"
    for key, value in base.machine:
        if (other_value := getattr(other.machine, key)) != value:
            yield f"the machine's {key} is {other_value} instead of {value}"
    before, after = _target_names(base), _target_names(other)
    for kind, value in before.items():
        if after[kind] != value:
            yield f"the {kind} are {_listed(after[kind])} instead of {_listed(value)}"
    if base.version != other.version:
        yield f"measured by tierbench {other.version} instead of {base.version}"


def _target_names(result: Result) -> dict[str, list[str]]:
    targets = result.targets
    return {
        "directories": [target.directory for target in targets],
        "drives": [str(drive) for target in targets for drive in target.backing.drives],
        "file systems": [target.backing.file_system.type for target in targets],
    }


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _side(label: str, row: Row, base: Row | None = None) -> IntervalFigures:
    side = IntervalFigures(
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
    """The samples' rates, without samples shorter than half the usual length, such as the last one."""
    ends = [sample.at for sample in row.samples]
    lengths = [end - begin for begin, end in itertools.pairwise([0.0, *ends])]
    usual = statistics.median(lengths) if lengths else 0.0
    return [sample.rate for sample, length in zip(row.samples, lengths, strict=True) if length >= usual / 2]


def _latency_ratios(latency: Latencies | None, base: Latencies | None) -> LatencyRatios | None:
    if latency is None or base is None or not (base.p50 and base.p99):
        return None
    return LatencyRatios(p50=latency.p50 / base.p50, p99=latency.p99 / base.p99)


def show(comparison: ResultsComparison, console: Console) -> None:
    """Print ``comparison``."""
    from tiering._figures_table import FiguresTable

    def put(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for file in comparison.files:
        put(f"{file.label}  {figures.legible(file.path)}, {file.date}")
        put(f"   {figures.legible(file.command)}")
    table = FiguresTable(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("", "", "GB/s", "GiB/s", "ratio (95 %)", "p50", "p99", "CPU s/GB"):
        table.add_column(column, justify="left" if column in ("", "ratio (95 %)") else "right", no_wrap=True)
    for interval in comparison.windows:
        for side in (interval.base, *interval.others):
            table.add_row(interval.name if side is interval.base else "", *_cells(side, interval))
    put("")
    console.print(table)
    put("")
    for interval in comparison.windows:
        for side in interval.others:
            put(f"{interval.name}: {_conclusion(side, interval.base)}")
    for note in comparison.notes:
        put(f"note: {figures.legible(note)}")


def _cells(side: IntervalFigures, interval: ComparedInterval) -> Iterator[str]:
    """The cells of the base's figures, or another result's ratios to them."""
    yield side.label
    yield figures.gb(side.rate)
    yield figures.gib(side.rate)
    is_base = side is interval.base
    yield "" if is_base else str(side.interval or f"{side.ratio:.3f}")
    directions = [
        (way, latency, ratios)
        for way, latency, ratios in (
            ("r", side.read_latency, side.read_latency_ratios),
            ("w", side.write_latency, side.write_latency_ratios),
        )
        if latency is not None
    ]
    for percentile in ("p50", "p99"):
        latencies = []
        for way, latency, ratios in directions:
            value = (
                figures.latency(getattr(latency, percentile))
                if ratios is None
                else f"x{getattr(ratios, percentile):.2f}"
            )
            latencies.append(f"{value} {way}" if len(directions) > 1 else value)
        yield "\n".join(latencies)
    if is_base or side.cpu_ratio is None:
        yield figures.number(side.cpu_per_gb)
    else:
        yield f"x{side.cpu_ratio:.2f}"


def _conclusion(side: IntervalFigures, base: IntervalFigures) -> str:
    if side.interval is None:
        return (
            f"{side.label} has {side.ratio:.3f} times the rate of {base.label};"
            " there are too few samples for a confidence interval"
        )
    return side.interval.of_rates(side.label, base.label)
