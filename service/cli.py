"""``tierd``: show this user's runs, over HTTP or in the terminal."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TypeAlias

from service.http import DEFAULT_HOST, DEFAULT_PORT
from service.http.bearer import TokenError
from service.nodes.addresses import AddressError
from service.source import open_source
from tiering._command_line import Parser, Version, run_printing
from tiering.telemetry import TelemetryError, run_directory

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"

PRINTED = {
    "dashboard": "a dashboard for Grafana to import",
    "alerts": "alert rules for Prometheus",
    "alerts-test": "tests of the alert rules, for promtool",
    "metrics": "a table of all metrics in Markdown",
}
_CAP_DAC_READ_SEARCH = 2
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

        return run_printing("tierd", lambda: monitoring_files.main(options.command), unwritable=2)
    if options.dir is not None and (problem := _directory_problem(options)):
        print(f"tierd: --dir {options.dir}: {problem}", file=sys.stderr)
        return 2
    try:
        return _show(options, options.dir or run_directory())
    except (AddressError, TelemetryError, TokenError) as error:
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
    if options.command == "stacks":
        from service import stacks_command

        return stacks_command.main(options.run, directory, all_users=options.all_users)
    from service import terminal
    from service.watch import Watch

    with open_source(options, directory) as source:
        watch = Watch(source)
        if options.command == "once":
            return terminal.once(watch.view(), run=options.run, form=options.format)
        return terminal.top(watch, run=options.run, interval=options.interval)


def _with_command(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with the default command added if they have none: "once" with --once, else "serve"."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version")):
        if "--once" in arguments:
            return ["once", *(argument for argument in arguments if argument != "--once")]
        return ["serve", *arguments]
    return list(arguments)


def _contradiction(options: argparse.Namespace) -> str | None:
    if getattr(options, "all_users", False) and os.geteuid() != 0:
        if options.command == "stacks":
            return "--all-users needs root: the request is written as the user of the run"
        if not _may_read_all_files():
            return "--all-users needs root or CAP_DAC_READ_SEARCH: run directories are closed to other users"
    of = [name for name in ("of", "of_file") if getattr(options, name, None) is not None]
    if len(of) > 1:
        return "--of cannot be combined with --of-file"
    if not of and getattr(options, "of_token_file", None) is not None:
        return "--of-token-file needs --of or --of-file"
    if of and (options.all_users or options.dir is not None):
        return "--of reads other nodes: it cannot be combined with --all-users or --dir"
    if options.command != "serve":
        return None
    if options.uds is not None and (options.host is not None or options.port is not None):
        return "--uds cannot be combined with --host or --port"
    if options.otlp is not None and (problem := _otlp_problem(options.otlp)):
        return problem
    if options.otlp_steps and options.otlp is None:
        return "--otlp-steps needs --otlp"
    if options.expect_ranks is not None and options.expect_ranks < 0:
        return f"--expect-ranks {options.expect_ranks} is not a number of ranks"
    return None


def _otlp_problem(url: str) -> str:
    """Why metrics cannot be pushed to ``url``, else ""."""
    try:
        from service.otlp.push import url_problem
    except ModuleNotFoundError as error:
        return f"--otlp needs the extra otlp ({error.name} is missing): pip install 'tiering[otlp]'"
    return url_problem(url)


def _may_read_all_files() -> bool:
    """Whether this process has the capability CAP_DAC_READ_SEARCH, as root usually has."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    effective = status.partition("CapEff:")[2].split()[:1]
    return bool(effective) and bool(int(effective[0], 16) >> _CAP_DAC_READ_SEARCH & 1)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tierd",
        description="Shows the training runs of this node, or of several: tiers, bandwidth, stalls and warnings.",
        epilog=SHORTHANDS,
    )
    parser.add_argument("--version", action=Version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    directories = _directories()
    sources = _sources(directories)
    _add_serve(commands, sources)
    _add_once_and_top(commands, sources)
    stacks = commands.add_parser(
        "stacks",
        parents=[directories],
        help="print the Python stacks of all ranks of a run on this node",
        description="Prints the Python stacks of all ranks of a run on this node, the innermost call first. Ranks with"
        " equal stacks are printed together.",
        epilog="exit status: 0; 1 a rank has not answered; 2 no rank of this run publishes here, or the run directory"
        " cannot be written.",
    )
    stacks.add_argument("run", metavar="RUN", help="the id or the name of the run")
    for name, description in PRINTED.items():
        commands.add_parser(name, help=f"print {description}")
    return parser


def _directories() -> Parser:
    """The options for the run directories of this node."""
    parser = Parser(add_help=False)
    _add_path(
        parser,
        "--dir",
        "RUN_DIR",
        "run directory, which holds the status files (default: TIERING_RUN_DIR, or a directory of the user)",
    )
    parser.add_argument(
        "--all-users",
        action="store_true",
        help="of all users of this node; needs root, or CAP_DAC_READ_SEARCH to show runs",
    )
    return parser


def _sources(directories: Parser) -> Parser:
    """The options for ``open_source()``: the run directories of this node, or several nodes."""
    parser = Parser(add_help=False, parents=[directories])
    nodes = parser.add_argument_group("several nodes")
    nodes.add_argument(
        "--of",
        metavar="HOST[:PORT],...",
        help="show the runs on these nodes, on each of which a tierd runs; https://HOST:PORT is possible",
    )
    _add_path(
        nodes,
        "--of-file",
        "FILE",
        "file with one node per line, read again when it changes; a line may have the token file of the node after"
        " the address",
    )
    _add_path(
        nodes,
        "--of-token-file",
        "FILE",
        "file with the token that the nodes require (or set TIERD_OF_TOKEN)",
    )
    return parser


def _add_path(group: argparse._ActionsContainer, option: str, metavar: str, help: str) -> None:
    group.add_argument(option, type=Path, metavar=metavar, help=help)


def _add_once_and_top(commands: Commands, sources: Parser) -> None:
    runs = Parser(add_help=False, parents=[sources])
    runs.add_argument(
        "--run", metavar="RUN", help="show only the run with this id, or the runs with this name"
    )
    once = commands.add_parser(
        "once",
        prog="tierd --once",
        parents=[runs],
        help="print the state of the runs once; `tierd --once` is the same",
        description="Prints the state of the training runs of this node once.",
        epilog="exit status: 0 all runs train, or there is no run; 1 a run is stuck, is degraded or has ended, or a"
        " node does not answer; 2 the run directory cannot be read, or no run matches --run.",
    )
    once.add_argument(
        "--format",
        choices=("text", "json", "prom"),
        default="text",
        help="text, the JSON of /v1/status, or metrics for the textfile collector of node_exporter (default: text)",
    )
    once.add_argument(
        "--json", action="store_const", const="json", dest="format", help="the same as --format json"
    )
    top = commands.add_parser(
        "top", parents=[runs], help="show the runs in the terminal, and update the display"
    )
    top.add_argument(
        "--interval",
        type=interval(0.25, 60),
        default=1.0,
        help="seconds between updates (default: %(default)s)",
    )


def _add_serve(commands: Commands, sources: Parser) -> None:
    parser = commands.add_parser(
        "serve",
        parents=[sources],
        help="serve a web page, JSON and metrics over HTTP",
        description="Serves a web page, JSON and metrics of the training runs of this node over HTTP.",
        epilog=ADDRESSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    address = parser.add_argument_group("address")
    address.add_argument("--host", help=f"address to listen on (default: {DEFAULT_HOST})")
    address.add_argument(
        "--port", type=int, help=f"port to listen on, 0 for any free one (default: {DEFAULT_PORT})"
    )
    _add_path(address, "--uds", "PATH", "listen on a Unix socket that only this user can open")
    access = parser.add_argument_group("access")
    _add_path(
        access,
        "--token-file",
        "FILE",
        "file with the bearer token that clients must send (or set TIERD_TOKEN)",
    )
    access.add_argument(
        "--allow-host",
        type=host_name,
        metavar="NAME",
        action="append",
        default=[],
        help="accept requests to this host name, in addition to localhost and IP addresses; repeatable",
    )
    push = parser.add_argument_group("push")
    push.add_argument(
        "--otlp",
        metavar="URL",
        help="push the metrics of the runs to this OpenTelemetry collector (OTLP over HTTP, usually port 4318); needs"
        " the extra tiering[otlp]",
    )
    push.add_argument(
        "--otlp-interval",
        type=interval(1, 3600),
        default=15.0,
        metavar="SECONDS",
        help="seconds between two pushes, 1 to 3600 (default: %(default)g)",
    )
    push.add_argument("--otlp-steps", action="store_true", help="also push each step of a rank as a span")
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


def interval(shortest: float, longest: float) -> Callable[[str], float]:
    """A parser of seconds between two updates."""

    # argparse shows the name of this function.
    def seconds(argument: str) -> float:
        number = float(argument)
        if not shortest <= number <= longest:
            raise argparse.ArgumentTypeError(
                f"{argument} is not between {shortest:g} and {longest:g} seconds"
            )
        return number

    return seconds


def host_name(argument: str) -> str:
    """A host name as a Host header has it, without a port."""
    from service.http.guard import host_of

    if host_of(argument) != argument.lower().removesuffix(".") or not argument:
        raise argparse.ArgumentTypeError(f"{argument!r} is not a host name without a port")
    return argument


if __name__ == "__main__":
    sys.exit(main())
