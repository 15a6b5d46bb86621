"""Sets one section of a user's configuration file and leaves the rest unchanged, comments included.

The text is edited, not generated again: a new block size must not cost the user's comments, key order or number formats
such as ``5e8``. The file is replaced atomically. No copy of the old file is kept, because only the requested values
change and these files are under version control.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tiering._strict_json import FormatError, parse
from tiering.config.json_comments import plain
from tiering.errors import ConfigError
from tiering.storage.file_system import replace_content

_DECODER = json.JSONDecoder()
_BLANKS = " \t\r\n"


def check(path: Path, block: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``block`` cannot be set in the file at ``path``; called before minutes of measurement."""
    _edited(path, block)
    if not os.access(path.resolve().parent, os.W_OK):
        raise ConfigError(f"{path} cannot be replaced: its directory is not writable by this user; {_REMEDY}")


def write(path: Path, block: Mapping[str, Any]) -> None:
    """Set the values of ``block`` in the file at ``path``, atomically. Raises ConfigError."""
    data = _edited(path, block)
    try:
        replace_content(path, data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; {_REMEDY}") from None


_REMEDY = "remove --write-config, and paste the printed block"


def _edited(path: Path, block: Mapping[str, Any]) -> bytes:
    try:
        text = path.read_bytes().decode()
        old = _parsed(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not valid UTF-8; {_REMEDY}") from None
    except FormatError as error:
        raise ConfigError(f"{path} cannot be edited: {error}; correct it, or {_REMEDY}") from None
    new = edited(text, block)
    assert _parsed(new) == _merged(old, block)
    return new.encode()


def _parsed(text: str) -> dict[str, Any]:
    # Constants are parsed as text, so that NaN equals itself.
    return parse(plain(text.removeprefix("\ufeff")).encode(), constant=str)


def edited(text: str, block: Mapping[str, Any]) -> str:
    """``text``, a JSON object with or without comments, with the values of ``block`` set in it.

    Raises ConfigError if the text has another value where ``block`` has a section.
    """
    return _set(text, plain(text).index("{"), block, ())


class _Member(NamedTuple):
    key: int  # offset of its first character
    value: int
    end: int


def _set(text: str, at: int, block: Mapping[str, Any], above: tuple[str, ...]) -> str:
    """As ``edited``, for the object at offset ``at``. Edits come after this offset, so it stays valid."""
    for key, value in block.items():
        members, close = _members(plain(text), at)
        if key not in members:
            text = _with_member(text, at, members, close, f"{json.dumps(key)}: {json.dumps(value)}")
            continue
        member = members[key]
        if not isinstance(value, dict):
            text = text[: member.value] + json.dumps(value) + text[member.end :]
        elif text[member.value] == "{":
            text = _set(text, member.value, value, (*above, key))
        else:
            name = ".".join((*above, key))
            raise ConfigError(
                f"{name} is {text[member.value : member.end]}, not a section; correct it, or {_REMEDY}"
            )
    return text


def _members(text: str, at: int) -> tuple[dict[str, _Member], int]:
    """The members of the object at offset ``at`` by key, and the offset of its closing brace. The text is valid."""
    members: dict[str, _Member] = {}
    at = _skip(text, at + 1)
    while text[at] != "}":
        begin = at
        key, at = _DECODER.raw_decode(text, at)
        value = _skip(text, _skip(text, at) + 1)  # past the colon
        _, end = _DECODER.raw_decode(text, value)
        members[key] = _Member(begin, value, end)
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at
    return members, at


def _skip(text: str, at: int) -> int:
    while text[at] in _BLANKS:
        at += 1
    return at


def _with_member(text: str, at: int, members: Mapping[str, _Member], close: int, member: str) -> str:
    """Add ``member`` at the end of the object, on its own line if the other members have their own lines."""
    if not members:
        return f"{text[: at + 1]}{member}{text[at + 1 :]}"
    last = max(members.values())
    tail = text[last.end : close]
    # With an element after it, the comma is not a trailing comma, which ``plain`` would blank like a comment.
    comma = "" if "," in plain(f"[0{tail}\n1]") else ","
    comments = tail.rstrip()  # comments stay behind the member that they describe
    between = " "
    if "\n" in text[at:close]:
        line = text[text.rfind("\n", 0, last.key) + 1 : last.key]
        indent = line[: len(line) - len(line.lstrip())]
        between = ("\r\n" if "\r\n" in text else "\n") + indent
    return f"{text[: last.end]}{comma}{comments}{between}{member}{text[last.end + len(comments) :]}"


def _merged(old: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    new = dict(old)
    for key, value in block.items():
        new[key] = _merged(old.get(key, {}), value) if isinstance(value, dict) else value
    return new
