"""The update and the gradients of a replayed step: tiles in staging slots, gradients in their window, as in the engine.

Tiles pass through the engine's `StagingPipeline`. For gradients see zero3/passes/gradients.py.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from optim_cpu.kernels import DType, StateFormat, StepBatch
from tiering.placement.plan import Plan, SubGroup
from tiering.placement.tenants import GRADIENTS
from tiering.placement.workload import FP32, Tier, Workload
from tiering.planning.measure import usual_rule
from tiering.storage.arena import Arena, Lease, round_up
from tiering.storage.read_ahead import FETCH_PRIORITY, Staged, StagingPipeline
from tiering.storage.request import Completion
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.tickets import Ticket
from tiering.tierbench.replay.fetching import Extents, Transfers, cancel_reads

IN_PLACE_NUMEL = 4 << 20  # elements stepped in memory between two looks at what has arrived
SCRATCH = 8  # slots of memory that kernels go round, for what is not in the tile's own: most caches hold less
# The bytes, in memory, of a word that is a small positive number in 32 bits, and so are both halves in 16: kernels may
# take it for any.
_RANDOM_BITS, _SMALL = 0xFF00FF00, 0x003A003A
_FILLED_AT_ONCE = 4 << 20

_DTYPES = {"fp32": DType.FP32, "bf16": DType.BF16, "fp16": DType.FP16}


class Gradients:
    """Gradients with a home on NVMe: those of a group are in the window while backward is in the group."""

    def __init__(self, plan: Plan, extents: Extents, transfers: Transfers, *, numbers: bool) -> None:
        self._extents = extents
        self._transfers = transfers
        self._open: dict[int, tuple[Lease, list[Ticket]]] = {}
        self.window = filled(plan.windows[GRADIENTS], "gradient window", numbers=numbers)

    def open(self, group: int, *, accumulates: bool) -> None:
        """The first gradient of ``group`` arrives; ``accumulates``: it is added to earlier ones, which are read."""
        extent = self._extents[group]
        if extent is None:
            return
        self._transfers.check(extent.nbytes)
        with self._transfers.stalling():
            lease = self.window.lease(extent.nbytes, "gradients")
        reads: list[Ticket] = []
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
        """Free the window."""
        cancel_reads([read for _, reads in self._open.values() for read in reads])
        for lease, _ in self._open.values():
            lease.release()
        self._open.clear()


@dataclass(eq=False)
class Tile:
    """A sub-group, with the extents of its state and of its group's parameters and gradients; None: in memory."""

    planned: SubGroup
    load: Workload  # sizes per element of its group
    state: StripedExtent | None
    param: StripedExtent | None
    grad: StripedExtent | None

    @property
    def group(self) -> int:
        return self.planned.group

    @property
    def streamed(self) -> bool:
        return not (self.state is None and self.param is None and self.grad is None)

    def part(self, itemsize: int) -> tuple[int, int]:
        """The offset and the bytes of the tile in an array of its group."""
        return self.planned.start * itemsize, self.planned.numel * itemsize


class _SlotTransfers:
    """Moves the bytes of one tile between its extents and its slot, as zero3/optimizer/tile_stepper.py does."""

    def __init__(self, plan: Plan, transfers: Transfers) -> None:
        self._slots = plan.staging
        self._transfers = transfers

    def start_reads(self, staged: Staged[Tile, Ticket]) -> None:
        tile = staged.tile
        if tile.state is not None:
            self._read(staged, tile.state, 0, 0, tile.state.nbytes)
        if tile.load.steps_need_params and tile.param is not None:
            part = tile.part(tile.load.compute_itemsize)
            self._read(staged, tile.param, self._slots.param_offset, *part)

    def start_gradient_read(self, staged: Staged[Tile, Ticket]) -> bool:
        tile = staged.tile
        if tile.grad is None:
            return False
        part = tile.part(tile.load.grad_itemsize)
        self._read(staged, tile.grad, self._slots.grad_offset, *part, FETCH_PRIORITY)
        return True

    def wait_for_reads(self, reads: Sequence[Ticket]) -> None:
        for read in reads:
            self._transfers.wait(read)

    def before_discard(self, reads: Sequence[Ticket]) -> None:
        """Nothing: no parameters are read from a device."""

    def start_writes(self, staged: Staged[Tile, Ticket]) -> list[Completion]:
        tile, writes = staged.tile, list[Completion]()
        if tile.param is not None:
            part = tile.part(tile.load.compute_itemsize)
            writes.append(self._transfers.write(tile.param, staged.lease, self._slots.param_offset, *part))
        if tile.state is not None:
            writes.append(self._transfers.write(tile.state, staged.lease, 0, 0, tile.state.nbytes))
        return writes

    def _read(
        self,
        staged: Staged[Tile, Ticket],
        extent: StripedExtent,
        at: int,
        offset: int,
        nbytes: int,
        priority: int = 0,
    ) -> None:
        staged.reads.append(self._transfers.read(extent, staged.lease, at, offset, nbytes, priority))


class Tiles:
    """Updates all tiles: those with extents in staging slots, several at a time, the others in memory."""

    def __init__(
        self, plan: Plan, tiles: Sequence[Tile], transfers: Transfers, kernel: Kernel | None
    ) -> None:
        self._streamed = [tile for tile in tiles if tile.streamed]
        # Tiles in device memory are updated by the device.
        in_memory = (Tier.HOST,) if not plan.workload.device_is_host else (Tier.HOST, Tier.DEVICE)
        self._in_place = [tile for tile in tiles if not tile.streamed and tile.planned.tier in in_memory]
        self._transfers = transfers
        self._kernel = kernel
        self._due: dict[Tile, None] = {}  # streamed tiles that this step has not updated yet, in order
        self.staging = filled(plan.staging.nbytes, "staging", numbers=kernel is not None)
        self._pipeline = StagingPipeline[Tile, Ticket](
            _SlotTransfers(plan, transfers), self.staging, plan.staging.slot_bytes, transfers.stalling
        )

    @property
    def read_bytes(self) -> int:
        """Bytes in the slots of tiles that wait for their update."""
        reads = (read for staged in self._pipeline.staged for read in staged.reads)
        return sum(read.nbytes for read in reads if read.done())

    def expect(self) -> None:
        """A step comes: start to read the state of the first tiles."""
        self._due = dict.fromkeys(self._streamed)
        self._pipeline.expect(self._due)
        self._pipeline.read_ahead()

    def read_ahead(self) -> None:
        """Continue to read, as far as slots have become free."""
        self._pipeline.read_ahead()

    def step(self) -> None:
        """Update all tiles, those that have arrived first; gradients are final."""
        if not self._due:
            self.expect()
        for group in dict.fromkeys(tile.group for tile in self._due):
            self._pipeline.final(group)
        self._pipeline.expect_only(self._due)
        in_place = deque(self._in_place if self._kernel is not None else ())
        while True:
            self._pipeline.read_ahead()
            arrived = self._pipeline.first_arrived(self._due)
            if arrived is not None:
                self._step_streamed(arrived)
            elif in_place:
                self._step_in_place(in_place)
            elif self._due:
                self._step_streamed(next(iter(self._due)))
            else:
                return

    def forget(self) -> None:
        """Abandon the step: free the slots of the tiles that were read."""
        cancel_reads([read for staged in self._pipeline.staged for read in staged.reads])
        for staged in self._pipeline.staged:
            staged.reads.clear()  # a cancelled read would fail where the lease retires
        self._pipeline.discard_all()
        self._pipeline.expect(())
        self._due.clear()

    def _step_streamed(self, tile: Tile) -> None:
        param_bytes = 0 if tile.param is None else tile.part(tile.load.compute_itemsize)[1]
        self._transfers.check(param_bytes + (0 if tile.state is None else tile.state.nbytes))
        staged = self._pipeline.acquire(tile)
        del self._due[tile]
        if self._kernel is not None:
            self._kernel.step(tile, staged.lease)
        self._pipeline.release(staged)

    def _step_in_place(self, due: deque[Tile]) -> None:
        assert self._kernel is not None
        numel = 0
        while due and (numel < IN_PLACE_NUMEL or not self._due):
            self._transfers.check()
            numel += due[0].planned.numel
            self._kernel.step(due.popleft(), None)


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
        scratch = self._scratch.address + self._turn * self._room
        self._turn = (self._turn + 1) % SCRATCH
        state, param, grad = scratch, scratch + self._param_at, scratch + self._grad_at
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
