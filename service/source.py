"""Where the status of the ranks is read: the run directory of this node, or the tierds of several nodes."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from service.view import Reading


class Source(Protocol):
    """``name`` is the place in words. ``directory`` is the run directory of this user; None if there is none.

    A reading is current for ``max_age`` seconds. Only one thread at a time calls ``read()``, which raises
    TelemetryError if nothing can be read.
    """

    @property
    def name(self) -> str: ...

    @property
    def directory(self) -> Path | None: ...

    @property
    def max_age(self) -> float: ...

    def read(self) -> Reading: ...


def open_source(
    options: argparse.Namespace, directory: Path, first_sweep: float = 0.0
) -> AbstractContextManager[Source]:
    """The source that the command line names; ``directory`` is the run directory.

    Raises TelemetryError, TokenError or AddressError.
    """
    if options.of is None and options.of_file is None:
        from service.status_files import StatusFiles

        return nullcontext(StatusFiles(directory, all_users=options.all_users, first_sweep=first_sweep))
    from service.http.bearer import OF_NODES, load_token
    from service.nodes.addresses import NodeList
    from service.nodes.nodes import Nodes

    token = load_token(options.of_token_file, os.environ, OF_NODES)
    nodes = NodeList(options.of or "", file=options.of_file, token=token)
    exposed = [str(address) for address in nodes.addresses if address.is_exposed]
    if exposed and options.command == "serve":
        more = f" and {len(exposed) - 1} more" if len(exposed) > 1 else ""
        print(
            f"tierd: warning: the token of {exposed[0]}{more} is sent without encryption (no TLS): anybody who can read"
            " the network traffic gets it; use https:// and a reverse proxy with TLS on the nodes, or ssh tunnels",
            file=sys.stderr,
        )
    return Nodes(nodes)
