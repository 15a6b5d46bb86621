"""A file for a trainer whose arguments are not known: assumed arguments take their place, and the report names them.

Which keys a file honours does not depend on the numbers that a trainer fills in. So any valid ones will do, and the
report shows "auto" in their place.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tiering.config.ds_config.auto import ARGUMENT, LoadContext
from tiering.config.ds_config.key_report import KeyEntry, Origin
from tiering.config.ds_config.trainer import BATCH, MICRO

_ASSUMED = {
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "warmup_steps": 1,
    # More than any number of warm-up steps in a file.
    "max_steps": 1 << 40,
}
_FACTORS = {MICRO: 1, "gradient_accumulation_steps": 1}


class AssumedArguments:
    """The arguments that are assumed for ``config`` beside those of ``context``."""

    def __init__(self, config: Mapping[str, Any], context: LoadContext) -> None:
        self._assumed: dict[str, object] = {**_ASSUMED, **_precision(config)}
        # Numbers of a trainer might contradict a whole batch in the file; factors follow from it.
        if config.get("train_batch_size") in (None, "auto"):
            self._assumed |= {BATCH[key]: factor for key, factor in _FACTORS.items()}
        for name in [name for name in self._assumed if context.argument(name) is not None]:
            del self._assumed[name]
        self._knows_batch = all(context.argument(BATCH[key]) is not None for key in _FACTORS)
        given: Mapping[str, object] = context.arguments or {}
        # Assumed values must not be compared with those of the file.
        self.context = replace(context, arguments=ChainMap(self._assumed, dict(given)), strict=False)

    def mark(self, entries: tuple[KeyEntry, ...]) -> tuple[KeyEntry, ...]:
        """The entries, with "auto" and the names of the arguments in place of values from assumed arguments."""
        return tuple(self._marked(entry) for entry in entries)

    def _marked(self, entry: KeyEntry) -> KeyEntry:
        if entry.origin is not Origin.AUTO:
            return entry
        names = re.findall(rf"{re.escape(ARGUMENT)}(\w+)", entry.note)
        if entry.key in BATCH and not self._knows_batch:
            names = [BATCH[entry.key]] if BATCH[entry.key] else [BATCH[key] for key in _FACTORS]
        elif not self._assumed.keys() & set(names):
            return entry
        note = f"filled by the trainer: {', '.join(names)}"
        return replace(entry, value="auto", origin=Origin.TRAINER, off=False, note=note)


def _precision(config: Mapping[str, Any]) -> dict[str, bool]:
    """One precision, of those for which the file has "auto": fp16 comes first, because only it has keys of its own."""
    open_ = [name for name in ("fp16", "bf16") if _enabled(config, name) == "auto"]
    is_fixed = any(_enabled(config, name) is True for name in ("fp16", "bf16"))
    return {name: not is_fixed and name == open_[0] for name in open_}


def _enabled(config: Mapping[str, Any], section: str) -> object:
    content = config.get(section)
    return content.get("enabled") if isinstance(content, Mapping) else None


def open_parts(entries: tuple[KeyEntry, ...]) -> Iterator[str]:
    """What a trainer decides of what the summary of a configuration shows: "batch", "precision", "clipping"."""
    keys = {entry.key for entry in entries if entry.origin is Origin.TRAINER}
    if keys & BATCH.keys():
        yield "batch"
    if keys & {"fp16.enabled", "bf16.enabled"}:
        yield "precision"
    if "gradient_clipping" in keys:
        yield "clipping"
