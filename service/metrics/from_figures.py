"""Metrics made of the Figures of telemetry's records: one Family for each name that their fields have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from service.metrics.families import Family
from tiering.telemetry import Figure, Label, marks

Subject = TypeVar("Subject")
Labels = tuple[str, ...]
Owners = Callable[[Any], Iterable[tuple[Labels, Any]]]
"""The records of one type in a subject, each with the values of its labels."""
Numbers = Callable[[Any], dict[Labels, Any]]
"""What a field of these records says, by the values of its labels."""


def declared(record: type[Subject]) -> tuple[Family[Subject], ...]:
    """The metrics that the fields of ``record``, and of the records in it, declare, in their order."""
    found: dict[str, tuple[Figure, Labels, list[Numbers]]] = {}
    for figure, labels, numbers in _figures(record, (), lambda subject: [((), subject)]):
        first, same, fields = found.setdefault(figure.metric, (figure, labels, []))
        assert (first, same) == (figure, labels), f"{figure.metric} is declared in two ways"
        fields.append(numbers)
    return tuple(
        Family(
            "counter" if name.endswith("_total") else "gauge", name, figure.help, labels, _together(fields)
        )
        for name, (figure, labels, fields) in found.items()
    )


def _together(fields: list[Numbers]) -> Numbers:
    if len(fields) == 1:
        return fields[0]
    return lambda subject: {labels: value for numbers in fields for labels, value in numbers(subject).items()}


def _figures(record: type, names: Labels, owners: Owners) -> Iterator[tuple[Figure, Labels, Numbers]]:
    """Each Figure with a metric in ``record``, the names of its labels, and its numbers."""
    marked = marks(record)
    for field, hint in get_type_hints(record).items():
        figure, label = marked[field].get(Figure), marked[field].get(Label, Label(""))
        of_field, values = ((*names, label.name), (label.value,)) if label.value else (names, ())
        inner = next((held for held in (hint, *get_args(hint)) if is_dataclass(held)), None)
        if isinstance(inner, type):
            key, of_key = _key(inner)
            yield from _figures(inner, (*of_field, *of_key), _held(owners, field, values, key))
        elif figure is not None and figure.metric:
            yield figure, (*of_field, *figure.by), _numbers(owners, field, values, len(figure.by))


def _key(record: type) -> tuple[str, Labels]:
    """The field of ``record`` whose value is that of a label, and the label; empty without one."""
    labels = {field: of[Label] for field, of in marks(record).items() if Label in of}
    return next(((field, (label.name,)) for field, label in labels.items() if not label.value), ("", ()))


def _held(owners: Owners, field: str, labels: Labels, key: str) -> Owners:
    """The records in ``field``: one, a list of them, or None. Of each, ``key`` is the value of one more label."""

    def records(subject: Any) -> Iterator[tuple[Labels, Any]]:
        for values, one in owners(subject):
            held = getattr(one, field)
            for record in held if isinstance(held, list) else () if held is None else (held,):
                yield values + labels + ((getattr(record, key),) if key else ()), record

    return records


def _numbers(owners: Owners, field: str, labels: Labels, depth: int) -> Numbers:
    """What is in ``field``: a number, or dicts of them within ``depth`` dicts."""

    def numbers(subject: Any) -> dict[Labels, Any]:
        found = {values + labels: getattr(one, field) for values, one in owners(subject)}
        for _ in range(depth):
            found = {(*keys, key): inner for keys, by in found.items() for key, inner in by.items()}
        return found

    return numbers
