"""The training step on a GPU: each way to offload beside no offload at all, plain PyTorch and DeepSpeed, alternating.

    python bench/bench_gpu_step.py DIR [--seconds 900] [--tokens 8192 16384] [--cases fits larger] [--parameters N]
                                   [--limit SIZE] [--peers PYTHON] [--save] [--json FILE] [--markdown FILE] [--tiny]

DIR is a directory for swap files; where it takes no direct I/O, the sides on NVMe are left out. DeepSpeed is a peer
for measuring and nothing else needs it: the interpreter of this script may have it, or that of an environment of its
own, which --peers names. It compiles itself at its first use; where it cannot, the report says so and the rest goes
on.

**Model.** A Llama (gpu_step/llama.py) in bf16 with fused attention and activation checkpointing, AdamW, gradients
clipped to a norm of 1.0, sequences of 2048. Its size is derived: the largest that the card holds twice, in full, and
whose offloaded sides host memory holds beside each other; or --parameters.

**Sides of the case "fits".** Ours with everything on the device, which is the reference; plain PyTorch with fused
AdamW and fp32 masters; parameters and optimizer offloaded to the CPU; the same with groups stepped while backward
runs, and so without clipping; the optimizer alone on the CPU; both on NVMe with a small host budget; DeepSpeed's stage
3 with cpu offload of both, pinned. --update-on-device adds offloaded sides with that share of the state updated on the
device, --resized one that unshards groups in memory of torch's allocator in place of a slab of its own, which shows in
reserved memory and calls of cudaMalloc.

**Case "larger".** A model whose parameters, gradients and state are 1.25 times the card: all on the CPU, as much on
the device as it holds, on NVMe, DeepSpeed. --limit makes the card smaller for it: torch's allocator takes no more than
that, which stands for a smaller card, and for a shorter run. TFLOP/s compare it with the model that fits.

**Rounds.** Each side is a process that builds the model once and then trains for about two seconds when told to. As
many as memory holds are there at the same time; everyone has a turn per round, who goes first rotates, and the first
round is dropped. A round ends when device and disk have nothing more to do. There are as many as --seconds allow.

**Figures.** tokens/s: the median of the rounds, with their range. TFLOP/s: of the model, 6 per element of a matrix and
token, and attention's (6 x sequence x width in each block, since it is causal); what checkpointing computes again is
not counted. Stalls: what the engine's snapshot says, which on a GPU is the time that the device stood still for bytes,
by its own clock. Bytes over the link: what the engine's copies counted and timed, beside what gpu_copy.py measures
with torch's pinned memory, in the same run. Device memory: by torch's allocator. Host memory: VmHWM, with what torch
pinned where that is not in it.

On a CPU, or with --tiny, a tiny model runs through everything and proves nothing else; what only a device can tell is
"-". Exit status: 0 when all goals hold, 1 when one does not, 2 when something failed or nothing was measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from frame import command, machine
from frame.report import Report
from frame.side import Place
from gpu_step import cases, sides, tables
from gpu_step.cases import Setting
from gpu_step.link import Link, LinkError, measure
from gpu_step.ours import configuration
from gpu_step.run import Run
from gpu_step.shape import TINY, Shape, of_size
from gpu_step.side import GOODBYE
from gpu_step.sides import CARD_SHARE, HOST_SHARE
from gpu_step.waves import Memory

from tiering.config.fields import parse_size

FITS, LARGER = "fits", "larger"
TINY_TOKENS, TINY_SEQUENCE = (64, 128), 32
TINY_TURN = 0.1  # seconds
PEER_RECIPE = (
    "install it beside torch (`pip install deepspeed==0.19.8 ninja`; its extensions need a C++ compiler and some"
    " minutes at their first use), or pass --peers with the interpreter of an environment that has it"
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The training step on a GPU beside no offload, plain PyTorch and DeepSpeed, alternating.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dir", type=Path, help="a directory for swap files")
    parser.add_argument("--seconds", type=float, default=900, help="about how long all of it may take")
    parser.add_argument("--cases", nargs="+", choices=[FITS, LARGER], default=[FITS, LARGER])
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[8192, 16384],
        help="in a step; the goals are about the first",
    )
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--parameters", type=float, help="of the model that fits, about")
    parser.add_argument("--limit", type=parse_size, help="bytes of the card, for the model that does not fit")
    parser.add_argument(
        "--turn", type=float, default=2.0, help="seconds that a side trains in one round, about"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side")
    parser.add_argument(
        "--update-on-device", type=float, nargs="+", default=[], help="shares, each for one more side"
    )
    parser.add_argument(
        "--resized", action="store_true", help="one more side, that unshards groups where torch allocates"
    )
    parser.add_argument(
        "--tiering", type=json.loads, default={}, help="JSON that goes into that section of each of our sides"
    )
    parser.add_argument("--peers", type=Path, help="the interpreter of an environment with deepspeed")
    parser.add_argument("--no-peers", action="store_true", help="leave DeepSpeed out")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, proves nothing")
    command.add_files(parser)
    options = parser.parse_args()
    if any(tokens % options.sequence for tokens in options.tokens):
        parser.error(f"--tokens must be multiples of the sequence, {options.sequence}")
    if options.tiny:
        options.tokens, options.sequence, options.turn = TINY_TOKENS, TINY_SEQUENCE, TINY_TURN
    return options


def with_deepspeed(options: argparse.Namespace) -> Path | None:
    """The interpreter that has it, if there is one."""
    if options.no_peers:
        return None
    if options.peers is None and importlib.util.find_spec("deepspeed") is not None:
        return Path(sys.executable)
    peers: Path | None = options.peers
    return peers


def host_memory() -> int:
    """Bytes that are free for new processes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def described(options: argparse.Namespace, link: Link | None) -> dict[str, str]:
    device = "none: the CPU computes, and no goal of a GPU can be judged"
    if link is not None:
        device = f"{link.card}, {link.memory / 2**30:.1f} GiB, {link.driver}"
    return {
        "GPU": device,
        **command.facts("tiering", "torch", directory=options.dir),
        "threads": f"{options.threads} for each side",
    }


def measured_rates(run: Run, directory: Path, shape: Shape, card: int) -> None:
    """What the engine's planner goes by, in a cache of this run: what our sides find when they start."""
    os.environ["XDG_CACHE_HOME"] = str(directory / "cache")
    config = directory / "offloaded.json"
    config.write_text(json.dumps(configuration({"param": "cpu", "optimizer": "cpu"})))
    command = [sys.executable, "-m", "tiering.cli", "plan", "--params", str(shape.parameters)]
    command += ["--config", str(config), "--gpu", str(card), "--measure", str(directory)]
    run.say("measuring the planner's rates")
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, run.left))
    except subprocess.TimeoutExpired:
        run.without("the planner's rates", "there was no time to measure them")
        return
    if ran.returncode:
        message = " / ".join(ran.stderr.strip().splitlines()[-2:])
        run.without("the planner's rates", f"tiering plan --measure ended with {ran.returncode}: {message}")


def setting_of(options: argparse.Namespace, link: Link | None) -> Setting:
    memory = Memory(sides.AMPLE, sides.AMPLE)
    if link is not None:
        memory = Memory(int(CARD_SHARE * link.memory), int(HOST_SHARE * host_memory()))
    return Setting(
        memory=memory,
        card=link.memory if link is not None else None,
        sequence=options.sequence,
        points=tuple(options.tokens),
        peer=with_deepspeed(options),
        direct=machine.takes_direct_io(options.dir),
        pinned=link,
        more=options.tiering,
        shares=tuple(options.update_on_device),
        resized=options.resized,
    )


def train(options: argparse.Namespace, run: Run, setting: Setting, directory: Path) -> None:
    """All cases, each with its share of the time."""
    if setting.peer is None:
        run.without("DeepSpeed", PEER_RECIPE)
    if not setting.direct:
        run.without(sides.ON_NVME, f"{options.dir} takes no direct I/O into anonymous files")
    if FITS in options.cases:
        shape = fitting_shape(options, setting)
        if shape is None:
            run.without("a model that fits", "card or host memory are too small for the smallest")
        else:
            run.report.facts["model that fits"] = f"{shape}; sequences of {setting.sequence}"
            if setting.card is not None:
                measured_rates(run, directory, shape, setting.card)
            share = cases.LARGER_SHARE if LARGER in options.cases else 0.0
            cases.fitting(run, setting, shape, time.monotonic() + (1 - share) * run.left)
    if LARGER in options.cases:
        card = options.limit or setting.card
        shape = TINY if card is None else cases.larger_shape(setting, card)
        if shape is None:
            run.without("a model larger than the card", "card and host memory together do not hold it")
            return
        size = f" than {card / 2**30:.0f} GiB" if card is not None else ""
        run.report.facts[f"model that is larger{size}"] = f"{shape}; sequences of {setting.sequence}"
        cases.larger(run, replace(setting, card=card), shape, run.deadline)


def fitting_shape(options: argparse.Namespace, setting: Setting) -> Shape | None:
    if setting.card is None:
        return TINY
    if options.parameters:
        return of_size(int(options.parameters))
    return cases.that_fits(setting)


def main() -> int:
    options = parse_arguments()
    command.end_on_sigterm()
    deadline = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench_gpu_step.") as name:
        directory = Path(name).resolve()
        report = Report("bench_gpu_step: the training step on a GPU", {})
        run = Run(report, Place(directory, options.threads, GOODBYE), deadline, options.turn)
        link = None
        try:
            if not options.tiny:
                run.say("measuring the link")
                link = measure(options.seconds)
            report.facts |= described(options, link)
            if link is not None:
                report.verdicts += tables.copies(link)
            elif not options.tiny:
                print(
                    "bench_gpu_step: torch finds no CUDA device; --tiny runs it on the CPU", file=sys.stderr
                )
                return 2
            train(options, run, setting_of(options, link), directory)
        except LinkError as error:
            run.fail("gpu_copy.py", error)
        except KeyboardInterrupt:  # what was measured before it is worth a report
            run.failed.append("the run")
            report.skipped.append("what comes after this: interrupted")
    command.finish(report, options, "gpu-step", lambda: readings(run, link))
    return command.status(report, complete=not run.failed and bool(report.tables))


def readings(run: Run, link: Link | None) -> dict[str, Any]:
    """Every reading, for the JSON."""
    return command.readings(run.report, sides=run.sides) | {
        "link": asdict(link) if link is not None else None
    }


if __name__ == "__main__":
    sys.exit(main())
