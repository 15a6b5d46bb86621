"""What bench_pool.py computes and concludes, and that it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bench_pool
import pytest
from bench_pool import Tiles, Wake, projected, tile_of
from frame.report import Report


def test_the_tile_of_the_projection_is_that_of_the_pool() -> None:
    assert [tile_of(threads) for threads in (1, 2, 16, 17, 32, 64, 96, 4096)] == [
        32 << 10,
        32 << 10,
        32 << 10,
        28 << 10,
        16 << 10,
        8 << 10,
        4 << 10,
        4 << 10,
    ]


def test_the_projection() -> None:
    # 64 tiles: in one round for 64 threads, in two for 48 and of 96 a third idles.
    assert projected(64, 32 << 10, 0.0, 400.0) == pytest.approx(1.0)
    assert projected(48, 32 << 10, 0.0, 400.0) == pytest.approx(64 / 96)
    assert projected(96, 32 << 10, 0.0, 400.0) == pytest.approx(64 / 96)
    # Two tiles on two threads, of which one joins a wake-up later.
    one = 28 * (1 << 20) / 200e3
    assert projected(2, 1 << 20, 10.0, 400.0) == pytest.approx(one / (one + 10.0))
    # Three threads join after a wake-up, and the four that these wake after two.
    one = 28 * (1 << 19) / (400e3 / 7)
    assert projected(7, 1 << 19, 10.0, 400.0) == pytest.approx(28 * (2 << 20) / 400e3 / (one + 20.0))
    assert Wake("", one=100.0, two=60.0).wake == pytest.approx(20.0)


def test_every_goal_has_two_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    def holds(rate: float) -> list[bool]:
        report = Report("known", {})
        monkeypatch.setattr("sys.argv", ["bench_pool.py", "--projected", "96"])
        ran = [Tiles(2, 10.0, rate, 0.1)]
        bench_pool.fill(report, bench_pool.parse_arguments(), [Wake("asleep", 10.0, 10.0)], ran)
        return [verdict.holds for verdict in report.verdicts]

    assert holds(9.0) == [True, True]
    assert holds(8.9) == [False, True]
    monkeypatch.setattr(bench_pool, "SMALLEST", 32 << 10)
    assert holds(9.0) == [True, False]


@pytest.mark.slow
def test_it_runs(command: Callable[..., Any]) -> None:
    status, text, raw, _ = command("bench_pool.py", "--quick", directory=False)
    assert status in (0, 1), text
    assert len(raw["wakes"]) == 2 and raw["tiles"]
