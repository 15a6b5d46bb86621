"""Saving and loading a checkpoint beside dd, torch.save and torch.distributed.checkpoint, alternating in one run.

    python bench/bench_checkpoint.py DIR [--cases foreground ranks background snapshots] [--rounds 5] [--save] [--quick]
                                     [--json FILE] [--markdown FILE]

DIR is a directory on the disk to measure, with 16 GB free; with all cases it takes 24 GB of memory and twenty minutes.

**Model.** The demo's GPT of 24 blocks, width 1024 (303 M parameters), bf16, AdamW: fp32 masters and both moments are
3.6 GB. Ours trains by the configuration of bench_step.py, once with everything on NVMe and nothing cached, once with
everything in RAM. The peers hold the same tensors in memory, and only them.

**Rounds.** Each side is a process that builds its state once, and then saves and loads it when told to. Everyone has a
turn per round, who goes first rotates, and the first round is dropped. A save ends when its files are flushed to the
disk. Before a load the page cache forgets them (posix_fadvise; the kernel's count of what the process read must agree),
and the state is changed, so that a load that does nothing is seen: behind it, a fingerprint must be that of the save.
Then the checkpoint is removed, and the file system's journal written.

**dd** has three turns in the same rounds, on as many bytes: a write (of zeros; look whether your disk cuts them short),
a read, and a copy, all with O_DIRECT, the faster of blocks of 4 and 16 MiB each time. Saving from NVMe reads the disk
that it writes to, and loading writes the one that it reads: the copy is their bound and what the goals are about; the
ratios to the plain write and read stand beside it. From memory, the plain ones are the bound.

**Peers.** torch.save into a file, and fsync; torch.load, once as it comes and once with mmap, and its tensors copied
into those that are there, as load_state_dict does; the faster one counts. torch.distributed.checkpoint in one process,
with its FileSystemWriter and FileSystemReader as they come: it flushes its files and loads in place.

**Memory.** RSS before, and VmHWM during. torch.save and torch.distributed.checkpoint write from the tensors into the
page cache: their RSS hardly rises, but the whole checkpoint is in memory once more, and a container is charged for it.
So the goal about extra memory takes anonymous memory and page cache together, sampled every 50 ms.

**Cases.**

- foreground: the above.
- ranks: two ranks on NVMe, each with half of the threads, beside dd.
- background: steps during a save in the background, beside steps without one, and behind one in the foreground; from
  NVMe, where steps and save share a disk, and in RAM, where the disk has nothing else to do.
- snapshots: an engine with part of its state in a host budget of 1 GiB takes snapshots and checkpoints in turn; then
  runs resume from the last snapshot, and adopt its swap files or copy their content.

--save writes the report to bench/results/, --quick takes a tiny model and proves nothing. Speeds of shared machines
swing within minutes; only ratios of one run mean anything. Exit status: 0 when all goals hold, 1 when one does not,
2 when something failed or nothing was measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from checkpoint import background, foreground, snapshots
from checkpoint.scale import FULL, QUICK
from checkpoint.side import CheckpointRun, Side
from frame import command
from frame.report import Report
from frame.side import Place

CASES = {
    "foreground": foreground.case,
    "ranks": foreground.ranks,
    "background": background.case,
    "snapshots": snapshots.case,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Saving and loading beside dd, torch.save and torch.distributed.checkpoint, alternating.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dir", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, help=f"rounds that are kept, instead of {FULL.rounds}")
    command.add_sides(parser, patience=600)
    command.add_files(parser)
    options = parser.parse_args()
    command.require_at_least(parser, options, rounds=1)
    return options


def prepared(options: argparse.Namespace, directory: Path) -> CheckpointRun:
    scale = QUICK if options.quick else FULL
    if options.rounds:
        scale = replace(scale, rounds=options.rounds)
    facts = command.facts("tiering", "torch", directory=options.dir)
    facts |= {"threads": f"{options.threads} for each side", "model": str(scale.model)}
    report = Report("bench_checkpoint: saving and loading beside dd, torch.save and DCP", facts)
    return CheckpointRun(report, Place(directory, options.threads, options.patience), scale, Side)


def main() -> int:
    options = parse_arguments()
    command.end_on_sigterm()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench_checkpoint.") as directory:
        run = prepared(options, Path(directory).resolve())
        command.run_cases(run, ((name, CASES[name]) for name in options.cases))
    command.finish(run.report, options, "checkpoint", lambda: command.readings(run.report, sides=run.sides))
    return command.status(run.report, complete=not run.failed and bool(run.report.tables))


if __name__ == "__main__":
    sys.exit(main())
