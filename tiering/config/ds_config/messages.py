"""Why a key is refused, and what may have been meant, in words."""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

from tiering.config.ds_config.auto import TRAINERS_NAMES
from tiering.config.ds_config.keys import KEYS, SECTIONS
from tiering.config.optimizer import RULES

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

AUTO = "'auto' is for a trainer to fill in; give a value"


_ALIKE = 0.7  # of difflib's measure: "warmup" is not a mistyped "amp"


def no_rule(name: str) -> str:
    """Why there is no optimizer of ``name``, which may be that of a class."""
    bare = name.rpartition(".")[2]
    rules = {rule.lower(): rule for rule in RULES}
    for prefix in ("", "Fused", "DeepSpeedCPU"):
        if rule := rules.get(bare.removeprefix(prefix).lower()):
            return f"no optimizer has the name {name!r}; did you mean {rule!r}?"
    return (
        f"no {bare} has a kernel here, but {', '.join(RULES)} have; another optimizer is for"
        f" initialize(optimizer=torch.optim.{bare}(...))"
    )


def reason(problem: ErrorDetails) -> str:
    if problem["input"] == "auto":
        return AUTO
    if problem["type"] == "missing":
        return f"a value is missing in {problem['input']!r}"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return f"{problem['msg'].removeprefix('Input ')}, not {problem['input']!r}"


def suggestion(key: str, known: Iterable[str]) -> str:
    """What ``key`` may have been meant as; ``known`` are the names below its section."""
    if "." in key.partition('"')[2]:
        return "a dot in a name means nothing here; nest the sections"
    name = key.rpartition(".")[2]
    elsewhere = sorted(path for path in (*KEYS, *SECTIONS) if path.rpartition(".")[2] == name)
    if elsewhere and len(elsewhere) <= 2:
        return f"did you mean {' or '.join(elsewhere)}?"
    if "comment" in name.lower():
        return "a remark is written behind // or #"
    siblings = {path.partition(".")[0] for path in known}
    similar = get_close_matches(name.lower(), sorted(siblings), n=1, cutoff=_ALIKE)
    if similar:
        return f"did you mean {similar[0]}?"
    if name in TRAINERS_NAMES:
        return f"did you mean {TRAINERS_NAMES[name]}?"
    leaves = {path.rpartition(".")[2]: path for path in KEYS}
    further = get_close_matches(name.lower(), sorted(leaves), n=1, cutoff=0.8)
    return (
        f"did you mean {leaves[further[0]]}?"
        if further
        else "remove it: neither DeepSpeed nor tiering has it"
    )


def dotted(path: Iterable[str]) -> str:
    """``path`` as one text. Quoted, a name with dots in it cannot pass for the path of a nested key, nor another one
    for a command to a terminal."""
    return ".".join(
        name if name and "." not in name and name.isprintable() else json.dumps(name) for name in path
    )
