"""The squares of gradients, of which the norm is made: summed while a gradient is in memory, and only once.

The norm is the same for every placement, stage and cut into groups: squares are summed in float64 over fixed blocks
that begin at the start of each parameter, and the sums of blocks are added without rounding (see
optim_cpu.kernels.sum_of_squares). A rank's shard has whole blocks (see params/layout.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from optim_cpu import kernels
from optim_cpu.dtypes import DTYPES
from optim_cpu.kernels import ExactSum
from zero3.device import kernels as device_kernels
from zero3.device.home import Home
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup
from zero3.passes.gradient_windows import GradientWindows


class GradientSquares:
    """The sums of squares of gradients with these ``homes`` and ``windows``; ``dtypes`` are those at home, by group.

    ``measured`` are the pieces whose squares this rank adds to the norm, in model order.
    """

    def __init__(
        self,
        dtypes: Mapping[ParamGroup, torch.dtype],
        homes: list[Home],
        windows: GradientWindows,
        measured: Mapping[ParamGroup, Sequence[Piece]],
    ) -> None:
        self._dtypes = dtypes
        self._homes = homes
        self._windows = windows
        self._measured = measured
        self._sums: dict[int, ExactSum] = {}
        # Squares of blocks, in device memory, of gradients that have left the device. Not added up yet.
        self._of_blocks: dict[int, Tensor] = {}

    def clear(self) -> None:
        """There are no gradients any more."""
        self._sums.clear()
        self._of_blocks.clear()

    def forget(self, piece: Piece) -> None:
        """The gradient of ``piece`` has changed."""
        self._sums.pop(piece.index, None)
        self._of_blocks.pop(piece.index, None)

    def forget_sum(self, piece: Piece) -> None:
        """The gradient of ``piece`` has changed at home, where what ``begin`` has squared arrives."""
        self._sums.pop(piece.index, None)

    def begin(self, piece: Piece, grad: Tensor) -> None:
        """Square the flat ``grad``, which is about to leave the device: all of the gradient of ``piece``."""
        (self._of_blocks[piece.index],) = device_kernels.block_squares([grad])

    def have_begun(self, piece: Piece) -> bool:
        """Whether ``begin`` has squared the gradient of ``piece``."""
        return piece.index in self._of_blocks

    def are_on_device(self, group: ParamGroup, piece: Piece) -> bool:
        """Whether a device computes the squares of ``piece``."""
        return self._homes[group.index].on_device or self.have_begun(piece)

    def of(self, group: ParamGroup, piece: Piece) -> ExactSum:
        """The sum of squares of ``piece``, computed now if the last micro-batch brought it no gradient."""
        if piece.index not in self._sums:
            if self.are_on_device(group, piece):
                self._add_up_on_device([(group, piece)])
            else:
                # Through the gradient window, which is free after backward. The staging slots are in use: the step has
                # begun to read state ahead.
                dtype = self._dtypes[group]
                address = self._windows.open(group).data_ptr() + piece.start * dtype.itemsize
                self._sums[piece.index] = kernels.sum_of_squares(address, DTYPES[dtype], piece.numel)
        return self._sums[piece.index]

    def of_all(self, received: Collection[int]) -> list[tuple[Piece, ExactSum]]:
        """The measured pieces among the indices ``received``, each with its sum of squares."""
        pairs = [
            (group, piece)
            for group, pieces in self._measured.items()
            for piece in pieces
            if piece.index in received
        ]
        self._add_up_on_device([pair for pair in pairs if self.are_on_device(*pair)])
        squares = []
        for group, of_group in groupby(pairs, key=itemgetter(0)):
            squares += [(piece, self.of(group, piece)) for _, piece in of_group]
            # ``of`` opened its window to read: the extent has the same bytes, so nothing is written.
            self._windows.drop(group)
        return squares

    def _add_up_on_device(self, pairs: Sequence[tuple[ParamGroup, Piece]]) -> None:
        """Compute the sums of squares of gradients that are, or were, in device memory. The CPU waits once for all."""
        missing = [(group, piece) for group, piece in pairs if piece.index not in self._sums]
        if not missing:
            return
        at_home = [(group, piece) for group, piece in missing if not self.have_begun(piece)]
        flats = []
        for group, piece in at_home:
            home = self._homes[group.index].tensor
            assert home is not None
            flats.append(home.view(self._dtypes[group])[piece.start : piece.end])
        for (_, piece), squares in zip(at_home, device_kernels.block_squares(flats), strict=True):
            self._of_blocks[piece.index] = squares
        indices = [piece.index for _, piece in missing]
        # The CPU waits for the device here, once for all of them.
        sums = device_kernels.added_up([self._of_blocks.pop(index) for index in indices])
        self._sums.update(zip(indices, sums, strict=True))
