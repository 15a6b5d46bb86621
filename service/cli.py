"""``tierd``: show this user's runs, over HTTP or in the terminal."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from service.http import DEFAULT_HOST, DEFAULT_PORT
from tiering.telemetry import TelemetryError, run_directory

PRINTED = {
    "dashboard": "a dashboard for Grafana to import",
    "alerts": "alert rules for Prometheus",
    "alerts-test": "tests of the alert rules, for promtool",
    "metrics": "a table of all metrics in Markdown",
}
SHORTHANDS = """\
tierd alone serves, and `tierd --port N` is `tierd serve --port N`; `tierd COMMAND --help` has the options of each
"""
ADDRESSES = """\
Any address but loopback can be reached from other machines and is refused without a token, which clients send as
"Authorization: Bearer TOKEN". There is no TLS: over a network, use an ssh tunnel or a reverse proxy.

exit status: 0 when SIGINT or SIGTERM ended it, 2 when it cannot start and says why in one line
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; its exit status. Each way imports what it alone needs: `--once` is asked often."""
    if isinstance(sys.stdout, TextIOWrapper):  # a name in letters that it lacks should not hide the rest
        sys.stdout.reconfigure(errors="backslashreplace")
    options = options_of(sys.argv[1:] if arguments is None else arguments)
    if options.command in PRINTED:
        from service.metrics import monitoring_files

        try:
            code = monitoring_files.main(options.command)
            print(end="", flush=True)
        except OSError as error:
            # What is left to flush goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):  # who reads has seen enough, as `head` does
                return 128 + signal.SIGPIPE
            print(f"tierd: standard output cannot be written: {error.strerror}", file=sys.stderr)
            return 2
        return code
    if options.dir is not None and (absent := _absent(options)):
        print(f"tierd: --dir {options.dir}: {absent}", file=sys.stderr)
        return 2
    try:
        return _show(options, options.dir or run_directory())
    except TelemetryError as error:
        print(f"tierd: {error}", file=sys.stderr)
        return 2


def _absent(options: argparse.Namespace) -> str:
    """What is not there of a run directory that was named; an engine makes the directory, and nothing above it."""
    directory: Path = options.dir
    if options.command == "once" and not directory.exists():
        return "there is no such directory, so nothing publishes there"
    return "" if directory.absolute().parent.is_dir() else "the directory above it does not exist: create it"


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """What the command line says. Exits with status 2 where that is wrong, or contradicts itself."""
    parser = _parser()
    options = parser.parse_args(_with_command(arguments))
    if wrong := _contradiction(options):
        parser.error(wrong)
    return options


def _show(options: argparse.Namespace, directory: Path) -> int:
    if options.command == "serve":
        from service import serve_command

        return serve_command.main(options, directory)
    from service import terminal
    from service.watch import Watch

    watch = Watch(directory)
    if options.command == "once":
        return terminal.once(watch.view(), run=options.run, json=options.json)
    return terminal.top(watch, run=options.run, interval=options.interval)


def _with_command(given: Sequence[str]) -> list[str]:
    """What ``given`` says by leaving the command out."""
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help", "--version")):
        if "--once" in given:
            return ["once", *(one for one in given if one != "--once")]
        return ["serve", *given]
    return list(given)


def _contradiction(options: argparse.Namespace) -> str | None:
    if options.command != "serve":
        return None
    if options.uds is not None and (options.host is not None or options.port is not None):
        return "--uds is instead of --host and --port"
    if options.expect_ranks is not None and options.expect_ranks < 0:
        return f"--expect-ranks {options.expect_ranks} is no number of ranks"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tierd",
        description="Show tiers, bandwidth and stalls of running engines: page, JSON and metrics over HTTP.",
        epilog=SHORTHANDS,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    directory = _Parser(add_help=False)
    directory.add_argument(
        "--dir",
        type=Path,
        metavar="RUN_DIR",
        help="run directory (default: TIERING_RUN_DIR, or a directory of the user)",
    )
    runs = _Parser(add_help=False, parents=[directory])
    runs.add_argument(
        "--run", metavar="RUN", help="show only the run with this id, or the runs with this name"
    )

    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        parents=[directory],
        help="serve over HTTP",
        epilog=ADDRESSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_serving(serve)
    once = commands.add_parser(
        "once", prog="tierd --once", parents=[runs], help="print the state of the runs once (as tierd --once)"
    )
    once.add_argument("--json", action="store_true", help="print the JSON of /v1/status")
    top = commands.add_parser("top", parents=[runs], help="watch the runs in the terminal")
    top.add_argument(
        "--interval", type=seconds, default=1.0, help="seconds between updates (default: %(default)s)"
    )
    for name, what in PRINTED.items():
        commands.add_parser(name, help=f"print {what}")
    return parser


def _add_serving(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("address")
    where.add_argument("--host", help=f"address (default: {DEFAULT_HOST})")
    where.add_argument("--port", type=int, help=f"port, 0 for any free one (default: {DEFAULT_PORT})")
    where.add_argument(
        "--uds", type=Path, metavar="PATH", help="listen on a Unix socket that only this user can open"
    )
    who = parser.add_argument_group("access")
    who.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the bearer token that clients must send (or set TIERD_TOKEN)",
    )
    who.add_argument(
        "--allow-host",
        type=host_name,
        metavar="NAME",
        action="append",
        default=[],
        help="accept this host name, in addition to localhost and IP addresses; repeatable",
    )
    how = parser.add_argument_group("process")
    how.add_argument(
        "--expect-ranks",
        type=int,
        metavar="N",
        help="number of ranks that must publish for /readyz (default: as the runs report)",
    )
    how.add_argument(
        "--nice",
        type=int,
        choices=range(20),
        default=10,
        metavar="N",
        help="niceness, 0 to 19; training has priority (default: %(default)s)",
    )


class _Parser(argparse.ArgumentParser):
    """One that says which command was meant."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong and (meant := get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), 1)):
            message += f"; did you mean {meant[0]}?"
        super().error(message)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from service.version import own_version

        print(f"tierd {own_version()}")
        parser.exit()


def seconds(given: str) -> float:
    """An interval between two looks."""
    number = float(given)
    if not 0.25 <= number <= 60:
        raise argparse.ArgumentTypeError(f"{given} is not between 0.25 and 60 seconds")
    return number


def host_name(given: str) -> str:
    """A name as a Host header has it."""
    from service.http.guard import host_of

    if host_of(given) != given.lower().removesuffix(".") or not given:
        raise argparse.ArgumentTypeError(f"{given!r} is not a host name without a port")
    return given


if __name__ == "__main__":
    sys.exit(main())
