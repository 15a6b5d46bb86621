"""Asynchronous file I/O: AioContext owns a C context, keeps buffers alive and turns -errno into errors.

Three floors: ``ffi`` and ``lib`` are generated from ``aio_csrc/aio.h``; ``Transfers`` and the context call them and
check every answer; :class:`AioContext` and :class:`~tiering.storage.tickets.Ticket` are the interface for the rest of
the project. The GIL is never held while C waits, and C knows no Python object.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, TypedDict, Unpack

from optim_cpu import kernels
from tiering._aio import ffi, lib
from tiering.errors import ConfigError, SwapError
from tiering.storage.aio_errors import ALIGNMENT as ALIGNMENT
from tiering.storage.aio_errors import AioErrors, start_error
from tiering.storage.io_stats import EngineInfo, FileStats, engine_info, file_stats
from tiering.storage.latencies import LatencyHistogram
from tiering.storage.recording import TransferRecord
from tiering.storage.request import FEW_BEGUN as FEW_BEGUN
from tiering.storage.request import KINDS, Buffer, ContextHandle, FilePiece, Pieces, Request
from tiering.storage.tasks import Task, run_tasks
from tiering.storage.tickets import Ticket, Transfers

log = logging.getLogger(__name__)

ENGINES = ("auto", "io_uring", "libaio", "threads")

_FINE_COUNTS = ffi.typeof(f"uint64_t[{lib.AIO_FINE_BUCKETS}]")

_FILE_STATS = ffi.typeof("aio_file_stats *")

_OPEN_CONTEXTS: weakref.WeakSet[AioContext] = weakref.WeakSet()


class TransferOptions(TypedDict, total=False):
    """Keywords of every transfer: its priority, the tickets it is ordered after, the tensors for the error message."""

    priority: int
    after: Sequence[Ticket]
    names: tuple[str, ...]


class AioContext:
    """Reads and writes files in the background. All methods but ``close`` may be called from any thread.

    ``engine`` is one of ENGINES; the attribute of that name, and ``info``, say which engine is in use. Requests
    are split into blocks of ``block_size`` bytes (a multiple of 4096), of which ``queue_depth`` are in flight
    per file. ``registered`` lets the kernel register buffers and files (see ``register``). ``verify`` keeps
    a CRC32C of every 4 KiB page that is written, four bytes each, and compares it when the page is read; as many
    threads as the kernels have now compute them, at most eight.

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
            # Within the affinity mask, the CPU quota and the rank's share of both.
            "sum_threads": kernels.thread_count(),
        }
        self._owner = ContextHandle(_open(engine, options, fault))
        self._handle = self._owner.handle
        self._closed = False
        self._pid = os.getpid()
        self._files: dict[int, tuple[str, bool]] = {}  # name, and whether it is open with O_DIRECT
        self._errors = AioErrors(self._pid, self._files)
        self.engine = self.info.engine
        self._registered: list[Buffer] = []
        _OPEN_CONTEXTS.add(self)
        self._transfers = Transfers(self._owner, self._errors, self._files)

    @property
    def info(self) -> EngineInfo:
        """The engine and the features in use now: files are registered when they are first used."""
        raw = ffi.new("aio_info *")
        code = lib.aio_describe(self._handle, raw)
        if code < 0:
            raise self._errors.refusal(-code, "info")
        return engine_info(raw)

    def register(self, buffer: Buffer) -> int:
        """Register memory that many transfers will use with the kernel, so that each costs less CPU time.

        Touches and locks every page. Returns how many bytes, from the start, the kernel accepted: fewer than all where
        the limit of locked memory is small. Transfers work without it; ``info`` says why the kernel refused, and only
        io_uring has registered buffers. The buffer is kept alive until ``close``.
        """
        if buffer.nbytes == 0:
            return 0
        # Also when the call fails: the kernel may have registered a part of the buffer.
        self._registered.append(buffer)
        code: int = lib.aio_register_buffer(self._handle, ffi.cast("void *", buffer.address), buffer.nbytes)
        if code in (-errno.ECHILD, -errno.ESHUTDOWN, -errno.EINVAL):
            raise self._errors.refusal(-code, f"register of {buffer.nbytes} bytes at {buffer.address:#x}")
        return max(code, 0)

    def add_file(self, fd: int, *, direct: bool, name: str) -> int:
        """Add an open descriptor, which must stay open until ``close``, and return its index.

        ``direct``: it was opened with O_DIRECT; ``name`` is the file's name in errors.
        """
        index: int = lib.aio_add_file(self._handle, fd, direct)
        if index < 0:
            raise self._errors.refusal(-index, f"add_file of {name!r} (descriptor {fd})", name)
        self._files[index] = (name, direct)
        return index

    def read(
        self, file: int, buffer: Buffer, offset: int, nbytes: int, **options: Unpack[TransferOptions]
    ) -> Ticket:
        """Read ``nbytes`` at ``offset`` of ``file`` into the start of ``buffer``.

        On a direct file the buffer's address and the offset are multiples of 4096; the length is any number. The
        options are ``priority`` (0, 1 or 2, the highest first), ``after`` and ``names``. The read is issued when the
        tickets in ``after`` are done, and fails with ECANCELED if one of them failed: it never returns bytes that a
        write failed to replace. ``names`` are the tensors, for the error message.

        Raises SwapError if the read is refused, or if a ticket that this thread has dropped has failed; then nothing
        is submitted.
        """
        return self.prepare("read", file, buffer, offset, nbytes, **options).begin()

    def write(
        self, file: int, buffer: Buffer, offset: int, nbytes: int, **options: Unpack[TransferOptions]
    ) -> Ticket:
        """Write the first ``nbytes`` of ``buffer`` at ``offset``; otherwise like ``read``.

        On a direct file a length that is not a multiple of 4096 fills the last block with zeros.
        """
        return self.prepare("write", file, buffer, offset, nbytes, **options).begin()

    def prepare(
        self,
        kind: Literal["read", "write"],
        file: int,
        buffer: Buffer,
        offset: int,
        nbytes: int,
        **options: Unpack[TransferOptions],
    ) -> Ticket:
        """A ``read`` or ``write`` that is not submitted before ``Ticket.begin``.

        For memory that is released explicitly. A signal handler may raise between the submission and the next
        statement, and then no variable has the ticket of a submitted transfer: store the ticket where it will be waited
        for, and begin it afterwards.
        """
        return self._prepare(Request(KINDS[kind], file, buffer, offset, nbytes), **options)

    def read_scattered(
        self,
        file: int,
        buffer: Buffer,
        offsets: Sequence[int],
        nbytes_each: int,
        **options: Unpack[TransferOptions],
    ) -> Ticket:
        """Read a piece of ``nbytes_each`` at each of ``offsets`` of ``file``, one after the other into ``buffer``.

        One ticket covers all pieces, so that many small reads cost less than with a ticket each. On a direct file
        ``nbytes_each`` is a multiple of 4096 as well; otherwise like ``read``.
        """
        return self.prepare_scattered("read", file, buffer, offsets, nbytes_each, **options).begin()

    def write_scattered(
        self,
        file: int,
        buffer: Buffer,
        offsets: Sequence[int],
        nbytes_each: int,
        **options: Unpack[TransferOptions],
    ) -> Ticket:
        """Write ``buffer``'s pieces of ``nbytes_each`` to ``offsets``; otherwise like ``read_scattered``.

        Pieces must not overlap in the file: the order of their writes is undefined.
        """
        return self.prepare_scattered("write", file, buffer, offsets, nbytes_each, **options).begin()

    def prepare_scattered(
        self,
        kind: Literal["read", "write"],
        file: int,
        buffer: Buffer,
        offsets: Sequence[int],
        nbytes_each: int,
        **options: Unpack[TransferOptions],
    ) -> Ticket:
        """A ``read_scattered`` or ``write_scattered`` that ``Ticket.begin`` submits; see ``prepare``."""
        pieces = tuple(offsets)
        first = pieces[0] if pieces else 0
        nbytes = len(pieces) * nbytes_each
        request = Request(KINDS[kind], file, buffer, first, nbytes)
        request.pieces = pieces
        return self._prepare(request, **options)

    def prepare_vector(
        self,
        kind: Literal["read", "write"],
        buffer: Buffer,
        pieces: Sequence[FilePiece],
        **options: Unpack[TransferOptions],
    ) -> Ticket:
        """A transfer of ``pieces``, which may lie in several files; ``Ticket.begin`` submits it.

        Without pieces it is done, and is not begun.

        One ticket covers all pieces: it is done when all are, and a failed piece is named by its file and offset. A
        file delays no piece of another one. Each piece is aligned as in ``read``.
        """
        if not pieces:
            request = Request(KINDS[kind], 0, None, 0, 0)
            request.result = 0
            return self._prepare(request, **options)
        vector = pieces if isinstance(pieces, Pieces) else Pieces(pieces)
        if vector.reach > buffer.nbytes:
            raise ValueError(f"cannot transfer pieces outside of a buffer of {buffer.nbytes} bytes: {pieces}")
        request = Request(KINDS[kind], vector[0].file, buffer, vector[0].offset, vector.nbytes)
        request.vector = vector
        return self._prepare(request, **options)

    def run(self, tasks: Sequence[Task]) -> None:
        """Run ``tasks``, whose transfers are prepared and not begun; see ``run_tasks``."""
        for task in tasks:
            self._check_own([*task.waits, *task.begins])
        run_tasks(self._transfers, tasks)

    def flush(self, file: int, *, after: Sequence[Ticket] = ()) -> Ticket:
        """fdatasync: covers the writes that are done when it is issued; pass writes under way in ``after``."""
        return self._prepare(Request(lib.AIO_FLUSH, file, None, 0, 0), after=after).begin()

    @property
    def verifies(self) -> bool:
        """Whether pages have checksums: the option ``verify``."""
        return "verify" in self.info.flags

    def checksums(self, file: int, first: int, count: int) -> bytes:
        """The CRC32C (uint32) of ``count`` pages of ``file`` from page ``first`` on; 0 where a page has none.

        Waits until no transfer is in flight. Needs ``verify``.
        """
        sums = ffi.new("uint32_t[]", count)
        self._move_checksums(lib.aio_get_checksums, file, first, count, sums)
        return bytes(ffi.buffer(sums))

    def set_checksums(self, file: int, first: int, sums: bytes) -> None:
        """Expect these ``checksums`` of pages that were written by another context; otherwise as ``checksums``."""
        self._move_checksums(
            lib.aio_set_checksums, file, first, len(sums) // 4, ffi.from_buffer("uint32_t[]", sums)
        )

    def _move_checksums(
        self, move: Callable[..., int], file: int, first: int, count: int, sums: object
    ) -> None:
        while (code := move(self._handle, file, first, count, sums)) == -errno.EBUSY:
            # Reads ahead, which no caller waits for yet.
            time.sleep(0.001)
        if code < 0:
            raise self._errors.refusal(-code, f"checksums of {count} pages of file {file}")

    def wait_any(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Ticket:
        """One of ``tickets`` that is done, the first if several are; its ``wait`` returns or raises its result.

        Raises NotDoneError after ``timeout`` seconds, ValueError if there are no tickets.
        """
        if not tickets:
            raise ValueError("wait_any needs at least one ticket")
        self._check_own(tickets)
        return tickets[self._transfers.wait_any([ticket._request for ticket in tickets], timeout)]

    def stats(self) -> list[FileStats]:
        """The counters of every file, in the order of their indices. Raises no transfer's error."""
        # Telemetry reads them regularly: a hang is logged also when no thread waits.
        self._transfers.warn_of_hangs()
        raw = ffi.new(_FILE_STATS)
        result = []
        for index, (name, direct) in sorted(self._files.items()):
            code = lib.aio_stats(self._handle, index, raw)
            if code < 0:
                raise self._errors.refusal(-code, f"stats of {name!r}", name)
            result.append(file_stats(name, direct, raw))
        return result

    def moved(self) -> list[tuple[int, int]]:
        """Bytes read and written so far, by file: what ``stats`` counts, for a fraction of its cost."""
        raw = ffi.new(_FILE_STATS)
        result = []
        for index, (name, _) in sorted(self._files.items()):
            if (code := lib.aio_stats(self._handle, index, raw)) < 0:
                raise self._errors.refusal(-code, f"stats of {name!r}", name)
            result.append((raw.kind[lib.AIO_READ].bytes, raw.kind[lib.AIO_WRITE].bytes))
        return result

    def latencies(self, file: int, kind: Literal["read", "write", "flush"]) -> LatencyHistogram:
        """The durations of the operations of one kind that ``stats`` counts, with the resolution for percentiles.

        Raises ValueError for a file that was not added.
        """
        counts, longest = ffi.new(_FINE_COUNTS), ffi.new("uint64_t *")
        code = lib.aio_latencies(self._handle, file, KINDS[kind], counts, longest)
        if code < 0:
            if code == -errno.EINVAL:
                raise ValueError(
                    f"latencies of {kind!r}, file {file}: no such file index; add_file returns it"
                )
            raise self._errors.refusal(-code, f"latencies of {kind!r}")
        return LatencyHistogram(tuple(ffi.unpack(counts, lib.AIO_FINE_BUCKETS)), longest[0])

    def start_recording(self) -> None:
        """Record every transfer that ends, until ``end_recording``."""
        self._transfers.start_recording()

    def end_recording(self) -> list[TransferRecord]:
        """Wait for all transfers; those that have ended since ``start_recording``, in the order of issue.

        Transfers that were never issued are left out. Raises no error of a transfer: its ticket does.
        """
        return self._transfers.end_recording()

    def close(self) -> None:
        """Cancel what the kernel does not have yet of all transfers, wait for the rest, end the threads. Results and
        statistics stay readable.

        Raises SwapError if a transfer failed and no caller waited for its ticket. A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        # Returns when no transfer is in flight: from here on buffers may be freed, and descriptors closed.
        lib.aio_close(self._handle)
        self._registered.clear()
        if os.getpid() != self._pid:
            return  # a child has no transfers; the parent reports the failures of its own
        self._transfers.raise_unreported()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except SwapError as unreported:
            if error is None:
                raise
            error.add_note(f"While closing: {unreported}")

    def __del__(self) -> None:
        if self._closed or os.getpid() != self._pid or self._owner.handle is None:
            return
        warnings.warn("AioContext was dropped without close()", ResourceWarning, source=self, stacklevel=2)
        # Before the owner of the context frees its memory.
        lib.aio_close(self._handle)

    def _prepare(
        self,
        request: Request,
        *,
        priority: int = 0,
        after: Sequence[Ticket] = (),
        names: tuple[str, ...] = (),
    ) -> Ticket:
        buffer, offset, nbytes = request.buffer, request.offset, request.nbytes
        if buffer is not None and (offset < 0 or not 0 <= nbytes <= buffer.nbytes) and not request.vector:
            raise ValueError(
                f"cannot transfer {nbytes} bytes at offset {offset} with a buffer of {buffer.nbytes}"
            )
        request.priority = priority
        request.names = names
        if after:
            self._check_own(after)
            request.after = tuple(ticket._request for ticket in after)
        return Ticket(self, self._transfers, request)

    def _check_own(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            if ticket._context is not self:
                raise ValueError(f"{ticket!r} belongs to another AioContext; use tickets of one context")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that a context injects into its own operations ``first .. first + count - 1`` of a kind, for tests.

    The operations are those of one file, or of any; they are counted from 1, and ``count=0`` has no end. An operation
    is a block of a request, or a continuation of a block; "register" is the registration of a buffer, which "any" does
    not cover. ``error`` is the errno of the failure, ``short`` the most bytes that the operation transfers (0: all),
    ``delay`` the seconds before it starts, ``rate`` the bytes per second of all its operations together (0: no limit).
    With ``moves_none`` they succeed without moving a byte.
    """

    kind: Literal["read", "write", "flush", "any", "register"] = "any"
    first: int = 1
    count: int = 1
    error: int = 0
    short: int = 0
    delay: float = 0.0
    file: int | None = None
    rate: int = 0
    moves_none: bool = False

    def as_c(self) -> dict[str, int]:
        """The fields of an ``aio_fault``."""
        return {
            "kind": KINDS[self.kind],
            "file": -1 if self.file is None else self.file,
            "error": self.error,
            "first": self.first,
            "count": self.count,
            "short_bytes": self.short,
            "delay_ns": round(self.delay * 1e9),
            "rate": self.rate,
            "moves_none": self.moves_none,
        }


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults to inject; the first that matches an operation applies.

    ``alignment`` is the block size of the device that direct files appear to be on, a power of two from 4096 to 65536:
    operations on other ranges fail with EINVAL. 0: the alignment of the real device.
    """

    faults: tuple[Fault, ...]
    alignment: int = 0


def _check_options(engine: str, block_size: int, queue_depth: int) -> None:
    if engine not in ENGINES:
        raise ConfigError(f"io.engine is {engine!r}; choose one of {', '.join(ENGINES)}")
    if block_size % ALIGNMENT or not ALIGNMENT <= block_size <= 1 << 30:
        raise ConfigError(f"io.block_size is {block_size}; choose a multiple of {ALIGNMENT} up to 1 GiB")
    if not 1 <= queue_depth <= 512:
        raise ConfigError(f"io.queue_depth is {queue_depth}; choose 1 .. 512")


def _open(engine: str, options: dict[str, int], fault: FaultPlan | None) -> object:
    planned = [each.as_c() for each in (fault.faults if fault else ())]
    name = ffi.new("char[]", engine.encode())
    faults = ffi.new("aio_fault[]", planned)
    raw = ffi.new("aio_options *", {**options, "engine": name, "n_faults": len(planned), "faults": faults})
    raw.alignment = fault.alignment if fault else 0
    out = ffi.new("aio_context **")
    code = lib.aio_open(out, raw)
    if code < 0:
        raise start_error(engine, -code)
    return out[0]


def _close_in_child() -> None:
    # A forked data worker must not keep the swap space alive: io_uring holds the registered files open.
    for context in list(_OPEN_CONTEXTS):
        lib.aio_close(context._handle)


os.register_at_fork(after_in_child=_close_in_child)
