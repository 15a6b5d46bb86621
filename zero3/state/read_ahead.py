"""The bytes of a home, range by range: the next ranges are read while one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

from torch import Tensor

from tiering.storage.arena import PAGE, Lease, round_up
from tiering.storage.tickets import Transfer
from zero3.device.storages import as_tensor
from zero3.device.tiers import Home, Tiers
from zero3.params.flat_storage import retire_read

# Ranges that are being read while one is used.
AHEAD = 2


def ranges(tiers: Tiers, home: Home, offset: int, nbytes: int, each: int) -> Generator[Tensor]:
    """Bytes [offset, offset + nbytes) of ``home`` in host memory (uint8), at most ``each`` of them at a time.

    A range is valid until the next one is requested. Ranges from NVMe pass through staging, end at multiples of 4096
    and may be shorter; close the iterator if it is not used to its end.
    """
    end = offset + nbytes
    if home.tensor is not None:
        for start in range(offset, end, each):
            yield home.tensor[start : min(start + each, end)].cpu()
        return
    step = max(PAGE, min(each, tiers.chunk_bytes) // PAGE * PAGE)
    starts = deque(range(offset // PAGE * PAGE, end, step))
    under_way: deque[tuple[int, Lease, Transfer]] = deque()
    try:
        while starts or under_way:
            while starts and len(under_way) <= AHEAD:
                size = min(step, round_up(end) - starts[0])
                # Ahead, it takes free room only: a wait for the room of the range in use would not end.
                read = _begin(tiers, home, starts[0], size, ahead=bool(under_way))
                if read is None:  # no room to read ahead
                    break
                under_way.append((starts.popleft(), *read))
            start, lease, ticket = under_way[0]
            ticket.wait()
            first, last = max(start, offset), min(start + lease.nbytes, end)
            yield as_tensor(lease)[first - start : last - start]
            # The caller requests the next range, and no longer reads this one. It is forgotten before it is released:
            # after an interruption between the two, the block below must not release it once more.
            under_way.popleft()
            lease.release()
    # Also where the caller closes the iterator: reads that have begun still fill their leases.
    finally:
        for _, lease, ticket in under_way:
            retire_read(lease, ticket)


def _begin(tiers: Tiers, home: Home, offset: int, nbytes: int, ahead: bool) -> tuple[Lease, Transfer] | None:
    """A lease that is being filled; None if it is ``ahead`` and there is none."""
    assert home.extent is not None and tiers.swap is not None
    lease = tiers.staging.try_lease(nbytes, "staging") if ahead else tiers.staging.lease(nbytes, "staging")
    if lease is None:
        return None
    try:
        return lease, tiers.swap.swap_in(home.extent, lease, offset=offset)
    except BaseException:
        # A signal handler may have raised after the submission: no read may fill the lease after its release.
        tiers.swap.settle(home.extent)
        lease.release()
        raise
