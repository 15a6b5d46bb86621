"""``tiering``: the command line. Each subcommand imports its own modules, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiering._command_line import Parser, Version, run_printing
from tiering.commands import check as check_command
from tiering.commands import doctor as doctor_command
from tiering.commands import launch as launch_command
from tiering.commands import migrate as migrate_command
from tiering.commands import plan as plan_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # A command may print itself, with other options.
    options = _parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
    try:
        return run_printing("tiering", lambda: int(options.run(options)), unwritable=_UNWRITABLE_OUTPUT)
    except KeyboardInterrupt:
        print("tiering: interrupted", file=sys.stderr)
        return _INTERRUPTED


_INTERRUPTED = 128 + signal.SIGINT
"""The exit code that a shell reports for a command that SIGINT ended."""
_UNWRITABLE_OUTPUT = 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tiering", description="Memory tiering for PyTorch training.")
    parser.add_argument("--version", action=Version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="train a small GPT with its state on NVMe and check the result",
        description="Trains a small GPT three times: with its state on NVMe, in memory, and in plain PyTorch. Then"
        " compares the weights and the losses. A sidecar shows the runs while they train.",
        epilog="exit code: 0 placement changed nothing, 1 the comparison failed, 2 the demo could not run. With"
        " --plant-fault: 1 the comparison found the fault, 3 it did not.",
    )
    demo.add_argument(
        "--dir", type=Path, default=Path(), help="directory for swap space (default: the current one)"
    )
    demo.add_argument(
        "--port",
        type=int,
        default=8471,
        help="port of the sidecar, 0 for any free one (default: %(default)s)",
    )
    demo.add_argument(
        "--steps", type=_steps, metavar="N", help="optimizer steps, at least 2 (default: 20; in fp32 14)"
    )
    demo.add_argument(
        "--plant-fault",
        action="store_true",
        help="flip one bit on NVMe during training, so that the comparison must fail",
    )
    demo.set_defaults(run=_demo)

    check = commands.add_parser("check", help="report how each key of a DeepSpeed configuration is handled")
    check_command.add_arguments(check)

    migrate = commands.add_parser(
        "migrate", help="change a script's imports of deepspeed to imports of tiering"
    )
    migrate_command.add_arguments(migrate)

    launch = commands.add_parser("launch", help="start the ranks of a script, as the command deepspeed does")
    launch_command.add_arguments(launch)

    plan = commands.add_parser(
        "plan",
        help="plan the memory of each tier, estimate the time of a step, and suggest changes if a model does not fit",
    )
    plan_command.add_arguments(plan)
    plan.set_defaults(run=plan_command.run)
    doctor = commands.add_parser("doctor", help="check this machine for problems and suggest fixes")
    doctor_command.add_arguments(doctor)
    _add_convert(commands)
    _add_inspect(commands)
    return parser


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="convert a checkpoint to safetensors, or safetensors to a checkpoint",
        epilog="exit code: 0 converted, 1 SRC is damaged or DST cannot be written, 2 usage error.",
        description="Converts a checkpoint, or the latest one of a directory, to safetensors with an index. Converts a"
        " Hugging Face directory, or a .safetensors file, to a checkpoint for load_checkpoint.",
    )
    convert.add_argument(
        "source",
        type=Path,
        metavar="SRC",
        help="a checkpoint, a directory of checkpoints, or safetensors weights",
    )
    convert.add_argument(
        "into", type=Path, metavar="DST", help="output directory; for safetensors, it must be new or empty"
    )
    convert.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="output dtype (default: fp32 in safetensors, the dtype of SRC in a checkpoint)",
    )
    convert.add_argument(
        "--max-shard-size", metavar="SIZE", help="maximum size of each weights file (default: 5GB)"
    )
    convert.add_argument(
        "--tag",
        help="tag of the checkpoint to read (default: the latest) or to write (default: global_step0)",
    )
    convert.add_argument(
        "--config",
        type=Path,
        metavar="PATH",
        help="config.json, or its directory, to copy next to the weights",
    )
    convert.set_defaults(run=_convert)


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="list the checkpoints of a directory, verify one, and plan the memory to load it",
        description="Lists the checkpoints in DIR, compares one checkpoint with its checksums, and prints a plan to"
        " load it on this machine and continue training.",
        epilog="exit code: 0 no damage, 1 the checkpoint or another one in DIR is damaged, 2 no checkpoint.",
    )
    inspect.add_argument("path", type=Path, metavar="DIR", help="a checkpoint, or a directory of checkpoints")
    inspect.add_argument("--tag", help="tag of the checkpoint in the directory (default: the latest)")
    inspect.add_argument(
        "--quick", action="store_true", help="check sizes and headers, without the checksums of the data"
    )
    inspect.add_argument(
        "--gpu",
        type=plan_command.memory_size,
        metavar="SIZE",
        help="memory of the GPU that the plan is for (default: no GPU)",
    )
    inspect.add_argument(
        "--json", action="store_true", help="print JSON, with sizes in bytes and times in Unix seconds"
    )
    inspect.set_defaults(run=_inspect)


def _steps(text: str) -> int:
    steps = int(text)
    if steps < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2, so that the loss can fall, not {steps}")
    return steps


def _demo(options: argparse.Namespace) -> int:
    from dataclasses import replace

    import torch

    from tiering.demo.run import demo
    from tiering.demo.settings import Settings
    from tiering.host import cpu_dtypes

    settings = Settings()
    if cpu_dtypes.is_slow(torch.bfloat16):
        print("This CPU has no instructions for bf16: the demo computes in fp32.")
        # A step takes longer than in bf16 with instructions for it, and all three ways are to end in two minutes.
        settings = replace(settings.in_fp32(), steps=14)
    if options.steps is not None:
        settings = replace(settings, steps=options.steps)
    return demo(options.dir, port=options.port, settings=settings, plant_fault=options.plant_fault)


def _convert(options: argparse.Namespace) -> int:
    from tiering.commands import convert

    return convert.run(options)


def _inspect(options: argparse.Namespace) -> int:
    from tiering.commands import inspect

    return inspect.run(options)


if __name__ == "__main__":
    sys.exit(main())
