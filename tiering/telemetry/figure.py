"""Declares help text and metric name at a field; the HTTP API, the metrics and their documentation use both.

This module also has the types of numbers in published fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from pydantic import AllowInfNan, Field, WithJsonSchema

Integer = Annotated[
    int, Field(ge=-(1 << 63), lt=1 << 63), WithJsonSchema({"type": "integer", "format": "int64"})
]
"""A 64-bit integer. A larger number means a damaged file, and may not fit a float."""

Diverging = Annotated[
    float,
    AllowInfNan(True),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}),
]
"""A result of training, which may be infinite or NaN."""


@dataclass(frozen=True)
class Figure:
    """The help text of a field, and its metric name in Prometheus; a figure without a name is not a metric.

    The name says type and unit, as Prometheus recommends: a counter ends in ``_total``, all others are gauges.
    If the field holds a dict, ``by`` has one label name for each level of its keys, the outermost first. Fields with
    the same Figure are one metric, and differ in a Label.
    """

    help: str
    metric: str = ""
    by: tuple[str, ...] = ()

    def __get_pydantic_json_schema__(
        self, schema: Any, describe: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        return describe(schema) | {"description": self.help}


@dataclass(frozen=True)
class Label:
    """A label of the metrics in a record.

    Without ``value``, the value of the field labels all figures of the record. With ``value``, the label has that value
    for the figure, or the record, in the field.
    """

    name: str
    value: str = ""


def marks(record: type) -> dict[str, dict[type, Any]]:
    """The fields of ``record`` with their Figures and Labels, by class."""
    return {
        field: {type(mark): mark for mark in getattr(hint, "__metadata__", ())}
        for field, hint in get_type_hints(record, include_extras=True).items()
    }


def figures(record: type) -> dict[str, Figure]:
    """The Figures of the fields of ``record`` that have one, by the name of the field."""
    return {field: of[Figure] for field, of in marks(record).items() if Figure in of}
