"""Weights from files with several ranks: one model, of which each rank reads its own shard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.zero3.conftest import SmallModel
from tiering.errors import ConfigError, DistributedError, WeightsError
from zero3.building.weights import FileSource

from .pool import Pool
from .training import Trained, start, train

Ranks = Callable[[int], Pool]
PLACES: dict[str, dict[str, Any]] = {
    "stage 3 on nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
    "stage 3": {},
    "stage 1": {"stage": 1},
}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """What a single process builds with the seed of ``start``."""
    torch.manual_seed(3)
    model = SmallModel()
    file = tmp_path / "model.safetensors"
    save_file({name: param.detach() for name, param in model.named_parameters()}, file)
    return file


def load(rank: int, nvme: Path, weights: Path, **options: Any) -> tuple[Trained, int]:
    """Train from the file, on a model with other values; also the elements that were read."""
    read, elements = FileSource.read, []

    def counted(source: FileSource, first: int, numel: int) -> torch.Tensor:
        elements.append(numel)
        return read(source, first, numel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSource, "read", counted)
        trained = train(rank, nvme, weights=weights, other_seeds=True, without_memory=True, **options)
    return trained, sum(elements)


@pytest.mark.parametrize("place", PLACES)
def test_every_rank_reads_what_it_keeps(ranks: Ranks, nvme: Path, weights: Path, place: str) -> None:
    pool, options = ranks(2), {"threshold": 0, **PLACES[place]}
    expected = pool.run(train, nvme, **options)
    loaded = pool.run(load, nvme, weights, **options)
    whole = sum(param.numel() for param in SmallModel().parameters())
    for (trained, elements), other in zip(loaded, expected, strict=True):
        assert trained.differing(other) == []
        assert elements == whole if "stage" in options else abs(elements - whole / 2) < 0.1 * whole
    if "stage" not in options:
        assert sum(elements for _, elements in loaded) == whole


def other_file(rank: int, nvme: Path, weights: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        start(nvme, weights=weights if rank == 0 else weights.with_name("half.safetensors"))
    return str(refused.value)


def test_a_rank_with_other_files_is_named(ranks: Ranks, nvme: Path, weights: Path) -> None:
    torch.manual_seed(3)
    half = {name: param.detach().bfloat16() for name, param in SmallModel().named_parameters()}
    save_file(half, weights.with_name("half.safetensors"))
    for message in ranks(2).run(other_file, nvme, weights):
        assert "weights file" in message
        assert "BF16" in message
        assert "F32" in message


def missing_file(rank: int, nvme: Path, weights: Path) -> str:
    with pytest.raises((WeightsError, DistributedError)) as refused:
        start(nvme, weights=weights if rank == 0 else weights.with_name("absent.safetensors"))
    return str(refused.value)


def test_a_file_that_one_rank_lacks_ends_all(ranks: Ranks, nvme: Path, weights: Path) -> None:
    for message in ranks(2).run(missing_file, nvme, weights):
        assert "absent.safetensors" in message
