"""Ranges of a home, read one after the other, a few of them ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

from torch import Tensor

from tiering.storage.arena import PAGE, Arena, Lease, round_up
from tiering.storage.read_only import Loading
from tiering.storage.tickets import Ticket
from zero3.device.home import Home
from zero3.device.storages import as_tensor, content_of
from zero3.device.tiers import Tiers
from zero3.params.flat_storage import retire_read

AHEAD = 2
"""Ranges that are being read while one is used."""


def ranges(tiers: Tiers, home: Home, offset: int, nbytes: int, each: int) -> Generator[Tensor]:
    """Bytes [offset, offset + nbytes) of ``home`` in host memory (uint8), at most ``each`` of them at a time.

    A range is valid until the next one is requested. Ranges from NVMe pass through staging, end at multiples of 4096
    and may be shorter; close the iterator if it is not used to its end.
    """
    end = offset + nbytes
    if home.files is not None:
        yield from _ranges_of_files(tiers, home, offset, end, each)
        return
    if home.tensor is not None:
        for start in range(offset, end, each):
            yield home.tensor[start : min(start + each, end)].cpu()
        return
    first_page = offset // PAGE * PAGE
    with tiers.read_windows(AHEAD + 1, min(each, end - first_page)) as (windows, length):
        step = max(PAGE, min(each, length) // PAGE * PAGE)
        starts = deque(range(first_page, end, step))
        under_way: deque[tuple[int, Lease, Ticket]] = deque()
        try:
            while starts or under_way:
                while starts and len(under_way) <= AHEAD:
                    size = min(step, round_up(end) - starts[0])
                    # Ahead, it takes free room only: a wait for the room of the range in use would not end.
                    read = _begin(tiers, windows, home, starts[0], size, ahead=bool(under_way))
                    if read is None:  # no room to read ahead
                        break
                    under_way.append((starts.popleft(), *read))
                start, lease, ticket = under_way[0]
                ticket.wait()
                first, last = max(start, offset), min(start + lease.nbytes, end)
                yield as_tensor(lease)[first - start : last - start]
                # The caller requests the next range, and no longer reads this one. It is forgotten before it is
                # released: after an interruption between the two, the block below must not release it once more.
                under_way.popleft()
                lease.release()
        # Also where the caller closes the iterator: reads that have begun still fill their leases.
        finally:
            for _, lease, ticket in under_way:
                retire_read(lease, ticket)


def _ranges_of_files(tiers: Tiers, home: Home, offset: int, end: int, each: int) -> Generator[Tensor]:
    starts = deque(range(offset, end, each))
    under_way: deque[Loading] = deque()
    try:
        while starts or under_way:
            while starts and len(under_way) <= AHEAD:
                start = starts.popleft()
                under_way.append(tiers.begin_load(home, start, min(each, end - start)))
            yield content_of(under_way[0])
            under_way.popleft()
    finally:
        for loading in under_way:
            loading.settle()


def _begin(
    tiers: Tiers, windows: Arena, home: Home, offset: int, nbytes: int, ahead: bool
) -> tuple[Lease, Ticket] | None:
    """A lease that is being filled; None if it is ``ahead`` and there is none."""
    assert home.extent is not None and tiers.swap is not None
    lease = windows.try_lease(nbytes, "staging") if ahead else windows.lease(nbytes, "staging")
    if lease is None:
        return None
    try:
        return lease, tiers.swap.swap_in(home.extent, lease, offset=home.offset + offset)
    except BaseException:
        # A signal handler may have raised after the submission: no read may fill the lease after its release.
        tiers.swap.settle(home.extent)
        lease.release()
        raise
