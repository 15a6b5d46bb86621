"""The pipeline of tiles with bytes on NVMe: read into staging slots, updated there, written back, several at a time.

A slot holds, each part at a multiple of 4096 bytes: optimizer state | parameter | gradient, as far as they do not live
in host memory. State is one range of its extent: one read and one write. What the step does not change before its time
is read ahead, from the moment that the step's last backward begins: state, and parameters where the step needs them. A
gradient is read as soon as it is final. Writes run on into the next forward, and slab_file.py makes a read of the same
bytes wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from optim_cpu import kernels
from optim_cpu.kernels import DType
from tiering.storage.arena import Completion, Lease
from tiering.storage.tickets import AllOf
from zero3.device.streams import Event
from zero3.device.tiers import Home, Tiers, as_tensor
from zero3.optimizer.tiles import FP32, Tile
from zero3.params.flat_storage import FETCH_PRIORITY
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup
from zero3.passes.gradients import KERNEL_DTYPES, GradientStore

KIND = "parameters"  # what is copied to the device and from it


@dataclass(eq=False)
class Staged:
    """A tile in a staging slot, with the reads that fill it."""

    tile: Tile
    lease: Lease
    reads: list[Completion] = field(default_factory=list)
    reads_gradient: bool = False


class StatePipeline:
    """Brings ``tiles`` through the staging slots.

    For each step: ``expect`` an order, ``read_ahead`` whenever slots may have come free, say which gradients are
    ``final``, and ``take`` each tile that is to be updated and ``give_back`` it. ``is_stepped`` is the optimizer's
    answer to whether its step has updated a parameter.
    """

    def __init__(
        self,
        tiles: Iterable[Tile],
        gradients: GradientStore,
        tiers: Tiers,
        is_stepped: Callable[[Piece], bool],
    ) -> None:
        self._tiles = frozenset(tiles)
        self._is_stepped = is_stepped
        self._gradients = gradients
        self._tiers = tiers
        self._load = tiers.plan.workload
        self._slots = tiers.plan.staging
        self._order: Sequence[Tile] = ()
        self._place = 0  # in the order; what lies before it is staged or was taken
        self._staged: dict[Tile, Staged] = {}  # in the order in which they were staged
        self._taken: set[Tile] = set()  # in this step
        self._final: set[ParamGroup] = set()
        self._arrived: Event | None = None  # the last copy of stepped parameters to where compute uses them

    def __contains__(self, tile: Tile) -> bool:
        return tile in self._tiles

    def expect(self, order: Iterable[Tile]) -> None:
        """A step comes, which will probably take tiles in this order."""
        self._taken.clear()
        self._final.clear()
        self._order, self._place = tuple(order), 0

    def expect_only(self, order: Iterable[Tile]) -> None:
        """What is left of the step takes exactly these."""
        self._order, self._place = tuple(order), 0
        for tile in self._staged.keys() - set(self._order):
            self._unstage(tile)

    def read_ahead(self) -> None:
        """Start to read what comes next, as far as slots are free."""
        while self._place < len(self._order):
            tile = self._order[self._place]
            if tile not in self._staged and tile not in self._taken:
                lease = self._tiers.staging.try_lease(self._slots.slot_bytes, "staging")
                if lease is None:
                    return
                self._stage(tile, lease)
            self._place += 1

    def release(self) -> None:
        """Free the slots that were read ahead, for others to use; the step reads again."""
        for tile in list(self._staged):
            self._unstage(tile)
        self._place = 0

    def final(self, group: ParamGroup) -> None:
        """The gradients of ``group`` are what the step will use."""
        self._final.add(group)
        for staged in self._staged.values():
            if staged.tile.group is group:
                self._read_gradient(staged)

    def first_arrived(self, wanted: Container[Tile]) -> Tile | None:
        """A tile out of ``wanted`` that can be taken without waiting: the one that has a slot for longest."""
        for tile, staged in self._staged.items():
            if tile in wanted and all(read.done() for read in staged.reads):
                return tile
        return None

    def take(self, tile: Tile) -> Staged:
        """``tile`` with all its bytes, for the caller to update; its gradients are final."""
        staged = self._staged.get(tile) or self._stage(tile, self._room())
        self._read_gradient(staged)
        with self._tiers.stalls.waiting_for("optimizer state"):
            for read in staged.reads:
                read.wait()
        del self._staged[tile]
        self._taken.add(tile)
        return staged

    def give_back(self, staged: Staged) -> None:
        """A tile was updated: its slot is free as soon as that is written."""
        staged.lease.retire(AllOf[Completion](self._write(staged)))

    def show(self) -> None:
        """What compute is told from now on is with the parameters on the device that were given back."""
        if self._arrived is not None:
            assert self._tiers.copies is not None
            self._tiers.copies.hold_compute(self._arrived, KIND)
            self._arrived = None

    def param_address(self, tile: Tile, staged: Staged | None) -> int:
        """Where the tile's parameters are while it is updated."""
        home = tile.group.shard_home
        if home.on_host:
            return home.address + tile.start * tile.group.dtype.itemsize
        assert staged is not None
        return staged.lease.address + self._slots.param_offset

    def grad_address(self, tile: Tile, staged: Staged | None) -> int:
        """Where the tile's gradients are while it is updated."""
        group = self._gradients.address(tile.group)
        if group:
            return group + tile.start * self._gradients.dtype_of(tile.group).itemsize
        assert staged is not None
        return staged.lease.address + self._slots.grad_offset

    def _room(self) -> Lease:
        """A slot for a tile that comes before its turn, or after all others."""
        lease = self._tiers.staging.try_lease(self._slots.slot_bytes, "staging")
        if lease is None:
            if self._staged:
                self._unstage(next(reversed(self._staged)))
                self._place = 0
            with self._tiers.stalls.waiting_for("staging"):
                lease = self._tiers.staging.lease(self._slots.slot_bytes, "staging")
        return lease

    def _stage(self, tile: Tile, lease: Lease) -> Staged:
        """Start to read what does not change before the step, and the gradient if it is final."""
        staged = Staged(tile, lease)
        try:
            home, itemsize = tile.group.shard_home, tile.group.dtype.itemsize
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
                target = as_tensor(lease)[self._slots.param_offset :][: source.numel()]
                staged.reads.append(
                    copies.to_host(target, source, after=[streams.compute.record()], kind=KIND)
                )
            if tile.group in self._final:
                self._read_gradient(staged)
        except BaseException:
            lease.retire(AllOf[Completion](list(staged.reads)))
            raise
        self._staged[tile] = staged
        return staged

    def _unstage(self, tile: Tile) -> None:
        staged = self._staged.pop(tile)
        for read in staged.reads:
            if isinstance(read, Event):  # of parameters on the device, which somebody may be about to edit
                assert self._tiers.streams is not None
                self._tiers.streams.compute.wait_for(read)
        staged.lease.retire(AllOf[Completion](list(staged.reads)))

    def _read_gradient(self, staged: Staged) -> None:
        """Before all reads of state that are queued: they were asked for earlier and are needed later."""
        tile, itemsize = staged.tile, self._gradients.dtype_of(staged.tile.group).itemsize
        if staged.reads_gradient or self._gradients.address(tile.group):
            return
        staged.reads_gradient = True
        home = self._gradients.homes[tile.group.index]
        grad_at, offset = self._slots.grad_offset, tile.start * itemsize
        self._read(staged, home, grad_at, offset, tile.numel * itemsize, FETCH_PRIORITY)

    def _read(
        self, staged: Staged, home: Home, slot_offset: int, offset: int, nbytes: int, priority: int = 0
    ) -> None:
        assert home.extent is not None and self._tiers.swap is not None
        part = staged.lease.part(slot_offset, nbytes)
        staged.reads.append(self._tiers.swap.swap_in(home.extent, part, offset=offset, priority=priority))

    def _needs_params(self, tile: Tile) -> bool:
        """Whether the step of ``tile`` reads its parameters: they are the masters, or halves of them."""
        return self._load.steps_need_params or tile.group.in_fp32

    def _write(self, staged: Staged) -> list[Completion]:
        """Start to write what the step changed and what lives elsewhere."""
        tile, swap = staged.tile, self._tiers.swap
        home, writes = tile.group.shard_home, list[Completion]()
        itemsize = tile.group.dtype.itemsize
        if not home.on_host:
            if not self._needs_params(tile):
                self._complete_parameters(staged)
            part = staged.lease.part(self._slots.param_offset, tile.numel * itemsize)
            if home.extent is not None:
                assert swap is not None
                writes.append(swap.swap_out(home.extent, part, offset=tile.start * itemsize))
            else:
                streams, copies = self._tiers.streams, self._tiers.copies
                assert home.tensor is not None and streams is not None and copies is not None
                source = as_tensor(staged.lease)[self._slots.param_offset :][: part.nbytes]
                target = home.tensor[tile.start * itemsize :][: part.nbytes]
                # Compute may still read what they take the place of.
                self._arrived = copies.to_device(target, source, after=[streams.compute.record()], kind=KIND)
                writes.append(self._arrived)
        if tile.state.extent is not None:
            assert swap is not None
            writes.append(swap.swap_out(tile.state.extent, staged.lease.part(0, tile.state.extent.nbytes)))
        return writes

    def _complete_parameters(self, staged: Staged) -> None:
        """Fill in the 16-bit parameters that were not stepped: a slot is written back whole, and held none of them.

        They are their masters rounded, always.
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
                    dtype = KERNEL_DTYPES[tile.group.dtype]
                    kernels.cast(target, dtype, state + inside * FP32, DType.FP32, segment.numel)
