"""TileStepper: steps the tiles that are due, wherever their bytes live.

State in memory is stepped in place. A tile with bytes on NVMe passes through a staging slot; tiles in memory are
stepped while its bytes arrive. A tile that a GPU updates visits it (see device_update.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import pairwise

from optim_cpu import kernels
from optim_cpu.kernels import StepBatch
from zero3.device import kernels as device_kernels
from zero3.device.tiers import Tiers
from zero3.optimizer.device_update import IN_BACKWARD, ROUNDS, DeviceUpdate, OnDevice, part_of
from zero3.optimizer.slot_transfers import SlotTransfers, Staged, TileRun
from zero3.optimizer.tiles import FP32, StateLayout, StepListener, Tile
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup
from zero3.params.replicas import Replicas
from zero3.passes.gradients import KERNEL_DTYPES, GradientStore

IN_PLACE_NUMEL = 4 << 20
"""Elements updated in place between two checks for arrived tiles: a few milliseconds of work."""


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
        self._tiers = tiers
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
            # Tiles in memory are stepped while others are in transfer, which a run does not do.
            if finish and not self._due_in_place and not self._due_visiting and self._step_run():
                continue
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

    def begin_deferred(self) -> None:
        """The tiles that are due are stepped later, by ``step_group`` and ``finish``: begin to read them."""
        self._pipeline.expect_only(self._due_streamed)
        self._pipeline.read_ahead()

    @property
    def has_due(self) -> bool:
        """Whether a tile is due."""
        return bool(self._due_streamed or self._due_in_place or self._due_visiting)

    def step_group(self, group: ParamGroup, *, wait: bool) -> bool:
        """Step what is due of ``group``; False if bytes of it have not arrived, unless ``wait`` is set.

        Tiles of other groups that have arrived are stepped, too.
        """
        self.advance()
        while wait and self._unfinished[group]:
            if self._due_in_place:
                self._step_in_place()
            elif self._due_visiting:
                self._step_visiting()
            else:
                # In their order, as they get slots: another one would take the slot of a tile that has been read.
                self._step_streamed(next(iter(self._due_streamed)))
        if not self._unfinished[group] and self._visits is not None:
            # Copies of the group to the device that are queued from here on see what the GPU has updated.
            self._visits.publish()
        return not self._unfinished[group]

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

    def _step_run(self) -> bool:
        """Step tiles that have slots, in one call; False if no two of them can be stepped so, or a transfer failed."""
        staged = [
            each
            for each in self._pipeline.staged
            if each.tile in self._due_streamed and self._transfers.moves_by_swap_alone(each.tile)
        ]
        if len(staged) < 2:
            return False
        ends = [0]
        for each in staged:
            self._add_to_batch(each.tile, each)
            ends.append(len(self._batch))
        steps = [self._batch.part(first, end - first, self._grad_scale) for first, end in pairwise(ends)]
        run = TileRun(self._transfers, self._pipeline, self._tiers, list(zip(staged, steps, strict=True)))
        try:
            run.run()
        finally:
            self._batch.clear()
            self._numbers.clear()
            for tile in run.updated:
                del self._due_streamed[tile]
        for tile in run.updated:
            self._finish_tile(tile)
        return bool(run.updated)

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
