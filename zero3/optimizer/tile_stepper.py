"""TileStepper: steps the tiles that are due, wherever their bytes live.

State in memory is stepped in place. A tile with bytes on NVMe passes through a staging slot; tiles in memory are
stepped while its bytes arrive. A tile that a GPU updates visits it (see device_update.py).

Note [Each tile is stepped once]
    An exception, of a transfer or of a signal handler, can end a step at any point, and the step can be continued
    there: the calls that step tiles can be made again. A tile is due until it is updated, and until its writes have
    begun if it is in a slot. Its update and the change of the queue are one atomic block. A tile whose update ended,
    but whose writes were refused, is marked in its slot (``Staged.updated``): it is written from there, not stepped
    again. An error of the kernels itself, as for lack of memory of a GPU, leaves an unknown part updated (``torn``).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise, takewhile

from optim_cpu import kernels
from tiering._interrupts import atomic
from tiering.errors import SwapError
from tiering.storage.versions import Kept
from zero3.device.tiers import Tiers
from zero3.optimizer.device_update import IN_BACKWARD, ROUNDS, DeviceUpdate, OnDevice
from zero3.optimizer.overwritten import OverwrittenParameters
from zero3.optimizer.slot_transfers import SlotTransfers, Staged, TileRun
from zero3.optimizer.tile_batch import TileBatch
from zero3.optimizer.tiles import FP32, StateLayout, StepListener, Tile
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup
from zero3.params.replicas import Replicas
from zero3.passes.gradients import GradientStore

IN_PLACE_NUMEL = 4 << 20
"""Elements updated in place between two checks for arrived tiles: a few milliseconds of work."""
RUN_NUMEL = 64 << 20
"""Elements of the tiles of a run, or more if there are as many in slots: a few tenths of a second of most drives."""


class TileStepper:
    """Steps ``tiles`` with ``gradients``. It is the stepper of their windows (gradient_windows.Stepper).

    ``replicas`` are gathered group by group, each as soon as all of its tiles that are due were stepped. ``torn``: an
    error has ended an update half-way. See Note [Each tile is stepped once].
    """

    def __init__(
        self,
        tiles: list[Tile],
        layout: StateLayout,
        gradients: GradientStore,
        tiers: Tiers,
        replicas: Replicas | None,
    ) -> None:
        self.torn = False
        self._tiers = tiers
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
        self.overwritten = OverwrittenParameters(tiers, self._pipeline.discard_all)
        self._in_slots = frozenset(self._streamed)
        self._visits = DeviceUpdate(gradients, tiers) if self._visiting else None
        self._in_gpu_memory = frozenset(self._on_device)
        self._batch = TileBatch(layout, gradients, self._transfers, tiers.timeline)
        # Copies to the device may still read parameters in host memory that the CPU steps.
        self._changes_host_params = tiers.streams is not None and any(
            tile.group.shard_home.on_host for tile in (*self._in_place, *self._streamed)
        )
        # Of the step that is under way:
        self._rule_of: dict[int, kernels.Rule] = {}  # by piece index, if it is stepped
        self._grad_scale = 1.0
        self._in_backward = False
        self._ahead = False  # in backward, and may be taken back
        self._done: set[Tile] = set()  # that were stepped ahead
        # That were updated in this step. They can be updated again until what they write is in swap space.
        self._written: deque[Tile] = deque()
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
        self._done.clear()

    @property
    def can_step_ahead(self) -> frozenset[ParamGroup]:
        """The groups with tiles that a step ahead may step."""
        return frozenset(tile.group for tile in self._streamed if self._can_take_back(tile))

    def begin_ahead(self, grad_scale: float, groups: Iterable[ParamGroup]) -> None:
        """A step begins while backward runs, and may be taken back. The tiles of ``groups`` are due first.

        Only tiles of which all can be undone are stepped, and gradients stay until the step is adopted.
        """
        self.begin(grad_scale, in_backward=False)
        self._ahead = True
        self._pipeline.expect(
            tile for group in groups for tile in self._tiles_of[group] if self._can_take_back(tile)
        )

    def adopt(self) -> None:
        """What was stepped ahead stays: ``add_due`` queues the other tiles."""
        self._ahead = False
        self.overwritten.tiles.clear()

    def take_back(self) -> None:
        """Undo what was stepped ahead, except for what is ``overwritten``, and forget what was due."""
        self._ahead = self.torn = False
        self._due_streamed.clear()
        self._unfinished.clear()
        self._done.clear()
        self._written.clear()
        # Slots may have gradients that have changed since.
        self._pipeline.discard_all()
        self._tiers.go_back()
        self._pipeline.expect(self._streamed)

    def keep(self) -> None:
        """Keep the state of the last step, if there are two versions, so that the next one can be taken back."""
        self._tiers.keep()

    def wait_for_copies(self) -> None:
        """Wait until copies to the device have read the parameters that the CPU is about to change."""
        if self._streams is not None and self._changes_host_params:
            self._streams.before_host_changes()

    def add_due(self, group: ParamGroup) -> None:
        """Queue the tiles of ``group`` in which something is stepped; its gradients are final."""
        for tile in self._tiles_of[group]:
            # A step ahead has stepped it, or has queued it; or it does not step it.
            if tile in self._done or tile in self._due_streamed:
                continue
            if self._ahead and not self._can_take_back(tile):
                continue
            if any(self._is_stepped(segment.piece) for segment in tile.segments):
                self._unfinished[group] += 1
                if tile in self._in_slots:
                    self._due_streamed[tile] = None
                elif tile.visits:
                    self._due_visiting.append(tile)
                else:
                    self._due_in_place.append(tile)
        if self._in_backward or self._ahead:
            self._pipeline.final(group)
        if self._in_backward and not self._unfinished[group]:
            # Nothing will be stepped, so no tile releases the window at its end.
            self._gradients.windows.drop(group)

    def advance(self, *, finish: bool = False) -> None:
        """Step due tiles: those that have arrived, else tiles in memory, else (to ``finish``) wait for bytes.

        Before each of them, queue as many tiles on the device as it can begin soon; at the end all of them.
        """
        for refused in [each for each in self._pipeline.staged if each.updated]:
            self._write_back(refused)
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
        self._expect_due()
        self.advance(finish=True)
        self.publish()

    def begin_deferred(self) -> None:
        """The tiles that are due are stepped later, by ``step_group`` and ``finish``: begin to read them."""
        self._expect_due()
        self._pipeline.read_ahead()

    def publish(self) -> None:
        """Order later kernels, and later copies to the device, behind what was updated."""
        self._hold_compute()
        if self._visits is not None:
            # Last: copies to the device that are queued from here on see what the GPU has updated in host memory.
            self._visits.publish()

    def check_written(self, *, wait: bool) -> bool:
        """Whether what was updated is in swap space, as far as that has two versions of it; ``wait`` for that.

        A tile whose write failed is due again, and the SwapError is raised.
        """
        while self._written:
            tile = self._written[0]
            try:
                if not self._transfers.check_written(tile, wait=wait):
                    return False
            except SwapError:
                with atomic():
                    self._written.popleft()
                    self._unfinished[tile.group] += 1
                    self._due_streamed[tile] = None
                    self._pipeline.expect(self._due_streamed)
                raise
            self._written.popleft()
        return True

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
        # The caller may be a group whose gradients are still being copied: it is not due yet. And a step ahead frees no
        # window: its gradients stay, and those that have no home in memory are written out before they are used.
        if self._ahead or not self._due_streamed:
            return False
        self._step_streamed(next(iter(self._due_streamed)))
        return True

    def _is_stepped(self, piece: Piece) -> bool:
        """Whether this step updates the parameter: it got a gradient, and a param group has it."""
        return piece.index in self._rule_of

    def _can_take_back(self, tile: Tile) -> bool:
        """Whether a step of ``tile`` can be undone: parameters that it overwrites are restored from their masters."""
        group = tile.group
        return self._can_step_again(tile) and (group.shard_home.extent is not None or group.hidden)

    def _can_step_again(self, tile: Tile) -> bool:
        """Whether all that a step of ``tile`` reads, besides gradients, has two versions in swap space."""
        state, param = tile.state.extent, tile.group.shard_home.extent
        if tile not in self._in_slots or state is None or Kept.STEP not in state.kept:
            return False
        if param is not None:
            return Kept.STEP in param.kept
        return self._layout.for_group(tile.group).master_itemsize == FP32

    def _tiles_with(self, tile: Tile) -> list[Tile]:
        """The list of the tiles that are stepped in the same way as ``tile``."""
        if tile.visits:
            return self._visiting
        if tile.state.on_device:
            return self._on_device
        homes = (tile.state, tile.group.shard_home, self._gradients.homes[tile.group.index])
        return self._in_place if all(home.on_host for home in homes) else self._streamed

    def _expect_due(self) -> None:
        # Only now may gradients be read into slots: the store does not change them any more.
        for group, unfinished in self._unfinished.items():
            if unfinished:
                self._pipeline.final(group)
        # Tiles in slots that are not due give them back: nothing else would take them out.
        self._pipeline.expect_only(self._due_streamed)

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """The block updates tiles and takes them out of their queue. See Note [Each tile is stepped once]."""
        with atomic():
            self.torn = True
            yield
            self.torn = False

    def _begin_visits(self, rounds: int) -> None:
        """Queue as many tiles on the GPU as it can begin soon."""
        while self._due_visiting and self._visits is not None and self._visits.ready(rounds=rounds):
            self._step_visiting()

    def _step_in_place(self) -> None:
        """Step tiles in memory: all of them, or a few milliseconds of work while other tiles are in transfer."""
        tiles, numel = list[Tile](), 0
        transfers_due = self._due_streamed or self._due_visiting
        self._batch.clear()
        for tile in self._due_in_place:
            if numel >= IN_PLACE_NUMEL and transfers_due:
                break
            tiles.append(tile)
            numel += tile.numel
            self._add_to_batch(tile, None)
        with self._updating():
            self._batch.run(self._grad_scale, f"{numel} elements in memory")
            for tile in tiles:
                self._due_in_place.popleft()
                self._end_tile(tile)
        self._end_groups(tiles)

    def _step_streamed(self, tile: Tile) -> None:
        """Step a tile in its slot, once its bytes are there, and start to write it back."""
        staged = self._pipeline.acquire(tile)
        self._batch.clear()
        self._add_to_batch(tile, staged)
        with self._updating():
            if self._ahead and tile.group.hidden:
                self.overwritten.tiles[tile] = None
            self._batch.run(self._grad_scale, tile.group.name)
            staged.updated = True
        self._write_back(staged)

    def _write_back(self, staged: Staged) -> None:
        """Start to write back a tile that was updated in its slot."""
        tile = staged.tile
        with atomic():
            self._pipeline.release(staged)
            del self._due_streamed[tile]
            self._end_tile(tile)
        self._end_groups([tile])

    def _step_run(self) -> bool:
        """Step tiles that have slots, and those that get them next, in one call.

        False if no two tiles with slots can be stepped so, or a transfer failed.
        """
        tiles = [
            each
            for each in self._pipeline.staged
            if each.tile in self._due_streamed and self._transfers.moves_by_swap_alone(each.tile)
        ]
        if (slots := len(tiles)) < 2:
            return False
        for each in tiles:
            # A step that an exception has ended may not have come to it.
            self._pipeline.read_gradient(each)
        most = max(slots, RUN_NUMEL // max(each.tile.numel for each in tiles))
        for tile in takewhile(self._transfers.moves_by_swap_alone, self._pipeline.successors(most)):
            tiles.append(Staged(tile, tiles[-slots].lease, reads_gradient=True))
        self._batch.clear()
        ends = [0]
        for each in tiles[:most]:
            self._add_to_batch(each.tile, each)
            ends.append(len(self._batch))
        steps = [self._batch.part(first, end - first, self._grad_scale) for first, end in pairwise(ends)]
        run = TileRun(self._transfers, self._pipeline, self._tiers, tiles, slots, steps)
        with atomic():
            try:
                run.run()
            finally:
                for tile in run.written:
                    del self._due_streamed[tile]
                    self._end_tile(tile)
        self._end_groups(run.written)
        return bool(run.written)

    def _step_visiting(self) -> None:
        """Queue on the GPU: fetch a tile, step it and copy it back."""
        assert self._visits is not None
        tile = self._due_visiting[0]
        stepped = [
            range(segment.start - tile.start, segment.start - tile.start + segment.numel)
            for segment in tile.segments
            if self._is_stepped(segment.piece)
        ]
        if len(stepped) == len(tile.segments):  # one copy, with the padding between the segments
            stepped = [range(tile.numel)]
        # Before the copies back to host memory are queued, which change the tile at home.
        self._before_change(tile)
        # This waits for nothing.
        with self._updating():
            self._visits.run(tile, stepped, self._run_on_device)
            self._due_visiting.popleft()
            self._end_tile(tile)
        self._end_groups([tile])

    def _run_on_device(self, tile: OnDevice) -> None:
        self._batch.step_visitor(tile, self._rule_of, self._grad_scale)

    def _end_tile(self, tile: Tile) -> None:
        """The tile is no longer due. The caller's block is atomic."""
        self._unfinished[tile.group] -= 1
        if self._can_step_again(tile):
            self._written.append(tile)
        if self._ahead:
            self._done.add(tile)
        else:
            self.overwritten.tiles.pop(tile, None)

    def _end_groups(self, tiles: Iterable[Tile]) -> None:
        """These tiles are no longer due. After an exception before this, ``publish`` and the end of the step do it."""
        for group in dict.fromkeys(tile.group for tile in tiles):
            # The gradients of a step ahead stay, because it may be taken back.
            if self._ahead or self._unfinished[group]:
                continue
            # Its last tile was updated: nothing reads the gradients any more.
            self._gradients.windows.drop(group)
            # In backward, compute does not wait for this copy: it has other kernels to run.
            if not self._in_backward:
                self._hold_compute()
            # After compute was held: a gather is queued behind compute, and must come behind the copies of updated
            # parameters.
            if self._replicas is not None:
                self._replicas.stepped(group)

    def _hold_compute(self) -> None:
        """Order later kernels of compute behind the updates of parameters on the device."""
        self._transfers.hold_compute()
        if self._visits is not None:
            self._visits.hold_compute()

    def _before_change(self, tile: Tile) -> None:
        if self._listener is not None:
            self._listener.before_change(tile)

    def _add_to_batch(self, tile: Tile, staged: Staged | None) -> None:
        # Before the kernels: a save that is under way copies the tile first.
        self._before_change(tile)
        if tile in self._in_gpu_memory:
            self._batch.add_on_device(tile, self._rule_of)
        else:
            self._batch.add(tile, staged, self._rule_of)
