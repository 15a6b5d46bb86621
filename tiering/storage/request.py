"""A request of an I/O context, from its submission until its result is reported, and the objects of C that it keeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tiering._aio import ffi, lib

KINDS = {
    "read": lib.AIO_READ,
    "write": lib.AIO_WRITE,
    "flush": lib.AIO_FLUSH,
    "any": lib.AIO_ANY,
    "register": lib.AIO_REGISTER,
}
KIND_NAMES = {number: name for name, number in KINDS.items()}

SILENT_SECONDS = 10.0
"""A wait logs a warning when no operation of the file has ended for so long."""

FEW_BEGUN = 4
"""A thread looks for dropped failures when it has submitted so many more requests, or twice as many as are pending."""

_TICKET = ffi.typeof("int64_t *")


class Buffer(Protocol):
    """Memory to transfer: it stays mapped as long as this object lives."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class BufferPart:
    """A part of ``buffer``; it keeps the buffer alive."""

    buffer: Buffer
    address: int
    nbytes: int


class FilePiece(NamedTuple):
    """``nbytes`` of a transfer: at byte ``at`` of its buffer, and at ``offset`` of ``file``."""

    file: int
    at: int
    offset: int
    nbytes: int


class ContextHandle:
    """Owns the context in C. ``handle`` is None once it is freed.

    The garbage collector finalizes the objects of a cycle in any order, so a ``__del__`` that uses ``handle`` has to
    check it first.
    """

    __slots__ = ("handle",)

    def __init__(self, handle: object) -> None:
        self.handle: object | None = handle

    # ``free`` is bound here: when the interpreter ends, modules may be empty before this runs.
    def __del__(self, free: Callable[[object], None] = lib.aio_free) -> None:
        # None first: a FailedTicket that is finalized later must not pass freed memory to C.
        handle, self.handle = self.handle, None
        free(handle)


class FailedTicket:
    """A failed ticket that C remembers, so that requests ordered after it fail, as long as it can be named."""

    __slots__ = ("_context", "_id")

    def __init__(self, context: ContextHandle, number: int) -> None:
        self._context = context
        self._id = number

    # ``release`` is bound here for the same reason as above.
    def __del__(self, release: Callable[[object, int], int] = lib.aio_release) -> None:
        if self._context.handle is not None:
            release(self._context.handle, self._id)


class Silence:
    """Measures how long no operation of a file has ended while a request of the file is under way."""

    def __init__(self) -> None:
        self._ended = -1
        self._since = self._checked = time.monotonic()
        self._next = SILENT_SECONDS
        self.seconds = 0.0

    def is_due(self) -> bool:
        """Whether the last check was long ago."""
        return time.monotonic() > self._checked + SILENT_SECONDS / 10

    def has_lasted(self, ended: int) -> bool:
        """Whether a warning is due, after SILENT_SECONDS, six times as long, and so on; ``ended`` counts operations."""
        now = self._checked = time.monotonic()
        if ended != self._ended:
            self._ended, self._since, self._next = ended, now, SILENT_SECONDS
        self.seconds = now - self._since
        if self.seconds < self._next:
            return False
        self._next *= 6
        return True


class Request:
    """A submission, with or without a living ticket, until its result is known."""

    # Defaults, so that the usual request sets few attributes: every transfer makes one.
    priority = 0
    names: tuple[str, ...] = ()
    pieces: tuple[int, ...] = ()  # their offsets in the file, if the transfer is scattered
    vector: tuple[FilePiece, ...] = ()  # if it has pieces in several files, or of several sizes
    after: tuple[Request, ...] = ()  # kept until this request succeeds, to explain why it did not
    result: int | None = None
    failed_at = 0
    submitted = 0  # the time, while transfers are recorded
    failed_ticket: FailedTicket | None = None
    silence: Silence | None = None
    holder: Callable[[], object | None]  # the ticket that a caller may still hold
    is_reported = False  # a caller has the failure
    canceled = False

    def __init__(
        self,
        kind: int,
        file: int,
        buffer: Buffer | None,
        offset: int,
        nbytes: int,
    ) -> None:
        self.kind = kind
        self.file = self.failed_file = file
        self.buffer = buffer
        self.offset = offset
        self.nbytes = nbytes
        # C stores the ticket here before it issues anything. A signal handler that raises while the submission returns
        # discards the returned value, but not this one.
        self.ticket = ffi.new(_TICKET)

    @property
    def id(self) -> int:
        """The ticket in C; 0 until it is submitted."""
        # C stores the whole number at once, and before it issues anything: a reader sees 0 or the ticket.
        number: int = self.ticket[0]
        return number


class ThreadRequests(threading.local):
    """Requests of this thread whose failures may not be reported yet; they are checked when there are ``limit``."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.limit = FEW_BEGUN
