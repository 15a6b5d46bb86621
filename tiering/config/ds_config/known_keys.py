"""All known keys by their dotted paths: those of the table, and those of the native ``tiering`` block.

The keys of the native block come from the schema, but for a second name of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tiering.config.ds_config.auto import default
from tiering.config.ds_config.converters import from_bool
from tiering.config.ds_config.keys import FILE
from tiering.config.ds_config.verdicts import KeyRule, KeyVerdict, Tree, from_schema, mapped
from tiering.config.monitor import MonitorConfig
from tiering.config.step_policy import StepPolicy
from tiering.config.training import TiersConfig

_TO_DEFAULT = default("its default")

# DeepSpeed removes "auto" from these sections before it reads them, and so uses the default.
_DROPS_AUTO = (
    "zero_optimization.",
    "fp16.",
    "bf16.",
    "bfloat16.",
    "aio.",
    *(f"{name}." for name in MonitorConfig.model_fields),
)


def _with_auto(key: str, rule: KeyRule) -> KeyRule:
    if not key.startswith(_DROPS_AUTO) or key == "zero_optimization.stage":
        return rule
    if rule.verdict is KeyVerdict.REFUSED:
        off = rule.off
        drops = (lambda value: value == "auto" or off(value)) if callable(off) else (*off, "auto")
        return replace(rule, off=drops)
    return rule if rule.auto else replace(rule, auto=_TO_DEFAULT)


def _flat(tree: Tree, prefix: str = "") -> Iterator[tuple[str, KeyRule]]:
    for name, key in tree.items():
        if isinstance(key, KeyRule):
            yield f"{prefix}{name}", key
        else:
            yield from _flat(key, f"{prefix}{name}.")


_NATIVE = {
    **from_schema(TiersConfig, "tiering"),
    "step_in_backward": mapped(
        "tiering.step", read=from_bool({True: StepPolicy.IN_BACKWARD.value}), off=(False,)
    ),
}

KEYS: dict[str, KeyRule] = {key: _with_auto(key, rule) for key, rule in _flat({**FILE, "tiering": _NATIVE})}
"""Every known key by its dotted path."""

SECTIONS: frozenset[str] = frozenset(
    key.rsplit(".", depth)[0] for key in KEYS for depth in range(1, key.count(".") + 1)
)
"""The dotted paths of all sections."""
