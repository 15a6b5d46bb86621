"""OptimizerFront: an engine as a ``torch.optim.Optimizer``, for a trainer that owns the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from tiering.errors import EngineStateError
from zero3.loop.step import Update
from zero3.loop.step_state import Accumulation
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer


class Stepped(Protocol):
    """The part of an engine that a front steps."""

    optimizer: TieredOptimizer | ClientOptimizer

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...


class OptimizerFront(torch.optim.Optimizer):
    """``step`` is the update of an engine: clipping, the step of the parameters, the count, telemetry.

    ``param_groups``, ``state`` and ``defaults`` are those of the engine's optimizer: a scheduler that changes a
    learning rate here changes it there. The loop owns the accumulation of gradients: see ``Engine.as_optimizer``.
    """

    # torch.amp.GradScaler then calls step(), whose error names the replacement.
    _step_supports_amp_scaling = True

    def __init__(self, engine: Stepped, updates: Update, accumulation: Accumulation) -> None:
        self._engine = engine
        self._updates = updates
        self._accumulation = accumulation
        # torch's __init__ makes param groups and state of its own. This sets the rest: hooks and the profile of step().
        super().__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override] # torch assigns them, a script changes them
        """The param groups of the engine's optimizer: the same list of the same dicts."""
        return self._engine.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override] # as above
        """The state of the engine's optimizer by parameter; empty if the state is on the tiers."""
        return self._engine.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override] # as above
        """A copy of the default options of a param group."""
        return dict(self._engine.optimizer.defaults)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last ``step`` changed nothing, because a gradient was not finite (an overflow in fp16)."""
        return self._updates.overflow

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the gradients of all backwards since the last step; returns that of ``closure``.

        ``closure`` runs a forward and a backward, and returns the loss. Raises EngineStateError without a backward
        since the last step, and where ``Engine.step`` does.
        """
        if hasattr(self, "found_inf"):  # torch.amp.GradScaler sets it around its call.
            raise EngineStateError(
                "GradScaler.step(optimizer) was called on an engine's optimizer. The engine scales the loss itself, by"
                ' the section "fp16": leave the GradScaler out, call engine.backward(loss) and optimizer.step()'
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._accumulation.at_boundary:
            raise EngineStateError(
                "optimizer.step() was called after set_gradient_accumulation_boundary(False): the last backward did not"
                " complete the gradients. Call set_gradient_accumulation_boundary(True) before that backward"
            )
        self._engine.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last ``step``; no effect after the engine is closed."""
        self._engine.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradients of the next ``step`` to ``max_norm``; returns their norm, unscaled, before clipping.

        Of gradients that are not finite, it is infinity or NaN, as torch's.
        ``gradient_clipping`` of the configuration applies, too: the lower norm counts. All ranks call this together,
        after the last backward. Raises ConfigError if ``max_norm`` is not above 0, or with tiering.step 'in_backward',
        and EngineStateError without a backward since the last step.
        """
        return self._updates.clip_next(max_norm)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step parameters that are in no group, with these options; they were trainable at initialize."""
        self._engine.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The options of the param groups, and the step of the state on the tiers, which ``save_checkpoint`` saves."""
        return self._engine.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the options of the param groups. Call ``engine.load_checkpoint``, which loads the state, before this.

        Raises EngineStateError if the state on the tiers is of another step.
        """
        self._engine.optimizer.load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise EngineStateError(
            "an engine's optimizer cannot be copied or pickled: its state is on the tiers. Save state_dict() of the"
            " optimizer for its options, and engine.save_checkpoint(DIR) for its state"
        )
