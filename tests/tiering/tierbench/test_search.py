"""Which settings to measure and to recommend, on drives that are invented: flat, peaked, noisy, without an engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.fake_drive import GRID, HOME, FakeDrive, K, M, flat, peaked, played, suited
from tiering.tierbench.result import Row, Sample
from tiering.tierbench.tuning.explore import figures_of
from tiering.tierbench.tuning.search import (
    MAX_IN_FLIGHT,
    MIN_READINGS,
    Cell,
    Grid,
    Reading,
    Sweep,
    TuningVerdict,
)


def verdicts(truth: Callable[[Cell], float], count: int = 12, **how: float) -> list[TuningVerdict]:
    return [played(FakeDrive(truth, seed=seed, **how))[0].verdict() for seed in range(count)]


def test_the_optimum_of_a_quiet_drive_is_found_and_the_search_ends_by_itself() -> None:
    drive = FakeDrive(peaked, noise=0.01, swings=False)
    sweep, reason = played(drive)
    verdict = sweep.verdict()
    assert peaked(verdict.recommended.cell) > 0.95 * 1.6
    assert verdict.recommended.cell.ioengine == "libaio"
    assert verdict.best.ratio.low < peaked(verdict.best.cell) / peaked(HOME) < verdict.best.ratio.high
    assert not verdict.keeps_defaults
    assert verdict.why.startswith("its rate is 1.")
    assert reason == "more readings would not change the result"
    assert drive.now < 60
    assert len(sweep.readings) < len(list(GRID)) / 2  # most settings never needed a window


def test_a_drive_that_swings_twofold_still_shows_what_suits_it() -> None:
    outcomes = verdicts(peaked)
    assert not any(verdict.keeps_defaults for verdict in outcomes)
    assert sum(peaked(verdict.recommended.cell) > 1.2 * peaked(HOME) for verdict in outcomes) >= 10


def test_where_nothing_is_better_the_defaults_are_kept() -> None:
    assert sum(verdict.keeps_defaults for verdict in verdicts(flat)) >= 11
    assert sum(verdict.keeps_defaults for verdict in verdicts(suited)) >= 11
    # Noise makes other settings look better in some searches.
    assert sum(verdict.keeps_defaults for verdict in verdicts(flat, noise=0.3)) >= 11
    busy = verdicts(flat, count=36, noise=0.03, disturbed=0.3, swings=False)
    assert sum(verdict.keeps_defaults for verdict in busy) >= 33

    (verdict, *_) = verdicts(flat, noise=0.01, swings=False)
    assert len(verdict.alike) == len(verdict.standings)
    assert verdict.flat("bs") == (128 * K, 4 * M)
    assert verdict.flat("iodepth") == (4, 64)
    (verdict, *_) = verdicts(suited, noise=0.01, swings=False)
    assert verdict.flat("bs") == (M, M)
    assert verdict.why == "no setting is faster"


def test_each_setting_is_measured_beside_the_reference_in_fair_shares() -> None:
    drive = FakeDrive(peaked)
    sweep, _ = played(drive)
    places = [place for place, cell in enumerate(drive.seen) if cell == HOME]
    assert places[0] == 0
    assert {later - early for early, later in itertools.pairwise(places)} <= {2, 3}
    best = sweep.verdict().best
    assert best.readings >= MIN_READINGS
    worst = sweep.standings()[-1]
    assert worst.readings == 1  # what is far behind is not measured again
    assert all(cell.in_flight <= MAX_IN_FLIGHT for cell in drive.seen)


def test_the_better_half_is_measured_again() -> None:
    cells = GRID.start()
    rates = {cell: [reading(1e9 + 1e6 * place)] for place, cell in enumerate(cells)}
    sweep = Sweep(GRID, rates, [reading(1e9)] * 2, rounds=1)
    again = [cell for cell in sweep.next_round() if cell in rates]
    assert again == cells[: len(cells) // 2 - 1 : -1]


def test_what_cannot_start_is_left_out_and_told_once() -> None:
    drive = FakeDrive(peaked, noise=0.01, swings=False)
    drive.missing = ("libaio",)
    sweep, _ = played(drive)
    assert {cell.ioengine for cell in sweep.left_out} == {"libaio"}
    assert set(sweep.left_out.values()) == {"libaio is not to be had"}
    assert sweep.verdict().recommended.cell.ioengine != "libaio"
    assert not set(sweep.left_out) & set(sweep.readings)


def test_an_end_in_the_middle_leaves_a_verdict() -> None:
    for windows in (1, 2, 3, 7):
        drive = FakeDrive(peaked)
        drive.windows = windows
        sweep, reason = played(drive)
        assert reason == "it is enough"
        assert sweep.verdict().keeps_defaults  # nothing has been measured often enough
    drive = FakeDrive(peaked)
    sweep, reason = played(drive, budget=20)
    assert reason == "the time limit was reached"
    assert 18 <= drive.now <= 20


def reading(rate: float, before: float = 1e9, after: float = 1e9, cpu: float = 0.01) -> Reading:
    return Reading(at=0.0, rate=rate, cpu_per_gb=cpu, p99=0.001, before=before, after=after)


def judged(rates: dict[Cell, list[Reading]]) -> TuningVerdict:
    return Sweep(GRID, readings=rates, reference=[reading(1e9)] * 3).verdict()


def test_of_settings_that_are_as_fast_the_one_with_least_cpu_and_then_memory_is_used() -> None:
    fast, lean, small = (Cell("libaio", bs, 16, registered=True) for bs in (2 * M, 4 * M, 256 * K))
    rates = {
        fast: [reading(1.52e9, cpu=0.010)] * 4,
        lean: [reading(1.50e9, cpu=0.005)] * 4,
        small: [reading(1.30e9, cpu=0.001)] * 4,
    }
    verdict = judged(rates)
    assert verdict.best.cell == fast
    assert verdict.recommended.cell == lean
    assert "of 2 settings that are as fast" in verdict.why
    rates[small] = [reading(1.49e9, cpu=0.0051)] * 4
    assert judged(rates).recommended.cell == small  # CPU alike, less memory
    rates[small._replace(ioengine="io_uring")] = [reading(1.48e9, cpu=0.0052)] * 4
    assert judged(rates).recommended.cell.ioengine == "io_uring"  # as "auto" finds it
    assert [each.cell for each in verdict.front] == [fast, lean, small]
    assert HOME not in [each.cell for each in verdict.front]


def test_what_noise_could_set_apart_is_as_fast() -> None:
    fast, lean = (Cell("libaio", bs, 16, registered=True) for bs in (2 * M, 4 * M))
    scattered = [1.0, 0.9, 1.1, 0.95, 1.05]

    def recommended(rate: float) -> Cell:
        rates = {
            fast: [reading(2e9 * each, cpu=0.010) for each in scattered],
            lean: [reading(rate * each, cpu=0.005) for each in scattered],
        }
        return judged(rates).recommended.cell

    assert recommended(1.85e9) == lean
    assert recommended(1.5e9) == fast


def test_a_gain_that_is_small_or_not_sure_is_none() -> None:
    cell = Cell("libaio", M, 16, registered=True)
    assert judged({cell: [reading(1.04e9)] * 8}).why.endswith("too little to matter")
    assert judged({cell: [reading(rate * 1e9) for rate in (0.7, 1.3, 1.2, 0.8, 1.6)]}).why.endswith(
        "which is within noise"
    )
    verdict = judged({cell: [reading(2e9)] * 2})
    assert verdict.keeps_defaults
    assert "fewer than 3 times" in verdict.why


@given(
    st.lists(st.floats(0.1, 10.0), min_size=12, max_size=12),
    st.lists(st.floats(0.5, 2.0), min_size=12, max_size=12),
)
def test_a_swing_that_a_window_shares_with_its_references_changes_nothing(
    swings: list[float], ratios: list[float]
) -> None:
    cells = [Cell("threads", M, 4, registered=True), Cell("libaio", M, 8, registered=True)]

    def rates(factors: list[float]) -> dict[Cell, list[Reading]]:
        readings: dict[Cell, list[Reading]] = {cell: [] for cell in cells}
        for place, (factor, ratio) in enumerate(zip(factors, ratios, strict=True)):
            readings[cells[place % 2]].append(reading(1e9 * factor * ratio, 1e9 * factor, 1.1e9 * factor))
        return readings

    still, swung = judged(rates([1.0] * 12)), judged(rates(swings))
    assert swung.recommended.cell == still.recommended.cell
    assert swung.noise == pytest.approx(still.noise)
    assert [each.ratio.point for each in swung.standings] == pytest.approx(
        [each.ratio.point for each in still.standings]
    )


def test_readings_during_which_the_drive_changed_never_count() -> None:
    cell = Cell("libaio", M, 16, registered=True)
    disturbed = reading(3e9, before=1e9, after=2e9)
    standing = Sweep(GRID, {cell: [reading(1e9), disturbed, disturbed]}, [reading(1e9)]).standings()[0]
    assert (standing.ratio.point, standing.readings) == (pytest.approx(1.0), 1)
    sweep = Sweep(GRID, {cell: [disturbed]}, [reading(1e9)], rounds=1)
    assert sweep.standings() == [] and sweep.cells_without_reading() == [cell]
    assert cell in sweep.next_round(), "it is measured again"


@pytest.mark.parametrize("references", [(1.0, 1e9), (1.0, 1.0), (4e7, 4e7)])
def test_a_reference_that_moved_next_to_nothing_is_none(references: tuple[float, float]) -> None:
    cell = Cell("libaio", 512 * K, 8, registered=True)
    stalled = reading(0.9e9, *references)
    verdict = Sweep(GRID, {cell: [stalled] * 5}, [reading(1e9)] * 4 + [reading(references[0])]).verdict()
    assert verdict.keeps_defaults and verdict.standings == (verdict.reference,)
    verdict = Sweep(GRID, {cell: [stalled] * 5 + [reading(0.9e9)] * 3}, [reading(1e9)] * 4).verdict()
    (standing,) = (each for each in verdict.standings if each.cell == cell)
    assert (standing.ratio.point, standing.rate, standing.readings) == (pytest.approx(0.9), 0.9e9, 3)


def test_a_reference_that_is_not_among_the_values_is_enough_to_begin() -> None:
    grid = Grid(HOME, (("libaio", True),), (2 * M, 4 * M), (32, 64))
    assert Cell("libaio", 2 * M, 32, registered=True) in list(grid)
    assert grid.excluded_count() == 3  # 4M x 32, 4M x 64, 2M x 64
    assert grid.start() == [Cell("libaio", 2 * M, 32, registered=True)]
    assert Grid(HOME, (("io_uring", True),), (M,), (16,)).start() == []  # the reference itself
    far = Grid(HOME, (("libaio", True), ("threads", True)), (2 * M, 4 * M, 8 * M, 16 * M), (1, 2, 3, 4))
    assert len(far.start()) > 0


def test_a_window_is_judged_by_what_went_while_its_queues_were_full() -> None:
    samples = [Sample(at=at, read=rate, write=0.0) for at, rate in ((0.1, 1e9), (0.2, 3e9), (0.3, 9e9))]
    row = Row.model_validate(
        {
            "rw": "read", "seconds": 0.3, "read": {"bytes": 13 * 10**8, "ops": 1}, "write": {}, "cpu_seconds": 0.13,
            "worst_second": None, "paths": (), "samples": samples,
        }
    )  # fmt: skip
    assert figures_of(row, 0.2) == pytest.approx((2e9, 0.1, 0.3))  # without the drain
    ahead = (Sample(at=0.1, read=3e9, write=1e9), Sample(at=0.2, read=2e9, write=1e9))
    mixed = row.model_copy(update={"rw": "rw", "samples": ahead})
    assert figures_of(mixed, 0.2).rate == pytest.approx(2e9)  # reads cannot be ahead for long
