"""Gradients: taken from autograd as they arrive, accumulated where the plan keeps them, squared for the norm.

A group whose gradients live on NVMe accumulates in a window of host memory: opened by the first gradient of a pass
(and filled with what earlier micro-batches left), written out when the schedule says that the group is done. Should a
gradient arrive later still (a tied parameter), the window is simply opened again.

From a device with memory of its own, gradients leave behind compute, several at a time, and the CPU takes them up as
they arrive: it waits for one only when there is no room for another, or when the step needs them. The first of an
accumulation goes straight to its home, if that is in host memory and of its dtype; others pass through a window and
are added.

The norm is exact and the same for every placement: squares are summed in float64 over fixed blocks anchored at the
start of each parameter (of its part in a shard), then over parameters in model order (see
optim_cpu.kernels.sum_of_squares).

With several ranks this is the store of what they have reduced: see reduction.py, which takes the gradients first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor, nn

from optim_cpu import kernels
from optim_cpu.kernels import DType
from tiering.errors import ConfigError, EngineStateError
from tiering.storage.arena import Lease
from tiering.telemetry import COPIES_OF
from zero3.device import kernels as device_kernels
from zero3.device.streams import Event
from zero3.device.tiers import Home, Tiers, as_tensor
from zero3.params import resharded
from zero3.params.layout import Piece, segments
from zero3.params.param_group import ParamGroup

COPIED_AT_ONCE = 1 << 20
"""Elements of a gradient in other strides that are copied at once, where the CPU takes it up."""
KERNEL_DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}


def taken_gradient(piece: Piece, param: nn.Parameter) -> Tensor | None:
    """``param.grad``, in any strides, which it has no more. ConfigError if it is sparse."""
    grad = resharded.take_gradient(param)
    if grad is None:
        return None
    if grad.layout is not torch.strided:
        raise ConfigError(
            f"the gradient of {piece.name!r} is {grad.layout}; only dense gradients can be tiered:"
            " build the embedding with sparse=False"
        )
    return grad


def flat_parts(grad: Tensor) -> Iterator[Tensor]:
    """The elements of ``grad`` in order, flat: all of it as it is, or copies of some rows at a time."""
    if grad.is_contiguous():
        yield grad.view(-1)
        return
    rows = max(1, COPIED_AT_ONCE * len(grad) // grad.numel())
    for start in range(0, len(grad), rows):
        yield grad[start : start + rows].reshape(-1)


def add_up(parts: list[Tensor], factor: float, target: Tensor, *, overwrite: bool, on_device: bool) -> None:
    """Make the flat ``target``, or add to it, ``factor`` times the sum of ``parts``: in their order, in fp32.

    ``on_device``: all are in memory that only the device addresses, and its compute does it.
    """
    if on_device:
        device_kernels.reduce(target, parts, factor, overwrite=overwrite)
        return
    kernels.reduce(
        target.data_ptr(),
        KERNEL_DTYPES[target.dtype],
        [part.data_ptr() for part in parts],
        KERNEL_DTYPES[parts[0].dtype],
        target.numel(),
        factor,
        overwrite=overwrite,
    )


@dataclass
class _Arriving:
    """A gradient on its way from the device to pinned memory: to a lease, or without one to its home."""

    event: Event
    source: (
        Tensor  # stays until the CPU knows that it was copied: torch's pool would keep it until it runs dry
    )
    lease: Lease | None
    group: ParamGroup
    piece: Piece  # or a part of one
    dtype: torch.dtype
    overwrite: bool
    whole: bool


class Reducer(Protocol):
    """Reduces gradients over the ranks before they reach a ``GradientStore``."""

    def forget(self) -> None:
        """Drop the gradients that have not reached the store."""


class Stepper(Protocol):
    """Updates parameters with the gradients of a ``GradientStore``, group by group."""

    def make_room(self) -> bool:
        """Step a tile whose gradients may hold a window; False if no tile is due."""


class GradientStore:
    """The accumulated gradients of ``groups``. ``homes`` follow their order; ``dtype`` is the accumulation dtype.

    ``measured``: the elements of each group of which this rank tells the squares, if not of all that it has here.
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
        self.dtype = dtype
        self.last_micro_batch = True  # set by the engine: this backward completes the accumulation
        self._groups = groups
        self._tiers = tiers
        self._measured = {group: _pieces_within(group, (measured or {}).get(group)) for group in groups}
        self._windows: dict[ParamGroup, Lease] = {}
        self._written: set[ParamGroup] = set()  # whose extents hold gradients of this accumulation
        self._held: set[int] = set()  # pieces whose gradients are at home, or on their way there, by index
        self._received = self._held  # pieces that got a gradient; with several ranks, on any of them
        self._squares: dict[int, float] = {}
        self._block_squares: dict[
            int, Tensor
        ] = {}  # of gradients that have left the device: there, not added up yet
        self._arriving: deque[_Arriving] = deque()
        self._under_way = 0  # bytes of them
        self._left: set[ParamGroup] = set()  # by backward, with gradients that are still on their way
        self._complete: set[ParamGroup] = set()  # stepped, or about to be, while backward still runs
        self._reducer: Reducer | None = None
        self._stepper: Stepper | None = None

    def register_reducer(self, reducer: Reducer) -> None:
        """``reducer`` brings gradients here from now on; it forgets those under way when this store is reset."""
        self._reducer = reducer

    def register_stepper(self, stepper: Stepper) -> None:
        """``stepper`` uses the gradients from now on; it is asked to free windows when there is no room for another."""
        self._stepper = stepper

    def begin(self, used: Iterable[ParamGroup]) -> None:
        """A backward begins; nobody here has to know."""

    unreduced = received_elsewhere = False  # as a GradientReducer says it
    takes_parts = True

    def dtype_of(self, group: ParamGroup) -> torch.dtype:
        """The accumulation dtype of ``group``."""
        return torch.float32 if group.in_fp32 else self.dtype

    def received(self, piece: Piece) -> bool:
        """Whether the parameter got a gradient since the last ``reset``."""
        return piece.index in self._received

    def accumulate(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None:
        """Take ``param.grad`` and add it to what is there."""
        grad = taken_gradient(piece, param)
        if grad is None:
            return
        if group in self._complete:
            raise EngineStateError(
                f"{piece.name!r} got a gradient after step_in_backward had updated it, in an order of backward that the"
                " engine did not foresee; set tiering.step_in_backward to false"
            )
        home = self.homes[group.index]
        overwrite = piece.index not in self._held
        self._held.add(piece.index)
        self._forget_square(piece)
        if self._tiers.device_is_host:
            self._add_on_host(group, piece, grad, overwrite=overwrite, square=self.last_micro_batch)
        elif home.on_device:
            assert home.tensor is not None
            target = home.tensor.view(self.dtype_of(group))[piece.start : piece.end]
            device_kernels.accumulate(target, grad.contiguous().view(-1), overwrite=overwrite)
        else:
            self._send_to_host(group, piece, grad.contiguous(), overwrite=overwrite)

    def replaced(self, group: ParamGroup, piece: Piece) -> None:
        """The gradient of ``piece`` was written at home."""
        if self.homes[group.index].extent is not None:
            self._written.add(group)
        self._held.add(piece.index)
        self._received.add(piece.index)
        self._forget_square(piece)

    def holds(self, piece: Piece) -> bool:
        """Whether there is anything to ``drop``."""
        return self.received(piece)

    def drop(self, group: ParamGroup, piece: Piece) -> None:
        """Forget the gradient of ``piece``: the next one of it takes its place."""
        self.settle()  # it may be on its way here
        self._held.discard(piece.index)
        self._received.discard(piece.index)
        self._forget_square(piece)

    def add_reduced(self, group: ParamGroup, parts: list[Tensor], factor: float) -> None:
        """Add ``factor`` times the sum of ``parts``, one of each rank and of this one's shard, to the gradients."""
        home = self.homes[group.index]
        pieces = [piece for piece in group.shard.pieces if piece.trainable]
        fresh = [piece for piece in pieces if piece.index not in self._held]
        on_device = not self._tiers.device_is_host
        for piece in pieces:
            self._held.add(piece.index)
            self._forget_square(piece)
        if on_device and not home.on_device:
            for piece in pieces:
                self._send_reduced(group, piece, parts, factor, overwrite=piece in fresh)
            return
        flat = home.tensor if home.tensor is not None else self._window(group)
        target = flat.view(self.dtype_of(group))[: parts[0].numel()]
        overwrite = len(fresh) == len(pieces)
        for piece in [] if overwrite else fresh:
            target[piece.start : piece.end].zero_()
        add_up(parts, factor, target, overwrite=overwrite, on_device=on_device)
        if self.last_micro_batch and not on_device:  # which would wait for all that is queued there
            for piece in pieces:
                self._square(group, piece)

    def _send_reduced(
        self, group: ParamGroup, piece: Piece, parts: list[Tensor], factor: float, *, overwrite: bool
    ) -> None:
        """Sum up on the device, a bounded part at a time, and start the copies to pinned memory.

        What is added there goes in fp32; what is not is rounded here, which is half as much to send.
        """
        for start in range(piece.start, piece.end, device_kernels.ELEMENTS_AT_ONCE):
            end = min(piece.end, start + device_kernels.ELEMENTS_AT_ONCE)
            here = [part[start:end] for part in parts]
            total = torch.empty_like(here[0], dtype=self.dtype_of(group) if overwrite else torch.float32)
            add_up(here, factor, total, overwrite=True, on_device=True)
            part = piece if end - start == piece.numel else replace(piece, start=start, numel=end - start)
            self._send_to_host(group, part, total, overwrite=overwrite, whole=part is piece)

    def forget_squares(self, group: ParamGroup) -> None:
        """The group's gradients have changed where they are."""
        for piece in group.layout.pieces:
            self._forget_square(piece)

    def _forget_square(self, piece: Piece) -> None:
        self._squares.pop(piece.index, None)
        self._block_squares.pop(piece.index, None)

    def agreed(self, received: Iterable[int]) -> None:
        """All that ranks have reduced is here: the parameters that any of them had a gradient for."""
        if self._received is self._held:
            self._received = set()
        self._received.update(received)

    def final(self, group: ParamGroup) -> None:
        """No gradient of ``group`` can come any more in this backward; nobody here waits for that."""

    def close(self, group: ParamGroup, *, last: bool = True) -> None:
        """Backward has left the group, ``last`` or not for this time: write its window out, once all of it is there."""
        self._receive_arrived()
        if self._on_its_way(group):
            self._left.add(group)
        else:
            self._write_out(group)

    def arrived(self, group: ParamGroup) -> bool:
        """Whether ``complete`` would not have to wait for gradients of ``group`` on their way. Never waits."""
        self._receive_arrived()
        return not self._on_its_way(group)

    def settle(self) -> None:
        """Wait for all gradients that are on their way: they are at home then."""
        if not self._arriving:
            return
        with self._tiers.stalls.waiting_for(COPIES_OF + "gradients"):
            while self._arriving:
                self._receive_next()

    def address(self, group: ParamGroup) -> int:
        """Where the group's gradients are in host memory, 0 if they are on NVMe."""
        home, window = self.homes[group.index], self._windows.get(group)
        return window.address if window is not None else home.address

    def complete(self, group: ParamGroup) -> None:
        """The group is stepped in backward: its window stays open until ``drop_window``; what comes late is refused.

        Takes the squares that the norm needs, while the gradients are at hand; the device's are told with all others.
        """
        if self._on_its_way(group):
            with self._tiers.stalls.waiting_for(COPIES_OF + "gradients"):
                while self._on_its_way(group):
                    self._receive_next()
        self._complete.add(group)
        for piece in group.layout.pieces:
            if piece.index in self._received and not self._squared_on_device(group, piece):
                self._square(group, piece)

    def drop_window(self, group: ParamGroup) -> None:
        """The group's gradients were used."""
        window = self._windows.pop(group, None)
        if window is not None:
            window.release()

    def _write_out(self, group: ParamGroup) -> None:
        lease = self._windows.pop(group, None)
        if lease is None:
            return
        extent, swap = self.homes[group.index].extent, self._tiers.swap
        assert extent is not None and swap is not None
        try:
            ticket = swap.swap_out(extent, lease, nbytes=extent.nbytes)
        except BaseException:
            swap.settle(extent)
            lease.release()
            raise
        lease.retire(ticket)
        self._written.add(group)

    def close_all(self) -> None:
        """The pass has ended. What is on its way is taken up later."""
        for group in {*self._windows, *(arriving.group for arriving in self._arriving)} - self._complete:
            self.close(group)

    def reset(self) -> None:
        """Forget all gradients: they have been used, or are given up."""
        if self._reducer is not None:
            self._reducer.forget()
        while self._arriving:
            arriving = self._arriving.popleft()
            arriving.event.wait()
            if arriving.lease is not None:
                arriving.lease.release()
        self._under_way = 0
        self._left.clear()
        for lease in self._windows.values():
            lease.release()
        self._windows.clear()
        self._written.clear()
        self._held.clear()
        self._received.clear()
        self._squares.clear()
        self._block_squares.clear()
        self._complete.clear()

    def sum_of_squares(self) -> float:
        """The exact sum over all gradients here; not finite exactly when one of their elements is not."""
        total = 0.0
        for _, square in sorted(self._all_squares(), key=lambda found: found[0].index):
            total += square
        return total

    def first_not_finite(self) -> Piece | None:
        """The first parameter, in model order, whose gradient here is not finite."""
        bad = [piece for piece, square in self._all_squares() if not math.isfinite(square)]
        return min(bad, key=lambda piece: piece.index, default=None)

    def _all_squares(self) -> list[tuple[Piece, float]]:
        self.settle()
        wanted = [(group, piece) for group in self._groups for piece in self._measured[group]]
        wanted = [(group, piece) for group, piece in wanted if piece.index in self._received]
        if not self._tiers.device_is_host:
            self._square_on_device([pair for pair in wanted if self._squared_on_device(*pair)])
        found = []
        for group, pieces in groupby(wanted, key=itemgetter(0)):
            found += [(piece, self._square(group, piece)) for _, piece in pieces]
            window = self._windows.pop(group, None)
            if window is not None:  # opened to look: nothing changed, so nothing is written
                window.release()
        return found

    def _squared_on_device(self, group: ParamGroup, piece: Piece) -> bool:
        return self.homes[group.index].on_device or piece.index in self._block_squares

    def _square_on_device(self, wanted: Sequence[tuple[ParamGroup, Piece]]) -> None:
        """The sums of squares of gradients in device memory, or that were there: waited for once."""
        missing = [(group, piece) for group, piece in wanted if piece.index not in self._squares]
        there = [(group, piece) for group, piece in missing if piece.index not in self._block_squares]
        flats = []
        for group, piece in there:
            home = self.homes[group.index].tensor
            assert home is not None
            flats.append(home.view(self.dtype_of(group))[piece.start : piece.end])
        for (_, piece), squares in zip(there, device_kernels.block_squares(flats), strict=True):
            self._block_squares[piece.index] = squares
        indices = [piece.index for _, piece in missing]
        added = device_kernels.added_up([self._block_squares.pop(index) for index in indices])
        self._squares.update(zip(indices, added, strict=True))

    def _square(self, group: ParamGroup, piece: Piece) -> float:
        """The sum of squares, computed now if the last micro-batch brought this parameter no gradient."""
        if piece.index not in self._squares:
            if self._squared_on_device(group, piece):
                self._square_on_device([(group, piece)])
            else:
                # Through the gradient window: backward is over, while the staging slots are read ahead already.
                dtype = self.dtype_of(group)
                address = self._open(group) + piece.start * dtype.itemsize
                self._squares[piece.index] = kernels.sum_of_squares(
                    address, KERNEL_DTYPES[dtype], piece.numel
                )
        return self._squares[piece.index]

    def _add_on_host(
        self, group: ParamGroup, piece: Piece, grad: Tensor, *, overwrite: bool, square: bool
    ) -> None:
        kept = self.dtype_of(group)
        address, dtype = self._open(group) + piece.start * kept.itemsize, KERNEL_DTYPES[kept]
        target = address
        for part in flat_parts(grad):
            kernels.accumulate(
                target, dtype, part.data_ptr(), KERNEL_DTYPES[part.dtype], part.numel(), overwrite=overwrite
            )
            target += part.numel() * kept.itemsize
        if square:
            self._squares[piece.index] = kernels.sum_of_squares(address, dtype, piece.numel)

    def _open(self, group: ParamGroup) -> int:
        """The address of the group's gradients in host memory."""
        home = self.homes[group.index]
        return home.address if home.tensor is not None else self._window(group).data_ptr()

    def _window(self, group: ParamGroup) -> Tensor:
        """The group's gradients in the window, as bytes."""
        home, lease = self.homes[group.index], self._windows.get(group)
        if lease is None:
            assert home.extent is not None and self._tiers.swap is not None
            with self._tiers.stalls.waiting_for("gradients"):
                window = self._tiers.grad_window
                while (lease := window.try_lease(home.extent.nbytes, "gradients")) is None:
                    if self._stepper is not None and self._stepper.make_room():
                        continue
                    if not self._windows:
                        break
                    self._write_out(next(iter(self._windows)))  # more groups than the schedule foresaw
                lease = lease or window.lease(home.extent.nbytes, "gradients")
                if group in self._written:
                    self._tiers.fetch(home.extent, lease)
            self._windows[group] = lease
        return as_tensor(lease)

    def _send_to_host(
        self, group: ParamGroup, piece: Piece, grad: Tensor, *, overwrite: bool, whole: bool = True
    ) -> None:
        """Start the copy to pinned memory behind compute; ``whole`` unless ``piece`` is a part of one."""
        copies, streams, home = self._tiers.copies, self._tiers.streams, self.homes[group.index].tensor
        assert copies is not None and streams is not None
        raw, lease, dtype = grad.view(-1).view(torch.uint8), None, self.dtype_of(group)
        # The CPU runs ahead: without a bound the device would hold all gradients of a backward at once.
        while self._arriving and self._under_way + raw.numel() > self._tiers.plan.offload_window_bytes:
            self._wait_for_next()
        if home is not None and overwrite and grad.dtype is dtype:
            start = piece.start * dtype.itemsize
            target = home[start : start + raw.numel()]
        else:
            lease = self._room_to_arrive(raw.numel())
            target = as_tensor(lease)[: raw.numel()]
        exact = grad.dtype is dtype or dtype is torch.float32  # as it will be there
        if self.last_micro_batch and overwrite and whole and exact:
            (self._block_squares[piece.index],) = device_kernels.block_squares([grad.view(-1)])
        arrival = copies.to_host(target, raw, after=[streams.compute.record()], kind="gradients")
        self._under_way += raw.numel()
        self._arriving.append(_Arriving(arrival, raw, lease, group, piece, grad.dtype, overwrite, whole))
        self._receive_arrived()

    def _room_to_arrive(self, nbytes: int) -> Lease:
        while (lease := self._tiers.offload_window.try_lease(nbytes, "gradients")) is None:
            self._wait_for_next()
        return lease

    def _wait_for_next(self) -> None:
        with self._tiers.stalls.waiting_for(COPIES_OF + "gradients"):
            self._receive_next()

    def _on_its_way(self, group: ParamGroup) -> bool:
        return any(arriving.group is group for arriving in self._arriving)

    def _receive_arrived(self) -> None:
        """Take up what is there by now."""
        while self._arriving and self._arriving[0].event.done():
            self._receive_next()

    def _receive_next(self) -> None:
        """Wait for the oldest, and add it, unless it went home."""
        arriving = self._arriving.popleft()
        arriving.event.wait()
        self._under_way -= arriving.source.numel()
        group, piece = arriving.group, arriving.piece
        self._squares.pop(piece.index, None)
        square = self.last_micro_batch and arriving.whole and piece.index not in self._block_squares
        if arriving.lease is not None:
            values = as_tensor(arriving.lease)[: piece.numel * arriving.dtype.itemsize].view(arriving.dtype)
            self._add_on_host(group, piece, values, overwrite=arriving.overwrite, square=square)
            arriving.lease.release()
        elif square:
            self._square(group, piece)
        if group in self._left and not self._on_its_way(group):
            self._left.remove(group)
            self._write_out(group)


def _pieces_within(group: ParamGroup, elements: range | None) -> list[Piece]:
    """The parts of the group's trained parameters that lie in ``elements`` of its shard, or all of them."""
    trained = [piece for piece in group.shard.pieces if piece.trainable]
    if elements is None:
        return trained
    parts = segments(trained, elements.start, elements.stop)
    return [replace(part.piece, start=part.start, numel=part.numel, first=part.first) for part in parts]
