"""Gradients of several ranks: collected on each, reduced over all, in the same order everywhere.

A group is reduced when its gradients are final, while backward goes on. That is in one order that all ranks know, rank
0's of the backward before, though they need not get the same gradients. Stages 0 and 1 keep whole gradients, which
accumulate until the last backward of a step; that one reduces them. Stages 2 and 3 keep reduced shards, and reduce in
every backward. What comes out goes to the GradientStore.

Note [Groups whose turn passes]
    Where nothing keeps whole gradients, a group that waits for its turn would need a buffer for as long. So one that
    is ready does not wait: those before it go as they are, with zeros for what has not arrived. They are, as a rule,
    without gradients on this rank. What arrives for them after all is reduced once more when backward has ended, which
    rounds twice. When that happens follows from the model alone, not from the room that there is: placements must not
    change the result. Only if one group's gradients mix with many others' can room be lacking, and then it has to.

Note [Waiting for a reduction in stage 3]
    A rank that waits in backward for a reduction which another one has not begun, because that one waits for a gather
    which this one has not begun, waits for ever. So in stage 3 every rank begins the reduction of a group before the
    next gather after backward has left that group, with gradients or without: the order of gathers is the same on all
    ranks, hence so is what has been left when. A wait for what was begun earlier then ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from optim_cpu import kernels
from tiering.arena import Lease
from tiering.errors import EngineStateError, RankOrderError
from zero3 import device_kernels
from zero3.collectives import Collectives
from zero3.grads import KERNEL_DTYPES, GradientStore, add_up, taken_gradient
from zero3.param_group import ParamGroup
from zero3.partition import Piece, shard_ranges
from zero3.process_groups import Pending
from zero3.tiers import Entry, Tiers, as_tensor


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
        store.on_reset = self._forget
        store.agreed(())  # what has arrived here counts once all ranks know of it
        self._collectives = collectives
        self._tiers = tiers
        self._dtype = dtype
        self._replicated = stage == 0
        self._gathers_in_backward = stage == 3
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
        self._turn = 0  # of the order: what is before it was reduced in this backward
        self._ready: dict[ParamGroup, None] = {}  # in the order in which it happened
        self._under_way: deque[_UnderWay] = deque()
        self._gathering: deque[Pending] = deque()
        self._backwards = 0
        self._begun = False  # the first one
        self.received_elsewhere = False
        self._cut_off = False  # in the middle of a backward, for whose reductions others may be waiting still
        numbers = 4 * (2 + len(self._order)) + (len(groups) + 7) // 8
        collectives.row_nbytes = max(collectives.row_nbytes, numbers + (self._pieces + 7) // 8)
        self._arrived: set[int] = set()  # pieces that got a gradient here, since the last agreement

    def begin(self, used: Iterable[ParamGroup]) -> None:
        """A backward begins, of forwards that have used these groups, in this order."""
        if self._cut_off:
            raise EngineStateError(
                "an earlier backward was ended by an exception on this rank, and the other ranks' was not: close the"
                " engine, and initialize the model again from a checkpoint"
            )
        if self._begun or not self._reduces:
            return
        self._begun = True
        order = dict.fromkeys([*reversed(list(used)), *self._order])
        first = sorted((g for g in order if g in self._trained), key=lambda g: g in self._stays_open)
        row = torch.tensor([group.index for group in first], dtype=torch.int32, device="cpu")
        rows = self._collectives.table(row, "begin the first backward")
        self._order = [self._groups[index] for index in rows[0].tolist()]

    def accumulate(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None:
        """Take ``param.grad`` and add it to what is there."""
        grad = taken_gradient(piece, param)
        if grad is None:
            return
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
        while self._turn < len(self._order):
            self._reduce_next()
        self._settle()
        received, late = self._agree()
        for group in (group for group in self._groups if group.index in late):
            self._begin(group)
        self._settle()
        self._store.close_all()
        self._store.agreed(received)
        self.received_elsewhere = bool(received)
        self._turn = 0
        self._ready.clear()
        self._late.clear()

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

    def _forget(self) -> None:
        self._cut_off = self._cut_off or bool(self._turn or self._under_way)
        for collected in self._buffers.values():
            if collected.lease is not None:
                collected.lease.release()
        self._buffers.clear()
        self._arrived.clear()

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
                numel = group.layout.trainable_numel
                lease = self._room_to_collect(numel * self._dtype.itemsize)
                values = self._tensor(lease, numel)
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
        """Room for a group's gradients: when there is none, groups in their turn have to go as they are.

        In stage 3 they cannot: see Note [Waiting for a reduction in stage 3].
        """
        while (lease := self._collecting.try_lease(nbytes, "gradients")) is None:
            if self._under_way:
                self._finish_oldest()
            elif self._turn < len(self._order) and not self._gathers_in_backward:
                self._reduce_next()
            else:
                held = [group.name for group in self._buffers]
                raise EngineStateError(
                    f"no room to collect the gradients of another group beside those of {held}, whose turn has passed"
                    " or not come. Run forwards that no backward follows under torch.no_grad(); raise device_budget;"
                    " or use stage 1, which keeps whole gradients"
                )
        return lease

    def _make_open_buffers(self) -> dict[ParamGroup, Tensor]:
        """What collects gradients through a whole backward does so in buffers of its own."""
        made = {}
        for group in self._stays_open:
            numel = group.layout.trainable_numel
            lease = self._tiers.reduction["opened"].lease(
                numel * self._dtype.itemsize, "gradients", alone=True
            )
            made[group] = self._tensor(lease, numel)
        return made

    def _tensor(self, lease: Lease | Entry, numel: int) -> Tensor:
        """The leased bytes: of an arena, or of memory that torch allocates."""
        if isinstance(lease, Lease):
            return as_tensor(lease).view(self._dtype)[:numel]
        return torch.empty(numel, dtype=self._dtype, device=self._tiers.device)

    def _reduce_next(self) -> None:
        """Begin to reduce the group whose turn it is, as it is now."""
        group = self._order[self._turn]
        self._turn += 1
        self._begin(group)

    def _begin(self, group: ParamGroup) -> None:
        """Begin to send the group's gradients, and zeros for what has none here."""
        numel, leases = group.layout.trainable_numel, list[Lease | Entry]()
        collected = self._buffers.pop(group, None)
        home = self._local.get(group, self._open_buffers.get(group))
        if collected is None and home is not None:
            collected = _Collected(home, None, set())
        copies = collected is None or collected.values.dtype != self._dtype
        # In one piece: two leases could leave no room in one piece for the second, whatever else comes free.
        lease = self._room_to_exchange((1 + copies) * numel * self._dtype.itemsize)
        room = self._tensor(lease, (1 + copies) * numel)
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

    def _agree(self) -> tuple[list[int], set[int]]:
        """Which parameters got a gradient on any rank, and which groups got one late; all ranks have to be here."""
        self._backwards += 1
        received = np.zeros(self._pieces, dtype=bool)
        received[list(self._arrived)] = True
        late = np.zeros(len(self._groups), dtype=bool)
        late[[group.index for group in self._late]] = True
        first = sorted(self._ready, key=lambda group: group in self._stays_open)
        for group, following in zip(reversed(self._order), [None, *reversed(self._order)], strict=False):
            if group not in self._ready:  # it keeps its place: next time it may get gradients again
                first.insert(first.index(following) if following else len(first), group)
        first.sort(key=lambda group: group in self._stays_open)
        head = [self._backwards, self._store.last_micro_batch, *(group.index for group in first)]
        row = np.concatenate(
            [np.array(head, np.int32).view(np.uint8), np.packbits(late), np.packbits(received)]
        )
        rows = self._collectives.table(torch.from_numpy(row), "end a backward").numpy()
        heads = np.ascontiguousarray(rows[:, : 4 * len(head)]).view(np.int32)
        self._check_in_step(heads[:, :2].tolist())
        self._order = [self._groups[index] for index in heads[0, 2:]]
        bits = np.bitwise_or.reduce(rows[:, 4 * len(head) :])
        border = -(-len(late) // 8)
        self._arrived.clear()
        return (
            np.flatnonzero(np.unpackbits(bits[border:], count=self._pieces)).tolist(),
            set(np.flatnonzero(np.unpackbits(bits[:border], count=len(late))).tolist()),
        )

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
