"""The speed of each path while training runs, beside the one that was measured when swap space was made. Pure.

A path that slows down delays all others, because each transfer has a part on every path. What lies on a path cannot
move without a copy, but new extents can get a smaller part of it.

Speeds are bytes per time with a transfer in flight, so a path that waits for others does not look slow. All paths
compete for the cores and with the same transfers, so each is compared with the path that keeps most of its measured
speed, among those that are in use. One slow interval is a pause, as drives have; several in a row are a slow path.

The measured speed is the lower one of reads and writes. So a path with more of the other kind may have more than it:
that counts as all of it, or a drive that reads much faster than it writes would make the others look slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tiering.storage.io_stats import FileStats

# Of the speed that it should have: below, a path is slow; a slow path that reaches the other is not slow any more.
SLOW, RECOVERED = 0.6, 0.8
# Operations of a path in an interval, for a meaningful average.
INTERVAL_OPS = 100
# The least share: with nothing to do, a path could not show that it has recovered.
LEAST = 1 / 16
# Intervals in a row after which a path is slow, or is not slow any more.
INTERVALS = 3


@dataclass
class PathSpeed:
    """A path: bytes per second ``measured``, those of the last interval, and whether it is slow.

    ``share`` is the part of the measured speed that it has, 1 unless it is slow.
    """

    measured: int
    recent: float | None = None
    share: float = 1.0
    _counted: tuple[int, int, int] = (0, 0, 0)
    _different: int = 0

    @property
    def is_slow(self) -> bool:
        return self.share < 1.0

    def pending(self, stats: FileStats) -> tuple[int, int, int]:
        """Operations, bytes and busy nanoseconds since the last interval."""
        now, (ops, nbytes, busy) = _totals(stats), self._counted
        return now[0] - ops, now[1] - nbytes, now[2] - busy

    def end_interval(self, stats: FileStats) -> None:
        _, nbytes, busy = self.pending(stats)
        self._counted = _totals(stats)
        self.recent = nbytes * 1e9 / busy

    @property
    def part(self) -> float:
        """The part of the measured speed that it had in the last interval, at most all of it."""
        return min(1.0, (self.recent or 0.0) / self.measured)

    def judge(self, best: float) -> bool:
        """Whether it has become slow, or is not slow any more, if the ``best`` path has this part of its speed."""
        part = max(LEAST, self.part / best)
        if self.is_slow:
            differs = part >= RECOVERED
            self.share = self.share if differs else min(part, RECOVERED)
        else:
            differs = part < SLOW
        self._different = self._different + 1 if differs else 0
        if self._different < INTERVALS:
            return False
        self._different = 0
        self.share = 1.0 if self.is_slow else part
        return True


@dataclass
class PathSpeeds:
    """The paths by name."""

    paths: dict[str, PathSpeed] = field(default_factory=dict)

    @classmethod
    def measured(cls, rates: Mapping[str, int]) -> PathSpeeds:
        return cls({name: PathSpeed(rate) for name, rate in rates.items()})

    def observe(self, stats: Iterable[FileStats]) -> list[str]:
        """Take the counters of the files; returns the names of paths that have become slow, or fast again."""
        current = {each.name: each for each in stats if each.name in self.paths}
        if len(current) < max(2, len(self.paths)):
            return []
        used: list[str] = []
        for name, each in current.items():
            ops, _, busy = self.paths[name].pending(each)
            # Others may have nothing to do: an optimizer's state may have paths of its own, and be in memory.
            used += [name] if ops >= INTERVAL_OPS and busy else []
        if len(used) < 2:
            return []
        for name in used:
            self.paths[name].end_interval(current[name])
        best = max(self.paths[name].part for name in used)
        return [name for name in used if best and self.paths[name].judge(best)]

    def share(self, name: str) -> float:
        """The part of its measured speed that a path has; 1 for one that was not measured."""
        path = self.paths.get(name)
        return 1.0 if path is None else path.share


def _totals(stats: FileStats) -> tuple[int, int, int]:
    read, write = stats.read, stats.write
    return read.ops + write.ops, read.bytes + write.bytes, read.busy_ns + write.busy_ns
