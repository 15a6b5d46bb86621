"""A result on one screen: the target, the load, the rates, and the training estimate.

Rates and latencies are one table if the terminal is wide enough, else two. Facts that the kernel does not report about
a drive are omitted.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from tiering._text import counted
from tiering.config.fields import format_size
from tiering.host.drives import Drive, FileSystem
from tiering.tierbench.display import figures
from tiering.tierbench.display.sparkline import levels, spark
from tiering.tierbench.result import Latencies, PathRow, Result, Row, StepVerdict, Target

if TYPE_CHECKING:
    from rich.console import Console

OTHER_TRAFFIC_SHARE = 0.05  # of the measured bytes; less traffic of other processes is not reported

_PERCENTILES = ("p50", "p95", "p99", "p99.9", "max")
_SPARK = range(12, 41)  # columns
_INDENT = "  "


def show(result: Result, console: Console) -> None:
    """Print ``result``."""

    def put(text: str = "", style: str = "") -> None:
        # The lines are already wrapped, and brackets in names are not rich's markup.
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    if result.failure is not None:
        put("The run failed; these are the measurements so far.", style="bold red")
        put()
    elif result.interrupted:
        put(_interrupted(result), style="bold yellow")
        put()
    put(_facts(_header(result), console.width))
    for header, *rows in _tables(result, console):
        put()
        put(header, style="bold")
        put("\n".join(rows))
    put()
    put(_facts(_summary(result), console.width))
    if result.config:
        put("\nto paste into a configuration:", style="dim")
        put(block(result.config, console.width))


def block(config: dict[str, Any], width: int) -> str:
    """``config`` as JSON, in lines of at most ``width`` characters where possible."""
    return _object(config, width, "")


def _object(value: dict[str, Any], width: int, indent: str) -> str:
    """Format an object; members without nested objects share lines."""
    inner = indent + _INDENT
    lines: list[str] = []
    shared = False
    for key, each in value.items():
        nested = isinstance(each, dict)
        item = f"{json.dumps(key)}: {json.dumps(each)}"
        if nested and len(inner + item) >= width:
            item = f"{json.dumps(key)}: {_object(each, width, inner)}"
        if shared and not nested and len(f"{inner}{lines[-1]}, {item}") < width:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
        shared = not nested
    return "{\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}}}"


def _facts(facts: Iterable[tuple[str, str]], width: int) -> str:
    """Two columns: names and their values."""
    items = list(facts)
    width_of_names = max(len(name) for name, _ in items) + 2
    return "\n".join(
        textwrap.fill(
            figures.legible(fact),
            max(width, 2 * width_of_names),
            initial_indent=name.ljust(width_of_names),
            subsequent_indent=" " * width_of_names,
            break_on_hyphens=False,
        )
        for name, fact in items
    )


def _interrupted(result: Result) -> str:
    cut = [
        f"{name} after {row.seconds:.1f} s" for name, row in figures.named_rows(result) if not row.complete
    ]
    return f"Interrupted{f' ({cut[0]})' if cut else ''}: these are the measurements so far."


def _header(result: Result) -> Iterator[tuple[str, str]]:
    for target in result.targets:
        file_system = target.backing.file_system
        mount = f", {_mounted(file_system)}" if file_system.kind != "unknown" else ""
        yield "directory", f"{target.directory}{mount}, {format_size(target.free_bytes)} free"
        yield from (("drive", drive) for drive in _drives(target.backing.drives))
    yield "engine", ", ".join((result.engine.ioengine, *result.engine.flags))
    yield from (("refused", f"{feature}: {reason}") for feature, reason in result.engine.passed_over.items())
    yield "load", figures.load(result)
    machine = result.machine
    memory = format_size(machine.memory_bytes)
    yield "machine", f"{machine.cpu}, {counted(machine.cpus, 'CPU')}, {memory}, {machine.kernel}"
    yield "measured", f"{result.date} by tierbench {result.version}"


def _mounted(file_system: FileSystem) -> str:
    upper = f", written to {_mounted(file_system.upper)}" if file_system.upper else ""
    return f"{file_system.type} on {file_system.source} at {file_system.mount_point}{upper}"


def _drives(drives: Sequence[Drive], prefix: str = "") -> Iterator[str]:
    """Each drive, followed by its members; drives that differ only in name share a line."""
    for _, alike in groupby(drives, key=lambda drive: replace(drive, name="")):
        identical = list(alike)
        first, *others = (drive.name for drive in identical)
        description = str(identical[0])
        if others:
            description = f"{', '.join((first, *others))}, each {description.removeprefix(f'{first}, ')}"
        yield prefix + description
        yield from _drives(identical[0].members, f"of {first}: ")


class _Line(NamedTuple):
    """A line of the tables: an interval, or one direction of a mixed interval."""

    name: str
    direction: str
    rate: float
    iops: float
    latency: Latencies | None
    row: Row | None = None


def _lines(result: Result) -> Iterator[_Line]:
    for name, row in figures.named_rows(result):
        directions = list(row.directions())
        mixed = len(directions) > 1
        latency = directions[0][1].latency if len(directions) == 1 else None
        yield _Line(name, "", row.rate, row.iops, latency, row)
        for direction, traffic in directions if mixed else ():
            rate, iops = traffic.bytes / row.seconds, traffic.ops / row.seconds
            yield _Line(name, f"{direction}s", rate, iops, traffic.latency)


def _tables(result: Result, console: Console) -> Iterator[list[str]]:
    lines = list(_lines(result))
    if not lines:
        return
    speeds = [["", "GB/s", "GiB/s", "IOPS"], *map(_speed, lines)]
    latencies = [[*_PERCENTILES], *map(_latency, lines)]
    costs = [["worst second", "CPU s/GB"], *map(_cost, lines)]
    wide_table = _columns([a + b + c for a, b, c in zip(speeds, latencies, costs, strict=True)])
    if len(wide_table[0]) + _SPARK[0] < console.width:
        yield _with_sparks(wide_table, lines, console)
    else:
        yield _with_sparks(_columns([a + b for a, b in zip(speeds, costs, strict=True)]), lines, console)
        latency_rows = [["latency", *_PERCENTILES]]
        latency_rows += [
            [f"{each.name} {each.direction}".strip(), *_latency(each)] for each in lines if each.latency
        ]
        yield _columns(latency_rows)
    if len(result.targets) > 1:
        yield _columns(list(_directories(result)))


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines of aligned cells: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _with_sparks(table: list[str], lines: Sequence[_Line], console: Console) -> list[str]:
    width = min(_SPARK[-1], max(_SPARK[0], console.width - len(table[0]) - 2))
    characters = levels(console.encoding)
    sparks = [
        spark([sample.rate for sample in line.row.samples], width, characters) if line.row else ""
        for line in lines
    ]
    return [f"{text}  {more}".rstrip() for text, more in zip(table, ["over time", *sparks], strict=True)]


def _speed(line: _Line) -> list[str]:
    name = f"  {line.direction}" if line.direction else line.name
    return [name, figures.gb(line.rate), figures.gib(line.rate), figures.operations(line.iops)]


def _latency(line: _Line) -> list[str]:
    percentiles = line.latency
    if percentiles is None:
        return [""] * len(_PERCENTILES)
    return [
        figures.latency(each)
        for each in (percentiles.p50, percentiles.p95, percentiles.p99, percentiles.p999, percentiles.max)
    ]


def _cost(line: _Line) -> list[str]:
    if line.row is None:
        return ["", ""]
    worst = line.row.worst_second
    return ["-" if worst is None else figures.gb(worst), figures.number(line.row.cpu_per_gb)]


def _directories(result: Result) -> Iterator[list[str]]:
    """Each directory's part of the totals."""
    rows_by_name = list(figures.named_rows(result))
    yield ["GB/s by directory", *(name for name, _ in rows_by_name)]
    for place, target in enumerate(result.targets):
        moved = [_bytes(row.paths[place]) for _, row in rows_by_name]
        yield [
            figures.legible(target.directory),
            *(
                f"{figures.gb(each / row.seconds)} ({each / max(1, row.bytes):.0%})"
                for each, (_, row) in zip(moved, rows_by_name, strict=True)
            ),
        ]


def _bytes(path: PathRow) -> int:
    return path.read.bytes + path.write.bytes


def _summary(result: Result) -> Iterator[tuple[str, str]]:
    """Remaining facts and notes, with the verdict last."""
    if result.sustained is not None:
        from tiering.tierbench import sustained

        rows = dict(figures.named_rows(result))
        yield "sustained", sustained.describe(rows[figures.SUSTAINED], result.sustained)
    written, read = figures.nbytes(result.written_bytes), figures.nbytes(result.read_bytes)
    yield "moved", f"{written} written (wear, preparation included), {read} read"
    if result.verified_bytes is not None:
        yield "verified", f"{figures.nbytes(result.verified_bytes)} read, all equal to the written data"
    for place, target in enumerate(result.targets):
        own_bytes = sum(_bytes(row.paths[place]) for row in result.rows)
        if (target.others_read or 0) + (target.others_written or 0) > OTHER_TRAFFIC_SHARE * own_bytes:
            yield "note", _other_traffic(target)
    yield from (("note", note) for note in result.notes)
    if result.verdict is not None:
        yield "training", _verdict(result.verdict, "this path" if len(result.targets) == 1 else "these paths")


def _other_traffic(target: Target) -> str:
    read, written = figures.nbytes(target.others_read or 0), figures.nbytes(target.others_written or 0)
    return (
        f"{target.directory}: other processes read {read} and wrote {written} on its drive during the run, which slowed"
        " it down"
    )


def _verdict(verdict: StepVerdict, path_words: str) -> str:
    bound = "reads and writes equally" if verdict.bound == "both" else verdict.bound
    return (
        f"Optimizer step of a {figures.number(verdict.params / 1e9)}B model with {verdict.state} state on {path_words}:"
        f" about {figures.duration(verdict.seconds, 2)}, bound by {bound}. It reads"
        f" {figures.nbytes(verdict.read_bytes)} and writes {figures.nbytes(verdict.write_bytes)}; steps without a pause"
        f" write up to {figures.nbytes(verdict.written_per_day)} per day."
    )
