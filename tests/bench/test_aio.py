"""What bench_aio.py concludes from readings, and that both of its sides do what they count."""

from __future__ import annotations

import dataclasses
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aio import cells, tables
from aio.ours import OurReading, Ours, request_blocks
from aio.tables import as_fast
from frame.report import Report
from frame.side import SideError
from rich.console import Console

from tiering.tierbench.comparison import fio
from tiering.tierbench.comparison.fio import FioJob, RunReading
from tiering.tierbench.ratios import Comparison
from tiering.tierbench.spread import Estimate

BLOCK = 64 << 10
JOB = FioJob(("/disk/file",), 64 << 20, "read", BLOCK, 16)


def reading(gb_per_s: float = 1.0, cpu: float = 0.01) -> RunReading:
    return RunReading(round(gb_per_s * 1e9), 0, 1.0, cpu * gb_per_s, cpu * gb_per_s + 0.2)


@pytest.mark.parametrize(
    ("point", "high", "holds"),
    [(0.98, 1.0, True), (0.979, 1.02, False), (0.99, 0.999, False), (1.05, 1.06, True)],
)
def test_the_goal_needs_the_point_and_the_interval(point: float, high: float, holds: bool) -> None:
    estimate = Estimate(point, 0.9, high)
    assert as_fast(Comparison(estimate, Estimate(0.1, 0.1, 0.1), 0.1, 2.0, 40)) is holds


def test_the_report_of_known_readings() -> None:
    disk = cells.Cell(
        "disk",
        "disk",
        "libaio",
        (),
        JOB,
        {"fio": [reading(2.0)] * 3, "ours": [reading(1.9, 0.02), reading(1.8, 0.02), reading(1.9, 0.02)]},
        fio_idle_cpu=0.18,
    )
    # 64 KiB in 8 us by fio, 9 us by ours, 20 us with a ticket each
    speed = {"fio": BLOCK / 8000, "lean": BLOCK / 7000, "split": BLOCK / 9000, "tickets": BLOCK / 20000}
    memory = cells.Cell(
        "overhead", "tmpfs", "libaio", (), JOB, {side: [reading(gb)] * 2 for side, gb in speed.items()}
    )
    checked = cells.Cell(
        "verify",
        "disk",
        "libaio",
        ("verify",),
        JOB,
        {
            "plain": [OurReading(2 * 10**9, 0, 1.0, 0.02, driver_seconds=0.01)],
            "verify": [OurReading(10**9, 5 * 10**8, 1.0, 0.15, driver_seconds=0.06)],
        },
    )
    report = Report("known", {"CPU": "one | two"})
    tables.fill(report, [disk, memory, checked])

    verdicts = {verdict.what: (verdict.found, verdict.holds) for verdict in report.verdicts}
    assert verdicts == {
        "libaio read: GB/s, ours / fio": ("0.950 (0.900-0.950)", False),
        "libaio read: CPU s/GB, ours / fio": ("2.000 (2.000-2.000)", False),
        "libaio, tmpfs, depth 16, read: ns per operation, ours / fio's io_uring": (
            "1.125 (1.125-1.125)",
            True,
        ),
        "libaio, tmpfs, depth 16, read: Python adds": ("11.00 us", False),
        "libaio, disk, read: driver CPU s/GB, verify": ("0.0400", False),
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


@pytest.fixture
def file(tmp_path: Path) -> Iterator[FioJob]:
    with cells.warm_file(tmp_path / "file", 8 << 20, direct=False) as job:
        yield dataclasses.replace(job, bs=BLOCK, iodepth=4)
    assert not (tmp_path / "file").exists()


def test_the_file_is_written_whole(file: FioJob) -> None:
    content = np.fromfile(file.paths[0], dtype=np.uint64).reshape(-1, 512)
    assert content.size * 8 == 8 << 20
    assert content.any(axis=1).all()  # no page of zeros


@pytest.mark.one_of(3)
@pytest.mark.parametrize("rw", cells.SEQUENTIAL)
def test_our_side_moves_what_it_counts(file: FioJob, rw: Any) -> None:
    job = dataclasses.replace(file, rw=rw)
    with Ours(job, "threads") as ours:
        assert ours.engine == "threads"
        for blocks in (None, 1):
            # On a busy machine the kernel may account no CPU time to a run this short.
            for _ in range(10):
                reading = ours.run(job, 0.05, blocks=blocks)
                if reading.cpu_seconds:
                    break
            assert (reading.read_bytes > 0, reading.written_bytes > 0) == (rw != "write", rw != "read")
            assert reading.nbytes % (BLOCK * (blocks or request_blocks(job))) == 0
            assert reading.seconds >= 0.05
            assert 0 < reading.cpu_seconds < 4 * reading.seconds
            assert 0 < reading.driver_seconds < reading.seconds


def test_an_engine_that_does_not_exist_says_so(file: FioJob) -> None:
    with pytest.raises(SideError, match=r"bogus failed: .*bogus"):
        Ours(file, "bogus")


@pytest.mark.skipif(shutil.which("fio") is None, reason=fio.MISSING)
@pytest.mark.parametrize("engine", ["libaio", "threads"])
def test_fio_does_the_same_job(file: FioJob, engine: str) -> None:
    reading = fio.run(dataclasses.replace(file, rw="rw"), engine, (), 0.1)
    assert reading.read_bytes > 0
    assert reading.written_bytes > 0
    assert reading.nbytes % BLOCK == 0
    assert 0.09 <= reading.seconds < 10
    assert reading.whole_cpu_seconds is not None
    assert reading.whole_cpu_seconds > 0
