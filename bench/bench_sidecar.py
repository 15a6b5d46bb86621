"""Training beside a busy sidecar, and without one, alternating in one run.

    python bench/bench_sidecar.py DIR [--pairs 12] [--seconds 10] [--hold 30] [--scrapers 200] [--subscribers 50]
                                  [--every 1 | --hammer] [--save] [--quick] [--json FILE] [--markdown FILE]
    python bench/bench_sidecar.py DIR --nodes 64 [--ranks 8] [--hold 60] ...

DIR is a directory on the disk to swap to. Two cores are enough and more are not used.

**Training.** A small GPT in bf16 whose parameters and state live on NVMe, on one core of its own with all its threads.
It trains all the time, and says of each step when it began and ended. A window's figure is the median of the steps that
are wholly in it.

**Sides.** Each has a window per round, who goes first rotates, and a first round is dropped.

- asked: ``tierd`` runs on the other core, and on it with it are the clients: --scrapers of /metrics, each with a
  connection that it keeps and a request every second (Prometheus asks every 15 seconds where nobody tells it), and
  --subscribers of /v1/events. --hammer leaves out the pause.
- alone: nobody asks, and ``tierd`` is stopped (SIGSTOP). The engine publishes its page.
- unpublished: nor does the engine publish.

What the second costs beside the third is what watching costs the engine itself. Counting, in C, is on in all of them.
At last everybody asks for --hold seconds without a break.

**Nodes.** With --nodes, nothing trains: ``tierd --of`` reads so many simulated nodes, each with --ranks ranks of one
run that make a step every second. Its clients are a subscriber of /v1/events and a scraper of /metrics (15 s apart).
The goals are 0.2 of a core and 200 MB for 64 nodes with 8 ranks each.

**Goals.** No error and no subscriber who hears nothing; the 95 % upper bound of the ratio asked / alone, round by
round, at most 1.03; the interval of alone / unpublished reaches down to 1. The bootstrap is seeded.

Exit status: 0 when all goals hold, 1 when one does not, 2 when something failed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from frame import command
from frame.report import Report, Table, Verdict, middle
from sidecar.clients import ClientLog, ask
from sidecar.processes import Nodes, ProcessError, Sidecar, Trainer

from tiering.tierbench.ratios import Comparison, compare, in_turn

BOUND = 1.03
NODES_CORES, NODES_BYTES = 0.2, 200e6
SCRAPE_INTERVAL = 15.0
QUICK = {"pairs": 2, "seconds": 1.0, "hold": 1.5, "scrapers": 10, "subscribers": 3, "width": 64, "layers": 1}
SETTLE = 0.5
"""Seconds between a change and the window that is about it."""


@dataclass(slots=True)
class Window:
    """One side's turn: seconds of its steps, and what clients received and it cost ``tierd`` where they asked.

    ``others`` is the share of the engine's core that was not the engine's: of the kernel, and of whatever else runs.
    """

    steps: list[float]
    others: float
    log: ClientLog | None = None
    cpu_seconds: float = 0.0

    @property
    def step(self) -> float:
        return statistics.median(self.steps)


@dataclass(slots=True)
class Bench:
    """The processes, and the windows that they had."""

    options: argparse.Namespace
    trainer: Trainer
    sidecar: Sidecar
    rounds: dict[str, list[Window]] = field(default_factory=dict)

    def asked(self, seconds: float) -> Window:
        self.trainer.publish(True)
        self.sidecar.resume()
        time.sleep(SETTLE)
        before, others = self.sidecar.cpu_seconds(), self.trainer.others_seconds()
        began = time.monotonic()
        log = asyncio.run(
            ask(
                self.sidecar.port,
                scrapers=self.options.scrapers,
                subscribers=self.options.subscribers,
                seconds=seconds,
                every=self.options.every,
            )
        )
        # tierd's clock ran while they connected, too: scaled to the time that counts.
        took = time.monotonic() - began
        spent = (self.sidecar.cpu_seconds() - before) * seconds / took
        others = (self.trainer.others_seconds() - others) / took
        return Window(self.trainer.between(log.began, log.ended), others, log, spent)

    def alone(self) -> Window:
        return self._quiet(publish=True)

    def unpublished(self) -> Window:
        return self._quiet(publish=False)

    def _quiet(self, publish: bool) -> Window:
        self.sidecar.pause()
        self.trainer.publish(publish)
        time.sleep(SETTLE)
        began, others = time.monotonic(), self.trainer.others_seconds()
        time.sleep(self.options.seconds)
        took = time.monotonic() - began
        others = (self.trainer.others_seconds() - others) / took
        return Window(self.trainer.between(began, began + took), others)

    def run(self) -> Window:
        """All rounds, and then everybody for as long as --hold says."""
        sides = {
            "asked": lambda: self.asked(self.options.seconds),
            "alone": self.alone,
            "unpublished": self.unpublished,
        }
        for windows in in_turn(self.options.pairs, sides):
            for name, window in windows.items():
                self.rounds.setdefault(name, []).append(window)
            times = ", ".join(f"{name} {window.step * 1e3:.1f} ms" for name, window in windows.items())
            print(f"round {len(self.rounds['alone'])} of {self.options.pairs}: {times}", file=sys.stderr)
        return self.asked(self.options.hold)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Training beside a busy sidecar, and without one, alternating.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dir", type=Path, help="a directory on the disk to swap to")
    parser.add_argument("--pairs", type=int, default=12, help="windows of each side that are kept")
    parser.add_argument("--seconds", type=float, default=10, help="of a window")
    parser.add_argument("--hold", type=float, default=30, help="seconds in which all ask without a break")
    parser.add_argument("--scrapers", type=int, default=200, help="clients of /metrics")
    parser.add_argument("--subscribers", type=int, default=50, help="clients of /v1/events")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument(
        "--every", type=float, default=1, help="seconds from one request of a client to its next"
    )
    pace.add_argument("--hammer", action="store_const", dest="every", const=0.0, help="without a pause")
    parser.add_argument(
        "--nodes", type=int, help="simulated nodes that tierd --of reads, in place of training"
    )
    parser.add_argument("--ranks", type=int, default=8, help="of each simulated node")
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--layers", type=int, default=6, help="of the model")
    parser.add_argument("--quick", action="store_true", help="tiny and short, proves nothing")
    command.add_files(parser)
    if parser.parse_args().quick:  # what is given beside it counts
        parser.set_defaults(**QUICK)
    options = parser.parse_args()
    if min(options.pairs, options.scrapers, options.subscribers) < 1:
        parser.error("--pairs, --scrapers and --subscribers are at least 1")
    return options


def conclude(report: Report, rounds: dict[str, list[Window]], long_window: Window, peak_bytes: int) -> None:
    """Tables and verdicts."""
    table = Table(
        "Step time", ("side", "steps", "ms: median of windows (range)", "its core, taken by others")
    )
    for name, windows in rounds.items():
        steps = sum(len(window.steps) for window in windows)
        times = middle([window.step * 1e3 for window in windows], ".2f")
        table.rows.append((name, str(steps), times, middle([window.others for window in windows], ".1%")))
    table.notes.append(
        "On a quiet machine others are the kernel; where they are more, step times say little."
    )
    report.tables.append(table)

    polling_ratio = compared(rounds, "asked", "alone")
    published = compared(rounds, "alone", "unpublished")
    ratios = Table("Ratios of windows of one round", ("sides", "rounds", "median", "95 %", "range"))
    for name, ratio in (("asked / alone", polling_ratio), ("alone / unpublished", published)):
        interval, extent = (
            f"{ratio.median.low:.4f} to {ratio.median.high:.4f}",
            f"{ratio.smallest:.3f} to {ratio.largest:.3f}",
        )
        ratios.rows.append((name, str(ratio.pairs), f"{ratio.median.point:.4f}", interval, extent))
    report.tables.append(ratios)

    load = Table("What clients got", LOAD)
    load.rows += [
        row("windows", rounds["asked"]),
        row("without a break", [long_window]),
    ]
    load.notes.append(f"tierd had {peak_bytes / 1e6:.0f} MB at most.")
    report.tables.append(load)

    errors: Counter[str] = Counter()
    for window in (*rounds["asked"], long_window):
        assert window.log is not None
        errors.update(window.log.errors)
    summary = ", ".join(f"{count} x {error}" for error, count in errors.most_common()) or "none"
    report.verdicts += [
        Verdict("errors", summary, "none", not errors),
        Verdict(
            "step time, asked / alone: 95 % upper bound",
            f"{polling_ratio.median.high:.4f}",
            f"at most {BOUND}",
            polling_ratio.median.high <= BOUND,
        ),
        Verdict(
            "step time, alone / unpublished: 95 % lower bound",
            f"{published.median.low:.4f}",
            "at most 1",
            published.median.low <= 1,
        ),
    ]


LOAD = (
    "time",
    "requests",
    "per s",
    "p50 ms",
    "p99 ms",
    "longest ms",
    "events, each",
    "MB/s",
    "tierd: cores",
)


def compared(rounds: dict[str, list[Window]], ours: str, theirs: str) -> Comparison:
    return compare([window.step for window in rounds[ours]], [window.step for window in rounds[theirs]])


def row(name: str, windows: list[Window]) -> tuple[str, ...]:
    """Of all answers that clients got in ``windows``."""
    logs = [window.log for window in windows if window.log is not None]
    seconds = sum(log.seconds for log in logs)
    latencies = sorted(latency * 1e3 for log in logs for latency in log.latencies) or [float("nan")]
    events = [count for log in logs for count in log.events]
    return (
        name,
        str(sum(len(log.latencies) for log in logs)),
        f"{sum(len(log.latencies) for log in logs) / seconds:.0f}",
        f"{statistics.median(latencies):.1f}",
        f"{latencies[int(0.99 * (len(latencies) - 1))]:.1f}",
        f"{latencies[-1]:.1f}",
        f"{min(events)} to {max(events)}",
        f"{sum(log.received for log in logs) / seconds / 1e6:.1f}",
        f"{sum(window.cpu_seconds for window in windows) / seconds:.2f}",
    )


def cores() -> tuple[int, int]:
    """Of the engine; of everybody else."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise ProcessError("this process may use one core; the engine and those who ask need one each")
    return usable[0], usable[1]


def described(options: argparse.Namespace, training: int, others: int) -> dict[str, str]:
    every = f"every {options.every:g} s" if options.every else "without a pause"
    return {
        **command.facts("tiering", "torch", "uvicorn", "fastapi", directory=options.dir),
        "cores": f"{training} trains; tierd and its clients share {others}",
        "clients": f"{options.scrapers} of /metrics, {every}; {options.subscribers} of /v1/events",
        "model": f"GPT of {options.layers} blocks, width {options.width}, all of it on NVMe",
    }


def measured(options: argparse.Namespace, report: Report, directory: Path) -> dict[str, list[Window]]:
    """Everything, into ``report``; every reading."""
    training, others = cores()
    report.facts |= described(options, training, others)
    os.sched_setaffinity(0, {others})
    swap, run_directory = directory / "swap", directory / "run"
    swap.mkdir()
    run_directory.mkdir(mode=0o700)
    with (
        Trainer(training, swap, run_directory, width=options.width, layers=options.layers) as trainer,
        Sidecar("--dir", str(run_directory)) as sidecar,
    ):
        bench = Bench(options, trainer, sidecar)
        long_window = bench.run()
        conclude(report, bench.rounds, long_window, sidecar.peak_bytes())
    return {**bench.rounds, "held": [long_window]}


def nodes_measured(options: argparse.Namespace, report: Report) -> dict[str, list[Window]]:
    """A ``tierd --of`` of simulated nodes, with a viewer and a Prometheus, into ``report``."""
    report.facts |= {
        **command.facts("tiering", "uvicorn", "fastapi", directory=options.dir),
        "nodes": f"{options.nodes} simulated, with {options.ranks} ranks each",
        "clients": f"one of /v1/events; one of /metrics, every {SCRAPE_INTERVAL:g} s",
    }
    with Nodes(options.nodes, options.ranks) as nodes, Sidecar("--of", nodes.addresses) as sidecar:
        asyncio.run(
            ask(sidecar.port, scrapers=1, subscribers=1, seconds=SCRAPE_INTERVAL, every=SCRAPE_INTERVAL)
        )
        before, began = sidecar.cpu_seconds(), time.monotonic()
        log = asyncio.run(
            ask(sidecar.port, scrapers=1, subscribers=1, seconds=options.hold, every=SCRAPE_INTERVAL)
        )
        took = time.monotonic() - began
        window = Window([], 0.0, log, (sidecar.cpu_seconds() - before) * log.seconds / took)
        cores, peak_bytes = window.cpu_seconds / log.seconds, sidecar.peak_bytes()
    load = Table("Load", LOAD, [row("nodes", [window])])
    report.tables.append(load)
    errors = ", ".join(f"{count} x {error}" for error, count in log.errors.items()) or "none"
    report.verdicts += [
        Verdict("errors", errors, "none", not log.errors),
        Verdict("tierd: cores", f"{cores:.3f}", f"below {NODES_CORES}", cores < NODES_CORES),
        Verdict(
            "tierd: MB at most",
            f"{peak_bytes / 1e6:.0f}",
            f"below {NODES_BYTES / 1e6:.0f}",
            peak_bytes < NODES_BYTES,
        ),
    ]
    return {"nodes": [window]}


def main() -> int:
    options = parse_arguments()
    command.end_on_sigterm()
    subject = "a sidecar of many nodes" if options.nodes else "training beside a busy sidecar"
    report = Report(f"bench_sidecar: {subject}", {})
    try:
        if options.nodes:
            windows = nodes_measured(options, report)
            command.finish(report, options, "sidecar-nodes", lambda: readings(report, windows))
            return command.status(report, complete=True)
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench_sidecar.") as directory:
            windows = measured(options, report, Path(directory).resolve())
    except ProcessError as error:
        print(f"bench_sidecar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 2
    command.finish(report, options, "sidecar", lambda: readings(report, windows))
    return command.status(report, complete=True)


def readings(report: Report, windows: dict[str, list[Window]]) -> dict[str, Any]:
    """Every reading, for the JSON."""
    return {
        "facts": report.facts,
        "windows": {name: [asdict(window) for window in entries] for name, entries in windows.items()},
        "goals": [asdict(verdict) for verdict in report.verdicts],
    }


if __name__ == "__main__":
    sys.exit(main())
