"""Elements of one parameter in the memory of a device that are updated together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from optim_cpu.kernels import Rule, StateFormat

_STATE_DTYPES = {
    StateFormat.FP32: torch.float32,
    StateFormat.BF16: torch.bfloat16,
    StateFormat.BF16_STOCHASTIC: torch.bfloat16,
}


@dataclass(slots=True, eq=False)
class Segment:
    """Elements that one rule updates, as a segment of ``optim_cpu.kernels.StepBatch``.

    A segment whose memory does not move serves every step: only ``rule`` is replaced. ``entries`` are what fused.py
    tells the kernels of this memory.

    ``param`` is float32, or, with ``remainder`` (int16), the bfloat16 half of a split parameter. ``state`` is float32,
    or bfloat16 by ``state_format``, and may hold more tensors than the rule uses. ``out`` receives the rounded
    parameter, unless the parameter is split. Stochastic rounding depends on ``first_index``, the index of the first
    element in the model.
    """

    rule: Rule
    param: Tensor
    state: Sequence[Tensor]
    grad: Tensor
    out: Tensor | None = None
    remainder: Tensor | None = None
    state_format: StateFormat = StateFormat.FP32
    first_index: int = 0
    entries: list[Any] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        split, state_dtype = self.remainder is not None, _STATE_DTYPES[self.state_format]
        assert self.param.dtype is (torch.bfloat16 if split else torch.float32)
        assert all(tensor.dtype is state_dtype for tensor in self.used_state)
        assert self.remainder is None or (self.remainder.dtype is torch.int16 and self.out is None)
        for tensor in (*self.used_state, self.grad, self.out, self.remainder):
            assert tensor is None or (tensor.numel(), tensor.device) == (
                self.param.numel(),
                self.param.device,
            )
            assert tensor is None or tensor.is_contiguous()

    @property
    def used_state(self) -> Sequence[Tensor]:
        """The state tensors that the rule uses."""
        return self.state[: self.rule.state_count]
