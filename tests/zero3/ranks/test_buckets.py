"""Ranks that exchange gradients in small parts get the bits of those that exchange whole groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiering.placement.group_sizes import exchanged_at_once

from . import models
from .models import Choices
from .pool import Pool
from .test_unused import PLACES, REPLICATED
from .training import assert_as_emulated, start, train

Ranks = Callable[..., Pool]
IN_PARTS: dict[str, Any] = {"zero": {"reduce_bucket_size": 1}}


class Wide(models.Blocks):
    """Two blocks with several parts each, also on four ranks, and pieces that begin and end inside of one."""

    SIZES = (7, 700, 3, 900)


def parts(rank: int, nvme: Path, **options: Any) -> list[int]:
    """The number of parts of each trained group."""
    with start(nvme, Wide, threshold=0, **IN_PARTS, **options) as engine:
        load, bucket = engine.plan.workload, engine.plan.reduction.bucket
        numels = [group.trainable_numel for group in load.groups if group.trainable_numel]
        return [-(-numel // exchanged_at_once(numel, bucket, load.world_size)) for numel in numels]


@pytest.mark.parametrize("world_size", [2, 4])
def test_large_groups_are_exchanged_in_parts(ranks: Ranks, nvme: Path, world_size: int) -> None:
    counts = ranks(world_size).run(parts, nvme)[0]
    assert counts == ([2, 2, 2, 6, 6, 2, 2, 6, 6] if world_size == 2 else [2, 2, 2, 4, 4, 2, 2, 4, 4])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtypes", [{}, {"precision": "bf16", "accumulation": 2, "reduce_dtype": "fp32"}])
def test_parts_change_no_bit(ranks: Ranks, nvme: Path, place: str, dtypes: dict[str, Any]) -> None:
    case = {"build": Wide, "data": Choices((0, 1), (1, 3), same=True), "threshold": 0}
    case |= PLACES[place] | dtypes
    whole = assert_as_emulated(ranks(2), nvme, steps=3, **case)
    in_parts = assert_as_emulated(ranks(2), nvme, steps=3, **case, **IN_PARTS)
    assert [run.differing(before) for run, before in zip(in_parts, whole, strict=True)] == [[], []]


@pytest.mark.parametrize("place", REPLICATED)
def test_a_rank_without_gradients_sends_zeros_in_parts(ranks: Ranks, nvme: Path, place: str) -> None:
    case = {"build": Wide, "data": Choices((0, 1), (1, 3), (2, 3)), "threshold": 0, **PLACES[place]}
    assert_as_emulated(ranks(2), nvme, steps=4, **case, **IN_PARTS)


def cut_and_trained(rank: int, nvme: Path, **case: Any) -> tuple[list[str], Any]:
    options = {key: value for key, value in case.items() if key not in ("build", "data", "steps")}
    with start(nvme, case["build"], **options) as engine:
        names = [group.name for group in engine.plan.workload.groups]
    return names, train(rank, nvme, **case)


@pytest.mark.parametrize("place", [place for place in PLACES if place not in ("stage 0", "stage 1")])
def test_blocks_larger_than_a_bucket_are_cut_into_their_modules(ranks: Ranks, nvme: Path, place: str) -> None:
    """In stages 2 and 3, where a group is kept until it is reduced. The norm is that of other shards."""
    case = {"build": Wide, "data": Choices((0, 1), (1, 3), same=True), "threshold": 0, "accumulation": 2}
    case |= {"steps": 3, **PLACES[place]}
    whole = ranks(2).run(cut_and_trained, nvme, **case)
    cut = ranks(2).run(cut_and_trained, nvme, **case, zero={"reduce_bucket_size": 30_000})
    finer = ["root", "blocks.0", "blocks.1.up", "blocks.1.down", "blocks.2", "blocks.3.up", "blocks.3.down"]
    assert whole[0][0] == ["root", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    assert cut[0][0] == (whole[0][0] if "stage 1" in place else finer)
    for (_, ours), (_, theirs) in zip(cut, whole, strict=True):
        assert ours.differing(theirs) == []


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_four_ranks_exchange_parts(ranks: Ranks, nvme: Path, place: str) -> None:
    case = {"build": Wide, "data": Choices((0, 1), (1, 3), same=True), "threshold": 0, "accumulation": 2}
    assert_as_emulated(ranks(4), nvme, steps=3, **case, **PLACES[place], **IN_PARTS)
