"""The fetches of parameters in a replayed step, by the policy of the engine (tiering/storage/read_ahead.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tiering.errors import NotDoneError, SwapError
from tiering.placement.plan import Plan
from tiering.storage.arena import Arena, Lease
from tiering.storage.read_ahead import FETCH_PRIORITY, FetchAhead
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.swap_space import SwapSpace
from tiering.storage.tickets import Abandoned, Ticket

Extents = Sequence[StripedExtent | None]
"""The extent of each group or tile; None: its bytes are in memory."""


class Ended(Exception):  # noqa: N818 # not an error
    """A turn ends early: its time is over, or the limit of written bytes is reached."""


class Transfers:
    """Starts transfers, waits for them until the deadline of the turn, and measures the time of waiting."""

    def __init__(self, space: SwapSpace, write_limit: int | None) -> None:
        self._space = space
        self._write_limit = write_limit  # bytes
        self.requested_writes = 0  # bytes
        self.full = False  # the limit is reached
        self.deadline: float | None = None  # time.monotonic
        self.stalled = 0.0  # seconds
        self.report: Callable[[], None] = _ignore  # called from time to time, to show progress

    def check(self, write_bytes: int = 0) -> None:
        """Raise Ended if the turn's time is over, or ``write_bytes`` more would pass the limit."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise Ended
        if self._write_limit is not None and self.requested_writes + write_bytes > self._write_limit:
            self.full = True
            raise Ended

    def read(
        self, extent: StripedExtent, lease: Lease, at: int, offset: int, nbytes: int, priority: int
    ) -> Ticket:
        return self._space.swap_in(extent, lease.part(at, nbytes), offset=offset, priority=priority)

    def write(self, extent: StripedExtent, lease: Lease, at: int, offset: int, nbytes: int) -> Ticket:
        self.requested_writes += nbytes
        return self._space.swap_out(extent, lease.part(at, nbytes), offset=offset)

    def wait(self, transfer: Ticket) -> None:
        """Wait for ``transfer``; raises Ended at the deadline."""
        with self.stalling():
            try:
                transfer.wait(None if self.deadline is None else max(0.0, self.deadline - time.monotonic()))
            except NotDoneError:
                raise Ended from None
        self.report()

    @contextmanager
    def stalling(self) -> Iterator[None]:
        """A block in which compute waits."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.stalled += time.monotonic() - start


def _ignore() -> None:
    """Show no progress."""


def cancel_reads(reads: Sequence[Ticket]) -> None:
    """Cancel reads whose bytes are not needed any more; wait for those that had started."""
    cancelled = {read for read in reads if read.cancel()}
    for read in reads:
        try:
            read.wait()
        except SwapError:
            if read not in cancelled:
                raise


@dataclass
class _Fetched:
    """A group in its place or on its way there: its bytes, and the lease that they are read into."""

    nbytes: int
    lease: Lease | None
    read: Ticket | None


class Fetches:
    """Fetches the parameters that are not where they compute: the `Fetcher` of the replay."""

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
        self._backward_start = len(forward)
        self._transfers = transfers
        # None: the device has its own memory, of which only the number of free bytes is replayed.
        self._working = None if plan.workload.fetch_by_copy else Arena.map(plan.working_bytes, "working")
        self._free_bytes = plan.working_bytes
        self._window = Arena.map(plan.fetch_window_bytes, "fetch window")
        self._fetched: dict[int, _Fetched] = {}
        self._ahead = FetchAhead[int](self)
        self.waits = self.lone_waits = 0  # for a group, and of these without any group ahead

    @property
    def arenas(self) -> tuple[Arena, ...]:
        return (self._window,) if self._working is None else (self._window, self._working)

    def moves(self, group: int) -> bool:
        """Whether the parameters of ``group`` are fetched for their use."""
        return not self._plan.workload.computes_in_place(self._groups[group], self._plan.param_tiers[group])

    def begin(self, *, backward: bool) -> None:
        """A pass begins."""
        self._ahead.follow(self._order, self._backward_start if backward else 0)

    def acquire(self, group: int) -> None:
        """``group`` is used: wait for its bytes, while the next groups are read."""
        if not self.moves(group):
            return
        self._transfers.check()
        self._ahead.advance(group)
        self._ahead.use(group)
        self._ahead.look_ahead()
        fetched = self._fetched[group]
        if fetched.read is not None:
            self.waits += 1
            self.lone_waits += not self._ahead
            self._transfers.wait(fetched.read)
            fetched.read = None
            if self._working is None and fetched.lease is not None:  # the bytes were copied to the device
                fetched.lease.release()
                fetched.lease = None
        self._ahead.look_ahead()

    def release(self, group: int) -> None:
        """``group`` is not in use any more."""
        if not self.moves(group):
            return
        stays = self._working is None and not self.reads_through_window(group)
        if not (stays and self._ahead.keep(group)):
            self.drop(group)
        self._ahead.look_ahead()

    def look_ahead(self) -> None:
        """Start to read the next groups, as far as there is room."""
        self._ahead.look_ahead()

    def forget(self) -> None:
        """Drop all groups, in use or ahead."""
        cancel_reads([each.read for each in self._fetched.values() if each.read])
        for each in self._fetched.values():
            if each.lease is not None:
                each.lease.release()
        self._free_bytes = self._plan.working_bytes
        self._fetched.clear()
        self._ahead = FetchAhead[int](self)
        self.begin(backward=False)

    def is_fetched(self, group: int) -> bool:
        return group in self._fetched

    def fetch_ahead(self, group: int) -> bool:
        return self.fetch(group, wait=False)

    def fetch(self, group: int, *, wait: bool) -> bool:
        nbytes, extent, lease = self._groups[group].param_bytes, self._extents[group], None
        if self._working is None:
            if self._free_bytes < nbytes:
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
        self._free_bytes -= nbytes
        self._fetched[group] = _Fetched(nbytes, lease, read)
        return True

    def reads_through_window(self, group: int) -> bool:
        return self._working is None and self._extents[group] is not None

    def drop(self, group: int) -> None:
        dropped = self._fetched.pop(group)
        self._free_bytes += dropped.nbytes
        if dropped.lease is not None and dropped.read is not None and not dropped.read.done():
            dropped.lease.retire(Abandoned(dropped.read))  # the read still fills the lease
        elif dropped.lease is not None:
            dropped.lease.release()
