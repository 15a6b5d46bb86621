"""Metrics from the Figures that telemetry's records declare: one Family per metric name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from service.metrics.families import Family
from tiering.telemetry import Figure, Label, marks

Subject = TypeVar("Subject")
Labels = tuple[str, ...]
Owners = Callable[[Any], Iterable[tuple[Labels, Any]]]
"""Returns the records of one type in a subject, each with its label values."""
Numbers = Callable[[Any], dict[Labels, Any]]
"""Returns the numbers in one field of these records, by label values."""


def families_of(record: type[Subject]) -> tuple[Family[Subject], ...]:
    """The metrics declared by the fields of ``record`` and of the records in it, in order."""
    families: dict[str, tuple[Figure, Labels, list[Numbers]]] = {}
    for figure, labels, numbers in _figures(record, (), lambda subject: [((), subject)]):
        first_figure, first_labels, fields = families.setdefault(figure.metric, (figure, labels, []))
        assert (first_figure, first_labels) == (figure, labels), f"{figure.metric} is declared in two ways"
        fields.append(numbers)
    return tuple(
        Family("counter" if name.endswith("_total") else "gauge", name, figure.help, labels, _merged(fields))
        for name, (figure, labels, fields) in families.items()
    )


def _merged(fields: list[Numbers]) -> Numbers:
    if len(fields) == 1:
        return fields[0]
    return lambda subject: {labels: value for numbers in fields for labels, value in numbers(subject).items()}


def _figures(record: type, names: Labels, owners: Owners) -> Iterator[tuple[Figure, Labels, Numbers]]:
    """Each Figure in ``record`` that has a metric, with its label names and its numbers."""
    marked = marks(record)
    for field, hint in get_type_hints(record).items():
        figure, label = marked[field].get(Figure), marked[field].get(Label, Label(""))
        field_labels, values = ((*names, label.name), (label.value,)) if label.value else (names, ())
        inner = next((kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)), None)
        if isinstance(inner, type):
            key, key_labels = _key(inner)
            yield from _figures(inner, (*field_labels, *key_labels), _records_of(owners, field, values, key))
        elif figure is not None and figure.metric:
            yield figure, (*field_labels, *figure.by), _numbers(owners, field, values, len(figure.by))


def _key(record: type) -> tuple[str, Labels]:
    """The field of ``record`` whose value is a label value, and the label's name; empty if there is none."""
    labels = {field: of[Label] for field, of in marks(record).items() if Label in of}
    return next(((field, (label.name,)) for field, label in labels.items() if not label.value), ("", ()))


def _records_of(owners: Owners, field: str, labels: Labels, key: str) -> Owners:
    """The records in ``field``, which is a record, a list of records, or None. ``key`` is a further label value."""

    def records(subject: Any) -> Iterator[tuple[Labels, Any]]:
        for values, owner in owners(subject):
            content = getattr(owner, field)
            for record in content if isinstance(content, list) else () if content is None else (content,):
                yield values + labels + ((getattr(record, key),) if key else ()), record

    return records


def _numbers(owners: Owners, field: str, labels: Labels, depth: int) -> Numbers:
    """The numbers in ``field``, which is a number or ``depth`` nested dicts of numbers."""

    def numbers(subject: Any) -> dict[Labels, Any]:
        by_labels = {values + labels: getattr(owner, field) for values, owner in owners(subject)}
        for _ in range(depth):
            by_labels = {(*keys, key): inner for keys, by in by_labels.items() for key, inner in by.items()}
        return by_labels

    return numbers
