"""The training step beside plain PyTorch and DeepSpeed, alternating in one run.

    python bench/bench_step.py DIR [--peers PYTHON] [--cases ram nvme1 nvme3 formats disk policies ...]
                               [--rounds 7] [--steps 3] [--traces DIR] [--save] [--quick] [--json FILE]

DIR is a directory on the disk to measure. DeepSpeed is a peer for measuring and nothing else needs it. It lives in an
environment of its own, whose interpreter --peers names; it compiles itself at its first use, which takes minutes, a C++
compiler and libaio's headers:

    python -m venv peers && peers/bin/pip install torch deepspeed==0.19.8 ninja
    python bench/bench_step.py DIR --peers peers/bin/python

Without --peers, or without fio (`apt-get install fio`), their rows are left out, and the report says so.

**Model.** The demo's GPT of 24 blocks, width 1024, vocabulary 256 (303 M parameters), batch 1, sequence 32, bf16,
AdamW, gradients clipped to a norm of 1.0: one file for all sides (frame/reference_model.py), the same tokens, as many
threads.

**Rounds.** Each side is a process that builds the model once and then trains so many steps when told to. Everyone has a
turn per round, who goes first rotates, and the first round is dropped. A round ends when nothing of its side is in
flight any more, so that writing back behind the last step, and what is fetched for the next one, are paid for in the
round that caused them. Only sides that are compared run beside each other. At least seven steps of each are kept.

**Sides.** Plain PyTorch is the loop in frame/plain_loop.py; ours is the engine by a configuration; DeepSpeed is stage 3
with cpu or NVMe offload. Of four NVMe configurations (defaults, or buffers and sub-groups that fit the model, each
pipelined or not), each is tried alone for three steps, and the fastest is what the goals are about. Nobody's page cache
is dropped: DeepSpeed may gain by it, we read and write past it.

**Memory.** Peak RSS is VmHWM of the whole process, shown for building and for training; goals are about the larger.

**Bytes.** Ours are counted in C, with the plan's number beside them, which must agree to the byte; DeepSpeed's are what
the kernel counted for the process (/proc/self/io), which stands beside ours, too. fio (direct, 1 MiB, 16 in flight, our
I/O engine, the plan's own ratio of reads to writes) has a turn in the same rounds.

**Cases.**

- ram: everything in RAM, beside the plain loop, then beside DeepSpeed's cpu offload.
- nvme1, nvme3: parameters and state on NVMe with host budgets of 1 and 3 GiB, beside DeepSpeed's NVMe offload.
- formats: the state as fp32, split, bf16 and split+bf16: bytes per parameter, and whether time follows.
- disk: nothing cached, beside what fio needs for the planned bytes.
- policies: steps after backward, deferred and in backward, with micro-batches that could hide the transfers.
- policies3: steps after backward and in backward, with a host budget of 3 GiB, which has the parameters.
- start: a new process until its first step is over.
- depth: 12 and 96 blocks: time and host overhead per parameter.
- curve: host budgets from 0.75 to 6 GiB.

--save writes the report and the picture of the curve (`pip install tiering[bench]` for that) to bench/results/,
--traces a Chrome trace of a step of each of our sides. Speeds of shared machines swing within minutes; only ratios of
one run mean anything. Exit status: 0 when all goals hold, 1 when one does not, 2 when something failed or nothing was
measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from frame import command
from frame.measured import Measured
from frame.report import Report
from frame.side import PEER_RECIPE, Place, Side
from step import curve, depth, disk, formats, nvme, policies, ram, start
from step.measured import StepRun
from step.scale import FULL, QUICK

CASES = ["ram", nvme.SMALL, nvme.LARGE, "formats", "disk", "policies", "policies3", "start", "depth", "curve"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The training step beside plain PyTorch and DeepSpeed, alternating.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dir", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--peers", type=Path, help="the interpreter of an environment with deepspeed")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, help="rounds that are kept, instead of 7")
    parser.add_argument("--steps", type=int, help="steps of ours in each round, instead of 3")
    parser.add_argument("--traces", type=Path, help="a directory for traces of our sides' steps")
    command.add_sides(parser, patience=600)
    command.add_files(parser, save="the report and its picture")
    options = parser.parse_args()
    command.require_at_least(parser, options, rounds=1, steps=1)
    return options


def prepared(options: argparse.Namespace, directory: Path) -> StepRun:
    scale = QUICK if options.quick else FULL
    overrides = {name: getattr(options, name) for name in ("rounds", "steps") if getattr(options, name)}
    scale = replace(scale, **overrides)
    facts = command.facts("tiering", "torch", directory=options.dir)
    facts |= {"threads": f"{options.threads} for each side", "model": str(scale.model)}
    report = Report("bench_step: the training step beside plain PyTorch and DeepSpeed", facts)
    if options.peers is None:
        report.skipped.append(f"DeepSpeed: --peers names no environment that has it; {PEER_RECIPE}")
    place = Place(directory, options.threads, options.patience)
    return StepRun(report, place, scale, Side, peers=options.peers, traces=options.traces)


def chosen(
    options: argparse.Namespace, points: dict[str, Measured]
) -> Iterator[tuple[str, Callable[[StepRun], object]]]:
    """The cases that were asked for; ``points`` gets those of the curve. Both host budgets meet DeepSpeed in one."""
    hosts = tuple(host for host in (nvme.SMALL, nvme.LARGE) if host in options.cases)
    others = {
        "formats": formats.case,
        "disk": disk.case,
        "policies": policies.case,
        "policies3": policies.case_in_host_memory,
        "start": start.case,
        "depth": depth.case,
    }
    if "ram" in options.cases:
        yield "ram", ram.case
    if hosts:
        yield " and ".join(hosts), lambda run: nvme.case(run, hosts)
    for name, case in others.items():
        if name in options.cases:
            yield name, case
    if "curve" in options.cases:
        yield "curve", lambda run: points.update(curve.case(run))


def picture(run: StepRun, points: dict[str, Measured], path: Path) -> None:
    try:
        curve.draw(points, f"{run.scale.model}: parameters and state on NVMe", path)
    except ImportError as missing:
        run.report.skipped.append(f"the picture of the curve: {missing}; `pip install tiering[bench]`")
        return
    run.report.facts["picture of the curve"] = path.name


def main() -> int:
    options = parse_arguments()
    command.end_on_sigterm()
    points: dict[str, Measured] = {}
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench_step.") as directory:
        run = prepared(options, Path(directory).resolve())
        command.run_cases(run, chosen(options, points))
    if options.save and points:
        picture(run, points, command.RESULTS / f"{command.today()}-step-curve.png")
    command.finish(run.report, options, "step", lambda: command.readings(run.report, sides=run.sides))
    return command.status(run.report, complete=not run.failed and bool(run.report.tables))


if __name__ == "__main__":
    sys.exit(main())
