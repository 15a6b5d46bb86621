"""The attributes of DeepSpeed's optimizers that scripts use, on the optimizer that ``initialize`` returns."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from zero3.params.precision import LossScale

log = logging.getLogger(__name__)


class Updates(Protocol):
    """The updates of an engine: their number, whether the last one was skipped, and the scale of the loss.

    ``deferring``: a part of the last one is not applied yet. ``settle_step`` applies it, and takes back one that
    was begun ahead of ``step()``.
    """

    @property
    def steps(self) -> int: ...
    @property
    def overflow(self) -> bool: ...
    @property
    def loss_scale(self) -> LossScale: ...
    @property
    def deferring(self) -> bool: ...
    def settle_step(self) -> None: ...


class MicroBatches(Protocol):
    """The number of micro-batches that wait for their update."""

    @property
    def waiting(self) -> int: ...


class Life(Protocol):
    """Whether an engine is closed."""

    @property
    def closed(self) -> bool: ...


class _NoParameters(nn.Module):
    """A module of DeepSpeed without parameters."""

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())


class ParameterOffload:
    """``optimizer.parameter_offload``: trl removes its hooks while a model generates inside GatheredParameters.

    It has no hooks, because those of this engine do not change gathered parameters.
    """

    def __init__(self) -> None:
        self.module = _NoParameters()
        self.forward_hooks: list[RemovableHandle] = []
        self.backward_hooks: list[RemovableHandle] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Add the hooks after the generation."""


class DeepSpeedOptimizerNames:
    """The part of both optimizers that reports the updates of the engine; ``serve`` connects it to them."""

    _updates: Updates
    _accumulation: MicroBatches
    _ready: Life
    _has_warned = False
    _step_supports_amp_scaling = True  # torch.amp.GradScaler then calls step(), whose error says what to call

    def serve(self, updates: Updates, accumulation: MicroBatches, ready: Life) -> None:
        """Report the updates of this engine from now on."""
        self._updates, self._accumulation, self._ready = updates, accumulation, ready

    @cached_property
    def parameter_offload(self) -> ParameterOffload:
        """The hooks of the parameters, for programs that remove them to generate."""
        return ParameterOffload()

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped, because a gradient was not finite."""
        return self._updates.overflow

    @property
    def loss_scale(self) -> float:
        """The factor of the loss: 1 except in fp16."""
        return self._updates.loss_scale.value

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the factor follows the overflows."""
        return self._updates.loss_scale.dynamic

    def _refusal_to_step(self) -> str:
        """The error of a script that calls ``step``."""
        if hasattr(self, "found_inf"):  # GradScaler sets it around its call
            return (
                "GradScaler.step(optimizer) was called on an engine's optimizer. The engine scales the loss itself, by"
                ' the section "fp16", and bf16 and fp32 need no scale: leave the GradScaler out, and call'
                " engine.backward(loss) and engine.step()"
            )
        return "optimizer.step() would neither clip nor count this step; call engine.step()"

    def warn_of_dropped_gradients(self, call: str) -> None:
        """Warn once that ``call`` drops gradients of an accumulation; DeepSpeed keeps them at stage 2."""
        if not self._has_warned and self._accumulation.waiting:
            self._has_warned = True
            log.warning(
                "%s drops the gradients of %d micro-batches that wait for their update; to"
                " accumulate, remove the call: step() drops gradients after their use",
                *(call, self._accumulation.waiting),
            )
