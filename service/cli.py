"""``tierd``: serve the telemetry pages of this user's runs on one local port."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import uvicorn

from service.app import create_app
from tiering.telemetry import TelemetryError, run_directory

DEFAULT_PORT = 8471


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGINT or SIGTERM; 0 on such an end, 2 when the directory or the address cannot be used."""
    options = _parser().parse_args(arguments)
    try:
        directory = options.dir or run_directory()
        app = create_app(directory)
    except TelemetryError as error:
        return _refuse(str(error))
    try:
        listener = _listen(options.host, options.port)
    except OSError as error:
        return _refuse(f"cannot listen on {options.host} port {options.port}: {_reason(error)}")
    if not _is_loopback(listener):
        print(
            "tierd: warning: whoever reaches this address can read the runs' names and figures",
            file=sys.stderr,
        )
    print(f"tierd: {_url(listener)} shows the runs in {directory}", flush=True)
    # uvicorn closes its connections first and then delivers the signal it caught to these.
    for caught in (signal.SIGINT, signal.SIGTERM):
        signal.signal(caught, _leave)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tierd", description="Show tiers, bandwidth and stalls of running engines over HTTP."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port, 0 for any free one (default: %(default)s)"
    )
    parser.add_argument(
        "--dir", type=Path, metavar="RUN_DIR", help="run directory (default: TIERING_RUN_DIR, else per user)"
    )
    return parser


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:  # getaddrinfo would quietly take it modulo 65536
        raise OSError(errno.EINVAL, "a port is a number from 0 to 65535")
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=128)


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "it is taken, perhaps by another tierd; choose another --port"
    return error.strerror or str(error)


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if listener.family == socket.AF_INET6 else f"http://{host}:{port}/"


def _leave(_signal: int, _frame: object) -> NoReturn:
    # At once: an exception here could end up between the making of uvicorn's coroutine and its running.
    os._exit(0)


def _refuse(message: str) -> int:
    print(f"tierd: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
