"""The report on each key of a configuration: for the terminal, for logs, for telemetry and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from tiering.config.ds_config.secrets import without_secrets
from tiering.config.ds_config.verdicts import KeyVerdict
from tiering.telemetry import ConfigurationStatus, SettingStatus, as_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.style import StyleType


class Origin(StrEnum):
    """The source of a value."""

    FILE = "file"
    # The file has "auto".
    AUTO = "auto"
    # The file has "auto", which a trainer fills in.
    TRAINER = "trainer"
    # The file does not have the key.
    DEFAULT = "default"


@dataclass(frozen=True)
class KeyEntry:
    """A key by its dotted path, its value ("auto" resolved, unless a trainer fills it in), and its verdict.

    ``note`` describes the effect of the key, or why it is refused and the remedy; ``off`` means that the value requests
    nothing. ``line`` is the line number in the file, from 1, if there is a file.
    """

    key: str
    value: object
    verdict: KeyVerdict
    note: str = ""
    origin: Origin = Origin.FILE
    off: bool = False
    line: int | None = None

    def problem(self) -> str:
        """The refusal in one line."""
        location = "" if self.line is None else f" (line {self.line})"
        return f"{self.key}: {self.note}{location}"


@dataclass(frozen=True)
class KeyReport:
    """All keys of the file in its order, then missing required keys; and the defaults of the other keys.

    ``source`` is the path of the file, empty for a mapping. ``outcome`` is a one-line summary, empty if a key is
    refused. ``filled`` is the configuration with a value in place of each "auto", in sections of its own; an "auto"
    that has no effect is absent.
    """

    entries: tuple[KeyEntry, ...]
    defaults: tuple[KeyEntry, ...] = ()
    source: str = ""
    outcome: str = ""
    filled: Mapping[str, Any] = field(default_factory=dict)

    @property
    def refused(self) -> tuple[KeyEntry, ...]:
        return tuple(entry for entry in self.entries if entry.verdict is KeyVerdict.REFUSED)

    @property
    def without_effect(self) -> tuple[KeyEntry, ...]:
        """The keys without effect whose value requests something."""
        return tuple(e for e in self.entries if e.verdict is KeyVerdict.NO_EFFECT and not e.off)

    @property
    def deprecated(self) -> tuple[KeyEntry, ...]:
        return tuple(entry for entry in self.entries if entry.verdict is KeyVerdict.DEPRECATED)

    def counts(self) -> dict[str, int]:
        """The number of keys in the file by verdict."""
        counter = Counter(str(entry.verdict) for entry in self.entries)
        return {str(verdict): counter[str(verdict)] for verdict in KeyVerdict}

    def short(self) -> str:
        """The report in one line for the start of a run: the summary, the keys without effect, the deprecated keys."""
        parts = [f"{self.source}: {self.outcome}" if self.source else self.outcome]
        if self.without_effect:
            parts.append(f"no effect: {_names(self.without_effect)}")
        if self.deprecated:
            parts.append(f"deprecated: {_names(self.deprecated)}")
        if len(parts) > 1:
            parts.append(f"run `tiering check {self.source or 'FILE'}` for the reasons")
        return "; ".join(parts)

    def status(self) -> ConfigurationStatus:
        """The report for telemetry: secrets are hidden, and undecodable bytes of file names are replaced."""
        return ConfigurationStatus(
            source=as_text(self.source),
            outcome=self.outcome,
            counts=self.counts(),
            without_effect=[entry.key for entry in self.without_effect],
            deprecated=[entry.key for entry in self.deprecated],
            settings=[_setting(entry) for entry in (*self.entries, *self.defaults)],
        )

    def render(self, width: int, *, defaults: bool = False) -> RenderableType:
        """The report for a terminal of ``width`` columns, including default values if ``defaults``.

        It is a table, or two lines per key on a narrow terminal.
        """
        entries = (*self.entries, *(self.defaults if defaults else ()))
        return _table(entries) if width >= _TABLE_WIDTH else _lines(entries)

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON value."""
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
    KeyVerdict.HONOURED: "green",
    KeyVerdict.MAPPED: "cyan",
    KeyVerdict.NO_EFFECT: "yellow",
    KeyVerdict.DEPRECATED: "magenta",
    KeyVerdict.REFUSED: "bold red",
}
# As telemetry has them. An engine starts with the values of the trainer.
_ORIGINS: dict[Origin, Literal["file", "auto", "default"]] = {
    Origin.FILE: "file",
    Origin.AUTO: "auto",
    Origin.TRAINER: "auto",
    Origin.DEFAULT: "default",
}
SCHEMA_VERSION = 1
# Columns below which the report is not a table.
_TABLE_WIDTH = 120
# Keys that one line names; it counts further keys.
_MAX_NAMES = 6


def brief(value: object, max_length: int = 40) -> str:
    """``value`` as JSON, with all digits of large whole numbers, cut to ``longest`` characters."""
    whole = isinstance(value, float) and value.is_integer() and 1e4 <= abs(value) < 1e16
    text = json.dumps(int(value) if whole else value, default=str)  # type: ignore[call-overload]  # a float then
    return text if len(text) <= max_length else f"{text[: max_length - 4]} ..."


def _table(entries: Iterable[KeyEntry]) -> RenderableType:
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


def _lines(entries: Iterable[KeyEntry]) -> RenderableType:
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


def _style(entry: KeyEntry) -> StyleType:
    return "dim" if entry.off else _COLOURS[entry.verdict]


def _names(entries: Iterable[KeyEntry]) -> str:
    names = list(dict.fromkeys(entry.key.rpartition(".")[2] for entry in entries))
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _setting(entry: KeyEntry) -> SettingStatus:
    value = json.loads(as_text(json.dumps(_jsonable(entry.value), ensure_ascii=False)))
    public_value = without_secrets(entry.key, value)
    # A note may quote the value, so a secret value has no note.
    note = as_text(entry.note) if public_value == value else ""
    return SettingStatus(as_text(entry.key), public_value, _ORIGINS[entry.origin], str(entry.verdict), note)


def _jsonable(value: object) -> Any:
    """``value`` as a JSON value; infinity and NaN become their names."""
    return json.loads(json.dumps(value, default=str), parse_constant=str)


def _plain(entry: KeyEntry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "value": _jsonable(entry.value),
        "class": str(entry.verdict),
        "from": str(entry.origin),
        "here": entry.note,
        "off": entry.off,
        "line": entry.line,
    }
