"""The durations of operations: a histogram with the resolution for percentiles, which C counts."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from tiering._aio import lib

_BITS: int = lib.AIO_FINE_BITS
_BUCKETS: int = lib.AIO_FINE_BUCKETS


def bucket_start(bucket: int) -> int:
    """The shortest time that ``bucket`` counts, in nanoseconds; the longest is just below the next one's."""
    above = max(0, (bucket >> _BITS) - 1)
    return (bucket - (above << _BITS)) << above


@dataclass(frozen=True, slots=True)
class LatencyHistogram:
    """Operations by duration, from issue to the last continuation, without failed operations.

    ``counts`` has AIO_FINE_BUCKETS entries: a nanosecond wide at first, then 32 of equal width for every octave, so
    that none is wider than a thirty-second of the times it holds; the last one is open. ``max_ns`` is the longest
    time, 0 if there is none.
    """

    counts: tuple[int, ...]
    max_ns: int

    @classmethod
    def of(cls, *nanoseconds: int) -> Self:
        """The histogram of these durations; without any, the zero of ``+``."""
        counts = [0] * _BUCKETS
        for duration in nanoseconds:
            counts[_bucket_of(duration)] += 1
        return cls(tuple(counts), max(nanoseconds, default=0))

    @property
    def total(self) -> int:
        """The number of operations."""
        return sum(self.counts)

    def percentile(self, share: float) -> float:
        """Seconds within which ``share`` of the operations ended, 0.99 for instance; 1 is the longest.

        The end of the bucket in which that operation is counted: at most a thirty-second too long, never too short.
        Raises ValueError if there are no operations, or if ``share`` is not in 0 .. 1.
        """
        return self.percentiles(share)[0]

    def percentiles(self, *shares: float) -> list[float]:
        """The ``percentile`` of each of ``shares``, at little more than the cost of one."""
        for share in shares:
            if not 0 <= share <= 1:
                raise ValueError(f"invalid percentile {share}: pass a fraction from 0 to 1, such as 0.99")
        up_to = list(accumulate(self.counts))
        if not up_to[-1]:
            raise ValueError("no percentiles: the histogram has no operations; check total first")
        ranks = (max(1, math.ceil(share * up_to[-1])) for share in shares)
        return [min(_last_of(bisect_left(up_to, rank)), self.max_ns) / 1e9 for rank in ranks]

    def __add__(self, other: LatencyHistogram) -> LatencyHistogram:
        """The operations of both, of several files for instance."""
        counts = tuple(mine + more for mine, more in zip(self.counts, other.counts, strict=True))
        return LatencyHistogram(counts, max(self.max_ns, other.max_ns))

    def __sub__(self, earlier: LatencyHistogram) -> LatencyHistogram:
        """The operations after ``earlier``, a snapshot of the same counters; ValueError if it is not one.

        The longest is then known to a bucket: it is ``max_ns`` where that lies in the last one used, else its end.
        """
        counts = tuple(mine - before for mine, before in zip(self.counts, earlier.counts, strict=True))
        if min(counts) < 0:
            raise ValueError(
                "the subtracted histogram is not an earlier snapshot of the same counters: it has higher counts"
            )
        last = max((bucket for bucket, count in enumerate(counts) if count), default=None)
        return LatencyHistogram(counts, 0 if last is None else min(_last_of(last), self.max_ns))


def _bucket_of(nanoseconds: int) -> int:
    above = max(0, nanoseconds.bit_length() - 1 - _BITS)
    return min((above << _BITS) + (nanoseconds >> above), _BUCKETS - 1)


def _last_of(bucket: int) -> int:
    """The longest time that ``bucket`` counts, in nanoseconds."""
    return (1 << 64 if bucket == _BUCKETS - 1 else bucket_start(bucket + 1)) - 1
