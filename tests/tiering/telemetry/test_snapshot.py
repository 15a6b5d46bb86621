"""Snapshots: their JSON form, and rates from two samples."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiering.telemetry.status_files import only_reading, snapshot
from tiering.telemetry import (
    CollectiveStatus,
    CopyStatus,
    DirectionStatus,
    LinkStatus,
    PathStatus,
    Publisher,
    Snapshot,
    StatusWriter,
    StepRecord,
    with_rates,
)


def test_a_snapshot_survives_json() -> None:
    assert Snapshot.from_json(snapshot().to_json()) == snapshot()
    minimal = Snapshot("r", 1, 2, 3, 4.0)
    assert Snapshot.from_json(minimal.to_json()) == minimal


def test_a_diverged_loss_survives_json() -> None:
    assert math.isnan(Snapshot.from_json(snapshot(loss=math.nan).to_json()).loss or 0.0)
    for name in ("loss", "gradient_norm", "learning_rate", "loss_scale"):
        assert getattr(Snapshot.from_json(snapshot(**{name: -math.inf}).to_json()), name) == -math.inf
    for damage in ({"stalls": {"staging": math.nan}}, {"steps": [StepRecord(1, math.inf)]}):
        with pytest.raises(ValueError, match="finite number"):
            Snapshot.from_json(snapshot(**damage).to_json())


def test_fields_of_a_later_minor_version_are_dropped() -> None:
    later = json.loads(snapshot().to_json())
    later["weather"] = {"sunny": True}
    later["tiers"][0]["colour"] = "blue"
    later["io"][0]["read"]["humidity"] = [1, 2]
    assert Snapshot.from_json(json.dumps(later)) == snapshot()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run_name": "r"}', '{"run_name": 3'])
def test_what_is_not_a_snapshot_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="validation error"):
        Snapshot.from_json(text)


def test_rates_come_from_two_samples() -> None:
    def sample(read: int, written: int, busy: float) -> Snapshot:
        return snapshot(
            io=[
                PathStatus(
                    "/nvme",
                    "threads",
                    False,
                    DirectionStatus(bytes=read, busy_seconds=busy),
                    DirectionStatus(bytes=written),
                )
            ]
        )

    (path,) = with_rates(sample(900, 50, 3.0), sample(400, 50, 1.0), 0.25).io
    assert path.read.bytes_per_second == 2000.0
    assert path.read.average_bytes_per_second == 300.0
    assert (path.written.bytes_per_second, path.written.average_bytes_per_second) == (0.0, 0.0)
    (first,) = with_rates(sample(900, 50, 3.0), None, 0.25).io
    assert (first.read.bytes_per_second, first.read.average_bytes_per_second) == (0.0, 300.0)


def test_the_link_has_rates_each_way() -> None:
    def sample(h2d: int, d2h: int, peak: float = 0.0) -> Snapshot:
        return snapshot(
            link=LinkStatus(CopyStatus(h2d, 3, 2.0), CopyStatus(d2h, 1, 0.0, peak_bytes_per_second=peak), 99)
        )

    link = with_rates(sample(900, 50), sample(400, 40, peak=70.0), 0.25).link
    assert link == LinkStatus(
        CopyStatus(900, 3, 2.0, 2000.0, 450.0, 2000.0), CopyStatus(50, 1, 0.0, 40.0, 0.0, 70.0), 99
    )
    assert with_rates(sample(900, 50), snapshot(), 0.25).link == LinkStatus(
        CopyStatus(900, 3, 2.0, 0.0, 450.0, 450.0), CopyStatus(50, 1), 99
    )
    assert with_rates(snapshot(), sample(900, 50), 0.25).link is None


@pytest.mark.parametrize("busy", [0.01, 0.2, 1.0])
def test_no_average_is_above_the_peak(busy: float) -> None:
    """The rate of an interval in which a path is partly idle is below its average over busy time."""

    def sample(intervals: int) -> Snapshot:
        moved = DirectionStatus(bytes=1000 * intervals, busy_seconds=busy * intervals)
        return snapshot(io=[PathStatus("/nvme", "threads", True, moved)])

    published = with_rates(sample(1), None, 0.0)
    for intervals in range(2, 6):
        published = with_rates(sample(intervals), published, 1.0)
        read = published.io[0].read
        assert read.peak_bytes_per_second >= read.average_bytes_per_second == pytest.approx(1000 / busy)


def test_bytes_sent_have_a_rate_by_kind() -> None:
    def sample(**sent: int) -> Snapshot:
        return snapshot(collectives=[CollectiveStatus(kind, 1, nbytes) for kind, nbytes in sent.items()])

    def rates(now: Snapshot, before: Snapshot | None) -> list[float]:
        return [status.sent_bytes_per_second for status in with_rates(now, before, 0.5).collectives]

    assert rates(sample(reduce=900, control=8), sample(reduce=400)) == [1000.0, 0.0]
    assert rates(sample(reduce=900), None) == [0.0]
    assert rates(sample(reduce=300), sample(reduce=400)) == [0.0]


def test_rates_are_never_negative_or_infinite() -> None:
    now, before = snapshot(), snapshot(io=[PathStatus("/nvme", "threads", True, DirectionStatus(bytes=11))])
    assert with_rates(now, before, 1.0).io[0].read.bytes_per_second == 0.0
    assert with_rates(now, replace(now, io=[]), 1.0).io[0].read.bytes_per_second == 0.0
    assert with_rates(now, before, 0.0).io[0].read.bytes_per_second == 0.0


def test_peaks_never_fall_and_come_from_whole_intervals(tmp_path: Path) -> None:
    clock, moved = 100.0, 0

    def source() -> Snapshot:
        direction = DirectionStatus(bytes=moved)
        return snapshot(
            io=[PathStatus("/nvme", "threads", True, direction)],
            collectives=[CollectiveStatus("reduce", 1, moved)],
        )

    publisher = Publisher(StatusWriter("gpt", directory=tmp_path), source, interval=0.25)
    rates = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tiering.telemetry.publisher.time.monotonic", lambda: clock)
        for after, nbytes in ((0, 9000), (0.25, 500), (0.001, 400), (0.001, 0), (0.248, 0), (0.25, 100)):
            clock, moved = clock + after, moved + nbytes
            publisher.publish_now()
            published = only_reading(tmp_path).snapshot
            assert published is not None
            (path,), (collective,) = published.io, published.collectives
            assert collective.sent_bytes_per_second == pytest.approx(path.read.bytes_per_second)
            rates.append((round(path.read.bytes_per_second), round(path.read.peak_bytes_per_second)))
    publisher.close()
    assert rates == [(0, 0), (2000, 2000), (2000, 2000), (2000, 2000), (1600, 2000), (400, 2000)]


def test_telemetry_loads_no_torch() -> None:
    code = "import sys, tiering, tiering.telemetry; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
