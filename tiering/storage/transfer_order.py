"""The order of the transfers of an extent.

**Ordering.** ``O_DIRECT`` orders nothing: a write and a read of the same bytes that are in flight together may run in
either order. Each extent therefore keeps its transfers in flight, and a new transfer that conflicts (they overlap and
one of them writes) is submitted to run *after* the earlier ones. A failed write marks its range: until the range is
written again, reading it raises the error of the write instead of returning stale bytes.

**Signals.** A signal handler may raise between any two statements. So a transfer is stored in its extent before it is
submitted: ``settle`` then waits for every transfer that the kernel has, also if its submission raised. A stored
transfer that was never submitted is harmless, and the next transfer of the extent removes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tiering.errors import SwapError
from tiering.storage.tickets import Ticket

_Failure = tuple[int, int, SwapError]
"""The first byte of a range of an extent, its end, and the error of the write that did not replace it."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    ticket: Ticket
    start: int
    end: int
    writes: bool
    replaces: list[_Failure]  # failures that this write clears, if it was submitted

    def conflicts(self, start: int, end: int, writes: bool) -> bool:
        return self.start < end and start < self.end and (writes or self.writes)


class TransferOrder:
    """The transfers of one extent. The caller holds a lock, except for ``settle``."""

    def __init__(self) -> None:
        self._in_flight: list[_Transfer] = []
        self._failed: list[_Failure] = []

    def ordered(
        self, start: int, end: int, writes: bool, prepare: Callable[[Sequence[Ticket]], Ticket]
    ) -> OrderedTransfer:
        """The transfer of [start, end) that ``prepare`` makes, after the tickets that it gets.

        Raises the error of an earlier write that failed, if this transfer would read bytes that it did not replace.
        The caller keeps its lock until the transfer is submitted.
        """
        # First: the failure of a write that has ended must be known before a read of its range is let through.
        self._forget_ended()
        overlapping = [failure for failure in self._failed if failure[0] < end and start < failure[1]]
        if overlapping and not writes:
            raise overlapping[0][2].again()
        # A read after a write, a write after a read, and a write after a write. Two reads may run side by side.
        after = [each.ticket for each in self._in_flight if each.conflicts(start, end, writes)]
        return OrderedTransfer(self, _Transfer(prepare(after), start, end, writes, overlapping))

    @property
    def is_idle(self) -> bool:
        """Whether all transfers are over."""
        return all(each.ticket.done() for each in tuple(self._in_flight))

    def store(self, transfer: _Transfer) -> None:
        """Let later transfers come after this one, which is about to be submitted."""
        self._in_flight.append(transfer)
        if transfer.replaces:
            self._failed = list(_without(self._failed, transfer.start, transfer.end))

    def settle(self) -> None:
        """Wait for all transfers. A failed write is raised by the next read of its range."""
        # A copy: transfers that other threads begin meanwhile are not waited for.
        for transfer in tuple(self._in_flight):
            if transfer.ticket.has_begun:
                with contextlib.suppress(SwapError):
                    transfer.ticket.wait()

    def _forget_ended(self) -> None:
        """Remove the transfers that have ended; keep the failures of writes."""
        pending: list[_Transfer] = []
        failed = self._failed
        for transfer in self._in_flight:
            if not transfer.ticket.has_begun:
                # It was refused, or interrupted before its submission.
                failed = failed + transfer.replaces
            elif not transfer.ticket.done():
                pending.append(transfer)
            elif transfer.writes:
                try:
                    transfer.ticket.wait()
                except SwapError as error:
                    failed = [*failed, (transfer.start, transfer.end, error.again())]
        # In this order: after an interruption between the two, the same failures are found and stored once more.
        self._failed = failed
        self._in_flight = pending


@dataclass(frozen=True, slots=True)
class OrderedTransfer:
    """A transfer that comes after those that conflict with it. None comes after it before ``store``."""

    _order: TransferOrder
    _transfer: _Transfer

    @property
    def ticket(self) -> Ticket:
        return self._transfer.ticket

    def store(self) -> None:
        """Store it in its extent. The caller holds its lock until the transfer is submitted."""
        self._order.store(self._transfer)

    def begin(self) -> Ticket:
        """Submit it. The caller has held its lock since it was ordered."""
        # Before the submission: see Signals, above. If that fails, the failures that it replaces are restored.
        self.store()
        return self._transfer.ticket.begin()


def _without(ranges: list[_Failure], start: int, end: int) -> Iterator[_Failure]:
    """``ranges`` without [start, end)."""
    for first, last, error in ranges:
        if first < min(last, start):
            yield first, min(last, start), error
        if max(first, end) < last:
            yield max(first, end), last, error
