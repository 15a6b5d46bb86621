"""The sizes of tiles with which a model may fit whose layers are too large for the device. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tiering.placement.budgets import fits
from tiering.placement.placement import AMPLE
from tiering.placement.plan import Budgets
from tiering.placement.workload import Workload

# Bytes: smaller tiles are not tried.
SMALLEST_TILE = 4 << 10


@dataclass(frozen=True)
class Tiling:
    """A model that can be cut into tiles.

    ``largest``: bytes of the weight of its largest layer. ``nbytes``: those of all parameters. ``load``: the Workload
    with tiles of at most so many bytes; None if it cannot be cut so. ``most``: the number of tiles up to which it is
    not too slow.
    """

    largest: int
    nbytes: int
    load: Callable[[int], Workload | None]
    most: int

    def sizes(self, load: Workload, budgets: Budgets) -> Iterator[int]:
        """The powers of two to try where ``load`` has no plan within ``budgets``, the largest first.

        None if more room on the device alone is no help, or is not needed: the smallest tiles need some as well.
        """
        ample = ample_but_device(load, budgets)
        if fits(load, ample) or not fits(load, replace(ample, device=AMPLE)):
            return
        tile = 1 << max(self.largest - 1, 0).bit_length() - 1 if self.largest > SMALLEST_TILE else 0
        while tile >= max(SMALLEST_TILE, self.nbytes // self.most):
            yield tile
            tile //= 2


def ample_but_device(load: Workload, budgets: Budgets) -> Budgets:
    """``budgets`` with more of the slower tiers than any plan needs; of a CPU, the device is host memory."""
    host = budgets.host if load.device_is_host else AMPLE
    return replace(budgets, host=host, nvme=AMPLE)
