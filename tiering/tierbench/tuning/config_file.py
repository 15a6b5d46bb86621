"""A configuration file of somebody's, in which one section is set and all else stays as it was, comments too.

The text is edited, not written anew: what people put into such files (comments, order, ``5e8``) is not to be lost
because a block size changes. No copy of the old file is left beside it: what is replaced are the values that were to be
replaced, the new file is in place at once or not at all, and these files live under version control.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tiering.config.json_comments import plain
from tiering.errors import ConfigError
from tiering.strict_json import FormatError, parse

_DECODER = json.JSONDecoder()
_BLANKS = " \t\r\n"


def check(path: Path, block: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``block`` cannot be set in the file at ``path``, before minutes go into its values."""
    _edited(path, block)
    if not os.access(path.resolve().parent, os.W_OK):
        raise ConfigError(f"{path} cannot be replaced: its directory is not writable by this user; {_REMEDY}")


def write(path: Path, block: Mapping[str, Any]) -> None:
    """Set what ``block`` has in the file at ``path``, at once or not at all. Raises ConfigError."""
    data = _edited(path, block)
    into = path.resolve()  # a link stays one
    try:
        fd, name = tempfile.mkstemp(dir=into.parent, prefix=f".{into.name}-")
        partial = Path(name)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                os.fchmod(fd, stat.S_IMODE(into.stat().st_mode))
                os.fsync(fd)
            partial.replace(into)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; {_REMEDY}") from None


_REMEDY = "leave out --write-config, and paste the block that is printed"


def _edited(path: Path, block: Mapping[str, Any]) -> bytes:
    try:
        text = path.read_bytes().decode()
        old = _parsed(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no UTF-8 text; {_REMEDY}") from None
    except FormatError as error:
        raise ConfigError(f"{path} cannot be edited: {error}; correct it, or {_REMEDY}") from None
    new = edited(text, block)
    assert _parsed(new) == _merged(old, block)
    return new.encode()


def _parsed(text: str) -> dict[str, Any]:
    # As text, so that NaN equals itself.
    return parse(plain(text.removeprefix("\ufeff")).encode(), constant=str)


def edited(text: str, block: Mapping[str, Any]) -> str:
    """``text``, an object of JSON with or without comments, with what ``block`` has set in it.

    Raises ConfigError where it has a section, and the text another value.
    """
    return _set(text, plain(text).index("{"), block, ())


class _Member(NamedTuple):
    key: int  # where it begins
    value: int
    end: int


def _set(text: str, at: int, block: Mapping[str, Any], above: tuple[str, ...]) -> str:
    """As ``edited``, of the object that begins ``at``. Edits come after it, so that it stays there."""
    for key, value in block.items():
        members, close = _members(plain(text), at)
        if key not in members:
            text = _with_member(text, at, members, close, f"{json.dumps(key)}: {json.dumps(value)}")
            continue
        found = members[key]
        if not isinstance(value, dict):
            text = text[: found.value] + json.dumps(value) + text[found.end :]
        elif text[found.value] == "{":
            text = _set(text, found.value, value, (*above, key))
        else:
            name = ".".join((*above, key))
            raise ConfigError(
                f"{name} is {text[found.value : found.end]} there, no section; correct it, or {_REMEDY}"
            )
    return text


def _members(text: str, at: int) -> tuple[dict[str, _Member], int]:
    """What the object that begins ``at`` has by key, and where its closing brace is. It has been parsed before."""
    found: dict[str, _Member] = {}
    at = _skip(text, at + 1)
    while text[at] != "}":
        begin = at
        key, at = _DECODER.raw_decode(text, at)
        value = _skip(text, _skip(text, at) + 1)  # past the colon
        _, end = _DECODER.raw_decode(text, value)
        found[key] = _Member(begin, value, end)
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at
    return found, at


def _skip(text: str, at: int) -> int:
    while text[at] in _BLANKS:
        at += 1
    return at


def _with_member(text: str, at: int, members: Mapping[str, _Member], close: int, member: str) -> str:
    """``member`` as the last one, on a line of its own if the others are."""
    if not members:
        return f"{text[: at + 1]}{member}{text[at + 1 :]}"
    last = max(members.values())
    rest = text[last.end : close]
    # With something after it, a comma is no trailing one, and is not blanked with the comments.
    comma = "" if "," in plain(f"[0{rest}\n1]") else ","
    kept = rest.rstrip()  # comments stay with what they are about
    between = " "
    if "\n" in text[at:close]:
        line = text[text.rfind("\n", 0, last.key) + 1 : last.key]
        indent = line[: len(line) - len(line.lstrip())]
        between = ("\r\n" if "\r\n" in text else "\n") + indent
    return f"{text[: last.end]}{comma}{kept}{between}{member}{text[last.end + len(kept) :]}"


def _merged(old: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    new = dict(old)
    for key, value in block.items():
        new[key] = _merged(old.get(key, {}), value) if isinstance(value, dict) else value
    return new
