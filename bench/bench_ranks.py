"""Training on several ranks beside torch's FSDP2 and DDP, alternating in one run; and the bytes that ranks send.

    python bench/bench_ranks.py [DIR] [--cases sent bf16 fp32 replicated] [--ranks 2] [--threads 1]
                                [--rounds 7] [--steps 3] [--traces DIR] [--save] [--quick] [--json FILE]

Everything it needs is in our own environment: torch is the peer. DIR is a directory for swap space, on a real disk (a
file system in RAM is refused); the working directory if none is named.

**Model.** The demo's GPT of 12 blocks, width 512, vocabulary 256 (38 M parameters), sequence 64, a batch of 4 for each
rank; AdamW, gradients clipped to a norm of 1.0: one file for all sides (frame/reference_model.py), the same tokens on
the same rank, as many threads in each process, gloo over loopback.

**Rounds.** Each side is as many processes as there are ranks; they build the model once and then train so many steps
when told to, and sleep otherwise. Everyone has a turn per round, who goes first rotates, the first round is dropped.
A turn's time is that of the rank that took longest, and ends when nothing of it is in flight any more: what is gathered
ahead for the next step is paid for. Ratios are those of the same round; goals are about their median.

**Sides.** Ours is the engine by a configuration, nothing offloaded. FSDP2 is ``fully_shard`` on every block and the
root, with fp32 shards under a fused AdamW; in bf16 by its mixed precision policy. It runs as it comes, where a CPU's
gathers block; with asynchronous gathers that its explicit prefetch begins ahead; and with parameters that stay gathered
from forward to backward, as ours do where there is room. In bf16 its gradients travel in fp32, and in bf16 as ours do
(we add them up in fp32, it does not). The fastest of them in these rounds is what the goal is about. DDP has gradients
as bucket views, and ZeroRedundancyOptimizer beside stage 1.

**Bytes.** What the engine counts as sent, and as not sent because it was still there, against `plan.sent_bytes()`: both
together have to agree to the byte on every rank, for each stage and offload, with 2 and with 4 ranks; and what was sent
against what the kernel counted. For that, the ranks of a side are in a network namespace of their own, with nothing but
loopback: the report leaves that column out where this process may not make one (it takes root, or CAP_SYS_ADMIN;
util-linux and iproute2).

**Overlap.** From traces of our steps, made after the rounds: how long collectives were under way, how long compute
waited for them. --traces keeps them, one per side and rank: where a goal is missed, they show where the time went.

**Memory.** Peak RSS is VmHWM of a rank's process, of building and of training, for the rank that has most; what
libraries keep is in it on all sides. The baseline is an interpreter with torch in a process group.

**Cases.**

- sent: bytes, every stage and offload, 2 and 4 ranks.
- bf16, fp32: stage 3 beside FSDP2.
- replicated: stages 0, 1 and 2 beside DDP, ZeroRedundancyOptimizer, and FSDP2 that keeps parameters gathered.

--save writes the report to bench/results/. Where ranks times threads is more than the CPUs there are, the report says
so: then all sides are measured on how they share them. Exit status: 0 when all goals hold, 1 when one does not, 2 when
something failed or nothing was measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from frame import command
from frame.report import Report
from frame.side import Place
from ranks import replicated, sent, sharded
from ranks.measured import RanksRun
from ranks.network import Network, NetworkError
from ranks.scale import FULL, QUICK
from ranks.side import Ranks

CASES = ["sent", *sharded.PRECISIONS, "replicated"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Training on several ranks beside FSDP2 and DDP, alternating; bytes that ranks send.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dir", type=Path, nargs="?", default=Path(), help="a directory for swap space")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--ranks", type=int, default=2, help="of the sides that are compared")
    parser.add_argument("--rounds", type=int, help="rounds that are kept, instead of 7")
    parser.add_argument("--steps", type=int, help="steps in each round, instead of 3")
    parser.add_argument("--batch", type=int, help="sequences for each rank, instead of 4")
    parser.add_argument("--traces", type=Path, help="a directory for traces of our sides' steps")
    command.add_sides(parser, patience=300, threads=1)
    command.add_files(parser)
    options = parser.parse_args()
    command.require_at_least(parser, options, rounds=1, steps=1, batch=1, threads=1, ranks=2)
    return options


def has_networks(report: Report) -> bool:
    """Whether a side's ranks can have a network to themselves; else the report says why not."""
    try:
        Network().close()
    except NetworkError as refused:
        report.skipped.append(f"bytes by the kernel: no network namespace can be made here ({refused})")
        return False
    return True


def prepared(options: argparse.Namespace, directory: Path) -> RanksRun:
    scale = QUICK if options.quick else FULL
    overrides = {name: getattr(options, name) for name in ("rounds", "steps") if getattr(options, name)}
    if options.batch:
        overrides["model"] = replace(scale.model, batch=options.batch)
    scale = replace(scale, **overrides)
    facts = command.facts("tiering", "torch", directory=options.dir)
    facts["ranks"] = f"{options.ranks} with {options.threads} thread(s) each, gloo over loopback"
    facts["model"] = f"{scale.model} for each rank"
    most = max(options.ranks, *scale.worlds) if "sent" in options.cases else options.ranks
    if most * options.threads > len(os.sched_getaffinity(0)):
        facts["shared CPUs"] = f"{most} ranks of {options.threads} thread(s) are more than the CPUs here"
    report = Report("bench_ranks: many ranks, beside FSDP2 and DDP", facts)
    start = partial(Ranks, networks=has_networks(report))
    place = Place(directory, options.threads, options.patience)
    return RanksRun(report, place, scale, start, traces=options.traces, world_size=options.ranks)


def chosen(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[RanksRun], None]]]:
    """The cases that were asked for."""
    cases: dict[str, Callable[[RanksRun], None]] = {"sent": sent.case}
    for precision in sharded.PRECISIONS:
        cases[precision] = lambda run, precision=precision: sharded.case(run, precision)
    cases["replicated"] = replicated.case
    yield from ((name, case) for name, case in cases.items() if name in options.cases)


def main() -> int:
    options = parse_arguments()
    command.end_on_sigterm()
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
        options.traces = options.traces.resolve()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench_ranks.") as directory:
        run = prepared(options, Path(directory).resolve())
        command.run_cases(run, chosen(options))
    command.finish(run.report, options, "ranks", lambda: command.readings(run.report, sides=run.sides))
    return command.status(run.report, complete=not run.failed and bool(run.report.tables))


if __name__ == "__main__":
    sys.exit(main())
