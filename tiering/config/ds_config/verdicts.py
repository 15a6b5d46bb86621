"""The rule of a key, and the functions that the table of keys is written with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, get_origin

from pydantic import BaseModel

from tiering.config.ds_config.auto import Auto, default


class KeyVerdict(StrEnum):
    """How a key is treated."""

    # The key has the same meaning as in DeepSpeed.
    HONOURED = "honoured"
    # A native setting with another name or value has the same purpose.
    MAPPED = "mapped"
    # The key changes nothing; the note says why.
    NO_EFFECT = "no effect"
    # An old name, which is translated.
    DEPRECATED = "deprecated"
    # The key would change the training and is not supported: loading fails.
    REFUSED = "refused"


Off = tuple[object, ...] | Callable[[object], bool]


@dataclass(frozen=True)
class KeyRule:
    """The rule of a key, or of a section whose keys all have the same rule."""

    verdict: KeyVerdict
    # The dotted field of `TieringConfig` that the key sets, to the value that `read` returns.
    to: str = ""
    note: str = ""
    # Converts the value, or raises ValueError; None uses the value unchanged.
    read: Callable[[Any], object] | None = None
    # The values that request nothing, or a predicate of them.
    off: Off = ()
    # Resolves "auto"; None refuses it.
    auto: Auto | None = None
    # The names in a section whose keys all have this rule; "a.*" is every name in a.
    inside: frozenset[str] = frozenset()

    def has_inside(self, path: str) -> bool:
        """Whether the section of this rule contains the dotted name ``path``."""
        sections = [path[:end] for end in range(len(path) + 1) if path[end:].startswith(".")]
        return (
            path in self.inside
            or "*" in self.inside
            or any(f"{section}.*" in self.inside for section in sections)
        )

    def requests_nothing(self, value: object) -> bool:
        """Whether ``value`` leaves the feature off; a section is off if it is empty or has ``enabled: false``."""
        if callable(self.off):
            return self.off(value)
        if isinstance(value, Mapping):
            return bool(self.off) and (not value or value.get("enabled") is False)
        return bool(self.off) and (value is None or value in self.off)


Tree = dict[str, "KeyRule | Tree"]


def honoured(
    to: str,
    *,
    read: Callable[[Any], object] | None = None,
    auto: Auto | None = None,
    off: Off = (),
) -> KeyRule:
    return KeyRule(KeyVerdict.HONOURED, to, read=read, auto=auto, off=off)


def mapped(
    to: str,
    *,
    read: Callable[[Any], object] | None = None,
    off: Off = (),
    auto: Auto | None = None,
) -> KeyRule:
    return KeyRule(KeyVerdict.MAPPED, to, read=read, off=off, auto=auto)


def no_effect(note: str, inside: str = "", *, off: Off = ()) -> KeyRule:
    """``off`` are the values that request the behaviour that tiering always has."""
    return KeyRule(
        KeyVerdict.NO_EFFECT,
        note=note,
        off=off,
        auto=default("its default"),
        inside=frozenset(inside.split()),
    )


def deprecated(
    note: str, to: str = "", *, read: Callable[[Any], object] | None = None, off: Off = ()
) -> KeyRule:
    return KeyRule(KeyVerdict.DEPRECATED, to, note, read, off, default("its default"))


def refused(
    note: str, *off: object, is_request: Callable[[object], bool] | None = None, inside: str = ""
) -> KeyRule:
    """``off`` are the values that request nothing; ``is_request`` is a predicate of those that request something.

    ``parsing.py`` adds the line to delete to the note.
    """
    asks = is_request
    nothing: Off = (lambda value: not asks(value)) if asks else off or (None,)
    return KeyRule(KeyVerdict.REFUSED, note=note, off=nothing, inside=frozenset(inside.split()))


def subsection(section: str, names: str) -> str:
    """A subsection and its names, in the form of ``inside``."""
    return f" {section} " + " ".join(f"{section}.{name}" for name in names.split())


def for_each(names: str, key: KeyRule) -> Tree:
    """The same rule for each of the ``names``."""
    return dict.fromkeys(names.split(), key)


def from_schema(model: type[BaseModel], prefix: str) -> Tree:
    """A section whose keys are the fields of the native ``model``; ``prefix`` is the path of its native settings."""
    tree: Tree = {}
    for name, info in model.model_fields.items():
        kind: object = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            tree[name] = from_schema(kind, f"{prefix}.{name}")
        elif get_origin(kind) is dict:
            # Its names are the user's.
            tree[name] = replace(honoured(f"{prefix}.{name}"), inside=frozenset("*"))
        else:
            tree[name] = honoured(f"{prefix}.{name}")
    return tree
