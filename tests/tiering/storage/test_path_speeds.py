"""Which paths are slow: in proportion to what was measured, beside the others, and for some time."""

from __future__ import annotations

from collections import Counter

import pytest

from tiering.storage.io_stats import DirectionStats, FileStats
from tiering.storage.path_speeds import INTERVAL_OPS, INTERVALS, PathSpeeds

MEASURED = {"/a": 4_000_000_000, "/b": 2_000_000_000, "/c": 4_000_000_000}
NOTHING = DirectionStats(0, 0, 0, 0, 0, 0, 0, 0, (), {})


class Paths:
    """Counters of paths that are busy at given parts of their measured speeds."""

    def __init__(self) -> None:
        self.speeds = PathSpeeds.measured(MEASURED)
        self._busy: Counter[str] = Counter()
        self._ops = 0

    def interval(self, *parts: float, ops: int = INTERVAL_OPS) -> list[str]:
        """What changes if each path moves a GB for each 4 GB/s in so much longer time."""
        self._ops += ops
        stats = [FileStats("/files", True, NOTHING, NOTHING, NOTHING, 0)]
        for part, (name, rate) in zip(parts, MEASURED.items(), strict=True):
            nbytes = rate // 8 // INTERVAL_OPS
            self._busy[name] += round(ops * nbytes * 2e9 / (rate * part))
            moved = DirectionStats(
                self._ops * nbytes, self._ops // 2, 0, 0, 0, 0, self._busy[name] // 2, 0, (), {}
            )
            stats.append(FileStats(name, True, moved, moved, NOTHING, 0))
        return self.speeds.observe(stats)

    @property
    def shares(self) -> dict[str, float]:
        return {name: path.share for name, path in self.speeds.paths.items() if path.is_slow}


def test_a_path_is_slow_if_it_stays_behind_the_others() -> None:
    paths = Paths()
    # All are slower than when they were measured, beside the compute of a step.
    assert [paths.interval(0.5, 0.5, 0.4) for _ in range(9)] == 9 * [[]]
    for _ in range(INTERVALS - 1):
        assert paths.interval(0.5, 0.1, 0.5) == []
    assert paths.interval(0.5, 0.1, 0.5) == ["/b"]
    assert paths.shares == {"/b": pytest.approx(0.2, rel=1e-3)}
    assert paths.speeds.share("/b") == paths.shares["/b"] and paths.speeds.share("/unmeasured") == 1.0
    assert paths.speeds.paths["/b"].recent == pytest.approx(0.1 * MEASURED["/b"], rel=1e-3)
    # It stays slow, and its share follows its speed, until it has kept up for as long.
    assert paths.interval(0.5, 0.2, 0.5) == []
    assert paths.shares == {"/b": pytest.approx(0.4, rel=1e-3)}
    for _ in range(INTERVALS - 1):
        assert paths.interval(0.5, 0.5, 0.5) == []
    assert paths.interval(0.5, 0.5, 0.5) == ["/b"]
    assert paths.shares == {}


def test_a_pause_is_not_slow() -> None:
    paths = Paths()
    for _ in range(5):
        for _ in range(INTERVALS - 1):
            assert paths.interval(1.0, 1.0, 0.1) == []
        assert paths.interval(1.0, 1.0, 1.0) == []
    assert paths.shares == {}


def test_few_operations_say_nothing() -> None:
    paths = Paths()
    for _ in range(2 * INTERVALS):
        assert paths.interval(1.0, 1.0, 0.1, ops=2) == []
    assert paths.speeds.paths["/c"].recent is None
    # They count with those that follow.
    assert paths.interval(1.0, 1.0, 0.1, ops=INTERVAL_OPS - 2) == []
    assert paths.speeds.paths["/c"].recent == pytest.approx(0.1 * MEASURED["/c"], rel=1e-3)


def test_a_single_path_is_never_slow() -> None:
    assert PathSpeeds.measured({}).observe([]) == []
