"""JSON as people write it: with comments (``//``, ``/* */``, ``#``) and trailing commas; and the lines of its keys."""

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
    """``text`` without comments and trailing commas: each becomes blanks, so that every place stays where it was."""
    pieces: list[str] = []
    last, before = -1, -1  # of what counts: the last piece, and the one in front of it
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
    """The line, from 1, of each key of the objects in plain JSON ``text``, by the keys that lead to it.

    What is inside of arrays is left out.
    """
    return dict(_lines(text))


def _lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    path: list[str | None] = []  # an entry for each bracket that is open: the key that was met there last
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
