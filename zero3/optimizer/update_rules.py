"""The update rule of an engine: the one that a configuration names, or the one of a user's optimizer.

``optim_cpu.rules`` declares the rules. Param groups carry the options of torch.optim's and optim_cpu's optimizers under
their names, so the groups of a user's optimizer are used as they are. An engine can train the parameters that required
gradients at initialize, when the tiers were planned.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optim_cpu import rules
from optim_cpu.fused_optimizer import FusedOptimizer, form_of
from optim_cpu.rules import UPDATE_RULES, UpdateRule
from optim_cpu.tensor_batch import Form
from tiering.config.optimizer import RULES
from tiering.config.training import OptimizerConfig
from tiering.errors import ConfigError, EngineStateError

Options = dict[str, Any]  # of a param group

UNPLANNED_REMEDY = (
    "Unfreeze all parameters that will be trained at any time, put them in param groups, initialize, and then freeze"
    " those that are trained later. To continue this run: save_checkpoint(), release(), unfreeze, initialize, and"
    " load_checkpoint()"
)


@dataclass(frozen=True)
class OptimizerOptions:
    """The options of an update rule, as ``torch.optim.Optimizer`` has them: ``param_groups``, and ``defaults``.

    ``source`` is the user's optimizer that they come from, if there is one. The engine's optimizer then shares its
    list of param groups and their dicts, so a scheduler made for either of the two steers both.
    """

    param_groups: list[Options]
    defaults: Options
    source: torch.optim.Optimizer | None = None


NONE = UpdateRule("no optimizer", rules.sgd, options=(), state=())
"""The rule of a model without trainable parameters."""

*_ALL_BUT_ONE, _LAST = UPDATE_RULES
RULE_NAMES = f"{', '.join(_ALL_BUT_ONE)} or {_LAST}"
"""The rules for messages: "AdamW, Adam ... or SGD"."""


def state_names(rule: UpdateRule, param_groups: Iterable[Options]) -> tuple[str, ...]:
    """The state tensors of every parameter: as many as the group that keeps most."""
    return max(map(rule.state_names, param_groups), key=len, default=())


def check_options(rule: UpdateRule, param_groups: Iterable[Options]) -> None:
    """Raises ConfigError for options that the kernels do not take."""
    for number, group in enumerate(param_groups):
        try:
            rule.at(group, 1)
            rule.initial(group)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{rule.name}, param group {number}: {error}") from None


def from_config(config: OptimizerConfig) -> tuple[UpdateRule, Options]:
    """The rule that a configuration names, and the default options of the param groups."""
    options = {name: getattr(config, name) for name in RULES[config.type]}
    if "decoupled" in options:
        options["decoupled_weight_decay"] = options.pop("decoupled")
    return UPDATE_RULES[config.type], options | {"maximize": False}


RULE_OF_TORCH_CLASS: tuple[tuple[type[torch.optim.Optimizer], UpdateRule], ...] = (
    (torch.optim.Adam, rules.ADAM),
    (torch.optim.Adagrad, rules.ADAGRAD),
    (torch.optim.SGD, rules.SGD),
)
"""The rules of torch's optimizers. AdamW is a subclass of Adam."""

NO_KERNEL = ("amsgrad", "differentiable")


def from_optimizer(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """The rule with the same update as ``optimizer``, None if there is no kernel.

    ``foreach``, ``fused`` and ``capturable`` select torch's implementation of the same update.
    """
    if any(group.get(option) for group in optimizer.param_groups for option in NO_KERNEL):
        return None
    if isinstance(optimizer, FusedOptimizer) and _steps_as(optimizer, FusedOptimizer):
        return optimizer.update_rule
    for base, rule in RULE_OF_TORCH_CLASS:
        if isinstance(optimizer, base) and _steps_as(optimizer, base):
            return rule
    return None


def state_form(name: str) -> Form:
    """The form that ``tiering.state`` names; moments in 16 bits are rounded stochastically."""
    return form_of({"state_format": name, "stochastic_rounding": True}, ())


def state_form_of(optimizer: torch.optim.Optimizer) -> Form | None:
    """The form of state that ``optimizer`` requests; None without a request, as in torch's optimizers.

    Raises ConfigError for groups of several forms: a tile holds one.
    """
    groups = [group for group in optimizer.param_groups if "state_format" in group]
    try:
        forms = {form_of(group, ()): group["state_format"] for group in groups}
    except ValueError as error:
        raise ConfigError(f"the {type(optimizer).__name__}: {error}") from None
    if len(forms) > 1:
        raise ConfigError(
            f"the param groups of the {type(optimizer).__name__} have state_format {' and '.join(forms.values())}"
            " (or differ in stochastic_rounding); the tiers keep one: give all groups the same"
        )
    return next(iter(forms), None)


def _steps_as(optimizer: torch.optim.Optimizer, base: type[torch.optim.Optimizer]) -> bool:
    """Whether a subclass inherits ``step``; torch wraps it, per class, when the first instance is made."""
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(base.step)


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` holds state of earlier steps; Adagrad's is there from the start."""
    return any(
        float(state.get("step", 0)) > 0 or state.get("momentum_buffer") is not None
        for state in optimizer.state.values()
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
            f" {UNPLANNED_REMEDY}"
        )
    return {**param_group, "params": params}
