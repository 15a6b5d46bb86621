"""Parameters without a gradient, on some ranks or on all; and modules that are called on some ranks only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from . import models
from .models import Apart, Choices
from .pool import Pool
from .training import assert_as_emulated, emulate, start, train

Ranks = Callable[..., Pool]
PLACES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 1, nvme": {"stage": 1, "offload_optimizer": "nvme", "cache_in_host": False},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
}
REPLICATED = [name for name in PLACES if "stage 3" not in name]
LOOPS: dict[str, dict[str, Any]] = {"": {}, "accumulation": {"accumulation": 2}, "no_sync": {"no_sync": 1}}
each_place = pytest.mark.parametrize("place", PLACES)
each_loop = pytest.mark.parametrize(
    "loop", [pytest.param(loop, marks=pytest.mark.slow) if loop == "no_sync" else loop for loop in LOOPS]
)


@pytest.mark.one_of(2)
@each_loop
@pytest.mark.parametrize("place", REPLICATED)
def test_a_block_may_be_unused_on_some_ranks(ranks: Ranks, nvme: Path, place: str, loop: str) -> None:
    """By turns on this rank and on that one; block 3 is used by nobody in the first step."""
    data = Choices((0, 1), (1, 2), (0, 2), (0, 1, 3))
    case = {"build": models.Blocks, "data": data, "threshold": 0, **PLACES[place], **LOOPS[loop]}
    assert_as_emulated(ranks(2), nvme, steps=4, **case)


@each_loop
@each_place
def test_a_block_may_be_unused_on_all_ranks(ranks: Ranks, nvme: Path, place: str, loop: str) -> None:
    data = Choices((0, 1), (0, 2), (0, 1, 3), same=True)
    case = {"build": models.Blocks, "data": data, "threshold": 0, **PLACES[place], **LOOPS[loop]}
    assert_as_emulated(ranks(2), nvme, steps=4, **case)


@each_loop
@each_place
def test_persistent_parameters_may_be_unused_on_some_ranks(
    ranks: Ranks, nvme: Path, place: str, loop: str
) -> None:
    data = Choices((0, 1), (1, 2), (0, 2), (0, 1, 3))
    case = {"build": models.Blocks, "data": data, "threshold": 10**9, **PLACES[place], **LOOPS[loop]}
    assert_as_emulated(ranks(2), nvme, steps=4, **case)


@each_loop
@each_place
def test_experts_inside_a_block_may_be_routed_differently_on_each_rank(
    ranks: Ranks, nvme: Path, place: str, loop: str
) -> None:
    data = Choices((0, 1), (2,), (1, 3), (0,))
    case = {"build": models.Mixture, "data": data, "threshold": 30, **PLACES[place], **LOOPS[loop]}
    assert_as_emulated(ranks(2), nvme, **case)


@pytest.mark.parametrize("place", ["stage 0", "stage 1", "stage 2", "stage 3, nvme"])
def test_four_ranks_route_differently(ranks: Ranks, nvme: Path, place: str) -> None:
    data = Choices((0, 1), (2,), (1, 3), (0,), (2, 3))
    assert_as_emulated(ranks(4), nvme, build=models.Mixture, data=data, precision="bf16", **PLACES[place])


@pytest.mark.parametrize("place", REPLICATED)
def test_experts_that_are_groups_may_be_routed_differently_where_parameters_are_whole(
    ranks: Ranks, nvme: Path, place: str
) -> None:
    data = Choices((0, 1), (2,), (1, 3), (0,))
    assert_as_emulated(ranks(2), nvme, build=models.OuterExperts, data=data, threshold=0, **PLACES[place])


LEAVES: dict[str, dict[str, Any]] = {
    "class": {"classes": ["Experts"]},
    "name": {"names": ["mixture"]},
    "suffix": {"name_suffixes": ["ixture"]},
}


@pytest.mark.parametrize("named_by", LEAVES)
@pytest.mark.parametrize("place", ["stage 3", "stage 3, nvme"])
def test_a_leaf_module_is_one_group_and_its_experts_may_be_routed_differently(
    ranks: Ranks, nvme: Path, place: str, named_by: str
) -> None:
    data = Choices((0, 1), (2,), (1, 3), (0,))
    case = {"build": models.OuterExperts, "data": data, "threshold": 0, **PLACES[place]}
    assert_as_emulated(ranks(2), nvme, zero={"leaf_module": LEAVES[named_by]}, **case)


def counts(rank: int, nvme: Path, **options: Any) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Steps taken by each parameter, and its first moment, after two steps in which only block 0 is used by all."""
    with start(nvme, models.Blocks, threshold=0, **options) as engine:
        for number, shares in enumerate(models.vectors(2, 2)):
            only = (0, 2) if rank == 0 and number == 1 and engine.settings.zero.stage < 3 else (0,)
            engine.backward(engine(*shares[rank], only))
            engine.step()
        names = [name for name, _ in engine.module.named_parameters()]
        steps = {name: engine.optimizer.steps.get(number, 0) for number, name in enumerate(names)}
        return steps, {name: engine.get_fp32_state(name, "exp_avg") for name in names}


@each_place
def test_who_gets_no_gradient_on_any_rank_is_skipped_and_not_counted(
    ranks: Ranks, nvme: Path, place: str
) -> None:
    stage = PLACES[place].get("stage", 3)
    for steps, moments in ranks(2).run(counts, nvme, **PLACES[place]):
        for name, count in steps.items():
            used = (
                2
                if name.startswith(("blocks.0.", "scale"))
                else 1
                if "blocks.2." in name and stage < 3
                else 0
            )
            assert count == used, name
            assert bool(moments[name].any()) == bool(used), name


APART: dict[
    str, tuple[Any, list[tuple[int, ...]]]
] = {  # what rank 0 uses in the last step, and what rank 1 does
    "a block is left out": (models.Blocks, [(0, 1, 2, 3), (0, 2, 3)]),
    "the last block is left out": (models.Blocks, [(0, 1, 2, 3), (0, 1, 2)]),
    "all blocks are left out": (models.Blocks, [(), (0, 1, 2, 3)]),
    "experts are routed": (models.OuterExperts, [(0, 2), (0, 3)]),
}


@pytest.mark.parametrize("offload", ["none", pytest.param("nvme", marks=pytest.mark.slow)])
@pytest.mark.parametrize("prefetch", [0, 10**6])
@pytest.mark.parametrize("how", APART)
def test_ranks_that_part_in_stage_3_are_all_told_or_all_right(
    doomed: Ranks, nvme: Path, how: str, prefetch: int, offload: str
) -> None:
    """What all have fetched already, some may leave out: nobody needs the others for it. Else all end, and soon."""
    build, calls = APART[how]
    case = {
        "build": build,
        "data": Apart(calls),
        "threshold": 0,
        "prefetch": prefetch,
        "offload_param": offload,
    }
    outcomes = doomed(2).outcomes(train, nvme, steps=4, **case)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    reports = "\n".join(outcome.report() for outcome in outcomes)
    if not errors and how != "experts are routed":
        expected = emulate(2, outcomes[0].value.norms, **case)
        assert [o.value.differing(each) for o, each in zip(outcomes, expected, strict=True)] == [[], []]
        return
    assert [error.kind for error in errors] == ["RankOrderError"] * 2, reports
    assert all(outcome.seconds < 20 for outcome in outcomes), reports  # of what would be ten minutes
    for word in ["rank 0", "rank 1", "leaf_module"] + ["mixture.experts.2", "mixture.experts.3"] * (
        how == "experts are routed"
    ):
        assert all(word in error.message for error in errors), reports


@pytest.mark.slow
def test_one_of_four_ranks_parts(doomed: Ranks, nvme: Path) -> None:
    data = Apart([(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 3), (0, 1, 2, 3)])
    for outcome in doomed(4).outcomes(train, nvme, build=models.Blocks, data=data, threshold=0, steps=4):
        assert outcome.error is not None and outcome.error.kind == "RankOrderError", outcome.report()
        assert "rank 2" in outcome.error.message and "blocks.1" in outcome.error.message
