"""``tiering``: the command line. Each subcommand loads what it needs, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiering.command_line import Parser, Version, printing
from tiering.commands import check as check_command
from tiering.commands import doctor as doctor_command
from tiering.commands import plan as plan_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return printing("tiering", lambda: int(options.run(options)), failed=_UNPRINTED)
    except KeyboardInterrupt:
        print("tiering: interrupted", file=sys.stderr)
        return _INTERRUPTED


_INTERRUPTED = 128 + signal.SIGINT
"""As the shell says of commands that end so."""
_UNPRINTED = 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tiering", description="Memory tiering for PyTorch training.")
    parser.add_argument("--version", action=Version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a small GPT with its state on NVMe and check the result")
    demo.add_argument("--dir", type=Path, default=Path(), help="directory for swap space (default: this one)")
    demo.add_argument(
        "--port", type=int, default=8471, help="port of the sidecar, 0: any (default: %(default)s)"
    )
    demo.add_argument("--steps", type=_steps, metavar="N", help="optimizer steps, at least 2 (default: 20)")
    demo.add_argument(
        "--plant-fault", action="store_true", help="flip one bit on NVMe half-way; the comparison must notice"
    )
    demo.set_defaults(run=_demo)

    check = commands.add_parser("check", help="say what becomes of each key of a DeepSpeed configuration")
    check_command.add_arguments(check)

    plan = commands.add_parser(
        "plan", help="say what lives where, how long a step takes, and what would make it fit"
    )
    plan_command.add_arguments(plan)
    plan.set_defaults(run=plan_command.run)
    doctor = commands.add_parser("doctor", help="say what of this machine stands in the way, and what to do")
    doctor_command.add_arguments(doctor)
    _add_convert(commands)
    _add_inspect(commands)
    return parser


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="make weights that anybody loads of a checkpoint, or a checkpoint of weights",
        epilog="exit code: 0 converted, 1 SRC is damaged or DST cannot be written, 2 the question was wrong.",
        description="From a checkpoint, or the latest of a directory: safetensors with an index. From a directory of"
        " Hugging Face's, or a .safetensors file: a checkpoint that load_checkpoint takes.",
    )
    convert.add_argument("source", type=Path, metavar="SRC", help="a checkpoint, or weights")
    convert.add_argument("into", type=Path, metavar="DST", help="a directory; for weights a new or empty one")
    convert.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="of parameters (default: fp32; of weights their own)",
    )
    convert.add_argument("--max-shard-size", metavar="SIZE", help="of a file of weights (default: 5GB)")
    convert.add_argument(
        "--tag", help="which checkpoint (default: the latest), or what to call it (default: global_step0)"
    )
    convert.add_argument(
        "--config", type=Path, metavar="PATH", help="a config.json, or its directory, to put beside weights"
    )
    convert.set_defaults(run=_convert)


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="say what is in a checkpoint, whether it is whole, and what it takes to load it here",
        epilog="exit code: 0 whole, 1 damaged (it, or what lies beside it in DIR), 2 there is no checkpoint.",
    )
    inspect.add_argument("path", type=Path, metavar="DIR", help="a directory of checkpoints, or one of them")
    inspect.add_argument("--tag", help="which checkpoint of the directory (default: the latest)")
    inspect.add_argument(
        "--quick", action="store_true", help="look at sizes and headers, and read nothing else"
    )
    inspect.add_argument(
        "--gpu",
        type=plan_command.memory_size,
        metavar="SIZE",
        help="memory of the GPU to load it on (default: no GPU)",
    )
    inspect.add_argument("--json", action="store_true", help="print JSON: bytes, and seconds since the epoch")
    inspect.set_defaults(run=_inspect)


def _steps(text: str) -> int:
    steps = int(text)
    if steps < 2:
        raise argparse.ArgumentTypeError(f"at least 2 steps are needed to see the loss fall, not {steps}")
    return steps


def _demo(options: argparse.Namespace) -> int:
    from tiering.demo.run import demo
    from tiering.demo.settings import Settings

    settings = Settings() if options.steps is None else Settings(steps=options.steps)
    return demo(options.dir, port=options.port, settings=settings, plant_fault=options.plant_fault)


def _convert(options: argparse.Namespace) -> int:
    from tiering.commands import convert

    return convert.run(options)


def _inspect(options: argparse.Namespace) -> int:
    from tiering.commands import inspect

    return inspect.run(options)


if __name__ == "__main__":
    sys.exit(main())
