"""What bench_server.py concludes, and that it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from frame.report import Report
from server import driver, paths, staging
from server.driver import SERVER, Driven, Load
from server.paths import Adapted, Measured
from server.staging import GROWN, LATE, SMOOTH, USUAL, Staged
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
    native=[4.1e-3] * 3,
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
    assert row[:4] == ("8 drives", "20", "50.0", "0.100 (0.090-0.200)") and row[5:] == (
        "4.20 (4.20-4.20)",
        "4.10 (4.10-4.10)",
        "2.0",
        "0.20",
    )


def staged(**seconds: float) -> dict[str, Staged]:
    known = {f"{slots}, {late}": 1.0 for slots in (USUAL, GROWN) for late in (SMOOTH, LATE)}
    return {name: Staged(name, 6, 1 << 20, 3 * [each], 0.5) for name, each in (known | seconds).items()}


def test_more_slots_have_to_pay_with_and_without_late_blocks() -> None:
    def holds(**seconds: float) -> list[bool]:
        report = Report("known", {})
        staging.judge(report, staged(**seconds))
        return [verdict.holds for verdict in report.verdicts]

    assert holds() == [False, False]
    assert holds(**{f"{GROWN}, {LATE}": 0.9}) == [False, True]
    assert holds(**{f"{GROWN}, {SMOOTH}": 0.9}) == [True, False]
    report = Report("known", {})
    staging.judge(report, {f"{USUAL}, {LATE}": staged()[f"{USUAL}, {LATE}"]})
    assert report.verdicts == []  # of a side that failed nothing is concluded


def test_paths_have_a_goal_for_what_is_measured_and_one_for_what_is_noticed() -> None:
    def holds(faster: int, noticed: float) -> list[bool]:
        report = Report("known", {})
        measured = [Measured(7 * GB, 6 * GB), Measured(14 * GB, faster)]
        paths.judge(report, measured, [Adapted("", 4.0), Adapted("", 1.0), Adapted("", noticed)])
        return [verdict.holds for verdict in report.verdicts]

    assert holds(12 * GB, 3.0) == [True, True]
    # Python made two generations look alike.
    assert holds(6 * GB, 1.4) == [False, False]


@pytest.mark.parametrize(("cores", "holds"), [([0.1, 0.5, 0.9], True), ([0.1, 0.51, 0.9], False)])
def test_the_driver_has_a_goal_at_the_speed_of_a_server(cores: list[float], holds: bool) -> None:
    report = Report("known", {})
    driven = [
        Driven(Load(SERVER, verify=True), [1.0] * 3, [9.0] * 3),
        Driven(Load(SERVER), [2**33] * 3, cores),
    ]
    driver.judge(report, driven)
    assert [verdict.holds for verdict in report.verdicts] == [holds]
    # 8 Ki blocks per second.
    assert driven[1].per_block == [each / 2**13 for each in cores]


@pytest.mark.slow
def test_a_small_run_gives_every_goal(command: Callable[..., tuple[int, str, Any, str]]) -> None:
    """Calls are exact at any size; times are those of a busy machine."""
    _, text, raw, _ = command("bench_server.py", "--quick")
    assert [loop["paths"] for loop in raw["loops"]] == [1, 8] and len(raw["goals"]) == 6 + 2 + 2 + 1
    usual, grown = (raw["staging"][at]["slots"] for at in (0, 1))
    assert usual == 6 < grown
    assert len(raw["paths"]) == 5
    assert [0 < each["cores"][0] < 1 for each in raw["driver"]] == [True, True]
    assert all(0 < loop["calls"]["aio_run"] < loop["tiles"] for loop in raw["loops"])
    assert "| 8 drives |" in text
