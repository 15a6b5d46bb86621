"""TileStepper: steps the tiles that are due, wherever their bytes live.

State in memory is stepped in place. A tile with bytes on NVMe passes through a staging slot; tiles in memory are
stepped while its bytes arrive. A tile that a GPU updates visits it (see device_update.py).

A slot holds, each part at a multiple of 4096 bytes: optimizer state | parameter | gradient, except for parts that live
in host memory. The state is one range of its extent: one read and one write. The state, and parameters where the step
reads them, do not change before the step, so they are read ahead from the start of the step's last backward. A gradient
is read as soon as it is final. Writes continue into the next forward; slab_file.py makes a read of the same bytes wait
for them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from optim_cpu import kernels
from optim_cpu.kernels import DType, StepBatch
from tiering.placement.tenants import OPTIMIZER_STATE, PARAMETERS
from tiering.storage import read_ahead
from tiering.storage.request import Completion
from zero3.device import kernels as device_kernels
from zero3.device.storages import as_tensor
from zero3.device.streams import Event
from zero3.device.tiers import Home, Tiers
from zero3.optimizer.device_update import IN_BACKWARD, ROUNDS, DeviceUpdate, OnDevice, part_of
from zero3.optimizer.tiles import FP32, StateLayout, StepListener, Tile
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup
from zero3.params.replicas import Replicas
from zero3.passes.gradients import KERNEL_DTYPES, GradientStore

IN_PLACE_NUMEL = 4 << 20
"""Elements updated in place between two checks for arrived tiles: a few milliseconds of work."""

Staged = read_ahead.Staged[Tile, Completion]
StatePipeline = read_ahead.StagingPipeline[Tile, Completion]


class TileStepper:
    """Steps ``tiles`` with ``gradients``. It is the stepper of their windows (gradient_windows.Stepper).

    ``replicas`` are gathered group by group, each as soon as all of its tiles that are due were stepped.
    """

    def __init__(
        self,
        tiles: list[Tile],
        layout: StateLayout,
        gradients: GradientStore,
        tiers: Tiers,
        replicas: Replicas | None,
    ) -> None:
        self._timeline = tiers.timeline
        self._streams = tiers.streams
        self._gradients = gradients
        self._replicas = replicas
        self._layout = layout
        self._on_device: list[Tile] = []  # entirely in a GPU's memory
        self._visiting: list[Tile] = []  # updated by a GPU, through its update window
        self._streamed: list[Tile] = []  # a part of it is in memory that the CPU cannot address
        self._in_place: list[Tile] = []
        self._tiles_of: defaultdict[ParamGroup, list[Tile]] = defaultdict(list)
        for tile in tiles:
            self._tiles_with(tile).append(tile)
            self._tiles_of[tile.group].append(tile)
        self._transfers = SlotTransfers(gradients, tiers, self._is_stepped)
        self._pipeline = self._transfers.pipeline()
        self._in_slots = frozenset(self._streamed)
        self._visits = DeviceUpdate(gradients, tiers) if self._visiting else None
        self._in_gpu_memory = frozenset(self._on_device)
        # Copies to the device may still read parameters in host memory that the CPU steps.
        self._changes_host_params = tiers.streams is not None and any(
            tile.group.shard_home.on_host for tile in (*self._in_place, *self._streamed)
        )
        self._batch = StepBatch()
        self._on_device_now: list[device_kernels.Segment] = []
        # Of tiles in a GPU's memory, by piece index: their memory does not move, so each is described to CUDA once.
        self._resident: defaultdict[Tile, dict[int, device_kernels.Segment]] = defaultdict(dict)
        self._numbers: dict[kernels.Rule, int] = {}  # of the rules in the batch
        # Of the step that is under way:
        self._rule_of: dict[int, kernels.Rule] = {}  # by piece index, if it is stepped
        self._grad_scale = 1.0
        self._in_backward = False
        self._due_in_place: deque[Tile] = deque()
        self._due_streamed: dict[Tile, None] = {}  # in order
        self._due_visiting: deque[Tile] = deque()
        self._unfinished: Counter[ParamGroup] = Counter()  # tiles that are due
        self._listener: StepListener | None = None
        gradients.windows.register_stepper(self)

    @property
    def groups(self) -> list[ParamGroup]:
        """The groups that have tiles, in order."""
        return list(self._tiles_of)

    def has_tiles(self, group: ParamGroup) -> bool:
        """Whether ``group`` has tiles."""
        return group in self._tiles_of

    def listen(self, listener: StepListener) -> None:
        """Call ``listener`` from now on before a tile is stepped. There is one listener."""
        self._listener = listener

    def expect_all(self) -> None:
        """All tiles will be due: start to read the first ones into slots."""
        self._pipeline.expect(self._streamed)
        self._pipeline.read_ahead()

    def expect(self, groups: Iterable[ParamGroup]) -> None:
        """The tiles of ``groups`` will be due in this order: start to read the first ones into slots."""
        self._pipeline.expect(
            tile for group in groups for tile in self._tiles_of[group] if tile in self._in_slots
        )
        self._pipeline.read_ahead()

    def read_ahead(self) -> None:
        """Continue to read, as far as slots have become free."""
        self._pipeline.read_ahead()

    def release_read_ahead(self) -> None:
        """Free the slots of the tiles that were read ahead, for other users; the step reads them again."""
        # Reads in flight still fill their slots, which become free when the reads have ended.
        self._pipeline.discard_all()
        self.settle()

    def settle(self) -> None:
        """Wait until host memory holds the updates of the GPU, and the CPU may read and change it."""
        if self._visits is not None:
            self._visits.settle()

    def forget_rules(self) -> None:
        """The last step is over: no parameter is stepped until ``add_rules``."""
        self._rule_of.clear()

    def add_rules(self, rule_of: Mapping[int, kernels.Rule]) -> None:
        """Step these parameters, by ``Piece.index``, each with its rule."""
        self._rule_of.update(rule_of)

    def begin(self, grad_scale: float, *, in_backward: bool) -> None:
        """A step begins, whose gradients are multiplied by ``grad_scale``; with ``in_backward`` while one runs."""
        self._grad_scale, self._in_backward = grad_scale, in_backward

    def wait_for_copies(self) -> None:
        """Wait until copies to the device have read the parameters that the CPU is about to change."""
        if self._streams is not None and self._changes_host_params:
            self._streams.before_host_changes()

    def add_due(self, group: ParamGroup) -> None:
        """Queue the tiles of ``group`` in which something is stepped."""
        # Only now may gradients be read into slots: the store does not change them any more.
        self._pipeline.final(group)
        for tile in self._tiles_of[group]:
            if any(self._is_stepped(segment.piece) for segment in tile.segments):
                self._unfinished[group] += 1
                if tile in self._in_slots:
                    self._due_streamed[tile] = None
                elif tile.visits:
                    self._due_visiting.append(tile)
                else:
                    self._due_in_place.append(tile)
        if self._in_backward and not self._unfinished[group]:
            # Nothing will be stepped, so no tile releases the window at its end.
            self._gradients.windows.drop(group)

    def advance(self, *, finish: bool = False) -> None:
        """Step due tiles: those that have arrived, else tiles in memory, else (to ``finish``) wait for bytes.

        Before each of them, queue as many tiles on the device as it can begin soon; at the end all of them.
        """
        while True:
            # First: free slots are filled while the CPU computes.
            self._pipeline.read_ahead()
            self._begin_visits(ROUNDS if finish else IN_BACKWARD)
            arrived = self._pipeline.first_arrived(self._due_streamed)
            if arrived is not None:
                self._step_streamed(arrived)
            elif self._due_in_place:
                self._step_in_place()
            elif self._due_streamed and finish:
                self._step_streamed(next(iter(self._due_streamed)))
            elif self._due_visiting and finish:
                self._step_visiting()
            else:
                return

    def finish(self) -> None:
        """Step all tiles that are due, or queue them on the device."""
        # Tiles in slots that are not due give them back: nothing else would take them out.
        self._pipeline.expect_only(self._due_streamed)
        self.advance(finish=True)
        self._hold_compute()
        if self._visits is not None:
            # Last: copies to the device that are queued from here on see what the GPU has updated in host memory.
            self._visits.publish()

    def make_room(self) -> bool:
        """Step a tile that is due and may hold a gradient window; False if no tile is due."""
        # The caller may be a group whose gradients are still being copied: it is not due yet.
        if not self._due_streamed:
            return False
        self._step_streamed(next(iter(self._due_streamed)))
        return True

    def _is_stepped(self, piece: Piece) -> bool:
        """Whether this step updates the parameter: it got a gradient, and a param group has it."""
        return piece.index in self._rule_of

    def _tiles_with(self, tile: Tile) -> list[Tile]:
        """The list of the tiles that are stepped in the same way as ``tile``."""
        if tile.visits:
            return self._visiting
        if tile.state.on_device:
            return self._on_device
        homes = (tile.state, tile.group.shard_home, self._gradients.homes[tile.group.index])
        return self._in_place if all(home.on_host for home in homes) else self._streamed

    def _begin_visits(self, rounds: int) -> None:
        """Queue as many tiles on the GPU as it can begin soon."""
        while self._due_visiting and self._visits is not None and self._visits.ready(rounds=rounds):
            self._step_visiting()

    def _step_in_place(self) -> None:
        """Step tiles in memory: all of them, or a few milliseconds of work while other tiles are in transfer."""
        tiles, numel = [], 0
        transfers_due = self._due_streamed or self._due_visiting
        while self._due_in_place and (numel < IN_PLACE_NUMEL or not transfers_due):
            tile = self._due_in_place.popleft()
            tiles.append(tile)
            numel += tile.numel
            if tile in self._in_gpu_memory:
                self._step_on_device(tile)
            else:
                self._add_to_batch(tile, None)
        self._run_batch(f"{numel} elements in memory")
        for tile in tiles:
            self._finish_tile(tile)

    def _step_streamed(self, tile: Tile) -> None:
        """Step a tile in its slot, once its bytes are there, and start to write it back."""
        staged = self._pipeline.acquire(tile)
        del self._due_streamed[tile]
        self._add_to_batch(tile, staged)
        self._run_batch(tile.group.name)
        # Before the group is finished: its last tile lets other ranks gather the parameters that this writes.
        self._pipeline.release(staged)
        self._finish_tile(tile)

    def _step_on_device(self, tile: Tile) -> None:
        """Add a tile in a GPU's memory to its next batch."""
        # Before the kernels are queued: a save has then copied the tile on its own stream.
        self._before_change(tile)
        stepped = [segment.piece.index for segment in tile.segments if segment.piece.index in self._rule_of]
        segments = self._resident[tile]
        if not segments.keys() >= set(stepped):
            params, grads = tile.group.shard_home, self._gradients.homes[tile.group.index]
            state = tile.state.tensor
            assert state is not None
            param = part_of(params, tile, tile.group.dtype.itemsize)
            grad = part_of(grads, tile, self._gradients.dtype_of(tile.group).itemsize)
            segments |= self._segments(OnDevice(tile, state, param, grad))
        for index in stepped:
            segments[index].rule = self._rule_of[index]
            self._on_device_now.append(segments[index])

    def _step_visiting(self) -> None:
        """Queue on the GPU: fetch a tile, step it and copy it back."""
        assert self._visits is not None
        tile = self._due_visiting.popleft()
        stepped = [
            range(segment.start - tile.start, segment.start - tile.start + segment.numel)
            for segment in tile.segments
            if self._is_stepped(segment.piece)
        ]
        if len(stepped) == len(tile.segments):  # one copy, with the padding between the segments
            stepped = [range(tile.numel)]
        # Before the copies back to host memory are queued, which change the tile at home.
        self._before_change(tile)
        self._visits.run(tile, stepped, self._run_on_device)
        self._finish_tile(tile)

    def _run_on_device(self, tile: OnDevice) -> None:
        device_kernels.step_segments(list(self._segments(tile).values()), self._grad_scale)

    def _segments(self, tile: OnDevice) -> dict[int, device_kernels.Segment]:
        group = tile.tile.group
        return tile.segments(self._layout.for_group(group), self._rule_of, self._gradients.dtype_of(group))

    def _finish_tile(self, tile: Tile) -> None:
        self._unfinished[tile.group] -= 1
        if not self._unfinished[tile.group]:
            # Its last tile was updated: nothing reads the gradients any more.
            self._gradients.windows.drop(tile.group)
            # In backward, compute does not wait for this copy: it has other kernels to run.
            if not self._in_backward:
                self._hold_compute()
            # After compute was held: a gather is queued behind compute, and must come behind the copies of updated
            # parameters.
            if self._replicas is not None:
                self._replicas.stepped(tile.group)

    def _hold_compute(self) -> None:
        """Order later kernels of compute behind the updates of parameters on the device."""
        self._transfers.hold_compute()
        if self._visits is not None:
            self._visits.hold_compute()

    def _before_change(self, tile: Tile) -> None:
        if self._listener is not None:
            self._listener.before_change(tile)

    def _add_to_batch(self, tile: Tile, staged: Staged | None) -> None:
        """Add the tile's segments that are stepped."""
        # Before the kernel: a save that is under way copies the tile first.
        self._before_change(tile)
        layout, itemsize = self._layout.for_group(tile.group), tile.group.dtype.itemsize
        grad_dtype = self._gradients.dtype_of(tile.group)
        state = tile.state.address
        if not state and staged is not None:
            state = staged.lease.address
        param, grad = self._transfers.param_address(tile, staged), self._transfers.grad_address(tile, staged)
        separate = layout.master_itemsize == FP32
        for segment, first_index in zip(tile.segments, tile.first_indices, strict=True):
            rule = self._rule_of.get(segment.piece.index)
            if rule is None:
                continue
            inside = segment.start - tile.start
            param_at = param + inside * itemsize
            self._batch.add(
                segment.numel,
                self._rule_number(rule),
                param=state + inside * FP32 if separate else param_at,
                remainder=state + inside * layout.master_itemsize if layout.splits else 0,
                state=tuple(state + layout.moment_at(i, tile.numel, inside) for i in range(layout.moments)),
                state_format=layout.moment_format,
                grad=grad + inside * grad_dtype.itemsize,
                grad_dtype=KERNEL_DTYPES[grad_dtype],
                out=param_at if separate else 0,
                out_dtype=KERNEL_DTYPES[tile.group.dtype],
                first_index=first_index,
            )

    def _run_batch(self, label: str) -> None:
        if self._on_device_now:
            # Queued on the current stream, behind the kernels that made the gradients.
            device_kernels.step_segments(self._on_device_now, self._grad_scale)
            self._on_device_now.clear()
        if not len(self._batch):
            return
        # The call returns when all segments are updated: their slots may then be written back.
        with self._timeline.span("kernel", label):
            self._batch.run(self._grad_scale)
        self._batch.clear()
        self._numbers.clear()

    def _rule_number(self, rule: kernels.Rule) -> int:
        """The number of ``rule`` in the batch."""
        if rule not in self._numbers:
            self._numbers[rule] = self._batch.add_rule(rule)
        return self._numbers[rule]


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
        if not home.on_host:
            if not self._needs_params(tile):
                # Before the write, which takes the slot as it is.
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
                # Compute may still read the old parameters.
                self._written = copies.to_device(
                    target, source, after=[streams.compute.record()], kind=PARAMETERS
                )
                # The slot stays until the copy has read it.
                writes.append(self._written)
        if tile.state.extent is not None:
            assert swap is not None
            writes.append(swap.swap_out(tile.state.extent, staged.lease.part(0, tile.state.extent.nbytes)))
        return writes

    def hold_compute(self) -> None:
        """Order later kernels of compute behind the copies of updated parameters to the device."""
        if self._written is not None:
            assert self._tiers.copies is not None
            # The copies run on one stream: when the last of them has ended, all have.
            self._tiers.copies.hold_compute(self._written, PARAMETERS)
            self._written = None

    def param_address(self, tile: Tile, staged: Staged | None) -> int:
        """The address of the tile's parameters during its update."""
        home = tile.group.shard_home
        if home.on_host:
            return home.address + tile.start * tile.group.dtype.itemsize
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
                    dtype = KERNEL_DTYPES[tile.group.dtype]
                    kernels.cast(target, dtype, state + inside * FP32, DType.FP32, segment.numel)
