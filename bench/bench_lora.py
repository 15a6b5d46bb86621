"""Adapters over a frozen base on NVMe, beside the same in memory; and products with a quantised base.

    python bench/bench_lora.py DIR [--model 300M] [--bases bf16 int8 nf4] [--only training|products] [--quick]

DIR is a directory on the disk that holds the base. Needs transformers and peft (`pip install tiering[dev]`).

**Training.** Llama shapes with random weights in files (lora/shape.py), adapters of rank 16 on all linear layers, batch
1. Ours streams the base from swap space or reads it in place, with a host budget of a quarter of the base; beside it
runs ours with everything in memory, plain peft in memory (bf16) and bitsandbytes' base in memory (int8, nf4; where its
wheel is installed). Each side is a process of its own, and takes one step per round, in an order that rotates; fio
reads in the same rounds. Goals: losses and adapters have the bits of the resident run; a step reads what forward and
backward need of what the plan leaves on NVMe, to the byte, and writes nothing; peak RSS is within the budgets, the
libraries and a constant; a step takes at most 1.1 times the longer of compute and fio's reads of its bytes; a base that
is read in place takes no swap space and starts at once.

**Products.** See lora/products.py.

Exit status: 0 when all goals hold, 1 when one does not, 2 when there is no result.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from frame import command
from frame.report import Report
from frame.rounds import Run
from frame.side import Place, Side
from lora import shape, training
from lora.training import Scale


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Adapters over a frozen base on NVMe, and products with a quantised base.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dir", type=Path, help="a directory on the disk that holds the base")
    parser.add_argument("--model", choices=list(shape.SHAPES), default="300M")
    parser.add_argument("--bases", nargs="+", choices=training.BASES, default=list(training.BASES))
    parser.add_argument("--only", choices=["training", "products"], help="leave out the other part")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=4, help="steps of each side, after a first one")
    parser.add_argument(
        "--memory",
        type=command.size,
        help="what a process may take, as 2GB: only the side that streams runs, within it",
    )
    parser.add_argument(
        "--sizes", nargs="+", default=["2048x2048", "4096x4096"], help="of products: outputs x inputs"
    )
    parser.add_argument("--inputs", type=int, nargs="+", default=[1, 4, 16, 64, 512], help="rows of products")
    parser.add_argument(
        "--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"]
    )
    command.add_sides(parser, patience=1800)
    command.add_files(parser)
    options = parser.parse_args()
    if options.quick:
        options.model, options.rounds, options.sequence = "10M", 2, 32
        options.sizes, options.inputs, options.dtypes = ["256x256"], [1, 20], ["bfloat16"]
    command.require_at_least(parser, options, rounds=2, sequence=2)
    return options


def train(run: Run[Scale, Side], options: argparse.Namespace) -> None:
    with training.files(run) as sides:
        cases = [(base, partial(training.case, sides=sides, base=base)) for base in options.bases]
        command.run_cases(run, cases)


def multiply(report: Report, options: argparse.Namespace) -> None:
    import torch
    from lora import products

    from optim_cpu import kernels

    torch.set_num_threads(options.threads)
    kernels.set_thread_count(options.threads)
    report.facts["instruction set"] = kernels.instruction_set()
    rounds = 2 if options.quick else 9
    for size in options.sizes:
        outputs, columns = map(int, size.split("x"))
        for dtype in options.dtypes:
            products.products(report, (outputs, columns), options.inputs, getattr(torch, dtype), rounds)
    for dtype in options.dtypes:
        products.one_row(report, columns, dtype, options.threads, rounds)


def main() -> int:
    options = parse_arguments()
    command.end_on_sigterm()
    report = Report(
        "bench_lora: adapters over a frozen base on NVMe",
        {
            **command.facts("tiering", "torch", "transformers", "peft", directory=options.dir),
            "threads": str(options.threads),
            "CPUs": str(len(os.sched_getaffinity(0))),
        },
    )
    small = options.quick
    scale = Scale(
        options.model,
        options.sequence,
        options.rounds,
        (32 << 20) if small else (1 << 30),
        0.3 if small else 2.0,
        options.memory,
    )
    run = Run(report, Place(options.dir.resolve(), options.threads, options.patience), scale, Side)
    if options.only != "products":
        train(run, options)
    if options.only != "training":
        multiply(report, options)
    command.finish(report, options, "lora", lambda: command.readings(report, sides=run.sides))
    return command.status(report, complete=not run.failed and bool(report.verdicts))


if __name__ == "__main__":
    sys.exit(main())
