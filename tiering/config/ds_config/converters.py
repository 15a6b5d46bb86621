"""Converts values of DeepSpeed's files to those of the native schema; tests whether a section requests a feature."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from tiering.config.fields import ALIGNMENT, whole_number
from tiering.config.optimizer import RULES, UNSUPPORTED_OPTIMIZERS
from tiering.config.training import MAX_QUEUE_DEPTH


def from_bool(choices: Mapping[bool, object]) -> Callable[[Any], object]:
    """A converter of true and false to the values in ``choices``."""

    def read(value: object) -> object:
        if isinstance(value, bool) and value in choices:
            return choices[value]
        raise ValueError(f"true or false is needed, not {value!r}")

    return read


def expand_variables(value: object) -> object:
    """Paths with environment variables expanded; the schema expands ``~``."""
    if isinstance(value, list | tuple):
        return [expand_variables(each) for each in value]
    return _VARIABLE.sub(_variable, value) if isinstance(value, str) else value


def _variable(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    value = os.environ.get(name)
    if not value:
        raise ValueError(f"the environment variable {name} is not set; set it, or write the directory")
    return value


_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)", re.ASCII)


def align_up(size: object) -> object:
    """``size`` in bytes, rounded up to whole blocks of a drive."""
    nbytes = whole_number(size)
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def limit_queue_depth(requests: object) -> object:
    """The queue depth, at most the maximum of a path; more requests would only wait in another queue."""
    return min(whole_number(requests), MAX_QUEUE_DEPTH)


def update_rule(name: object) -> object:
    """``name`` in the spelling of the schema; DeepSpeed compares names of optimizers in lower case."""
    rules = {rule.lower(): rule for rule in (*RULES, *UNSUPPORTED_OPTIMIZERS)}
    return rules.get(name.lower(), name) if isinstance(name, str) else name


def dtype_among(*dtypes: str) -> Callable[[object], object]:
    """A converter that accepts every name of a dtype that DeepSpeed accepts."""

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
    """Whether ``section`` or a section inside it has ``enabled: true``."""
    if not isinstance(section, Mapping):
        return section not in (None, False)
    return any(
        value is True if name == "enabled" else enabled_anywhere(value)
        for name, value in section.items()
        if isinstance(value, Mapping) or name == "enabled"
    )


def splits_tensors(section: object) -> bool:
    """Whether ``section`` requests tensor parallelism over more than one rank."""
    if not isinstance(section, Mapping):
        return section not in (None, False)
    inner = (section.get(name) for name in ("tp", "tensor_parallel"))
    sizes = [
        section.get("autotp_size"),
        *(each.get("tp_size") for each in inner if isinstance(each, Mapping)),
    ]
    return any(size not in (None, 0, 1, "auto") for size in sizes)
