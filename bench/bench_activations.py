"""Activations on NVMe and in host memory, beside the same on the device, plain PyTorch and save_on_cpu.

    python bench/bench_activations.py DIR [--only bits|rows|tiers] [--rounds 4] [--save] [--quick] [--json FILE]

DIR is a directory on the disk that holds activations.

**Model.** The demo's GPT in bf16 (frame/reference_model.py). What autograd saves of it follows from its shapes, and so
do the bytes that a step swaps: activations/saved.py counts both without the engine.

**Bits.** A small model trains five steps with activations on the device, in host memory and on NVMe, without
checkpointing and with both of torch's variants, and with its state on the device, in host memory, on NVMe, or with only
the optimizer's state there. Goals: losses and weights have the bits of the run with activations on the device; a step
reads and writes the activations that do not fit half of their budget, once, to the byte.

**Rows.** The small model with its parameters and state on NVMe trains a batch whose blocks run over chunks of rows
(``block_rows``), and the same batch in micro-batches. Goal: the bytes of a step are those of the plan, whatever the
number of chunks.

**Tiers.** A model whose activations take eight times the activation budget, its state in memory. Each side is a process
of its own and takes one step per round, in an order that rotates; plain PyTorch runs beside ours, alone and under
torch.autograd.graph.save_on_cpu, and fio in the same rounds, half of its bytes reads. Goals: the bytes of the formula;
the peak of RSS is within the budgets and a constant; a step takes at most 1.1 times the longer of the step with
activations on the device and fio's time for its bytes.

Exit status: 0 when all goals hold, 1 when one does not, 2 when there is no result.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from activations import bits, rows, tiers
from activations.scale import FULL, QUICK, Scale
from frame import command
from frame.measured import TrainingRun
from frame.report import Report
from frame.side import Place, Side

CASES = {"bits": bits.case, "rows": rows.case, "tiers": tiers.case}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Activations on NVMe and in host memory, beside plain PyTorch and save_on_cpu.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dir", type=Path, help="a directory on the disk that holds activations")
    parser.add_argument("--only", choices=list(CASES), help="leave out the other cases")
    parser.add_argument("--rounds", type=int, help=f"rounds that are kept, instead of {FULL.rounds}")
    command.add_sides(parser, patience=600)
    command.add_files(parser)
    options = parser.parse_args()
    command.require_at_least(parser, options, rounds=1)
    return options


def main() -> int:
    options = parse_arguments()
    command.end_on_sigterm()
    scale = QUICK if options.quick else FULL
    scale = replace(scale, rounds=options.rounds or scale.rounds)
    facts = command.facts("tiering", "torch", directory=options.dir)
    facts |= {"threads": f"{options.threads} for each side", "model": str(scale.model)}
    report = Report("bench_activations: activations that leave the device", facts)
    cases = {options.only: CASES[options.only]} if options.only else CASES
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench_activations.") as directory:
        place = Place(Path(directory).resolve(), options.threads, options.patience)
        run = TrainingRun[Scale](report, place, scale, Side)
        command.run_cases(run, cases.items())
    command.finish(report, options, "activations", lambda: command.readings(report, sides=run.sides))
    return command.status(report, complete=not run.failed and bool(report.verdicts))


if __name__ == "__main__":
    sys.exit(main())
