"""``tierd serve``: starts the sidecar from the command-line options."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from service.app import create_app
from service.http import DEFAULT_HOST, DEFAULT_PORT
from service.http.bearer import OF_CLIENTS, TokenError, load_token
from service.http.guard import Access
from service.http.server import CannotListenError, Listener, listen, listen_at, lower_priority, resolve, serve
from service.nodes.addresses import AddressError
from service.source import open_source
from service.watch import Watch

# Seconds in which the log records the runs that ended while no sidecar was running.
FIRST_SWEEP = 5.0


def main(options: argparse.Namespace, directory: Path) -> int:
    """Serve the runs in ``directory`` until a signal. Returns the exit status: 0, or 2 if it cannot start."""
    try:
        lower_priority(options.nice)  # before the first thread: threads keep the niceness of their creation
        token = load_token(options.token_file, os.environ, OF_CLIENTS)
        listener, hosts = _listener(options, token)
        with listener, open_source(options, directory, FIRST_SWEEP) as source:
            watch = Watch(source)
            app = create_app(watch, expect_ranks=options.expect_ranks, access=Access(hosts, token))
            _log_to_stderr()
            place = (
                "of all users"
                if options.all_users
                else f"in {source.name}"
                if source.directory
                else f"on {source.name}"
            )
            with _push(options, watch):
                serve(app, listener, f"tierd: {listener.url} shows the runs {place}")
    except (AddressError, CannotListenError, TokenError) as error:
        print(f"tierd: {error}", file=sys.stderr)
        return 2
    return 0


def _push(options: argparse.Namespace, watch: Watch) -> AbstractContextManager[object]:
    """The push to a collector, if the command line names one."""
    if options.otlp is None:
        return nullcontext()
    from service.otlp.push import Push

    return Push(watch, options.otlp, interval=options.otlp_interval, steps=options.otlp_steps)


def _log_to_stderr() -> None:
    """Log the state changes of runs to standard error, which systemd's journal records."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("tierd: %(message)s"))
    log = logging.getLogger("service")
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def _listener(options: argparse.Namespace, token: bytes | None) -> tuple[Listener, frozenset[str] | None]:
    """The listener, and the host names that requests may use (None: all)."""
    if options.uds is not None:
        return listen_at(options.uds.absolute()), None
    host = DEFAULT_HOST if options.host is None else options.host
    address = resolve(host, DEFAULT_PORT if options.port is None else options.port)
    if not address.loopback and token is None:
        raise TokenError(
            f"{host} can be reached from other machines, and no token is set: {OF_CLIENTS.remedy}, or listen on"
            f" {DEFAULT_HOST}"
        )
    listener = listen(address)
    if not address.loopback:
        print(
            f"tierd: warning: {listener.url} can be reached from other machines without encryption (no TLS): anybody"
            " who can read the network traffic gets the token; use an ssh tunnel to 127.0.0.1 or a reverse proxy with"
            " TLS",
            file=sys.stderr,
        )
    names = {"localhost", host, *options.allow_host}
    if token is not None:
        names |= {socket.gethostname(), socket.gethostname().partition(".")[0]}
    return listener, frozenset(name.lower().removesuffix(".") for name in names)
