"""What became of each key of a configuration, for people, for logs and for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tiering.config.ds_config.secrets import without_secrets
from tiering.config.ds_config.verdicts import Verdict
from tiering.telemetry import ConfigurationStatus, SettingStatus, as_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.style import StyleType


class Origin(StrEnum):
    """Where a value is from."""

    FILE = "file"
    AUTO = "auto"  # the file says "auto"
    DEFAULT = "default"  # the file says nothing


@dataclass(frozen=True)
class Entry:
    """A key by its dotted path, its value ("auto" filled in), and what became of it.

    ``note`` says what it does here, or why it is refused and what to do; ``off`` that it asks for nothing. ``line`` is
    that of the file, from 1, if there is one.
    """

    key: str
    value: object
    verdict: Verdict
    note: str = ""
    origin: Origin = Origin.FILE
    off: bool = False
    line: int | None = None

    def problem(self) -> str:
        """A refusal in one line."""
        where = "" if self.line is None else f" (line {self.line})"
        return f"{self.key}: {self.note}{where}"


@dataclass(frozen=True)
class Report:
    """Every given key, in the order of the file, with what was missing last; and the defaults of what was not given.

    ``source`` is the file's path; empty for a mapping. ``outcome`` is what it all comes to, in one line; empty if keys
    are refused.
    """

    entries: tuple[Entry, ...]
    defaults: tuple[Entry, ...] = ()
    source: str = ""
    outcome: str = ""

    @property
    def refused(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.verdict is Verdict.REFUSED)

    @property
    def without_effect(self) -> tuple[Entry, ...]:
        """Those that ask for something which is not done here."""
        return tuple(e for e in self.entries if e.verdict is Verdict.NO_EFFECT and not e.off)

    @property
    def deprecated(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.verdict is Verdict.DEPRECATED)

    def counts(self) -> dict[str, int]:
        """How many of the given keys met each fate."""
        found = Counter(str(entry.verdict) for entry in self.entries)
        return {str(verdict): found[str(verdict)] for verdict in Verdict}

    def short(self) -> str:
        """The report in one line, for the start of a run: what it comes to, and the keys that do less than they say."""
        said = [f"{self.source}: {self.outcome}" if self.source else self.outcome]
        if self.without_effect:
            said.append(f"without effect here: {_names(self.without_effect)}")
        if self.deprecated:
            said.append(f"deprecated: {_names(self.deprecated)}")
        if len(said) > 1:
            said.append(f"`tiering check {self.source or 'FILE'}` explains")
        return "; ".join(said)

    def status(self) -> ConfigurationStatus:
        """For telemetry: without secrets, and without bytes of file names that are no text."""
        return ConfigurationStatus(
            source=as_text(self.source),
            outcome=self.outcome,
            counts=self.counts(),
            without_effect=[entry.key for entry in self.without_effect],
            deprecated=[entry.key for entry in self.deprecated],
            settings=[_setting(entry) for entry in (*self.entries, *self.defaults)],
        )

    def shown(self, width: int, *, defaults: bool = False) -> RenderableType:
        """The report for a terminal of ``width`` columns, with what was not given if ``defaults``.

        A table; where there is no room for one, two lines for each key.
        """
        entries = (*self.entries, *(self.defaults if defaults else ()))
        return _table(entries) if width >= _TABLE_WIDTH else _lines(entries)

    def as_json(self) -> dict[str, Any]:
        """The report in values that JSON has."""
        return {
            "schema_version": SCHEMA_VERSION,
            # The former name, for programs that read it.
            "version": SCHEMA_VERSION,
            "file": self.source or None,
            "outcome": self.outcome or None,
            "counts": self.counts(),
            "keys": [_plain(entry) for entry in self.entries],
            "defaults": [_plain(entry) for entry in self.defaults],
        }


_COLOURS = {
    Verdict.HONOURED: "green",
    Verdict.MAPPED: "cyan",
    Verdict.NO_EFFECT: "yellow",
    Verdict.DEPRECATED: "magenta",
    Verdict.REFUSED: "bold red",
}
SCHEMA_VERSION = 1
_TABLE_WIDTH = 120  # columns
_NAMED = 6  # keys that a line names before it only counts them


def brief(value: object, longest: int = 40) -> str:
    """``value`` as JSON writes it, large whole numbers in full, cut to ``longest`` characters."""
    whole = isinstance(value, float) and value.is_integer() and 1e4 <= abs(value) < 1e16
    text = json.dumps(int(value) if whole else value, default=str)  # type: ignore[call-overload]  # a float then
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."


def _table(entries: Iterable[Entry]) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table
    from rich.text import Text

    key, value = Column("key", no_wrap=True), Column("value", overflow="fold")
    table = Table(key, value, "class", "from", Column("here", ratio=1), box=SIMPLE_HEAD, expand=True)
    for entry in entries:
        texts = (entry.key, brief(entry.value), str(entry.verdict), str(entry.origin), entry.note)
        styles = ("", "", _style(entry), "", "")
        table.add_row(*(Text(text, style) for text, style in zip(texts, styles, strict=True)))
    return table


def _lines(entries: Iterable[Entry]) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    lines: list[RenderableType] = []
    for entry in entries:
        origin = "" if entry.origin is Origin.FILE else f" ({entry.origin})"
        lines += [
            Text.assemble(
                (f"{entry.key} = {brief(entry.value)}", "bold"),
                "  ",
                (f"{entry.verdict}{origin}", _style(entry)),
            ),
            Padding(Text(entry.note), (0, 0, 0, 4)),
        ]
    return Group(*lines)


def _style(entry: Entry) -> StyleType:
    return "dim" if entry.off else _COLOURS[entry.verdict]


def _names(entries: Iterable[Entry]) -> str:
    names = list(dict.fromkeys(entry.key.rpartition(".")[2] for entry in entries))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _setting(entry: Entry) -> SettingStatus:
    value = json.loads(as_text(json.dumps(_jsonable(entry.value), ensure_ascii=False)))
    shown = without_secrets(entry.key, value)
    note = as_text(entry.note) if shown == value else ""  # a note may quote what it is about
    return SettingStatus(as_text(entry.key), shown, entry.origin.value, str(entry.verdict), note)


def _jsonable(value: object) -> Any:
    """``value`` in values that JSON has; infinity is none of them, and is its name."""
    return json.loads(json.dumps(value, default=str), parse_constant=str)


def _plain(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "value": _jsonable(entry.value),
        "class": str(entry.verdict),
        "from": str(entry.origin),
        "here": entry.note,
        "off": entry.off,
        "line": entry.line,
    }
