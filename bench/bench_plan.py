"""Predicted step times beside real ones: the planner's word held against the engine's clock.

    python bench/bench_plan.py DIR [--rounds 5] [--steps 3] [--save] [--quick] [--json FILE]

DIR is a directory on the disk that the state goes to.

**Predicted.** The model is built on meta, cut into groups and placed, as `tiering plan` does for a model that is not
here; from that plan and the rates of this machine `tiering.planning.forecast` tells the step's time. No figure of the
engine's enters it. Rates are measured in the same run, before and after each round, by `tiering.planning.measure` (the
disk through the engine's files and slots; the optimizer's kernels) and `zero3.observe.device_rates` (transformer blocks
of the model's width, on as many tokens). Disks of shared machines swing twofold within minutes, so a round's prediction
is the mean of what the rates before and behind it come to. Where rounds differ from each other, both are shown.

**Real.** Each row is a process that trains the reference model (GPT of 24 blocks, width 1024, 303 M parameters, batch
1, sequence 32, bf16, AdamW), as in bench_step.py: a round ends when nothing is in flight any more. One is dropped.

Goals: for each budget the median of predicted / real is 1 within 20 %, and the bytes over NVMe are what the planner
said, to the byte. Exit status: 0 when all hold, 1 when one does not, 2 when something failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from frame import command
from frame.reference_model import Model
from frame.report import Report
from frame.rounds import Progress
from frame.side import Place, SideError, Spec
from plan import rows
from step import sides
from step.scale import FULL, QUICK, Scale

HOSTS = ("3GiB", "1.5GiB", "1GiB")
QUICK_HOSTS = ("30MiB",)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Predicted step times beside real ones.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dir", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are kept")
    parser.add_argument("--steps", type=int, default=3, help="steps of each round")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of each window in which a rate is measured"
    )
    command.add_sides(parser, patience=600)
    command.add_files(parser)
    options = parser.parse_args()
    command.require_at_least(parser, options, rounds=1, steps=1)
    return options


def budgets(model: Model, device: str, hosts: tuple[str, ...]) -> list[Spec]:
    """The rows: all in RAM, each host budget, and nothing cached."""
    streamed = [
        sides.on_nvme(model, f"NVMe, host budget {host}", {"host_budget": host, "device_budget": device})
        for host in hosts
    ]
    uncached = {"cache_in_host": False, "host_budget": hosts[-1], "device_budget": device}
    return [
        sides.in_memory(model, "all in RAM"),
        *streamed,
        sides.on_nvme(model, "NVMe, nothing cached", uncached),
    ]


def described(options: argparse.Namespace, scale: Scale) -> dict[str, str]:
    return command.facts("tiering", "torch", directory=options.dir) | {
        "threads": str(options.threads),
        "model": str(scale.model),
        "rounds": f"{options.rounds} of {options.steps} steps, rates measured before and after each",
    }


def measured(options: argparse.Namespace, scale: Scale, progress: Progress) -> list[rows.Row]:
    """The rows of all budgets. What could not be measured is in the report."""
    results = []
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench_plan.") as directory:
        place = Place(Path(directory).resolve(), options.threads, options.patience)
        try:
            for spec in budgets(scale.model, scale.device, QUICK_HOSTS if options.quick else HOSTS):
                try:
                    row = rows.measure(
                        spec,
                        place,
                        rounds=options.rounds,
                        steps=options.steps,
                        seconds=options.seconds,
                        file_bytes=scale.fio_file // 4,
                        say=progress.say,
                    )
                    results.append(row)
                except SideError as error:
                    progress.fail(spec.name, error)
        except KeyboardInterrupt:  # what was measured before it is worth a report
            progress.report.skipped.append("the rest: interrupted")
    return results


def readings(results: list[rows.Row]) -> list[dict[str, Any]]:
    """Every reading, for the JSON."""
    return [
        {
            "name": row.name,
            "rounds": [asdict(round_) for round_ in row.rounds],
            "rates": [rates.as_dict() for rates in row.rates],
        }
        for row in results
    ]


def main() -> int:
    options = parse_arguments()
    command.end_on_sigterm()
    torch.set_num_threads(options.threads)
    scale = QUICK if options.quick else FULL
    report = Report("bench_plan: predicted step times beside real ones", described(options, scale))
    results = measured(options, scale, Progress(report))
    rows.conclude(report, results)
    command.finish(report, options, "plan", lambda: readings(results))
    return command.status(report, complete=bool(results) and not report.skipped)


if __name__ == "__main__":
    sys.exit(main())
