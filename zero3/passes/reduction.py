"""Gradients of several ranks: collected on each rank, and reduced over all ranks in one order.

A group is reduced when its gradients are final, while backward continues. All ranks reduce groups in one order that
each of them knows (see reduction_order.py), although they may get different gradients. Stages 0 and 1 keep whole
gradients, which accumulate until the last backward of a step reduces them. Stages 2 and 3 keep reduced shards, and
reduce in every backward. The results go to the GradientStore.

Note [Late gradients]
    Stages 2 and 3 keep no whole gradients, so a group that waits for its turn would need a buffer until then. So a
    group that is ready does not wait: the groups before it are reduced as they are, with zeros for gradients that have
    not arrived. As a rule these groups have no gradients on this rank. A gradient that arrives for them later is
    reduced once more, which rounds twice. That happens when backward has ended. If no room is left for the gradients of
    another group, it happens earlier: this rank waits until every other rank has ended its backward, or has no room
    either. Then all ranks reduce the late gradients of any of them, repeatedly if necessary. Groups that stay open have
    their own buffers, and are reduced after that.

Note [Late gradients and placement]
    The rounding of sums must not depend on the room. Late gradients are reduced once, wherever that happens, unless
    ranks have used groups in orders that contradict each other. In that case each rank keeps the gradients of no more
    groups than the least room holds, whatever the room is. One case remains: a group that gets late gradients again
    and again, with many others. With the least room they are reduced as often, with more room once.

Note [Waiting for a reduction in stage 3]
    This would be a deadlock: one rank waits in backward for a reduction that another rank has not begun, and that rank
    waits for a gather that the first one has not begun. So in stage 3 every rank begins the reduction of a group before
    the next gather after backward has left that group, with gradients or without. The order of gathers is the same on
    all ranks, and so is the set of groups that backward has left before each gather. A wait for a reduction that was
    begun earlier then ends. A lack of room also occurs at the same place on all ranks; if it does not, ranks wait for
    each other, and deadlock.py reports it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optim_cpu import kernels
from optim_cpu.dtypes import DTYPES
from tiering.errors import EngineStateError
from tiering.placement.group_sizes import exchanged_at_once
from tiering.placement.tenants import GRADIENTS
from tiering.storage.arena import Lease
from zero3.device import kernels as device_kernels
from zero3.device.ledger import LedgerEntry
from zero3.device.storages import as_tensor
from zero3.device.tiers import Tiers
from zero3.params.layout import Piece, shard_ranges
from zero3.params.param_group import ParamGroup
from zero3.passes.backward_ends import EndTable
from zero3.passes.gradient_sums import sum_parts
from zero3.passes.gradients import GradientStore, pop_gradient
from zero3.passes.reduction_order import ReductionOrder
from zero3.ranks.collectives import Collectives
from zero3.ranks.process_groups import Pending
from zero3.ranks.tables import Table


@dataclass
class _Collected:
    """The gradients of a group on this rank, flat. ``lease`` is None if the buffer belongs to the group."""

    values: Tensor
    lease: Lease | LedgerEntry | None
    pieces: set[int]  # pieces with a gradient, by index


@dataclass
class _Reduction:
    """A reduction of ``elements`` of this rank's shard that was begun; ``last``: of a whole group, it is the last one.

    ``parts``: these elements from each rank, in the order of ranks. The transport writes them and reads what is sent,
    so ``leases`` stay until the reduction has ended.
    """

    group: ParamGroup
    elements: range
    last: bool
    pending: Pending
    parts: list[Tensor]
    leases: list[Lease | LedgerEntry]


class GradientReducer:
    """Collects the gradients of ``groups`` from autograd and adds their mean over the ranks to ``store``.

    ``dtype`` is the dtype in which they are sent, ``bucket`` elements of a group at once, at most. ``local``: whole
    gradients of each group that accumulate between reductions, in the store's dtype (stages 0 and 1). In stage 0 they
    are also the store's homes.
    """

    def __init__(
        self,
        groups: list[ParamGroup],
        store: GradientStore,
        collectives: Collectives,
        tiers: Tiers,
        dtype: torch.dtype,
        local: list[Tensor] | None,
        stage: int,
        bucket: int,
    ) -> None:
        self._groups = groups
        self._store = store
        store.register_reducer(self)
        store.mark_received(())  # a gradient counts as received once all ranks know of it
        self._collectives = collectives
        self._tiers = tiers
        self._dtype = dtype
        self._replicated = stage == 0
        self._bucket = bucket
        self._order = order = ReductionOrder(groups)
        # Host memory if the CPU is the device, else device memory. Two arenas, so that collected gradients cannot take
        # the room that a reduction needs to begin.
        self._collecting = tiers.reduction["collected"]
        self._exchanging = tiers.reduction["exchanged"]
        self._local = dict(zip(groups, local, strict=True)) if local is not None else {}
        self._open_buffers = {} if self._local else self._make_open_buffers()
        self._buffers: dict[ParamGroup, _Collected] = {}
        self._late: set[ParamGroup] = set()  # groups that got gradients after their turn
        # Groups whose turn comes before the late gradients. Groups that stay open have buffers for a whole backward.
        self._before_late = len(order) if self._local else len(order.passing)
        # In flight: the groups that the forwards of this backward have used, a row from each rank.
        self._opening: Table | None = None
        self._least_room = max((g.layout.trainable_numel * dtype.itemsize for g in order.passing), default=0)
        # Oldest first: reductions end in the order in which they began.
        self._reductions: deque[_Reduction] = deque()
        self._gathering: deque[Pending] = deque()  # stage 0: means that are gathered to all ranks
        self._backwards = 0
        self._first_begun = False  # the first backward
        self.received_elsewhere = False
        self._cut_off = False  # an exception ended a backward whose reductions other ranks may wait for
        pieces = 1 + max((p.index for group in groups for p in group.layout.pieces), default=0)
        self._ends = EndTable(len(groups), len(order), pieces)
        tables = collectives.tables
        tables.row_nbytes = max(tables.row_nbytes, self._ends.row_nbytes)
        self._arrived: set[int] = set()  # pieces with a gradient on this rank since the last agreement

    takes_parts = False
    """Parts would keep the group's buffer open from the first part to the last one, for most of a backward."""

    def begin(self, used: Iterable[ParamGroup]) -> None:
        """A backward begins. Its forwards used the groups ``used``, in this order. Sends a row, and does not wait.

        Raises EngineStateError if an exception cut an earlier backward off on this rank.
        """
        if self._cut_off:
            raise EngineStateError(
                "an exception ended an earlier backward on this rank but not on the other ranks: close the engine, and"
                " initialize the model again from a checkpoint"
            )
        if not self._is_reducing or (self._first_begun and self._local):
            return
        self._first_begun = True
        # Of a backward that an exception ended: its row may still be in flight.
        self._finish_opening()
        self._opening = self._collectives.tables.begin_table(self._order.chain_of(used), "begin a backward")

    def accumulate(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None:
        """Add ``param.grad`` to this rank's gradient of ``piece`` and clear it on ``param``."""
        grad = pop_gradient(piece, param)
        if grad is None:
            return
        grad = grad.contiguous()
        collected = self._collected(group)
        target = collected.values[piece.start : piece.end]
        overwrite = piece.index not in collected.pieces
        if not self._tiers.device_is_host:
            device_kernels.accumulate(target, grad.view(-1), overwrite=overwrite)
        else:
            kernels.accumulate(
                target.data_ptr(),
                DTYPES[target.dtype],
                grad.data_ptr(),
                DTYPES[grad.dtype],
                piece.numel,
                overwrite=overwrite,
            )
        collected.pieces.add(piece.index)
        self._arrived.add(piece.index)

    def final(self, group: ParamGroup) -> None:
        """No further gradient of ``group`` can arrive in this backward: reduce it when its turn comes."""
        if not self._is_reducing or group not in self._order.trained:
            return
        # From here on the order of this backward is known.
        self._finish_opening()
        self._order.note_ready(group)
        # Take the results of reductions that have ended: it costs no wait, and frees their buffers.
        while self._reductions and self._collectives.is_done(self._reductions[0].pending):
            self._finish_oldest()
        if self._local:
            while self._order.next_is_ready():
                self._reduce_next()
        elif group not in self._order.stays_open:
            while self._order.is_ahead(group):  # see Note [Late gradients]
                self._reduce_next()

    def close(self, group: ParamGroup, *, last: bool) -> None:
        """Backward has left the group. ``last``: it went through all forwards of the group.

        In stages 2 and 3 the reduction begins even without gradients on this rank: another rank may wait for it, and
        this rank may soon wait for a gather. See Note [Waiting for a reduction in stage 3].
        """
        if last and not self._replicated and (group in self._buffers or not self._local):
            self.final(group)

    def close_all(self) -> None:
        """Backward has ended: reduce the remaining groups, and agree on the pieces that got gradients.

        All ranks call this once per backward. They begin reductions in one order: the groups before the late ones, the
        late ones in the order of groups, then the groups that stay open.
        """
        self.received_elsewhere = False
        if not self._is_reducing:
            return
        self._finish_opening()
        while self._order.turn < self._before_late:
            self._reduce_next()
        received = self._reduce_late(backward_ended=True)
        while received is None:
            received = self._reduce_late(backward_ended=True)
        while self._order.turn < len(self._order):
            self._reduce_next()
        self._finish_all()
        self._store.close_all()
        self._store.mark_received(received)
        self.received_elsewhere = bool(received)
        self._order.end_backward()

    def replaced(self, group: ParamGroup, piece: Piece) -> None:
        """Code outside of backward has written the reduced gradient of ``piece`` at its home, on all ranks."""
        self._store.replaced(group, piece)
        # In stage 0 the home is the buffer to which further gradients are added.
        if self._replicated:
            self._collected(group).pieces.add(piece.index)

    def holds(self, piece: Piece) -> bool:
        """Whether there is a gradient of ``piece``, reduced or not."""
        return self._store.holds(piece) or piece.index in self._arrived

    def drop(self, group: ParamGroup, piece: Piece) -> None:
        """Forget the gradient of ``piece``. All ranks call this."""
        self._store.drop(group, piece)
        self._arrived.discard(piece.index)
        if group in self._buffers:
            self._buffers[group].pieces.discard(piece.index)

    def reset(self) -> None:
        """Drop all gradients: they were used, or are not needed."""
        self._store.reset()

    def forget(self) -> None:
        """Drop the gradients that wait here. Reductions that were begun are left to end: other ranks take part."""
        self._cut_off = self._cut_off or bool(self._order.turn or self._reductions)
        # Each is forgotten before its lease is released, as in GradientStore.reset.
        while self._buffers:
            lease = self._buffers.popitem()[1].lease
            if lease is not None:
                lease.release()
        self._arrived.clear()
        self._order.forget_ready()

    @property
    def unreduced(self) -> bool:
        """Whether this rank has gradients that other ranks do not know of."""
        return bool(self._arrived)

    @property
    def _is_reducing(self) -> bool:
        """Whether the current backward reduces gradients."""
        return not self._local or self._store.last_micro_batch

    def _collected(self, group: ParamGroup) -> _Collected:
        """Where this rank's gradients of ``group`` accumulate."""
        collected = self._buffers.get(group)
        if collected is None:
            lease = None
            self._wait_for_reduction_of(group)
            if group in self._local:
                values = self._local[group]
            elif group in self._open_buffers:
                values = self._open_buffers[group]
            else:
                numel, dtype = group.layout.trainable_numel, self._dtype_of(group)
                lease = self._room_to_collect(numel * dtype.itemsize)
                values = self._tensor(lease, numel, dtype)
            collected = self._buffers[group] = _Collected(values, lease, set())
        if self._order.has_passed(group) and group not in self._late:
            self._wait_for_reduction_of(group)
            self._late.add(group)
        return collected

    def _wait_for_reduction_of(self, group: ParamGroup) -> None:
        """Wait until the transport has read the group's buffer, to which the next gradients are added.

        In stage 0 the result is gathered into the same buffer, so the gathers are waited for as well.
        """
        while any(reduced.group is group for reduced in self._reductions):
            self._finish_oldest()
        while self._replicated and self._gathering:
            self._collectives.finish(self._gathering.popleft(), "reduce")

    def _room_to_collect(self, nbytes: int) -> Lease | LedgerEntry:
        """Room for a group's gradients. Without free room, reduces gradients that wait: see the notes."""
        if self._order.contradicted:
            while (collected := self._collected_bytes()) and collected + nbytes > self._least_room:
                self._give_way()
        while (lease := self._collecting.try_lease(nbytes, GRADIENTS)) is None:
            if self._reductions:
                self._finish_oldest()
            elif self._collected_bytes():
                self._give_way()
            else:  # a defect of the plan: the lease raises an error that says so
                return self._collecting.lease(nbytes, GRADIENTS, alone=True)
        return lease

    def _collected_bytes(self) -> int:
        """Bytes of gradients that wait here for their turn, or for the agreement on late ones."""
        return sum(buffer.values.nbytes for buffer in self._buffers.values() if buffer.lease is not None)

    def _give_way(self) -> None:
        """Begin to reduce some of the gradients that wait here."""
        self._finish_opening()
        if self._order.turn < self._before_late:
            self._reduce_next()
        else:
            self._reduce_late(backward_ended=False)

    def _make_open_buffers(self) -> dict[ParamGroup, Tensor]:
        """Buffers of the groups that collect gradients through a whole backward."""
        buffers = {}
        for group in self._order.stays_open:
            numel, dtype = group.layout.trainable_numel, self._dtype_of(group)
            lease = self._tiers.reduction["opened"].lease(numel * dtype.itemsize, GRADIENTS, alone=True)
            buffers[group] = self._tensor(lease, numel, dtype)
        return buffers

    def _dtype_of(self, group: ParamGroup) -> torch.dtype:
        """The dtype in which gradients of ``group`` are sent."""
        return torch.float32 if group.in_fp32 else self._dtype

    def _tensor(self, lease: Lease | LedgerEntry, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor for ``lease``: in its arena, or allocated by torch if the lease only counts bytes."""
        if isinstance(lease, Lease):
            return as_tensor(lease).view(dtype)[:numel]
        return torch.empty(numel, dtype=dtype, device=self._tiers.device)

    def _reduce_next(self) -> None:
        """Begin to reduce the group whose turn it is, as it is now."""
        self._begin(self._order.next())

    def _begin(self, group: ParamGroup) -> None:
        """Begin to send the group's gradients, with zeros for pieces that have none on this rank."""
        collected = self._buffers.pop(group, None)
        home = self._local.get(group, self._open_buffers.get(group))
        if collected is None and home is not None:
            collected = _Collected(home, None, set())
        if collected is not None:
            for piece in group.layout.pieces:
                if piece.trainable and piece.index not in collected.pieces:
                    collected.values[piece.start : piece.end].zero_()
            if self._replicated:
                # The buffer then holds the mean of the ranks, to which further gradients are added.
                trained = {piece.index for piece in group.layout.pieces if piece.trainable}
                self._buffers[group] = _Collected(collected.values, None, trained)
        ranks, numel = self._collectives.world.partition_size, group.layout.trainable_numel
        at_once = exchanged_at_once(numel, self._bucket, ranks) // ranks
        starts = range(0, numel // ranks, max(1, at_once))
        for start in starts:
            elements = range(start, min(start + at_once, numel // ranks))
            self._begin_part(group, collected, elements, last=start == starts[-1])

    def _begin_part(
        self, group: ParamGroup, collected: _Collected | None, elements: range, *, last: bool
    ) -> None:
        """Begin to send ``elements`` of each rank's shard of the group."""
        ranks, dtype = self._collectives.world.partition_size, self._dtype_of(group)
        numel = ranks * len(elements)
        is_whole = numel == group.layout.trainable_numel
        copies = collected is None or collected.values.dtype != dtype or not is_whole
        # One lease for both tensors: after a first lease, the free room could be split, and the second would not fit.
        lease = self._room_to_exchange((1 + copies) * numel * dtype.itemsize)
        room = self._tensor(lease, (1 + copies) * numel, dtype)
        received, outgoing = room[:numel], room[numel:]
        if collected is None:
            # On a device this is queued on compute's stream, as the copies below: the exchange begins behind them.
            outgoing.zero_()
        elif copies:
            shards = collected.values.view(ranks, -1)
            outgoing.view(ranks, -1).copy_(shards[:, elements.start : elements.stop])
        else:
            outgoing = collected.values
        leases = [lease]
        if last and collected is not None and collected.lease is not None:
            if copies:
                # On a device the copies are only queued, as is every later use of this memory, on the same stream.
                collected.lease.release()
            else:
                leases.append(collected.lease)
        # All ranks come here in one order of groups, which is the order of the reduction process group.
        part = "" if is_whole else f", elements {elements.start} to {elements.stop} of each shard"
        pending = self._collectives.exchange(received, outgoing, f"reduce {group.name!r}{part}")
        parts = list(received.view(ranks, -1).unbind())
        self._reductions.append(_Reduction(group, elements, last, pending, parts, leases))

    def _room_to_exchange(self, nbytes: int) -> Lease | LedgerEntry:
        while (lease := self._exchanging.try_lease(nbytes, GRADIENTS)) is None:
            if not self._reductions:  # a defect of the plan: the lease raises an error that says so
                return self._exchanging.lease(nbytes, GRADIENTS, alone=True)
            self._finish_oldest()
        return lease

    def _finish_all(self) -> None:
        """Wait for all reductions, and for the gathers that they begin in stage 0."""
        while self._reductions:
            self._finish_oldest()
        while self._gathering:
            self._collectives.finish(self._gathering.popleft(), "reduce")

    def _finish_oldest(self) -> None:
        """Wait for the oldest reduction, sum up its parts, and add the mean to the store."""
        reduction = self._reductions.popleft()
        group, world = reduction.group, self._collectives.world
        # If a rank is lost, this raises and the leases stay taken: the transport may still write to them.
        self._collectives.finish(reduction.pending, "reduce")
        if self._replicated:
            self._store.forget_squares(group)
            whole, shard = (
                self._local[group],
                shard_ranges(group.layout, world.partition_size, world.partition_rank)[0],
            )
            local_shard = whole[shard.start : shard.stop]
            target = local_shard[reduction.elements.start : reduction.elements.stop]
            on_device = not self._tiers.device_is_host
            sum_parts(
                reduction.parts, 1.0 / world.partition_size, target, overwrite=True, on_device=on_device
            )
            if reduction.last:
                label = f"gather the gradients of {group.name!r}"
                # Foreseen: all ranks finish reductions in the order in which they began them.
                self._collectives.announce(label, foreseen=True)
                self._gathering.append(self._collectives.gather(whole, local_shard, label))
        else:
            self._store.add_reduced(
                group, reduction.parts, 1.0 / world.partition_size, reduction.elements.start
            )
            if reduction.last:
                self._store.final(group)
            # On a device the sum is copied to the host, and the store writes it when the copy has ended.
            if self._tiers.device_is_host and reduction.last:
                self._store.close(group)
        # On a device the sum is only queued. A later user of this memory is queued behind it on the same stream.
        for lease in reduction.leases:
            lease.release()

    def _finish_opening(self) -> None:
        """Wait for the table of this backward, and set its order: see Note [The order of reductions]."""
        table, self._opening = self._opening, None
        if table is None:
            return
        self._order.follow(self._collectives.tables.finish_table(table).tolist())

    def _reduce_late(self, *, backward_ended: bool) -> list[int] | None:
        """Reduce the late gradients of any rank. All ranks call this, with backward ended or without room.

        Returns None until backward has ended on all ranks, then the indices of pieces that got a gradient on any rank.
        """
        # In stage 0 the end of a reduction begins a gather. Another rank may wait for it and not reach the table.
        if self._replicated:
            self._finish_all()
        row = self._ends.row(
            self._backwards + 1,
            last=self._store.last_micro_batch,
            ended=backward_ended,
            order=self._order.measured(),
            late=[group.index for group in self._late],
            received=self._arrived,
        )
        ends = self._ends.read(self._collectives.tables.table(row, "end a backward"))
        if ends.late:
            # A reduction in the group's turn may still read the buffer from which the late gradients are sent.
            self._finish_all()
            for index in ends.late:
                self._begin(self._groups[index])
            self._late.clear()
        if not ends.all_ended:
            return None
        self._backwards += 1
        self._order.adopt(ends.order)
        # Only when backward has ended on all ranks: until then, the next round sends these pieces again.
        self._arrived.clear()
        return ends.received
