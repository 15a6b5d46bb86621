"""Error texts for refused keys, and suggestions for misspelt keys."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tiering._text import similar
from tiering.config.ds_config.auto import KEYS_BY_ARGUMENT
from tiering.config.ds_config.known_keys import KEYS, SECTIONS
from tiering.config.optimizer import RULES

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

AUTO = "'auto' is only for keys that a trainer fills in; set a value"


def unknown_optimizer(name: str) -> str:
    """The error text for an unknown optimizer ``name``, which may be a class name."""
    bare = name.rpartition(".")[2]
    rules = {rule.lower(): rule for rule in RULES}
    for prefix in ("", "Fused", "DeepSpeedCPU"):
        if rule := rules.get(bare.removeprefix(prefix).lower()):
            return f"unknown optimizer {name!r}; did you mean {rule!r}?"
    return (
        f"no kernel for optimizer {bare}; the kernels are {', '.join(RULES)}, which train differently. To keep {bare},"
        f" pass it as an object: initialize(optimizer={bare}(...)), or the trainer's argument"
    )


def reason(problem: ErrorDetails) -> str:
    """The text of an error of the schema."""
    if problem["input"] == "auto":
        return AUTO
    if problem["type"] == "missing":
        return f"missing value in {problem['input']!r}"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return f"{problem['msg'].removeprefix('Input ')}, not {problem['input']!r}"


def suggestion(key: str, names: Iterable[str]) -> str:
    """A suggestion for the unknown ``key``; ``known`` are the names in its section."""
    if "." in key.partition('"')[2]:
        return "a key cannot contain a dot; nest the sections"
    name = key.rpartition(".")[2]
    elsewhere = sorted(path for path in (*KEYS, *SECTIONS) if path.rpartition(".")[2] == name)
    if elsewhere and len(elsewhere) <= 2:
        return f"did you mean {' or '.join(elsewhere)}?"
    if "comment" in name.lower():
        return "write a comment after // or #"
    siblings = {path.partition(".")[0] for path in names}
    if name in KEYS_BY_ARGUMENT:
        return f"did you mean {KEYS_BY_ARGUMENT[name]}?"
    if near := similar(name, siblings):
        return f"did you mean {near}?"
    leaves = {path.rpartition(".")[2]: path for path in KEYS}
    if near := similar(name, leaves):
        return f"did you mean {leaves[near]}?"
    return "remove it: neither DeepSpeed nor tiering has it"


def dotted(path: Iterable[str]) -> str:
    """``path`` joined by dots.

    Names with dots are quoted, because they are not paths of nested keys; so are names with control characters, which
    a terminal would interpret.
    """
    return ".".join(
        name if name and "." not in name and name.isprintable() else json.dumps(name) for name in path
    )
