"""Parameters come and go as in zero3/passes/prefetch.py: in the order of their use, as far ahead as there is room."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tiering.errors import NotDoneError, SwapError
from tiering.placement.plan import Plan
from tiering.storage.arena import Arena, Lease
from tiering.storage.swap_space import StripedExtent, SwapSpace
from tiering.storage.tickets import Transfer

FETCH_PRIORITY = 1  # what compute waits for goes before write-back, and before what is read ahead of a step
FARTHEST = 64  # groups in a row that are in use or there: what comes behind can wait

Extents = Sequence[StripedExtent | None]
"""Where each of something lives on NVMe; None: it lives in memory."""


class Ended(Exception):  # noqa: N818 # no error: time is up, or no more may be written
    """What is replayed ends before its end."""


class Transfers:
    """Starts transfers and waits for them, as long as a turn may last; counts how long it has waited."""

    def __init__(self, space: SwapSpace, most: int | None) -> None:
        self._space = space
        self._most = most
        self.asked_to_write = 0
        self.full = False  # no more may be written
        self.until: float | None = None  # time.monotonic
        self.stalled = 0.0
        self.tell: Callable[[], None] = _nobody  # called now and then

    def check(self, to_write: int = 0) -> None:
        """Raise what ends the turn if its time is up, or it must not write so many bytes more."""
        if self.until is not None and time.monotonic() >= self.until:
            raise Ended
        if self._most is not None and self.asked_to_write + to_write > self._most:
            self.full = True
            raise Ended

    def read(
        self, extent: StripedExtent, lease: Lease, at: int, offset: int, nbytes: int, priority: int
    ) -> Transfer:
        return self._space.swap_in(extent, lease.part(at, nbytes), offset=offset, priority=priority)

    def write(self, extent: StripedExtent, lease: Lease, at: int, offset: int, nbytes: int) -> Transfer:
        self.asked_to_write += nbytes
        return self._space.swap_out(extent, lease.part(at, nbytes), offset=offset)

    def wait(self, transfer: Transfer) -> None:
        with self.stalling():
            try:
                transfer.wait(None if self.until is None else max(0.0, self.until - time.monotonic()))
            except NotDoneError:
                raise Ended from None
        self.tell()

    @contextmanager
    def stalling(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.stalled += time.monotonic() - began


def _nobody() -> None:
    """Nobody wants to know."""


def give_up(begun: Sequence[tuple[Lease, Sequence[Transfer]]]) -> None:
    """Free leases whose reads nobody needs any more: what was not begun is taken back, the rest waited for."""
    back = {read for _, reads in begun for read in reads if read.cancel()}
    for lease, reads in begun:
        for read in reads:
            try:
                read.wait()
            except SwapError:
                if read not in back:
                    raise
        lease.release()


@dataclass
class _Fetched:
    """A group that is there or on its way: its bytes, and the lease that they are read into."""

    nbytes: int
    lease: Lease | None
    read: Transfer | None


class Fetches:
    """Parameters that are not where they compute, read in the order of their use, as far ahead as there is room."""

    def __init__(
        self,
        plan: Plan,
        extents: Extents,
        passes: tuple[Sequence[int], Sequence[int]],
        transfers: Transfers,
    ) -> None:
        self._plan = plan
        self._groups = plan.workload.groups
        self._extents = extents
        forward, backward = ([group for group in each if self.moves(group)] for each in passes)
        self._order = [*forward, *backward]
        self._turns = len(forward)
        self._transfers = transfers
        # None: the device has memory of its own, of which bytes are counted.
        self._working = None if plan.workload.fetch_by_copy else Arena.map(plan.working_bytes, "working")
        self._left = plan.working_bytes
        self._window = Arena.map(plan.fetch_window_bytes, "fetch window")
        self._there: dict[int, _Fetched] = {}
        self._ahead: dict[int, int] = {}  # of these, those that are not in use: place in the order
        self._cursor = 0
        self.waited = self.waited_alone = 0  # for a group, and with no other on its way or there

    @property
    def arenas(self) -> tuple[Arena, ...]:
        return (self._window,) if self._working is None else (self._window, self._working)

    def moves(self, group: int) -> bool:
        return not self._plan.workload.computes_in_place(self._groups[group], self._plan.param_tiers[group])

    def begin(self, *, backward: bool) -> None:
        """A pass begins."""
        self._cursor = self._turns if backward else 0

    def acquire(self, group: int) -> None:
        """``group`` is used: wait for its bytes, while what comes next is read."""
        if not self.moves(group):
            return
        self._transfers.check()
        self._ahead.pop(group, None)
        self._cursor += 1
        while group not in self._there and not self._start(group, wait=not self._ahead):
            last, _ = self._ahead.popitem()
            self._drop([last])
        self.look_ahead()
        fetched = self._there[group]
        self.waited += fetched.read is not None
        self.waited_alone += fetched.read is not None and not self._ahead
        if fetched.read is not None:
            self._transfers.wait(fetched.read)
            fetched.read = None
            if self._working is None and fetched.lease is not None:  # it was copied to the device
                fetched.lease.release()
                fetched.lease = None
        self.look_ahead()

    def release(self, group: int) -> None:
        """``group`` is not in use any more."""
        if self.moves(group):
            self._drop([group])
            self.look_ahead()

    def look_ahead(self) -> None:
        """Start to read what is used next, as far as there is room."""
        passed = 0
        for place in range(self._cursor, len(self._order)):
            group = self._order[place]
            if passed == FARTHEST:
                return
            if group not in self._there:
                if not self._start(group, wait=False):
                    return
                self._ahead[group], passed = place, 0
            elif self._ahead.get(group) != place:
                if self._working is None and group not in self._ahead and self._extents[group] is not None:
                    return  # it passes the window once more: what comes later must not be in its way
                passed += 1

    def forget(self) -> None:
        """Drop what is there, in use or ahead."""
        give_up(
            [(each.lease, [each.read] if each.read else []) for each in self._there.values() if each.lease]
        )
        self._left = self._plan.working_bytes
        self._there.clear()
        self._ahead.clear()

    def _start(self, group: int, *, wait: bool) -> bool:
        nbytes, extent, lease = self._groups[group].param_bytes, self._extents[group], None
        if self._working is None:
            if self._left < nbytes:
                return False
            if extent is not None:
                lease = (self._window.lease if wait else self._window.try_lease)(extent.nbytes, "parameters")
                if lease is None:
                    return False
        else:
            lease = (
                self._working.lease(nbytes, "unsharded groups", alone=True)
                if wait
                else self._working.try_lease(nbytes, "unsharded groups")
            )
            if lease is None:
                return False
        read = None
        if extent is not None:
            assert lease is not None
            read = self._transfers.read(extent, lease, 0, 0, extent.nbytes, FETCH_PRIORITY)
        self._left -= nbytes
        self._there[group] = _Fetched(nbytes, lease, read)
        return True

    def _drop(self, groups: Sequence[int]) -> None:
        for group in groups:
            dropped = self._there.pop(group)
            self._left += dropped.nbytes
            if dropped.lease is not None and dropped.read is not None and not dropped.read.done():
                dropped.lease.retire(dropped.read)
            elif dropped.lease is not None:
                dropped.lease.release()
