"""The pipeline of tiles in an engine, on slow disks. Alone: test_slot_transfers.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.zero3.plain import ADAM, STREAMED, Tower, inputs, update
from tiering.placement import placement
from tiering.placement.slots import FEWEST_SLOTS, USUAL_SLOTS
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.recording import TransferRecord
from zero3.device import tiers
from zero3.device.home import Home
from zero3.optimizer.tile_batch import TileBatch
from zero3.optimizer.tiles import Tile

TILES = {"sub_group_size": 1, "threshold": 0, "accumulation": 1, "optimizer": ADAM}

Slow = Callable[..., None]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    """``slow(kind, seconds, count=0)`` lets the first ``count`` transfers of that kind begin that late (0: each), in
    engines that start from now on."""

    def delay(kind: Any, seconds: float, count: int = 0) -> None:
        faults = FaultPlan((Fault(kind, count=count, delay=seconds),))
        monkeypatch.setattr(tiers, "AioContext", lambda **options: AioContext(fault=faults, **options))

    return delay


def offsets(engine: Any, home: Home) -> range:
    """Where ``home`` lies in the swap file."""
    assert home.extent is not None
    (part,) = home.extent.parts
    return range(part.extent.offset, part.extent.offset + part.extent.nbytes)


def state_of(engine: Any) -> dict[int, Tile]:
    """The tiles whose state is on NVMe, by the offset of that."""
    streamed = [tile for tile in engine.optimizer.stepper._streamed if tile.state.extent is not None]
    return {offsets(engine, tile.state).start: tile for tile in streamed}


def recorded(engine: Any, *phases: Callable[[], Any]) -> list[TransferRecord]:
    """The transfers that ``phases`` asked for, all of them over."""
    aio = engine._tiers.aio
    aio.start_recording()
    for phase in phases:
        phase()
    return [record for record in aio.end_recording() if record.submitted]


def most_at_once(records: list[TransferRecord]) -> int:
    """The most transfers that were under way, asked for and not over, at one time."""
    changes = sorted([(r.submitted, 1) for r in records] + [(r.done, -1) for r in records])
    under_way = most = 0
    for _, change in changes:
        under_way += change
        most = max(most, under_way)
    return most


@pytest.mark.parametrize("in_backward", [False, True])
def test_tiles_are_read_whole_several_at_a_time_from_the_start_of_backward(
    start: Callable[..., Any], slow: Slow, in_backward: bool
) -> None:
    slow("read", 0.02)
    model, early = Tower(), []
    # By a group of which backward is not done: the first of all that is stepped, and read on.
    model.get_submodule("blocks.2.0").weight.register_hook(lambda grad: early.append(time.monotonic_ns()))
    how = {"step_in_backward": True, "clip": 0.0} if in_backward else {}
    engine = start(model, **STREAMED, **TILES, **how)
    batches = inputs(2)
    update(engine, next(batches))
    x = next(batches)
    records = recorded(engine, lambda: update(engine, x))
    tiles = state_of(engine)
    reads, writes = (
        [record for record in records if record.kind == kind and record.offset in tiles]
        for kind in ("read", "write")
    )
    assert len(tiles) > 6
    for transfers in (reads, writes):
        assert sorted(record.offset for record in transfers) == sorted(tiles)
        assert all(r.nbytes == len(offsets(engine, tiles[r.offset].state)) for r in transfers)
    assert 3 <= most_at_once(reads) <= engine.plan.staging.slots
    ahead = [record for record in reads if record.submitted < early[-1]]
    assert len(ahead) == engine.plan.staging.slots


def test_tiles_in_memory_are_stepped_while_others_are_read(
    start: Callable[..., Any], slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow("read", 1.0, count=USUAL_SLOTS)
    engine = start(Tower(), offload_optimizer="nvme", ratio=0.5, cache_in_host=False, **TILES)
    optimizer, stepped = engine.optimizer, []
    run = TileBatch.run

    def noted(self: TileBatch, grad_scale: float, label: str) -> None:
        reads = [read for staged in optimizer.stepper._pipeline.staged for read in staged.reads]
        stepped.append((label, [read.done() for read in reads]))
        run(self, grad_scale, label)

    monkeypatch.setattr(TileBatch, "run", noted)
    runs: list[int] = []
    run_tasks = AioContext.run
    monkeypatch.setattr(
        AioContext, "run", lambda self, tasks: (runs.append(len(tasks)), run_tasks(self, tasks))
    )
    update(engine, next(inputs(1)))
    numel = sum(tile.numel for tile in optimizer.stepper._in_place)
    assert stepped[0][0] == f"{numel} elements in memory"
    assert stepped[0][1] == [False] * engine.plan.staging.slots == [False] * USUAL_SLOTS
    assert len(stepped) - 1 + sum(runs) == len(optimizer.stepper._streamed) > 1


def test_what_got_no_gradient_is_not_read(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "USUAL_SLOTS", FEWEST_SLOTS)  # or all is read ahead of knowing it
    engine = start(Tower(), **STREAMED, **TILES, staging={"seconds": 0})
    skipped = 2  # the last block in the order that is expected
    batches = inputs(2)
    update(engine, next(batches))
    x = next(batches)
    records = recorded(engine, lambda: update(engine, x, skip=skipped))
    tiles = state_of(engine)
    moved = {tiles[record.offset].group.name for record in records if record.offset in tiles}
    everything = {tile.group.name for tile in tiles.values()}
    assert everything - moved == {f"blocks.{skipped}"}


class Backwards(Tower):
    """The last block is called first."""

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        x = self.into(x.to(self.into.weight.dtype))
        for block in reversed(self.blocks):
            x = x + block(x)
        result: Tensor = self.out(x).float().pow(2).mean()
        return result


def test_steps_in_backward_read_ahead_in_the_order_of_the_step_before(start: Callable[..., Any]) -> None:
    """At first in that of the model, from its end."""
    engine = start(Backwards(), **STREAMED, **TILES, step_in_backward=True, clip=0.0)
    for x, expected in zip(inputs(3), ("blocks.2", "blocks.0", "blocks.0"), strict=True):
        records = recorded(engine, lambda x=x: update(engine, x))
        tiles = state_of(engine)
        reads = [record for record in records if record.kind == "read" and record.offset in tiles]
        first = sorted(reads, key=lambda record: record.submitted)[:FEWEST_SLOTS]
        assert {tiles[record.offset].group.name for record in first} == {expected}


def test_write_back_runs_on_into_the_next_forward(start: Callable[..., Any], slow: Slow) -> None:
    """Which is over before it is: where parameters are in memory, nothing there waits for state to be written."""
    slow("write", 0.5)
    whole = TILES | {"sub_group_size": 10**9}  # few of them, or it takes long to fill them at first
    engine = start(Tower(), offload_optimizer="nvme", cache_in_host=False, **whole)
    batches, over = inputs(2), []

    def forward() -> None:
        engine(next(batches))
        over.append(time.monotonic_ns())

    records = recorded(engine, lambda: update(engine, next(batches)), forward)
    writes = [record for record in records if record.kind == "write"]
    assert len(writes) == len(state_of(engine))
    assert [record for record in writes if record.submitted < over[0] < record.done]


def test_a_fetch_passes_what_is_written_back_but_not_its_own_write(
    start: Callable[..., Any], slow: Slow
) -> None:
    slow("write", 0.01)
    engine = start(Tower(), **STREAMED, **TILES, prefetch=0, io={"engine": "threads", "queue_depth": 1})
    batches = inputs(2)
    records = recorded(engine, lambda: update(engine, next(batches)), lambda: engine(next(batches)))
    writes = [record for record in records if record.kind == "write"]
    homes = [offsets(engine, group.home) for group in engine._groups if group.home.extent is not None]
    fetches = [r for r in records if r.kind == "read" and any(r.offset == home.start for home in homes)]
    passed = 0
    for fetch in fetches:
        for write in [write for write in writes if write.submitted < fetch.submitted]:
            if fetch.offset <= write.offset < fetch.offset + fetch.nbytes:
                assert write.done <= fetch.issued
            else:
                passed += fetch.issued < write.issued
    assert passed
