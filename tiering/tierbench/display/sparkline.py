"""A line of text that shows how something went: each character's height is a stretch's share of the highest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.:-=+*#"


def levels(encoding: str) -> str:
    """The characters of ``spark``, lowest first, that ``encoding`` has."""
    try:
        BLOCKS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def spark(rates: Sequence[float], width: int, levels: str = BLOCKS) -> str:
    """``rates`` over time from zero to the highest, in at most ``width`` characters; each is the mean of a stretch."""
    count = min(width, len(rates))
    edges = [index * len(rates) // count for index in range(count + 1)] if count > 0 else [0]
    means = [sum(rates[begin:end]) / (end - begin) for begin, end in itertools.pairwise(edges)]
    top = max(means, default=0.0) or 1.0
    return "".join(levels[min(len(levels) - 1, int(mean / top * len(levels)))] for mean in means)
