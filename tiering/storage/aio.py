"""Asynchronous file I/O: AioContext owns a C context, keeps buffers alive and turns -errno into errors.

Three floors: ``ffi`` and ``lib`` are generated from ``aio_csrc/aio.h``; ``_Request`` and the context's
private methods call them and check every answer; :class:`AioContext` and :class:`Ticket` are what the rest of
the project uses. The GIL is never held while C waits, and C knows no Python object.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

from tiering._aio import ffi, lib
from tiering.errors import ConfigError, EngineStateError, NotDoneError, SwapError
from tiering.storage.io_stats import (
    EngineInfo,
    FileStats,
    TransferRecord,
    engine_info,
    errno_text,
    file_stats,
)
from tiering.storage.latencies import LatencyHistogram

log = logging.getLogger(__name__)

ALIGNMENT: int = lib.AIO_ALIGNMENT
"""Bytes: addresses and offsets on a file opened with O_DIRECT are multiples of it."""

ENGINES = ("auto", "io_uring", "libaio", "threads")

_KINDS = {
    "read": lib.AIO_READ,
    "write": lib.AIO_WRITE,
    "flush": lib.AIO_FLUSH,
    "any": lib.AIO_ANY,
    "register": lib.AIO_REGISTER,
}
_KIND_NAMES = {number: name for name, number in _KINDS.items()}

_POINTER = ffi.typeof("void *")
_TICKET = ffi.typeof("int64_t *")
_FILE_STATS = ffi.typeof("aio_file_stats *")
_RESULT = ffi.typeof("aio_result *")
_FINE_COUNTS = ffi.typeof(f"uint64_t[{lib.AIO_FINE_BUCKETS}]")

SILENT_SECONDS = 10.0
"""A drive that ends nothing for so long while it is waited for is told of."""

FEW_BEGUN = 4
"""A thread looks after transfers that it has dropped when it has begun so many more, or as many as are under way."""

# A wait returns to the interpreter this often, so that Ctrl-C is heard.
_SLICE_NS = 100_000_000

_REMEDIES = {
    errno.EIO: "the disk returned an I/O error: see dmesg and the drive's SMART log",
    errno.ENODATA: "the file ends before the bytes asked for (truncated?), or the medium is bad: see dmesg",
    errno.ENOSPC: "the file system is full: free space there or choose another directory",
    errno.EDQUOT: "the disk quota is used up: raise it or choose another directory",
    errno.EFBIG: "the file would pass the process's file size limit: raise it with `ulimit -f`",
    errno.ECANCELED: "it was never issued: what it was ordered after failed, or the context was closed",
    errno.EBADMSG: "what was read is not what was written there (CRC32C): the disk, its cable or the memory is bad;"
    " see dmesg and the drive's SMART log, and start again from weights saved before",
    errno.EBADF: "the descriptor was closed, or opened for the other direction",
    errno.ENOMEM: "the system is out of memory",
}


_START_HINTS = {
    ("io_uring", errno.EPERM): " (forbidden: a container's seccomp profile, or kernel.io_uring_disabled)",
    ("io_uring", errno.ENOSYS): " (this kernel has no io_uring, or a seccomp profile hides it)",
    ("io_uring", errno.EOPNOTSUPP): " (it needs Linux 5.11)",
    ("libaio", errno.EAGAIN): " (fs.aio-max-nr is used up: raise it with sysctl)",
}

_OPEN_CONTEXTS: weakref.WeakSet[AioContext] = weakref.WeakSet()


class Buffer(Protocol):
    """Memory to transfer: it stays mapped as long as this object lives."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned misfortune of operations ``first .. first + count - 1`` of a kind, of one file or of any.

    They are counted from 1; ``count=0`` is for ever. An operation is a block of a request, or a continuation
    of one; "register" is the registration of a buffer, which "any" does not cover. ``error`` is an errno to
    fail with, ``short`` the most bytes it may transfer (0: all), ``delay`` the seconds it begins late.
    """

    kind: Literal["read", "write", "flush", "any", "register"] = "any"
    first: int = 1
    count: int = 1
    error: int = 0
    short: int = 0
    delay: float = 0.0
    file: int | None = None


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults to inject, for tests; the first that matches an operation decides."""

    faults: tuple[Fault, ...]


class _Request:
    """What the context remembers of a submission until its result is known, ticket or not."""

    # Defaults, so that the usual request sets few attributes: this is made for every transfer.
    pieces: tuple[int, ...] = ()  # where they begin in the file, if it is scattered
    after: tuple[_Request, ...] = ()  # kept until this one succeeds, to tell why it did not
    result: int | None = None
    failed_at = 0
    submitted = 0  # when, while transfers are recorded
    kept: _Kept | None = None
    silence: _Silence | None = None
    holder: Callable[[], Ticket | None]
    seen = False
    canceled = False

    def __init__(
        self,
        kind: int,
        file: int,
        buffer: Buffer | None,
        offset: int,
        nbytes: int,
        priority: int,
        names: tuple[str, ...],
    ) -> None:
        self.kind = kind
        self.file = file
        self.buffer = buffer
        self.offset = offset
        self.nbytes = nbytes
        self.priority = priority
        self.names = names
        # C stores the ticket here before anything is issued. A signal handler that raises in the moment in which the
        # submission returns takes the returned value away, but not this.
        self.ticket = ffi.new(_TICKET)

    @property
    def id(self) -> int:
        """The ticket in C; 0 until it is submitted."""
        number: int = self.ticket[0]
        return number


class _Kept:
    """A failed ticket that C still knows: what is ordered after it fails, until nobody is left to name it."""

    __slots__ = ("_context", "_id")

    def __init__(self, context: _Context, number: int) -> None:
        self._context = context
        self._id = number

    # Bound early: when the interpreter ends, modules may be empty by then.
    def __del__(self, release: Callable[[object, int], int] = lib.aio_release) -> None:
        if self._context.handle is not None:
            release(self._context.handle, self._id)


class _Silence:
    """How long no operation of a file has ended while a request of it is under way."""

    def __init__(self) -> None:
        self._ended = -1
        self._since = self._looked = time.monotonic()
        self._next = SILENT_SECONDS
        self.seconds = 0.0

    def is_due(self) -> bool:
        """Whether it is long ago that somebody looked."""
        return time.monotonic() > self._looked + SILENT_SECONDS / 10

    def has_lasted(self, ended: int) -> bool:
        """Whether it is time for a warning: after SILENT_SECONDS, then after six times as long, and so on."""
        now = self._looked = time.monotonic()
        if ended != self._ended:
            self._ended, self._since, self._next = ended, now, SILENT_SECONDS
        self.seconds = now - self._since
        if self.seconds < self._next:
            return False
        self._next *= 6
        return True


class _Context:
    """Owns the context in C. ``handle`` is None once it is freed.

    The garbage collector finalizes the objects of a cycle in any order, so who has a ``__del__`` must look.
    """

    __slots__ = ("handle",)

    def __init__(self, handle: object) -> None:
        self.handle: object | None = handle

    def __del__(self, free: Callable[[object], None] = lib.aio_free) -> None:
        handle, self.handle = self.handle, None
        free(handle)


class _Begun(threading.local):
    """Requests of this thread that nobody may have been told of. They are looked at when there are ``most``."""

    def __init__(self) -> None:
        self.requests: list[_Request] = []
        self.most = FEW_BEGUN


class Ticket:
    """One transfer under way. Any thread may ask it, as often as it likes: the answer does not change.

    It may be dropped: the buffer stays alive until the transfer is over, and a failure is then raised by a
    later read, write or flush of the thread that began it, at the latest by ``close``.
    """

    # No __del__: what a signal handler raises while one runs, the interpreter throws away.
    __slots__ = ("__weakref__", "_context", "_request")

    def __init__(self, context: AioContext, request: _Request) -> None:
        self._context = context
        self._request = request
        request.holder = weakref.ref(self)

    def begin(self) -> Self:
        """Submit what ``prepare`` has made, once. Raises as ``AioContext.read``: then it is done, with no byte moved.

        An exception that a signal handler raises may come before the submission or after it: ``begun`` says which.
        """
        self._context._begin(self._request)
        return self

    @property
    def begun(self) -> bool:
        """Whether it was submitted: the memory is in use until it is done."""
        return bool(self._request.ticket[0])

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
        return self._request.nbytes

    def wait(self, timeout: float | None = None) -> int:
        """Wait, at most ``timeout`` seconds, and return the bytes moved: all that were asked for.

        Raises SwapError if the transfer failed, NotDoneError (a TimeoutError) if it is not over yet.
        """
        request = self._request
        result = request.result
        if result is None:
            result = self._context._await(request, timeout)
        if result < 0:
            self._context._tell(request)
            raise self._context._error(request, -result)
        request.seen = True
        return result

    def done(self) -> bool:
        """True once ``wait`` would return, or raise, at once."""
        request = self._request
        if request.result is not None:
            return True
        return bool(request.ticket[0]) and self._context._collect(request, 0) is not None

    def cancel(self) -> bool:
        """Take it back if nothing of it was begun; True if so, and ``wait`` then raises ECANCELED.

        It is done once what it was ordered after is. What comes after a cancelled read goes on; what comes
        after a cancelled write fails, or it might read what was never written.
        """
        return self._context._cancel(self._request)

    def __repr__(self) -> str:
        request = self._request
        state = f"result {request.result}"
        if request.result is None:
            state = "in flight" if request.id else "not begun"
        return f"<Ticket {_KIND_NAMES[request.kind]} {self.nbytes} bytes at {request.offset}, {state}>"


class AioContext:
    """Reads and writes files in the background. All methods but ``close`` may be called from any thread.

    ``engine`` is one of ENGINES; the attribute of that name, and ``info``, say what is really in use. Requests
    are split into blocks of ``block_size`` bytes (a multiple of 4096), of which ``queue_depth`` are in flight
    per file. ``registered`` lets the kernel keep buffers and files at hand (see ``register``). ``verify`` keeps
    a CRC32C of every 4 KiB page that is written, four bytes each, and compares it when the page is read.

    Raises ConfigError for values out of range, SwapError if a named engine cannot start here.
    """

    engine: str
    _closed = True

    def __init__(
        self,
        *,
        engine: str = "auto",
        block_size: int = 1 << 20,
        queue_depth: int = 16,
        registered: bool = True,
        verify: bool = False,
        fault: FaultPlan | None = None,
    ) -> None:
        _check_options(engine, block_size, queue_depth)
        options = {
            "block_size": block_size,
            "queue_depth": queue_depth,
            "registered": registered,
            "verify": verify,
        }
        self._owner = _Context(_open(engine, options, fault))
        self._handle = self._owner.handle
        self._closed = False
        self._pid = os.getpid()
        self.engine = self.info.engine
        self._registered: list[Buffer] = []
        _OPEN_CONTEXTS.add(self)
        self._files: dict[int, tuple[str, bool]] = {}
        self._live: set[_Request] = set()
        self._begun = _Begun()
        self._recorded: list[TransferRecord] | None = None

    @property
    def info(self) -> EngineInfo:
        """The engine and what it really uses, as of now: files are registered when they are first used."""
        raw = ffi.new("aio_info *")
        code = lib.aio_describe(self._handle, raw)
        if code < 0:
            raise self._refusal(-code, "info", "", 0, ())
        return engine_info(raw)

    def register(self, buffer: Buffer) -> bool:
        """Tell the kernel of memory that many transfers will use, so that each costs less CPU time.

        Touches and locks every page. True if it took. Transfers work without it; ``info`` says why the kernel
        refused, and engines other than io_uring have no such thing. The buffer is kept alive until ``close``.
        """
        if buffer.nbytes == 0:
            return False
        self._registered.append(buffer)  # whatever is answered, some of it may be known to the kernel
        code: int = lib.aio_register_buffer(self._handle, ffi.cast("void *", buffer.address), buffer.nbytes)
        if code in (-errno.ECHILD, -errno.ESHUTDOWN, -errno.EINVAL):
            raise self._refusal(-code, f"register of {buffer.nbytes} bytes at {buffer.address:#x}", "", 0, ())
        return code == 0

    def add_file(self, fd: int, *, direct: bool, name: str) -> int:
        """Add an open descriptor, which must stay open until ``close``, and return its index.

        ``direct`` says that it was opened with O_DIRECT; ``name`` is what errors call it.
        """
        index: int = lib.aio_add_file(self._handle, fd, direct)
        if index < 0:
            raise self._refusal(-index, f"add_file of {name!r} (descriptor {fd})", name, 0, ())
        self._files[index] = (name, direct)
        return index

    def read(
        self,
        file: int,
        buffer: Buffer,
        offset: int,
        nbytes: int,
        *,
        priority: int = 0,
        after: Sequence[Ticket] = (),
        names: tuple[str, ...] = (),
    ) -> Ticket:
        """Read ``nbytes`` at ``offset`` of ``file`` into the start of ``buffer``.

        On a direct file the buffer's address and the offset are multiples of 4096; any length will do.
        Priorities are 0, 1, 2, the highest first. It is issued once the tickets in ``after`` are done, and
        fails with ECANCELED if one of them failed, so that it never returns bytes that a write failed to
        replace. ``names`` are the tensors, for the error message.

        Raises SwapError if it is refused, or if a ticket that this thread has dropped turns out to have failed;
        nothing is submitted then.
        """
        return self.prepare(
            "read", file, buffer, offset, nbytes, priority=priority, after=after, names=names
        ).begin()

    def write(
        self,
        file: int,
        buffer: Buffer,
        offset: int,
        nbytes: int,
        *,
        priority: int = 0,
        after: Sequence[Ticket] = (),
        names: tuple[str, ...] = (),
    ) -> Ticket:
        """Write the first ``nbytes`` of ``buffer`` at ``offset``; otherwise like ``read``.

        On a direct file a length that is not a multiple of 4096 fills the rest of the last block with zeros.
        """
        return self.prepare(
            "write", file, buffer, offset, nbytes, priority=priority, after=after, names=names
        ).begin()

    def prepare(
        self,
        kind: Literal["read", "write"],
        file: int,
        buffer: Buffer,
        offset: int,
        nbytes: int,
        *,
        priority: int = 0,
        after: Sequence[Ticket] = (),
        names: tuple[str, ...] = (),
    ) -> Ticket:
        """A ``read`` or ``write`` that is not submitted before ``Ticket.begin``.

        For memory that is given back by hand. A signal handler may raise between the submission and the next
        statement, and what was submitted is then known to nobody: note the ticket where it will be waited for, and
        only then begin it.
        """
        return self._prepare(_KINDS[kind], file, buffer, offset, nbytes, priority, after, names)

    def read_scattered(
        self,
        file: int,
        buffer: Buffer,
        offsets: Sequence[int],
        nbytes_each: int,
        *,
        priority: int = 0,
        after: Sequence[Ticket] = (),
        names: tuple[str, ...] = (),
    ) -> Ticket:
        """Read a piece of ``nbytes_each`` at each of ``offsets`` of ``file``, one after the other into ``buffer``.

        One ticket for all: for many small reads, which cost less than a ticket each. On a direct file
        ``nbytes_each`` is a multiple of 4096 as well; otherwise like ``read``.
        """
        return self.prepare_scattered(
            "read", file, buffer, offsets, nbytes_each, priority=priority, after=after, names=names
        ).begin()

    def write_scattered(
        self,
        file: int,
        buffer: Buffer,
        offsets: Sequence[int],
        nbytes_each: int,
        *,
        priority: int = 0,
        after: Sequence[Ticket] = (),
        names: tuple[str, ...] = (),
    ) -> Ticket:
        """Write ``buffer``'s pieces of ``nbytes_each`` to ``offsets``; otherwise like ``read_scattered``.

        Pieces must not overlap in the file: which of them is there in the end would be left to chance.
        """
        return self.prepare_scattered(
            "write", file, buffer, offsets, nbytes_each, priority=priority, after=after, names=names
        ).begin()

    def prepare_scattered(
        self,
        kind: Literal["read", "write"],
        file: int,
        buffer: Buffer,
        offsets: Sequence[int],
        nbytes_each: int,
        *,
        priority: int = 0,
        after: Sequence[Ticket] = (),
        names: tuple[str, ...] = (),
    ) -> Ticket:
        """A ``read_scattered`` or ``write_scattered`` that ``Ticket.begin`` submits; see ``prepare``."""
        pieces = tuple(offsets)
        first = pieces[0] if pieces else 0
        nbytes = len(pieces) * nbytes_each
        return self._prepare(_KINDS[kind], file, buffer, first, nbytes, priority, after, names, pieces)

    def flush(self, file: int, *, after: Sequence[Ticket] = ()) -> Ticket:
        """fdatasync: covers the writes done when it is issued; name those still under way in ``after``."""
        return self._prepare(lib.AIO_FLUSH, file, None, 0, 0, 0, after, ()).begin()

    def wait_any(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Ticket:
        """One of ``tickets`` that is done, successful or not, the first if several are; its ``wait`` tells.

        Raises NotDoneError after ``timeout`` seconds, ValueError if there are no tickets.
        """
        if not tickets:
            raise ValueError("wait_any needs at least one ticket")
        self._check_own(tickets)
        ids = ffi.new("int64_t[]", [ticket._request.id for ticket in tickets])
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            for ticket in tickets:
                if ticket._request.result is not None:
                    return ticket
            left = deadline - time.monotonic()
            slice_ns = int(max(0.0, min(left * 1e9, _SLICE_NS)))
            place: int = lib.aio_wait_any(self._handle, ids, len(tickets), slice_ns)
            if place >= 0:
                return tickets[place]
            if place not in (-errno.ETIMEDOUT, -errno.ESTALE):  # ESTALE: another thread collects one just now
                raise self._refusal(-place, "wait_any", "", 0, ())
            if left <= 0:
                raise NotDoneError(f"none of {len(tickets)} transfers is done after {timeout} s")

    def stats(self) -> list[FileStats]:
        """The counters of every file, in the order of their indices. Raises no transfer's error."""
        raw = ffi.new("aio_file_stats *")
        result = []
        for index, (name, direct) in sorted(self._files.items()):
            code = lib.aio_stats(self._handle, index, raw)
            if code < 0:
                raise self._refusal(-code, f"stats of {name!r}", name, 0, ())
            result.append(file_stats(name, direct, raw))
        return result

    def latencies(self, file: int, kind: Literal["read", "write", "flush"]) -> LatencyHistogram:
        """How long the operations of one kind took that ``stats`` counts, finely enough for percentiles.

        Raises ValueError for a file that was not added.
        """
        counts, longest = ffi.new(_FINE_COUNTS), ffi.new("uint64_t *")
        code = lib.aio_latencies(self._handle, file, _KINDS[kind], counts, longest)
        if code < 0:
            if code == -errno.EINVAL:
                raise ValueError(
                    f"latencies of {kind!r}, file {file}: no such file index; add_file returns it"
                )
            raise self._refusal(-code, f"latencies of {kind!r}", "", 0, ())
        return LatencyHistogram(tuple(ffi.unpack(counts, lib.AIO_FINE_BUCKETS)), longest[0])

    def start_recording(self) -> None:
        """Keep a record of every transfer that ends from now on, until ``end_recording``."""
        self._recorded = []

    def end_recording(self) -> list[TransferRecord]:
        """Wait for what is under way; all that has ended since ``start_recording``, in the order it was issued.

        What was never issued is left out. Raises no transfer's error: who waits for it is told.
        """
        try:
            for request in list(self._live):
                if request.id and request.result is None:
                    self._await(request, None)
        finally:
            recorded, self._recorded = self._recorded or [], None
        return sorted(recorded, key=lambda record: record.issued)

    def close(self) -> None:
        """Cancel what was not begun, wait for what was, end the threads. Results and statistics stay
        readable.

        Raises SwapError if a transfer failed and nobody waited for its ticket. A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        lib.aio_close(self._handle)
        self._registered.clear()
        if os.getpid() != self._pid:
            return  # a child has no transfers: the parent's tickets are the parent's to judge
        unseen = sorted(self._live, key=lambda request: request.id)
        for request in unseen:
            if request.result is None and request.id:
                self._collect(request, 0)
        for request in unseen:
            self._judge_unseen(request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except SwapError as unseen:
            if error is None:
                raise
            error.add_note(f"While closing: {unseen}")

    def __del__(self) -> None:
        if self._closed or os.getpid() != self._pid or self._owner.handle is None:
            return
        warnings.warn("AioContext was dropped without close()", ResourceWarning, source=self, stacklevel=2)
        lib.aio_close(self._handle)

    def _prepare(
        self,
        kind: int,
        file: int,
        buffer: Buffer | None,
        offset: int,
        nbytes: int,
        priority: int,
        after: Sequence[Ticket],
        names: tuple[str, ...],
        pieces: tuple[int, ...] = (),
    ) -> Ticket:
        if buffer is not None and (offset < 0 or not 0 <= nbytes <= buffer.nbytes):
            raise ValueError(
                f"cannot transfer {nbytes} bytes at offset {offset} with a buffer of {buffer.nbytes}"
            )
        request = _Request(kind, file, buffer, offset, nbytes, priority, names)
        if pieces:
            request.pieces = pieces
        if after:
            self._check_own(after)
            request.after = tuple(ticket._request for ticket in after)
        return Ticket(self, request)

    def _begin(self, request: _Request) -> None:
        assert not request.id and request.result is None, "a transfer is begun once"
        if self._recorded is not None:
            request.submitted = time.monotonic_ns()
        # Before the call: an interrupt right after it must not free memory that is being transferred.
        self._live.add(request)
        try:
            begun = self._begun
            if len(begun.requests) >= begun.most:
                self._surface(begun)
            code = self._submit(request)
            if code < 0:
                raise self._refused(request, -code, request.priority)
            begun.requests.append(request)
        finally:
            if not request.id:  # refused, or interrupted before
                self._live.discard(request)
                request.result = 0

    def _submit(self, request: _Request) -> int:
        kind, file, buffer, pieces = request.kind, request.file, request.buffer, request.pieces
        address = ffi.NULL if buffer is None else ffi.cast(_POINTER, buffer.address)
        earlier = [before.id for before in request.after] if request.after else ffi.NULL
        n_earlier, priority, ticket = len(request.after), request.priority, request.ticket
        try:
            if pieces:
                n, each = len(pieces), request.nbytes // len(pieces)
                code: int = lib.aio_submit_scattered(
                    self._handle, kind, file, address, pieces, n, each, priority, earlier, n_earlier, ticket
                )
            else:
                offset, nbytes = request.offset, request.nbytes
                code = lib.aio_submit(
                    self._handle, kind, file, address, offset, nbytes, priority, earlier, n_earlier, ticket
                )
        except OverflowError:  # a number that C has no room for
            places = f"offsets {min(pieces)} .. {max(pieces)}" if pieces else f"offset {request.offset}"
            raise ValueError(
                f"cannot transfer {request.nbytes} bytes at {places} with priority {priority}: 64 bits do not hold it"
            ) from None
        return code

    def _check_own(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            if ticket._context is not self:
                raise ValueError(f"{ticket!r} belongs to another AioContext: order only within one")

    def _collect(self, request: _Request, timeout_ns: int) -> int | None:
        """The result, or None when it is not there in time. With it C forgets a success, and the buffer is let go."""
        result = ffi.new(_RESULT)
        ticket = request.ticket[0]
        code = lib.aio_wait(self._handle, ticket, timeout_ns, result)
        if code == -errno.ETIMEDOUT:
            return None
        if code == 0:
            if result.bytes < 0:
                request.failed_at = result.offset
                # C forgets it when nobody can order anything after it any more; one thread alone sees to that.
                claim = object()
                first = request.__dict__.setdefault("claim", claim) is claim
                if first:
                    request.kept = _Kept(self._owner, ticket)
                request.result = result.bytes
            else:
                request.after = ()
                # Before the release: who finds the ticket released reads it here.
                request.result = result.bytes
                self._live.discard(request)  # a failure is kept until somebody was told
                # -ESTALE: another thread was here just now.
                first = lib.aio_release(self._handle, ticket) == 0
            request.buffer = None
            if first and self._recorded is not None and result.issued_ns:
                self._recorded.append(self._record(request, result.issued_ns, result.done_ns))
        elif code != -errno.ESTALE:
            raise self._refused(request, -code, 0)
        return request.result

    def _record(self, request: _Request, issued: int, done: int) -> TransferRecord:
        assert request.result is not None
        return TransferRecord(
            kind=_KIND_NAMES[request.kind],
            file=self._files[request.file][0],
            names=request.names,
            offset=request.offset,
            nbytes=request.nbytes,
            submitted=request.submitted,
            issued=issued,
            done=done,
            error=max(0, -request.result),
        )

    def _await(self, request: _Request, timeout: float | None) -> int:
        if not request.id:  # nothing is under way
            return 0
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            result = self._collect(request, int(max(0.0, min(left * 1e9, _SLICE_NS))))
            if result is not None:
                return result
            if request.silence is None:
                request.silence = _Silence()
            elif request.silence.is_due() and request.silence.has_lasted(self._ended(request.file)):
                self._warn_of_silence(request, request.silence.seconds)
            if left <= 0:
                raise NotDoneError(f"{self._describe(request)} is not done after {timeout} s")

    def _ended(self, file: int) -> int:
        """Operations of ``file`` that have ended."""
        raw = ffi.new(_FILE_STATS)
        lib.aio_stats(self._handle, file, raw)
        return sum(raw.kind[kind].ops + raw.kind[kind].errors for kind in range(lib.AIO_KINDS))

    def _warn_of_silence(self, request: _Request, seconds: float) -> None:
        log.warning(
            "%s is waited for, and no transfer of %s has ended for %.0f s: the drive, or the network behind it, may"
            " hang; see dmesg",
            self._describe(request),
            self._files[request.file][0],
            seconds,
        )

    def _cancel(self, request: _Request) -> bool:
        if not request.id:
            return False
        code = lib.aio_cancel(self._handle, request.id)
        if code in (-errno.EBUSY, -errno.EALREADY, -errno.ESTALE):
            return False
        if code < 0:
            raise self._refused(request, -code, 0)
        request.canceled = True
        return True

    def _surface(self, begun: _Begun) -> None:
        """Raise the first failure of a ticket that this thread has dropped; forget what is over."""
        still: list[_Request] = []
        failed = None
        for request in begun.requests:
            dropped = request.holder() is None
            if dropped and request.result is None:
                self._collect(request, 0)
            result = request.result
            if result is not None and (result >= 0 or request.seen):
                continue
            if dropped and result is not None and failed is None:
                failed = request
            else:
                still.append(request)  # under way, or its holder may ask, or its turn comes later
        begun.requests, begun.most = still, FEW_BEGUN + 2 * len(still)
        if failed is not None:
            self._judge_unseen(failed)

    def _judge_unseen(self, request: _Request) -> None:
        """Raise a failure that nobody was told of; what was cancelled has a cause, which is told instead."""
        result = request.result
        if result is not None and result < 0 and not request.seen:
            self._tell(request)
            if -result != errno.ECANCELED:
                raise self._error(request, -result)

    def _tell(self, request: _Request) -> None:
        """Its failure is about to be raised, and need not be again."""
        request.seen = True
        self._live.discard(request)

    def _describe(self, request: _Request) -> str:
        name = self._files.get(request.file, (f"file {request.file}", False))[0]
        what = _KIND_NAMES[request.kind]
        if request.kind == lib.AIO_FLUSH:
            return f"{what} of {name}"
        tensors = ", ".join(repr(tensor) for tensor in request.names)
        whose = f" of {tensors}" if tensors else ""
        size = f"{request.nbytes} bytes"
        if request.pieces:
            size += f" in {len(request.pieces)} pieces, the first"
        return f"{what}{whose} ({size}) at offset {request.offset / 2**30:.6g} GiB of {name}"

    def _error(self, request: _Request, code: int) -> SwapError:
        remedy = _REMEDIES.get(code, "see dmesg")
        cause = self._cause(request) if code == errno.ECANCELED else None
        if request.canceled:
            remedy = "it was taken back by cancel()"
        elif cause is not None:
            remedy = f"it was never issued, because of this: {cause}"
        where = "" if request.failed_at == request.offset else f" at byte {request.failed_at} of the file"
        message = f"{self._describe(request)} failed: {errno_text(code)}{where}; {remedy}"
        name = self._files.get(request.file, ("", False))[0]
        error = SwapError(message, errno=code, filename=name, offset=request.failed_at, names=request.names)
        error.__cause__ = cause
        return error

    def _cause(self, request: _Request) -> SwapError | None:
        """The failure that cancelled ``request``, if it was ordered after one."""
        suspects = list(request.after)
        known = set(suspects)
        while suspects:
            earlier = suspects.pop()
            if earlier.result is None:
                self._collect(earlier, 0)
            if earlier.canceled:
                return self._error(earlier, errno.ECANCELED)
            if earlier.result == -errno.ECANCELED:
                suspects.extend(set(earlier.after) - known)
                known.update(earlier.after)
            elif earlier.result is not None and earlier.result < 0:
                return self._error(earlier, -earlier.result)
        return None

    def _refused(self, request: _Request, code: int, priority: int) -> Exception:
        name, direct = self._files.get(request.file, ("", False))
        what = self._describe(request)
        address = 0 if request.buffer is None else request.buffer.address
        if code == errno.EINVAL:
            if request.file not in self._files:
                return ValueError(f"{what}: no such file index; add_file returns it")
            if not 0 <= priority < lib.AIO_PRIORITIES:
                return ValueError(f"{what}: priority {priority} is not 0 .. {lib.AIO_PRIORITIES - 1}")
            pieces = request.pieces or (request.offset,)
            offset = next((offset for offset in pieces if offset % ALIGNMENT), request.offset)
            length = request.nbytes // len(pieces) if request.pieces else 0
            if direct and (address | offset | length) % ALIGNMENT:
                each = f", length of a piece ({length})" if request.pieces else ""
                what += (
                    f" needs address ({address:#x}){each} and offset ({offset})"
                    f" to be multiples of {ALIGNMENT}, because the file is open with O_DIRECT"
                )
        return self._refusal(code, what, name, request.offset, request.names)

    def _refusal(self, code: int, what: str, name: str, offset: int, names: tuple[str, ...]) -> Exception:
        if code == errno.ECHILD:
            return EngineStateError(
                f"{what}: this AioContext belongs to process {self._pid} and did not survive the fork;"
                " open one in the child"
            )
        if code == errno.ESHUTDOWN:
            return EngineStateError(f"{what}: the AioContext is closed; open a new one")
        return SwapError(
            f"{what} was refused: {errno_text(code)}", errno=code, filename=name, offset=offset, names=names
        )


def _check_options(engine: str, block_size: int, queue_depth: int) -> None:
    if engine not in ENGINES:
        raise ConfigError(f"io.engine is {engine!r}; choose one of {', '.join(ENGINES)}")
    if block_size % ALIGNMENT or not ALIGNMENT <= block_size <= 1 << 30:
        raise ConfigError(f"io.block_size is {block_size}; choose a multiple of {ALIGNMENT} up to 1 GiB")
    if not 1 <= queue_depth <= 512:
        raise ConfigError(f"io.queue_depth is {queue_depth}; choose 1 .. 512")


def _open(engine: str, options: dict[str, int], fault: FaultPlan | None) -> object:
    planned = [
        {
            "kind": _KINDS[fault.kind],
            "file": -1 if fault.file is None else fault.file,
            "error": fault.error,
            "first": fault.first,
            "count": fault.count,
            "short_bytes": fault.short,
            "delay_ns": round(fault.delay * 1e9),
        }
        for fault in (fault.faults if fault else ())
    ]
    name = ffi.new("char[]", engine.encode())
    faults = ffi.new("aio_fault[]", planned)
    raw = ffi.new("aio_options *", {**options, "engine": name, "n_faults": len(planned), "faults": faults})
    out = ffi.new("aio_context **")
    code = lib.aio_open(out, raw)
    if code < 0:
        hint = _START_HINTS.get((engine, -code), "")
        raise SwapError(
            f"I/O engine {engine!r} cannot start: {errno_text(-code)}{hint};"
            " 'threads' works everywhere, and 'auto' takes the first that does",
            errno=-code,
            filename="",
            offset=0,
        )
    return out[0]


def _close_in_child() -> None:
    # A forked data worker must not keep the swap space alive: io_uring holds the files it has registered.
    for context in list(_OPEN_CONTEXTS):
        lib.aio_close(context._handle)


os.register_at_fork(after_in_child=_close_in_child)
