"""Tickets: one for each transfer, or for several as one, if a range of an extent lies on more than one path."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Generic, Self, TypedDict, TypeVar

from tiering.errors import SwapError
from tiering.storage.arena import Completion
from tiering.storage.request import KIND_NAMES, Request
from tiering.storage.transfers import Transfers

Part = TypeVar("Part", bound=Completion)


class TransferOptions(TypedDict, total=False):
    """Keywords of every transfer: its priority, the tickets it is ordered after, the tensors for the error message."""

    priority: int
    after: Sequence[Ticket]
    names: tuple[str, ...]


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
        """Cancel the transfer unless a part of it has started; whether it is cancelled: ``wait`` raises ECANCELED then.

        It is done when the transfers that it was ordered after are done. Transfers ordered after a cancelled read
        continue; those after a cancelled write fail, because they might read bytes that were never written.
        """
        return self._transfers.cancel(self._request)

    def __repr__(self) -> str:
        request = self._request
        state = f"result {request.result}"
        if request.result is None:
            state = "in flight" if request.id else "not begun"
        return f"<Ticket {KIND_NAMES[request.kind]} {self.nbytes} bytes at {request.offset}, {state}>"


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


class StripedTicket(AllOf[Ticket]):
    """One transfer over several paths; otherwise like a Ticket."""

    __slots__ = ("nbytes",)

    def __init__(self, parts: Sequence[Ticket]) -> None:
        super().__init__(parts)
        self.nbytes = sum(part.nbytes for part in parts)

    def cancel(self) -> bool:
        """Cancel the parts that have not started, from the last; whether there is one: ``wait`` raises ECANCELED then.
        The transfer is done when the other parts are."""
        # From the last one, because parts start from the first: where one has started, those before it probably have,
        # too.
        for part in reversed(self.parts):
            if not part.cancel():
                return part is not self.parts[-1]
        return bool(self.parts)


Transfer = Ticket | StripedTicket
