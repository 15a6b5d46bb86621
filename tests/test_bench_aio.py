"""What bench_aio.py concludes from readings, and that both of its sides do what they count."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from aio import cells, fio, tables
from aio.load import Load, Reading
from aio.ours import CannotStart, Ours, request_blocks
from aio.tables import as_fast
from aio.worker import offsets
from figures import machine
from figures.ratio import Comparison, Estimate, bootstrap, compare
from figures.report import Report
from figures.turns import take_turns

BLOCK = 64 << 10
LOAD = Load("/disk/file", 64 << 20, True, BLOCK, 16, "read")


def reading(gb_per_s: float = 1.0, cpu: float = 0.01) -> Reading:
    return Reading(round(gb_per_s * 1e9), 1.0, cpu * gb_per_s, BLOCK, cpu * gb_per_s + 0.2)


def fio_output(**changes: Any) -> str:
    """The fields of fio 3.33's JSON that we read, for a mixed job."""
    idle = {"io_bytes": 0, "runtime": 0}
    job: dict[str, Any] = {
        "error": 0,
        "usr_cpu": 0.5,
        "sys_cpu": 2.0,
        "job_runtime": 16_000,
        "read": {"io_bytes": 3_000_000_000, "runtime": 1001},
        "write": {"io_bytes": 1_004_000_000, "runtime": 1004},
        "trim": idle,
    }
    return json.dumps({"fio version": "fio-3.33", "jobs": [job | changes]})


class TestBootstrap:
    def test_interval_of_a_known_distribution(self) -> None:
        values = np.random.default_rng(7).normal(5.0, 2.0, size=400)
        found = bootstrap(values, np.mean)
        half = 1.96 * values.std() / math.sqrt(400)  # what the central limit theorem says of the mean
        assert found.point == pytest.approx(values.mean())
        assert found.low == pytest.approx(values.mean() - half, abs=0.02)
        assert found.high == pytest.approx(values.mean() + half, abs=0.02)

    def test_is_the_same_each_time(self) -> None:
        assert bootstrap([1.0, 2.0, 7.0], np.median) == bootstrap([1.0, 2.0, 7.0], np.median)

    def test_of_one_value_is_that_value(self) -> None:
        assert bootstrap([3.0], np.median) == Estimate(3.0, 3.0, 3.0)

    def test_of_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no pair was measured"):
            bootstrap([], np.mean)

    def test_covers_the_truth_as_often_as_it_says(self) -> None:
        source = np.random.default_rng(3)
        inside = 0
        for _ in range(60):
            found = bootstrap(source.normal(0.0, 1.0, size=40), np.mean)
            inside += found.low <= 0.0 <= found.high
        assert 52 <= inside <= 60  # 57 expected


class TestCompare:
    def test_pairs_are_divided_pair_by_pair(self) -> None:
        found = compare([2.0, 3.0, 8.0], [1.0, 1.0, 2.0])
        assert found.median.point == pytest.approx(3.0)
        assert found.mean.point == pytest.approx(24 ** (1 / 3))
        assert (found.smallest, found.largest) == (pytest.approx(2.0), pytest.approx(4.0))
        assert found.pairs == 3

    def test_double_and_half_cancel_out(self) -> None:
        assert compare([2.0, 1.0], [1.0, 2.0]).mean.point == pytest.approx(1.0)

    def test_a_swing_of_both_sides_does_not_widen_the_interval(self) -> None:
        swings = [1.0, 3.0, 0.5, 2.0]
        found = compare([0.9 * swing for swing in swings], swings)
        assert (found.median.low, found.median.high) == (pytest.approx(0.9), pytest.approx(0.9))

    @pytest.mark.parametrize(
        ("point", "high", "holds"),
        [(0.98, 1.0, True), (0.979, 1.02, False), (0.99, 0.999, False), (1.05, 1.06, True)],
    )
    def test_the_goal_needs_the_point_and_the_interval(self, point: float, high: float, holds: bool) -> None:
        estimate = Estimate(point, 0.9, high)
        assert as_fast(Comparison(estimate, Estimate(0.1, 0.1, 0.1), 0.1, 2.0, 40)) is holds


class TestFioReport:
    def test_both_directions_count_over_the_longer_time(self) -> None:
        found = fio.parse(fio_output(), BLOCK)
        assert found.nbytes == 4_004_000_000
        assert found.seconds == pytest.approx(1.004)
        assert found.cpu_seconds == pytest.approx(0.025 * 16)  # percent of the time of all jobs added up
        assert found.gb_per_s == pytest.approx(3.98805, rel=1e-5)
        assert found.cpu_per_gb == pytest.approx(0.4 / 4.004)
        assert found.ns_per_op == pytest.approx(1.004e9 / (4_004_000_000 / BLOCK))

    def test_notes_before_the_json_are_skipped(self) -> None:
        notes = "note: both iodepth >= 1 and synchronous I/O engine are selected\n"
        assert fio.parse(notes + fio_output(), BLOCK) == fio.parse(fio_output(), BLOCK)

    @pytest.mark.parametrize(
        ("output", "message"),
        [
            ("", "printed no JSON"),
            (json.dumps({"jobs": []}), "0 groups"),
            (fio_output(error=5), "Input/output error"),
            (fio_output(read={"io_bytes": 0}, write={"io_bytes": 0}), "moved no byte"),
        ],
    )
    def test_what_cannot_be_used_is_an_error(self, output: str, message: str) -> None:
        with pytest.raises(fio.FioError, match=message):
            fio.parse(output, BLOCK)


class TestFioCommand:
    def test_io_uring_registers_what_ours_registers(self) -> None:
        both = fio.command(LOAD, "io_uring", ("registered_buffers", "registered_files"), 1.0)
        assert {
            "--fixedbufs=1",
            "--registerfiles=1",
            "--iodepth=16",
            "--direct=1",
            "--runtime=1000ms",
        } <= set(both)
        files = fio.command(LOAD, "io_uring", ("registered_files",), 1.0)
        assert {"--fixedbufs=0", "--registerfiles=1"} <= set(files)

    def test_threads_share_the_file_out(self) -> None:
        load = dataclasses.replace(LOAD, kind="mixed", pattern="random")
        found = set(fio.command(load, "threads", (), 0.25))
        share = load.size // 16
        assert {"--ioengine=psync", "--numjobs=16", f"--size={share}", f"--offset_increment={share}"} <= found
        assert {"--rw=randrw", "--rwmixread=50", "--runtime=250ms"} <= found

    def test_a_colon_in_the_path_is_not_a_list(self) -> None:
        load = dataclasses.replace(LOAD, path="/a:b")
        assert r"--filename=/a\:b" in fio.command(load, "libaio", (), 1.0)

    def test_a_missing_fio_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        with pytest.raises(fio.FioError, match="apt-get install fio"):
            fio.version()


def test_everyone_is_first_in_turn_and_the_first_round_is_dropped() -> None:
    order: list[str] = []

    def side(name: str) -> Reading:
        order.append(name)
        return dataclasses.replace(reading(), nbytes=len(order))

    found = take_turns(2, {"a": lambda: side("a"), "b": lambda: side("b")})
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [one.nbytes for one in found["a"]] == [4, 5]
    assert [one.nbytes for one in found["b"]] == [3, 6]


def test_sequential_requests_walk_the_file_and_begin_again() -> None:
    walk = offsets(10, 3, "sequential")
    assert [next(walk) for _ in range(5)] == [0, 3, 6, 0, 3]
    scattered = offsets(10, 3, "random")
    assert {next(scattered) for _ in range(200)} == {0, 3, 6}
    with pytest.raises(ValueError, match="no room"):
        next(offsets(2, 3, "sequential"))


def test_requests_fit_the_load() -> None:
    sizes = {
        (kind, pattern): request_blocks(dataclasses.replace(LOAD, kind=kind, pattern=pattern))
        for kind in cells.KINDS
        for pattern in ("sequential", "random")
    }
    assert sizes["read", "sequential"] == sizes["write", "sequential"] == 16
    assert sizes["mixed", "sequential"] == 16
    assert {blocks for (_, pattern), blocks in sizes.items() if pattern == "random"} == {1}


def test_the_report_of_known_readings() -> None:
    disk = cells.Cell(
        "disk",
        "disk",
        "libaio",
        (),
        LOAD,
        {"fio": [reading(2.0)] * 3, "ours": [reading(1.9, 0.02), reading(1.8, 0.02), reading(1.9, 0.02)]},
        fio_idle_cpu=0.18,
    )
    # 64 KiB in 8 us by fio, 9 us by ours, 20 us with a ticket each
    speed = {"fio": BLOCK / 8000, "lean": BLOCK / 7000, "split": BLOCK / 9000, "tickets": BLOCK / 20000}
    memory = cells.Cell(
        "overhead", "tmpfs", "libaio", (), LOAD, {side: [reading(gb)] * 2 for side, gb in speed.items()}
    )
    checked = cells.Cell(
        "verify", "disk", "libaio", ("verify",), LOAD, {"plain": [reading(2.0)], "verify": [reading(1.5)]}
    )
    report = Report("known", {"CPU": "one | two"})
    tables.fill(report, [disk, memory, checked])

    found = {verdict.what: (verdict.found, verdict.holds) for verdict in report.verdicts}
    assert found == {
        "libaio read: GB/s, ours / fio": ("0.950 (0.900-0.950)", False),
        "libaio read: CPU s/GB, ours / fio": ("2.000 (2.000-2.000)", False),
        "libaio, tmpfs, depth 16, read: ns per operation, ours / fio's io_uring": (
            "1.125 (1.125-1.125)",
            True,
        ),
        "libaio, tmpfs, depth 16, read: Python adds": ("11.00 us", False),
    }
    assert report.facts["our libaio (disk)"] == "no flags"
    assert report.facts["our libaio (verify)"] == "verify"
    text = report.markdown()
    assert "| libaio read | 2.000 (2.000-2.000) | 1.900 (1.800-1.900) | 0.950 (0.900-0.950) |" in text
    assert "| 2.000 (2.000-2.000) | 0.0200 |\n" in text  # (0.2 + 0.02 - 0.18 idle) / 2 GB
    assert "| libaio, disk, read | 2.000 (2.000-2.000) | 1.500 (1.500-1.500) | 0.750 (0.750-0.750) |" in text
    assert "- CPU: one | two" in text
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(console)
    assert "Python adds" in console.export_text()


def test_the_machine_is_described(tmp_path: Path) -> None:
    facts = machine.describe("numpy", directory=tmp_path)
    assert list(facts)[:3] == ["CPU", "memory", "kernel"]
    assert facts["file system"].partition(" on ")[0] in Path("/proc/filesystems").read_text()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Load]:
    with cells.warm_file(tmp_path / "file", 8 << 20, direct=False) as load:
        yield dataclasses.replace(load, block=BLOCK, depth=4)
    assert not (tmp_path / "file").exists()


def test_the_file_is_written_whole(file: Load) -> None:
    content = np.fromfile(file.path, dtype=np.uint64).reshape(-1, 512)
    assert content.size * 8 == 8 << 20
    assert content.any(axis=1).all()  # no page of zeros


@pytest.mark.parametrize("kind", cells.KINDS)
def test_our_side_moves_what_it_counts(file: Load, kind: Any) -> None:
    load = dataclasses.replace(file, kind=kind)
    with Ours(load, "threads") as ours:
        assert ours.engine == "threads"
        for blocks in (None, 1):
            found = ours.run(load, 0.05, blocks=blocks)
            assert found.nbytes > 0
            assert found.nbytes % (BLOCK * (blocks or request_blocks(load))) == 0
            assert found.seconds >= 0.05
            assert 0 < found.cpu_seconds < 4 * found.seconds


def test_an_engine_that_does_not_exist_says_so(file: Load) -> None:
    with pytest.raises(CannotStart, match="bogus"):
        Ours(file, "bogus")


@pytest.mark.skipif(shutil.which("fio") is None, reason=fio.MISSING)
@pytest.mark.parametrize("engine", ["libaio", "threads"])
def test_fio_does_the_same_load(file: Load, engine: str) -> None:
    load = dataclasses.replace(file, kind="mixed")
    found = fio.run(load, engine, (), 0.1)
    assert found.nbytes > 0
    assert found.nbytes % BLOCK == 0
    assert 0.09 <= found.seconds < 10
    assert found.whole_cpu_seconds is not None
    assert found.whole_cpu_seconds > 0
