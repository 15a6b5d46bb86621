"""Numbers that JSON does not have."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import PlainSerializer, WithJsonSchema

# JSON has no NaN, and a diverged loss must not look like a missing one.
Number = Annotated[
    float,
    PlainSerializer(lambda value: _named(value), return_type=float | str),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}),
]


def _named(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
