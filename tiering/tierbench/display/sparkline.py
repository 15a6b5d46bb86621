"""A plot in one line of text: the height of each character is the mean of one part, relative to the highest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.:-=+*#"


def levels(encoding: str) -> str:
    """The characters for ``spark``, lowest first: blocks if ``encoding`` has them, else ASCII."""
    try:
        BLOCKS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def spark(rates: Sequence[float], width: int, levels: str = BLOCKS) -> str:
    """``rates`` over time in at most ``width`` characters, scaled from zero to the highest mean of a character."""
    count = min(width, len(rates))
    edges = [index * len(rates) // count for index in range(count + 1)] if count > 0 else [0]
    means = [sum(rates[begin:end]) / (end - begin) for begin, end in itertools.pairwise(edges)]
    top = max(means, default=0.0) or 1.0
    return "".join(levels[min(len(levels) - 1, int(mean / top * len(levels)))] for mean in means)
