"""The parameters that an engine can train: those that require gradients at initialize, when the tiers are planned."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from tiering.errors import EngineStateError

REMEDY = (
    "Unfreeze all parameters that will be trained at any time, put them in param groups, initialize, and then freeze"
    " those that are trained later. To continue this run: save_checkpoint(), release(), unfreeze, initialize, and"
    " load_checkpoint()"
)


def planned_group(param_group: Mapping[str, Any], planned: Container[Tensor]) -> dict[str, Any]:
    """``param_group`` with its parameters in a list. EngineStateError unless all of them are ``planned``."""
    value = param_group["params"]
    params = [value] if isinstance(value, Tensor) else list(value)
    params = [param[1] if isinstance(param, tuple) else param for param in params]  # of named_parameters()
    # A parameter without elements has no state, and so no place in the plan.
    unplanned = [tuple(param.shape) for param in params if param not in planned and param.numel()]
    if unplanned:
        raise EngineStateError(
            f"a param group was added after initialize with {len(unplanned)} parameters (the first of shape"
            f" {unplanned[0]}) that were frozen then, or not the model's, and no tier has room for their state."
            f" {REMEDY}"
        )
    return {**param_group, "params": params}
