"""A run of tiles: from completion to kernel to write for all tiles that have slots, in one call of C.

A tile that is updated is written back, and the next tile of the order is read into its slot, behind the writes. So the
slots stay busy until the next run. The call does not hold the GIL, so other threads of Python do not delay it. A tile
takes part if all its transfers are those of NVMe (``SlotTransfers.moves_by_swap_alone``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile, zip_longest

from optim_cpu.kernels import PreparedStep
from tiering.placement.tenants import OPTIMIZER_STATE
from tiering.storage.request import Completion
from tiering.storage.tasks import Task
from tiering.storage.tickets import AllOf, Ticket
from tiering.storage.transfer_order import OrderedTransfer
from zero3.device.tiers import Tiers
from zero3.optimizer.slot_transfers import SlotTransfers, Staged, StatePipeline
from zero3.optimizer.tiles import Tile


class TileRun:
    """Updates staged tiles, each by its step of the kernels. ``updated`` are those that were, in their order."""

    def __init__(
        self,
        transfers: SlotTransfers,
        pipeline: StatePipeline,
        tiers: Tiers,
        steps: Sequence[tuple[Staged, PreparedStep]],
    ) -> None:
        self.updated: list[Tile] = []
        self._transfers = transfers
        self._pipeline = pipeline
        self._tiers = tiers
        self._steps = steps
        self._successors: list[Staged | None] = []
        self._tasks: list[Task] = []

    def run(self) -> None:
        """Update as many tiles as can be. After a failed transfer, the others keep their slots, and ``wait`` raises.

        Raises the error of a refused submission or a refused step.
        """
        swap = self._tiers.swap
        assert swap is not None
        with swap.ordering:
            transfers = self._prepare()
            try:
                swap.run(self._tasks, transfers)
            finally:
                self._hand_on()
        for (_, step), task in zip(self._steps, self._tasks, strict=True):
            step.check(task.answer)

    def _prepare(self) -> list[OrderedTransfer]:
        """Make the tasks; the transfers that they begin."""
        ordered: list[OrderedTransfer] = []
        following = takewhile(
            self._transfers.moves_by_swap_alone, self._pipeline.successors(len(self._steps))
        )
        for (staged, step), successor in zip_longest(self._steps, following):
            begins = self._transfers.ordered_writes(staged)
            self._successors.append(None)
            if successor is not None:
                # The same slot: its reads wait for the writes, which still read it.
                self._successors[-1] = after = Staged(successor, staged.lease, reads_gradient=True)
                writes = [write.ticket for write in begins]
                reads = self._transfers.ordered_reads(after, writes)
                # Without reads, its update waits for the writes itself.
                after.reads += [read.ticket for read in reads] or writes
                begins += reads
            waits = [read for read in staged.reads if isinstance(read, Ticket)]
            assert len(waits) == len(staged.reads), "a tile with copies takes part in a run"
            self._tasks.append(Task(waits, step, [transfer.ticket for transfer in begins]))
            ordered += begins
        return ordered

    def _hand_on(self) -> None:
        """Pass on the slots of the tiles that were updated, and count what was done."""
        stalls, timeline = self._tiers.stalls, self._tiers.timeline
        for (staged, _), task, successor in zip(self._steps, self._tasks, self._successors, strict=True):
            if not task.ended or task.answer:
                continue
            self.updated.append(staged.tile)
            begun = [ticket for ticket in task.begins if ticket.has_begun]
            if successor is not None and len(begun) == len(task.begins):
                self._pipeline.hand_on(staged, successor)
            else:
                self._pipeline.hand_on(staged, None)
                staged.lease.retire(AllOf[Completion](begun))
            if task.idle:
                stalls.add(OPTIMIZER_STATE, task.idle, task.began)
            timeline.add_wait("kernel", staged.tile.group.name, task.began, task.ended)
