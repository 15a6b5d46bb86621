"""Readings of a status file: complete, torn, damaged, of another version."""

from __future__ import annotations

import os
import stat
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiering.telemetry.status_files import child, first_line, only_reading, snapshot
from tiering.telemetry import (
    StatusReading,
    StatusWriter,
    StepRecord,
    TelemetryError,
    find_status_files,
    sweep,
)
from tiering.telemetry import status_file as status_module


def test_what_is_published_is_read(tmp_path: Path) -> None:
    writer = StatusWriter("gpt", directory=tmp_path)
    assert only_reading(tmp_path) == StatusReading("live", None, None, "")
    for step in (1, 2, 3):
        writer.publish(snapshot(step))
        reading = only_reading(tmp_path)
        assert (reading.state, reading.snapshot, reading.reason) == ("live", snapshot(step), "")
        assert reading.heartbeat_age is not None
        assert 0 <= reading.heartbeat_age < 60
    assert stat.S_IMODE(writer.path.stat().st_mode) == 0o600
    writer.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="closed status file"):
        writer.publish(snapshot())


def test_two_runs_of_one_name_do_not_collide(tmp_path: Path) -> None:
    writers = [StatusWriter("a/b ../ü", rank, 4, directory=tmp_path) for rank in (0, 3, 0)]
    assert len({writer.path for writer in writers}) == 3
    assert [(file.run_name, file.rank) for file in find_status_files(tmp_path)] == [
        ("a_b_____", 0),
        ("a_b_____", 0),
        ("a_b_____", 3),
    ]
    for writer in writers:
        assert writer.path.parent == tmp_path
        writer.close()
    with pytest.raises(ValueError, match="rank 4 is outside a world of 4"):
        StatusWriter("a", 4, 4, directory=tmp_path)


def test_a_snapshot_too_large_loses_its_oldest_steps_first(tmp_path: Path) -> None:
    writer = StatusWriter("gpt", directory=tmp_path)
    writer.publish(snapshot(steps=[StepRecord(i, 1.0) for i in range(100)]))
    stored = only_reading(tmp_path).snapshot
    assert stored is not None
    assert [record.step for record in stored.steps] == list(range(68, 100))
    bulk = {"x" * (status_module.CAPACITY - 8000): 1.0}
    writer.publish(snapshot(stalls=bulk, steps=[StepRecord(i, 1.0) for i in range(100)]))
    stored = only_reading(tmp_path).snapshot
    assert stored is not None
    assert [record.step for record in stored.steps] == list(range(84, 100))
    with pytest.raises(TelemetryError, match="a status file holds 65536"):
        writer.publish(snapshot(stalls={"x" * status_module.CAPACITY: 1.0}))
    assert only_reading(tmp_path).snapshot == stored
    writer.close()


def test_a_reader_never_sees_half_an_update(tmp_path: Path) -> None:
    script = """
        writer = StatusWriter("gpt", directory=directory)
        say("ready")
        step = 0
        while True:
            step += 1
            stalls = {"x" * (step % 4000): 0}
            writer.publish(Snapshot("gpt", 0, 1, step, float(step), step=step, stalls=stalls))
            if step % 8 == 0:
                time.sleep(0.0005)
    """
    with child(script, tmp_path) as process:
        assert first_line(process) == "ready"
        steps: set[int] = set()
        end = time.monotonic() + 30
        while len(steps) < 50:
            assert time.monotonic() < end, f"only {len(steps)} whole readings"
            reading = only_reading(tmp_path)
            assert reading.state in ("live", "torn"), reading.reason
            if (published := reading.snapshot) is not None:
                assert published.pid == published.step
                assert published.started_at == published.step
                assert [len(cause) for cause in published.stalls] == [published.step % 4000]
                steps.add(published.step)


def test_an_unfinished_update_is_torn_while_its_writer_lives(tmp_path: Path) -> None:
    writer = StatusWriter("gpt", directory=tmp_path)
    writer.publish(snapshot())
    with writer.path.open("r+b") as file:
        os.pwrite(file.fileno(), (3).to_bytes(8, "little"), status_module.SEQUENCE_OFFSET)
    assert only_reading(tmp_path).state == "torn"
    assert only_reading(tmp_path).snapshot is None
    writer.publish(snapshot())
    assert only_reading(tmp_path).state == "live"
    writer.close()


def test_a_file_that_was_truncated_heals_and_its_writer_survives(tmp_path: Path) -> None:
    writer = StatusWriter("gpt", directory=tmp_path)
    writer.publish(snapshot())
    whole = writer.path.stat().st_size
    for length in (0, 5, 11, 12, 40, 63, 64, 65, 200):
        os.truncate(writer.path, length)
        reading = only_reading(tmp_path)
        assert (reading.state, reading.snapshot) == ("unreadable", None), length
        writer.publish(snapshot(length))
        healed = only_reading(tmp_path)
        assert (healed.state, healed.snapshot) == ("live", snapshot(length))
    assert writer.path.stat().st_size < whole
    writer.close()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_never_taken_for_content(tmp_path: Path, data: st.DataObject) -> None:
    directory = tmp_path / "damage"
    with closing(StatusWriter("gpt", directory=directory)) as writer:
        writer.publish(snapshot())
        damage(writer.path, data)
        reading = only_reading(directory)
        assert reading.snapshot in (None, snapshot())
        assert reading.state in ("live", "torn", "unreadable", "newer-version")


def damage(path: Path, data: st.DataObject) -> None:
    used = 64 + len(snapshot().to_json())
    content = bytearray(path.read_bytes()[:used])
    for _ in range(data.draw(st.integers(1, 4), label="flips")):
        content[data.draw(st.integers(0, used - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content[: data.draw(st.integers(0, used), label="length")])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300))
def test_garbage_is_unreadable(tmp_path: Path, content: bytes) -> None:
    directory = tmp_path / "garbage"
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / "junk.page").write_bytes(content)
    reading = only_reading(directory)
    assert (reading.state, reading.snapshot, reading.reason) == ("unreadable", None, "not a status file")


@pytest.mark.parametrize("offset", [32, 64 + 20])
def test_one_wrong_bit_in_heartbeat_or_payload_is_found(tmp_path: Path, offset: int) -> None:
    with closing(StatusWriter("gpt", directory=tmp_path)) as writer:
        writer.publish(snapshot(stalls={"é": 1.0}))
        with writer.path.open("r+b") as file:
            (byte,) = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([byte ^ 1]), offset)
        reading = only_reading(tmp_path)
        assert (reading.state, reading.snapshot) == ("unreadable", None)
        assert reading.reason == "the checksum does not match"


def test_a_newer_format_is_named_as_such(tmp_path: Path) -> None:
    writer = StatusWriter("gpt", 2, 4, directory=tmp_path)
    writer.publish(snapshot())
    with writer.path.open("r+b") as file:
        os.pwrite(file.fileno(), (2).to_bytes(4, "little"), 8)
    reading = only_reading(tmp_path)
    assert (reading.state, reading.snapshot) == ("newer-version", None)
    assert reading.reason == "format 2; this version reads formats up to 1"
    assert find_status_files(tmp_path)[0].rank == 2
    writer.close()


def test_things_that_are_no_files_are_unreadable_and_do_not_block(tmp_path: Path) -> None:
    (tmp_path / "directory.page").mkdir()
    os.mkfifo(tmp_path / "fifo.page")
    (tmp_path / "link.page").symlink_to("/etc/passwd")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.page")).touch()
    readings = {file.run_name: file.read() for file in find_status_files(tmp_path)}
    assert {name: reading.state for name, reading in readings.items()} == dict.fromkeys(
        ("directory", "fifo", "link", "?"), "unreadable"
    )
    assert sweep(tmp_path, keep_seconds=60) == []
