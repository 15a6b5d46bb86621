"""``tiering doctor``: runs all checks in order, prints a report and returns the exit code."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiering.doctor.finding import CheckResult

HEALTHY, PROBLEM = 0, 1


def add_arguments(doctor: argparse.ArgumentParser) -> None:
    doctor.description = (
        "Checks this machine for problems that prevent or slow down training, and suggests fixes. The only write is an"
        " unnamed file of 1 MiB in each DIR."
    )
    doctor.epilog = "exit code: 0 no problem (notes are possible), 1 at least one problem, 2 usage error."
    doctor.add_argument(
        "directories", type=Path, nargs="*", metavar="DIR", help="directories for swap space (nvme_path)"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    from tiering.doctor.doctor_report import DoctorReport, discreet

    report = DoctorReport(discreet(examine(options.directories)))
    code = PROBLEM if report.problems else HEALTHY
    if options.json:
        print(json.dumps(report.as_dict(code), indent=1))
        return code
    if report.attention:
        from rich.console import Console

        console = Console()
        # Rich exits with its own code if the pipe is closed: let it write to a string.
        with console.capture() as table:
            console.print(report.table())
        print(table.get(), end="")
        print(report.counts())
    else:
        print("Nothing needs attention.")
    if not options.directories:
        print("No directory was checked: name the directories for swap space.")
    print(f"To report a problem, include this:\n\n{report.block()}")
    return code


def examine(directories: Sequence[Path], root: Path = Path("/")) -> list[CheckResult]:
    """Check the machine with the root directory ``root``, then each of ``directories``; return all entries."""
    from tiering.doctor import cpus, engines, limits, memory, nameless, software, status, swap_directory
    from tiering.doctor.finding import Verdict, perform

    groups = [software.CHECKS, cpus.CHECKS, memory.CHECKS, limits.CHECKS, engines.CHECKS, status.CHECKS]
    checks = {name: partial(check, root) for group in groups for name, check in group.items()}
    entries = perform(checks)
    entries += perform({"files without a name": lambda: nameless.judge(nameless.holders(root))})
    for path in directories:
        directory_checks = swap_directory.checks(path.absolute(), root)
        # The other checks need a usable directory.
        first = perform({"directory": directory_checks.pop("directory")}, str(path.absolute()))
        entries += first
        if first[0].finding.verdict is not Verdict.PROBLEM:
            entries += perform(directory_checks, str(path.absolute()))
    return entries
