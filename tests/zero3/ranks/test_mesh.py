"""A mesh of ranks: data dimensions count for batches and loaders, ranks that share sequences get the same data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

import tiering
from tests.zero3.conftest import config
from zero3.ranks.mesh import MeshPlace, place_of, sharing

from .pool import Pool
from .test_lost import die

Ranks = Callable[[int], Pool]
SAMPLES = 16


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def begin(nvme: Path, keys: dict[str, Any] | None = None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(SAMPLES * 4.0).view(SAMPLES, 4) / 64)
    settings = config(nvme, precision="fp32", accumulation=2) | (keys or {})
    return tiering.initialize(model=Line(), config=settings, training_data=data, **arguments)


def seen(
    rank: int, nvme: Path, how: str, sizes: tuple[int, ...] = ()
) -> tuple[MeshPlace, tuple[int, ...], list[list[float]], Tensor]:
    """The place of a rank, its batch sizes, the samples that its loader gave, and the weights after a pass."""
    usual, names = MESHES[how]
    sizes = sizes or usual
    arguments: dict[str, Any] = {}
    if how == "mesh_param":
        arguments["mesh_param"] = sizes
    elif how == "mpu":
        arguments["mpu"] = SimpleNamespace(
            get_model_parallel_world_size=lambda: 1,
            get_data_parallel_world_size=lambda: sizes[0],
            get_data_parallel_rank=lambda: rank // sizes[1],
            get_sequence_parallel_world_size=lambda: sizes[1],
            get_sequence_parallel_rank=lambda: rank % sizes[1],
        )
    elif how == "keys":
        arguments["keys"] = {"data_parallel_size": sizes[0], "sequence_parallel_size": sizes[1]}
    elif sizes:
        tiering.init_distributed(verbose=False)
        arguments["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    engine, _, loader, _ = begin(nvme, **arguments)
    torch.manual_seed(5 + rank)  # as for dropout
    with engine:
        samples = []
        for (x,) in loader:
            engine.backward(engine(x))
            engine.step()
            samples.append((x[:, 0] * 16).tolist())
        place, groups = engine.mesh_place, tiering.utils.groups
        assert groups.get_data_parallel_world_size() == place.data_size
        assert groups._get_data_parallel_rank() == place.data_rank
        assert groups._get_sequence_parallel_world_size() == place.sequence_size
        assert groups._get_sequence_parallel_rank() == place.sequence_rank
        assert groups._get_sequence_data_parallel_world_size() == engine.world_size
        assert (engine.dp_world_size, engine.get_data_parallel_rank()) == (
            engine.mesh_place.data_size,
            engine.mesh_place.data_rank,
        )
        ordered = [x[0, 0].item() * 16 for (x,) in engine.deepspeed_io(loader.dataset, 1, "eval")]
        assert len(ordered) == SAMPLES // engine.dp_world_size
        weights = engine.state_dict()["linear.weight"].clone()
        return engine.mesh_place, engine.get_batch_info(), samples, weights


MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...] | None]] = {
    "no mesh": ((), None),
    "one dimension": ((4,), None),
    "replicate and shard": ((2, 2), ("replicate", "shard")),
    "data and sequence": ((2, 2), ("data", "sequence")),
    "sequence and data": ((2, 2), ("sequence", "data")),
    "a tensor dimension of one rank": ((2, 1, 2), ("dp", "tp", "cp")),
    "mesh_param": ((2, 2), None),
    "mpu": ((2, 2), None),
    "keys": ((2, 2), None),
}


@pytest.mark.parametrize("how", list(MESHES)[:3])
def test_data_dimensions_are_as_no_mesh(ranks: Ranks, nvme: Path, how: str) -> None:
    every = ranks(4).run(seen, nvme, how)
    assert [place.data_rank for place, *_ in every] == [0, 1, 2, 3]
    assert {sizes for _, sizes, *_ in every} == {(16, 2, 2)}
    samples = [sample for _, _, batches, _ in every for batch in batches for sample in batch]
    assert sorted(samples) == list(range(SAMPLES))


@pytest.mark.parametrize("how", list(MESHES)[3:])
def test_ranks_that_share_sequences_get_the_same_data(ranks: Ranks, nvme: Path, how: str) -> None:
    every = ranks(4).run(seen, nvme, how)
    apart = [0, 1, 0, 1] if how == "sequence and data" else [0, 0, 1, 1]
    assert [place.data_rank for place, *_ in every] == apart
    assert [place.sequence_rank for place, *_ in every] == ([0, 0, 1, 1] if apart[1] else [0, 1, 0, 1])
    assert {(place.data_size, place.sequence_size) for place, *_ in every} == {(2, 2)}
    assert {sizes for _, sizes, *_ in every} == {(8, 2, 2)}, "a sequence counts once"
    parts = {place.data_rank: batches for place, _, batches, _ in every}
    for place, _, batches, weights in every:
        assert batches == parts[place.data_rank]
        assert torch.equal(weights, every[0][3])
    samples = [sample for batches in parts.values() for batch in batches for sample in batch]
    assert sorted(samples) == list(range(SAMPLES))
    # The mean over four ranks, of which each two have the same batch, is the mean over two.
    (_, _, expected, weights), _ = ranks(2).run(seen, nvme, "no mesh")
    assert parts[0] == expected
    torch.testing.assert_close(every[0][3], weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("how", ["data and sequence", "mesh_param", "mpu", "keys"])
def test_all_ranks_may_share_each_sequence(doomed: Ranks, nvme: Path, how: str) -> None:
    """With other random numbers on each rank. The process group is made by ``initialize``, except for a mesh."""
    first, second = doomed(2).run(seen, nvme, how, (1, 2))
    assert first[1] == second[1] == (4, 2, 2)
    assert first[2] == second[2]
    assert sorted(sample for batch in first[2] for sample in batch) == list(range(SAMPLES))
    assert torch.equal(first[3], second[3])


def test_ranks_that_join_in_initialize_are_data_ranks(doomed: Ranks, nvme: Path) -> None:
    first, second = doomed(2).run(seen, nvme, "no mesh")
    assert first[1] == second[1] == (8, 2, 2)
    samples = [sample for _, _, batches, _ in (first, second) for batch in batches for sample in batch]
    assert sorted(samples) == list(range(SAMPLES))


def two_data_ranks(**functions: Callable[[], object]) -> SimpleNamespace:
    return SimpleNamespace(get_data_parallel_world_size=lambda: 2, **functions)


def refusals(rank: int, nvme: Path) -> list[str]:
    tiering.init_distributed(verbose=False)
    square = {"mesh_dim_names": ("data", "sequence")}
    mesh = init_device_mesh("cpu", (1, 2), **square)
    cases: list[dict[str, Any]] = [
        {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))},
        {"mesh": init_device_mesh("cpu", (1, 2))},
        {"mesh": mesh["data"]},
        {"mesh": (2, 1)},
        {"mesh": mesh, "mesh_param": (1, 2)},
        {"mesh": mesh, "keys": {"sequence_parallel_size": 1}},
        {"keys": {"sequence_parallel_size": 4}},
        {"keys": {"sequence_parallel_size": 2, "data_parallel_size": 2}},
        {"mesh_param": (2, 2)},
        {"mesh_param": 2},
        {"mesh_param": (-1, -2)},
        {"mesh": init_device_mesh("cpu", (2,)), "keys": {"sequence_parallel_size": 2}},
        {"mpu": SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 2)},
        {"mpu": SimpleNamespace(get_data_parallel_world_size=lambda: 1)},
        {"mpu": two_data_ranks(get_data_parallel_rank=lambda: 2)},
        {"mpu": two_data_ranks(get_data_parallel_rank=lambda: None)},
    ]
    messages = []
    for case in cases:
        with pytest.raises(tiering.ConfigError) as caught:
            begin(nvme, **case)
        messages.append(caught.value.message)
    return messages


def test_what_the_engine_cannot_divide_is_named(ranks: Ranks, nvme: Path) -> None:
    first, second = ranks(2).run(refusals, nvme)
    assert first == second, "one rank would wait for the other"
    expected = [
        "has a dimension 'tp' of 2 ranks: tensor, pipeline and expert parallelism are not supported",
        "no names of dimensions; make it with mesh_dim_names=",
        "the mesh has 1 of the 2 ranks of this run; pass the mesh of all ranks",
        "takes a torch.distributed.device_mesh.DeviceMesh, not tuple",
        "initialize got mesh and mesh_param; pass only one of them",
        "sequence_parallel_size: the mesh passed to initialize has 2 ranks for a sequence",
        "sequence_parallel_size: does not divide the 2 ranks of this run",
        "data_parallel_size: the number of ranks that load different data is 1 here",
        "mesh_param (2, 2) does not fit 2 ranks",
        "mesh_param 2 does not fit 2 ranks",
        "mesh_param (-1, -2) does not fit 2 ranks",
        "sequence_parallel_size: the mesh passed to initialize has 1 ranks for a sequence",
        "initialize got an mpu of 2 ranks for a model",
        "an mpu of 1 data rank and 1 rank that share a sequence, but the run has 2 ranks",
        "an mpu with data rank 2 of 2 and rank 0 of the 1 that share a sequence",
        "an mpu whose get_data_parallel_rank() is None",
    ]
    for message, part in zip(first, expected, strict=True):
        assert part in message


def resumed(rank: int, nvme: Path, directory: Path, sizes: tuple[int, int], first: bool) -> Any:
    """The samples and weights of the second half of a pass over the data; the ``first`` run does both, and saves."""
    tiering.init_distributed(verbose=False)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "sequence"))
    engine, _, loader, _ = begin(nvme, mesh=mesh)
    with engine:
        if not first:
            engine.load_checkpoint(directory)
        samples = []
        for number, (x,) in enumerate(loader):
            samples.append((x[:, 0] * 16).tolist())
            engine.backward(engine(x))
            engine.step()
            if first and number == SAMPLES // 4 // sizes[0] - 1:
                engine.save_checkpoint(directory)
                samples = []
        return samples, engine.master_state_dict()["linear.weight"].clone()


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1)])
def test_a_checkpoint_of_one_mesh_loads_into_another(
    ranks: Ranks, nvme: Path, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    straight = ranks(4).run(resumed, nvme, tmp_path / "saved", (2, 2), first=True)
    again = ranks(sizes[0] * sizes[1]).run(resumed, nvme, tmp_path / "saved", sizes, first=False)
    for rank, (samples, weights) in enumerate(again):
        data_rank = rank // sizes[1]
        assert samples == straight[2 * data_rank][0]
        assert len(samples) == 2
        torch.testing.assert_close(weights, straight[0][1], rtol=1e-6, atol=1e-7)
        if sizes == (2, 2):
            assert torch.equal(weights, straight[0][1])


def lost(rank: int, nvme: Path) -> None:
    tiering.init_distributed(verbose=False)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))
    engine, _, loader, _ = begin(nvme, mesh=mesh)
    with engine:
        if rank == 1:
            die()
        for (x,) in loader:
            engine.backward(engine(x))
            engine.step()


def test_a_rank_that_dies_is_named_with_its_place(doomed: Ranks, nvme: Path) -> None:
    pool = doomed(2)
    pid = pool.pids[1]
    survivor, _ = pool.outcomes(lost, nvme)
    assert survivor.error is not None, survivor.report()
    assert survivor.error.kind == "RankLostError"
    assert "rank 1 (data 0, sequence 1, host " in survivor.error.message
    assert f"pid {pid})" in survivor.error.message


def differing(rank: int, nvme: Path, way: str) -> str:
    cases = [{"mesh_param": (1, 2)}, {"keys": {"sequence_parallel_size": 2}}]
    if way == "a mesh on one rank":
        cases[0] = {}
    with pytest.raises(tiering.ConfigError) as caught:
        begin(nvme, **cases[rank])
    return caught.value.message


@pytest.mark.parametrize(
    ("way", "what"), [("a mesh on one rank", "configuration"), ("other dimensions", "mesh")]
)
def test_ranks_with_other_meshes_are_told(ranks: Ranks, nvme: Path, way: str, what: str) -> None:
    for message in ranks(2).run(differing, nvme, way):
        assert f"the {what} of rank 1 differs from that of rank 0" in message


def test_a_program_of_one_process_needs_no_mesh() -> None:
    nothing = {"mesh": None, "mesh_param": None, "mpu": None}
    assert place_of(0, 1, **nothing) is None
    assert sharing(0, 1, 1) == place_of(0, 1, **nothing | {"mesh_param": (1, 1)}) == MeshPlace()
