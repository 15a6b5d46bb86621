"""Telemetry pages: what is written is read, the dead are told from the living, and damage never spreads."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiering.telemetry import (
    CollectiveStatus,
    ConfigurationStatus,
    Description,
    DirectionStatus,
    Page,
    PageReading,
    PageWriter,
    PathStatus,
    PlannedTier,
    PlanStatus,
    Publisher,
    SettingStatus,
    Snapshot,
    StepRecord,
    TelemetryError,
    TierStatus,
    find_pages,
    run_directory,
    sweep,
    with_rates,
)
from tiering.telemetry import page as page_module

GIB = 1 << 30


def snapshot(step: int = 7, **changes: object) -> Snapshot:
    return replace(
        Snapshot(
            run_name="gpt",
            rank=0,
            world_size=1,
            pid=os.getpid(),
            started_at=1_700_000_000.5,
            step=step,
            phase="backward",
            loss=2.25,
            tiers=[TierStatus("nvme", 4 * GIB, 100 * GIB, 3 * GIB, 3 * GIB, {"optimizer state": 3 * GIB})],
            io=[PathStatus("/nvme", "libaio", True, DirectionStatus(bytes=10, ops=2, busy_seconds=0.5))],
            collectives=[CollectiveStatus("reduce", 3, 4096, 12.5)],
            stalls={"parameter fetch": 0.25},
            steps=[StepRecord(step, 1.5, 0.25, 0.5, 0.75, 0.125, 30, 24, 18)],
        ),
        **changes,
    )


def only_reading(directory: Path) -> PageReading:
    (page,) = find_pages(directory)
    return page.read()


def until(condition: Callable[[], bool], limit: float = 20.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.01)


@contextmanager
def child(script: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has printed its first line; killed at the end."""
    prelude = """
        import os, sys, time
        from pathlib import Path
        from tiering.telemetry import *
        directory = Path(sys.argv[1])
        def say(text): print(text, flush=True)
        def snap(step): return Snapshot("gpt", 0, 1, os.getpid(), 1.0, step=step)
    """
    code = textwrap.dedent(prelude) + textwrap.dedent(script)
    command = [sys.executable, "-c", code, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# --- snapshots ------------------------------------------------------------------------------------------


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


def test_bytes_sent_have_a_rate_by_kind() -> None:
    def sample(**sent: int) -> Snapshot:
        return snapshot(collectives=[CollectiveStatus(kind, 1, nbytes) for kind, nbytes in sent.items()])

    def rates(now: Snapshot, before: Snapshot | None) -> list[float]:
        return [one.sent_bytes_per_second for one in with_rates(now, before, 0.5).collectives]

    assert rates(sample(reduce=900, control=8), sample(reduce=400)) == [1000.0, 0.0]
    assert rates(sample(reduce=900), None) == [0.0]
    assert rates(sample(reduce=300), sample(reduce=400)) == [0.0]


def test_rates_are_never_negative_or_infinite() -> None:
    now, before = snapshot(), snapshot(io=[PathStatus("/nvme", "threads", True, DirectionStatus(bytes=11))])
    assert with_rates(now, before, 1.0).io[0].read.bytes_per_second == 0.0
    assert with_rates(now, replace(now, io=[]), 1.0).io[0].read.bytes_per_second == 0.0
    assert with_rates(now, before, 0.0).io[0].read.bytes_per_second == 0.0


def test_peaks_never_fall_and_come_from_whole_windows(tmp_path: Path) -> None:
    clock, moved = 100.0, 0

    def source() -> Snapshot:
        direction = DirectionStatus(bytes=moved)
        return snapshot(
            io=[PathStatus("/nvme", "threads", True, direction)],
            collectives=[CollectiveStatus("reduce", 1, moved)],
        )

    publisher = Publisher(PageWriter("gpt", directory=tmp_path), source, interval=0.25)
    told = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tiering.telemetry.publisher.time.monotonic", lambda: clock)
        for after, nbytes in ((0, 9000), (0.25, 500), (0.001, 400), (0.001, 0), (0.248, 0), (0.25, 100)):
            clock, moved = clock + after, moved + nbytes
            publisher.publish_now()
            said = only_reading(tmp_path).snapshot
            assert said is not None
            (path,), (sent,) = said.io, said.collectives
            assert sent.sent_bytes_per_second == pytest.approx(path.read.bytes_per_second)
            told.append((round(path.read.bytes_per_second), round(path.read.peak_bytes_per_second)))
    publisher.close()
    assert told == [(0, 0), (2000, 2000), (2000, 2000), (2000, 2000), (1600, 2000), (400, 2000)]


# --- the run directory ----------------------------------------------------------------------------------


def test_the_run_directory_is_chosen_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TIERING_RUN_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert run_directory() == tmp_path / f"tiering-{os.geteuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert run_directory() == tmp_path / f"tiering-{os.geteuid()}"
    (tmp_path / "xdg").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    assert run_directory() == tmp_path / "xdg" / "tiering"
    monkeypatch.setenv("TIERING_RUN_DIR", str(tmp_path / "mine"))
    assert run_directory() == tmp_path / "mine"
    assert find_pages() == []
    assert [path.name for path in tmp_path.iterdir()] == ["xdg"], "who only looks makes no directory"
    with closing(PageWriter("gpt")) as writer:
        assert [page.path for page in find_pages()] == [writer.path]
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directories_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, 12345)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TIERING_RUN_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(theirs))
    assert run_directory() == tmp_path / f"tiering-{os.geteuid()}"
    with pytest.raises(TelemetryError, match="owned by user 12345"):
        PageWriter("gpt", directory=theirs)
    mine = tmp_path / "mine"
    with_page = PageWriter("gpt", directory=mine)
    os.chown(with_page.path, 12345, 12345)
    assert find_pages(mine) == []
    with_page.close()


def test_a_directory_that_is_open_to_others_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    for mode in (0o770, 0o755, 0o701):
        shared.chmod(mode)
        told = rf"{shared} is open to others \(mode {mode:04o}\); close it: chmod 700 {shared}$"
        with pytest.raises(TelemetryError, match=told):
            PageWriter("gpt", directory=shared)
        with pytest.raises(TelemetryError, match=told):
            find_pages(shared)
    link = tmp_path / "link"
    (tmp_path / "target").mkdir(mode=0o700)
    link.symlink_to(tmp_path / "target")
    with pytest.raises(TelemetryError, match="symbolic link"):
        find_pages(link)
    (tmp_path / "file").touch()
    with pytest.raises(TelemetryError, match="not a directory"):
        find_pages(tmp_path / "file")
    with pytest.raises(TelemetryError, match="No such file"):
        PageWriter("gpt", directory=tmp_path / "a" / "b")
    assert find_pages(tmp_path / "a" / "b") == []


# --- writing and reading --------------------------------------------------------------------------------


def test_what_is_published_is_read(tmp_path: Path) -> None:
    writer = PageWriter("gpt", directory=tmp_path)
    assert only_reading(tmp_path) == PageReading("live", None, None, "")
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
    with pytest.raises(ValueError, match="closed page"):
        writer.publish(snapshot())


def test_two_runs_of_one_name_do_not_collide(tmp_path: Path) -> None:
    writers = [PageWriter("a/b ../ü", rank, 4, directory=tmp_path) for rank in (0, 3, 0)]
    assert len({writer.path for writer in writers}) == 3
    assert [(page.run_name, page.rank) for page in find_pages(tmp_path)] == [
        ("a_b_____", 0),
        ("a_b_____", 0),
        ("a_b_____", 3),
    ]
    for writer in writers:
        assert writer.path.parent == tmp_path
        writer.close()
    with pytest.raises(ValueError, match="rank 4 is outside a world of 4"):
        PageWriter("a", 4, 4, directory=tmp_path)


def test_a_snapshot_too_large_loses_its_oldest_steps_first(tmp_path: Path) -> None:
    writer = PageWriter("gpt", directory=tmp_path)
    writer.publish(snapshot(steps=[StepRecord(i, 1.0) for i in range(100)]))
    kept = only_reading(tmp_path).snapshot
    assert kept is not None
    assert [record.step for record in kept.steps] == list(range(68, 100))
    bulk = {"x" * (page_module.CAPACITY - 5500): 1.0}
    writer.publish(snapshot(stalls=bulk, steps=[StepRecord(i, 1.0) for i in range(100)]))
    kept = only_reading(tmp_path).snapshot
    assert kept is not None
    assert [record.step for record in kept.steps] == list(range(84, 100))
    with pytest.raises(TelemetryError, match="a page holds 65536"):
        writer.publish(snapshot(stalls={"x" * page_module.CAPACITY: 1.0}))
    assert only_reading(tmp_path).snapshot == kept
    writer.close()


def test_a_reader_never_sees_half_an_update(tmp_path: Path) -> None:
    script = """
        writer = PageWriter("gpt", directory=directory)
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
        seen: set[int] = set()
        end = time.monotonic() + 30
        while len(seen) < 50:
            assert time.monotonic() < end, f"only {len(seen)} whole readings"
            reading = only_reading(tmp_path)
            assert reading.state in ("live", "torn"), reading.reason
            if (said := reading.snapshot) is not None:
                assert said.pid == said.step
                assert said.started_at == said.step
                assert [len(cause) for cause in said.stalls] == [said.step % 4000]
                seen.add(said.step)


def test_an_unfinished_update_is_torn_while_its_writer_lives(tmp_path: Path) -> None:
    writer = PageWriter("gpt", directory=tmp_path)
    writer.publish(snapshot())
    with writer.path.open("r+b") as file:
        os.pwrite(file.fileno(), (3).to_bytes(8, "little"), page_module.SEQUENCE_OFFSET)
    assert only_reading(tmp_path).state == "torn"
    assert only_reading(tmp_path).snapshot is None
    writer.publish(snapshot())
    assert only_reading(tmp_path).state == "live"
    writer.close()


def describing(*notes: tuple[Any, str]) -> Description:
    return Description(
        device="cpu",
        versions={"torch": "2.13"},
        configuration=ConfigurationStatus(
            source="/ds.json",
            outcome="batch 3",
            counts={"honoured": 1},
            settings=[
                SettingStatus(f"key.{i}", [i, None], origin, "honoured", note)
                for i, (origin, note) in enumerate(notes)
            ],
        ),
        plan=PlanStatus([PlannedTier("host", 9, 7, {"staging": 7})], {"gradients": 5}, {}, {}, 2, 640),
    )


def test_a_description_comes_with_every_snapshot_and_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [describing(("file", "é"), ("default", str(rank))) for rank in range(70)]
    read, kept = Mock(wraps=Description.from_json), None
    monkeypatch.setattr(page_module.Description, "from_json", read)
    writers = [PageWriter("gpt", rank, 70, tmp_path, one) for rank, one in enumerate(told)]
    for step in (1, 2):
        for writer in writers:
            writer.publish(snapshot(step))
        kept = [page.read() for page in find_pages(tmp_path)]  # with what was read before still at hand
        assert [(one.state, one.description, one.snapshot) for one in kept] == [
            ("live", description, snapshot(step)) for description in told
        ]
    assert read.call_count == len(told)
    del kept
    only_one = Page(writers[0].path, "gpt", 0)
    assert (only_one.read().description, read.call_count) == (told[0], len(told) + 1), "and then let go of"
    for writer in writers:
        writer.close()


def test_a_damaged_description_is_none(tmp_path: Path) -> None:
    at = 64 + page_module.CAPACITY + 20
    with closing(PageWriter("gpt", directory=tmp_path, description=describing(("file", "é")))) as writer:
        writer.publish(snapshot(stalls={"x" * 60_000: 1.0}))
        with writer.path.open("r+b") as file:
            (byte,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
        reading = only_reading(tmp_path)
        assert (reading.state, reading.description, reading.snapshot is None) == ("live", None, False)
        os.truncate(writer.path, at)
        assert only_reading(tmp_path).description is None
    with closing(PageWriter("gpt", directory=tmp_path)) as writer:
        writer.publish(snapshot())
        assert only_reading(tmp_path).description is None


def test_a_description_too_large_loses_what_is_least_missed(tmp_path: Path) -> None:
    whole = describing(("file", "a" * 300), ("default", "b" * 300), ("auto", "c" * 300))
    assert whole.configuration is not None
    given, default, auto = whole.configuration.settings
    fewer: list[list[SettingStatus]] = [
        [given, default, auto],
        [given, replace(default, note=""), auto],
        [given, auto],
        [],
    ]
    for kept_settings in fewer:
        fitted = replace(whole, configuration=replace(whole.configuration, settings=kept_settings))
        size = len(fitted.to_json())
        assert Description.from_json(whole.fitted(size)) == fitted
    assert Description.from_json(whole.fitted(size - 1)) == replace(whole, configuration=None)
    huge = describing(("default", "b" * page_module.LARGEST_DESCRIPTION), ("file", "a"))
    with closing(PageWriter("gpt", directory=tmp_path, description=huge)) as writer:
        writer.publish(snapshot())
        kept = only_reading(tmp_path).description
        assert kept is not None and kept.configuration is not None
        assert [setting.note for setting in kept.configuration.settings] == ["", "a"]


def test_headers_of_later_minor_versions_are_read(tmp_path: Path) -> None:
    told = describing(("file", "n"))
    with closing(PageWriter("gpt", directory=tmp_path, description=told)) as writer:
        writer.publish(snapshot())
        raw = writer.path.read_bytes()
        header = bytearray(raw[:64].ljust(120, b"?"))
        header[12:16] = (120).to_bytes(4, "little")
        writer.path.write_bytes(bytes(header) + raw[64:])
        reading = only_reading(tmp_path)
        assert (reading.state, reading.snapshot, reading.description) == ("live", snapshot(), told)


# --- life and death -------------------------------------------------------------------------------------


def test_a_killed_writer_leaves_a_stale_page_that_the_next_one_sweeps(tmp_path: Path) -> None:
    script = 'w = PageWriter("gpt", directory=directory); w.publish(snap(41)); say("ready"); time.sleep(600)'
    with child(script, tmp_path) as process:
        assert first_line(process) == "ready"
        assert only_reading(tmp_path).state == "live"
        assert sweep(tmp_path) == []
        process.kill()
        process.wait()
    reading = only_reading(tmp_path)
    assert (reading.state, reading.reason) == ("stale", "the writer is gone")
    assert reading.snapshot is not None
    assert reading.snapshot.step == 41
    (dead,) = find_pages(tmp_path)
    assert sweep(tmp_path, keep_seconds=3600) == []
    os.utime(dead.path, (time.time() + 3600,) * 2)  # as after a clock was set back
    writer = PageWriter("next", directory=tmp_path)
    assert [page.path for page in find_pages(tmp_path)] == [writer.path]
    assert dead.read() == PageReading("stale", None, None, "the page has been removed")
    writer.close()


def test_a_stopped_writer_is_live_and_old(tmp_path: Path) -> None:
    script = 'w = PageWriter("gpt", directory=directory); w.publish(snap(1)); say("ready"); time.sleep(600)'
    with child(script, tmp_path) as process:
        assert first_line(process) == "ready"
        process.send_signal(signal.SIGSTOP)
        before = only_reading(tmp_path)
        until(lambda: (only_reading(tmp_path).heartbeat_age or 0) > (before.heartbeat_age or 0) + 0.05)
        assert only_reading(tmp_path).state == "live"


def test_death_in_the_middle_of_an_update_is_stale_without_content(tmp_path: Path) -> None:
    script = """
        writer = PageWriter("gpt", directory=directory)
        writer.publish(snap(1))
        os.pwrite(writer._fd, (3).to_bytes(8, "little"), 24)
        say("ready")
        time.sleep(600)
    """
    with child(script, tmp_path) as process:
        assert first_line(process) == "ready"
        process.kill()
        process.wait()
    reading = only_reading(tmp_path)
    assert (reading.state, reading.snapshot) == ("stale", None)
    assert reading.reason == "the writer died during an update"


def test_a_forked_child_neither_holds_the_lock_nor_removes_the_page(tmp_path: Path) -> None:
    script = """
        writer = PageWriter("gpt", directory=directory)
        publisher = Publisher(writer, lambda: snap(5), 0.01)
        publisher.start()
        locks = writer._lock, publisher._lock
        for lock in locks: lock.acquire()  # as if the publishing thread were in the middle of it
        pid = os.fork()
        if pid == 0:
            writer.publish(snap(99))
            publisher.publish_now()
            publisher.close()
            writer.close()
            say("child done")
            time.sleep(600)
        for lock in locks: lock.release()
        sys.stdin.read()
        os.kill(pid, 9)
        say("parent done")
        os.kill(os.getpid(), 9)
    """
    with child(script, tmp_path) as process:
        assert first_line(process) == "child done"
        reading = only_reading(tmp_path)
        assert (reading.state, reading.snapshot and reading.snapshot.step) == ("live", 5)
        assert process.stdin is not None
        process.stdin.close()
        assert first_line(process) == "parent done"
        process.wait()
    assert only_reading(tmp_path).state == "stale"


def test_a_surviving_child_does_not_make_a_dead_run_look_alive(tmp_path: Path) -> None:
    script = """
        writer = PageWriter("gpt", directory=directory)
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        say(pid)
        time.sleep(600)
    """
    with child(script, tmp_path) as process:
        orphan = int(first_line(process))
        try:
            process.kill()
            process.wait()
            until(lambda: only_reading(tmp_path).state == "stale")
            os.kill(orphan, 0)  # it is still there, and holds nothing
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_a_child_forked_while_a_page_is_made_does_not_keep_its_lock(tmp_path: Path) -> None:
    script = """
        import threading
        def fork():
            if os.fork() == 0:
                say(os.getpid())
                time.sleep(600)
        forking = threading.Thread(target=fork)
        reserve = os.posix_fallocate
        def interrupted(*arguments):
            forking.start()
            forking.join(0.3)  # it is held up, and goes on when the page is made
            reserve(*arguments)
        os.posix_fallocate = interrupted
        writer = PageWriter("gpt", directory=directory)
        forking.join()
        time.sleep(600)
    """
    with child(script, tmp_path) as process:
        orphan = int(first_line(process))
        try:
            (page,) = find_pages(tmp_path)
            assert page.read().state == "live"
            process.kill()
            process.wait()
            until(lambda: page.read().state == "stale")
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_a_page_under_construction_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, left_behind = tmp_path / "gpt.0.1-aa.new", tmp_path / "gpt.0.2-bb.new"
    fresh.touch()
    left_behind.touch()
    os.utime(left_behind, (time.time() - 3600,) * 2)
    foreign = tmp_path / "thesis.new"  # in a directory that somebody else uses, too
    foreign.touch()
    os.utime(foreign, (time.time() - 3600,) * 2)
    assert sweep(tmp_path) == [left_behind]
    assert fresh.exists() and foreign.exists()
    assert find_pages(tmp_path) == []
    with monkeypatch.context() as patch:  # a sweeper that is stopped with its lock would stop its writer, too
        patch.setattr(page_module.fcntl, "flock", lambda *_: pytest.fail("asked for the lock"))
        assert sweep(tmp_path) == []


# --- damage ---------------------------------------------------------------------------------------------


def test_a_page_that_was_truncated_heals_and_its_writer_survives(tmp_path: Path) -> None:
    writer = PageWriter("gpt", directory=tmp_path)
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
    with closing(PageWriter("gpt", directory=directory)) as writer:
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
    assert (reading.state, reading.snapshot, reading.reason) == ("unreadable", None, "not a telemetry page")


@pytest.mark.parametrize("offset", [32, 64 + 20])
def test_one_wrong_bit_in_heartbeat_or_payload_is_found(tmp_path: Path, offset: int) -> None:
    with closing(PageWriter("gpt", directory=tmp_path)) as writer:
        writer.publish(snapshot(stalls={"é": 1.0}))
        with writer.path.open("r+b") as file:
            (byte,) = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([byte ^ 1]), offset)
        reading = only_reading(tmp_path)
        assert (reading.state, reading.snapshot) == ("unreadable", None)
        assert reading.reason == "the checksum does not match"


def test_a_newer_format_is_named_as_such(tmp_path: Path) -> None:
    writer = PageWriter("gpt", 2, 4, directory=tmp_path)
    writer.publish(snapshot())
    with writer.path.open("r+b") as file:
        os.pwrite(file.fileno(), (2).to_bytes(4, "little"), 8)
    reading = only_reading(tmp_path)
    assert (reading.state, reading.snapshot) == ("newer-version", None)
    assert reading.reason == "format 2; this reader knows up to 1"
    assert find_pages(tmp_path)[0].rank == 2
    writer.close()


def test_things_that_are_no_files_are_unreadable_and_do_not_block(tmp_path: Path) -> None:
    (tmp_path / "directory.page").mkdir()
    os.mkfifo(tmp_path / "fifo.page")
    (tmp_path / "link.page").symlink_to("/etc/passwd")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.page")).touch()
    readings = {page.run_name: page.read() for page in find_pages(tmp_path)}
    assert {name: reading.state for name, reading in readings.items()} == dict.fromkeys(
        ("directory", "fifo", "link", "?"), "unreadable"
    )
    assert sweep(tmp_path, keep_seconds=60) == []


# --- the publisher --------------------------------------------------------------------------------------


def test_the_publisher_keeps_the_page_fresh_and_fills_in_rates(tmp_path: Path) -> None:
    moved = iter(range(0, 1 << 40, 1000))

    def source() -> Snapshot:
        return snapshot(io=[PathStatus("/nvme", "threads", True, DirectionStatus(bytes=next(moved)))])

    def rate() -> float:
        said = only_reading(tmp_path).snapshot
        return said.io[0].read.bytes_per_second if said is not None else 0.0

    publisher = Publisher(PageWriter("gpt", directory=tmp_path), source, interval=0.02)
    publisher.start()
    assert only_reading(tmp_path).snapshot is not None
    until(lambda: rate() > 0)
    publisher.close()
    publisher.close()
    assert find_pages(tmp_path) == []
    assert "tiering-telemetry" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ValueError, match="started before"):
        publisher.start()


def test_publish_now_does_not_wait_for_the_interval(tmp_path: Path) -> None:
    steps = iter(range(100))
    publisher = Publisher(PageWriter("gpt", directory=tmp_path), lambda: snapshot(next(steps)), interval=3600)
    publisher.start()
    publisher.publish_now()
    said = only_reading(tmp_path).snapshot
    assert said is not None
    assert said.step == 1
    publisher.close()


def test_a_source_that_raises_is_logged_once_and_forgiven(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = iter(range(1000))

    def source() -> Snapshot:
        if next(calls) < 5:
            raise RuntimeError("the engine is not ready")
        return snapshot()

    with caplog.at_level(logging.ERROR):
        publisher = Publisher(PageWriter("gpt", directory=tmp_path), source, interval=0.01)
        publisher.start()
        until(lambda: only_reading(tmp_path).snapshot is not None)
        publisher.close()
    (record,) = caplog.records
    assert record.name.startswith("tiering.telemetry")
    assert "the engine is not ready" in (record.exc_text or "")


def test_publish_now_does_not_deadlock_with_a_source_that_needs_the_callers_lock(tmp_path: Path) -> None:
    engine = threading.RLock()

    def source() -> Snapshot:
        with engine:
            return snapshot()

    publisher = Publisher(PageWriter("gpt", directory=tmp_path), source, interval=0.001)
    publisher.start()
    for _ in range(50):
        with engine:
            time.sleep(0.002)  # long enough for the thread to be waiting inside the source
            publisher.publish_now()
    publisher.close()
    assert find_pages(tmp_path) == []


def test_the_end_of_the_interpreter_removes_the_page(tmp_path: Path) -> None:
    script = """
        publisher = Publisher(PageWriter("gpt", directory=directory), lambda: snap(1))
        publisher.start()
        say(len(find_pages(directory)))
    """
    with child(script, tmp_path) as process:
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "1\n")
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_run_does_not_fail_for_its_directory(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    publisher = Publisher(PageWriter("gpt", directory=directory), snapshot, 60)
    publisher.start()
    directory.rename(tmp_path / "moved")
    directory.write_text("another's")
    publisher.close()
    assert only_reading(tmp_path / "moved").state == "stale"


def test_a_page_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    told = describing(("file", "n"))
    writer = PageWriter("gpt", directory=directory, description=told)
    steps = iter(range(100))
    publisher = Publisher(writer, lambda: snapshot(next(steps)), 3600)
    publisher.start()
    for remove in (writer.path.unlink, lambda: shutil.rmtree(directory)):
        remove()
        assert find_pages(directory) == []
        publisher.publish_now()
        (page,) = find_pages(directory)
        reading = page.read()
        assert (page.path, reading.state, reading.description) == (writer.path, "live", told)
    parent = tmp_path.rename(tmp_path.with_name("elsewhere"))
    shutil.rmtree(parent / "run")
    publisher.publish_now()  # as after a logout, until the next login
    parent.rename(tmp_path)
    publisher.publish_now()
    (page,) = find_pages(directory)
    assert page.read().snapshot.step == 4
    shutil.rmtree(directory)
    publisher.close()
    publisher.publish_now()
    assert not directory.exists()


def test_telemetry_loads_no_torch() -> None:
    code = "import sys, tiering, tiering.telemetry; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
