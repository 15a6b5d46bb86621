"""``tiering``: the command line. Each subcommand loads what it needs, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tiering.errors import ConfigError
from tiering.planning import command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code."""
    options = _parser().parse_args(arguments)
    code: int = options.run(options)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tiering", description="Memory tiering for PyTorch training.")
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
    check.add_argument("file", type=Path, help="a ds_config.json")
    check.add_argument(
        "--ranks",
        type=_ranks,
        default=1,
        metavar="N",
        help="for training with N ranks (default: %(default)s)",
    )
    check.set_defaults(run=_check)

    plan = commands.add_parser(
        "plan", help="say what lives where, how long a step takes, and what would make it fit"
    )
    command.add_arguments(plan)
    plan.set_defaults(run=command.run)
    return parser


def _steps(text: str) -> int:
    steps = int(text)
    if steps < 2:
        raise argparse.ArgumentTypeError(f"at least 2 steps are needed to see the loss fall, not {steps}")
    return steps


def _ranks(text: str) -> int:
    ranks = int(text)
    if ranks < 1:
        raise argparse.ArgumentTypeError(f"at least 1 rank trains, not {ranks}")
    return ranks


def _demo(options: argparse.Namespace) -> int:
    from tiering.demo.run import demo
    from tiering.demo.settings import Settings

    settings = Settings() if options.steps is None else Settings(steps=options.steps)
    return demo(options.dir, port=options.port, settings=settings, plant_fault=options.plant_fault)


def _check(options: argparse.Namespace) -> int:
    """0 when the file loads, 1 when keys are refused, 2 when it cannot be read."""
    from rich.console import Console

    from tiering.ds_config import examine

    try:
        _, report = examine(options.file, world_size=options.ranks)
    except ConfigError as error:
        print(f"tiering check: {error}", file=sys.stderr)
        return 2
    Console().print(report.table())
    for entry in report.refused:
        print(f"{entry.key}: {entry.note}", file=sys.stderr)
    return 1 if report.refused else 0


if __name__ == "__main__":
    sys.exit(main())
