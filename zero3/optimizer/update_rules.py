"""Update rules: the kernels' rule of a step for a torch-style param group, and the state tensors of a rule.

Param groups carry the options of torch.optim's and optim_cpu's optimizers under their names, so the
groups of a user's optimizer are used as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import optim_cpu
from optim_cpu import kernels
from optim_cpu.fused_optimizer import form_of
from optim_cpu.tensor_batch import Form
from tiering.config.training import OptimizerConfig
from tiering.errors import ConfigError

Options = dict[str, Any]  # of a param group


@dataclass(frozen=True)
class OptimizerOptions:
    """The options of an update rule, as ``torch.optim.Optimizer`` has them: ``param_groups``, and ``defaults``.

    ``source`` is the user's optimizer that they come from, if there is one. The engine's optimizer then shares its
    list of param groups and their dicts, so a scheduler made for either of the two steers both.
    """

    param_groups: list[Options]
    defaults: Options
    source: torch.optim.Optimizer | None = None


@dataclass(frozen=True)
class UpdateRule:
    """One of optim_cpu's optimizers. ``keeps`` names the state tensors that a parameter with these options has."""

    name: str
    at: Callable[[Options, int], kernels.Rule]  # for a step, counted from 1; ValueError names a bad option
    keeps: Callable[[Options], tuple[str, ...]]
    initial: Callable[[Options], float]  # the first value of the state tensors

    def state_names(self, param_groups: Iterable[Options]) -> tuple[str, ...]:
        """The state tensors of every parameter: as many as the group that keeps most."""
        return max((self.keeps(group) for group in param_groups), key=len, default=())

    def check(self, param_groups: Iterable[Options]) -> None:
        """Raises ConfigError for options that the kernels do not take."""
        for number, group in enumerate(param_groups):
            try:
                self.at(group, 1)
                self.initial(group)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{self.name}, param group {number}: {error}") from None


def _number(options: Options, name: str) -> float:
    """The option ``name``, which may be a tensor of one element."""
    value: float | Tensor = options[name]
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(
            f"{name} must be a number or a tensor of one element, got shape {tuple(value.shape)}"
        )
    return float(value)


def _adam(options: Options, step: int) -> kernels.Rule:
    beta1, beta2 = options["betas"]
    return kernels.adam(
        lr=_number(options, "lr"),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=_number(options, "eps"),
        weight_decay=_number(options, "weight_decay"),
        step=step,
        decoupled=options["decoupled_weight_decay"],
        maximize=options.get("maximize", False),
        seed=options.get("seed", 0),
    )


def _lion(options: Options, step: int) -> kernels.Rule:
    beta1, beta2 = options["betas"]
    return kernels.lion(
        lr=_number(options, "lr"),
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=_number(options, "weight_decay"),
        step=step,
        maximize=options.get("maximize", False),
        seed=options.get("seed", 0),
    )


def _adagrad(options: Options, step: int) -> kernels.Rule:
    return kernels.adagrad(
        lr=_number(options, "lr"),
        lr_decay=_number(options, "lr_decay"),
        eps=_number(options, "eps"),
        weight_decay=_number(options, "weight_decay"),
        step=step,
        maximize=options.get("maximize", False),
        seed=options.get("seed", 0),
    )


def _sgd(options: Options, step: int) -> kernels.Rule:
    return kernels.sgd(
        lr=_number(options, "lr"),
        momentum=_number(options, "momentum"),
        dampening=_number(options, "dampening"),
        nesterov=options["nesterov"],
        weight_decay=_number(options, "weight_decay"),
        step=step,
        maximize=options.get("maximize", False),
        seed=options.get("seed", 0),
    )


def _initial_sum(options: Options) -> float:
    initial = _number(options, "initial_accumulator_value")
    if not 0 <= initial < float("inf"):
        raise ValueError(f"initial_accumulator_value must be 0 or more, and finite, got {initial}")
    return initial


ADAM = UpdateRule("Adam", _adam, lambda _: ("exp_avg", "exp_avg_sq"), lambda _: 0.0)
LION = UpdateRule("Lion", _lion, lambda _: ("exp_avg",), lambda _: 0.0)
ADAGRAD = UpdateRule("Adagrad", _adagrad, lambda _: ("sum",), _initial_sum)
SGD = UpdateRule(
    "SGD", _sgd, lambda options: ("momentum_buffer",) if _number(options, "momentum") else (), lambda _: 0.0
)
NONE = UpdateRule("no optimizer", _sgd, lambda _: (), lambda _: 0.0)
"""The rule of a model without trainable parameters."""


def from_config(config: OptimizerConfig) -> tuple[UpdateRule, Options]:
    """The rule that a configuration names, and the default options of the param groups."""
    common = {"lr": config.lr, "weight_decay": config.weight_decay, "maximize": False}
    adam = {"betas": config.betas, "eps": config.eps, "decoupled_weight_decay": config.decoupled}
    rules: dict[str, tuple[UpdateRule, Options]] = {
        "AdamW": (ADAM, adam),
        "Adam": (ADAM, adam),
        "Lion": (LION, {"betas": config.betas}),
        "Adagrad": (
            ADAGRAD,
            {
                "eps": config.eps,
                "lr_decay": config.lr_decay,
                "initial_accumulator_value": config.initial_accumulator_value,
            },
        ),
        "SGD": (
            SGD,
            {"momentum": config.momentum, "dampening": config.dampening, "nesterov": config.nesterov},
        ),
    }
    rule, own = rules[config.type]
    return rule, common | own


RULE_OF_CLASS: tuple[tuple[type[torch.optim.Optimizer], UpdateRule], ...] = (
    (torch.optim.Adam, ADAM),
    (torch.optim.Adagrad, ADAGRAD),
    (torch.optim.SGD, SGD),
    (optim_cpu.Adam, ADAM),
    (optim_cpu.Lion, LION),
    (optim_cpu.Adagrad, ADAGRAD),
    (optim_cpu.SGD, SGD),
)
"""torch's and optim_cpu's AdamW are subclasses of Adam."""

NO_KERNEL = ("amsgrad", "differentiable")


def from_optimizer(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """The rule with the same update as ``optimizer``, None if there is no kernel.

    ``foreach``, ``fused`` and ``capturable`` select torch's implementation of the same update.
    """
    if any(group.get(option) for group in optimizer.param_groups for option in NO_KERNEL):
        return None
    for base, rule in RULE_OF_CLASS:
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
