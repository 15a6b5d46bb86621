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
Without a command, tierd serves: `tierd --port N` is `tierd serve --port N`. `tierd COMMAND --help` lists the options.
"""
ADDRESSES = """\
An address other than loopback can be reached from other machines and requires a token, which clients send as
"Authorization: Bearer TOKEN". There is no TLS: over a network, use an ssh tunnel or a reverse proxy.

exit status: 0 after SIGINT or SIGTERM, 2 if tierd cannot start; it then prints one line with the reason.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Each command imports only the modules that it needs, because `tierd --once` is called often.
    """
    # A name with letters that the encoding lacks must not prevent the output.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    options = options_of(sys.argv[1:] if arguments is None else arguments)
    if options.command in PRINTED:
        from service.metrics import monitoring_files

        try:
            code = monitoring_files.main(options.command)
            print(end="", flush=True)
        except OSError as error:
            # Python flushes the rest at exit; send it to /dev/null.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):  # the reader, for example `head`, has closed the pipe
                return 128 + signal.SIGPIPE
            print(f"tierd: standard output cannot be written: {error.strerror}", file=sys.stderr)
            return 2
        return code
    if options.dir is not None and (problem := _directory_problem(options)):
        print(f"tierd: --dir {options.dir}: {problem}", file=sys.stderr)
        return 2
    try:
        return _show(options, options.dir or run_directory())
    except TelemetryError as error:
        print(f"tierd: {error}", file=sys.stderr)
        return 2


def _directory_problem(options: argparse.Namespace) -> str:
    """Why the run directory cannot be used, else "". An engine creates the directory, but not its parents."""
    directory: Path = options.dir
    if options.command == "once" and not directory.exists():
        return "no such directory, so no run publishes there"
    return "" if directory.absolute().parent.is_dir() else "the parent directory does not exist: create it"


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line. Exits with status 2 if it is invalid or contradictory."""
    parser = _parser()
    options = parser.parse_args(_with_command(arguments))
    if problem := _contradiction(options):
        parser.error(problem)
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


def _with_command(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with the default command added if they have none: "once" with --once, else "serve"."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version")):
        if "--once" in arguments:
            return ["once", *(argument for argument in arguments if argument != "--once")]
        return ["serve", *arguments]
    return list(arguments)


def _contradiction(options: argparse.Namespace) -> str | None:
    if options.command != "serve":
        return None
    if options.uds is not None and (options.host is not None or options.port is not None):
        return "--uds cannot be combined with --host or --port"
    if options.expect_ranks is not None and options.expect_ranks < 0:
        return f"--expect-ranks {options.expect_ranks} is not a number of ranks"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tierd",
        description="Shows the training runs of this node: tiers, bandwidth, stalls and warnings.",
        epilog=SHORTHANDS,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    directory = _Parser(add_help=False)
    directory.add_argument(
        "--dir",
        type=Path,
        metavar="RUN_DIR",
        help="run directory, which holds the status files (default: TIERING_RUN_DIR, or a directory of the user)",
    )
    runs = _Parser(add_help=False, parents=[directory])
    runs.add_argument(
        "--run", metavar="RUN", help="show only the run with this id, or the runs with this name"
    )

    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        parents=[directory],
        help="serve a web page, JSON and metrics over HTTP",
        description="Serves a web page, JSON and metrics of the training runs of this node over HTTP.",
        epilog=ADDRESSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_serve_options(serve)
    once = commands.add_parser(
        "once",
        prog="tierd --once",
        parents=[runs],
        help="print the state of the runs once; `tierd --once` is the same",
        description="Prints the state of the training runs of this node once.",
        epilog="exit status: 0 all runs train, or there is no run; 1 a run is degraded or has ended; 2 the run"
        " directory cannot be read, or no run matches --run.",
    )
    once.add_argument("--json", action="store_true", help="print the JSON of /v1/status")
    top = commands.add_parser(
        "top", parents=[runs], help="show the runs in the terminal, and update the display"
    )
    top.add_argument(
        "--interval", type=seconds, default=1.0, help="seconds between updates (default: %(default)s)"
    )
    for name, description in PRINTED.items():
        commands.add_parser(name, help=f"print {description}")
    return parser


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    address = parser.add_argument_group("address")
    address.add_argument("--host", help=f"address to listen on (default: {DEFAULT_HOST})")
    address.add_argument(
        "--port", type=int, help=f"port to listen on, 0 for any free one (default: {DEFAULT_PORT})"
    )
    address.add_argument(
        "--uds", type=Path, metavar="PATH", help="listen on a Unix socket that only this user can open"
    )
    access = parser.add_argument_group("access")
    access.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the bearer token that clients must send (or set TIERD_TOKEN)",
    )
    access.add_argument(
        "--allow-host",
        type=host_name,
        metavar="NAME",
        action="append",
        default=[],
        help="accept requests to this host name, in addition to localhost and IP addresses; repeatable",
    )
    process = parser.add_argument_group("process")
    process.add_argument(
        "--expect-ranks",
        type=int,
        metavar="N",
        help="number of ranks on this node that /readyz requires (default: the number that the runs report)",
    )
    process.add_argument(
        "--nice",
        type=int,
        choices=range(20),
        default=10,
        metavar="N",
        help="niceness, 0 to 19, so that training has priority (default: %(default)s)",
    )


class _Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest command."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        match = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if match and (nearest := get_close_matches(match[1], re.findall(r"[\w-]+", match[2]), 1)):
            message += f"; did you mean {nearest[0]}?"
        super().error(message)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from service.version import own_version

        print(f"tierd {own_version()}")
        parser.exit()


def seconds(argument: str) -> float:
    """An interval between two updates, in seconds."""
    number = float(argument)
    if not 0.25 <= number <= 60:
        raise argparse.ArgumentTypeError(f"{argument} is not between 0.25 and 60 seconds")
    return number


def host_name(argument: str) -> str:
    """A host name as a Host header has it, without a port."""
    from service.http.guard import host_of

    if host_of(argument) != argument.lower().removesuffix(".") or not argument:
        raise argparse.ArgumentTypeError(f"{argument!r} is not a host name without a port")
    return argument


if __name__ == "__main__":
    sys.exit(main())
