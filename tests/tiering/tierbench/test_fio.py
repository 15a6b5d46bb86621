"""What fio is asked to do, and what is read of its answer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiering.storage.swap_file import SwapFile
from tiering.tierbench.comparison import fio
from tiering.tierbench.comparison.fio import FioJob

BLOCK = 64 << 10
JOB = FioJob(("/disk/file",), 64 << 20, "read", BLOCK, 16)


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


class TestReport:
    def test_both_directions_count_over_the_longer_time(self) -> None:
        reading = fio.parse(fio_output())
        assert (reading.read_bytes, reading.written_bytes) == (3_000_000_000, 1_004_000_000)
        assert reading.seconds == pytest.approx(1.004)
        assert reading.cpu_seconds == pytest.approx(0.025 * 16)  # percent of the time of all jobs added up
        assert reading.rate == pytest.approx(3.98805e9, rel=1e-5)
        assert reading.cpu_per_gb == pytest.approx(0.4 / 4.004)

    def test_notes_before_the_json_are_skipped(self) -> None:
        notes = "note: both iodepth >= 1 and synchronous I/O engine are selected\n"
        assert fio.parse(notes + fio_output()) == fio.parse(fio_output())

    @pytest.mark.parametrize(
        ("output", "message"),
        [
            ("", "output is not valid JSON"),
            (json.dumps({"jobs": []}), "0 groups"),
            (fio_output(error=5), "Input/output error"),
            (fio_output(read={"io_bytes": 0}, write={"io_bytes": 0}), "transferred no bytes"),
        ],
    )
    def test_what_cannot_be_used_is_an_error(self, output: str, message: str) -> None:
        with pytest.raises(fio.FioError, match=message):
            fio.parse(output)


class TestCommand:
    def test_io_uring_registers_what_ours_registers(self) -> None:
        both = fio.command(JOB, "io_uring", ("registered_buffers", "registered_files"), 1.0)
        assert {
            "--fixedbufs=1",
            "--registerfiles=1",
            "--iodepth=16",
            "--direct=1",
            "--runtime=1000ms",
            "--allow_file_create=0",
        } <= set(both)
        files = fio.command(JOB, "io_uring", ("registered_files",), 1.0)
        assert {"--fixedbufs=0", "--registerfiles=1"} <= set(files)

    def test_threads_share_the_file_out(self) -> None:
        job = dataclasses.replace(JOB, rw="randrw")
        arguments = set(fio.command(job, "threads", (), 0.25))
        share = job.size // 16
        assert {
            "--ioengine=psync",
            "--numjobs=16",
            f"--size={share}",
            f"--offset_increment={share}",
        } <= arguments
        assert {"--rw=randrw", "--rwmixread=50", "--runtime=250ms"} <= arguments

    def test_each_file_is_a_job_of_its_own(self) -> None:
        job = dataclasses.replace(JOB, paths=("/a:b", "/c"), rw="write")
        arguments = fio.command(job, "libaio", (), 0.5, write_limit=4 << 20)
        assert arguments[-4:] == ["--name=peer", r"--filename=/a\:b", "--name=peer", "--filename=/c"]
        assert f"--rate=,{4 << 20}" in arguments  # for half a second, by two jobs

    def test_a_missing_fio_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        with pytest.raises(fio.FioError, match="apt-get install fio"):
            fio.version()

    @pytest.mark.parametrize(
        ("program", "why"),
        [
            ("#!/bin/sh\necho libaio.so.1 is missing >&2; exit 127\n", "libaio.so.1 is missing"),
            ("?", "Exec format"),
        ],
    )
    def test_a_fio_that_does_not_start_says_why(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str
    ) -> None:
        (tmp_path / "fio").write_text(program)
        (tmp_path / "fio").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(fio.FioMissingError, match=f"does not start: {why}"):
            fio.version()


@pytest.mark.skipif(shutil.which("fio") is None, reason=fio.MISSING)
class TestRun:
    """Real ones, on a nameless file that this process holds."""

    @pytest.fixture
    def job(self, tmp_path: Path) -> Iterator[FioJob]:
        file = SwapFile(tmp_path, 16 << 20)
        yield FioJob(
            (f"/proc/{os.getpid()}/fd/{file.fd}",), file.nbytes, "write", BLOCK, 4, direct=file.direct
        )
        file.close()
        assert list(tmp_path.iterdir()) == []

    def test_never_writes_more_than_it_may(self, job: FioJob) -> None:
        reading = fio.run(job, "libaio", (), 0.3, write_limit=1 << 20)
        assert reading.read_bytes == 0
        assert 0 < reading.written_bytes <= 1 << 20
        assert reading.written_bytes % BLOCK == 0

    def test_its_words_are_told_when_it_fails(self, job: FioJob) -> None:
        absent = dataclasses.replace(job, paths=(job.paths[0] + "999",))
        with pytest.raises(fio.FioError, match=r"status 1: .*file creation disallowed"):
            fio.run(absent, "libaio", (), 0.1)

    def test_ctrl_c_ends_it(self, job: FioJob) -> None:
        def interrupt() -> None:
            give_up = time.monotonic() + 60
            while not holders(job.paths[0]) and time.monotonic() < give_up:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        other = threading.Thread(target=interrupt)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            fio.run(job, "libaio", (), 120.0)
        other.join()
        assert holders(job.paths[0]) == []


def holders(path: str) -> list[str]:
    """Other processes that have the file open."""
    target, names = Path(path).stat(), []
    for process in Path("/proc").glob("[0-9]*"):
        for descriptor in process.glob("fd/*") if process.name != str(os.getpid()) else ():
            with contextlib.suppress(OSError):
                if os.path.samestat(descriptor.stat(), target):
                    names.append(process.name)
    return names
