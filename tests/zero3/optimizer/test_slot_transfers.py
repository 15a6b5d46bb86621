"""The pipeline of tiles alone, with transfers that end when a test says so.

Each tile is a page of elements' worth of state, parameters and gradients, in extents that do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiering.placement.plan import Staging
from tiering.storage.arena import PAGE, Arena, LeasePart
from tiering.storage.read_ahead import FETCH_PRIORITY
from zero3.device.home import Home
from zero3.device.timeline import StallClock, Timeline
from zero3.optimizer.slot_transfers import SlotTransfers
from zero3.optimizer.tiles import Tile

ITEMSIZE = 2  # of parameters and gradients


NUMEL = PAGE // ITEMSIZE


STATE = 3 * PAGE


@dataclass(eq=False)
class Extent:
    """Something on NVMe, by name."""

    name: str
    nbytes: int


@dataclass(eq=False)
class Transfer:
    """A completion that is over when the test says so, or when it is waited for."""

    what: str
    offset: int
    at: int  # where in memory
    nbytes: int
    priority: int
    ended: bool = False

    def done(self) -> bool:
        return self.ended

    def wait(self, timeout: float | None = None) -> int:
        self.ended = True
        return self.nbytes


@dataclass
class Swap:
    """Notes what is asked of it. ``refuses`` is the name of an extent that cannot be read."""

    reads: list[Transfer] = field(default_factory=list)
    writes: list[Transfer] = field(default_factory=list)
    refuses: str = ""

    def swap_in(self, extent: Extent, part: LeasePart, *, offset: int = 0, priority: int = 0) -> Transfer:
        if extent.name == self.refuses:
            raise OSError("the disk is gone")
        assert 0 <= offset <= offset + part.nbytes <= extent.nbytes
        self.reads.append(Transfer(extent.name, offset, part.address, part.nbytes, priority))
        return self.reads[-1]

    def swap_out(self, extent: Extent, part: LeasePart, *, offset: int = 0) -> Transfer:
        assert 0 <= offset <= offset + part.nbytes <= extent.nbytes
        self.writes.append(Transfer(extent.name, offset, part.address, part.nbytes, 0))
        return self.writes[-1]

    def end(self, *whats: str) -> None:
        """What is under way for ``whats`` is over."""
        for transfer in (*self.reads, *self.writes):
            transfer.ended |= transfer.what in whats


@dataclass(eq=False)
class Group:
    """What the pipeline asks of a ParamGroup."""

    index: int
    shard_home: Home
    dtype: torch.dtype = torch.bfloat16
    in_fp32: bool = False


class Alone:
    """The optimizer's pipeline over ``tiles``, two to a group, named 0, 1, 2: "state 0", "params 0" (of a group)."""

    def __init__(
        self,
        count: int,
        slots: int,
        *,
        params: bool = False,
        reads_params: bool = False,
        grads: bool = False,
        state: bool = True,
    ) -> None:
        self.swap = Swap()
        self.windows: dict[Any, int] = {}  # addresses of gradients that are in memory
        groups: list[Any] = [
            Group(index, self._home(f"params {index}", 2 * PAGE, swapped=params))
            for index in range(-(-count // 2))
        ]
        self.tiles = []
        for index in range(count):
            start, home = index % 2 * NUMEL, self._home(f"state {index}", STATE, swapped=state)
            self.tiles.append(Tile(groups[index // 2], start, start + NUMEL, home, (), ()))
        staging = Staging(slots, STATE + 2 * PAGE, STATE, STATE + PAGE)
        self.arena = Arena.map(staging.nbytes, "staging")
        homes = [self._home(f"grads {group.index}", 2 * PAGE, swapped=grads) for group in groups]
        windows = SimpleNamespace(address=lambda group: self.windows.get(group) or homes[group.index].address)
        gradients: Any = SimpleNamespace(homes=homes, dtype_of=lambda group: torch.bfloat16, windows=windows)
        timeline = Timeline()
        plan = SimpleNamespace(workload=SimpleNamespace(steps_need_params=reads_params), staging=staging)
        parts: Any = SimpleNamespace(
            plan=plan, staging=self.arena, swap=self.swap, stalls=StallClock(timeline), timeline=timeline
        )
        self.transfers = SlotTransfers(gradients, parts, is_stepped=lambda piece: True)
        self.pipeline = self.transfers.pipeline()

    @staticmethod
    def _home(name: str, nbytes: int, *, swapped: bool) -> Home:
        if swapped:
            extent: Any = Extent(name, nbytes)
            return Home(extent=extent)
        return Home(tensor=torch.zeros(nbytes, dtype=torch.uint8))

    def reads(self) -> list[str]:
        """What was asked for so far."""
        return [transfer.what for transfer in self.swap.reads]


@pytest.mark.parametrize("slots", [3, 4, 6])
def test_as_many_reads_are_under_way_as_there_are_slots(slots: int) -> None:
    """In the order that is expected, each of its whole extent at once."""
    alone = Alone(10, slots)
    order = alone.tiles[::-1]
    alone.pipeline.expect(order)
    alone.pipeline.read_ahead()
    alone.pipeline.read_ahead()
    assert alone.reads() == [f"state {9 - index}" for index in range(slots)]
    reads = alone.swap.reads
    assert {(read.offset, read.nbytes, read.priority) for read in reads} == {(0, STATE, 0)}
    assert len({read.at for read in reads}) == slots


@pytest.mark.parametrize("slots", [3, 4])
def test_one_is_stepped_and_one_written_while_the_others_are_read(slots: int) -> None:
    """A slot is free again when what was in it is written, and not before."""
    alone = Alone(8, slots)
    swap, pipeline = alone.swap, alone.pipeline
    pipeline.expect(alone.tiles)
    pipeline.read_ahead()
    swap.end("state 0")
    first = pipeline.acquire(alone.tiles[0])
    pipeline.release(first)
    assert [(write.what, write.offset, write.at, write.nbytes) for write in swap.writes] == [
        ("state 0", 0, first.lease.address, STATE)
    ]
    pipeline.read_ahead()
    assert len(swap.reads) == slots
    assert [read.done() for read in swap.reads] == [True] + [False] * (slots - 1)
    swap.end("state 1")
    second = pipeline.acquire(alone.tiles[1])  # while the first is written and the others are read
    pipeline.read_ahead()
    assert len(swap.reads) == slots
    swap.writes[0].ended = True
    pipeline.read_ahead()
    assert alone.reads()[slots:] == [f"state {slots}"]
    assert swap.reads[slots].at == first.lease.address
    pipeline.release(second)


def test_a_gradient_is_read_as_soon_as_it_is_final_before_state_that_is_queued() -> None:
    alone = Alone(6, 4, grads=True)
    pipeline, groups = alone.pipeline, [tile.group for tile in alone.tiles[::2]]
    pipeline.expect(alone.tiles)
    pipeline.read_ahead()
    assert alone.reads() == ["state 0", "state 1", "state 2", "state 3"]
    pipeline.final(groups[1])
    pipeline.final(groups[1])
    gradients = alone.swap.reads[4:]
    assert [(read.what, read.offset, read.nbytes) for read in gradients] == [
        ("grads 1", 0, PAGE),
        ("grads 1", PAGE, PAGE),
    ]
    assert {read.priority for read in gradients} == {FETCH_PRIORITY}
    assert FETCH_PRIORITY > 0
    for gradient, state in zip(gradients, alone.swap.reads[2:4], strict=True):  # of one slot
        assert gradient.at == state.at + STATE + PAGE
    pipeline.final(groups[2])
    pipeline.release(pipeline.acquire(alone.tiles[2]))
    alone.swap.end("state 2")
    pipeline.read_ahead()
    assert alone.reads()[6:] == ["state 4", "grads 2"]
    pipeline.acquire(alone.tiles[0])  # final, or it would not be taken
    assert alone.reads()[8:] == ["grads 0"]


def test_a_gradient_in_memory_is_not_read() -> None:
    """At home, or in the window in which it accumulates."""
    alone = Alone(4, 3, grads=True)
    groups = [alone.tiles[0].group, alone.tiles[2].group]
    alone.windows[groups[1]] = 1 << 20
    alone.pipeline.expect(alone.tiles[1:])
    alone.pipeline.read_ahead()
    for group in groups:
        alone.pipeline.final(group)
    assert alone.reads() == ["state 1", "state 2", "state 3", "grads 0"]
    staged = [alone.pipeline.acquire(tile) for tile in alone.tiles[1:3]]
    addresses = [alone.transfers.grad_address(each.tile, each) for each in staged]
    assert addresses == [staged[0].lease.address + STATE + PAGE, 1 << 20]
    at_home = Alone(1, 3)
    at_home.pipeline.expect(at_home.tiles)
    at_home.pipeline.final(at_home.tiles[0].group)
    at_home.pipeline.acquire(at_home.tiles[0])
    assert at_home.reads() == ["state 0"]


@pytest.mark.parametrize("needed", [True, False])
def test_parameters_are_read_if_the_step_needs_them_and_written_always(needed: bool) -> None:
    alone = Alone(2, 3, params=True, reads_params=needed)
    alone.pipeline.expect(alone.tiles)
    alone.pipeline.read_ahead()
    reads = [(read.what, read.offset, read.nbytes) for read in alone.swap.reads]
    expected = [("params 0", 0, PAGE), ("params 0", PAGE, PAGE)] if needed else []
    assert [read for read in reads if read[0] == "params 0"] == expected
    staged = alone.pipeline.acquire(alone.tiles[1])
    assert alone.transfers.param_address(staged.tile, staged) == staged.lease.address + STATE
    alone.pipeline.release(staged)
    assert sorted((write.what, write.offset, write.at, write.nbytes) for write in alone.swap.writes) == [
        ("params 0", PAGE, staged.lease.address + STATE, PAGE),
        ("state 1", 0, staged.lease.address, STATE),
    ]


def test_what_lives_in_host_memory_is_neither_read_nor_written() -> None:
    alone = Alone(2, 3, params=True, state=False)
    alone.pipeline.expect(alone.tiles)
    alone.pipeline.read_ahead()
    assert alone.reads() == []
    alone.pipeline.release(alone.pipeline.acquire(alone.tiles[0]))
    assert [write.what for write in alone.swap.writes] == ["params 0"]
    state_only = Alone(2, 3)
    tile = state_only.tiles[1]
    staged = state_only.pipeline.acquire(tile)
    assert state_only.transfers.param_address(tile, staged) == tile.group.shard_home.address + PAGE
    state_only.pipeline.release(staged)
    assert [write.what for write in state_only.swap.writes] == ["state 1"]


def test_what_has_arrived_can_be_taken_first() -> None:
    """With all of its reads, and out of those that are wanted; of several the one that came first."""
    alone = Alone(4, 4, grads=True)
    tiles, pipeline = alone.tiles, alone.pipeline
    pipeline.expect(tiles)
    pipeline.read_ahead()
    assert pipeline.first_arrived(tiles) is None
    pipeline.final(tiles[2].group)
    alone.swap.end("state 2", "state 3")
    assert pipeline.first_arrived(tiles) is None  # their gradients are under way
    alone.swap.end("grads 1")
    assert pipeline.first_arrived(tiles) is tiles[2]
    assert pipeline.first_arrived(tiles[3:]) is tiles[3]
    alone.swap.end("state 0")
    assert pipeline.first_arrived(tiles[2:]) is tiles[2]
    pipeline.release(pipeline.acquire(tiles[2]))
    assert pipeline.first_arrived(tiles[2:]) is tiles[3]


def test_an_order_that_was_wrong_frees_the_slot_that_is_needed_last() -> None:
    """As soon as nothing is read into it any more; and it is read again, in its turn."""
    alone = Alone(6, 3)
    tiles, pipeline, swap = alone.tiles, alone.pipeline, alone.swap
    pipeline.expect(tiles)
    pipeline.read_ahead()
    last = swap.reads[2]
    staged = pipeline.acquire(tiles[5])
    assert last.done(), "a slot was given away while it was filled"
    assert alone.reads() == ["state 0", "state 1", "state 2", "state 5"]
    assert staged.lease.address == last.at
    pipeline.release(staged)
    swap.end("state 5")
    pipeline.read_ahead()
    assert alone.reads()[4:] == ["state 2"]
    for tile in tiles[:5]:
        pipeline.read_ahead()
        pipeline.release(pipeline.acquire(tile))
        for write in swap.writes:
            write.ended = True
    pipeline.read_ahead()
    assert alone.reads()[5:] == ["state 3", "state 4"]
    assert alone.arena.try_lease(alone.arena.capacity, "others") is not None


def test_without_any_slot_read_ahead_a_tile_waits_for_what_is_written() -> None:
    alone = Alone(4, 3)
    alone.pipeline.expect(())
    for tile in alone.tiles[:3]:
        alone.pipeline.release(alone.pipeline.acquire(tile))
    assert [write.done() for write in alone.swap.writes] == [False] * 3
    alone.pipeline.acquire(alone.tiles[3])
    assert [write.done() for write in alone.swap.writes] == [True, False, False]


def test_only_what_is_stepped_stays_and_is_read_on() -> None:
    alone = Alone(8, 3)
    tiles, pipeline = alone.tiles, alone.pipeline
    pipeline.expect(tiles)
    pipeline.read_ahead()
    pipeline.expect_only([tiles[1], tiles[5], tiles[6], tiles[7]])
    alone.swap.end("state 0")
    pipeline.read_ahead()
    assert alone.reads()[3:] == ["state 5"]  # the slot of tile 2 is being filled, still
    alone.swap.end("state 2")
    pipeline.read_ahead()
    assert alone.reads()[4:] == ["state 6"]
    for tile in (tiles[1], tiles[5], tiles[6], tiles[7]):
        pipeline.release(pipeline.acquire(tile))
    assert sorted(write.what for write in alone.swap.writes) == ["state 1", "state 5", "state 6", "state 7"]
    assert alone.reads()[5:] == ["state 7"]


def test_what_was_taken_is_not_read_again_in_its_step_and_is_in_the_next() -> None:
    alone = Alone(2, 3)
    pipeline = alone.pipeline
    for step in (1, 2):
        pipeline.expect(alone.tiles)
        pipeline.release(pipeline.acquire(alone.tiles[1]))  # out of order
        pipeline.read_ahead()
        pipeline.release(pipeline.acquire(alone.tiles[0]))
        pipeline.expect_only(alone.tiles)
        pipeline.read_ahead()
        assert alone.reads() == ["state 1", "state 0"] * step
        for write in alone.swap.writes:
            write.ended = True


def test_what_is_final_is_so_for_one_step() -> None:
    alone = Alone(1, 3, grads=True)
    alone.pipeline.expect(alone.tiles)
    alone.pipeline.final(alone.tiles[0].group)
    alone.pipeline.expect(alone.tiles)
    alone.pipeline.read_ahead()
    assert alone.reads() == ["state 0"]


def test_slots_that_are_released_are_read_again() -> None:
    alone = Alone(5, 3)
    pipeline = alone.pipeline
    pipeline.expect(alone.tiles)
    pipeline.release(pipeline.acquire(alone.tiles[0]))
    alone.swap.writes[0].ended = True
    pipeline.read_ahead()
    assert alone.reads() == ["state 0", "state 1", "state 2", "state 3"]
    pipeline.discard_all()
    assert alone.arena.try_lease(1, "staging") is None  # they are being filled
    alone.swap.end("state 1", "state 2", "state 3")
    everything = alone.arena.try_lease(alone.arena.capacity, "others")
    assert everything is not None
    pipeline.read_ahead()
    assert len(alone.swap.reads) == 4
    everything.release()
    pipeline.read_ahead()
    assert alone.reads()[4:] == ["state 1", "state 2", "state 3"]


@pytest.mark.parametrize("refused", ["state 1", "params 0"])
def test_a_read_that_is_refused_keeps_no_slot(refused: str) -> None:
    alone = Alone(3, 3, params=True, reads_params=True)
    alone.swap.refuses = refused
    alone.pipeline.expect(alone.tiles[1:])
    with pytest.raises(OSError, match="the disk is gone"):
        alone.pipeline.read_ahead()
    assert alone.pipeline.first_arrived(alone.tiles) is None
    alone.swap.end("state 1")
    assert alone.arena.try_lease(alone.arena.capacity, "others") is not None
