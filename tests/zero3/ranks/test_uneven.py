"""Sizes that do not divide: among ranks, among groups, among batches. To the bit as emulated, in every stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from . import models
from .pool import Pool
from .training import assert_as_emulated, assert_as_whole

Ranks = Callable[[int], Pool]
PLACES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
}
MODELS: dict[str, dict[str, Any]] = {
    "odd sizes": {"build": models.Blocks},
    "fewer elements than ranks": {"build": models.Tiny},
    "partly frozen": {"build": models.PartlyFrozen},
    "tied": {"build": models.Tied},
    "unused": {"build": models.Unused},
}
each_place = pytest.mark.parametrize("place", PLACES)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("threshold", [0, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
@each_place
def test_every_model_in_every_stage(ranks: Ranks, nvme: Path, place: str, model: str, threshold: int) -> None:
    """Threshold 0 makes no parameter persistent: the odd ones are sharded, too. 30 has some of each."""
    case = {"data": models.vectors, "clip": 0.0, "threshold": threshold, **MODELS[model], **PLACES[place]}
    runs = assert_as_emulated(ranks(2), nvme, **case)
    assert_as_whole(runs, **case)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("place", ["stage 1", "stage 3, nvme"])
def test_every_model_on_four_ranks(ranks: Ranks, nvme: Path, place: str, model: str) -> None:
    case = {"data": models.vectors, "threshold": 0, "precision": "bf16", **MODELS[model], **PLACES[place]}
    assert_as_emulated(ranks(4), nvme, accumulation=2, **case)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 5])
@pytest.mark.parametrize("model", MODELS)
@each_place
def test_worlds_of_odd_sizes(ranks: Ranks, nvme: Path, place: str, model: str, world_size: int) -> None:
    case = {"data": models.vectors, "threshold": 0, **MODELS[model], **PLACES[place]}
    runs = assert_as_emulated(ranks(world_size), nvme, **case)
    assert_as_whole(runs, **case)


@each_place
def test_ranks_have_batches_of_different_sizes(ranks: Ranks, nvme: Path, place: str) -> None:
    """The mean is over ranks, as everywhere in the field: a row of a small batch counts for more."""
    case = {"build": models.Blocks, "data": models.uneven_rows, "threshold": 0, **PLACES[place]}
    assert_as_emulated(ranks(2), nvme, **case)
    assert_as_emulated(ranks(4), nvme, **case)


@each_place
def test_ranks_have_sequences_of_different_lengths(ranks: Ranks, nvme: Path, place: str) -> None:
    case = {"build": models.Sequences, "data": models.uneven_sequences, "threshold": 0, **PLACES[place]}
    assert_as_emulated(ranks(2), nvme, accumulation=2, **case)


@each_place
def test_every_rank_starts_from_the_weights_of_rank_0(ranks: Ranks, nvme: Path, place: str) -> None:
    """A model whose ranks drew other numbers is one model afterwards, as everywhere in the field."""
    case = {"build": models.PartlyFrozen, "data": models.vectors, **PLACES[place]}
    assert_as_emulated(ranks(2), nvme, other_seeds=True, **case)


@pytest.mark.parametrize("other_seeds", [False, True])
@each_place
def test_a_model_that_is_built_without_memory_starts_from_the_weights_of_rank_0(
    ranks: Ranks, nvme: Path, place: str, other_seeds: bool
) -> None:
    case = {"build": models.Sequences, "data": models.uneven_sequences, **PLACES[place]}
    assert_as_emulated(ranks(2), nvme, without_memory=True, other_seeds=other_seeds, **case)
