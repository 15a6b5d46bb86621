"""``tierd serve``: starts the sidecar from the command-line options."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from pathlib import Path

from service.app import create_app
from service.http import DEFAULT_HOST, DEFAULT_PORT
from service.http.bearer import HOW_TO_MAKE_ONE, TokenError, load_token
from service.http.guard import Access
from service.http.server import CannotListenError, Listener, listen, listen_at, lower_priority, resolve, serve
from service.watch import Watch


def main(options: argparse.Namespace, directory: Path) -> int:
    """Serve the runs in ``directory`` until a signal. Returns the exit status: 0, or 2 if it cannot start."""
    try:
        lower_priority(options.nice)  # before the first thread: threads keep the niceness of their creation
        token = load_token(options.token_file, os.environ)
        listener, hosts = _listener(options, token)
        with listener:
            app = create_app(Watch(directory), expect_ranks=options.expect_ranks, access=Access(hosts, token))
            _log_to_stderr()
            serve(app, listener, f"tierd: {listener.url} shows the runs in {directory}")
    except (CannotListenError, TokenError) as error:
        print(f"tierd: {error}", file=sys.stderr)
        return 2
    return 0


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
            f"{host} can be reached from other machines, and no token is set: {HOW_TO_MAKE_ONE}, or listen on"
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
