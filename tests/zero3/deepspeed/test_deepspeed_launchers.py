"""How ranks find each other where DeepSpeed's launchers, or others, have started them."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import tiering as deepspeed
from tiering.errors import ConfigError
from zero3.deepspeed import distributed

LAUNCHERS = [
    (
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
        | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        "3 4 3 4 127.0.0.1 29501",
    ),
    ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "7"}, "1 2 - - head 7"),
    (
        {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
        | {"SLURM_STEP_NODELIST": "gpu[003-006,9],old7"},
        "5 8 1 - gpu003 29501",
    ),
    (
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "a-1,b[2-3]"},
        "0 2 - - a-1 29501",
    ),
    (  # srun --mpi=pmi2 sets both
        {"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1"}
        | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
        "1 2 1 - n1 29501",
    ),
    (  # mpiexec starts one of its own by srun on each node
        {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "SLURM_STEP_NUM_TASKS": "2"}
        | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n[1-2]"},
        "5 8 1 - n1 29501",
    ),
    # The batch script of SLURM.
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "n1"}, "- - - - - -"),
    # torchrun.
    ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "9"}, "1 2 - - - -"),
]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("variables", "expected"), LAUNCHERS, ids=range(len(LAUNCHERS)))
def test_a_launcher_that_is_not_torchrun_is_understood(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in (name for names in distributed._LAUNCHERS.values() for name in names if name):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    distributed.discover(29501, verbose=False)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert " ".join(os.environ.get(name, "-") for name in names) == expected


@pytest.mark.usefixtures("one_process")
def test_jobs_and_steps_of_slurm_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be on one node. A port that somebody has chosen stays."""
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1"}

    def port(job: int, step: int, usual: int = 29500) -> int:
        with monkeypatch.context() as patch:
            for name, value in (slurm | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).items():
                patch.setenv(name, value)
            patch.setattr(os, "environ", dict(os.environ))
            distributed.discover(usual, verbose=False)
            return int(os.environ["MASTER_PORT"])

    ports = [port(job, step) for job in (4711, 4712, 4713) for step in (0, 1, 2)]
    assert len(set(ports)) == 9 and all(15000 <= each < 25000 for each in ports)
    assert port(4711, 0) == ports[0], "the same on every rank"
    assert port(4711, 4294967290) in range(15000, 25000)
    assert port(4711, 0, usual=29501) == 29501


@pytest.mark.usefixtures("one_process")
def test_nothing_says_where_rank_0_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(ConfigError, match=r"MPICH has started 2 processes.*MASTER_ADDR"):
        deepspeed.init_distributed()


@pytest.mark.usefixtures("one_process")
def test_one_process_without_a_launcher() -> None:
    comm = deepspeed.comm
    assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), comm.barrier()) == (0, 1, 0, None)
    with pytest.raises(ConfigError, match=r"dist_init_required=False.*does not exist"):
        deepspeed.init_distributed(dist_init_required=False)
    # A machine without a GPU does not have this backend.
    deepspeed.init_distributed(dist_backend="nccl", dist_init_required=True)
    deepspeed.init_distributed()
    deepspeed.init_distributed(dist_init_required=False)
    # Scripts read them.
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["0", "0", "1"]
    value = torch.tensor([2.0])
    comm.all_reduce(value)  # torch.distributed's
    comm.barrier()
    assert (value.item(), comm.get_rank(), comm.get_world_size(), dist.get_backend()) == (2.0, 0, 1, "gloo")
    assert comm.is_initialized() and comm.ReduceOp.SUM is dist.ReduceOp.SUM
