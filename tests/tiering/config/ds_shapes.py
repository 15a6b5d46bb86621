"""Configuration files as they occur, each with the report that it gets, in ``ds_files/``.

A file is its own expectation. The comment behind a key is the key's class, ``auto`` if its value was filled in, and
words of its note; behind a section's brace it is the whole section's, and what is inside shares it. Comments above
the file say what is known beside it, which native fields it sets, and what is refused for being absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tiering.config.ds_config import KeyVerdict, LoadContext, Origin
from tiering.config.json_comments import plain

FILES = Path(__file__).with_name("ds_files")

_COMMENT = re.compile(r"(?:^|\s)(?://|#) (.*)$")
_KEY = re.compile(r'\s*"([^"]+)"\s*:\s*(.*)')
_FATE = re.compile(rf"({'|'.join(KeyVerdict)})( auto)?(?:: (.+))?$")
_KNOWN = re.compile(
    r"(ranks|hidden_size|dtype|argument \w+|replaced|environment \w+|gives [\w.]+|absent [\w.]+): (.*)"
)


@dataclass(frozen=True)
class Fate:
    """What the report says about a key: ``words`` are part of its note."""

    verdict: KeyVerdict
    origin: Origin
    words: str = ""


@dataclass
class Shape:
    """A file, what is known beside it, and what is expected of it."""

    path: Path
    ranks: int = 1
    hidden_size: int | None = None
    dtype: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    gives: dict[str, Any] = field(default_factory=dict)
    fates: dict[str, Fate] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def known(self) -> LoadContext:
        return LoadContext(
            hidden_size=self.hidden_size,
            dtype=self.dtype,
            arguments=self.arguments,
            replaced=frozenset(self.replaced),
        )

    @property
    def refused(self) -> set[str]:
        return {key for key, fate in self.fates.items() if fate.verdict is KeyVerdict.REFUSED} | set(
            self.absent
        )


@cache
def shapes() -> dict[str, Shape]:
    return {path.stem: _read(path) for path in sorted(FILES.glob("*.json"))}


def content(shape: Shape) -> dict[str, Any]:
    """The file as Python has it."""
    read: dict[str, Any] = json.loads(plain(shape.path.read_text(encoding="utf-8")))
    return read


def names(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted paths of all keys that are no sections."""
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _read(path: Path) -> Shape:
    shape = Shape(path)
    sections: list[str] = []
    for text, comment in _lines(path):
        if not sections and not text:
            _take(shape, comment)
        elif match := _KEY.match(text):
            name, value = match.groups()
            if fate := _FATE.match(comment):
                verdict, auto, words = fate.groups()
                origin = Origin.AUTO if auto else Origin.FILE
                shape.fates[".".join([*sections[1:], name])] = Fate(KeyVerdict(verdict), origin, words or "")
            if value == "{":
                sections.append(name)
        elif text == "{":
            sections.append("")
        elif text in ("}", "},"):
            sections.pop()
    return shape


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line without and with only its comment."""
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _COMMENT.search(line)
        yield (line[: match.start()] if match else line).strip(), match[1].strip() if match else ""


def _take(shape: Shape, comment: str) -> None:
    match = _KNOWN.match(comment)
    if match is None:
        return
    kind, _, name = match[1].partition(" ")
    if kind == "argument":
        shape.arguments[name] = json.loads(match[2])
    elif kind == "environment":
        shape.environment[name] = match[2]
    elif kind == "gives":
        shape.gives[name] = json.loads(match[2])
    elif kind == "absent":
        shape.absent[name] = match[2]
    elif kind == "replaced":
        shape.replaced.append(match[2])
    elif kind == "dtype":
        shape.dtype = match[2]
    else:
        setattr(shape, kind, int(match[2]))
