"""In which order a file's blocks are visited: one after the other or shuffled, round and round, each once in a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_SHUFFLED = 1 << 22  # blocks: of larger files so many are drawn, and the others are left alone


@dataclass(frozen=True)
class Stretch:
    """Blocks to transfer by one request: ``nbytes`` from ``offset``, or a block at each of ``scattered``."""

    offset: int
    nbytes: int
    scattered: Sequence[int] = ()


class Walk:
    """Over ``count`` blocks of ``bs`` bytes from the block ``first`` on. ``passes`` are those that are complete.

    Whoever has fewer than ``count`` blocks under way has none of them twice: transfers with O_DIRECT have no order.
    """

    def __init__(self, first: int, count: int, bs: int, *, shuffled: bool = False, seed: int = 0) -> None:
        assert count > 0, "a walk over nothing has no end"
        self.count = count
        self.passes = 0
        self._first = first
        self._bs = bs
        self._at = 0
        self._places: Sequence[int] | None = None
        if shuffled:
            import numpy as np  # a tenth of a second, which only random kinds take

            drawn = np.random.default_rng(seed)
            chosen = (
                drawn.permutation(count)
                if count <= MOST_SHUFFLED
                else drawn.permutation(np.unique(drawn.integers(count, size=MOST_SHUFFLED)))
            )
            self._places = ((chosen + first) * bs).tolist()
            self.count = len(chosen)

    def take(self, blocks: int) -> Stretch:
        """The next ``blocks``, or what is left of this pass."""
        at, taken = self._at, min(blocks, self.count - self._at)
        self._at += taken
        if self._at == self.count:
            self._at = 0
            self.passes += 1
        if self._places is None:
            return Stretch((self._first + at) * self._bs, taken * self._bs)
        places = self._places[at : at + taken]
        return Stretch(places[0], taken * self._bs, places)
