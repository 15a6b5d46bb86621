"""The keys of a configuration that a trainer's arguments set, too: their counterparts among the arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tiering.config.ds_config.auto import ARGUMENT, Filled, LoadContext
from tiering.config.ds_config.key_report import KeyEntry, Origin
from tiering.config.ds_config.known_keys import KEYS

MICRO = "train_micro_batch_size_per_gpu"
BATCH = {
    "train_batch_size": "",
    MICRO: "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
"""The three batch numbers, and the trainer's arguments for their "auto"."""

WARMUP = "scheduler.params.warmup_num_steps"


def belong_to(arguments: Any, entries: Iterable[KeyEntry]) -> bool:
    """Whether ``arguments`` are those of the trainer for which the file of ``entries`` was written.

    A script may pass arguments of its own with the same names, which do not concern the file.
    """
    is_trainers = any(each.__name__ == "TrainingArguments" for each in type(arguments).__mro__)
    return arguments is not None and (is_trainers or any(each.origin is Origin.AUTO for each in entries))


def counterpart(key: str, context: LoadContext, world_size: int) -> Filled | None:
    """The value that "auto" would take from the trainer's arguments for ``key``; None if it takes none."""
    rule = KEYS.get(key)
    if key.partition(".")[0] in context.replaced:
        return None
    if key == "train_batch_size":
        return _whole_batch(context, world_size)
    if key in BATCH:
        value = context.argument(BATCH[key])
        return None if value is None else Filled(value, f"{ARGUMENT}{BATCH[key]}")
    if rule is None or rule.auto is None:
        return None
    try:
        filled = rule.auto(context)
    except ValueError:
        return None
    return filled if filled.source.startswith(ARGUMENT) else None


def _whole_batch(context: LoadContext, world_size: int) -> Filled | None:
    names = [name for name in BATCH.values() if name]
    factors = [context.argument(name) for name in names]
    if not all(type(factor) is int for factor in factors):
        return None
    source = f"{' x '.join(f'{ARGUMENT}{name}' for name in names)} x {world_size} ranks"
    return Filled(math.prod(factors) * world_size, source)
