"""Hyperparameters of an optimizer as text, which ranks compare before a step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from tiering.errors import ConfigError

# A float64 represents every integer of 48 bits.
DIGEST_BYTES = 6


def described(param_groups: Iterable[Mapping[str, Any]], names: Iterable[str]) -> list[str]:
    """A line for each of the options ``names`` in each group. Other keys, which a script may add, are ignored."""
    names = sorted(names)
    return [
        f"{name} {_value(group[name])} in param group {number}"
        for number, group in enumerate(param_groups)
        for name in names
        if name in group
    ]


def digest(lines: Iterable[str]) -> float:
    """A number that represents ``lines``: 48 bits of their SHA-256."""
    return float(int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:DIGEST_BYTES]))


def check_same(options_of_ranks: Mapping[int, Sequence[str]], step: int) -> None:
    """ConfigError with the first line of ``options_of_ranks``, by rank, that differs from that of the first one."""
    (first_rank, expected), *others = options_of_ranks.items()
    for rank, lines in others:
        if lines == expected:
            continue
        pairs = zip((*expected, "none"), (*lines, "none"), strict=False)
        first, rank_options = next((a, b) for a, b in pairs if a != b)
        raise ConfigError(
            f"hyperparameters differ between ranks in step {step}: the optimizer has {first} on rank {first_rank}, and"
            f" {rank_options} on rank {rank}. Set the same values on all ranks: pass to a scheduler that follows a"
            " metric (ReduceLROnPlateau) the mean over the ranks, for example by torch.distributed.all_reduce"
        )


def _value(value: Any) -> str:
    """The text of a value: equal for equal numbers of any type."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_value, value))})"
    return str(value)
