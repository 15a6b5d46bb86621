"""Extents that lie on several paths: where their bytes are, and the order of their transfers.

**Ordering.** ``O_DIRECT`` orders nothing: a write and a read of the same bytes that are in flight together may run in
either order. Each extent therefore keeps its transfers in flight, and a new transfer that conflicts (they overlap and
one of them writes) is submitted to run *after* the earlier ones. A failed write marks its range: until the range is
written again, reading it raises the error of the write instead of returning stale bytes. Both concern places on disk:
where an extent has versions (versions.py), a write and a read of the same bytes may be in different places.

**Signals.** A signal handler may raise between any two statements. So a transfer is stored in its extent before it is
submitted: ``settle`` then waits for every transfer that the kernel has, also if its submission raised. A stored
transfer that was never submitted is harmless, and the next transfer of the extent removes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from tiering.errors import SwapError
from tiering.storage.request import FilePiece, Pieces
from tiering.storage.slab_file import Extent, SlabFile
from tiering.storage.striping import StripeMap
from tiering.storage.tickets import Ticket
from tiering.storage.versions import Kept, Ranges, Versions

MOST_RANGES = 64
"""Ranges of an extent whose pieces are kept."""
_Failure = tuple[int, int, SwapError]
"""The first byte of a range of an extent, its end, and the error of the write that did not replace it."""
_NO_VERSIONS = b""
_LOST = "; the bytes are lost: if they are parameters or optimizer state, load a checkpoint"


@dataclass(frozen=True)
class ExtentPart:
    """The part of an extent on one path."""

    slab: SlabFile
    extent: Extent


@dataclass(eq=False)
class StripedExtent:
    """``nbytes`` of swap space, a multiple of 4096, times its versions. ``names`` are the tensors."""

    nbytes: int
    names: tuple[str, ...]
    section: str
    parts: tuple[ExtentPart, ...]
    stripes: StripeMap
    order: TransferOrder = field(repr=False)
    _pieces: dict[tuple[int, int], Pieces] = field(default_factory=dict, repr=False)

    @property
    def kept(self) -> Collection[Kept]:
        """The purposes of ``SwapSpace.keep`` that concern it."""
        return () if self.order.versions is None else self.order.versions.kept

    def move(self, parts: Sequence[ExtentPart]) -> None:
        """Lie at ``parts`` from now on, where other content is. No transfer of it is in flight."""
        self.parts, self.stripes = tuple(parts), StripeMap([part.extent.nbytes for part in parts])
        self.order = TransferOrder(Versions(self.nbytes, self.kept) if self.kept else None)
        self._pieces.clear()

    def pieces(self, ranges: Ranges) -> Pieces:
        """The pieces of a transfer of ``ranges``, one behind the other."""
        if len(ranges) == 1:
            return self._pieces_of(*ranges[0])
        at, pieces = 0, list[FilePiece]()
        for start, end in ranges:
            pieces += (piece._replace(at=at + piece.at) for piece in self._pieces_of(start, end))
            at += end - start
        return Pieces(pieces)

    def _pieces_of(self, start: int, end: int) -> Pieces:
        # Every step moves the same ranges.
        known = self._pieces.get((start, end))
        if known is None:
            if len(self._pieces) >= MOST_RANGES:
                self._pieces.clear()
            known = self._pieces[start, end] = Pieces(self._cut(start, end - start))
        return known

    def _cut(self, offset: int, nbytes: int) -> Iterator[FilePiece]:
        for piece in self.stripes.pieces(offset, nbytes):
            slab, extent = self.parts[piece.path].slab, self.parts[piece.path].extent
            yield FilePiece(slab.file, piece.start - offset, extent.offset + piece.offset, piece.nbytes)

    def place_of(self, offset: int) -> str:
        """The place on disk of the byte at ``offset``, for messages."""
        ((slab, start, _),) = self.places(offset, offset + 1)
        return f"byte {start} of the swap file in {slab.directory}"

    def places(self, start: int, end: int) -> Iterator[tuple[SlabFile, int, int]]:
        """Where the bytes [start, end) are now, in their order: the slab, the offset in its file, and the bytes."""
        for first, last in self.order.ranges(start, end):
            for piece in self.stripes.pieces(first, last - first):
                part = self.parts[piece.path]
                yield part.slab, part.extent.offset + piece.offset, piece.nbytes


class TransferOrder:
    """The transfers of one extent, which may have ``versions``. The caller holds a lock, except for ``settle``."""

    def __init__(self, versions: Versions | None = None) -> None:
        self.versions = versions
        self._in_flight: list[OrderedTransfer] = []
        self._failed: list[_Failure] = []

    def place(
        self, start: int, end: int, writes: bool, kept: Kept | None = None
    ) -> tuple[Ranges, list[Ticket]]:
        """Where a transfer of [start, end) is in the extent, and the tickets that it has to come after.

        A read is of the current content, or of what is ``kept`` for a purpose.
        Raises the error of an earlier write that failed, if this transfer would read bytes that it did not replace.
        The caller keeps its lock until the transfer is submitted.
        """
        # First: the failure of a write that has ended must be known before a read of its range is let through.
        self._forget_ended()
        ranges: Ranges = ((start, end),)
        if self.versions is not None:
            ranges = self.versions.ranges(start, end, writes=writes, kept=kept)
        if not writes:
            for first, last, error in self._failed:
                if _overlap(ranges, ((first, last),)):
                    raise error.again(_LOST)
        # A read after a write, a write after a read, and a write after a write. Two reads may run side by side.
        return ranges, [
            each.ticket
            for each in self._in_flight
            if (writes or each.writes) and _overlap(ranges, each.ranges)
        ]

    def ranges(self, start: int, end: int) -> Ranges:
        """Where the bytes [start, end) are in the extent."""
        return ((start, end),) if self.versions is None else self.versions.ranges(start, end, writes=False)

    def keep(self, purpose: Kept) -> None:
        """Keep the current content for ``purpose`` until the next ``keep``: see versions.py."""
        assert self.versions is not None
        self._forget_ended()
        self.versions.keep(purpose)

    def go_back(self, start: int, end: int) -> None:
        """Make the content of [start, end) kept for steps the current one. Writes in flight do not change that."""
        assert self.versions is not None
        self._forget_ended()
        self.versions.go_back(start, end)

    def check_written(self, start: int, end: int) -> None:
        """Wait for the writes of the current content of [start, end); raises the error of one that failed."""
        self.settle()
        self._forget_ended()
        for first, last, error in self._failed:
            if _overlap(self.ranges(start, end), ((first, last),)):
                raise error.again()

    @property
    def is_idle(self) -> bool:
        """Whether all transfers are over."""
        return all(each.ticket.done() for each in tuple(self._in_flight))

    def store(self, transfer: OrderedTransfer) -> None:
        """Let later transfers come after this one, which is about to be submitted."""
        if transfer.writes and self.versions is not None:
            transfer.replaced = self.versions.current(transfer.start, transfer.end)
        if transfer.writes and self._failed:
            transfer.replaces = [each for each in self._failed if _overlap(transfer.ranges, (each[:2],))]
        self._in_flight.append(transfer)
        for start, end in transfer.ranges if transfer.replaces else ():
            self._failed = list(_without(self._failed, start, end))
        if transfer.replaced and self.versions is not None:
            self.versions.written(transfer.start, transfer.end)

    def settle(self) -> None:
        """Wait for all transfers. A failed write is raised by the next read of its range."""
        # A copy: transfers that other threads begin meanwhile are not waited for.
        for transfer in tuple(self._in_flight):
            if transfer.ticket.has_begun:
                with contextlib.suppress(SwapError):
                    transfer.ticket.wait()

    def _forget_ended(self) -> None:
        """Remove the transfers that have ended; keep the failures of writes."""
        pending: list[OrderedTransfer] = []
        failed = self._failed
        for transfer in self._in_flight:
            if not transfer.ticket.has_begun:
                # It was refused, or interrupted before its submission.
                failed = [*failed, *transfer.replaces]
                if transfer.replaced and self.versions is not None:
                    self.versions.restore(transfer.start, transfer.replaced)
            elif not transfer.ticket.done():
                pending.append(transfer)
            elif transfer.writes:
                try:
                    transfer.ticket.wait()
                except SwapError as error:
                    failed = failed + [(start, end, error.again()) for start, end in transfer.ranges]
        # In this order: after an interruption between the two, the same failures are found and stored once more.
        self._failed = failed
        self._in_flight = pending


@dataclass(eq=False, slots=True)
class OrderedTransfer:
    """A transfer of [start, end), which is at ``ranges``. None comes after it before ``store``."""

    order: TransferOrder
    ticket: Ticket
    start: int
    end: int
    ranges: Ranges
    writes: bool
    replaces: Sequence[_Failure] = ()  # failures that this write clears, if it was submitted
    replaced: bytes = _NO_VERSIONS  # of a write, if there are versions: those of its pages before

    def store(self) -> None:
        """Store it in its extent. The caller holds its lock until the transfer is submitted."""
        self.order.store(self)

    def begin(self) -> Ticket:
        """Submit it. The caller has held its lock since it was ordered."""
        # Before the submission: see Signals, above. If that fails, the failures that it replaces are restored.
        self.store()
        return self.ticket.begin()


def _overlap(ranges: Ranges, others: Ranges) -> bool:
    """Whether a byte is in both."""
    for start, end in ranges:
        for first, last in others:
            if first < end and start < last:
                return True
    return False


def _without(ranges: list[_Failure], start: int, end: int) -> Iterator[_Failure]:
    """``ranges`` without [start, end)."""
    for first, last, error in ranges:
        if first < min(last, start):
            yield first, min(last, start), error
        if max(first, end) < last:
            yield max(first, end), last, error
