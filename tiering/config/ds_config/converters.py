"""Values as DeepSpeed's files have them, read into what the native schema takes; and which ask for nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from tiering.config.fields import ALIGNMENT, whole_number
from tiering.config.optimizer import RULES
from tiering.config.training import DEEPEST


def one_of(choices: Mapping[bool, object]) -> Callable[[Any], object]:
    def read(value: object) -> object:
        if isinstance(value, bool) and value in choices:
            return choices[value]
        raise ValueError(f"true or false is needed, not {value!r}")

    return read


def expanded(given: object) -> object:
    """Paths with the variables of the environment in them filled in; ``~`` is the schema's."""
    if isinstance(given, list | tuple):
        return [expanded(each) for each in given]
    return _VARIABLE.sub(_variable, given) if isinstance(given, str) else given


def _variable(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    value = os.environ.get(name)
    if not value:
        raise ValueError(f"the environment has no {name}, which it names; set it, or write the directory")
    return value


_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)", re.ASCII)


def aligned(size: object) -> object:
    """Requests are of whole blocks of a drive: the next larger one is as good."""
    nbytes = whole_number(size)
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def depth(wanted: object) -> object:
    """More requests than a path takes at a time only wait elsewhere."""
    return min(whole_number(wanted), DEEPEST)


def update_rule(name: object) -> object:
    # DeepSpeed compares the names of its own optimizers in lower case.
    known = {rule.lower(): rule for rule in RULES}
    return known.get(name.lower(), name) if isinstance(name, str) else name


def dtype_among(*dtypes: str) -> Callable[[object], object]:
    """Reads a dtype by any of the names that DeepSpeed takes for it."""

    def read(name: object) -> str:
        for dtype in dtypes:
            if isinstance(name, str) and name.lower().removeprefix("torch.") in _DTYPES[dtype]:
                return dtype
        raise ValueError(f"one of {', '.join(dtypes)} is needed, not {name!r}")

    return read


_DTYPES = {
    "fp32": ("fp32", "float32", "float"),
    "bf16": ("bf16", "bfloat16"),
    "fp16": ("fp16", "float16", "half"),
}


def enabled_anywhere(section: object) -> bool:
    if not isinstance(section, Mapping):
        return section not in (None, False)
    return any(
        value is True if name == "enabled" else enabled_anywhere(value)
        for name, value in section.items()
        if isinstance(value, Mapping) or name == "enabled"
    )


def splits_tensors(section: object) -> bool:
    """Over more than one rank."""
    if not isinstance(section, Mapping):
        return section not in (None, False)
    inner = (section.get(name) for name in ("tp", "tensor_parallel"))
    sizes = [
        section.get("autotp_size"),
        *(each.get("tp_size") for each in inner if isinstance(each, Mapping)),
    ]
    return any(size not in (None, 0, 1, "auto") for size in sizes)
