"""A request of an I/O context, from its submission until its result is reported, and the objects of C that it keeps."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tiering._aio import ffi, lib

KINDS = {
    "read": lib.AIO_READ,
    "write": lib.AIO_WRITE,
    "flush": lib.AIO_FLUSH,
    "any": lib.AIO_ANY,
    "register": lib.AIO_REGISTER,
}
KIND_NAMES = {number: name for name, number in KINDS.items()}

HANG_SECONDS = 10.0
"""An operation that has been in flight for so long is logged."""

FEW_BEGUN = 4
"""A thread looks for dropped failures when it has submitted so many more requests, or twice as many as are pending."""

_TICKET = ffi.typeof("int64_t *")
_NANOSECONDS = ffi.typeof("uint64_t *")
_PIECES = ffi.typeof("aio_piece[]")
_POINTER = ffi.typeof("void *")


class Completion(Protocol):
    """A transfer, or something else that uses memory for a while. ``wait`` raises NotDoneError after ``timeout`` s."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> int: ...


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


# Without __slots__, which a tuple cannot have: the properties are stored.
class Pieces(tuple[FilePiece, ...]):  # noqa: SLOT001
    """The pieces of a transfer, in any number of files. Transfers of the same range share them."""

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self)

    @functools.cached_property
    def reach(self) -> float:
        """Bytes of the smallest buffer that has all pieces; infinite if there is none."""
        if any(piece.at < 0 or piece.nbytes < 0 for piece in self):
            return math.inf
        return max((piece.at + piece.nbytes for piece in self), default=0)

    @functools.cached_property
    def array(self) -> Any:
        """The pieces in the memory of C."""
        return ffi.new(_PIECES, [(at, offset, nbytes, file) for file, at, offset, nbytes in self])


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


class Hangs:
    """Finds operations of the context ``handle`` that have been in flight for long."""

    def __init__(self, handle: object) -> None:
        self._handle = handle
        self._looked = 0.0
        # By file: the issue of the operation that was found last, and the age at which it is found again.
        self._found: dict[int, tuple[int, float]] = {}

    def look(self, files: Collection[int]) -> Iterator[tuple[int, int, float]]:
        """Files, with the ticket and the age of their oldest operation, if it reached HANG_SECONDS since the last look.

        So again after six times as long, and so on. Most calls return at once, because the last look was shortly ago.
        """
        now = time.monotonic()
        if now < self._looked + HANG_SECONDS / 10:
            return
        self._looked = now
        ticket, issued = ffi.new(_TICKET), ffi.new(_NANOSECONDS)
        for file in tuple(files):
            if lib.aio_oldest(self._handle, file, ticket, issued) < 0 or not ticket[0]:
                continue
            last_issue, due = self._found.get(file, (0, 0.0))
            if last_issue != issued[0]:
                due = HANG_SECONDS
            age = now - issued[0] / 1e9
            if age >= due:
                while due <= age:
                    due *= 6
                self._found[file] = issued[0], due
                yield file, ticket[0], age


class Request:
    """A submission, with or without a living ticket, until its result is known."""

    # Defaults, so that the usual request sets few attributes: every transfer makes one.
    priority = 0
    names: tuple[str, ...] = ()
    pieces: tuple[int, ...] = ()  # their offsets in the file, if the transfer is scattered
    vector = Pieces()  # if its pieces may be in several files, or of several sizes
    after: tuple[Request, ...] = ()  # kept until this request succeeds, to explain why it did not
    result: int | None = None
    failed_at = 0
    submitted = 0  # the time, while transfers are recorded
    failed_ticket: FailedTicket | None = None
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
    def data(self) -> Any:
        """The address of the buffer in C."""
        return ffi.NULL if self.buffer is None else ffi.cast(_POINTER, self.buffer.address)

    def only_waits_for(self, earlier: Request) -> bool:
        """Whether it is a write that has to wait for the read ``earlier``, and goes on after that one's failure."""
        return self.kind == lib.AIO_WRITE and earlier.kind == lib.AIO_READ and earlier in self.after

    def as_vector(self) -> Pieces:
        """The pieces of its buffer."""
        if self.vector:
            return self.vector
        # A scattered request has several, all of one size.
        offsets = self.pieces or (self.offset,)
        each = self.nbytes // len(offsets)
        return Pieces(FilePiece(self.file, n * each, offset, each) for n, offset in enumerate(offsets))

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
