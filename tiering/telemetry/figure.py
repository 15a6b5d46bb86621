"""The declaration of a figure at its field: one text and one metric, for answers, metrics and documentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Figure:
    """What the number in a field is, and its name in Prometheus; a figure without a name is not a metric.

    The name says type and unit, as Prometheus recommends: a counter ends in ``_total``, everything else is a gauge.
    If the field holds a dict, ``by`` names one label for each level of its keys, the outermost first. Fields that share
    a Figure are one metric, and differ in a Label.
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

    Without ``value`` the field is the label: its value labels all figures of the record. With ``value`` the label has
    that value for the figure, or the record, in the field.
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
