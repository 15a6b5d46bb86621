"""The accumulated gradients of one rank: received from autograd, added up at their home, and squared for the norm.

A group whose gradients live on NVMe accumulates in a window of host memory (see gradient_windows.py). The window is
written out when the schedule closes the group. A gradient that arrives later (of a tied parameter) opens it again.

From a device with memory of its own, gradients are copied on the offload stream behind compute, several at a time. The
CPU adds up those that have arrived. It waits for a copy only if no room is left for another one, or if the step needs
it. The first gradient of an accumulation is copied straight to its home, if the home is in host memory and has the
same dtype. All others pass through the offload window and are added.

With several ranks this store holds reduced gradients: reduction.py receives them from autograd first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from optim_cpu import kernels
from optim_cpu.dtypes import DTYPES
from optim_cpu.kernels import ExactSum
from tiering._interrupts import uninterrupted
from tiering.errors import ConfigError, EngineStateError
from tiering.placement.tenants import GRADIENTS
from tiering.storage.arena import Lease
from tiering.telemetry import COPIES_OF
from zero3.device import kernels as device_kernels
from zero3.device.home import Home
from zero3.device.storages import as_tensor
from zero3.device.streams import Event
from zero3.device.tiers import Tiers
from zero3.params import resharded
from zero3.params.layout import Piece, segments
from zero3.params.param_group import ParamGroup
from zero3.passes.gradient_squares import GradientSquares
from zero3.passes.gradient_sums import sum_parts
from zero3.passes.gradient_windows import GradientWindows

COPIED_AT_ONCE = 1 << 20
"""Elements that are copied at once from a gradient that is not contiguous, on the CPU."""


def pop_gradient(piece: Piece, param: nn.Parameter) -> Tensor | None:
    """Remove and return ``param.grad``, in any strides; None if there is none. ConfigError if it is sparse."""
    grad = resharded.take_gradient(param)
    if grad is None:
        return None
    if grad.layout is not torch.strided:
        raise ConfigError(
            f"the gradient of {piece.name!r} is {grad.layout}; only dense gradients can be tiered:"
            " build the embedding with sparse=False"
        )
    return grad


@dataclass
class _Transfer:
    """A copy of a gradient from the device to pinned memory: to a lease, or without a lease to its home."""

    event: Event  # on the offload stream, behind the copy
    # The copy reads it on another stream than the one it was allocated on. This reference keeps torch's pool from using
    # the memory again before the event. record_stream would hold it longer, until the pool runs out of memory.
    source: Tensor
    lease: Lease | None
    group: ParamGroup
    piece: Piece  # or a part of one
    dtype: torch.dtype
    overwrite: bool
    whole: bool  # ``piece`` is a whole piece of the group


class Reducer(Protocol):
    """Reduces gradients over the ranks before they reach a ``GradientStore``."""

    def forget(self) -> None:
        """Drop the gradients that have not reached the store."""


class GradientStore:
    """The accumulated gradients of ``groups``. ``homes`` follow their order; ``dtype`` is the accumulation dtype.

    ``measured``: the elements of each group whose squares this rank adds to the norm; by default all that it holds.

    Calls come from one thread at a time: autograd's, while it runs a backward, or the one that trains.
    """

    def __init__(
        self,
        groups: list[ParamGroup],
        homes: list[Home],
        dtype: torch.dtype,
        tiers: Tiers,
        measured: Mapping[ParamGroup, range] | None = None,
    ) -> None:
        self.homes = homes
        self.windows = GradientWindows(homes, tiers)
        self.dtype = dtype
        self.last_micro_batch = True  # the engine sets it: this backward completes the accumulation
        self._tiers = tiers
        dtypes = {group: self.dtype_of(group) for group in groups}
        parts = {group: _pieces_within(group, (measured or {}).get(group)) for group in groups}
        self._squares = GradientSquares(dtypes, homes, self.windows, parts)
        self._local_pieces: set[int] = set()  # pieces with a gradient at home or in a transfer, by index
        self._received_pieces = self._local_pieces  # pieces that got a gradient on any rank
        self._transfers: deque[_Transfer] = deque()  # oldest first, as the offload stream runs them
        self._in_flight_bytes = 0  # of the sources of these transfers
        self._closed_groups: set[ParamGroup] = set()  # closed, but with gradients in transfers
        self._completed_groups: set[ParamGroup] = set()  # updated, or about to be, while backward runs
        self._final_groups: dict[ParamGroup, None] = {}  # final in the last backward, and not taken
        # Of the groups whose gradients a step ahead has used: the pieces, and whether each one was taken to have a
        # gradient; and whether one of these gradients has changed since.
        self._used_ahead: dict[int, bool] = {}
        self._spoiled = False
        self._usually_received: set[int] | None = (
            None  # pieces, in the last update, if ranks have to agree on them
        )
        self._reducer: Reducer | None = None

    def register_reducer(self, reducer: Reducer) -> None:
        """``reducer`` adds gradients to this store. ``reset`` also drops those that it has not added yet."""
        self._reducer = reducer

    def begin(self, used: Iterable[ParamGroup]) -> None:
        """A backward begins. The store has nothing to prepare."""

    # Of one rank: see GradientReducer for the other case.
    unreduced = received_elsewhere = False
    takes_parts = True

    def dtype_of(self, group: ParamGroup) -> torch.dtype:
        """The accumulation dtype of ``group``."""
        return torch.float32 if group.in_fp32 else self.dtype

    def received(self, piece: Piece) -> bool:
        """Whether the parameter got a gradient since the last ``reset``."""
        return piece.index in self._received_pieces

    def accumulate(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None:
        """Add ``param.grad`` to the gradient of ``piece`` and clear it on ``param``.

        Raises EngineStateError if the group was already updated in this backward.
        """
        # Off the parameter first, also if it is refused below: autograd would add the next gradient to it.
        grad = pop_gradient(piece, param)
        if grad is None:
            return
        if group in self._completed_groups:
            raise EngineStateError(
                f"{piece.name!r} got a gradient after tiering.step 'in_backward' had updated it, because backward ran"
                " in an order that the engine did not expect; set step to 'deferred' or 'after'"
            )
        home = self.homes[group.index]
        overwrite = piece.index not in self._local_pieces
        self._local_pieces.add(piece.index)
        self._forget_square(piece)
        if self._tiers.device_is_host:
            self._add_on_host(group, piece, grad, overwrite=overwrite, square=self.last_micro_batch)
        elif home.on_device:
            assert home.tensor is not None
            target = home.tensor.view(self.dtype_of(group))[piece.start : piece.end]
            # Queued on the calling thread's stream, behind the kernels that made the gradient: no event is needed.
            device_kernels.accumulate(target, grad.contiguous().view(-1), overwrite=overwrite)
        else:
            self._send_to_host(group, piece, grad.contiguous(), overwrite=overwrite)

    def replaced(self, group: ParamGroup, piece: Piece) -> None:
        """Code outside of backward has written the gradient of ``piece`` at its home."""
        self.windows.note_written(group)
        self._local_pieces.add(piece.index)
        self._received_pieces.add(piece.index)
        self._forget_square(piece)

    def holds(self, piece: Piece) -> bool:
        """Whether the store has a gradient of ``piece``."""
        return self.received(piece)

    def drop(self, group: ParamGroup, piece: Piece) -> None:
        """Forget the gradient of ``piece``: the next gradient overwrites it."""
        self.wait_for_transfers()  # a transfer of it would be added afterwards
        self._local_pieces.discard(piece.index)
        self._received_pieces.discard(piece.index)
        self._forget_square(piece)

    def add_reduced(self, group: ParamGroup, parts: list[Tensor], factor: float, first: int = 0) -> None:
        """Add ``factor`` times the sum of ``parts`` to the group's gradients.

        ``parts``: elements of this rank's shard of the gradient, from ``first`` on, as each rank computed them, flat,
        in the order of ranks. The parts of a shard come in their order.
        """
        home = self.homes[group.index]
        elements = range(first, first + parts[0].numel())
        pieces = [each.piece for each in segments(_trained(group), elements.start, elements.stop)]
        fresh = [piece for piece in pieces if piece.index not in self._local_pieces]
        complete = [piece for piece in pieces if piece.end <= elements.stop]
        on_device = not self._tiers.device_is_host
        for piece in pieces:
            self._forget_square(piece)
        # The elements of a piece that are still to come have no gradient yet.
        self._local_pieces.update(piece.index for piece in complete)
        if on_device and not home.on_device:
            for piece in pieces:
                self._send_reduced(group, piece, elements, parts, factor, overwrite=piece in fresh)
            return
        target = self.windows.open(group).view(self.dtype_of(group))
        overwrite = len(fresh) == len(pieces)
        # Some pieces already have a gradient, so the sum is added everywhere: the fresh ones begin with zeros.
        for piece in [] if overwrite else fresh:
            target[max(piece.start, elements.start) : min(piece.end, elements.stop)].zero_()
        target = target[elements.start : elements.stop]
        sum_parts(parts, factor, target, overwrite=overwrite, on_device=on_device)
        # On a device a square is read with all others in _all_squares: to read it here would wait for the queue.
        if self.last_micro_batch and not on_device:
            for piece in complete:
                self._squares.of(group, piece)

    def _send_reduced(
        self,
        group: ParamGroup,
        piece: Piece,
        elements: range,
        parts: list[Tensor],
        factor: float,
        *,
        overwrite: bool,
    ) -> None:
        """Sum up on the device, a bounded part at a time, and start the copies to pinned memory.

        ``parts`` are ``elements`` of the shard, and some of the ``piece``. A sum that the CPU adds to an earlier one is
        copied in fp32. The first one is rounded here, which halves the bytes to copy.
        """
        last = min(piece.end, elements.stop)
        for start in range(max(piece.start, elements.start), last, device_kernels.ELEMENTS_AT_ONCE):
            end = min(last, start + device_kernels.ELEMENTS_AT_ONCE)
            slices = [part[start - elements.start : end - elements.start] for part in parts]
            total = torch.empty_like(slices[0], dtype=self.dtype_of(group) if overwrite else torch.float32)
            sum_parts(slices, factor, total, overwrite=True, on_device=True)
            part = piece if end - start == piece.numel else replace(piece, start=start, numel=end - start)
            self._send_to_host(group, part, total, overwrite=overwrite, whole=part is piece)

    def forget_squares(self, group: ParamGroup) -> None:
        """The group's gradients have changed in place, so their squares are out of date."""
        for piece in group.layout.pieces:
            self._forget_square(piece)

    def take_final(self) -> list[ParamGroup]:
        """The groups whose gradients became final in the last backward since the last call, and are at home."""
        self._receive_finished()
        # Not while its window is open: what a step reads from NVMe must not depend on when it does.
        open_groups = self.windows.open_groups
        taken = [
            group
            for group in self._final_groups
            if group not in open_groups and not self._is_in_flight(group)
        ]
        for group in taken:
            del self._final_groups[group]
        return taken

    def use_ahead(self, group: ParamGroup) -> list[Piece]:
        """The pieces of ``group`` that have a gradient now, for a step that can be taken back.

        With several ranks it is a guess, as long as they have not agreed on what any of them has received: the pieces
        of the last update, or all.
        """
        separate = self._received_pieces is not self._local_pieces
        known = self._usually_received if separate else self._local_pieces
        trained = [piece for piece in group.layout.pieces if piece.trainable]
        used = [piece for piece in trained if known is None or piece.index in known]
        self._used_ahead |= {piece.index: piece in used for piece in trained}
        return used

    def used_rightly(self) -> bool:
        """Whether the gradients that were used ahead are those of the backward that has ended."""
        received = self._received_pieces
        return not self._spoiled and all((at in received) is used for at, used in self._used_ahead.items())

    def forget_use(self) -> None:
        """The step ahead was adopted or taken back."""
        self._final_groups.clear()
        self._used_ahead.clear()
        self._spoiled = False

    def _forget_square(self, piece: Piece) -> None:
        self._spoiled = self._spoiled or piece.index in self._used_ahead
        self._squares.forget(piece)

    def mark_received(self, received: Iterable[int]) -> None:
        """``received``: indices of the pieces for which any rank had a gradient, since the last ``reset``.

        From the first call on they are separate from the pieces that this rank holds.
        """
        if self._received_pieces is self._local_pieces:
            self._received_pieces = set()
        self._received_pieces.update(received)
        if self.last_micro_batch:
            self._usually_received = self._received_pieces.copy()

    def final(self, group: ParamGroup) -> None:
        """No further gradient of ``group`` is expected in this backward."""
        if self.last_micro_batch:
            self._final_groups[group] = None

    def close(self, group: ParamGroup, *, last: bool = True) -> None:
        """Backward has left the group: write its window out, as soon as no transfer to the group is in flight."""
        self._receive_finished()
        if self._is_in_flight(group):
            # Its gradients in flight are still to be added to the window.
            self._closed_groups.add(group)
        else:
            self.windows.write_out(group)

    def has_arrived(self, group: ParamGroup) -> bool:
        """Whether ``complete`` would not wait for transfers of ``group``. Does not wait itself."""
        self._receive_finished()
        return not self._is_in_flight(group)

    def wait_for_transfers(self) -> None:
        """Wait for all transfers, and add up their gradients at home."""
        if not self._transfers:
            return
        with self._tiers.stalls.waiting_for(COPIES_OF + GRADIENTS):
            while self._transfers:
                self._receive_next()

    def complete(self, group: ParamGroup) -> None:
        """The group is updated in this backward: ``accumulate`` refuses later gradients of it.

        Its window stays open until the stepper drops it. The squares that the norm needs are computed now, while the
        gradients are in host memory; those in device memory are read with all others in ``sum_of_squares``.
        """
        if self._is_in_flight(group):
            with self._tiers.stalls.waiting_for(COPIES_OF + GRADIENTS):
                while self._is_in_flight(group):
                    self._receive_next()
        self._completed_groups.add(group)
        for piece in group.layout.pieces:
            if piece.index in self._received_pieces and not self._squares.are_on_device(group, piece):
                self._squares.of(group, piece)

    def close_all(self) -> None:
        """The pass has ended. Transfers that are still in flight are received later."""
        for group in {
            *self.windows.open_groups,
            *(transfer.group for transfer in self._transfers),
        } - self._completed_groups:
            self.close(group)

    @uninterrupted
    def reset(self) -> None:
        """Drop all gradients: they were used, or are not needed."""
        if self._reducer is not None:
            self._reducer.forget()
        while self._transfers:
            transfer = self._transfers.popleft()
            # The copy may still write to the lease, and read the source that is freed here.
            transfer.event.wait()
            if transfer.lease is not None:
                transfer.lease.release()
        self._in_flight_bytes = 0
        self._closed_groups.clear()
        self.windows.reset()
        self._local_pieces.clear()
        self._received_pieces.clear()
        self._squares.clear()
        self._completed_groups.clear()
        self.forget_use()

    def sum_of_squares(self) -> ExactSum:
        """The sum over all gradients here. It is finite exactly when all of their elements are.

        Raises SwapError if a gradient was not written: a step that began with it could not be completed.
        """
        total = ExactSum.total(square for _, square in self._all_squares())
        # Last: windows of gradients that arrived only now are written, too.
        self.windows.check_written()
        return total

    def first_not_finite(self) -> Piece | None:
        """The first parameter, in model order, whose gradient here is not finite."""
        not_finite = [piece for piece, square in self._all_squares() if not square.is_finite]
        return min(not_finite, key=lambda piece: piece.index, default=None)

    def _all_squares(self) -> list[tuple[Piece, ExactSum]]:
        self.wait_for_transfers()
        return self._squares.of_all(self._received_pieces)

    def _add_on_host(
        self, group: ParamGroup, piece: Piece, grad: Tensor, *, overwrite: bool, square: bool
    ) -> None:
        target_dtype = self.dtype_of(group)
        address = self.windows.open(group).data_ptr() + piece.start * target_dtype.itemsize
        target, dtype = address, DTYPES[target_dtype]
        for part in _flat_parts(grad):
            kernels.accumulate(
                target, dtype, part.data_ptr(), DTYPES[part.dtype], part.numel(), overwrite=overwrite
            )
            target += part.numel() * target_dtype.itemsize
        if square:
            self._squares.of(group, piece)

    def _send_to_host(
        self, group: ParamGroup, piece: Piece, grad: Tensor, *, overwrite: bool, whole: bool = True
    ) -> None:
        """Start the copy to pinned memory on the offload stream; ``whole`` unless ``piece`` is a part of a piece."""
        copies, streams, home = self._tiers.copies, self._tiers.streams, self.homes[group.index].tensor
        assert copies is not None and streams is not None
        raw, lease, dtype = grad.view(-1).view(torch.uint8), None, self.dtype_of(group)
        # The CPU runs ahead of the device: without a bound, the sources of all gradients of a backward would be in
        # device memory at once.
        while self._transfers and self._in_flight_bytes + raw.numel() > self._tiers.plan.offload_window_bytes:
            self._wait_for_next()
        if home is not None and overwrite and grad.dtype is dtype:
            start = piece.start * dtype.itemsize
            target = home[start : start + raw.numel()]
        else:
            lease = self._room_to_arrive(raw.numel())
            target = as_tensor(lease)[: raw.numel()]
        exact = grad.dtype is dtype or dtype is torch.float32  # the home holds the same values
        # Now, on compute's stream: the source is freed when the transfer is received.
        if self.last_micro_batch and overwrite and whole and exact:
            self._squares.begin(piece, grad.view(-1))
        # The copy waits for the kernels that made the gradient, not for later ones.
        event = copies.to_host(target, raw, after=[streams.compute.record()], kind=GRADIENTS)
        self._in_flight_bytes += raw.numel()
        self._transfers.append(_Transfer(event, raw, lease, group, piece, grad.dtype, overwrite, whole))
        self._receive_finished()

    def _room_to_arrive(self, nbytes: int) -> Lease:
        while (lease := self._tiers.offload_window.try_lease(nbytes, GRADIENTS)) is None:
            self._wait_for_next()
        return lease

    def _wait_for_next(self) -> None:
        with self._tiers.stalls.waiting_for(COPIES_OF + GRADIENTS):
            self._receive_next()

    def _is_in_flight(self, group: ParamGroup) -> bool:
        return any(transfer.group is group for transfer in self._transfers)

    def _receive_finished(self) -> None:
        """Receive the transfers whose copies have ended. Does not wait."""
        while self._transfers and self._transfers[0].event.done():
            self._receive_next()

    def _receive_next(self) -> None:
        """Wait for the oldest transfer, and add its values unless the copy wrote them to their home."""
        transfer = self._transfers.popleft()
        # The CPU reads the target below, and the source goes back to torch's pool on return.
        transfer.event.wait()
        self._in_flight_bytes -= transfer.source.numel()
        group, piece = transfer.group, transfer.piece
        self._squares.forget_sum(piece)
        square = self.last_micro_batch and transfer.whole and not self._squares.have_begun(piece)
        if transfer.lease is not None:
            values = as_tensor(transfer.lease)[: piece.numel * transfer.dtype.itemsize].view(transfer.dtype)
            self._add_on_host(group, piece, values, overwrite=transfer.overwrite, square=square)
            transfer.lease.release()
        elif square:
            self._squares.of(group, piece)
        # Backward has left the group, and this was its last transfer.
        if group in self._closed_groups and not self._is_in_flight(group):
            self._closed_groups.remove(group)
            self.windows.write_out(group)


def _trained(group: ParamGroup) -> list[Piece]:
    """The parts of the group's trained parameters in its shard, in their order."""
    return [piece for piece in group.shard.pieces if piece.trainable]


def _pieces_within(group: ParamGroup, elements: range | None) -> list[Piece]:
    """The parts of the group's trained parameters that lie in ``elements`` of its shard, or all of them."""
    trained = _trained(group)
    if elements is None:
        return trained
    parts = segments(trained, elements.start, elements.stop)
    return [replace(part.piece, start=part.start, numel=part.numel, first=part.first) for part in parts]


def _flat_parts(grad: Tensor) -> Iterator[Tensor]:
    """The elements of ``grad`` in order, flat: one view if it is contiguous, else copies of some rows at a time."""
    if grad.is_contiguous():
        yield grad.view(-1)
        return
    rows = max(1, COPIED_AT_ONCE * len(grad) // grad.numel())
    for start in range(0, len(grad), rows):
        yield grad[start : start + rows].reshape(-1)
