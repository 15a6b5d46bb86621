"""What may become of a key, and the words in which the table of keys says it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tiering.config.ds_config.auto import Auto, default


class Verdict(StrEnum):
    """What became of a key."""

    HONOURED = "honoured"  # means here what it means in DeepSpeed
    MAPPED = "mapped"  # a native setting of another name or value serves its purpose
    NO_EFFECT = "no effect"  # nothing to do here; the note says why
    DEPRECATED = "deprecated"  # an old spelling, translated
    REFUSED = "refused"  # would change the training and cannot be done: loading fails


Off = tuple[object, ...] | Callable[[object], bool]


@dataclass(frozen=True)
class Key:
    """The fate of a key. ``to`` is the dotted field of ``TieringConfig`` that it sets, after ``read``."""

    verdict: Verdict
    to: str = ""
    note: str = ""
    read: Callable[[Any], object] | None = None  # raises ValueError; None takes the value as it is
    off: Off = ()  # values that ask for nothing, or what tells them
    auto: Auto | None = None  # what "auto" comes to; None refuses it
    # For a section whose keys share one fate: the names in it; "a.*" is every name in a.
    inside: frozenset[str] = frozenset()

    def has_inside(self, path: str) -> bool:
        """Whether a section that meets one fate has the dotted name ``path``."""
        sections = [path[:end] for end in range(len(path) + 1) if path[end:].startswith(".")]
        return (
            path in self.inside or "*" in self.inside or any(f"{each}.*" in self.inside for each in sections)
        )

    def asks_nothing(self, value: object) -> bool:
        """Whether ``value`` leaves the feature off; a section is off when it is empty or says so."""
        if callable(self.off):
            return self.off(value)
        if isinstance(value, Mapping):
            return bool(self.off) and (not value or value.get("enabled") is False)
        return bool(self.off) and (value is None or value in self.off)


Tree = dict[str, "Key | Tree"]


def same(
    to: str,
    *,
    read: Callable[[Any], object] | None = None,
    auto: Auto | None = None,
    off: Off = (),
) -> Key:
    return Key(Verdict.HONOURED, to, read=read, auto=auto, off=off)


def mapped(
    to: str,
    *,
    read: Callable[[Any], object] | None = None,
    off: Off = (),
    auto: Auto | None = None,
) -> Key:
    return Key(Verdict.MAPPED, to, read=read, off=off, auto=auto)


def no_effect(why: str, inside: str = "", *, off: Off = ()) -> Key:
    """``off`` are the values that ask for what is so anyway."""
    return Key(
        Verdict.NO_EFFECT, note=why, off=off, auto=default("its default"), inside=frozenset(inside.split())
    )


def deprecated(note: str, to: str = "", *, read: Callable[[Any], object] | None = None, off: Off = ()) -> Key:
    return Key(Verdict.DEPRECATED, to, note, read, off, default("its default"))


def refused(why: str, *off: object, when: Callable[[object], bool] | None = None, inside: str = "") -> Key:
    """``off`` are the values that ask for nothing, ``when`` says which ask for something.

    The line to delete is told by whoever reads the file.
    """
    asks = when
    nothing: Off = (lambda value: not asks(value)) if asks else off or (None,)
    return Key(Verdict.REFUSED, note=why, off=nothing, inside=frozenset(inside.split()))


def within(section: str, names: str) -> str:
    """A section inside of one that meets one fate, with its names, for ``inside``."""
    return f" {section} " + " ".join(f"{section}.{name}" for name in names.split())


def each(names: str, key: Key) -> Tree:
    return dict.fromkeys(names.split(), key)
