"""A result on one screen: what was measured, by what, how fast it is, and what that means for training.

Rates and latencies are one table where it is wide enough for that, else two. What the kernel did not tell of a drive
is left out.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from tiering.config.fields import format_size
from tiering.host.drives import Drive, FileSystem
from tiering.text import counted
from tiering.tierbench.display import figures
from tiering.tierbench.display.sparkline import levels, spark
from tiering.tierbench.result import Latencies, PathRow, Result, Row, Target, Verdict

if TYPE_CHECKING:
    from rich.console import Console

OTHERS_SHARE = 0.05  # of the bytes that were measured: less of others' is not worth a line

_PERCENTILES = ("p50", "p95", "p99", "p99.9", "max")
_SPARK = range(12, 41)  # columns
_INDENT = "  "


def show(result: Result, console: Console) -> None:
    """Print ``result``."""

    def put(text: str = "", style: str = "") -> None:
        # Lines are as they are to be: rich neither wraps them nor takes brackets in names for its own.
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    if result.failure is not None:
        put("Ended by a failure: this is what was measured until then.", style="bold red")
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
    put(_facts(_meaning(result), console.width))
    if result.config:
        put("\nto have this in a configuration:", style="dim")
        put(block(result.config, console.width))


def block(config: dict[str, Any], width: int) -> str:
    """``config`` as JSON, in lines of ``width`` as far as that goes."""
    return _object(config, width, "")


def _object(value: dict[str, Any], width: int, indent: str) -> str:
    """What holds nothing nested shares lines."""
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
    """Names, and beside them what they are."""
    told = list(facts)
    column = max(len(name) for name, _ in told) + 2
    return "\n".join(
        textwrap.fill(
            figures.legible(fact),
            max(width, 2 * column),
            initial_indent=name.ljust(column),
            subsequent_indent=" " * column,
            break_on_hyphens=False,
        )
        for name, fact in told
    )


def _interrupted(result: Result) -> str:
    cut = [f"{name} after {row.seconds:.1f} s" for name, row in figures.windows(result) if not row.complete]
    return f"Interrupted: this is what was measured until then{f' ({cut[0]})' if cut else ''}."


def _header(result: Result) -> Iterator[tuple[str, str]]:
    for target in result.targets:
        file_system = target.backing.file_system
        where = f", {_mounted(file_system)}" if file_system.kind != "unknown" else ""
        yield "directory", f"{target.directory}{where}, {format_size(target.free_bytes)} free"
        yield from (("drive", told) for told in _drives(target.backing.drives))
    yield "engine", ", ".join((result.engine.ioengine, *result.engine.flags))
    yield from (("not in use", f"{what}: {why}") for what, why in result.engine.passed_over.items())
    yield "load", figures.load(result)
    machine = result.machine
    memory = format_size(machine.memory_bytes)
    yield "machine", f"{machine.cpu}, {counted(machine.cpus, 'CPU')}, {memory}, {machine.kernel}"
    yield "measured", f"{result.date} by tierbench {result.version}"


def _mounted(file_system: FileSystem) -> str:
    upper = f", written to {_mounted(file_system.upper)}" if file_system.upper else ""
    return f"{file_system.type} on {file_system.source} at {file_system.mount_point}{upper}"


def _drives(drives: Sequence[Drive], over: str = "") -> Iterator[str]:
    """Each drive, and after it what it is made of; those that only their names tell apart share a line."""
    for _, alike in groupby(drives, key=lambda drive: replace(drive, name="")):
        same = list(alike)
        first, *others = (drive.name for drive in same)
        told = str(same[0])
        if others:
            told = f"{', '.join((first, *others))}, each {told.removeprefix(f'{first}, ')}"
        yield over + told
        yield from _drives(same[0].members, f"of {first}: ")


class _Line(NamedTuple):
    """A line of the tables: a window, or of a mixed one what went in one direction."""

    window: str
    direction: str
    rate: float
    iops: float
    latency: Latencies | None
    row: Row | None = None


def _lines(result: Result) -> Iterator[_Line]:
    for name, row in figures.windows(result):
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
    one = _columns([a + b + c for a, b, c in zip(speeds, latencies, costs, strict=True)])
    if len(one[0]) + _SPARK[0] < console.width:
        yield _with_sparks(one, lines, console)
    else:
        yield _with_sparks(_columns([a + b for a, b in zip(speeds, costs, strict=True)]), lines, console)
        named = [["latency", *_PERCENTILES]]
        named += [
            [f"{each.window} {each.direction}".strip(), *_latency(each)] for each in lines if each.latency
        ]
        yield _columns(named)
    if len(result.targets) > 1:
        yield _columns(list(_directories(result)))


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells below each other: the first of a line to the left, the others to the right."""
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
    name = f"  {line.direction}" if line.direction else line.window
    return [name, figures.gb(line.rate), figures.gib(line.rate), figures.operations(line.iops)]


def _latency(line: _Line) -> list[str]:
    told = line.latency
    if told is None:
        return [""] * len(_PERCENTILES)
    return [figures.latency(each) for each in (told.p50, told.p95, told.p99, told.p999, told.max)]


def _cost(line: _Line) -> list[str]:
    if line.row is None:
        return ["", ""]
    worst = line.row.worst_second
    return ["-" if worst is None else figures.gb(worst), figures.number(line.row.cpu_per_gb)]


def _directories(result: Result) -> Iterator[list[str]]:
    """What each directory had of the totals."""
    named = list(figures.windows(result))
    yield ["GB/s by directory", *(name for name, _ in named)]
    for place, target in enumerate(result.targets):
        moved = [_bytes(row.paths[place]) for _, row in named]
        yield [
            figures.legible(target.directory),
            *(
                f"{figures.gb(each / row.seconds)} ({each / max(1, row.bytes):.0%})"
                for each, (_, row) in zip(moved, named, strict=True)
            ),
        ]


def _bytes(path: PathRow) -> int:
    return path.read.bytes + path.write.bytes


def _meaning(result: Result) -> Iterator[tuple[str, str]]:
    """What else there is to say, the verdict last."""
    if result.sustained is not None:
        from tiering.tierbench import sustained

        rows = dict(figures.windows(result))
        yield "sustained", sustained.words(rows[figures.SUSTAINED], result.sustained)
    written, read = figures.nbytes(result.written_bytes), figures.nbytes(result.read_bytes)
    yield "moved", f"{written} written (wear, preparation included), {read} read"
    if result.verified_bytes is not None:
        yield "verified", f"{figures.nbytes(result.verified_bytes)} read are what was written"
    for place, target in enumerate(result.targets):
        ours = sum(_bytes(row.paths[place]) for row in result.rows)
        if (target.others_read or 0) + (target.others_written or 0) > OTHERS_SHARE * ours:
            yield "note", _others(target)
    yield from (("note", note) for note in result.notes)
    if result.verdict is not None:
        yield "training", _verdict(result.verdict, "this path" if len(result.targets) == 1 else "these paths")


def _others(target: Target) -> str:
    read, written = figures.nbytes(target.others_read or 0), figures.nbytes(target.others_written or 0)
    return f"{target.directory}: others read {read} and wrote {written} on its drive meanwhile; alone it is faster"


def _verdict(told: Verdict, where: str) -> str:
    bound = "reads and writes alike" if told.bound == "both" else told.bound
    return (
        f"Optimizer step of a {figures.number(told.params / 1e9)}B model with {told.state} state on {where}:"
        f" about {figures.duration(told.seconds, 2)}, bound by {bound}. It reads"
        f" {figures.nbytes(told.read_bytes)} and writes {figures.nbytes(told.write_bytes)}; stepping without pause"
        f" writes up to {figures.nbytes(told.written_per_day)} per day."
    )
