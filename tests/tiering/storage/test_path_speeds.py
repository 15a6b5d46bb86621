"""Which paths are slow: in proportion to what was measured, beside the others, and for some time."""

from __future__ import annotations

from collections import Counter

import pytest

from tiering.storage.io_stats import DirectionStats, FileStats
from tiering.storage.path_speeds import INTERVAL_OPS, INTERVALS, LEAST, PathSpeeds

MEASURED = {"/a": 4_000_000_000, "/b": 2_000_000_000, "/c": 4_000_000_000}
NOTHING = DirectionStats(0, 0, 0, 0, 0, 0, 0, 0, (), {})


class Paths:
    """Counters of paths that are busy at given parts of their measured speeds."""

    def __init__(self) -> None:
        self.speeds = PathSpeeds.measured(MEASURED)
        self._busy: Counter[str] = Counter()
        self._ops: Counter[str] = Counter()

    def interval(self, *parts: float, ops: int = INTERVAL_OPS, idle: str = "") -> list[str]:
        """What changes if each path moves a GB for each 4 GB/s in so much longer time, except for one that is idle."""
        stats = [FileStats("/files", True, NOTHING, NOTHING, NOTHING, 0)]
        for part, (name, rate) in zip(parts, MEASURED.items(), strict=True):
            nbytes = rate // 8 // INTERVAL_OPS
            if name != idle:
                self._ops[name] += ops
                self._busy[name] += round(ops * nbytes * 2e9 / (rate * part))
            moved = DirectionStats(
                self._ops[name] * nbytes, self._ops[name] // 2, 0, 0, 0, 0, self._busy[name] // 2, 0, (), {}
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


def test_a_path_with_nothing_to_do_hides_no_slow_one() -> None:
    paths = Paths()
    for _ in range(INTERVALS - 1):
        assert paths.interval(0.1, 1.0, 1.0, idle="/b") == []
    assert paths.interval(0.1, 1.0, 1.0, idle="/b") == ["/a"]
    assert paths.speeds.paths["/b"].recent is None


def test_a_drive_that_reads_faster_than_it_was_measured_makes_no_other_one_slow() -> None:
    """A path is measured by its slower direction; training may have mostly the other one."""
    paths = Paths()
    assert [paths.interval(1.2, 3.5, 1.0) for _ in range(2 * INTERVALS)] == 2 * INTERVALS * [[]]


def test_a_path_keeps_a_share_by_which_it_can_recover() -> None:
    paths = Paths()
    for _ in range(2 * INTERVALS):
        paths.interval(1.0, 1e-4, 1.0)
    assert paths.shares == {"/b": LEAST}


def test_a_single_path_is_never_slow() -> None:
    assert PathSpeeds.measured({}).observe([]) == []
