"""Runs as a terminal shows them: lines and bars, the most important first. Pure: answers and history in, lines out.

Text out of pages is shown without whatever could command a terminal. Without colours nothing is lost, and a terminal
that lacks block characters gets ASCII.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.advice import Advice
from service.formatting import counted, listed, plain, rate, seconds, share, size
from service.history import Entry
from service.responses.status import RankStatus, RunStatus, Status
from tiering.telemetry import CopyStatus, DirectionStatus, PathStatus

_STATE_STYLES = {"training": "green", "live": "green", "degraded": "bold red", "ended": "bold red"}
_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}
MOST_PATHS = 6
TOLD = 0.01  # of the steps: causes of less are left out


@dataclass(frozen=True)
class Marks:
    """The characters that pictures are made of."""

    full: str
    empty: str
    peak: str
    heights: str
    signs: dict[str, str]
    remedy: str
    cut: str


BLOCKS = Marks("█", "░", "▌", "▁▂▃▄▅▆▇█", {"error": "✗", "warning": "!", "info": "·"}, "→", "…")
ASCII = Marks("#", "-", "|", "_.-=+*#@", {"error": "x", "warning": "!", "info": "."}, ">", "~")


def marks(encoding: str) -> Marks:
    """Those that ``encoding`` has."""
    return BLOCKS if encoding.lower().replace("-", "").startswith("utf") else ASCII


def pictured(
    told: Status, width: int, drawn: Marks, history: Callable[[str], Sequence[Entry]] | None = None
) -> RenderableType:
    """All runs, those in trouble first: several in a line each, and then one by one.

    ``history`` has what happened of late, by id.
    """
    if not told.runs:
        return Text(
            plain(
                f"no run has a page in {told.directory}: none trains, or it has another run directory (TIERING_RUN_DIR)"
            )
        )
    runs = sorted(told.runs, key=lambda run: run.state == "training")
    parts: list[RenderableType] = [_title(run) for run in runs] if len(runs) > 1 else []
    for run in runs:
        if parts:
            parts.append(Text())
        parts += _run(run, told.taken_at, width, drawn, history(run.id) if history is not None else ())
    return Group(*parts)


def _run(
    run: RunStatus, now: float, width: int, drawn: Marks, entries: Sequence[Entry]
) -> Iterator[RenderableType]:
    yield _title(run)
    about = [run.device, run.configuration]
    if run.started_at is not None:
        about.insert(1, f"up {seconds(max(0.0, now - run.started_at))}")
    if any(about):
        yield Text(plain(" - ".join(one for one in about if one)), "dim", no_wrap=True, overflow="crop")
    yield from (_advice(one, drawn) for one in run.warnings if one.severity != "info")
    yield from _tiers(run.ranks, width, drawn)
    yield from _paths(run.ranks, width, drawn)
    yield from _link(run.ranks)
    yield from _lately(run.ranks, entries, width, drawn)
    yield from _stalls(run.ranks)
    if len(run.ranks) > 1 or run.state != "training":
        yield _ranks(run.ranks)
    yield from (_advice(one, drawn) for one in run.warnings if one.severity == "info")


def _title(run: RunStatus) -> Text:
    facts = [f"{run.ranks_live} of {run.ranks_expected} ranks"] if run.ranks_expected > 1 else []
    if run.step is not None:
        facts.append(f"step {run.step}")
    if run.step_seconds is not None:
        facts.append(f"{seconds(run.step_seconds)} a step")
    if samples := run.samples_per_second:
        facts.append(f"{samples:{'.2g' if samples < 100 else '.0f'}} samples/s")
    if run.stall_share is not None:
        facts.append(f"{share(run.stall_share)} stall")
    if run.loss is not None:
        facts.append(f"loss {run.loss:.4g}")
    title = Text(plain(run.name), "bold", no_wrap=True, overflow="crop")
    title.append("  ").append(run.state, _STATE_STYLES[run.state]).append("  " + ", ".join(facts), "not bold")
    return title


def _advice(one: Advice, drawn: Marks) -> RenderableType:
    about = f"rank {listed(map(str, one.ranks))}: " if one.ranks and "rank" not in one.text else ""
    line = Table.grid(padding=(0, 1))
    line.add_row(
        Text(drawn.signs[one.severity], _STYLES[one.severity]),
        Text(plain(about + one.text), _STYLES[one.severity]),
    )
    if one.remedy:
        line.add_row("", Text(plain(f"{drawn.remedy} {one.remedy}")))
    return line


def _tiers(ranks: Sequence[RankStatus], width: int, drawn: Marks) -> Iterator[RenderableType]:
    """Those of all ranks together: each has its part of the node's budgets."""
    rows = Table.grid(padding=(0, 1))
    for column in range(5):
        rows.add_column(justify="right" if column in (2, 3) else "left", no_wrap=True, overflow="crop")
    for name in ("device", "host", "nvme"):
        tiers = [tier for rank in ranks for tier in rank.tiers if tier.name == name]
        used, budget = sum(tier.used for tier in tiers), sum(tier.budget for tier in tiers)
        peak = sum(tier.peak for tier in tiers)
        if not budget:
            continue
        free = [tier.available for tier in tiers if tier.available is not None]
        rows.add_row(
            name,
            bar(used / budget, peak / budget, max(10, min(40, width - 58)), drawn),
            f"{size(used)} of {size(budget)}",
            f"peak {size(peak)}",
            f"{size(min(free))} free" if free else "",
        )
    if rows.row_count:
        yield rows
    torch = [rank.device_memory for rank in ranks if rank.device_memory is not None]
    if torch:
        allocated, peak = sum(one.allocated for one in torch), sum(one.peak for one in torch)
        reserved = sum(one.reserved for one in torch)
        yield Text(
            f"torch in all: {size(allocated)} in tensors, peak {size(peak)}, {size(reserved)} reserved"
        )


def bar(filled: float, peak: float, width: int, drawn: Marks) -> Text:
    """``filled`` of one, with a mark at ``peak``."""
    full = round(max(0.0, min(1.0, filled)) * width)
    line = Text(drawn.full * full, "cyan").append(drawn.empty * (width - full), "dim")
    at = min(width - 1, round(max(0.0, min(1.0, peak)) * width))
    if not peak or at < full:
        return line
    return line[:at].append(drawn.peak, "magenta").append_text(line[at + 1 :])


def _paths(ranks: Sequence[RankStatus], width: int, drawn: Marks) -> Iterator[RenderableType]:
    by_name: dict[str, list[PathStatus]] = {}
    for rank in ranks:
        for path in rank.io:
            by_name.setdefault(path.path, []).append(path)
    if not by_name:
        return
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True, overflow="crop")
    for _ in range(5):
        rows.add_column(justify="right", no_wrap=True, overflow="crop")
    rows.add_row(
        *(Text(heading, "dim") for heading in ("path", "read", "average", "written", "average", "p99"))
    )
    for name, paths in list(by_name.items())[:MOST_PATHS]:
        read, written = [path.read for path in paths], [path.written for path in paths]
        slowest = max((one.latency.p99 for one in (*read, *written) if one.latency is not None), default=None)
        rows.add_row(
            tail(plain(name), max(12, width - 58), drawn),
            rate(sum(one.bytes_per_second for one in read)),
            rate(_average(read)),
            rate(sum(one.bytes_per_second for one in written)),
            rate(_average(written)),
            seconds(slowest) if slowest is not None else "",
        )
    yield rows
    if len(by_name) > MOST_PATHS:
        yield Text(f"and {counted(len(by_name) - MOST_PATHS, 'more path')}", "dim")


def _average(directions: Sequence[DirectionStatus | CopyStatus]) -> float:
    return sum(one.average_bytes_per_second for one in directions)


def _link(ranks: Sequence[RankStatus]) -> Iterator[RenderableType]:
    links = [rank.link for rank in ranks if rank.link is not None]
    if links:
        told = [
            f"{rate(sum(one.bytes_per_second for one in way))} {word} ({rate(_average(way))} while copying)"
            for word, way in (("to it", [one.h2d for one in links]), ("back", [one.d2h for one in links]))
        ]
        measured = [one.measured_bytes_per_second for one in links if one.measured_bytes_per_second]
        told += [f"{rate(sum(measured))} each way measured"] if measured else []
        yield Text(f"device link: {', '.join(told)}")


def _lately(
    ranks: Sequence[RankStatus], entries: Sequence[Entry], width: int, drawn: Marks
) -> Iterator[RenderableType]:
    """Lines of recent values: bandwidth and stall over time, seconds over steps."""
    rows = Table.grid(padding=(0, 1))
    rows.add_column(no_wrap=True, overflow="crop")
    rows.add_column(no_wrap=True, overflow="crop", justify="right")  # the latest of each below each other
    rows.add_column(no_wrap=True, overflow="crop")
    room = max(10, min(60, width - 30))
    over_time: list[tuple[str, list[float | None], Callable[[float], str]]] = [
        ("read", [one.read for one in entries], rate),
        ("written", [one.written for one in entries], rate),
        ("h2d", [one.h2d for one in entries], rate),
        ("d2h", [one.d2h for one in entries], rate),
        ("sent", [one.sent for one in entries], rate),
    ]
    for name, values, words in over_time:
        most = max((value for value in values[-room:] if value is not None), default=0.0)
        if most:
            rows.add_row(name, sparkline(values[-room:], most, drawn), f"up to {words(most)}")
    stalls = [one.stall for one in entries][-room:]
    if any(stalls):
        rows.add_row("stall", sparkline(stalls, 1.0, drawn), "of each second")
    stepping = [rank for rank in ranks if rank.steps]
    if stepping:
        steps = max(stepping, key=lambda rank: rank.step_seconds or 0.0).steps[-room:]
        most = max(step.seconds for step in steps)
        if most:
            line = sparkline([step.seconds for step in steps], most, drawn)
            rows.add_row("steps", line, f"up to {seconds(most)}")
    if rows.row_count:
        yield rows


def sparkline(values: Sequence[float | None], most: float, drawn: Marks) -> Text:
    """One character per value, as high as its part of ``most``; blank where nothing is known."""
    highest = len(drawn.heights) - 1
    line = "".join(
        " " if value is None else drawn.heights[round(highest * max(0.0, min(1.0, value / most)))]
        for value in values
    )
    return Text(line, "cyan")


def _stalls(ranks: Sequence[RankStatus]) -> Iterator[RenderableType]:
    """Of the rank that stalled most in its recent steps."""
    most = max(ranks, key=lambda rank: rank.stall_share or 0.0)
    told = [f"{cause} {share(part)}" for cause, part in most.stall_causes.items() if part > TOLD]
    if told:
        yield Text(plain(f"stalls of recent steps: {', '.join(told)}"))


def _ranks(ranks: Sequence[RankStatus]) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    headings = ("rank", "state", "step", "phase", "a step", "stall", "read", "written")
    for heading in headings:
        rows.add_column(
            justify="left" if heading in ("state", "phase") else "right", no_wrap=True, overflow="crop"
        )
    rows.add_row(*(Text(heading, "dim") for heading in headings))
    for rank in ranks:
        rows.add_row(
            str(rank.rank),
            Text(rank.state, _STATE_STYLES.get(rank.state, "red")),
            "" if rank.step is None else str(rank.step),
            plain(rank.phase or ""),
            "" if rank.step_seconds is None else seconds(rank.step_seconds),
            "" if rank.stall_share is None else share(rank.stall_share),
            rate(sum(path.read.bytes_per_second for path in rank.io)),
            rate(sum(path.written.bytes_per_second for path in rank.io)),
        )
    return rows


def tail(name: str, width: int, drawn: Marks) -> str:
    """The end of a path tells it from others."""
    return name if len(name) <= width else drawn.cut + name[1 - width :]
