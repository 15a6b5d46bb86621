"""A Llama whose state is larger than the machine's memory, built and trained within a few GB of it.

    python bench/bench_larger_than_memory.py DIR [--params 3B] [--memory 6GB] [--steps 4] [--sequence 64] [--load]
                                             [--save] [--quick] [--json FILE] [--markdown FILE]

DIR is a directory on the disk that holds the state. Needs transformers (`pip install tiering[dev]`).

**Model.** transformers' LlamaForCausalLM with random weights, in the proportions of Llama 3.2 3B (larger/shape.py):
embedding and head are one parameter of 128,256 rows at that size, which is the hard part of a ceiling. The default size
is what the free space of DIR allows at 30 bytes per parameter, at most 3 B; --params takes more, as long as what the
plan puts there fits.

**Training.** bf16, AdamW with fp32 master and moments, gradients clipped to a norm of 1.0, batch 1, words of the
standard library's sources. Everything may go to NVMe; budgets are what --memory leaves (larger/room.py).

**Memory.** One process builds, fills its tiers and trains; another one samples its memory. The kernel gives it a
quarter more anonymous memory than --memory and then refuses (RLIMIT_DATA: touched or not, so that holes in the heap
count); a limit that counts page cache, too, takes root:

    systemd-run --scope -p MemoryMax=6G -p MemorySwapMax=0 python bench/bench_larger_than_memory.py DIR

Without it, what shows that no page cache holds the model is that the kernel has read from the disk what the engine has.

**--load** also writes the trained weights as a Hugging Face style directory, in bf16, and has a second process load
them and train on, under the same limit. Takes 2 more bytes per parameter of DIR.

--save writes the report and the picture of memory over time (`pip install tiering[bench]`) to bench/results/, --quick
trains something tiny and proves nothing. Exit status: 0 when all goals hold, 1 when one does not, 2 when there is no
result.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from frame import command
from frame.report import Report
from larger import picture, tables
from larger.child import ANONYMOUS, Task
from larger.shape import SMALLEST, Shape, of_size
from larger.watch import ChildError, Recording, watch

from tiering.placement.budgets import host_memory
from tiering.planning.decoder import parse_count

USUAL = 3_000_000_000
QUICK = 50_000_000
BYTES_PER_PARAMETER = 30
WEIGHTS = 2
LEFT_FREE = 2_000_000_000
BUILT, LOADED = "built and trained", "loaded and trained on"


def count(text: str) -> int:
    """A number of parameters: "3B", "500M" or plain."""
    try:
        return parse_count(text)
    except ValueError as refused:
        raise argparse.ArgumentTypeError(str(refused)) from refused


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A Llama larger than memory, built and trained within a few GB.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dir", type=Path, help="a directory on the disk that holds the state")
    parser.add_argument(
        "--params", type=count, help="parameters at most, as 3B; instead of what the disk allows"
    )
    parser.add_argument("--memory", type=command.size, default="6GB", help="what the process may take")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=64, help="words in a batch")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--load", action="store_true", help="also write the weights, and load them")
    parser.add_argument("--quick", action="store_true", help="a tiny model, proves nothing")
    command.add_files(parser, save="the report and its picture")
    options = parser.parse_args()
    if options.quick:
        options.params, options.memory, options.steps = options.params or QUICK, 1_200_000_000, 2
    if options.steps < 2 or options.sequence < 2:
        parser.error("--steps and --sequence must be at least 2")
    try:
        options.shape, options.size_by = sized(options)
    except (ValueError, OSError) as refused:
        parser.error(str(refused))
    return options


def sized(options: argparse.Namespace) -> tuple[Shape, str]:
    """The shape, and what made it that large. Raises ValueError and OSError."""
    if options.params is not None:
        return of_size(options.params), f"at most {options.params:,} parameters were asked for"
    free = shutil.disk_usage(options.dir).free
    each = BYTES_PER_PARAMETER + (WEIGHTS if options.load else 0)
    fits = free // each
    if fits < SMALLEST.parameters:
        raise ValueError(
            f"{options.dir} has {free:,} bytes free, too few at {each} per parameter; free some, or give --params"
        )
    why = f"{free / 1e9:.1f} GB are free, {fits / 1e9:.2f} B parameters at {each} bytes"
    return of_size(min(USUAL, fits)), f"{why}; at most {USUAL / 1e9:g} B unless --params says so"


def prepared(options: argparse.Namespace) -> Report:
    facts = {
        **command.facts("tiering", "torch", "transformers", directory=options.dir),
        "memory limit of the process": f"{host_memory()[0] / 1e9:.1f} GB by cgroup or machine, page cache included;"
        f" {ANONYMOUS * options.memory / 1e9:g} GB anonymous by RLIMIT_DATA",
        "threads": str(options.threads),
        "size": options.size_by,
        "model": str(options.shape),
    }
    return Report(
        "bench_larger_than_memory: a model larger than memory, built and trained within a few GB", facts
    )


class Run:
    """The processes of one run, and what they showed."""

    def __init__(self, options: argparse.Namespace, directory: Path, report: Report) -> None:
        self.options, self.directory, self.report = options, directory, report
        self.recordings: dict[str, Recording] = {}

    def everything(self) -> None:
        """Raises ChildError."""
        options, report = self.options, self.report
        state = self.directory / "state"
        state.mkdir()
        task = Task(
            directory=str(state),
            shape=options.shape,
            memory=options.memory,
            disk=0,
            sequence=options.sequence,
            steps=options.steps,
            threads=options.threads,
        )
        weights = self.directory / "weights"
        if options.load:
            weights.mkdir()
        built = self.watched(BUILT, replace(task, write=str(weights) if options.load else None))
        report.verdicts += [tables.larger_than_memory(built), tables.learned(built)]
        if options.load:
            loaded = self.watched(LOADED, replace(task, load=str(weights), first=options.steps))
            report.verdicts.append(tables.same_weights(built, loaded))

    def watched(self, name: str, task: Task) -> Recording:
        written = WEIGHTS * task.shape.parameters if task.write else 0
        disk = shutil.disk_usage(self.directory).free - LEFT_FREE - written
        task = replace(task, disk=disk)
        print(f"{name}:", file=sys.stderr)
        recording = self.recordings[name] = Recording()
        watch(task, recording, say)
        used = recording.event("ready")["used"]
        self.report.facts["words"] = f"{used:,} of {task.shape.vocabulary:,} occur in the text"
        tables.show(self.report, name, task, recording)
        return recording


def say(event: dict[str, Any]) -> None:
    """Progress, as it comes."""
    if event["event"] == "plan":
        print(event["table"], file=sys.stderr)
    if event["event"] == "end":
        more = {**event["more"], "peak RSS, GB": event["peak"] / 1e9}
        details = ", ".join(f"{key} {value:.6g}" for key, value in more.items())
        print(f"  {event['name']}: {event['seconds']:.1f} s, {details}", file=sys.stderr, flush=True)


def draw(options: argparse.Namespace, run: Run) -> None:
    """The picture, beside the saved report."""
    path = command.RESULTS / f"{command.today()}-larger-than-memory.png"
    try:
        picture.draw(
            run.recordings, options.memory, f"Within {options.memory / 1e9:g} GB: {options.shape}", path
        )
        run.report.facts["picture"] = path.name
    except ImportError as missing:
        run.report.skipped.append(f"the picture: {missing}; `pip install tiering[bench]`")


def readings(run: Run) -> dict[str, Any]:
    """Every event and sample, for the JSON."""
    return {
        "facts": run.report.facts,
        "processes": {name: asdict(recording) for name, recording in run.recordings.items()},
        "goals": [asdict(verdict) for verdict in run.report.verdicts],
    }


def main() -> int:
    options = parse_arguments()
    command.end_on_sigterm()
    report = prepared(options)
    print(f"{options.shape}\n{options.size_by}", file=sys.stderr)
    failed = ""
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench_larger.") as directory:
        run = Run(options, Path(directory).resolve(), report)
        try:
            run.everything()
        except ChildError as error:
            failed = str(error)
        except KeyboardInterrupt:
            failed = "interrupted"
    if failed:
        report.skipped.append(failed)
    if options.save and report.tables:
        draw(options, run)
    command.finish(report, options, "larger-than-memory", lambda: readings(run))
    return command.status(report, complete=not failed)


if __name__ == "__main__":
    sys.exit(main())
