"""``tierbench profile DIR ...``: the time of a training step's transfers, from a replay of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tiering.tierbench import words
from tiering.tierbench.exits import INTERRUPTED

if TYPE_CHECKING:
    from tiering.tierbench.replay.rounds import Request

EPILOG = """\
Without --config and --host-budget, all parameters and state are on NVMe. With one of them, tiering plans what is
kept in memory, as in training. The replay takes less swap space than training: extents of the same size take turns.
exit code: 0 replayed, 1 a transfer failed, 2 usage error, 3 refused as unsafe, 130 interrupted (completed steps
are printed).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``tierbench profile``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "directories",
        type=words.directory,
        nargs="+",
        metavar="DIR",
        help="directory on a drive; data is striped over several directories",
    )
    model = parser.add_argument_group("training step")
    model.add_argument(
        "--pattern",
        choices=("mixed", "optimizer", "params"),
        default="mixed",
        help="mixed: a whole step; optimizer: the update; params: the fetches of forward and backward (default: mixed)",
    )
    model.add_argument("--params", default="7B", metavar="N", help="model size (default: 7B)")
    model.add_argument(
        "--state", choices=("fp32", "split", "bf16", "split+bf16"), help="state format (default: fp32)"
    )
    model.add_argument(
        "--config", type=Path, metavar="FILE", help="a ds_config.json; DIR replaces its nvme_path"
    )
    model.add_argument(
        "--host-budget", type=words.size, metavar="SIZE", help="host memory that the engine may own"
    )
    model.add_argument(
        "--gpu", type=words.size, metavar="SIZE", help="plan for a GPU with this memory (default: no GPU)"
    )
    model.add_argument("--with-kernels", action="store_true", help="run the optimizer kernels on each tile")
    load = parser.add_argument_group("replay")
    load.add_argument(
        "--runtime",
        type=words.duration,
        default=10.0,
        metavar="TIME",
        help="duration of the replay (default: 10s)",
    )
    load.add_argument("--steps", type=int, metavar="N", help="replay N whole steps, without a time limit")
    load.add_argument(
        "--size",
        type=words.size,
        metavar="SIZE",
        help="size of the swap space in each DIR (default: 4G, or a tenth of the free space)",
    )
    load.add_argument("--max-write", type=words.size, metavar="SIZE", help="maximum number of bytes to write")
    load.add_argument("--bs", type=words.size, metavar="SIZE", help="block size (default: 1M)")
    load.add_argument("--iodepth", type=int, metavar="N", help="blocks in flight per directory (default: 16)")
    load.add_argument("--ioengine", type=words.engine, metavar="NAME", help=words.ENGINE_HELP)
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with sizes in bytes and times in seconds"
    )
    parser.add_argument("--quiet", action="store_true", help="print no progress on stderr")


def run(options: argparse.Namespace) -> int:
    """Measure and print; the exit code."""
    from tiering.tierbench.display.live_progress import Progress
    from tiering.tierbench.replay import rounds
    from tiering.tierbench.replay.profile_result import show

    request = _request(options)
    with Progress(quiet=options.quiet) as progress:
        profile = rounds.run(request, progress)
    if options.json:
        print(profile.model_dump_json(indent=1))
    else:
        from rich.console import Console

        show(profile, Console())
    return INTERRUPTED if profile.interrupted else 0


def _request(options: argparse.Namespace) -> Request:
    from tiering.errors import ConfigError
    from tiering.planning.decoder import parse_count
    from tiering.tierbench.replay.rounds import Request

    try:
        params = parse_count(options.params)
    except ValueError as error:
        raise ConfigError(f"--params: {error}") from None
    if options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps is {options.steps}; give at least 1, or omit it to use --runtime")
    if not options.runtime:
        raise ConfigError("--runtime is 0; give a duration above 0")
    return Request(
        directories=tuple(options.directories),
        pattern=options.pattern,
        params=params,
        state=options.state,
        config=options.config,
        host_budget=options.host_budget,
        gpu_memory=options.gpu,
        with_kernels=options.with_kernels,
        steps=options.steps,
        runtime=options.runtime,
        size=options.size,
        max_write=options.max_write,
        bs=options.bs,
        iodepth=options.iodepth,
        ioengine=options.ioengine,
        command=options.command,
    )
