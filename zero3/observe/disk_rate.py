"""The rate of the drives for which the plan sizes its staging slots: as measured, or assumed."""

from __future__ import annotations

from dataclasses import replace

import torch

from tiering.config.training import TieringConfig
from tiering.placement.workload import Workload
from tiering.planning.measure import of_disks
from tiering.planning.rates import Rates
from tiering.planning.saved_rates import SavedRates
from zero3.ranks.collectives import Collectives


def saved_disk_rates(config: TieringConfig, *, local_ranks: int) -> Rates:
    """The saved rates of the drives of the optimizer state, measured by ``tiering plan --measure``."""
    paths = config.zero.offload_optimizer.swap_directories
    if not paths:
        return Rates()
    measurement = of_disks(paths, io=config.tiering.io)
    # Ranks have parts of the CPUs; the measurement had all of them.
    record = SavedRates.of_user().find_like(measurement, but_for={"cpus"} if local_ranks > 1 else ())
    return Rates() if record is None else record.rates


def settle_disk_rate(
    load: Workload, config: TieringConfig, *, local_ranks: int, collectives: Collectives | None
) -> Workload:
    """``load`` with the rate of the slowest rank's drives, as ``tiering plan --measure`` has saved it.

    If it was not measured on all nodes, a rate is assumed. So all ranks have the same plan.
    """
    paths = config.zero.offload_optimizer.swap_directories
    if not paths:
        return load
    disk = saved_disk_rates(config, local_ranks=local_ranks).disk(len(paths), local_ranks)
    if collectives is not None:
        row = torch.tensor([0 if disk.assumed else disk.nbytes], dtype=torch.int64, device="cpu")
        measured = int(collectives.run_tables.table(row, "compare rates").min())
        disk = disk._replace(nbytes=measured) if measured else Rates().disk(len(paths), local_ranks)
    return replace(load, disk=disk)
