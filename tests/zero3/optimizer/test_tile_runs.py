"""Runs of tiles: tiles whose bytes are on NVMe, updated in one call of C, also those that get their slots in it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.zero3.plain import ADAM, STREAMED, Tower, inputs, update
from tiering.errors import SwapError
from tiering.placement.slots import USUAL_SLOTS
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.tasks import Task
from zero3.device import tiers
from zero3.optimizer import tile_stepper

TILES = {
    "sub_group_size": 1,
    "threshold": 0,
    "accumulation": 1,
    "optimizer": ADAM,
    "staging": {"seconds": 0},
}


def streamed(engine: Any) -> int:
    """The number of tiles that pass through slots."""
    return len(engine.optimizer.stepper._streamed)


def runs_of_tiles(monkeypatch: pytest.MonkeyPatch) -> list[list[Task]]:
    """The runs from now on."""
    runs: list[list[Task]] = []
    run_tasks = AioContext.run

    def noted(self: AioContext, tasks: Sequence[Task]) -> None:
        runs.append(list(tasks))
        run_tasks(self, tasks)

    monkeypatch.setattr(AioContext, "run", noted)
    return runs


def test_a_run_goes_on_with_tiles_that_get_their_slots_in_it(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is one run, and has the same bits as runs of as many tiles as there are slots."""
    runs, results = runs_of_tiles(monkeypatch), []
    for longest in (tile_stepper.RUN_NUMEL, 0):
        monkeypatch.setattr(tile_stepper, "RUN_NUMEL", longest)
        torch.manual_seed(0)
        engine = start(Tower(), **STREAMED, **TILES)
        runs.clear()
        for x in inputs(2):
            update(engine, x)
        tiles, slots = streamed(engine), engine.plan.staging.slots
        assert tiles > slots == USUAL_SLOTS
        if longest:
            assert [len(run) for run in runs] == [tiles, tiles]
        else:
            assert max(map(len, runs)) <= slots and sum(map(len, runs)) == 2 * tiles
        results.append(engine.state_dict())
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_run_ends_at_a_read_that_fails_in_it(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"offload_optimizer": "nvme", "cache_in_host": False, **TILES}
    tiles = streamed(start(Tower(), **config))
    good = USUAL_SLOTS + 2
    assert tiles > good
    # Only state is read: each tile once in a step.
    faults = FaultPlan((Fault("read", first=tiles + good + 1, count=0, error=errno.EIO),))
    monkeypatch.setattr(tiers, "AioContext", lambda **options: AioContext(fault=faults, **options))
    engine = start(Tower(), **config)
    runs = runs_of_tiles(monkeypatch)
    batches = inputs(2)
    update(engine, next(batches))
    assert [len(run) for run in runs] == [tiles]
    runs.clear()
    with pytest.raises(SwapError, match="EIO"):
        update(engine, next(batches))
    assert sum(task.ended > 0 for task in runs[0]) == good < len(runs[0]) == tiles
    with pytest.raises(SwapError, match="EIO"):  # of the other slots
        engine.close()
