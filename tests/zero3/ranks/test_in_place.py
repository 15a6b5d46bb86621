"""Frozen weights that several ranks read in place: parts of tensors that begin anywhere in the files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zero3.building.test_in_place import weights_of
from tests.zero3.frozen_bytes import FrozenModel, frozen_model

from .pool import Pool
from .test_own_dtypes import as_bytes
from .test_routes import by_copy
from .training import Trained, start, train

Ranks = Callable[[int], Pool]
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
COMMON: dict[str, Any] = {"build": FrozenModel, "precision": "bf16", "other_seeds": True, "threshold": 0}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return weights_of(tmp_path / "weights", frozen_model(), torch.bfloat16)


def trained(rank: int, nvme: Path, copies: bool = False, **options: Any) -> tuple[Trained, int, int]:
    """The run, its bytes that are read in place, and the gathers that a copy has filled."""
    with pytest.MonkeyPatch.context() as patch:
        calls = by_copy(patch) if copies else []
        engines = []

        def begin(*args: Any, **kwargs: Any) -> Any:
            engines.append(start(*args, **kwargs))
            return engines[-1]

        patch.setattr("tests.zero3.ranks.training.start", begin)
        run = train(rank, nvme, **options)
        return replace(run, weights=as_bytes(run.weights)), engines[0].plan.in_place_bytes, len(calls)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_reads_its_own_part(ranks: Ranks, nvme: Path, weights: Path, size: int) -> None:
    pool = ranks(size)
    resident = pool.run(trained, nvme, weights=weights, **COMMON)
    assert resident[0][1] == 0
    for options in ({}, {"prefetch": 0, "device_budget": f"{350 * size}KiB"}, {"copies": True}):
        runs = pool.run(trained, nvme, weights=weights, **COMMON, **STREAMED, **options)
        for rank, ((run, in_place, copied), (expected, _, _)) in enumerate(zip(runs, resident, strict=True)):
            assert run.differing(expected) == [], f"{options}, rank {rank}"
            assert in_place > 20_000 and (copied > 0) == ("copies" in options), f"{options}, rank {rank}"


def saves(rank: int, nvme: Path, directory: Path, weights: Path) -> dict[str, torch.Tensor]:
    with start(nvme, FrozenModel, precision="bf16", weights=weights, **STREAMED) as engine:
        engine.save_checkpoint(directory)
        engine.load_checkpoint(directory)
        return as_bytes(engine.state_dict())


def loads(rank: int, nvme: Path, directory: Path) -> dict[str, torch.Tensor]:
    with start(nvme, FrozenModel, precision="bf16", **STREAMED) as engine:
        engine.load_checkpoint(directory)
        return as_bytes(engine.state_dict())


@pytest.mark.slow
def test_checkpoints_of_ranks_have_the_base(ranks: Ranks, nvme: Path, weights: Path, tmp_path: Path) -> None:
    saved, other = ranks(2).run(saves, nvme, tmp_path / "run", weights)
    (alone,) = ranks(1).run(loads, nvme, tmp_path / "run")
    assert saved.keys() == other.keys() == alone.keys()
    for name, values in saved.items():
        assert torch.equal(values, other[name]) and torch.equal(values, alone[name]), name
