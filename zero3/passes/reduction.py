"""Gradients of several ranks: collected on each, reduced over all, in the same order everywhere.

A group is reduced when its gradients are final, while backward goes on. That is in one order that all ranks know,
though they need not get the same gradients. Stages 0 and 1 keep whole gradients, which accumulate until the last
backward of a step; that one reduces them. Stages 2 and 3 keep reduced shards, and reduce in every backward. What comes
out goes to the GradientStore.

Note [The order of reductions]
    It is rank 0's of the backward before. Where a forward has used groups in another order since, that would be wrong:
    groups would wait for those that come last. So in stages 2 and 3 ranks tell each other at the beginning of each
    backward what their forwards have used. The row is sent then and needed at the first reduction, so it travels beside
    the first block's backward. In stages 0 and 1 a group waits where its gradients are, whatever the order.

Note [Groups whose turn passes]
    Where nothing keeps whole gradients, a group that waits for its turn would need a buffer for as long. So one that
    is ready does not wait: those before it go as they are, with zeros for what has not arrived. They are, as a rule,
    without gradients on this rank. What arrives for them after all, late, is reduced once more, which rounds twice:
    when backward has ended, or, if no room is left for another group's gradients, before that: this rank waits until
    every other one has ended its backward, or has no room either, and all reduce together what came late on any of
    them, as often as it takes. Groups that stay open have buffers of their own, so their turn comes after that.

Note [Late gradients and placement]
    How sums round must not depend on the room that there is. Late gradients are reduced once, wherever that happens,
    unless ranks have used groups in orders that contradict each other: then each rank keeps the gradients of no more
    groups than the least room holds, whatever the room. What remains is a group that gets gradients late, again and
    again, beside many others: with the least room they are reduced as often, with more of it once.

Note [Waiting for a reduction in stage 3]
    A rank that waits in backward for a reduction which another one has not begun, because that one waits for a gather
    which this one has not begun, waits for ever. So in stage 3 every rank begins the reduction of a group before the
    next gather after backward has left that group, with gradients or without: the order of gathers is the same on all
    ranks, hence so is what has been left when. A wait for what was begun earlier then ends. A lack of room, too, comes
    at the same place on all ranks that way; where it does not, ranks wait for each other, which is told (see
    deadlock.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from optim_cpu import kernels
from tiering.errors import EngineStateError, RankOrderError
from tiering.storage.arena import Lease
from zero3.device import kernels as device_kernels
from zero3.device.tiers import Entry, Tiers, as_tensor
from zero3.params.layout import Piece, shard_ranges
from zero3.params.param_group import ParamGroup
from zero3.passes import turns
from zero3.passes.gradients import KERNEL_DTYPES, GradientStore, add_up, taken_gradient
from zero3.ranks.collectives import Collectives, Table
from zero3.ranks.process_groups import Pending


@dataclass
class _Collected:
    """The gradients of a group on this rank, flat; with a lease unless they stay for good."""

    values: Tensor
    lease: Lease | Entry | None
    pieces: set[int]  # that have arrived, by index


@dataclass
class _UnderWay:
    """A reduction that was begun. ``parts``: one of each rank's, as they are received."""

    group: ParamGroup
    pending: Pending
    parts: list[Tensor]
    leases: list[Lease | Entry]


class GradientReducer:
    """Takes the gradients of ``groups`` from autograd and brings their mean over the ranks to ``store``.

    ``dtype`` is that in which they are sent. ``local``: whole gradients of each group that accumulate between
    reductions, in the store's dtype (stages 0 and 1); in stage 0 they are the store's homes, too.
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
    ) -> None:
        self._groups = groups
        self._store = store
        store.register_reducer(self)
        store.agreed(())  # what has arrived here counts once all ranks know of it
        self._collectives = collectives
        self._tiers = tiers
        self._dtype = dtype
        self._replicated = stage == 0
        self._trained = {group for group in groups if group.layout.trainable_numel}
        parents = {group.parent for group in groups}
        self._stays_open = {group for group in self._trained if group.index in parents or not group.entries}
        # Of a CPU, or in device memory; apart from each other, so that a reduction can always begin.
        self._collecting = tiers.reduction["collected"]
        self._exchanging = tiers.reduction["exchanged"]
        self._pieces = 1 + max((p.index for group in groups for p in group.layout.pieces), default=0)
        self._local = dict(zip(groups, local, strict=True)) if local is not None else {}
        self._open_buffers = {} if self._local else self._make_open_buffers()
        self._buffers: dict[ParamGroup, _Collected] = {}
        self._late: set[ParamGroup] = set()  # that got gradients after their turn
        self._order = sorted(self._trained, key=lambda g: (g in self._stays_open, -g.index))
        passing = self._trained - self._stays_open
        self._passing = len(passing)  # the first of the order; what stays open comes behind them
        # So many have their turn before what is late: what stays open has buffers for a whole backward.
        self._before_late = len(self._order) if self._local else self._passing
        # On its way: what each rank's forwards have used, in this backward.
        self._opening: Table | None = None
        self._chains: list[list[int]] = []  # the same of the backward before, as it was sent
        self._contradicted = False  # what ranks have used, by what others have
        self._least_room = max((g.layout.trainable_numel * dtype.itemsize for g in passing), default=0)
        self._turn = 0  # of the order: what is before it was reduced in this backward
        self._ready: dict[ParamGroup, None] = {}  # in the order in which it happened
        self._under_way: deque[_UnderWay] = deque()
        self._gathering: deque[Pending] = deque()
        self._backwards = 0
        self._begun = False  # the first one
        self.received_elsewhere = False
        self._cut_off = False  # in the middle of a backward, for whose reductions others may be waiting still
        numbers = 4 * (3 + len(self._order)) + (len(groups) + 7) // 8
        collectives.row_nbytes = max(collectives.row_nbytes, numbers + (self._pieces + 7) // 8)
        self._arrived: set[int] = set()  # pieces that got a gradient here, since the last agreement

    takes_parts = False
    """A part would open the group's buffer from its first part on to its last, for most of a backward."""

    def begin(self, used: Iterable[ParamGroup]) -> None:
        """A backward begins, of forwards that have used these groups, in this order."""
        if self._cut_off:
            raise EngineStateError(
                "an earlier backward was ended by an exception on this rank, and the other ranks' was not: close the"
                " engine, and initialize the model again from a checkpoint"
            )
        if not self._reduces or (self._begun and self._local):
            return
        self._begun = True
        self._finish_opening()  # of a backward that an exception has ended
        row = torch.full((self._passing,), -1, dtype=torch.int32, device="cpu")
        passing = [g.index for g in reversed(list(used)) if g in self._trained - self._stays_open]
        row[: len(passing)] = torch.tensor(passing, dtype=torch.int32)
        self._opening = self._collectives.begin_table(row, "begin a backward")

    def accumulate(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None:
        """Take ``param.grad`` and add it to what is there."""
        grad = taken_gradient(piece, param)
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
                KERNEL_DTYPES[target.dtype],
                grad.data_ptr(),
                KERNEL_DTYPES[grad.dtype],
                piece.numel,
                overwrite=overwrite,
            )
        collected.pieces.add(piece.index)
        self._arrived.add(piece.index)

    def final(self, group: ParamGroup) -> None:
        """No gradient of ``group`` can come any more in this backward."""
        if not self._reduces or group not in self._trained:
            return
        self._finish_opening()
        self._ready.setdefault(group)
        while self._under_way and self._collectives.has_ended(self._under_way[0].pending):
            self._finish_oldest()
        if self._local:
            while self._turn < len(self._order) and self._order[self._turn] in self._ready:
                self._reduce_next()
        elif group not in self._stays_open:
            while group in self._order[self._turn :]:  # see Note [Groups whose turn passes]
                self._reduce_next()

    def close(self, group: ParamGroup, *, last: bool) -> None:
        """Backward has left the group; ``last``: it has been through all of the group's forwards.

        Without gradients here, too: another rank may wait for its reduction, and this one soon for a gather.
        """
        if last and not self._replicated and (group in self._buffers or not self._local):
            self.final(group)

    def close_all(self) -> None:
        """Backward has ended: reduce what is left, and agree on what was there."""
        self.received_elsewhere = False
        if not self._reduces:
            return
        self._finish_opening()
        while self._turn < self._before_late:
            self._reduce_next()
        received = self._reduce_late(ended=True)
        while received is None:
            received = self._reduce_late(ended=True)
        while self._turn < len(self._order):
            self._reduce_next()
        self._settle()
        self._store.close_all()
        self._store.agreed(received)
        self.received_elsewhere = bool(received)
        self._turn = 0
        self._ready.clear()

    def replaced(self, group: ParamGroup, piece: Piece) -> None:
        """The reduced gradient of ``piece`` was written at home, on all ranks."""
        self._store.replaced(group, piece)
        if self._replicated:  # where further gradients are added
            self._collected(group).pieces.add(piece.index)

    def holds(self, piece: Piece) -> bool:
        """Whether there is anything to ``drop``: reduced, or not yet."""
        return self._store.holds(piece) or piece.index in self._arrived

    def drop(self, group: ParamGroup, piece: Piece) -> None:
        """Forget the gradient of ``piece``; all ranks do."""
        self._store.drop(group, piece)
        self._arrived.discard(piece.index)
        if group in self._buffers:
            self._buffers[group].pieces.discard(piece.index)

    def reset(self) -> None:
        """Forget all gradients: they have been used, or are given up."""
        self._store.reset()

    def forget(self) -> None:
        """Drop the gradients that have not reached the store."""
        self._cut_off = self._cut_off or bool(self._turn or self._under_way)
        for collected in self._buffers.values():
            if collected.lease is not None:
                collected.lease.release()
        self._buffers.clear()
        self._arrived.clear()
        self._ready.clear()

    @property
    def unreduced(self) -> bool:
        """Whether gradients wait here that other ranks do not know of."""
        return bool(self._arrived)

    @property
    def _reduces(self) -> bool:
        """Whether this backward does."""
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
        if group in self._order[: self._turn] and group not in self._late:
            self._wait_for_reduction_of(group)
            self._late.add(group)
        return collected

    def _wait_for_reduction_of(self, group: ParamGroup) -> None:
        """It may be sending from where the next gradients go; in stage 0 its result goes there as well."""
        while any(reduced.group is group for reduced in self._under_way):
            self._finish_oldest()
        while self._replicated and self._gathering:
            self._collectives.finish(self._gathering.popleft(), "reduce")

    def _room_to_collect(self, nbytes: int) -> Lease | Entry:
        """Room for a group's gradients. When there is none, what is here has to go: see the notes."""
        if self._contradicted:
            while (held := self._held()) and held + nbytes > self._least_room:
                self._give_way()
        while (lease := self._collecting.try_lease(nbytes, "gradients")) is None:
            if self._under_way:
                self._finish_oldest()
            elif self._held():
                self._give_way()
            else:  # a defect of the plan, which this says
                return self._collecting.lease(nbytes, "gradients", alone=True)
        return lease

    def _held(self) -> int:
        """Bytes of gradients that wait here for their turn, or for others that came late."""
        return sum(each.values.nbytes for each in self._buffers.values() if each.lease is not None)

    def _give_way(self) -> None:
        """Begin to reduce some of the gradients that wait here."""
        self._finish_opening()
        if self._turn < self._before_late:
            self._reduce_next()
        else:
            self._reduce_late(ended=False)

    def _make_open_buffers(self) -> dict[ParamGroup, Tensor]:
        """What collects gradients through a whole backward does so in buffers of its own."""
        made = {}
        for group in self._stays_open:
            numel, dtype = group.layout.trainable_numel, self._dtype_of(group)
            lease = self._tiers.reduction["opened"].lease(numel * dtype.itemsize, "gradients", alone=True)
            made[group] = self._tensor(lease, numel, dtype)
        return made

    def _dtype_of(self, group: ParamGroup) -> torch.dtype:
        """That in which gradients of ``group`` are sent."""
        return torch.float32 if group.in_fp32 else self._dtype

    def _tensor(self, lease: Lease | Entry, numel: int, dtype: torch.dtype) -> Tensor:
        """The leased bytes: of an arena, or of memory that torch allocates."""
        if isinstance(lease, Lease):
            return as_tensor(lease).view(dtype)[:numel]
        return torch.empty(numel, dtype=dtype, device=self._tiers.device)

    def _reduce_next(self) -> None:
        """Begin to reduce the group whose turn it is, as it is now."""
        group = self._order[self._turn]
        self._turn += 1
        self._begin(group)

    def _begin(self, group: ParamGroup) -> None:
        """Begin to send the group's gradients, and zeros for what has none here."""
        numel, leases, dtype = group.layout.trainable_numel, list[Lease | Entry](), self._dtype_of(group)
        collected = self._buffers.pop(group, None)
        home = self._local.get(group, self._open_buffers.get(group))
        if collected is None and home is not None:
            collected = _Collected(home, None, set())
        copies = collected is None or collected.values.dtype != dtype
        # In one piece: two leases could leave no room in one piece for the second, whatever else comes free.
        lease = self._room_to_exchange((1 + copies) * numel * dtype.itemsize)
        room = self._tensor(lease, (1 + copies) * numel, dtype)
        received, sent = room[:numel], room[numel:]
        leases.append(lease)
        if collected is None:
            sent.zero_()
        else:
            for piece in group.layout.pieces:
                if piece.trainable and piece.index not in collected.pieces:
                    collected.values[piece.start : piece.end].zero_()
            sent = sent.copy_(collected.values) if copies else collected.values
            if self._replicated:  # what is there afterwards is the mean: further gradients are added to it
                trained = {piece.index for piece in group.layout.pieces if piece.trainable}
                self._buffers[group] = _Collected(collected.values, None, trained)
            leases += [collected.lease] if collected.lease is not None else []
        pending = self._collectives.exchange(received, sent, f"reduce {group.name!r}")
        parts = list(received.view(self._collectives.world.size, -1).unbind())
        self._under_way.append(_UnderWay(group, pending, parts, leases))

    def _room_to_exchange(self, nbytes: int) -> Lease | Entry:
        while (lease := self._exchanging.try_lease(nbytes, "gradients")) is None:
            if not self._under_way:  # a defect of the plan, which this says
                return self._exchanging.lease(nbytes, "gradients", alone=True)
            self._finish_oldest()
        return lease

    def _settle(self) -> None:
        """Wait for all reductions."""
        while self._under_way:
            self._finish_oldest()
        while self._gathering:
            self._collectives.finish(self._gathering.popleft(), "reduce")

    def _finish_oldest(self) -> None:
        """Wait for a reduction, sum up what was received, and hand it on."""
        done = self._under_way.popleft()
        group, world = done.group, self._collectives.world
        self._collectives.finish(done.pending, "reduce")
        if self._replicated:
            self._store.forget_squares(group)
            whole, share = self._local[group], shard_ranges(group.layout, world.size, world.rank)[0]
            mine = whole[share.start : share.stop]
            on_device = not self._tiers.device_is_host
            add_up(done.parts, 1.0 / world.size, mine, overwrite=True, on_device=on_device)
            what = f"gather the gradients of {group.name!r}"
            self._collectives.announce(what, foreseen=True)
            self._gathering.append(self._collectives.gather(whole, mine, what))
        else:
            self._store.add_reduced(group, done.parts, 1.0 / world.size)
            if self._tiers.device_is_host:  # else it is leaving the device, and nobody waits for that here
                self._store.close(group)
        for lease in done.leases:
            lease.release()

    def _finish_opening(self) -> None:
        """Know the order of this backward's reductions: see Note [The order of reductions]."""
        table, self._opening = self._opening, None
        if table is None:
            return
        chains = self._collectives.finish_table(table).tolist()
        order = [group.index for group in self._order[: self._passing]]
        if chains != self._chains:  # else what rank 0 has learned of this order is better
            self._chains = chains
            used = [tuple(index for index in chain if index >= 0) for chain in chains]
            if not all(turns.follows(chain, order) for chain in used):
                order = turns.merged(order, used)
                self._order[: self._passing] = [self._groups[index] for index in order]
            self._contradicted = not all(turns.follows(chain, order) for chain in used)

    def _reduce_late(self, *, ended: bool) -> list[int] | None:
        """Reduce what came late on any rank; all ranks have to be here, with backward ``ended`` or without room.

        Once it has ended on all of them: the parameters that got a gradient on any of them. None before.
        """
        if self._replicated:
            self._settle()  # what ends a reduction begins a gather, for which another rank may be waiting
        received = np.zeros(self._pieces, dtype=bool)
        received[list(self._arrived)] = True
        late = np.zeros(len(self._groups), dtype=bool)
        late[[group.index for group in self._late]] = True
        order = [group.index for group in self._order_of_readiness()]
        head = [self._backwards + 1, self._store.last_micro_batch, ended, *order]
        row = np.concatenate(
            [np.array(head, np.int32).view(np.uint8), np.packbits(late), np.packbits(received)]
        )
        rows = self._collectives.table(torch.from_numpy(row), "end a backward").numpy()
        heads = np.ascontiguousarray(rows[:, : 4 * len(head)]).view(np.int32)
        self._check_in_step(heads[:, :2].tolist())
        bits = np.bitwise_or.reduce(rows[:, 4 * len(head) :])
        border = -(-len(late) // 8)
        late_anywhere = np.flatnonzero(np.unpackbits(bits[:border], count=len(late))).tolist()
        if late_anywhere:
            self._settle()  # what was begun in its turn may still be sent from the same buffer
            for index in late_anywhere:
                self._begin(self._groups[index])
            self._late.clear()
        if not heads[:, 2].all():
            return None
        self._backwards += 1
        self._order = [self._groups[index] for index in heads[0, 3:]]
        self._arrived.clear()
        return np.flatnonzero(np.unpackbits(bits[border:], count=self._pieces)).tolist()

    def _order_of_readiness(self) -> list[ParamGroup]:
        """All groups, in the order in which they were ready in this backward; those that were not keep their places."""
        found = sorted(self._ready, key=lambda group: group in self._stays_open)
        for group, following in zip(reversed(self._order), [None, *reversed(self._order)], strict=False):
            if group not in self._ready:  # next time it may get gradients again
                found.insert(found.index(following) if following else len(found), group)
        found.sort(key=lambda group: group in self._stays_open)
        return found

    def _check_in_step(self, heads: list[list[int]]) -> None:
        """RankOrderError if a rank is at the end of another backward than rank 0."""
        for rank, head in enumerate(heads):
            if head != heads[0]:
                ends = [
                    f"backward {number}, {'the' if last else 'not the'} last of its step"
                    for number, last in heads
                ]
                raise RankOrderError(
                    f"rank 0 has ended {ends[0]}, rank {rank} has ended {ends[rank]}: call backward and step equally"
                    " often on all ranks, and no_sync() on all or none"
                )
