"""Promise 1 with several ranks: no placement, no size and no stage changes a bit, at the same world size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import cannot_start
from tiering.errors import PlacementError
from tiering.storage.aio import ENGINES

from .pool import Pool
from .training import Trained, start, train

Ranks = Callable[[int], Pool]
NVME = {"offload_param": "nvme", "offload_optimizer": "nvme"}
STREAMED = {**NVME, "cache_in_host": False}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "optimizer on host": {"offload_optimizer": "cpu"},
    "optimizer on nvme": {"offload_optimizer": "nvme", "cache_in_host": False},
    "a share of the optimizer on nvme": {"offload_optimizer": "nvme", "cache_in_host": False, "ratio": 0.3},
    "parameters on nvme": {"offload_param": "nvme", "cache_in_host": False},
    "all on nvme": STREAMED,
    "part cached": {**NVME, "share_kib": 400},
    "optimizer part cached": {"offload_optimizer": "nvme", "share_kib": 300},
    "gradients on nvme": {**NVME, "share_kib": 300},
    "no prefetch": {**STREAMED, "prefetch": 0},
    "a short prefetch": {**STREAMED, "prefetch": 10_000},
    "smallest tiles": {**STREAMED, "sub_group_size": 1},
    "large tiles": {**STREAMED, "host_budget": "1GiB"},
    "nothing persistent": {**STREAMED, "threshold": 0},
    "a checksum for every block": {**STREAMED, "verify": True},
}
"""``share_kib``: of a node's host memory for each rank, between too little for anything and enough for everything."""
HABITS = [pytest.param("bf16", 2, id="bf16-2"), pytest.param("fp32", 1, id="fp32-1")]


def same_everywhere(pool: Pool, nvme: Path, cases: dict[str, dict[str, Any]], **habit: Any) -> list[Trained]:
    reference: list[Trained] = pool.run(train, nvme, **habit)
    assert len({*reference[0].losses}) == len(reference[0].losses), "the reference does not train"
    for name, options in cases.items():
        case = options | (
            {"host_budget": f"{options['share_kib'] * pool.world_size}KiB"} if "share_kib" in options else {}
        )
        case.pop("share_kib", None)
        runs = pool.run(train, nvme, **habit, **case)
        for rank, (run, expected) in enumerate(zip(runs, reference, strict=True)):
            assert run.differing(expected) == [], f"{name}, rank {rank}"
            assert bool(run.written) == ("nvme" in case.values()), f"{name}, rank {rank}"
    return reference


@pytest.mark.slow
def test_every_second_placement_gives_the_same_bits(ranks: Ranks, nvme: Path) -> None:
    second = {name: PLACEMENTS[name] for name in list(PLACEMENTS)[1::2]}
    same_everywhere(ranks(2), nvme, second, precision="bf16", accumulation=2)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "accumulation"), HABITS)
def test_every_placement_gives_the_same_bits(
    ranks: Ranks, nvme: Path, precision: str, accumulation: int
) -> None:
    same_everywhere(ranks(2), nvme, PLACEMENTS, precision=precision, accumulation=accumulation)


@pytest.mark.parametrize("stage", [1, 2])
def test_every_placement_of_the_optimizer_gives_the_same_bits_in_other_stages(
    ranks: Ranks, nvme: Path, stage: int
) -> None:
    cases = {name: case for name, case in PLACEMENTS.items() if "offload_param" not in case}
    assert len(cases) == 4
    same_everywhere(ranks(2), nvme, cases, precision="bf16", accumulation=2, stage=stage)


@pytest.mark.slow
def test_four_ranks(ranks: Ranks, nvme: Path) -> None:
    cases = {name: PLACEMENTS[name] for name in ("host", "all on nvme", "no prefetch", "smallest tiles")}
    same_everywhere(ranks(4), nvme, cases, precision="bf16", accumulation=2)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize(("precision", "accumulation"), HABITS)
def test_every_placement_on_more_ranks(
    ranks: Ranks, nvme: Path, world_size: int, precision: str, accumulation: int
) -> None:
    same_everywhere(ranks(world_size), nvme, PLACEMENTS, precision=precision, accumulation=accumulation)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_stage_gives_the_same_bits(ranks: Ranks, nvme: Path, world_size: int, precision: str) -> None:
    """With one micro-batch all stages reduce the same gradients, in the same order."""
    cases = {f"stage {stage}": {"stage": stage} for stage in (0, 1, 2)}
    same_everywhere(ranks(world_size), nvme, cases, precision=precision)


@pytest.mark.slow
def test_every_io_engine_gives_the_same_bits(ranks: Ranks, nvme: Path) -> None:
    engines = [name for name in ENGINES if name != "auto" and not cannot_start(name)]
    cases: dict[str, dict[str, Any]] = {
        name: {**STREAMED, "io": {"engine": name, "block_size": "4K", "queue_depth": 3}} for name in engines
    }
    same_everywhere(ranks(2), nvme, cases, precision="bf16")


@pytest.mark.parametrize("state", ["split", "bf16", "split+bf16"])
def test_every_state_format_gives_its_bits_in_every_stage_and_place(
    ranks: Ranks, nvme: Path, state: str
) -> None:
    cases: dict[str, dict[str, Any]] = {
        "stage 1": {"stage": 1},
        "optimizer on nvme": PLACEMENTS["optimizer on nvme"],
        "all on nvme": STREAMED,
    }
    same_everywhere(ranks(2), nvme, cases, precision="bf16", state=state)


def smallest(rank: int, nvme: Path, **options: Any) -> dict[str, str]:
    """The least host budget, and then the least device budget, that a plan accepts (to 16 KiB), for all ranks."""
    budgets: dict[str, str] = {}
    for budget in ("host_budget", "device_budget"):
        refused, accepted = 0, 256  # of 16 KiB
        while accepted - refused > 1:
            middle = (refused + accepted) // 2
            try:
                start(nvme, **(options | budgets | {budget: f"{16 * middle}KiB"})).close()
            except PlacementError:
                refused = middle
            else:
                accepted = middle
        budgets[budget] = f"{16 * accepted}KiB"
    return budgets


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("precision", "accumulation"), HABITS)
def test_the_smallest_budgets_give_the_same_bits(
    ranks: Ranks, nvme: Path, precision: str, accumulation: int, stage: int
) -> None:
    habit = {"precision": precision, "accumulation": accumulation, "stage": stage}
    place = STREAMED if stage == 3 else PLACEMENTS["optimizer on nvme"]
    least, other = ranks(2).run(smallest, nvme, **habit, **place)
    assert least == other
    same_everywhere(ranks(2), nvme, {f"{least}": {**place, **least}}, **habit)
