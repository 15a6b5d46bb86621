"""A real ``tierd`` on loopback, with real writers that come, stop and die."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import service.cli

WRITER = """
import os, sys, time
from pathlib import Path
from tiering.telemetry import DirectionStatus, PageWriter, PathStatus, Publisher, Snapshot
writer = PageWriter("real", directory=Path(sys.argv[1]))
steps = iter(range(10**9))
def source():
    step = next(steps)
    io = [PathStatus("/nvme", "threads", True, DirectionStatus(bytes=step << 20, ops=step))]
    return Snapshot("real", 0, 1, os.getpid(), time.time(), step=step, phase="forward", io=io)
Publisher(writer, source, 0.02).start()
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def running(*command: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A child process and the first line it printed; ended and checked for tracebacks on the way out."""
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@contextmanager
def tierd(directory: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A sidecar on a free port and its base URL."""
    with running("-m", "service.cli", "--port", "0", "--dir", str(directory), *more) as (process, line):
        found = re.fullmatch(r"tierd: (http://127\.0\.0\.1:\d+)/ shows the runs in (.*)", line)
        assert found, line or process.communicate()[1]
        assert found[2] == str(directory)
        yield process, found[1]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


def states(url: str) -> list[str]:
    return [rank["state"] for run in get(url + "/v1/status")["runs"] for rank in run["ranks"]]


def until(condition: Callable[[], bool], limit: float = 30.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)


def test_it_follows_a_writer_from_start_to_death(tmp_path: Path) -> None:
    with tierd(tmp_path) as (process, url):
        assert get(url + "/v1/status") == {"runs": []}
        with running("-c", WRITER, str(tmp_path)) as (writer, line):
            assert line == "ready"
            assert states(url) == ["live"]
            (rank,) = get(url + "/v1/status")["runs"][0]["ranks"]
            assert rank["pid"] == writer.pid
            until(lambda: get(url + "/v1/status")["runs"][0]["ranks"][0]["step"] > rank["step"])
            until(
                lambda: (
                    get(url + "/v1/status")["runs"][0]["ranks"][0]["io"][0]["read"]["bytes_per_second"] > 0
                )
            )
            writer.kill()
            writer.wait()
            assert states(url) == ["stale"]
        (page,) = tmp_path.iterdir()
        os.utime(page, (time.time() - 31,) * 2)  # as if it had died half a minute ago
        assert states(url) == []
        assert list(tmp_path.iterdir()) == []
        assert process.poll() is None


def test_it_survives_whatever_lies_in_the_directory(tmp_path: Path) -> None:
    with tierd(tmp_path) as (process, url), running("-c", WRITER, str(tmp_path)) as (writer, _):
        (page,) = tmp_path.glob("*.page")
        writer.send_signal(signal.SIGSTOP)
        whole = page.read_bytes()
        os.truncate(page, 100)
        assert states(url) == ["unreadable"]
        page.write_bytes(b"\0" * 5000)
        assert states(url) == ["unreadable"]
        page.write_bytes(whole[:8] + b"\x09" + whole[9:])
        assert states(url) == ["newer-version"]
        (tmp_path / "garbage.page").write_bytes(os.urandom(3000))
        (tmp_path / "not-a-page.txt").write_text("hello")
        assert sorted(states(url)) == ["newer-version", "unreadable"]
        assert get(url + "/livez") == {"status": "ok"}
        # The writer goes on as if nothing had happened, and its page is whole again.
        writer.send_signal(signal.SIGCONT)
        until(lambda: sorted(states(url)) == ["live", "unreadable"])
        assert writer.poll() is None
        assert process.poll() is None


def test_a_writer_outlives_the_sidecar(tmp_path: Path) -> None:
    with running("-c", WRITER, str(tmp_path)) as (writer, _):
        with tierd(tmp_path) as (process, url):
            assert states(url) == ["live"]
            process.kill()
        with tierd(tmp_path) as (_, url):
            assert states(url) == ["live"]
        assert writer.poll() is None


def test_it_ends_cleanly_on_ctrl_c(tmp_path: Path) -> None:
    with tierd(tmp_path) as (process, url):
        assert get(url + "/livez") == {"status": "ok"}
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """``refused(*arguments)`` is the one line of a ``tierd`` that does not start, in this process."""
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: pytest.fail("it started"))

    def main(*arguments: str) -> str:
        assert service.cli.main([*arguments]) == 2
        output, errors = capfd.readouterr()
        assert output == ""
        (line,) = errors.splitlines()
        return line

    return main


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = ["-m", "service.cli", "--port", str(port), "--dir", str(tmp_path)]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"tierd: cannot listen on 127.0.0.1 port {port}: "
        "it is taken, perhaps by another tierd; choose another --port\n"
    )


def test_an_impossible_address_is_one_clear_line(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "port 99999: a port is a number from 0 to 65535" in refused(
        "--port", "99999", "--dir", str(tmp_path)
    )
    assert "cannot listen on 192.0.2.1 port 0: Cannot assign" in refused(
        "--host", "192.0.2.1", "--port", "0", "--dir", str(tmp_path)
    )


def test_a_bad_directory_is_one_clear_line(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "file").touch()
    assert f"run directory {tmp_path}/file is not a directory" in refused("--dir", str(tmp_path / "file"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert "writable by others (mode 0777)" in refused("--dir", str(tmp_path / "open"))


def test_the_run_directory_of_the_environment_is_the_default(tmp_path: Path) -> None:
    with running("-m", "service.cli", "--port", "0", TIERING_RUN_DIR=str(tmp_path)) as (_, line):
        assert line.endswith(f"shows the runs in {tmp_path}")
    with running("-m", "service.cli", "--host", "::1", "--port", "0", TIERING_RUN_DIR=str(tmp_path)) as (
        process,
        line,
    ):
        if not line:
            assert "cannot listen on ::1" in process.communicate()[1]
            pytest.skip("this machine has no IPv6 loopback")
        assert line.startswith("tierd: http://[::1]:")


def test_an_open_address_is_warned_about(tmp_path: Path) -> None:
    with running("-m", "service.cli", "--host", "0.0.0.0", "--port", "0", "--dir", str(tmp_path)) as (
        process,
        line,
    ):
        port = line.partition("0.0.0.0:")[2].partition("/")[0]
        get(f"http://127.0.0.1:{port}/livez")  # until then a signal may come before its handler
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert errors == "tierd: warning: whoever reaches this address can read the runs' names and figures\n"
