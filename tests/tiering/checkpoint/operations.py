"""Every system call by which a save changes what is on disk, or makes it last, passes through here."""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tiering.checkpoint import directory
from tiering.storage import file_system
from tiering.storage.tickets import Ticket

OPERATIONS = [
    *((os, name) for name in ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "link")),
    *((os, name) for name in ("pwrite", "ftruncate", "truncate", "fsync")),
    (io, "open"),  # Path.open
    (fcntl, "flock"),
    (directory, "exchange"),
    (Ticket, "begin"),
]

Around = Callable[[str, Callable[[], Any], tuple[Any, ...]], Any]
"""Takes the name of an operation, what carries it out, and its arguments; returns what that returns."""


@contextmanager
def intercepted(around: Around) -> Iterator[None]:
    """``around`` is called instead of each operation."""
    patches = [mock.patch.object(where, name, _wrapped(where, name, around)) for where, name in OPERATIONS]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


@contextmanager
def no_exchange() -> Iterator[None]:
    """Two names cannot change places, as on NFS and Lustre, which answer EINVAL."""
    with mock.patch.object(file_system, "_RENAME_EXCHANGE", 1 << 20):
        yield


def _wrapped(where: object, name: str, around: Around) -> Callable[..., Any]:
    original = getattr(where, name)

    def operation(*arguments: Any, **options: Any) -> Any:
        return around(name, lambda: original(*arguments, **options), arguments)

    return operation
