"""``tierd``: show this user's runs, over HTTP or in the terminal."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path

from service.app import create_app
from service.http.bearer import HOW_TO_MAKE_ONE, TokenError, token_of
from service.http.guard import Access, host_of
from service.http.server import CannotListenError, Place, be_modest, listen, listen_at, resolve, serve
from service.watch import Watch
from tiering.telemetry import TelemetryError, run_directory

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8471

ADDRESSES = """\
Any address but loopback can be reached from other machines and is refused without a token, which clients send as
"Authorization: Bearer TOKEN". There is no TLS: over a network, use an ssh tunnel or a reverse proxy.

exit status of the service: 0 when SIGINT or SIGTERM ended it, 2 when it cannot start and says why in one line
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; its exit status."""
    if isinstance(
        sys.stdout, TextIOWrapper
    ):  # a name that the terminal cannot show is no reason to show nothing
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = _parser()
    options = parser.parse_args(arguments)
    if wrong := _contradiction(options):
        parser.error(wrong)
    try:
        directory = options.dir or run_directory()
        if options.once or options.command == "top":
            return _in_terminal(options, directory)
        return _serve(options, directory)
    except (TelemetryError, CannotListenError, TokenError) as error:
        print(f"tierd: {error}", file=sys.stderr)
        return 2


def _serve(options: argparse.Namespace, directory: Path) -> int:
    be_modest(options.nice)  # before there are threads, which would keep the niceness they were made with
    token = token_of(options.token_file, os.environ)
    place, hosts = _place(options, token)
    with place:
        app = create_app(directory, expect_ranks=options.expect_ranks, access=Access(hosts, token))
        serve(app, place, f"tierd: {place.url} shows the runs in {directory}")
    return 0


def _place(options: argparse.Namespace, token: bytes | None) -> tuple[Place, frozenset[str] | None]:
    """Where it listens, and by what names it is known there."""
    if options.uds is not None:
        return listen_at(options.uds.absolute()), None
    host = DEFAULT_HOST if options.host is None else options.host
    address = resolve(host, DEFAULT_PORT if options.port is None else options.port)
    if not address.loopback and token is None:
        raise TokenError(
            f"{host} can be reached from other machines, and no token is set: {HOW_TO_MAKE_ONE}, or listen on"
            f" {DEFAULT_HOST}"
        )
    place = listen(address)
    if not address.loopback:
        print(
            f"tierd: warning: {place.url} can be reached from other machines, in clear text (no TLS): whoever sees"
            " the network sees the token; an ssh tunnel to 127.0.0.1 or a reverse proxy with TLS is safer",
            file=sys.stderr,
        )
    names = {"localhost", host, *options.allow_host}
    if token is not None:
        names |= {socket.gethostname(), socket.gethostname().partition(".")[0]}
    return place, frozenset(name.lower().removesuffix(".") for name in names)


def _in_terminal(options: argparse.Namespace, directory: Path) -> int:
    from service import terminal  # the service itself needs no rich

    watch = Watch(directory)
    if options.once:
        return terminal.once(watch.view(), json=options.json)
    return terminal.top(watch, interval=options.interval)


def _contradiction(options: argparse.Namespace) -> str | None:
    if options.uds is not None and (options.host is not None or options.port is not None):
        return "--uds is instead of --host and --port"
    if options.expect_ranks is not None and options.expect_ranks < 0:
        return f"--expect-ranks {options.expect_ranks} is no number of ranks"
    if options.json and not options.once:
        return "--json goes with --once; the service answers in JSON at /v1/status"
    if options.once and options.command is not None:
        return f"--once is instead of {options.command}"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tierd",
        description="Show tiers, bandwidth and stalls of running engines: page, JSON and metrics over HTTP.",
        epilog=ADDRESSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=["serve", "top"],
        help="serve over HTTP (default), or watch in the terminal",
    )
    parser.add_argument("--once", action="store_true", help="print what the runs do now, and end")
    parser.add_argument("--json", action="store_true", help="with --once: what /v1/status answers")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, help="top: seconds between two looks (default: %(default)s)"
    )
    parser.add_argument(
        "--dir", type=Path, metavar="RUN_DIR", help="run directory (default: TIERING_RUN_DIR, else per user)"
    )
    where = parser.add_argument_group("where it listens")
    where.add_argument("--host", help=f"address (default: {DEFAULT_HOST})")
    where.add_argument("--port", type=int, help=f"port, 0 for any free one (default: {DEFAULT_PORT})")
    where.add_argument("--uds", type=Path, metavar="PATH", help="a Unix socket instead, for this user alone")
    who = parser.add_argument_group("whom it answers")
    who.add_argument(
        "--token-file", type=Path, metavar="FILE", help="clients must know what is in it (or in TIERD_TOKEN)"
    )
    who.add_argument(
        "--allow-host",
        type=_host_name,
        metavar="NAME",
        action="append",
        default=[],
        help="a name that clients may ask by, beside localhost and IP addresses; repeatable",
    )
    how = parser.add_argument_group("how it runs")
    how.add_argument(
        "--expect-ranks",
        type=int,
        metavar="N",
        help="ready (/readyz) when so many ranks publish (default: those the runs tell of)",
    )
    how.add_argument(
        "--nice",
        type=int,
        choices=range(20),
        default=10,
        metavar="N",
        help="niceness, 0 to 19, so that training comes first (default: %(default)s)",
    )
    return parser


def _seconds(given: str) -> float:
    seconds = float(given)
    if not 0.25 <= seconds <= 60:
        raise argparse.ArgumentTypeError(f"{given} is not between 0.25 and 60 seconds")
    return seconds


def _host_name(given: str) -> str:
    if host_of(given) != given.lower().removesuffix(".") or not given:
        raise argparse.ArgumentTypeError(f"{given!r} is not a host name without a port")
    return given


if __name__ == "__main__":
    sys.exit(main())
