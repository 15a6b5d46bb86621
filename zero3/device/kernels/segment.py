"""What is stepped together: elements of one parameter, in a device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optim_cpu.kernels import Rule, StateFormat

_STATE_DTYPES = {
    StateFormat.FP32: torch.float32,
    StateFormat.BF16: torch.bfloat16,
    StateFormat.BF16_STOCHASTIC: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements that are stepped by one rule, as a segment of ``optim_cpu.kernels.StepBatch``.

    ``param`` is float32, or with ``remainder`` (int16) the bfloat16 half of a split one; ``state`` is float32, or
    bfloat16 by ``state_format``, and may hold more tensors than the rule has. ``out`` receives the rounded parameter,
    unless that is split. On ``first_index``, the place of the first element, stochastic rounding depends.
    """

    rule: Rule
    param: Tensor
    state: Sequence[Tensor]
    grad: Tensor
    out: Tensor | None = None
    remainder: Tensor | None = None
    state_format: StateFormat = StateFormat.FP32
    first_index: int = 0

    def __post_init__(self) -> None:
        split, state_dtype = self.remainder is not None, _STATE_DTYPES[self.state_format]
        assert self.param.dtype is (torch.bfloat16 if split else torch.float32)
        assert all(tensor.dtype is state_dtype for tensor in self.kept)
        assert self.remainder is None or (self.remainder.dtype is torch.int16 and self.out is None)
        for tensor in (*self.kept, self.grad, self.out, self.remainder):
            assert tensor is None or (tensor.numel(), tensor.device) == (
                self.param.numel(),
                self.param.device,
            )
            assert tensor is None or tensor.is_contiguous()

    @property
    def kept(self) -> Sequence[Tensor]:
        """The state tensors that the rule has."""
        return self.state[: self.rule.state_count]
