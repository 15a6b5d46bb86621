"""A training step without its arithmetic: the engine's transfers, through its own swap space, arenas and I/O.

The plan determines which bytes move, in which order, and how many at once; tests compare the transfers with those of
the engine. Nothing computes in forward and backward, and in the update only the optimizer's kernels, if they are
requested. The replay uses the memory that the plan gives the engine for data in transit, and none for data that stays
in memory.
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
from tiering.placement.tenants import GRADIENTS
from tiering.storage.aio import AioContext
from tiering.storage.io_stats import EngineInfo
from tiering.storage.swap_space import Section, SwapSpace
from tiering.tierbench.replay.fetching import Ended, Fetches, Transfers
from tiering.tierbench.replay.pattern import (
    Kind,
    Pattern,
    SharedExtents,
    Turn,
    pass_orders,
    share_extents,
    turns_of,
)
from tiering.tierbench.replay.stepping import Gradients, Kernel, Tile, Tiles, scratch_bytes

MEMORY_FRACTION = 0.8  # of the free memory, at most
_KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer state")


@dataclass(frozen=True)
class TurnResult:
    """A replayed turn: bytes as C counts them, seconds in all, of waiting (``stalled``), of kernels (``computed``)."""

    turn: Turn
    seconds: float
    read: int
    written: int
    stalled: float
    computed: float
    complete: bool

    @property
    def turns(self) -> float:
        """The fraction of the turn that was replayed: 1 if it is complete.

        Tiles under way have been read and are not written yet, so the direction that is behind counts: the sum of both
        would make a turn that is cut early seem faster than the drive.
        """
        if self.complete:
            return 1.0
        moved = ((self.read, self.turn.read), (self.written, self.turn.written))
        return min(done / whole for done, whole in moved if whole)


class Replay:
    """Replays steps of ``plan`` in ``size`` bytes of each of ``directories``, with the I/O settings of ``config``.

    ``write_limit``: bytes that it may write in all. Raises ConfigError if ``size`` or the free memory is too small,
    SwapSpaceError if a directory cannot hold swap space.
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
        write_limit: int | None = None,
    ) -> None:
        self.plan = plan
        self.turns = turns_of(plan, pattern)
        self.interrupted = False
        _check_memory(plan, with_kernels)
        shared = share_extents(plan, pattern, size, len(directories))
        self.space_bytes = sum(each.nbytes for each in shared.values())
        if write_limit is not None and write_limit <= self.space_bytes:
            raise ConfigError(
                f"--max-write {format_size(write_limit)} does not exceed the swap space, which is written once"
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
            self._build(plan, pattern, shared, with_kernels, write_limit)
        except BaseException:
            self.close()
            raise

    def _build(
        self,
        plan: Plan,
        pattern: Pattern,
        shared: dict[Kind, SharedExtents],
        with_kernels: bool,
        write_limit: int | None,
    ) -> None:
        allocated = {
            kind: [self._space.allocate(size, (kind,), kind) for size in each.sizes]
            for kind, each in shared.items()
        }
        self._extents = [extent for each in allocated.values() for extent in each]
        params, grads, states = (
            [None if number is None else allocated[kind][number] for number in shared[kind].extents]
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
        self._transfers = Transfers(self._space, write_limit)
        # Several directories were measured by writing, to divide the swap space over them.
        self._transfers.requested_writes = self.moved[1]
        self._kernel = Kernel(plan) if with_kernels else None
        self._tiles = Tiles(plan, tiles, self._transfers, self._kernel)
        self._gradients = Gradients(plan, grads, self._transfers, numbers=with_kernels)
        self._groups = plan.workload.groups
        self._forward, self._backward = ([], []) if pattern == "optimizer" else pass_orders(self._groups)
        self._fetches = Fetches(plan, params, (self._forward, self._backward), self._transfers)
        for arena in (self._tiles.staging, self._gradients.window, *self._fetches.arenas):
            self._aio.register(arena)

    @property
    def engine(self) -> EngineInfo:
        """The I/O engine in use, and its features."""
        return self._aio.info

    @property
    def full(self) -> bool:
        """Whether a turn has ended at the limit of written bytes."""
        return self._transfers.full

    @property
    def fetches_alone(self) -> bool:
        """Whether most waits for a group of parameters happened while no other group was ahead."""
        return self._fetches.waits < 2 * self._fetches.lone_waits

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes read and written so far, including preparation, as C has counted them."""
        stats = self._aio.stats()
        return sum(each.read.bytes for each in stats), sum(each.write.bytes for each in stats)

    def lay_out(self, report: Callable[[], None] = lambda: None) -> None:
        """Write all extents once: first writes cost more than later ones, reads of unwritten blocks nothing."""
        staging, chunk = self._tiles.staging, self.plan.staging.slot_bytes
        for extent in self._extents:
            for offset in range(0, extent.nbytes, chunk):
                nbytes = min(chunk, extent.nbytes - offset)
                lease = staging.lease(nbytes, "staging")
                lease.retire(self._transfers.write(extent, lease, 0, offset, nbytes))
                report()
        staging.drain()

    def replay_turn(
        self, turn: Turn, deadline: float | None = None, report: Callable[[], None] = lambda: None
    ) -> TurnResult:
        """Replay ``turn`` until its end or the ``deadline`` (time.monotonic); call ``report`` from time to time.

        Ctrl-C ends it, too; after that no turn can be replayed.
        """
        transfers, kernel = self._transfers, self._kernel
        transfers.deadline, transfers.report = deadline, report
        read, written = self.moved
        ahead_before, stalled = self._tiles.read_bytes, transfers.stalled
        computed = 0.0 if kernel is None else kernel.seconds
        start, complete = time.monotonic(), True
        try:
            {"forward": self._forward_pass, "backward": self._backward_pass, "step": self._step}[turn.phase](
                turn
            )
        except Ended:
            complete = False
        except KeyboardInterrupt:
            complete, self.interrupted = False, True
        seconds = time.monotonic() - start
        moved = self.moved
        # State that a backward reads counts as a read of the step.
        ahead_after = 0 if turn.phase == "step" else self._tiles.read_bytes
        result = TurnResult(
            turn,
            seconds,
            moved[0] - read + ahead_before - ahead_after,
            moved[1] - written if turn.written else 0,
            transfers.stalled - stalled,
            0.0 if kernel is None else kernel.seconds - computed,
            complete,
        )
        if not complete and not self.interrupted:
            self._fetches.forget()
            self._gradients.forget()
            if turn.phase == "step":
                self._tiles.forget()
        return result

    def settle(self) -> float:
        """Wait for all transfers; returns the seconds of waiting."""
        start = time.monotonic()
        for extent in self._extents:
            self._space.settle(extent)
        return time.monotonic() - start

    def close(self) -> None:
        """End the threads of C and free the swap space. Transfers that have not started are cancelled."""
        self._aio.close()
        self._space.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forward_pass(self, turn: Turn) -> None:
        self._fetches.begin(backward=False)
        in_use: list[int] = []
        for group in [*self._forward, None]:
            enclosing = set() if group is None else set(self.plan.workload.chain(group))
            for other in [other for other in reversed(in_use) if other not in enclosing]:
                in_use.remove(other)
                self._fetches.release(other)
            if group is not None:
                self._fetches.acquire(group)
                in_use.append(group)

    def _backward_pass(self, turn: Turn) -> None:
        if turn.last:
            self._tiles.expect()
        self._fetches.begin(backward=True)
        live: list[int] = []
        for group in [*self._backward, None]:
            enclosing = set() if group is None else set(self.plan.workload.chain(group))
            for other in [other for other in live if other not in enclosing]:
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
    needed = plan.staging.nbytes + plan.windows[GRADIENTS] + plan.fetch_window_bytes
    needed += 0 if plan.workload.fetch_by_copy else plan.working_bytes
    needed += scratch_bytes(plan) if with_kernels else 0
    limit, in_use = host_memory()
    if needed > (limit - in_use) * MEMORY_FRACTION:
        raise ConfigError(
            f"the replay needs {format_size(needed)} of memory, but {format_size(limit - in_use)} are free:"
            " free some, give a --host-budget, or fewer --params"
        )
