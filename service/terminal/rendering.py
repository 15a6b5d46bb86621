"""The runs as text for a terminal: lines and bars, the most important first. Pure functions.

Control characters in text from status files are removed. The output is complete without colours. A terminal without
block characters gets ASCII.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.advice import Advice
from service.formatting import counted, joined, plain, rate, seconds, share, size
from service.history import HistoryEntry
from service.responses.status import NodeStatus, RankStatus, RunStatus, Status
from tiering.telemetry import CopyStatus, DirectionStatus, PathStatus

_STATE_STYLES = {
    "training": "green",
    "live": "green",
    "stuck": "bold red",
    "degraded": "bold red",
    "ended": "bold red",
}
_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}
MAX_PATHS = 6
MAX_NODES = 8  # lines for nodes that do not answer
MAX_RANKS = 64  # lines of the table of ranks
# The age of the last step is shown when it is over this many seconds and usual steps.
RECENT_SECONDS, RECENT_STEPS = 10.0, 5.0
MIN_CAUSE_FRACTION = 0.01  # of the steps: smaller causes are left out


@dataclass(frozen=True)
class Symbols:
    """The characters for bars, sparklines and signs."""

    full: str
    empty: str
    peak: str
    heights: str
    signs: dict[str, str]
    remedy: str
    cut: str


BLOCKS = Symbols("█", "░", "▌", "▁▂▃▄▅▆▇█", {"error": "✗", "warning": "!", "info": "·"}, "→", "…")
ASCII = Symbols("#", "-", "|", "_.-=+*#@", {"error": "x", "warning": "!", "info": "."}, ">", "~")


def symbols_for(encoding: str) -> Symbols:
    """The symbols that ``encoding`` can represent."""
    return BLOCKS if encoding.lower().replace("-", "").startswith("utf") else ASCII


def rendered(
    status: Status,
    width: int,
    symbols: Symbols,
    history: Callable[[str], Sequence[HistoryEntry]] | None = None,
) -> RenderableType:
    """All runs, those with problems first: one line for each if there are several, then each in detail.

    ``history`` returns the recent entries of a run id.
    """
    parts: list[RenderableType] = list(_nodes(status.nodes, symbols))
    if not status.runs:
        place = f"on {status.directory}" if status.nodes else f"in {status.directory}"
        cause = "none is training, or it uses another run directory (TIERING_RUN_DIR)"
        return Group(*parts, Text(plain(f"no run has a status file {place}: {cause}")))
    runs = sorted(status.runs, key=lambda run: run.state == "training")
    if len(runs) > 1:
        parts += [_title(run, status.taken_at) for run in runs]
    several_users = len({run.user for run in runs}) > 1
    for run in runs:
        if parts:
            parts.append(Text())
        entries = history(run.id) if history is not None else ()
        parts += _run(run, status.taken_at, width, symbols, entries, run.user if several_users else "")
    return Group(*parts)


def _nodes(nodes: Sequence[NodeStatus], symbols: Symbols) -> Iterator[RenderableType]:
    """The nodes that do not answer."""
    lost = [node for node in nodes if not node.answers]
    if lost:
        yield Text(
            plain(
                f"{len(lost)} of {counted(len(nodes), 'node')} {'does' if len(lost) == 1 else 'do'} not answer"
            ),
            "bold red",
        )
    for node in lost[:MAX_NODES]:
        yield Text(plain(f"{symbols.signs['error']} {node.address}: {node.problem}"), "red")
    if len(lost) > MAX_NODES:
        yield Text(f"and {counted(len(lost) - MAX_NODES, 'more node')}", "dim")


def _run(
    run: RunStatus, now: float, width: int, symbols: Symbols, entries: Sequence[HistoryEntry], user: str
) -> Iterator[RenderableType]:
    yield _title(run, now)
    facts = [
        run.device,
        f"user {user}" if user else None,
        *(f"{name} {value}" for name, value in run.labels.items()),
        run.configuration,
    ]
    if run.started_at is not None:
        facts.insert(1, f"up {seconds(max(0.0, now - run.started_at))}")
    if any(facts):
        yield Text(plain(" - ".join(fact for fact in facts if fact)), "dim", no_wrap=True, overflow="crop")
    yield from (_advice(advice, symbols) for advice in run.warnings if advice.severity != "info")
    yield from _tiers(run.ranks, width, symbols)
    yield from _paths(run.ranks, width, symbols)
    yield from _link(run.ranks)
    yield from _lately(run.ranks, entries, width, symbols)
    yield from _stalls(run.ranks)
    if len(run.ranks) > 1 or run.state != "training":
        yield _ranks(run.ranks)
    yield from (_advice(advice, symbols) for advice in run.warnings if advice.severity == "info")


def _title(run: RunStatus, now: float) -> Text:
    facts = [f"{run.ranks_live} of {run.ranks_expected} ranks"] if run.ranks_expected > 1 else []
    if run.step is not None:
        facts.append(f"step {run.step}")
    if run.step_seconds is not None:
        facts.append(f"{seconds(run.step_seconds)} a step")
    if run.last_step_at is not None and (age := now - run.last_step_at) > max(
        RECENT_SECONDS, RECENT_STEPS * (run.step_seconds or 0.0)
    ):
        facts.append(f"last step {seconds(age)} ago")
    elif samples := run.samples_per_second:
        facts.append(f"{samples:{'.2g' if samples < 100 else '.0f'}} samples/s")
    if run.stall_share is not None:
        facts.append(f"{share(run.stall_share)} stall")
    if run.loss is not None:
        facts.append(f"loss {run.loss:.4g}")
    title = Text(plain(run.name), "bold", no_wrap=True, overflow="crop")
    title.append("  ").append(run.state, _STATE_STYLES[run.state]).append("  " + ", ".join(facts), "not bold")
    return title


def _advice(advice: Advice, symbols: Symbols) -> RenderableType:
    ranks = f"rank {joined(map(str, advice.ranks))}: " if advice.ranks and "rank" not in advice.text else ""
    line = Table.grid(padding=(0, 1))
    line.add_row(
        Text(symbols.signs[advice.severity], _STYLES[advice.severity]),
        Text(plain(ranks + advice.text), _STYLES[advice.severity]),
    )
    if advice.remedy:
        line.add_row("", Text(plain(f"{symbols.remedy} {advice.remedy}")))
    return line


def _tiers(ranks: Sequence[RankStatus], width: int, symbols: Symbols) -> Iterator[RenderableType]:
    """The tiers, summed over the ranks: each has a part of the node's budgets."""
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
            bar(used / budget, peak / budget, max(10, min(40, width - 58)), symbols),
            f"{size(used)} of {size(budget)}",
            f"peak {size(peak)}",
            f"{size(min(free))} free" if free else "",
        )
    if rows.row_count:
        yield rows
    torch = [rank.device_memory for rank in ranks if rank.device_memory is not None]
    if torch:
        allocated, peak = sum(memory.allocated for memory in torch), sum(memory.peak for memory in torch)
        reserved = sum(memory.reserved for memory in torch)
        yield Text(f"torch: {size(allocated)} in tensors, peak {size(peak)}, {size(reserved)} reserved")


def bar(filled: float, peak: float, width: int, symbols: Symbols) -> Text:
    """A bar of the fraction ``filled``, with a mark at ``peak``."""
    full = round(max(0.0, min(1.0, filled)) * width)
    line = Text(symbols.full * full, "cyan").append(symbols.empty * (width - full), "dim")
    at = min(width - 1, round(max(0.0, min(1.0, peak)) * width))
    if not peak or at < full:
        return line
    return line[:at].append(symbols.peak, "magenta").append_text(line[at + 1 :])


def _paths(ranks: Sequence[RankStatus], width: int, symbols: Symbols) -> Iterator[RenderableType]:
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
    for name, paths in list(by_name.items())[:MAX_PATHS]:
        read, written = [path.read for path in paths], [path.written for path in paths]
        slowest = max(
            (direction.latency.p99 for direction in (*read, *written) if direction.latency is not None),
            default=None,
        )
        rows.add_row(
            tail(plain(name), max(12, width - 58), symbols),
            rate(sum(direction.bytes_per_second for direction in read)),
            rate(_average(read)),
            rate(sum(direction.bytes_per_second for direction in written)),
            rate(_average(written)),
            seconds(slowest) if slowest is not None else "",
        )
    yield rows
    if len(by_name) > MAX_PATHS:
        yield Text(f"and {counted(len(by_name) - MAX_PATHS, 'more path')}", "dim")


def _average(directions: Sequence[DirectionStatus | CopyStatus]) -> float:
    return sum(direction.average_bytes_per_second for direction in directions)


def _link(ranks: Sequence[RankStatus]) -> Iterator[RenderableType]:
    links = [rank.link for rank in ranks if rank.link is not None]
    if links:
        texts = [
            f"{rate(sum(direction.bytes_per_second for direction in way))} {word} ({rate(_average(way))} while copying)"
            for word, way in (
                ("to the device", [link.h2d for link in links]),
                ("from it", [link.d2h for link in links]),
            )
        ]
        measured = [link.measured_bytes_per_second for link in links if link.measured_bytes_per_second]
        texts += [f"{rate(sum(measured))} in each direction measured"] if measured else []
        yield Text(f"device link: {', '.join(texts)}")


def _lately(
    ranks: Sequence[RankStatus], entries: Sequence[HistoryEntry], width: int, symbols: Symbols
) -> Iterator[RenderableType]:
    """Lines of recent values: bandwidth and stall over time, seconds over steps."""
    rows = Table.grid(padding=(0, 1))
    rows.add_column(no_wrap=True, overflow="crop")
    rows.add_column(no_wrap=True, overflow="crop", justify="right")  # the latest of each below each other
    rows.add_column(no_wrap=True, overflow="crop")
    room = max(10, min(60, width - 30))
    over_time: list[tuple[str, list[float | None], Callable[[float], str]]] = [
        ("read", [entry.read for entry in entries], rate),
        ("written", [entry.written for entry in entries], rate),
        ("h2d", [entry.h2d for entry in entries], rate),
        ("d2h", [entry.d2h for entry in entries], rate),
        ("sent", [entry.sent for entry in entries], rate),
    ]
    for name, values, format_value in over_time:
        highest = max((value for value in values[-room:] if value is not None), default=0.0)
        if highest:
            rows.add_row(name, sparkline(values[-room:], highest, symbols), f"up to {format_value(highest)}")
    stalls = [entry.stall for entry in entries][-room:]
    if any(stalls):
        rows.add_row("stall", sparkline(stalls, 1.0, symbols), "of each second")
    stepping = [rank for rank in ranks if rank.steps]
    if stepping:
        steps = max(stepping, key=lambda rank: rank.step_seconds or 0.0).steps[-room:]
        highest = max(step.seconds for step in steps)
        if highest:
            line = sparkline([step.seconds for step in steps], highest, symbols)
            rows.add_row("steps", line, f"up to {seconds(highest)}")
    if rows.row_count:
        yield rows


def sparkline(values: Sequence[float | None], maximum: float, symbols: Symbols) -> Text:
    """One character per value, as high as its part of ``maximum``; blank where nothing is known."""
    highest = len(symbols.heights) - 1
    line = "".join(
        " " if value is None else symbols.heights[round(highest * max(0.0, min(1.0, value / maximum)))]
        for value in values
    )
    return Text(line, "cyan")


def _stalls(ranks: Sequence[RankStatus]) -> Iterator[RenderableType]:
    """The stalls of the rank with the largest stall share in its recent steps."""
    slowest = max(ranks, key=lambda rank: rank.stall_share or 0.0)
    texts = [
        f"{cause} {share(part)}" for cause, part in slowest.stall_causes.items() if part > MIN_CAUSE_FRACTION
    ]
    if texts:
        yield Text(plain(f"stalls of recent steps: {', '.join(texts)}"))


def _ranks(ranks: Sequence[RankStatus]) -> RenderableType:
    """The ranks: those with a problem first, then stragglers, then by rank."""
    rows = Table.grid(padding=(0, 2))
    headings = ("rank", "state", "step", "phase", "a step", "stall", "read", "written")
    for heading in headings:
        rows.add_column(
            justify="left" if heading in ("state", "phase") else "right", no_wrap=True, overflow="crop"
        )
    rows.add_row(*(Text(heading, "dim") for heading in headings))
    in_order = sorted(ranks, key=lambda rank: (rank.state == "live", not rank.straggler, rank.rank))
    for rank in in_order[:MAX_RANKS]:
        rows.add_row(
            str(rank.rank),
            Text("straggler", "yellow")
            if rank.straggler and rank.state == "live"
            else Text(rank.state, _STATE_STYLES.get(rank.state, "red")),
            "" if rank.step is None else str(rank.step),
            plain(rank.phase or ""),
            "" if rank.step_seconds is None else seconds(rank.step_seconds),
            "" if rank.stall_share is None else share(rank.stall_share),
            rate(sum(path.read.bytes_per_second for path in rank.io)),
            rate(sum(path.written.bytes_per_second for path in rank.io)),
        )
    if len(ranks) > MAX_RANKS:
        return Group(rows, Text(f"and {counted(len(ranks) - MAX_RANKS, 'more rank')}", "dim"))
    return rows


def tail(name: str, width: int, symbols: Symbols) -> str:
    """``name``, cut at its beginning to ``width`` characters: paths differ at their ends."""
    return name if len(name) <= width else symbols.cut + name[1 - width :]
