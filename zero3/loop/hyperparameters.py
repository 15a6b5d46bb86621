"""Hyperparameters of an optimizer, in words: so that ranks can compare theirs before a step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from tiering.errors import ConfigError

DIGEST_BYTES = 6  # a float64 holds every integer of 48 bits


def described(param_groups: Iterable[Mapping[str, Any]], names: Iterable[str]) -> list[str]:
    """A line for each of the options ``names`` in each group. What a script keeps there beside them is its own."""
    names = sorted(names)
    return [
        f"{name} {_value(group[name])} in param group {number}"
        for number, group in enumerate(param_groups)
        for name in names
        if name in group
    ]


def digest(lines: Iterable[str]) -> float:
    """A number that differs where ``lines`` do."""
    return float(int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:DIGEST_BYTES]))


def check_same(of_ranks: Sequence[Sequence[str]], step: int) -> None:
    """ConfigError that names the first of the lines ``of_ranks``, as ``described``, that is not rank 0's."""
    for rank, lines in enumerate(of_ranks):
        if lines == of_ranks[0]:
            continue
        pairs = zip((*of_ranks[0], "none"), (*lines, "none"), strict=False)
        first, other = next((a, b) for a, b in pairs if a != b)
        raise ConfigError(
            f"hyperparameters differ between ranks in step {step}: the optimizer has {first} on rank 0, and {other} on"
            f" rank {rank}. Set the same values on all ranks: give a scheduler that follows a metric"
            " (ReduceLROnPlateau) the mean over the ranks, as by torch.distributed.all_reduce"
        )


def _value(value: Any) -> str:
    """Equal for equal numbers, whatever holds them."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_value, value))})"
    return str(value)
