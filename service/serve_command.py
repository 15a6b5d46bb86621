"""``tierd serve``: from its options to a sidecar that answers."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from pathlib import Path

from service.app import create_app
from service.http import DEFAULT_HOST, DEFAULT_PORT
from service.http.bearer import HOW_TO_MAKE_ONE, TokenError, token_of
from service.http.guard import Access
from service.http.server import CannotListenError, Place, be_modest, listen, listen_at, resolve, serve
from service.watch import Watch


def main(options: argparse.Namespace, directory: Path) -> int:
    """Serve the runs in ``directory`` until a signal; 2 where that cannot begin."""
    try:
        be_modest(options.nice)  # before there are threads, which would keep the niceness they were made with
        _log_what_becomes_of_runs()
        token = token_of(options.token_file, os.environ)
        place, hosts = _place(options, token)
        with place:
            app = create_app(Watch(directory), expect_ranks=options.expect_ranks, access=Access(hosts, token))
            serve(app, place, f"tierd: {place.url} shows the runs in {directory}")
    except (CannotListenError, TokenError) as error:
        print(f"tierd: {error}", file=sys.stderr)
        return 2
    return 0


def _log_what_becomes_of_runs() -> None:
    """On standard error, where a journal takes it."""
    lines = logging.StreamHandler()
    lines.setFormatter(logging.Formatter("tierd: %(message)s"))
    log = logging.getLogger("service")
    log.addHandler(lines)
    log.setLevel(logging.INFO)


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
