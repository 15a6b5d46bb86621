"""What bench_server.py concludes, and that it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from frame.report import Report
from server.step_loop import Loop, judge, table

GB = 10**9
# 20 tiles of 50 MB at 10 GB/s: 0.1 s of the drives.
KNOWN = Loop(
    paths=8,
    tiles=20,
    bytes=GB,
    rate=10 * GB,
    python=[0.09e-3, 0.1e-3, 0.2e-3],
    alone=[4e-3] * 3,
    busy=[4.2e-3] * 3,
    calls={"aio_submit_vector": 40},
    long_calls={"aio_run": 3, "aio_wait": 1},
)


def holds(loop: Loop) -> list[bool]:
    report = Report("known", {})
    judge(report, [loop])
    return [verdict.holds for verdict in report.verdicts]


def test_every_goal_has_two_sides() -> None:
    assert holds(KNOWN) == [True, True, True]
    assert holds(replace(KNOWN, python=[0.11e-3])) == [False, True, True]
    assert holds(replace(KNOWN, busy=[4.21e-3] * 3)) == [True, False, True]
    assert holds(replace(KNOWN, long_calls={"aio_wait": 5})) == [True, True, False]


def test_figures_are_per_tile() -> None:
    (row,) = table([KNOWN]).rows
    assert row[:4] == ("8 drives", "20", "50.0", "0.100 (0.090-0.200)") and row[6:] == ("2.0", "0.20")


@pytest.mark.slow
def test_a_small_run_gives_every_goal(command: Callable[..., tuple[int, str, Any, str]]) -> None:
    """Calls are exact at any size; times are those of a busy machine."""
    _, text, raw, _ = command("bench_server.py", "--quick")
    assert [loop["paths"] for loop in raw["loops"]] == [1, 8] and len(raw["goals"]) == 6
    assert all(0 < loop["calls"]["aio_run"] < loop["tiles"] for loop in raw["loops"])
    assert "| 8 drives |" in text
