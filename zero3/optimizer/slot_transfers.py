"""Moves tiles between their homes and the staging slots: SlotTransfers one tile, a TileRun many.

A slot holds, each part at a multiple of 4096 bytes: optimizer state | parameter | gradient, except for parts that live
in host memory. The state is one range of its extent: one read and one write. The state, and parameters where the step
reads them, do not change before the step, so they are read ahead from the start of the step's last backward. A gradient
is read as soon as it is final. Writes continue into the next forward; slab_file.py makes a read of the same bytes wait
for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

import torch

from optim_cpu import kernels
from optim_cpu.dtypes import DTYPES
from optim_cpu.kernels import DType, PreparedStep
from tiering.placement.tenants import OPTIMIZER_STATE, PARAMETERS
from tiering.storage import read_ahead
from tiering.storage.arena import LeasePart
from tiering.storage.request import Completion
from tiering.storage.striped_extent import OrderedTransfer, StripedExtent
from tiering.storage.tasks import Task
from tiering.storage.tickets import AllOf, Ticket
from zero3.device.home import Home
from zero3.device.storages import as_tensor
from zero3.device.streams import Event
from zero3.device.tiers import Tiers
from zero3.optimizer.tiles import FP32, Tile
from zero3.params.layout import Piece
from zero3.passes.gradients import GradientStore

Staged = read_ahead.Staged[Tile, Completion]
StatePipeline = read_ahead.StagingPipeline[Tile, Completion]


class SlotTransfers:
    """Moves the bytes of one tile between its homes and its slot. The staging pipeline decides when.

    ``is_stepped`` says whether the optimizer's step updates a parameter.
    """

    def __init__(self, gradients: GradientStore, tiers: Tiers, is_stepped: Callable[[Piece], bool]) -> None:
        self._is_stepped = is_stepped
        self._gradients = gradients
        self._tiers = tiers
        self._steps_need_params = tiers.plan.workload.steps_need_params
        self._slots = tiers.plan.staging
        self._written: Event | None = None  # the last copy of stepped parameters to the device

    def pipeline(self) -> StatePipeline:
        """A pipeline over the staging slots of the plan."""
        tiers = self._tiers
        return StatePipeline(
            self, tiers.staging, self._slots.slot_bytes, lambda: tiers.stalls.waiting_for(read_ahead.SLOT)
        )

    def start_reads(self, staged: Staged) -> None:
        """Start to read the state, and the parameters if the step reads them."""
        tile, home, itemsize = staged.tile, staged.tile.group.shard_home, staged.tile.group.dtype.itemsize
        if tile.state.extent is not None:
            self._read(staged, tile.state, 0, 0, tile.state.extent.nbytes)
        needs_params = self._needs_params(tile)
        if needs_params and home.extent is not None:
            param_at = self._slots.param_offset
            self._read(staged, home, param_at, tile.start * itemsize, tile.numel * itemsize)
        elif needs_params and home.on_device:
            streams, copies = self._tiers.streams, self._tiers.copies
            assert home.tensor is not None and streams is not None and copies is not None
            source = home.tensor[tile.start * itemsize : tile.end * itemsize]
            target = as_tensor(staged.lease)[self._slots.param_offset :][: source.numel()]
            # Compute may still write these parameters: the copy comes after what it was given so far.
            staged.reads.append(
                copies.to_host(target, source, after=[streams.compute.record()], kind=PARAMETERS)
            )

    def start_gradient_read(self, staged: Staged) -> bool:
        """Start to read the gradient, before all queued reads of state: those started earlier and are needed later."""
        tile, itemsize = staged.tile, self._gradients.dtype_of(staged.tile.group).itemsize
        if self._gradients.windows.address(tile.group):
            return False
        home = self._gradients.homes[tile.group.index]
        grad_at, offset = self._slots.grad_offset, tile.start * itemsize
        self._read(staged, home, grad_at, offset, tile.numel * itemsize, read_ahead.FETCH_PRIORITY)
        return True

    def wait_for_reads(self, reads: Sequence[Completion]) -> None:
        with self._tiers.stalls.waiting_for(OPTIMIZER_STATE):
            for read in reads:
                read.wait()

    def before_discard(self, reads: Sequence[Completion]) -> None:
        """Order later changes of parameters on the device behind the copies that still read them."""
        for read in reads:
            # The copy still reads the parameters at home, and nobody else waits for it.
            if isinstance(read, Event):
                assert self._tiers.streams is not None
                self._tiers.streams.compute.wait_for(read)

    def start_writes(self, staged: Staged) -> list[Completion]:
        """Start to write the parameters and the state, each unless it lives in host memory."""
        tile, swap = staged.tile, self._tiers.swap
        home, writes = tile.group.shard_home, list[Completion]()
        itemsize = tile.group.dtype.itemsize
        if not home.on_host and not self._needs_params(tile):
            # Before the write, which takes the slot as it is.
            self._complete_parameters(staged)
        if not home.on_host and home.extent is None:
            streams, copies = self._tiers.streams, self._tiers.copies
            assert home.tensor is not None and streams is not None and copies is not None
            source = as_tensor(staged.lease)[self._slots.param_offset :][: tile.numel * itemsize]
            target = home.tensor[tile.start * itemsize :][: source.numel()]
            # Compute may still read the old parameters.
            self._written = copies.to_device(
                target, source, after=[streams.compute.record()], kind=PARAMETERS
            )
            # The slot stays until the copy has read it.
            writes.append(self._written)
        for extent, part, offset in self._swapped_out(staged):
            assert swap is not None
            writes.append(swap.swap_out(extent, part, offset=offset))
        return writes

    def moves_by_swap_alone(self, tile: Tile) -> bool:
        """Whether the transfers of the tile are reads and writes of NVMe, without other work before or behind them."""
        home = tile.group.shard_home
        if not home.on_host and home.extent is None:
            return False
        # Otherwise, parameters that are not stepped are filled in before the write.
        return (
            home.on_host
            or self._needs_params(tile)
            or all(self._is_stepped(segment.piece) for segment in tile.segments)
        )

    def ordered_reads(self, staged: Staged, first: Sequence[Ticket]) -> list[OrderedTransfer]:
        """All reads of a tile that moves by swap alone, after ``first``; its gradient is final."""
        tile, home, itemsize = staged.tile, staged.tile.group.shard_home, staged.tile.group.dtype.itemsize
        reads: list[tuple[StripedExtent, LeasePart, int, int]] = []
        if tile.state.extent is not None:
            reads.append((tile.state.extent, staged.lease.part(0, tile.state.extent.nbytes), 0, 0))
        if home.extent is not None and self._needs_params(tile):
            part = staged.lease.part(self._slots.param_offset, tile.numel * itemsize)
            reads.append((home.extent, part, tile.start * itemsize, 0))
        if not self._gradients.windows.address(tile.group):
            gradient = self._gradients.homes[tile.group.index]
            size = self._gradients.dtype_of(tile.group).itemsize
            part = staged.lease.part(self._slots.grad_offset, tile.numel * size)
            assert gradient.extent is not None
            reads.append((gradient.extent, part, tile.start * size, read_ahead.FETCH_PRIORITY))
        swap = self._tiers.swap
        assert swap is not None
        return [
            swap.ordered(extent, part, offset, None, priority, first, writes=False)
            for extent, part, offset, priority in reads
        ]

    def ordered_writes(self, staged: Staged) -> list[OrderedTransfer]:
        """The writes of a tile that moves by swap alone."""
        swap = self._tiers.swap
        assert swap is not None
        return [
            swap.ordered(extent, part, offset, None, writes=True)
            for extent, part, offset in self._swapped_out(staged)
        ]

    def check_written(self, tile: Tile, *, wait: bool) -> bool:
        """Whether all that the update of a tile has written to swap space, in two versions, is there.

        Without ``wait`` False if that is not over. If a write failed, what is in swap space is that before the update,
        and its SwapError is raised.
        """
        swap, home, itemsize = self._tiers.swap, tile.group.shard_home, tile.group.dtype.itemsize
        assert swap is not None and tile.state.extent is not None
        parts = [(tile.state.extent, 0, tile.state.extent.nbytes)]
        if home.extent is not None:
            parts.append((home.extent, tile.start * itemsize, tile.end * itemsize))
        return swap.check_written_within(parts, wait=wait)

    def _swapped_out(self, staged: Staged) -> Iterator[tuple[StripedExtent, LeasePart, int]]:
        """What of an updated tile is written to NVMe: to where, from where."""
        tile, home, itemsize = staged.tile, staged.tile.group.shard_home, staged.tile.group.dtype.itemsize
        if home.extent is not None:
            part = staged.lease.part(self._slots.param_offset, tile.numel * itemsize)
            yield home.extent, part, tile.start * itemsize
        if tile.state.extent is not None:
            yield tile.state.extent, staged.lease.part(0, tile.state.extent.nbytes), 0

    def hold_compute(self) -> None:
        """Order later kernels of compute behind the copies of updated parameters to the device."""
        if self._written is not None:
            assert self._tiers.copies is not None
            # The copies run on one stream: when the last of them has ended, all have.
            self._tiers.copies.hold_compute(self._written, PARAMETERS)
            self._written = None

    def param_address(self, tile: Tile, staged: Staged | None) -> int:
        """The address of the tile's parameters during its update."""
        address = tile.group.shard_home.address
        if address:
            return address + tile.start * tile.group.dtype.itemsize
        assert staged is not None
        return staged.lease.address + self._slots.param_offset

    def grad_address(self, tile: Tile, staged: Staged | None) -> int:
        """The address of the tile's gradients during its update."""
        group = self._gradients.windows.address(tile.group)
        if group:
            return group + tile.start * self._gradients.dtype_of(tile.group).itemsize
        assert staged is not None
        return staged.lease.address + self._slots.grad_offset

    def _read(
        self, staged: Staged, home: Home, slot_offset: int, offset: int, nbytes: int, priority: int = 0
    ) -> None:
        assert home.extent is not None and self._tiers.swap is not None
        part = staged.lease.part(slot_offset, nbytes)
        # The extent orders this read behind the write-back of the step before, if that is still in flight.
        staged.reads.append(self._tiers.swap.swap_in(home.extent, part, offset=offset, priority=priority))

    def _needs_params(self, tile: Tile) -> bool:
        """Whether the step of ``tile`` reads its parameters: they are the masters, or halves of them."""
        return self._steps_need_params or tile.group.in_fp32

    def _complete_parameters(self, staged: Staged) -> None:
        """Fill in the 16-bit parameters that were not stepped, which are their masters rounded.

        The slot is written back whole, and these parameters were not read into it.
        """
        tile, itemsize = staged.tile, staged.tile.group.dtype.itemsize
        state = tile.state.address or staged.lease.address
        for segment in tile.segments:
            if not self._is_stepped(segment.piece):
                inside = segment.start - tile.start
                target = staged.lease.address + self._slots.param_offset + inside * itemsize
                if tile.group.dtype is torch.bfloat16:
                    kernels.split(target, 0, state + inside * FP32, segment.numel)
                else:
                    dtype = DTYPES[tile.group.dtype]
                    kernels.cast(target, dtype, state + inside * FP32, DType.FP32, segment.numel)


class TileRun:
    """A run of tiles: from completion to kernel to write for many tiles, in one call of C.

    ``tiles`` are those that have slots, which are ``slots`` in number, and those that follow. A tile that is updated is
    written back, and the tile that is ``slots`` behind it is read into its slot, behind the writes. The call does not
    hold the GIL, so other threads of Python do not delay it; and it is long, because Python takes several times as long
    after a sleep, with cold caches. A tile takes part if all its transfers are those of NVMe
    (``SlotTransfers.moves_by_swap_alone``).

    ``steps`` are the updates of the first tiles; the others are read, so that the slots stay busy until the next run.
    ``written`` are the tiles that were updated and whose writes have begun, in their order.
    """

    def __init__(
        self,
        transfers: SlotTransfers,
        pipeline: StatePipeline,
        tiers: Tiers,
        tiles: Sequence[Staged],
        slots: int,
        steps: Sequence[PreparedStep],
    ) -> None:
        self.written: list[Tile] = []
        self._transfers = transfers
        self._pipeline = pipeline
        self._tiers = tiers
        # Each with the one that has its slot afterwards.
        self._tiles = list(zip_longest(tiles, tiles[slots:]))[: len(steps)]
        self._steps = steps
        self._writes: list[list[Ticket]] = []
        self._tasks: list[Task] = []

    def run(self) -> None:
        """Update as many tiles as can be. After a failed transfer, the others keep their slots, and ``wait`` raises.

        Raises the error of a refused submission or a refused step. The caller's block is atomic.
        """
        swap = self._tiers.swap
        assert swap is not None
        with swap.ordering:
            transfers = self._prepare()
            try:
                swap.run(self._tasks, transfers)
            finally:
                self._hand_on()
        for step, task in zip(self._steps, self._tasks, strict=True):
            step.check(task.answer)

    def _prepare(self) -> list[OrderedTransfer]:
        """Make the tasks; the transfers that they begin."""
        ordered: list[OrderedTransfer] = []
        for (staged, successor), step in zip(self._tiles, self._steps, strict=True):
            begins = self._transfers.ordered_writes(staged)
            self._writes.append(writes := [write.ticket for write in begins])
            if successor is not None:
                # The same slot: its reads wait for the writes, which still read it.
                reads = self._transfers.ordered_reads(successor, writes)
                # Without reads, its update waits for the writes itself.
                successor.reads += [read.ticket for read in reads] or writes
                begins += reads
            waits = [read for read in staged.reads if isinstance(read, Ticket)]
            assert len(waits) == len(staged.reads), "a tile with copies takes part in a run"
            self._tasks.append(Task(waits, step, [transfer.ticket for transfer in begins]))
            ordered += begins
        return ordered

    def _hand_on(self) -> None:
        """Pass on the slots of the tiles that were updated, and count what was done."""
        stalls, timeline = self._tiers.stalls, self._tiers.timeline
        of_tiles = zip(self._tiles, self._tasks, self._writes, strict=True)
        for (staged, successor), task, writes in of_tiles:
            if not task.ended or task.answer:
                continue
            staged.updated = True
            begun = [ticket for ticket in task.begins if ticket.has_begun]
            # Otherwise a write was refused: the tile keeps its slot, from which it is written next time.
            if len(begun) >= len(writes):
                self.written.append(staged.tile)
                if successor is not None and len(begun) == len(task.begins):
                    self._pipeline.hand_on(staged, successor)
                else:
                    self._pipeline.hand_on(staged, None)
                    staged.lease.retire(AllOf(begun))
            if task.idle:
                stalls.add(OPTIMIZER_STATE, task.idle, task.began)
            timeline.add_wait("kernel", staged.tile.group.name, task.began, task.ended)
