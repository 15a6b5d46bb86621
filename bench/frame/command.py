"""What the commands share: options, facts, cases in turn, files, and the exit status."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from tiering.config.training import parse_size
from tiering.errors import ConfigError

from . import machine
from .report import Report
from .rounds import Run
from .side import BENCH, SideError

RESULTS = BENCH / "results"
WIDTH = 220  # of tables that are not written to a terminal


def add_sides(parser: argparse.ArgumentParser, *, patience: float, threads: int | None = None) -> None:
    """Options of sides in processes of their own; ``threads`` are by default as many as there are CPUs."""
    usual = threads or len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=usual, help="of each side")
    parser.add_argument(
        "--patience",
        type=float,
        default=patience,
        help="seconds after which a side that does not answer is ended",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, proves nothing")


def add_files(parser: argparse.ArgumentParser, *, save: str = "the report") -> None:
    """Options of what is written; with ``save`` empty there is no ``--save``."""
    if save:
        parser.add_argument("--save", action="store_true", help=f"{save}, to {RESULTS}")
    parser.add_argument("--json", type=Path, help="every reading, for later")
    parser.add_argument("--markdown", type=Path, help="the report")


def size(text: str) -> int:
    """The type of an option: bytes, as a configuration takes them."""
    try:
        return parse_size(text)
    except ConfigError as refused:
        raise argparse.ArgumentTypeError(str(refused)) from refused


def require_at_least(parser: argparse.ArgumentParser, options: argparse.Namespace, **least: int) -> None:
    """Refuse options below a bound; those that were not given are left alone."""
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            parser.error(f"--{name} must be at least {bound}")


def facts(*distributions: str, directory: Path | None = None) -> dict[str, str]:
    """When, by which command and on which machine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", *sys.argv]),
        **machine.describe(*distributions, directory=directory),
    }


def end_on_sigterm() -> None:
    """SIGTERM ends sides and removes files, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def run_cases(run: Run[Any, Any], cases: Iterable[tuple[str, Callable[[Any], object]]]) -> None:
    """Every case in turn. A failed case does not stop the others; an interrupt does, and leaves a report."""
    name = "none"
    try:
        for name, case in cases:
            run.say(f"case {name}")
            try:
                case(run)
            except SideError as error:
                run.fail(name, error)
    except KeyboardInterrupt:
        run.failed.append(name)
        run.report.skipped.append(f"case {name}, and what comes after it: interrupted")


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def finish(report: Report, options: argparse.Namespace, name: str, readings: Callable[[], Any]) -> None:
    """Show the report and write the files that were asked for, the saved one as results/DATE-``name``.md.

    ``readings`` makes the JSON.
    """
    report.facts["load average at the end"] = " ".join(f"{load:.2f}" for load in os.getloadavg())
    report.show(Console(width=None if sys.stdout.isatty() else WIDTH))
    if options.json:
        options.json.write_text(json.dumps(readings(), indent=1) + "\n")
    saved = RESULTS / f"{today()}-{name}.md" if getattr(options, "save", False) else None
    for path in (options.markdown, saved):
        if path is not None:
            path.write_text(report.markdown())


def readings(report: Report, **measured: Iterable[Any]) -> dict[str, Any]:
    """The JSON of a run: facts, what was skipped, what was ``measured`` (dataclasses, by name), and the goals."""
    return {
        "facts": report.facts,
        "skipped": report.skipped,
        **{name: [asdict(entry) for entry in entries] for name, entries in measured.items()},
        "goals": [asdict(verdict) for verdict in report.verdicts],
    }


def status(report: Report, *, complete: bool) -> int:
    """0 when all goals hold, 1 when one does not, 2 when something failed or nothing was measured."""
    if not complete:
        return 2
    return 0 if all(verdict.holds for verdict in report.verdicts) else 1
