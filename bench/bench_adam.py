"""Our optimizer steps beside torch's fused AdamW and DeepSpeedCPUAdam, alternating in one run.

    python bench/bench_adam.py [--peers PYTHON] [--part step single many start] [--numel 128000000] [--rounds 21]
                               [--isa avx512 avx2] [--as-allocated] [--quick] [--json FILE] [--markdown FILE]

DeepSpeed is a peer for measuring and nothing else needs it. It lives in an environment of its own, whose interpreter
--peers names; it compiles itself at its first use, which takes a minute and a C++ compiler:

    python -m venv peers && peers/bin/pip install torch deepspeed==0.19.8 ninja
    python bench/bench_adam.py --peers peers/bin/python

Without --peers only torch is compared, and the report says so.

**step, single.** One fp32 parameter of 128 M elements: all threads, then one. Everything is timed once per round; who
goes first rotates. Each side is charged for the whole job from bf16 gradient to bf16 parameter: a peer casts the
gradient to fp32 (6 B per parameter), steps (28 B) and copies out (6 B). Bytes are those that the operation has to move;
a cast or copy really moves more, since what it writes is read into the cache first. What makes the sides the same:

- Tensors: torch, DeepSpeed and all our rows step the very same ones in turn. DeepSpeed, in its own process, has them as
  shared memory, and measures its own time around the work only.
- Addresses: arrays that are walked side by side start 512 bytes apart within a page, on both sides. Allocators start
  them all at one place of a page, and then it is luck whether two of them evict each other from the first-level cache
  (adam/values.py); --as-allocated shows it.
- Threads: the same number, for our kernels, torch's and DeepSpeed's OpenMP. Before each reading everyone sleeps 20 ms,
  because idle OpenMP threads spin for a while. The CPU time that either side used while it was the other's turn is
  in the report.
- Numbers: gradients are constant and not near 0, so that no moment ever fades into subnormals. At the end the states
  are searched for odd values.

**Roof**: an in-place read and write of fp32 by torch, with as many threads, once per round: what this memory gives.

**many.** 10,000 tensors of 1 to 100,000 elements, uniform and log-uniform: optim_cpu.AdamW beside torch's fused one.

**start.** Import and first step, each time in a new process that has imported torch.

The small tensors come first, in a young process: what its heap and its OpenMP have been through shows in torch's times
(0.13 to 4.5 s were seen for the same step).

Speeds of shared machines swing within minutes; only ratios of one run mean anything. Memory: 40 B per parameter, 5 GB
by default, and 12 GB for the many tensors. Exit status: 0 when all goals hold, 1 when one does not, 2 when something
could not be measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from adam import many, start, steps, tables
from adam.peer import Peer
from adam.readings import Part, measure
from frame import command
from frame.report import Report
from frame.side import SideError
from rich.console import Console

from optim_cpu import kernels

PARTS = ["step", "single", "many", "start"]
QUICK = {"rounds": 2, "starts": 2, "numel": 1_000_000, "tensors": 200}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Our optimizer steps beside torch's and DeepSpeed's, alternating.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # A step with avx512_bf16 is one with avx512.
    left_out = ("portable", "avx512_bf16")
    usual = [isa for isa in kernels.available_instruction_sets() if isa not in left_out] or ["portable"]
    parser.add_argument("--peers", type=Path, help="the interpreter of an environment with deepspeed")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--numel", type=int, default=128_000_000, help="elements of the large parameter")
    parser.add_argument("--rounds", type=int, default=21, help="rounds of the parts step, single and many")
    parser.add_argument("--starts", type=int, default=9, help="rounds of the part start")
    parser.add_argument("--tensors", type=int, default=10_000, help="tensors of the part many")
    parser.add_argument("--threads", type=int, default=kernels.thread_count())
    parser.add_argument(
        "--isa",
        nargs="+",
        default=usual,
        choices=kernels.available_instruction_sets(),
        help="the first one is what the goals are judged by",
    )
    parser.add_argument(
        "--as-allocated", action="store_true", help="start the large arrays where an allocator would"
    )
    parser.add_argument("--quick", action="store_true", help=f"under a minute, proves nothing: {QUICK}")
    command.add_files(parser, save="")
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    return arguments


def use_threads(threads: int) -> None:
    kernels.set_thread_count(threads)
    torch.set_num_threads(threads)


def plural(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def large(options: argparse.Namespace, report: Report) -> Iterator[Part]:
    """The parts step and single, over the same tensors."""
    thread_counts = {"step": options.threads, "single": 1}
    apart = not options.as_allocated
    model = steps.Model(options.numel, apart=apart)
    for name, threads in thread_counts.items():
        if name not in options.part:
            continue
        use_threads(threads)
        peers = Peer(options.peers, model, threads) if options.peers else nullcontext()
        with peers as peer:
            rows = measure(options.rounds, model.rows(tuple(options.isa), peer))
            title = (
                f"{name}: {options.numel / 1e6:g} M parameters, {plural(threads)}, {options.rounds} rounds"
            )
            part = Part(name, title, threads, options.isa[0], rows, [account("ours and torch", model.odd())])
            if peer is not None:
                result = peer.check()
                report.facts["peer"] = f"{peer.about}, in a process and an environment of its own"
                part.notes.append(account(f"DeepSpeed, step {result['step']}", result["odd"]))
                part.notes.append(
                    f"While the other side worked: DeepSpeed's process used {peer.idle_cpu:.2f} s of CPU between"
                    f" its turns, ours {peer.our_cpu:.2f} s during its {peer.busy:.1f} s."
                )
            yield part


def account(side: str, odd: int) -> str:
    """What a side's values are like at the end."""
    return f"{side}: {odd or 'no'} odd values (infinite, NaN, subnormal) in the states at the end."


def small(options: argparse.Namespace) -> Iterator[Part]:
    """The part many, once for each distribution of sizes."""
    use_threads(options.threads)
    for name in many.SIZES:
        model = many.Model(name, options.tensors)
        rows = measure(options.rounds, model.rows(options.isa[0]))
        title = (
            f"many, {name}: {options.tensors:,} tensors of {many.SMALLEST} to {many.LARGEST:,} elements,"
            f" {model.numel / 1e6:.0f} M together, {plural(options.threads)}, {options.rounds} rounds"
        )
        note = account("both", model.odd())
        del model  # the memory is for the next one
        yield Part(f"many, {name}", title, options.threads, options.isa[0], rows, [note])


def first_steps(options: argparse.Namespace) -> Part:
    rows = measure(options.starts, start.rows(options.peers, options.threads))
    title = (
        f"start: import and first step of {start.MODEL}, torch imported before, {options.starts} processes"
    )
    return Part("start", title, options.threads, "", rows)


def asked_for(options: argparse.Namespace) -> list[str]:
    """The names of the parts that ``parts`` is to yield."""
    return [
        part
        for name in options.part
        for part in ([f"many, {sizes}" for sizes in many.SIZES] if name == "many" else [name])
    ]


def parts(options: argparse.Namespace, report: Report) -> Iterator[Part]:
    """Every part that was asked for, as it is done."""
    if "many" in options.part:
        yield from small(options)
    if {"step", "single"} & set(options.part):
        yield from large(options, report)
    if "start" in options.part:
        yield first_steps(options)


def main() -> int:
    options = parse_arguments()
    facts = command.facts("tiering", "torch", "numpy") | {"instruction sets": ", ".join(options.isa)}
    report = Report("bench_adam: our optimizer steps beside torch's and DeepSpeed's", facts)
    if options.peers is None:
        report.skipped.append(
            "DeepSpeedCPUAdam: --peers names no environment that has it; only torch is compared"
        )
    done: list[Part] = []
    try:
        with Console().status("filling tensors") as status:
            for part in parts(options, report):
                done.append(part)
                status.update(f"done: {', '.join(part.name for part in done)}")
    except SideError as error:  # what was measured before it is worth a report
        report.skipped.append(str(error))
    tables.fill(report, done)
    command.finish(report, options, "optimizers", lambda: command.readings(report, parts=done))
    return command.status(report, complete=len(done) == len(asked_for(options)))


if __name__ == "__main__":
    sys.exit(main())
