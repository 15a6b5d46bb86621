"""Joining the ranks that a launcher has started; rank queries that also work in a single process."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tiering.errors import ConfigError
from zero3.device.choice import chosen_device
from zero3.ranks.joining import BACKENDS, meet, standing

log = logging.getLogger(__name__)

# torch's default.
PORT = 29500
# Below the ports that a kernel assigns to connections.
SLURM_PORTS = range(15000, 25000)
# Successive steps of one job that get ports of their own, before a port is that of the next job.
STEPS = 16

# Launchers that set no variables of torch: rank, number of ranks, and both within the node.
_LAUNCHERS = {
    "Open MPI": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    # The number of tasks of the job step: the shell of a batch script, a single process, has SLURM_NTASKS, too.
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


# The signature is that of DeepSpeed.
def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    verbose: bool = True,
    timeout: timedelta = timedelta(minutes=30),
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create torch's process group of the ranks that a launcher has started; without a launcher, of this process alone.

    A process alone also gets the variables RANK, LOCAL_RANK and WORLD_SIZE, which scripts read.

    torchrun's variables come first. Without them, ``auto_mpi_discovery`` translates those of Open MPI, MPICH and SLURM
    (``srun``). Rank 0 then listens on MASTER_PORT or ``distributed_port``; a SLURM job without either uses a port
    computed from the job's number instead of 29500, because jobs may share a node. If a group exists, nothing happens.
    ``dist_init_required`` False means that a group exists. ``timeout`` is for the script's own collectives; the
    engine's is ``tiering.distributed.timeout``. ``init_method``, ``rank`` and ``world_size`` are torch's; ``config`` is
    DeepSpeed's, and ignored.

    Raises ConfigError if ``dist_init_required`` is False without a group, or the host of rank 0 is unknown.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise ConfigError(
            "init_distributed(dist_init_required=False) requires a process group of torch.distributed, which does not"
            " exist; call torch.distributed.init_process_group first, or leave dist_init_required out"
        )
    backend = _backend(dist_backend)
    if init_method is None and auto_mpi_discovery:
        discover(distributed_port, verbose=verbose)
    if init_method is not None or world_size > 1 or standing()[1] > 1:
        meet(backend, timeout, init_method or "env://", rank, world_size)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        # A launcher sets them, and scripts read them.
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
    if verbose:
        log.info("joined as rank %d of %d, backend %s", *standing(), backend)


def get_rank(group: Any = None) -> int:
    """The rank of this process in ``group``; also before a group exists."""
    return dist.get_rank(group) if dist.is_initialized() else standing()[0]


def get_world_size(group: Any = None) -> int:
    """The number of ranks of ``group``; also before a group exists."""
    return dist.get_world_size(group) if dist.is_initialized() else standing()[1]


def get_local_rank() -> int:
    """The rank of this process on its node, from the launcher's LOCAL_RANK; 0 without it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _backend(requested: str | None) -> str:
    """The backend of collectives. On a GPU machine, "nccl" becomes the engine's backend, for tensors on CPUs, too."""
    return BACKENDS[chosen_device().type] if requested in (None, "nccl") else str(requested)


def discover(port: int, *, verbose: bool = True) -> None:
    """Set torchrun's variables from those of another launcher, unless this process has a rank."""
    environ = os.environ
    if dist.is_initialized() or ("RANK" in environ and "WORLD_SIZE" in environ):
        return
    launchers = [
        (launcher, [environ.get(name) for name in names])
        for launcher, names in _LAUNCHERS.items()
        if names[0] in environ
    ]
    # A launcher may start its processes by another one (mpiexec by srun): the one with more processes counts.
    launcher, values = max(
        launchers, key=lambda each: int(each[1][1] or 1), default=("", ["0", "1", None, None])
    )
    rank, size, local_rank, local_size = values
    if rank is None or size is None or int(size) == 1:
        return
    address = environ.get("MASTER_ADDR") or _host_of_rank_0(environ, alone=local_size == size)
    if address is None:
        raise ConfigError(
            f"{launcher} has started {size} processes on several nodes, and the host of rank 0 is unknown; set"
            " MASTER_ADDR to its name"
        )
    environ |= {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": address}
    environ.setdefault("MASTER_PORT", str(_port(environ, port)))
    if local_rank is not None:
        environ["LOCAL_RANK"] = local_rank
    if local_size is not None:
        environ["LOCAL_WORLD_SIZE"] = local_size
    if verbose:
        log.info("rank %s of %s, from %s; rank 0 is on %s", rank, size, launcher, address)


def _port(environ: Mapping[str, str], requested: int) -> int:
    """The port of rank 0: the requested one, or in a SLURM job one that the next job on this node does not use."""
    if requested != PORT or "SLURM_JOB_ID" not in environ:
        return requested
    job, step = int(environ["SLURM_JOB_ID"]), int(environ.get("SLURM_STEP_ID", "0"))
    return SLURM_PORTS.start + (STEPS * job + step) % len(SLURM_PORTS)


def _host_of_rank_0(environ: Mapping[str, str], *, alone: bool) -> str | None:
    if alone:
        return "127.0.0.1"
    nodes = environ.get("SLURM_STEP_NODELIST", "")  # node[003-006,9],other
    first = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^\[,]*)", nodes)
    return "".join(part or "" for part in first.groups()) if first else None
