"""What "auto" comes to: from the model, from a trainer's arguments, or from what trainers fill in when nobody says.

A trainer's arguments go by the names of Hugging Face's ``TrainingArguments``: ``initialize(args=...)`` takes those, or
any namespace that has some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tiering.config.fields import whole_number
from tiering.config.json_values import values


@dataclass(frozen=True)
class Known:
    """What is known beside the file.

    ``hidden_size`` is the model's, ``dtype`` that of its parameters ("fp32", "bf16", "fp16"), ``arguments`` is what
    a trainer has by name, a mapping or any namespace; ``replaced`` are the sections in whose place ``initialize`` was
    given an object.
    """

    hidden_size: int | None = None
    dtype: str | None = None
    arguments: Any = None
    replaced: frozenset[str] = frozenset()

    def argument(self, name: str) -> Any:
        """The trainer's argument; None if there is none."""
        return values(named(self.arguments, name))


class Filled(NamedTuple):
    """A value in place of "auto", and where it is from. ``UNSET`` leaves the setting at its default."""

    value: object
    source: str


UNSET = object()

Auto = Callable[[Known], Filled]
"""Raises ValueError, with the remedy, if nothing that is known says what the value is."""


TRAINERS_NAMES = {
    "learning_rate": "optimizer.params.lr",
    "adam_beta1": "optimizer.params.betas",
    "adam_beta2": "optimizer.params.betas",
    "adam_epsilon": "optimizer.params.eps",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "warmup_steps": "scheduler.params.warmup_num_steps",
    "max_steps": "scheduler.params.total_num_steps",
}
"""What a trainer calls what DeepSpeed's files call otherwise."""


def default(source: str) -> Auto:
    """The default of the setting, whatever is known."""
    return lambda known: Filled(UNSET, source)


def of_hidden_size(rule: str, compute: Callable[[int], int], otherwise: str) -> Auto:
    """By the model's hidden size h."""

    def fill(known: Known) -> Filled:
        if known.hidden_size is None:
            return Filled(UNSET, f"{otherwise}; {rule} where the model tells its hidden size h")
        return Filled(compute(known.hidden_size), f"{rule}, h = {known.hidden_size}")

    return fill


def of_precision(name: str) -> Auto:
    """The trainer's argument ``name``, or whether the model is kept in that dtype."""

    def fill(known: Known) -> Filled:
        told = known.argument(name)
        if told is not None:
            return Filled(told, f"args.{name}")
        if known.dtype is None:
            return Filled(False, f"true where the model's parameters are {name}")
        return Filled(known.dtype == name, f"the model's parameters are {known.dtype}")

    return fill


def argument(name: str, otherwise: Filled | None = None) -> Auto:
    """The trainer's argument ``name``, or else ``otherwise``; a number that nobody can know has to be given."""

    def fill(known: Known) -> Filled:
        told = known.argument(name)
        if told is not None:
            return Filled(told, f"args.{name}")
        if otherwise is None:
            raise ValueError(missing(name))
        return otherwise

    return fill


def betas(known: Known) -> Filled:
    """Adam's, which trainers keep in two arguments."""
    told = {name: known.argument(name) for name in _BETAS if known.argument(name) is not None}
    if not told:
        return Filled(UNSET, "the optimizer's default")
    return Filled([*(_BETAS | told).values()], ", ".join(f"args.{name}" for name in told))


_BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999}
"""A trainer's arguments, and what the one is that is not given."""


def warmup_steps(known: Known) -> Filled:
    """``warmup_steps``, or ``warmup_ratio`` of ``max_steps``, as trainers have them: 0 means the other one."""
    steps, ratio, total = (_number(known, name) for name in ("warmup_steps", "warmup_ratio", "max_steps"))
    if steps is None and ratio is None:
        raise ValueError(missing("warmup_steps"))
    if isinstance(steps, float) and 0 < steps < 1:  # newer trainers: a share, in place of warmup_ratio
        steps, ratio = None, steps
    if steps or not ratio:
        return Filled(whole_number(steps or 0), "args.warmup_steps")
    if total is None or total <= 0:
        raise ValueError(missing("max_steps"))
    return Filled(math.ceil(ratio * total), "args.warmup_ratio of args.max_steps")


def total_steps(known: Known) -> Filled:
    """``max_steps``, which trainers set to -1 where epochs count."""
    told = _number(known, "max_steps")
    if told is None or told <= 0:
        raise ValueError(missing("max_steps"))
    return Filled(told, "args.max_steps")


def _number(known: Known, name: str) -> float | None:
    told = known.argument(name)
    if told is None or (isinstance(told, int | float) and not isinstance(told, bool) and math.isfinite(told)):
        return told
    raise ValueError(f"args.{name} is {told!r}; a number is needed")


def missing(name: str) -> str:
    return f"'auto' is for a trainer to fill in: give a number, or initialize(args=...) with {name}"


_HIDDEN = ("hidden_size", "hidden_sizes", "d_model", "n_embd")


def hidden_size_of(config: Any) -> int | None:
    """The hidden size that a transformers configuration, or its JSON, tells; its text model's where it has several."""
    for section in (config, named(config, "text_config")):
        for name in _HIDDEN:
            value = named(section, name)
            sizes = value if isinstance(value, list | tuple) else [value]
            if sizes and all(type(size) is int and size > 0 for size in sizes):
                return int(max(sizes))
    return None


def named(given: Any, name: str) -> Any:
    """What a mapping or a namespace has under ``name``, or None."""
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)
