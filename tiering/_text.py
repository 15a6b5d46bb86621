"""Texts for messages."""

from __future__ import annotations

from collections.abc import Iterable


def shorten(names: tuple[str, ...], limit: int = 3) -> str:
    """The first ``limit`` names, and the number of the others."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def counted(number: int, noun: str, plural: str = "") -> str:
    """Number and noun: "1 file", "3 files". ``plural`` is needed if it is not the noun and an "s"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def similar(word: str, names: Iterable[str]) -> str | None:
    """The name of which ``word`` is probably a misspelling, without regard to case; never one that begins with "_".

    It differs by one edit per four letters of ``word``, at least one and at most three, or ``word`` is its beginning.
    """
    word, limit = word.lower(), max(1, min(3, len(word) // 4))
    public = [name for name in names if not name.startswith("_")]
    edits = {name: _edits(word, name.lower(), limit) for name in public}
    near = [name for name in public if edits[name] <= limit]
    # "train_micro_batch_size" for "train_micro_batch_size_per_gpu".
    longer = [name for name in public if name.startswith(word) and len(word) >= _MIN_SHARE * len(name)]
    return min(near or longer, key=lambda name: (edits[name], name), default=None)


_MIN_SHARE = 0.7


def _edits(first: str, second: str, limit: int) -> int:
    """Letters to insert, delete, replace, or swap with their neighbour; if more than ``limit``, any greater number."""
    if abs(len(first) - len(second)) > limit:
        return limit + 1
    above: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first):
        further_above, above, row = above, row, [i + 1]
        for j, other in enumerate(second):
            row.append(min(above[j] + (letter != other), above[j + 1] + 1, row[j] + 1))
            if i and j and (letter, first[i - 1]) == (second[j - 1], other):
                row[-1] = min(row[-1], further_above[j - 1] + 1)
        if min(row) > limit:
            break
    return row[-1]
