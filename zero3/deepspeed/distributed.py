"""Joining the ranks that a launcher has started, and what one process answers where no rank but it is there."""

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

PORT = 29500  # torch's
SLURM_PORTS = range(15000, 25000)  # below those that a kernel gives to connections
STEPS = 16  # of one job, one after the other, before a port is that of the next job

# Who starts processes without torch's variables: rank, number of ranks, and both within the node.
_LAUNCHERS = {
    "Open MPI": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    # Of a job step: the shell of a batch script has SLURM_NTASKS, too, and is alone.
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


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
    """Make torch's process group of the ranks that a launcher has started; of this process alone if none has.

    torchrun's variables count. Without them ``auto_mpi_discovery`` translates those of Open MPI, MPICH and SLURM
    (``srun``), where rank 0 listens on ``distributed_port`` unless MASTER_PORT says otherwise: in a job of SLURM's on a
    port made of the job's number instead of 29500, since jobs may share a node. Nothing happens when
    there is a group already. ``dist_init_required`` False says that there is one. ``timeout`` is that of the script's
    own collectives; the engine's is ``tiering.distributed.timeout``. ``init_method``, ``rank`` and ``world_size`` are
    torch's, ``config`` is DeepSpeed's, and not read.

    ConfigError if there is no group where ``dist_init_required`` is False, or nothing says where rank 0 is.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise ConfigError(
            "init_distributed(dist_init_required=False) says that torch.distributed has a process group, and it has"
            " none; call torch.distributed.init_process_group first, or leave dist_init_required out"
        )
    backend = _backend(dist_backend)
    if init_method is None and auto_mpi_discovery:
        discover(distributed_port, verbose=verbose)
    if init_method is not None or world_size > 1 or standing()[1] > 1:
        meet(backend, timeout, init_method or "env://", rank, world_size)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        os.environ.setdefault("LOCAL_RANK", "0")  # which a launcher sets, and scripts read
    if verbose:
        log.info("joined as rank %d of %d, backend %s", *standing(), backend)


def get_rank(group: Any = None) -> int:
    """This process among those of ``group``; also before there is one."""
    return dist.get_rank(group) if dist.is_initialized() else standing()[0]


def get_world_size(group: Any = None) -> int:
    """How many processes ``group`` has; also before there is one."""
    return dist.get_world_size(group) if dist.is_initialized() else standing()[1]


def get_local_rank() -> int:
    """This process among those of its node, as the launcher says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _backend(wanted: str | None) -> str:
    """What carries collectives. Some are between CPUs on a GPU machine, too, and nccl has nothing else to carry."""
    return BACKENDS[chosen_device().type] if wanted in (None, "nccl") else str(wanted)


def discover(port: int, *, verbose: bool = True) -> None:
    """Give the environment torchrun's variables, out of another launcher's, if nobody has given this process a rank."""
    environ = os.environ
    if dist.is_initialized() or ("RANK" in environ and "WORLD_SIZE" in environ):
        return
    found = [
        (launcher, [environ.get(name) for name in names])
        for launcher, names in _LAUNCHERS.items()
        if names[0] in environ
    ]
    # One that starts processes by another's (mpiexec by srun) has started more of them.
    launcher, said = max(found, key=lambda each: int(each[1][1] or 1), default=("", ["0", "1", None, None]))
    rank, size, local_rank, local_size = said
    if rank is None or size is None or int(size) == 1:
        return
    where = environ.get("MASTER_ADDR") or _host_of_rank_0(environ, alone=local_size == size)
    if where is None:
        raise ConfigError(
            f"{launcher} has started {size} processes on several nodes, and nothing says where rank 0 is; set"
            " MASTER_ADDR to its host name"
        )
    environ |= {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": where}
    environ.setdefault("MASTER_PORT", str(_port(environ, port)))
    if local_rank is not None:
        environ["LOCAL_RANK"] = local_rank
    if local_size is not None:
        environ["LOCAL_WORLD_SIZE"] = local_size
    if verbose:
        log.info("rank %s of %s, as %s says; rank 0 is on %s", rank, size, launcher, where)


def _port(environ: Mapping[str, str], given: int) -> int:
    """Where rank 0 listens: if the script has chosen nothing, where the next job of SLURM's on this node does not."""
    if given != PORT or "SLURM_JOB_ID" not in environ:
        return given
    job, step = int(environ["SLURM_JOB_ID"]), int(environ.get("SLURM_STEP_ID", "0"))
    return SLURM_PORTS.start + (STEPS * job + step) % len(SLURM_PORTS)


def _host_of_rank_0(environ: Mapping[str, str], *, alone: bool) -> str | None:
    if alone:
        return "127.0.0.1"
    nodes = environ.get("SLURM_STEP_NODELIST", "")  # node[003-006,9],other
    first = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^\[,]*)", nodes)
    return "".join(part or "" for part in first.groups()) if first else None
