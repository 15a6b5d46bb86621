"""``tierbench``: the command line. A subcommand loads its modules when it runs, so that ``--help`` is fast.

Data goes to stdout, progress and messages to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tiering._command_line import Parser, Version, run_printing
from tiering._text import similar
from tiering.tierbench import words
from tiering.tierbench.exits import BELOW, FAILED, INTERRUPTED, OK

if TYPE_CHECKING:
    from tiering.tierbench.bench import BenchRequest
    from tiering.tierbench.result import Result
    from tiering.tierbench.words import ReadWrite

COMMANDS = {
    "tune": "finds the I/O engine, block size and depth for a drive",
    "profile": "replays the I/O of a training step through the engine's I/O path",
    "tiers": "measures drives, memory, CPU optimizer and GPU for `tiering plan --measure`",
    "compare": "compares results, or alternates tierbench with fio",
}
MODULES = {
    "tune": "tuning.tune",
    "profile": "replay.profile",
    "tiers": "tiers",
    "compare": "comparison.compare",
}

_ABOUT_COMMANDS = "\n".join(f"  {name:<8} {about}" for name, about in COMMANDS.items())
EPILOG = f"""\
commands (`tierbench COMMAND --help` lists the options; write a directory that has the name of a command as ./tune):
{_ABOUT_COMMANDS}

sizes: 4K, 1M, 1G and 1MiB are 1024-based, 1MB is 10^6. times: 10, 500ms, 2m.
exit code: 0 measured, 1 a transfer failed or --verify found wrong bytes, 2 usage error, 3 refused as unsafe,
4 slower than --fail-under, 130 interrupted (completed tests are printed; a second Ctrl-C ends at once).
"""
_EXIT_CODES = (
    "exit code: 0 measured, 1 a transfer failed, 2 usage error, 3 refused as unsafe, 130 interrupted (completed tests"
    " are printed)."
)
_SILENCE = logging.NullHandler()
"""Silences the engine's logs: a result's notes have what matters. One handler, so that repeated calls add no more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    logging.getLogger("tiering").addHandler(_SILENCE)
    try:
        return run_printing("tierbench", lambda: _run(argv), unwritable=FAILED)
    except KeyboardInterrupt:
        print("tierbench: interrupted before the first measurement", file=sys.stderr)
        return INTERRUPTED


def _run(argv: list[str]) -> int:
    # A shell that asks for completions passes the words in COMP_LINE.
    words_typed = os.environ.get("COMP_LINE", "").split() if "_ARGCOMPLETE" in os.environ else []
    if words_typed[1:2] and words_typed[1] in COMMANDS:
        # The number of the first word, from 1, that belongs to the command line of the parser.
        os.environ["_ARGCOMPLETE"] = "2"
        argv = words_typed[1:2]
    if argv and argv[0] in COMMANDS:
        return _command(argv[0], argv[1:])
    if argv and not Path(argv[0]).exists() and (closest := similar(argv[0], COMMANDS)):
        _parser().error(f"{argv[0]} is not a command or a directory; did you mean {closest}?")
    return _bench(argv)


def _command(name: str, arguments: list[str]) -> int:
    module = importlib.import_module(f"tiering.tierbench.{MODULES[name]}")
    parser = Parser(
        prog=f"tierbench {name}",
        description=f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}.",
        epilog=_EXIT_CODES,
    )
    module.add_arguments(parser)
    options = parser.parse_args(arguments)
    options.command = shlex.join(["tierbench", name, *arguments])
    from tiering.tierbench import failures
    from tiering.tierbench.interrupts import terminations_as_ctrl_c

    with terminations_as_ctrl_c():
        return failures.run(f"tierbench {name}", lambda: int(module.run(options)))


def _bench(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    from tiering.tierbench import failures

    return failures.run("tierbench", lambda: _measure(options, arguments))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tierbench",
        usage="tierbench DIR ... [options]\n       tierbench {" + ",".join(COMMANDS) + "} ...",
        description="Measures how fast a drive is for training. Takes about ten seconds and uses temporary files.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=Version)
    parser.add_argument(
        "directories",
        type=words.directory,
        nargs="+",
        metavar="DIR",
        help="directory on the drive; several directories are measured at the same time",
    )
    _add_load(parser.add_argument_group("load, with fio's option names"))
    _add_checks(parser.add_argument_group("checks and estimate"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rw",
        type=words.kinds,
        default=("read", "write", "rw"),
        metavar="KINDS",
        help=f"kinds of load, separated by commas: {', '.join(words.READ_WRITE)} (default: read,write,rw)",
    )
    group.add_argument(
        "--bs", type=words.size, default=1 << 20, metavar="SIZE", help="block size (default: 1M)"
    )
    group.add_argument(
        "--iodepth",
        type=int,
        default=16,
        metavar="N",
        help="blocks in flight per directory and job (default: 16)",
    )
    group.add_argument(
        "--numjobs",
        type=int,
        default=1,
        metavar="N",
        help="number of I/O contexts, as one per rank (default: 1)",
    )
    group.add_argument(
        "--size",
        type=words.size,
        metavar="SIZE",
        help="size of each file (default: the bytes that the drive writes in two seconds)",
    )
    group.add_argument(
        "--runtime", type=words.duration, metavar="TIME", help="duration of each test (default: 2.5s)"
    )
    group.add_argument(
        "--ramp-time",
        "--ramp_time",
        type=words.duration,
        metavar="TIME",
        help="warm-up time before each test (default: none; 0.5s with several DIR)",
    )
    group.add_argument(
        "--direct",
        type=int,
        choices=(0, 1),
        default=1,
        help="1: O_DIRECT; 0: through the page cache (default: 1)",
    )
    group.add_argument(
        "--ioengine", type=words.engine, default="auto", metavar="NAME", help=words.ENGINE_HELP
    )
    group.add_argument(
        "--fixedbufs",
        type=int,
        choices=(0, 1),
        default=1,
        help="register memory with the kernel (default: 1)",
    )
    group.add_argument(
        "--rwmixread",
        type=int,
        default=50,
        metavar="PERCENT",
        help="percentage of reads in a mixed test (default: 50)",
    )


def _add_checks(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--verify", action="store_true", help="checksum each written page, and compare it when it is read"
    )
    group.add_argument(
        "--sustained",
        action="store_true",
        help="write until the write cache of the drive is full; takes minutes",
    )
    group.add_argument(
        "--max-write", type=words.size, metavar="SIZE", help="maximum number of bytes to write"
    )
    group.add_argument(
        "--fail-under",
        type=words.rate,
        metavar="RATE",
        help="exit with 4 if a test is slower than RATE, for example 3GiB/s",
    )
    group.add_argument(
        "--params", default="7B", metavar="N", help="model size for the training estimate (default: 7B)"
    )
    group.add_argument(
        "--state",
        choices=("fp32", "split", "bf16", "split+bf16"),
        default="fp32",
        help="state format for the training estimate (default: fp32)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    formats = group.add_mutually_exclusive_group()
    formats.add_argument(
        "--format",
        "--output-format",
        choices=("table", "json", "csv", "prom"),
        default="table",
        help="output format (default: table); prom is the text format of Prometheus",
    )
    for name in ("json", "csv"):
        formats.add_argument(
            f"--{name}", dest="format", action="store_const", const=name, help=f"same as --format {name}"
        )
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot bandwidth over time to a .png or .svg file"
    )
    group.add_argument("--quiet", action="store_true", help="print no progress on stderr")


def _request(options: argparse.Namespace, arguments: list[str]) -> BenchRequest:
    from tiering.errors import ConfigError
    from tiering.planning.decoder import decoder, parse_count
    from tiering.tierbench.bench import BenchRequest

    try:
        params = parse_count(options.params)
        # An invalid size fails here, not after ten seconds of measurement.
        decoder(params)
    except ValueError as error:
        raise ConfigError(f"--params: {error}") from None
    return BenchRequest(
        directories=tuple(options.directories),
        rws=options.rw,
        bs=options.bs,
        iodepth=options.iodepth,
        numjobs=options.numjobs,
        size=options.size,
        runtime=options.runtime,
        ramp_time=options.ramp_time,
        direct=bool(options.direct),
        ioengine=options.ioengine,
        registered=bool(options.fixedbufs),
        rwmixread=options.rwmixread,
        verify=options.verify,
        sustained=options.sustained,
        max_write=options.max_write,
        params=params,
        state=options.state,
        command=shlex.join(["tierbench", *arguments]),
    )


def _measure(options: argparse.Namespace, arguments: list[str]) -> int:
    from tiering.tierbench import bench
    from tiering.tierbench.display.live_progress import Progress
    from tiering.tierbench.interrupts import Interrupts

    request = _request(options, arguments)
    if options.plot is not None:
        from tiering.tierbench.display import plot

        plot.check(options.plot)
    with Interrupts():
        with Progress(quiet=options.quiet) as progress:
            result = bench.run(request, progress)
        _print(result, options.format)
        if options.plot is not None:
            plot.save(result, options.plot)
    if result.failure is not None:
        print(f"tierbench: {result.failure}", file=sys.stderr)
        return FAILED
    if result.interrupted:
        return INTERRUPTED
    return _judge(result, request.rws, options.fail_under)


def _print(result: Result, output_format: str) -> None:
    if output_format == "json":
        print(result.to_json())
        return
    if output_format == "table":
        from rich.console import Console

        from tiering.tierbench.display import screen

        screen.show(result, Console())
        return
    from tiering.tierbench.display import exports

    print(exports.as_csv(result) if output_format == "csv" else exports.as_prom(result), end="")


def _judge(result: Result, rws: Sequence[ReadWrite], minimum_rate: float | None) -> int:
    """The exit code for ``--fail-under``. Every requested kind must reach it; --sustained counts its sustained rate."""
    if minimum_rate is None:
        return OK
    from tiering.tierbench.display import figures

    rates = {words.NAMES[rw]: 0.0 for rw in rws} | {
        name: row.rate for name, row in figures.named_rows(result)
    }
    if result.sustained is not None:
        rates[figures.SUSTAINED] = result.sustained.sustained
    slow = {name: rate for name, rate in rates.items() if rate < minimum_rate}
    for name, rate in slow.items():
        measurement = f"{rate / 1e9:.2f} GB/s is below" if rate else "not measured, so it does not reach"
        print(f"tierbench: {name}: {measurement} --fail-under {minimum_rate / 1e9:.2f} GB/s", file=sys.stderr)
    return BELOW if slow else OK


if __name__ == "__main__":
    sys.exit(main())
