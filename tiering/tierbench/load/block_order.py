"""The order of a file's blocks: sequential or shuffled, in repeated passes that visit each block once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_SHUFFLED = 1 << 22  # blocks; in larger files, a random sample of this size is visited


@dataclass(frozen=True)
class BlockRange:
    """The blocks of one request: ``nbytes`` from ``offset``, or one block at each offset in ``scattered``."""

    offset: int
    nbytes: int
    scattered: Sequence[int] = ()


class BlockOrder:
    """Visits ``count`` blocks of ``bs`` bytes, starting at block ``first``. ``passes`` counts complete passes.

    A user with fewer than ``count`` blocks in flight never has one of them twice; O_DIRECT transfers have no order.
    """

    def __init__(self, first: int, count: int, bs: int, *, shuffled: bool = False, seed: int = 0) -> None:
        assert count > 0, "an order of no blocks would never complete a pass"
        self.count = count
        self.passes = 0
        self.shuffled = shuffled
        self._first = first
        self._bs = bs
        self._at = 0
        self._offsets: Sequence[int] | None = None
        if shuffled:
            import numpy as np  # takes a tenth of a second, and only random loads need it

            generator = np.random.default_rng(seed)
            chosen = (
                generator.permutation(count)
                if count <= MAX_SHUFFLED
                else generator.permutation(np.unique(generator.integers(count, size=MAX_SHUFFLED)))
            )
            self._offsets = ((chosen + first) * bs).tolist()
            self.count = len(chosen)

    def next_blocks(self, blocks: int) -> BlockRange:
        """The next ``blocks`` blocks, or fewer at the end of a pass."""
        at, count = self._at, min(blocks, self.count - self._at)
        self._at += count
        if self._at == self.count:
            self._at = 0
            self.passes += 1
        if self._offsets is None:
            return BlockRange((self._first + at) * self._bs, count * self._bs)
        places = self._offsets[at : at + count]
        return BlockRange(places[0], count * self._bs, places)
