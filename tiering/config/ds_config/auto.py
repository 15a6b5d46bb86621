"""Resolves "auto" from the model, from a trainer's arguments, or to the default that trainers fill in.

A trainer's arguments have the names of Hugging Face's ``TrainingArguments``: ``initialize(args=...)`` takes those, or
any namespace with some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tiering.config.fields import whole_number
from tiering.config.json_values import values


@dataclass(frozen=True)
class LoadContext:
    """Information that does not come from the file.

    ``hidden_size`` is the model's; ``dtype`` is that of its parameters ("fp32", "bf16", "fp16"); ``arguments`` is a
    mapping or namespace of a trainer's arguments; ``replaced`` are the sections that an object passed to
    ``initialize`` replaces. With ``strict`` a value of the file that differs from its argument is refused, if the
    arguments belong to the file: it has an "auto", or they are a ``TrainingArguments``. With ``for_trainer`` a trainer
    fills in each argument that ``arguments``, then a mapping, does not have. ``sequence_ranks`` is the number of ranks
    that share a sequence in the mesh that was passed to ``initialize``, None without one, and ``model_ranks`` of those
    that hold parts of one model.
    """

    hidden_size: int | None = None
    dtype: str | None = None
    arguments: Any = None
    replaced: frozenset[str] = frozenset()
    strict: bool = True
    for_trainer: bool = False
    sequence_ranks: int | None = None
    model_ranks: int = 1

    def argument(self, name: str) -> Any:
        """The trainer's argument ``name``, or None."""
        return values(lookup(self.arguments, name))


class Filled(NamedTuple):
    """A value in place of "auto", and its source. ``UNSET`` leaves the setting at its default."""

    value: object
    source: str


UNSET = object()
ARGUMENT = "args."
"""The source of a trainer's argument starts with this."""

Auto = Callable[[LoadContext], Filled]
"""Resolves "auto". Raises ValueError, with the remedy, if the value is not known."""


KEYS_BY_ARGUMENT = {
    "learning_rate": "optimizer.params.lr",
    "adam_beta1": "optimizer.params.betas",
    "adam_beta2": "optimizer.params.betas",
    "adam_epsilon": "optimizer.params.eps",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "warmup_steps": "scheduler.params.warmup_num_steps",
    "max_steps": "scheduler.params.total_num_steps",
}
"""The keys of DeepSpeed's files, by the trainer's names for them."""


def default(source: str) -> Auto:
    """Leaves the setting at its default."""
    return lambda context: Filled(UNSET, source)


def of_hidden_size(rule: str, compute: Callable[[int], int], fallback: str) -> Auto:
    """Computes the value from the model's hidden size h."""

    def fill(context: LoadContext) -> Filled:
        if context.hidden_size is None:
            return Filled(UNSET, f"{fallback}; {rule} if the model has a hidden size h")
        return Filled(compute(context.hidden_size), f"{rule}, h = {context.hidden_size}")

    return fill


def of_precision(name: str) -> Auto:
    """The trainer's argument ``name``, or whether the model's parameters have that dtype."""

    def fill(context: LoadContext) -> Filled:
        value = context.argument(name)
        if value is not None:
            # A trainer evaluates in the precision in which it computes.
            return Filled(value or bool(context.argument(f"{name}_full_eval")), f"{ARGUMENT}{name}")
        if context.dtype is None:
            return Filled(False, f"true if the model's parameters are {name}")
        return Filled(context.dtype == name, f"the model's parameters are {context.dtype}")

    return fill


def argument(name: str, fallback: Filled | None = None) -> Auto:
    """The trainer's argument ``name``, or ``otherwise``. Without both, "auto" is refused."""

    def fill(context: LoadContext) -> Filled:
        value = context.argument(name)
        if value is not None:
            return Filled(value, f"{ARGUMENT}{name}")
        if fallback is None:
            raise ValueError(missing_argument(name))
        return fallback

    return fill


def betas(context: LoadContext) -> Filled:
    """Adam's betas, which trainers have as two arguments."""
    arguments = {name: context.argument(name) for name in _BETAS if context.argument(name) is not None}
    if not arguments:
        return Filled(UNSET, "the optimizer's default")
    return Filled([*(_BETAS | arguments).values()], ", ".join(f"{ARGUMENT}{name}" for name in arguments))


_BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999}
"""A trainer's arguments for the betas, with their defaults."""


def warmup_steps(context: LoadContext) -> Filled:
    """``warmup_steps``, or ``warmup_ratio`` of ``max_steps`` if ``warmup_steps`` is 0, as in trainers."""
    steps, ratio, total = (_number(context, name) for name in ("warmup_steps", "warmup_ratio", "max_steps"))
    if steps is None and ratio is None:
        raise ValueError(missing_argument("warmup_steps"))
    # Newer trainers allow a fraction in warmup_steps, in place of warmup_ratio.
    if isinstance(steps, float) and 0 < steps < 1:
        steps, ratio = None, steps
    if steps or not ratio:
        return Filled(whole_number(steps or 0), "args.warmup_steps")
    if total is None or total <= 0:
        raise ValueError(missing_argument("max_steps"))
    return Filled(math.ceil(ratio * total), "args.warmup_ratio of args.max_steps")


def total_steps(context: LoadContext) -> Filled:
    """``max_steps``, which trainers set to -1 if they count epochs."""
    steps = _number(context, "max_steps")
    if steps is None or steps <= 0:
        raise ValueError(missing_argument("max_steps"))
    return Filled(steps, "args.max_steps")


def _number(context: LoadContext, name: str) -> float | None:
    value = context.argument(name)
    if value is None or (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ):
        return value
    raise ValueError(f"args.{name} is {value!r}; a number is needed")


def missing_argument(name: str) -> str:
    """The error text if the trainer's argument ``name`` is missing."""
    return f"'auto' needs a trainer's argument: set a number, or pass initialize(args=...) with {name}"


_HIDDEN = ("hidden_size", "hidden_sizes", "d_model", "n_embd")


def hidden_size_of(config: Any) -> int | None:
    """The hidden size in a transformers configuration or its JSON; of the text model if it has several models."""
    for section in (config, lookup(config, "text_config")):
        for name in _HIDDEN:
            value = lookup(section, name)
            sizes = value if isinstance(value, list | tuple) else [value]
            if sizes and all(type(size) is int and size > 0 for size in sizes):
                return int(max(sizes))
    return None


def lookup(container: Any, name: str) -> Any:
    """The value of ``name`` in a mapping or a namespace, or None."""
    return container.get(name) if isinstance(container, Mapping) else getattr(container, name, None)
