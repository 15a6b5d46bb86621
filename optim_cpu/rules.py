"""Update rules: the optimizers that the kernels compute. Does not import torch.

Each rule is declared here once: a function that derives its numbers for one step, and an ``UpdateRule`` with the names
of its options and of its state, which the optimizers of this package, the engine and the planner read. Its formula is
in ``csrc/kernels.h``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from optim_cpu._kernels import ffi, lib
from optim_cpu.refusals import refusal, unfit


class Rule:
    """An update rule with its hyperparameters at one step, which a ``StepBatch`` applies to segments. Immutable.

    ``adam``, ``lion``, ``adagrad`` and ``sgd`` create rules; their formulas are in ``csrc/kernels.h``.
    """

    __slots__ = ("_rule", "name", "state_count")

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self.name = name
        """The function that created the rule: "adam", "lion", "adagrad" or "sgd"."""
        self._rule = ffi.new("opt_rule *")
        function = getattr(lib, f"opt_{name}_rule")
        try:
            code = function(self._rule, *arguments.values())
        except (TypeError, OverflowError) as error:
            raise unfit(name, ffi.typeof(function).args, error, {"rule": self._rule} | arguments) from None
        if code < 0:
            raise refusal(name, code, arguments)
        self.state_count = int(lib.opt_state_count(self._rule))
        """State arrays of the optimizer: 2 for Adam, 1 for Lion, Adagrad and SGD, 0 for SGD without momentum."""

    @property
    def key(self) -> int:
        """The 64-bit key of stochastic rounding; the random bits depend on it and on the element's index."""
        return int(self._rule.key)

    def scalar(self, name: str) -> float:
        """A float32 derived from the hyperparameters, by its name in ``opt_rule``."""
        return float(getattr(self._rule, name))


# These functions take each hyperparameter of their formula by keyword, however many there are, in the order of the C
# function, so that locals() is its arguments.


def adam(
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    maximize: bool = False,
    step: int,
    seed: int = 0,
) -> Rule:
    """Adam with decoupled weight decay (AdamW) or, ``decoupled=False``, with L2. State: exp_avg, exp_avg_sq.

    ``bias_correction=False`` does not correct the moments for their start at zero.
    ``step`` is the number of the step, from 1; ``seed`` (64 bits) selects the random bits of stochastic rounding.
    Raises ValueError, which names the argument.
    """
    return Rule("adam", locals())


def lion(
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool = False,
    step: int,
    seed: int = 0,
) -> Rule:
    """Lion with decoupled weight decay. State: exp_avg. Arguments and errors as ``adam``'s."""
    return Rule("lion", locals())


def adagrad(
    *,
    lr: float,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    step: int,
    seed: int = 0,
) -> Rule:
    """Adagrad with L2 decay. State: sum, which may start above 0. Arguments and errors as ``adam``'s."""
    return Rule("adagrad", locals())


def sgd(
    *,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool = False,
    step: int,
    seed: int = 0,
) -> Rule:
    """SGD with L2 decay. State: momentum_buffer, none if ``momentum`` is 0. Arguments and errors as ``adam``'s."""
    return Rule("sgd", locals())


@dataclass(frozen=True)
class UpdateRule:
    """An optimizer of the kernels: the options that it reads from a param group, and the state that it keeps.

    Param groups have the options of torch.optim's optimizers, under their names; a number may be a tensor of one
    element. ``maximize`` and ``seed``, which every rule has, and ``optional`` ones may be missing.
    """

    name: str
    # Derives the rule of one step. Its parameters are named like the options; _PARAMETERS has the exceptions.
    rule: Callable[..., Rule]
    options: tuple[str, ...]
    # Options that torch's optimizers do not have; the rule has their defaults.
    optional: tuple[str, ...] = field(default=(), kw_only=True)
    # The state arrays of a parameter, in the order of the kernels.
    state: tuple[str, ...]
    # The option without which there is no state.
    state_option: str = ""
    # The option with the first value of the state, which is 0 without one.
    initial_option: str = ""

    def at(self, options: Mapping[str, Any], step: int) -> Rule:
        """The rule of step number ``step``, from 1. Raises ValueError or TypeError, which names the invalid option."""
        arguments: dict[str, Any] = {}
        for name in (*self.options, *(name for name in self.optional if name in options)):
            if name == "betas":
                beta1, beta2 = options[name]
                arguments["beta1"], arguments["beta2"] = float(beta1), float(beta2)
            else:
                arguments[_PARAMETERS.get(name, name)] = _number(options, name)
        maximize, seed = options.get("maximize", False), options.get("seed", 0)
        if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must be an integer from 0 to 2^64 - 1, got {seed!r}")
        return self.rule(**arguments, step=step, maximize=maximize, seed=seed)

    def state_names(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The state arrays of a parameter with these options."""
        return self.state if not self.state_option or _number(options, self.state_option) else ()

    def initial(self, options: Mapping[str, Any]) -> float:
        """The first value of the state arrays. Raises ValueError if the option is invalid."""
        if not self.initial_option:
            return 0.0
        value = _number(options, self.initial_option)
        if not 0 <= value < float("inf"):
            raise ValueError(f"{self.initial_option} must be 0 or more, and finite, got {value}")
        return value


_PARAMETERS = {"decoupled_weight_decay": "decoupled"}

ADAM = UpdateRule(
    "Adam",
    adam,
    ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay"),
    ("exp_avg", "exp_avg_sq"),
    optional=("bias_correction",),
)
LION = UpdateRule("Lion", lion, ("lr", "betas", "weight_decay"), ("exp_avg",))
ADAGRAD = UpdateRule(
    "Adagrad",
    adagrad,
    ("lr", "lr_decay", "eps", "weight_decay"),
    ("sum",),
    initial_option="initial_accumulator_value",
)
SGD = UpdateRule(
    "SGD",
    sgd,
    ("lr", "momentum", "dampening", "nesterov", "weight_decay"),
    ("momentum_buffer",),
    state_option="momentum",
)

UPDATE_RULES = {"AdamW": ADAM, "Adam": ADAM, "Lion": LION, "Adagrad": ADAGRAD, "SGD": SGD}
"""The rules by the names of torch's and DeepSpeed's optimizers. AdamW is Adam with ``decoupled_weight_decay``."""


def _number(options: Mapping[str, Any], name: str) -> float:
    """The option ``name``, which may be a tensor of one element."""
    value: Any = options[name]
    # Only a tensor has numel: isinstance(value, Tensor) would import torch.
    if isinstance(value, (float, int)) or not hasattr(value, "numel"):
        return cast(float, value)
    if value.numel() != 1:
        raise ValueError(
            f"{name} must be a number or a tensor of one element, got shape {tuple(value.shape)}"
        )
    return float(value)
