"""A training step without its arithmetic: the engine's transfers, through its own swap space, arenas and I/O.

Which bytes move, in which order and how many at once follows from the plan; tests hold the transfers against those of
the engine. Nothing computes in forward and backward. In the update only the optimizer's kernels do, if they are asked
for. Memory is what the plan gives the engine for what is on its way; what the plan keeps in memory takes none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tiering.config.training import TiersConfig, format_size
from tiering.errors import ConfigError
from tiering.placement.budgets import host_memory
from tiering.placement.plan import Plan
from tiering.storage.aio import AioContext
from tiering.storage.io_stats import EngineInfo
from tiering.storage.swap_space import Section, SwapSpace
from tiering.tierbench.replay.fetching import Ended, Fetches, Transfers
from tiering.tierbench.replay.pattern import Kind, Pattern, Shared, Turn, around, order_of, share, turns_of
from tiering.tierbench.replay.stepping import Gradients, Kernel, Tile, Tiles, scratch_bytes

MEMORY_SHARE = 0.8  # of what is free, at most
_KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer state")


@dataclass(frozen=True)
class Taken:
    """What came of a turn: bytes that C has counted, seconds of waiting for them (``stalled``) and of kernels."""

    turn: Turn
    seconds: float
    read: int
    written: int
    stalled: float
    computed: float
    complete: bool

    @property
    def turns(self) -> float:
        """How much of the turn it was: 1 if it came to its end.

        What was begun has been read and is not written yet, so the direction that is behind counts: of both together
        a turn that is cut early would seem faster than the drive.
        """
        if self.complete:
            return 1.0
        moved = ((self.read, self.turn.read), (self.written, self.turn.written))
        return min(done / whole for done, whole in moved if whole)


class Replay:
    """Steps of ``plan`` in ``size`` bytes of each of ``directories``; ``config`` says how bytes travel.

    ``most``: bytes that it may write in all. Raises ConfigError where ``size`` or memory does not do, SwapSpaceError
    where a directory does not.
    """

    def __init__(
        self,
        plan: Plan,
        pattern: Pattern,
        directories: Sequence[Path],
        config: TiersConfig,
        *,
        size: int,
        with_kernels: bool = False,
        most: int | None = None,
    ) -> None:
        self.plan = plan
        self.turns = turns_of(plan, pattern)
        self.interrupted = False
        _check_memory(plan, with_kernels)
        shared = share(plan, pattern, size, len(directories))
        self.space_bytes = sum(each.nbytes for each in shared.values())
        if most is not None and most <= self.space_bytes:
            raise ConfigError(
                f"--max-write {format_size(most)} is used up by writing the swap space once"
                f" ({format_size(self.space_bytes)}): raise it, or give a smaller --size"
            )
        io = config.io
        self._aio = AioContext(
            engine=io.engine,
            block_size=io.block_size,
            queue_depth=io.queue_depth,
            registered=io.registered,
            verify=config.verify,
        )
        try:
            self._space = SwapSpace(
                {
                    kind: Section(each.nbytes, tuple(directories))
                    for kind, each in shared.items()
                    if each.nbytes
                },
                self._aio,
                allow_memory_file_system=io.allow_memory_file_system,
            )
        except BaseException:
            self._aio.close()
            raise
        try:
            self._build(plan, pattern, shared, with_kernels, most)
        except BaseException:
            self.close()
            raise

    def _build(
        self, plan: Plan, pattern: Pattern, shared: dict[Kind, Shared], with_kernels: bool, most: int | None
    ) -> None:
        made = {
            kind: [self._space.allocate(size, (kind,), kind) for size in each.sizes]
            for kind, each in shared.items()
        }
        self._extents = [extent for each in made.values() for extent in each]
        params, grads, states = (
            [None if number is None else made[kind][number] for number in shared[kind].extents]
            for kind in _KINDS
        )
        load = plan.workload
        tiles = [
            Tile(
                planned,
                load.of(load.groups[planned.group]),
                state,
                params[planned.group],
                grads[planned.group],
            )
            for planned, state in zip(plan.sub_groups, states, strict=True)
        ]
        self._transfers = Transfers(self._space, most)
        self._transfers.requested_writes = self.moved[1]  # several directories were measured, to divide it
        self._kernel = Kernel(plan) if with_kernels else None
        self._tiles = Tiles(plan, tiles, self._transfers, self._kernel)
        self._gradients = Gradients(plan, grads, self._transfers, numbers=with_kernels)
        self._groups = plan.workload.groups
        self._forward, self._backward = ([], []) if pattern == "optimizer" else order_of(self._groups)
        self._fetches = Fetches(plan, params, (self._forward, self._backward), self._transfers)
        for arena in (self._tiles.staging, self._gradients.window, *self._fetches.arenas):
            self._aio.register(arena)

    @property
    def engine(self) -> EngineInfo:
        """The I/O engine that is in use, and how."""
        return self._aio.info

    @property
    def full(self) -> bool:
        """Whether a turn has ended because no more may be written."""
        return self._transfers.full

    @property
    def fetches_alone(self) -> bool:
        """Whether most groups of parameters were used while no other was being read."""
        return self._fetches.waits < 2 * self._fetches.lone_waits

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes read and written so far, preparation included, as C has counted them."""
        stats = self._aio.stats()
        return sum(each.read.bytes for each in stats), sum(each.write.bytes for each in stats)

    def lay_out(self, tell: Callable[[], None] = lambda: None) -> None:
        """Write everything once: first writes cost more, and what was never written costs a read nothing."""
        staging, chunk = self._tiles.staging, self.plan.staging.slot_bytes
        for extent in self._extents:
            for offset in range(0, extent.nbytes, chunk):
                nbytes = min(chunk, extent.nbytes - offset)
                lease = staging.lease(nbytes, "staging")
                lease.retire(self._transfers.write(extent, lease, 0, offset, nbytes))
                tell()
        staging.drain()

    def take(self, turn: Turn, until: float | None = None, tell: Callable[[], None] = lambda: None) -> Taken:
        """Replay ``turn``, as far as it comes by ``until`` (time.monotonic), and ``tell`` now and then.

        Ctrl-C ends it, too; then nothing more can be replayed.
        """
        transfers, kernel = self._transfers, self._kernel
        transfers.deadline, transfers.report = until, tell
        read, written = self.moved
        ahead, stalled = self._tiles.read_bytes, transfers.stalled
        computed = 0.0 if kernel is None else kernel.seconds
        began, complete = time.monotonic(), True
        try:
            {"forward": self._go_forward, "backward": self._go_backward, "step": self._step}[turn.phase](turn)
        except Ended:
            complete = False
        except KeyboardInterrupt:
            complete, self.interrupted = False, True
        seconds = time.monotonic() - began
        now = self.moved
        # What a backward reads of the state is the step's.
        left = 0 if turn.phase == "step" else self._tiles.read_bytes
        taken = Taken(
            turn,
            seconds,
            now[0] - read + ahead - left,
            now[1] - written if turn.written else 0,
            transfers.stalled - stalled,
            0.0 if kernel is None else kernel.seconds - computed,
            complete,
        )
        if not complete and not self.interrupted:
            self._fetches.forget()
            self._gradients.forget()
            if turn.phase == "step":
                self._tiles.forget()
        return taken

    def settle(self) -> float:
        """Wait until nothing is under way, and return the seconds that took."""
        began = time.monotonic()
        for extent in self._extents:
            self._space.settle(extent)
        return time.monotonic() - began

    def close(self) -> None:
        """End the threads of C, and give back the space. What was not begun is taken back."""
        self._aio.close()
        self._space.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _go_forward(self, turn: Turn) -> None:
        self._fetches.begin(backward=False)
        in_use: list[int] = []
        for group in [*self._forward, None]:
            kept = set() if group is None else around(self._groups, group)
            for other in [other for other in reversed(in_use) if other not in kept]:
                in_use.remove(other)
                self._fetches.release(other)
            if group is not None:
                self._fetches.acquire(group)
                in_use.append(group)

    def _go_backward(self, turn: Turn) -> None:
        if turn.last:
            self._tiles.expect()
        self._fetches.begin(backward=True)
        live: list[int] = []
        for group in [*self._backward, None]:
            kept = set() if group is None else around(self._groups, group)
            for other in [other for other in live if other not in kept]:
                live.remove(other)
                if turn.gradients:
                    self._gradients.close(other)
                self._fetches.release(other)
                self._tiles.read_ahead()
            if group is not None:
                self._fetches.acquire(group)
                live.append(group)
                if turn.gradients:
                    self._gradients.open(group, accumulates=turn.accumulates)
        self._fetches.begin(backward=False)
        if not turn.last:
            self._fetches.look_ahead()

    def _step(self, turn: Turn) -> None:
        self._tiles.step()
        self._fetches.look_ahead()


def _check_memory(plan: Plan, with_kernels: bool) -> None:
    needed = plan.staging.nbytes + plan.grad_window_bytes + plan.fetch_window_bytes
    needed += 0 if plan.workload.fetch_by_copy else plan.working_bytes
    needed += scratch_bytes(plan) if with_kernels else 0
    limit, in_use = host_memory()
    if needed > (limit - in_use) * MEMORY_SHARE:
        raise ConfigError(
            f"what is on its way needs {format_size(needed)} of memory, but {format_size(limit - in_use)} are free:"
            " free some, give a --host-budget, or fewer --params"
        )
