"""Tiles go through staging slots, gradients through their window, as in the engine.

See zero3/optimizer/pipeline.py and zero3/passes/gradients.py.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from optim_cpu.kernels import DType, StateFormat, StepBatch
from tiering.placement.plan import FP32, Plan, SubGroup, Tier
from tiering.planning.measure import usual_rule
from tiering.storage.arena import Arena, Completion, Lease, round_up
from tiering.storage.swap_space import StripedExtent
from tiering.storage.tickets import AllOf, Transfer
from tiering.tierbench.replay.fetching import FETCH_PRIORITY, Extents, Transfers, give_up

IN_PLACE_NUMEL = 4 << 20  # elements stepped in memory between two looks at what has arrived
SCRATCH = 8  # slots of memory that kernels go round, for what is not in the tile's own: most caches hold less
# The bytes, in memory, of a word that is a small positive number in 32 bits, and so are both halves in 16: kernels may
# take it for any.
_RANDOM_BITS, _SMALL = 0xFF00FF00, 0x003A003A
_FILLED_AT_ONCE = 4 << 20

_DTYPES = {"fp32": DType.FP32, "bf16": DType.BF16, "fp16": DType.FP16}


class Gradients:
    """Gradients that live on NVMe: a group's are in the window while backward is in it."""

    def __init__(self, plan: Plan, extents: Extents, transfers: Transfers, *, numbers: bool) -> None:
        self._extents = extents
        self._transfers = transfers
        self._open: dict[int, tuple[Lease, list[Transfer]]] = {}
        self.window = filled(plan.grad_window_bytes, "gradient window", numbers=numbers)

    def open(self, group: int, *, accumulates: bool) -> None:
        """The first gradient of ``group`` arrives."""
        extent = self._extents[group]
        if extent is None:
            return
        self._transfers.check(extent.nbytes)
        with self._transfers.stalling():
            lease = self.window.lease(extent.nbytes, "gradients")
        reads: list[Transfer] = []
        self._open[group] = lease, reads
        if accumulates:
            reads.append(self._transfers.read(extent, lease, 0, 0, extent.nbytes, 0))
            self._transfers.wait(reads[0])

    def close(self, group: int) -> None:
        """Backward has left ``group``."""
        extent = self._extents[group]
        if extent is not None and group in self._open:
            lease, _ = self._open.pop(group)
            lease.retire(self._transfers.write(extent, lease, 0, 0, extent.nbytes))

    def forget(self) -> None:
        give_up(list(self._open.values()))
        self._open.clear()


@dataclass(eq=False)
class Tile:
    """A sub-group, and where its parts are on NVMe."""

    planned: SubGroup
    state: StripedExtent | None
    param: StripedExtent | None  # its group's
    grad: StripedExtent | None

    @property
    def streamed(self) -> bool:
        return not (self.state is None and self.param is None and self.grad is None)


@dataclass(eq=False)
class _Staged:
    """A tile in a slot, with the reads that fill it."""

    tile: Tile
    lease: Lease
    reads: list[Transfer] = field(default_factory=list)
    reads_gradient: bool = False


class Tiles:
    """Brings tiles through the plan's staging slots, several at a time, and updates those that stay in memory."""

    def __init__(
        self, plan: Plan, tiles: Sequence[Tile], transfers: Transfers, kernel: Kernel | None
    ) -> None:
        self._load = plan.workload
        self._slots = plan.staging
        self._streamed = [tile for tile in tiles if tile.streamed]
        # On the device they are stepped by the device.
        in_memory = (Tier.HOST,) if not plan.workload.device_is_host else (Tier.HOST, Tier.DEVICE)
        self._in_place = [tile for tile in tiles if not tile.streamed and tile.planned.tier in in_memory]
        self._transfers = transfers
        self._kernel = kernel
        self._waiting: deque[Tile] = deque()  # for a slot
        self._staged: dict[Tile, _Staged] = {}
        self._final = False
        self.staging = filled(plan.staging.nbytes, "staging", numbers=kernel is not None)

    @property
    def read_so_far(self) -> int:
        """Bytes of tiles that wait for their update which have been read."""
        return sum(read.nbytes for each in self._staged.values() for read in each.reads if read.done())

    def expect(self) -> None:
        """A step comes: start to read the state of the first tiles."""
        self._waiting.extend(self._streamed)
        self._final = False
        self.read_ahead()

    def read_ahead(self) -> None:
        """Go on to read, as far as slots have come free."""
        while self._waiting:
            lease = self.staging.try_lease(self._slots.slot_bytes, "staging")
            if lease is None:
                return
            self._stage(self._waiting.popleft(), lease)

    def step(self) -> None:
        """Update all tiles, those whose bytes are there first; gradients are final."""
        if not self._staged and not self._waiting:
            self.expect()
        self._final = True
        for staged in self._staged.values():
            self._read_gradient(staged)
        in_place = deque(self._in_place if self._kernel is not None else ())
        while True:
            self.read_ahead()
            arrived = next((each for each in self._staged.values() if _is_there(each)), None)
            if arrived is not None:
                self._step_streamed(arrived)
            elif in_place:
                self._step_in_place(in_place)
            elif self._staged:
                self._step_streamed(next(iter(self._staged.values())))
            elif self._waiting:
                with self._transfers.stalling():
                    lease = self.staging.lease(self._slots.slot_bytes, "staging")
                self._stage(self._waiting.popleft(), lease)
            else:
                return

    def forget(self) -> None:
        """Give up the step: free the slots of what was read."""
        self._waiting.clear()
        give_up([(each.lease, each.reads) for each in self._staged.values()])
        self._staged.clear()

    def _stage(self, tile: Tile, lease: Lease) -> None:
        staged = self._staged[tile] = _Staged(tile, lease)
        if tile.state is not None:
            self._read(staged, tile.state, 0, 0, tile.state.nbytes)
        if self._load.steps_need_params and tile.param is not None:
            self._read(
                staged, tile.param, self._slots.param_offset, *self._within(tile, self._load.compute_itemsize)
            )
        if self._final:
            self._read_gradient(staged)

    def _read_gradient(self, staged: _Staged) -> None:
        if staged.tile.grad is not None and not staged.reads_gradient:
            staged.reads_gradient = True
            part = self._within(staged.tile, self._load.grad_itemsize)
            self._read(staged, staged.tile.grad, self._slots.grad_offset, *part, FETCH_PRIORITY)

    def _within(self, tile: Tile, itemsize: int) -> tuple[int, int]:
        """Offset and bytes of the tile in an array of its group."""
        return tile.planned.start * itemsize, tile.planned.numel * itemsize

    def _read(
        self, staged: _Staged, extent: StripedExtent, at: int, offset: int, nbytes: int, priority: int = 0
    ) -> None:
        staged.reads.append(self._transfers.read(extent, staged.lease, at, offset, nbytes, priority))

    def _step_streamed(self, staged: _Staged) -> None:
        tile = staged.tile
        param = self._within(tile, self._load.compute_itemsize)
        state_bytes = 0 if tile.state is None else tile.state.nbytes
        self._transfers.check((param[1] if tile.param is not None else 0) + state_bytes)
        for read in staged.reads:
            self._transfers.wait(read)
        if self._kernel is not None:
            self._kernel.step(tile, staged.lease)
        del self._staged[tile]
        writes: list[Completion] = []
        if tile.param is not None:
            writes.append(self._transfers.write(tile.param, staged.lease, self._slots.param_offset, *param))
        if tile.state is not None:
            writes.append(self._transfers.write(tile.state, staged.lease, 0, 0, tile.state.nbytes))
        staged.lease.retire(AllOf[Completion](writes))

    def _step_in_place(self, due: deque[Tile]) -> None:
        assert self._kernel is not None
        numel = 0
        while due and (numel < IN_PLACE_NUMEL or not (self._staged or self._waiting)):
            self._transfers.check()
            numel += due[0].planned.numel
            self._kernel.step(due.popleft(), None)


def _is_there(staged: _Staged) -> bool:
    return all(read.done() for read in staged.reads)


class Kernel:
    """The optimizer's kernel on tiles, on all threads. What a tile has in no slot is taken from memory gone round."""

    def __init__(self, plan: Plan) -> None:
        load = plan.workload
        self._load, self._slots = load, plan.staging
        largest = max((tile.numel for tile in plan.sub_groups), default=0)
        self._param_at = largest * load.state_itemsize
        self._grad_at = self._param_at + largest * load.compute_itemsize
        self._room = scratch_bytes(plan) // SCRATCH
        self._scratch = filled(scratch_bytes(plan), "scratch", numbers=True)
        self._batch = StepBatch()
        self._rule = usual_rule(load.state_tensors)
        self._turn = 0
        self.seconds = 0.0

    def step(self, tile: Tile, slot: Lease | None) -> None:
        load, numel = self._load, tile.planned.numel
        here = self._scratch.address + self._turn * self._room
        self._turn = (self._turn + 1) % SCRATCH
        state, param, grad = here, here + self._param_at, here + self._grad_at
        if slot is not None:
            state = slot.address if tile.state is not None else state
            param = slot.address + self._slots.param_offset if tile.param is not None else param
            grad = slot.address + self._slots.grad_offset if tile.grad is not None else grad
        separate = load.master_itemsize == FP32
        moments = state + numel * load.master_itemsize
        self._batch.add(
            numel,
            self._batch.add_rule(self._rule),
            param=state if separate else param,
            remainder=state if load.split else 0,
            state=tuple(moments + i * numel * load.moment_itemsize for i in range(load.state_tensors)),
            state_format=StateFormat.FP32 if load.moment_itemsize == FP32 else StateFormat.BF16_STOCHASTIC,
            grad=grad,
            grad_dtype=DType.FP32 if load.grad_itemsize == FP32 else _DTYPES[load.compute_dtype],
            out=param if separate else 0,
            out_dtype=_DTYPES[load.compute_dtype],
            first_index=tile.planned.start,
        )
        began = time.monotonic()
        self._batch.run()
        self.seconds += time.monotonic() - began
        self._batch.clear()


def scratch_bytes(plan: Plan) -> int:
    """Memory that a Kernel takes."""
    load = plan.workload
    largest = max((tile.numel for tile in plan.sub_groups), default=0)
    return SCRATCH * round_up(largest * (load.state_itemsize + load.compute_itemsize + load.grad_itemsize))


def filled(nbytes: int, name: str, *, numbers: bool) -> Arena:
    """Memory that does not compress; with ``numbers``, as far as it holds what kernels can compute with."""
    arena = Arena.map(nbytes, name)
    for at in range(0, len(arena.memory), _FILLED_AT_ONCE):
        part = arena.memory[at : at + _FILLED_AT_ONCE]
        values = os.urandom(len(part))
        if numbers:
            words = len(part) // 4
            bits, small = (int.from_bytes(word.to_bytes(4) * words) for word in (_RANDOM_BITS, _SMALL))
            values = (int.from_bytes(values) & bits | small).to_bytes(len(part))
        part[:] = values
    return arena
