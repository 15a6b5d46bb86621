"""JSON with comments (``//``, ``/* */``, ``#``) and trailing commas; the line number of each key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r'(?P<string>"(?:[^"\\\n]|\\.)*")'
    r"|(?P<comment>//[^\n]*|\#[^\n]*|/\*.*?\*/)"
    r"|(?P<space>\s+)"
    r'|(?P<mark>[{}\[\]:,])|(?P<bare>[^\s{}\[\]:,"/\#]+)|(?P<other>.)',
    re.DOTALL,
)


def plain(text: str) -> str:
    """``text`` with comments and trailing commas replaced by blanks, so that positions do not change."""
    pieces: list[str] = []
    # Indices of the last two pieces that are neither a comment nor blank.
    last, before = -1, -1
    for match in _TOKEN.finditer(text):
        piece = match.group()
        if match.lastgroup == "comment":
            piece = re.sub(r"[^\n]", " ", piece)
        elif match.lastgroup != "space":
            trails = piece in ("}", "]") and before >= 0 and pieces[last] == ","
            if trails and pieces[before] not in ("{", "[", ","):
                pieces[last] = " "
            before, last = last, len(pieces)
        pieces.append(piece)
    return "".join(pieces)


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line number, from 1, of each key in plain JSON ``text``, by the path of keys from the root.

    Objects inside arrays are skipped.
    """
    return dict(_lines(text))


def _lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    # The last key read in each open object.
    path: list[str | None] = []
    arrays = 0
    line, string, string_line = 1, "", 1
    for match in _TOKEN.finditer(text):
        piece = match.group()
        if match.lastgroup == "string":
            string, string_line = piece, line
        elif piece == "{":
            path.append(None)
        elif piece == "[":
            arrays += 1
        elif piece == "]":
            arrays -= 1
        elif piece == "}" and path:
            path.pop()
        elif piece == ":" and path and not arrays:
            path[-1] = json.loads(string)
            yield tuple(str(name) for name in path), string_line
        line += piece.count("\n")
