"""Tickets: one for each transfer, also over several files; and several completions as one.

`Transfers` submits the requests of a context, waits for them, and raises the failure of each once: by the ticket of the
transfer, or, if the ticket was dropped, by a later transfer of the same thread, at the latest by the ``close`` of the
context.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Self, TypeVar

from tiering._aio import ffi, lib
from tiering.errors import NotDoneError, SwapError
from tiering.storage.aio_errors import AioErrors
from tiering.storage.io_stats import errno_text
from tiering.storage.recording import Recording, TransferRecord
from tiering.storage.request import (
    FEW_BEGUN,
    KIND_NAMES,
    Completion,
    ContextHandle,
    FailedTicket,
    Hangs,
    Request,
    ThreadRequests,
)

log = logging.getLogger(__name__)

_RESULT = ffi.typeof("aio_result *")
_TICKETS = ffi.typeof("int64_t[]")

# A wait returns to the interpreter this often, so that Ctrl-C is handled; in other threads than the main one, where it
# is not handled, so that hung operations are logged.
SLICE_NS = 100_000_000
_OTHER_THREADS_SLICE_NS = 10 * SLICE_NS

Part = TypeVar("Part", bound=Completion)


class Ticket:
    """One transfer. Any thread may use it, any number of times: its result does not change.

    It may be dropped: the buffer stays alive until the transfer is over, and a failure is then raised by a
    later read, write or flush of the thread that began it, at the latest by ``close``.
    """

    # No __del__: the interpreter discards an exception that a signal handler raises in one.
    __slots__ = ("__weakref__", "_context", "_request", "_transfers")

    def __init__(self, context: object, transfers: Transfers, request: Request) -> None:
        # A context without references is closed, which cancels its transfers: the ticket keeps it open.
        self._context = context
        self._transfers = transfers
        self._request = request
        # Weak: whether the caller has dropped the ticket decides which call raises its failure.
        request.holder = weakref.ref(self)

    def begin(self) -> Self:
        """Submit a prepared transfer, once. Raises as ``AioContext.read``: then it is done, and no byte was moved.

        A signal handler may raise an exception before or after the submission: ``has_begun`` distinguishes them.
        """
        self._transfers.begin(self._request)
        return self

    @property
    def has_begun(self) -> bool:
        """Whether the transfer was submitted: its memory is in use until it is done."""
        return bool(self._request.ticket[0])

    @property
    def nbytes(self) -> int:
        """Bytes to transfer."""
        return self._request.nbytes

    def wait(self, timeout: float | None = None) -> int:
        """Wait, at most ``timeout`` seconds, and return the bytes moved, which are ``nbytes``.

        Raises SwapError if the transfer failed, NotDoneError (a TimeoutError) if it is not over yet.
        """
        request = self._request
        result = request.result
        if result is None:
            result = self._transfers.wait(request, timeout)
        if result < 0:
            # First: whatever happens to this exception, ``close`` does not raise it again.
            self._transfers.mark_reported(request)
            raise self._transfers.failure(request, -result)
        request.is_reported = True
        return result

    def done(self) -> bool:
        """Whether ``wait`` returns or raises at once."""
        request = self._request
        if request.result is not None:
            return True
        return bool(request.ticket[0]) and self._transfers.collect(request, 0) is not None

    def cancel(self) -> bool:
        """Cancel what the kernel does not have yet; whether there was any: ``wait`` raises ECANCELED then.

        The memory is in use until it is done: when its blocks in flight have ended, and the transfers that it was
        ordered after are done. Transfers ordered after a cancelled read continue; those after a cancelled write fail,
        because they might read bytes that were not written.
        """
        return self._transfers.cancel(self._request)

    def __repr__(self) -> str:
        request = self._request
        state = f"result {request.result}"
        if request.result is None:
            state = "in flight" if request.id else "not begun"
        return f"<Ticket {KIND_NAMES[request.kind]} {self.nbytes} bytes at {request.offset}, {state}>"


def _slice_ns(remaining: float) -> int:
    """The duration of one wait in C, of the ``remaining`` seconds."""
    is_main = threading.get_ident() == threading.main_thread().ident
    return int(max(0.0, min(remaining * 1e9, SLICE_NS if is_main else _OTHER_THREADS_SLICE_NS)))


class AllOf(Generic[Part]):
    """Several completions as one, for a lease that more than one transfer uses."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)

    def done(self) -> bool:
        """True once every part is over."""
        return all(part.done() for part in self.parts)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all parts, then raise the first error: the memory is in use until then.

        Raises NotDoneError after ``timeout`` seconds in all, also if a part has failed: another one is under way.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        total, error = 0, None
        for part in self.parts:
            try:
                total += part.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            # Go on: the other parts still use the memory, which the caller releases after this.
            except SwapError as failed:
                error = error or failed
        # Only after the last part.
        if error is not None:
            raise error
        return total


class Abandoned(AllOf[Ticket]):
    """Reads whose bytes nobody needs, for the lease that they still fill. They are canceled, which is no error."""

    __slots__ = ()

    def __init__(self, *reads: Ticket) -> None:
        super().__init__(reads)
        for read in reads:
            read.cancel()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all reads; otherwise like AllOf."""
        try:
            return super().wait(timeout)
        except SwapError as error:
            if error.errno != errno.ECANCELED:
                raise
            return 0


def wait_any(completions: Sequence[Completion], timeout: float) -> None:
    """Wait until a ticket among ``completions`` is done, at most ``timeout`` seconds; then raises NotDoneError.

    If a part of several completions as one is done, it is not waited for again. Completions without tickets, and
    tickets of another context than the first, do not end the wait.
    """
    tickets = [ticket for completion in completions for ticket in _open_tickets(completion)]
    if tickets:
        transfers = tickets[0]._transfers
        transfers.wait_any([each._request for each in tickets if each._transfers is transfers], timeout)
    elif not any(completion.done() for completion in completions):
        completions[0].wait(timeout)


def _open_tickets(completion: Completion) -> Iterator[Ticket]:
    if isinstance(completion, Ticket):
        if completion.has_begun and not completion.done():
            yield completion
    elif isinstance(completion, AllOf):
        for part in completion.parts:
            yield from _open_tickets(part)


class Transfers:
    """The transfers of the context ``owner``, whose open files are ``files``: name, and whether it is direct.

    Any thread may call any method.
    """

    def __init__(self, owner: ContextHandle, errors: AioErrors, files: dict[int, tuple[str, bool]]) -> None:
        self._owner = owner
        self.handle = self._handle = owner.handle
        self._errors = errors
        self._files = files
        # Requests that are submitted and whose result no caller has.
        self._live: set[Request] = set()
        self._unchecked = ThreadRequests()
        self._recording: Recording | None = None
        self._hangs = Hangs(owner.handle)
        self._read_again: set[int] = set()  # files, of which one block was

    def begin(self, request: Request) -> None:
        """Submit ``request``. Raises SwapError if it is refused, or if a dropped ticket of this thread has failed."""
        assert not request.id and request.result is None, "a transfer is begun once"
        if self._recording is not None:
            request.submitted = time.monotonic_ns()
        # Before the submission: an interrupt right after it must not free memory that is being transferred.
        self._live.add(request)
        try:
            unchecked = self._unchecked
            if len(unchecked.requests) >= unchecked.limit:
                self._raise_dropped(unchecked)
            code = self._submit(request)
            if code < 0:
                raise self._errors.refused(request, -code, request.priority)
            unchecked.requests.append(request)
        finally:
            if not request.id:  # refused, or interrupted before
                self._live.discard(request)
                request.result = 0

    def _submit(self, request: Request) -> int:
        kind, file, data, pieces = request.kind, request.file, request.data, request.pieces
        earlier = [before.id for before in request.after] if request.after else ffi.NULL
        n_earlier, priority, ticket = len(request.after), request.priority, request.ticket
        try:
            if request.vector:
                array, n = request.vector.array, len(request.vector)
                code: int = lib.aio_submit_vector(
                    self._handle, kind, data, array, n, priority, earlier, n_earlier, ticket
                )
            elif pieces:
                n, each = len(pieces), request.nbytes // len(pieces)
                code = lib.aio_submit_scattered(
                    self._handle, kind, file, data, pieces, n, each, priority, earlier, n_earlier, ticket
                )
            else:
                offset, nbytes = request.offset, request.nbytes
                code = lib.aio_submit(
                    self._handle, kind, file, data, offset, nbytes, priority, earlier, n_earlier, ticket
                )
        except OverflowError:  # a number exceeds the type of C
            places = f"offsets {min(pieces)} .. {max(pieces)}" if pieces else f"offset {request.offset}"
            raise ValueError(
                f"cannot transfer {request.nbytes} bytes at {places} with priority {priority}: 64 bits do not hold it"
            ) from None
        return code

    def keep(self, requests: Sequence[Request]) -> None:
        """Keep requests that C will submit in a run of tasks, and their memory."""
        self._raise_dropped(self._unchecked)
        self._live.update(requests)

    def forget_unbegun(self, requests: Sequence[Request]) -> None:
        """The run has ended: those of its requests that it did not submit are done, and moved no byte."""
        for request in requests:
            if request.id:
                self._unchecked.requests.append(request)
            else:
                self._live.discard(request)
                request.result = 0

    def refused(self, request: Request, code: int) -> Exception:
        """The error of a request that C has refused."""
        return self._errors.refused(request, code, request.priority)

    def collect(self, request: Request, timeout_ns: int) -> int | None:
        """The result, or None after the timeout. With the result C forgets a success, and the buffer is released."""
        result = ffi.new(_RESULT)
        ticket = request.ticket[0]
        code = lib.aio_wait(self._handle, ticket, timeout_ns, result)
        if code == -errno.ETIMEDOUT:
            return None
        if code == 0:
            recording = self._recording
            # Before the release, with which C forgets them.
            records = recording.records_of(request, result) if recording is not None else []
            if result.bytes < 0:
                request.failed_at, request.failed_file = result.offset, result.file
                # C forgets the ticket when no request can be ordered after it any more. Exactly one thread makes the
                # FailedTicket that releases it: the first one whose claim is stored.
                claim = object()
                first = request.__dict__.setdefault("claim", claim) is claim
                if first:
                    request.failed_ticket = FailedTicket(self._owner, ticket)
                request.result = result.bytes
            else:
                self._succeed(request)
                # -ESTALE: another thread has just released it.
                first = lib.aio_release(self._handle, ticket) == 0
            # C has ended with this memory, whose owner may reuse or unmap it now.
            request.buffer = None
            if first and result.passed and result.bytes >= 0:
                self._warn_of_read_again(request, -result.passed)
            if first and recording is not None:
                recording.add(records)
        elif code != -errno.ESTALE:
            raise self._errors.refused(request, -code, 0)
        return request.result

    def _succeed(self, request: Request) -> None:
        """Store the result of a success. Before its release: who finds the ticket released reads the result here."""
        request.after = ()
        request.result = request.nbytes
        self._live.discard(request)  # a failure stays until a caller has it

    def _collect_succeeded(self, requests: Iterable[Request]) -> None:
        """``collect`` the requests that have succeeded, in two calls for all."""
        pending = [request for request in requests if request.result is None]
        # Recorded ones are collected one by one.
        if not pending or self._recording is not None:
            return
        tickets = ffi.new(_TICKETS, [request.id for request in pending])
        if (code := lib.aio_succeeded(self._handle, tickets, len(pending))) < 0:
            raise self._errors.refusal(-code, "the collection of results")
        for request, succeeded in zip(pending, ffi.unpack(tickets, len(pending)), strict=True):
            if succeeded:
                self._succeed(request)
                request.buffer = None
        lib.aio_release_all(self._handle, tickets, len(pending))

    def _warn_of_read_again(self, request: Request, code: int) -> None:
        # The first of a file; the counters have all.
        level = logging.INFO if request.file in self._read_again else logging.WARNING
        self._read_again.add(request.file)
        log.log(
            level,
            "the %s had to be tried again, and succeeded, after %s: see dmesg and the drive's SMART log",
            self._errors.describe(request),
            errno_text(code),
        )

    def wait(self, request: Request, timeout: float | None) -> int:
        """The result of ``request``: bytes, or a negative errno. Raises NotDoneError after ``timeout`` seconds."""
        if not request.id:  # nothing is under way
            return 0
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            remaining = deadline - time.monotonic()
            result = self.collect(request, _slice_ns(remaining))
            if result is not None:
                return result
            self.warn_of_hangs()
            if remaining <= 0:
                raise NotDoneError(f"{self._errors.describe(request)} is not done after {timeout} s")

    def wait_any(self, requests: Sequence[Request], timeout: float | None) -> int:
        """The index of a request that is done, the first if several are. Raises NotDoneError after ``timeout`` s."""
        ids = ffi.new("int64_t[]", [request.id for request in requests])
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            # Before the call: C has forgotten the tickets whose success a thread has collected.
            for index, request in enumerate(requests):
                if request.result is not None:
                    return index
            remaining = deadline - time.monotonic()
            place: int = lib.aio_wait_any(self._handle, ids, len(requests), _slice_ns(remaining))
            if place >= 0:
                return place
            # ESTALE: another thread has just collected one of them.
            if place not in (-errno.ETIMEDOUT, -errno.ESTALE):
                raise self._errors.refusal(-place, "wait_any")
            self.warn_of_hangs()
            if remaining <= 0:
                raise NotDoneError(f"none of {len(requests)} transfers is done after {timeout} s")

    def warn_of_hangs(self) -> None:
        """Log the oldest operation in flight of each file when it is old. Waits call it, and whoever reads counters."""
        for file, ticket, age in self._hangs.look(self._files):
            # A copy: other threads change the set.
            for request in [each for each in list(self._live) if each.id == ticket]:
                log.warning(
                    "the %s is not done, because an operation in %s has been in flight for %.0f s: the drive, or the"
                    " network behind it, may hang; see dmesg",
                    self._errors.describe(request),
                    self._files[file][0],
                    age,
                )

    def cancel(self, request: Request) -> bool:
        """See ``Ticket.cancel``."""
        if not request.id:
            return False
        code = lib.aio_cancel(self._handle, request.id)
        if code in (-errno.EBUSY, -errno.EALREADY, -errno.ESTALE):
            return False
        if code < 0:
            raise self._errors.refused(request, -code, 0)
        request.canceled = True
        return True

    def _raise_dropped(self, unchecked: ThreadRequests) -> None:
        """Raise the first failure of a ticket that this thread has dropped; forget the requests that are over."""
        self._collect_succeeded(unchecked.requests)
        pending: list[Request] = []
        failed = None
        for request in unchecked.requests:
            dropped = request.holder() is None
            if dropped and request.result is None:
                self.collect(request, 0)
            result = request.result
            if result is not None and (result >= 0 or request.is_reported):
                continue
            if dropped and result is not None and failed is None:
                failed = request
            else:
                pending.append(request)  # under way, or its holder may wait for it, or it is raised next time
        # Before the exception below, which must be raised once: the failed request is no longer in the list.
        unchecked.requests, unchecked.limit = pending, FEW_BEGUN + 2 * len(pending)
        if failed is not None:
            self._raise_unreported(failed)

    def _raise_unreported(self, request: Request) -> None:
        """Raise a failure that no caller has. A cancelled request raises nothing: its cause is raised instead."""
        result = request.result
        if result is not None and result < 0 and not request.is_reported:
            self.mark_reported(request)
            if -result != errno.ECANCELED:
                raise self.failure(request, -result)

    def mark_reported(self, request: Request) -> None:
        """The caller gets the failure of ``request``; ``close`` does not raise it again."""
        request.is_reported = True
        self._live.discard(request)

    def failure(self, request: Request, code: int) -> SwapError:
        """The error of ``request``, which failed with the errno ``code``."""
        cause = self._cause(request) if code == errno.ECANCELED else None
        return self._errors.failed(request, code, cause)

    def _cause(self, request: Request) -> SwapError | None:
        """The failure that cancelled ``request``, if it was ordered after one."""
        suspects = list(request.after)
        visited = set(suspects)
        while suspects:
            earlier = suspects.pop()
            if earlier.result is None:
                self.collect(earlier, 0)
            if earlier.canceled:
                return self.failure(earlier, errno.ECANCELED)
            if earlier.result == -errno.ECANCELED:
                suspects.extend(set(earlier.after) - visited)
                visited.update(earlier.after)
            elif earlier.result is not None and earlier.result < 0 and not request.only_waits_for(earlier):
                return self.failure(earlier, -earlier.result)
        return None

    @property
    def is_recording(self) -> bool:
        """Whether transfers are recorded, with the times of their submissions."""
        return self._recording is not None

    def start_recording(self) -> None:
        """See ``AioContext.start_recording``."""
        self._recording = Recording(self._handle, self._files)

    def end_recording(self) -> list[TransferRecord]:
        """See ``AioContext.end_recording``."""
        try:
            # A copy: each wait removes its request from the set.
            for request in list(self._live):
                if request.id and request.result is None:
                    self.wait(request, None)
        finally:
            recording, self._recording = self._recording, None
        return [] if recording is None else recording.in_order()

    def raise_unreported(self) -> None:
        """After the context is closed: raise the first failure that no caller has."""
        unreported = sorted(self._live, key=lambda request: request.id)
        # First collect all of them, which releases their buffers: the next loop ends with the first failure.
        for request in unreported:
            if request.result is None and request.id:
                self.collect(request, 0)
        for request in unreported:
            self._raise_unreported(request)
