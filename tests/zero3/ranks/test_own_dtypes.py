"""Frozen parameters of other dtypes with several ranks: shards that cut them, replicas, and restores elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiering
from tests.zero3.conftest import same_bits
from tests.zero3.frozen_bytes import FrozenModel, frozen_model
from zero3.params.precision import keeps_dtype

from .pool import Pool
from .training import Trained, start, train

Ranks = Callable[[int], Pool]
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False, "threshold": 0}
NAME = "blocks.1.up.codes"
PLACES: dict[int, list[dict[str, Any]]] = {
    0: [{}],
    1: [{}],
    2: [{}, {"offload_optimizer": "cpu", "sub_group_size": 2048}],
    3: [{"threshold": 0}, STREAMED],
}


def as_bytes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The bytes of ``weights``, under names with their dtypes: pickle does not know all dtypes."""
    return {
        f"{name} {values.dtype}": values.contiguous().view(-1).view(torch.uint8)
        for name, values in weights.items()
    }


def kept(model: torch.nn.Module) -> dict[str, Tensor]:
    return as_bytes({name: values for name, values in model.state_dict().items() if keeps_dtype(values)})


def trained(rank: int, nvme: Path, **options: Any) -> Trained:
    run = train(rank, nvme, **options)
    return replace(run, weights=as_bytes(run.weights))


@pytest.mark.parametrize(
    "stage", [3, pytest.param(2, marks=pytest.mark.slow), 1, pytest.param(0, marks=pytest.mark.slow)]
)
def test_no_placement_changes_a_bit(ranks: Ranks, nvme: Path, stage: int) -> None:
    torch.manual_seed(3)
    built = kept(FrozenModel())
    expected = None
    for place in PLACES[stage]:
        settings = {"build": FrozenModel, "precision": "bf16", "stage": stage}
        runs = ranks(2).run(trained, nvme, other_seeds=True, **settings, **place)
        assert runs[0].differing(runs[1], losses=False) == [], place
        assert same_bits({name: runs[0].weights[name] for name in built}, built) == []
        if expected is not None:
            assert runs[0].differing(expected) == [], place
        expected = expected or runs[0]
    assert expected is not None and len({*expected.losses}) == len(expected.losses)


def saves(rank: int, nvme: Path, directory: Path, **options: Any) -> dict[str, Tensor]:
    """Change a parameter on rank 1, save, and export; returns the values."""
    with start(nvme, frozen_model, precision="bf16", **options) as engine:
        param = engine.module.get_parameter(NAME)
        with tiering.gathered(param, modify=True, rank=1) as codes:
            codes.fill_(rank + 7)
        engine.save_checkpoint(directory, tag="one")
        engine.save_16bit_model(directory / "export")
        return as_bytes(engine.state_dict())


def loads(
    rank: int, nvme: Path, directory: Path, weights: Path | None = None, **options: Any
) -> dict[str, Tensor]:
    """The values of a checkpoint, or of ``weights``, in a model that was built with others."""
    with start(nvme, FrozenModel, precision="bf16", weights=weights, **options) as engine:
        if weights is None:
            engine.load_checkpoint(directory)
        return as_bytes(engine.state_dict())


@pytest.mark.slow
def test_other_ranks_restore_and_load_them(ranks: Ranks, nvme: Path, tmp_path: Path) -> None:
    saved, other = ranks(2).run(saves, nvme, tmp_path / "run", **STREAMED)
    assert same_bits(saved, other) == []
    model = frozen_model()
    model.get_parameter(NAME).fill_(8)
    expected = kept(model)
    assert same_bits({name: saved[name] for name in expected}, expected) == []
    weights = tmp_path / "run" / "export" / "model.safetensors"
    for world_size, options in ((1, STREAMED), (2, {"stage": 2}), (4, STREAMED)):
        for state in ranks(world_size).run(loads, nvme, tmp_path / "run", **options):
            assert same_bits(state, saved) == [], world_size
    for state in ranks(2).run(loads, nvme, tmp_path / "run", weights=weights, **STREAMED):
        assert same_bits({name: state[name] for name in expected}, expected) == []


def refused(rank: int, nvme: Path) -> str:
    """What a change to another dtype on rank 1 alone says on each rank."""
    with start(nvme, frozen_model, precision="bf16", **STREAMED) as engine:
        param = engine.module.get_parameter(NAME)
        try:
            with tiering.gathered(param, modify=True, rank=1) as codes:
                codes.data = codes.float() if rank else codes
        except tiering.errors.EngineStateError as error:
            return str(error)
        return ""


def test_a_change_of_dtype_on_one_rank_is_refused_on_all(ranks: Ranks, nvme: Path) -> None:
    first, second = ranks(2).run(refused, nvme)
    assert (NAME in first and "another shape or dtype on rank 1" in first) or "on rank 1" in first
    assert NAME in second and "dtype torch.float32" in second
