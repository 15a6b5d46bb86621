"""The command as it is run: a terminal, a pipe, Ctrl-C, exit codes, and nothing left behind."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tiering.tierbench import cli, exits
from tiering.tierbench.result import Result

MIB = 1 << 20
TIERBENCH = [sys.executable, "-m", "tiering.tierbench.cli"]
SHORT = ["--size", "8M", "--bs", "64k", "--iodepth", "4", "--runtime", "50ms"]


def tierbench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TIERBENCH, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def in_terminal(columns: int, *arguments: str | Path) -> tuple[int, str]:
    """Exit code and all that a terminal of so many columns was sent."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "CI"):
        environment.pop(name, None)
    with subprocess.Popen(
        [*TIERBENCH, *map(str, arguments)], stdin=follower, stdout=follower, stderr=follower, env=environment
    ) as process:
        os.close(follower)
        output = b""
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # EIO: the other end is closed
                break
            if not part:
                break
            output += part
    os.close(leader)
    return process.returncode, output.decode()


def shown(output: str) -> list[str]:
    """The lines as they stay on the screen, without what moves the cursor or sets colours."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    return [line.split("\r")[-1] for line in plain.replace("\r\n", "\n").split("\n")]


@pytest.mark.parametrize("columns", [80])
def test_a_terminal_gets_one_screen_and_moving_progress(tmp_path: Path, columns: int) -> None:
    code, output = in_terminal(columns, tmp_path, *SHORT, "--runtime", "0.3")
    lines = shown(output)
    assert code == 0
    assert "\x1b[" in output
    # Only a command to paste, which names the directory, may be wider.
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= columns
    assert len(lines) <= 60
    text = "\n".join(lines)
    for word in (
        "read",
        "write",
        "mixed",
        "GB/s",
        "p99",
        "6.74B model",
        '"queue_depth": 4',
        '"block_size": "64KiB"',
    ):
        assert word in text


def test_a_pipe_gets_data_alone_and_stderr_plain_lines(tmp_path: Path) -> None:
    ran = tierbench(tmp_path, *SHORT, "--json", "--rw", "read,randrw")
    assert ran.returncode == 0, ran.stderr
    result = Result.model_validate_json(ran.stdout)
    assert [row.rw for row in result.rows] == ["read", "randrw"]
    assert result.command.startswith(f"tierbench {tmp_path} --size 8M")
    assert "\x1b" not in ran.stderr
    assert "\r" not in ran.stderr
    assert "read" in ran.stderr
    assert tierbench(tmp_path, *SHORT, "--rw", "read", "--csv", "--quiet").stderr == ""


def test_output_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [*TIERBENCH, str(tmp_path), *SHORT, "--rw", "read", "--json", "--quiet"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert ran.returncode == exits.FAILED
    assert (
        ran.stderr == "tierbench: standard output cannot be written: No space left on device; free space,"
        " or redirect it elsewhere\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_prints_what_there_is_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    process = subprocess.Popen(
        [*TIERBENCH, str(tmp_path), *SHORT, "--runtime", "30", "--rw", "read,write", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while not process.stderr.readline().startswith("tierbench: read, "):
        assert process.poll() is None, process.stderr.read()
    time.sleep(0.3)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == exits.INTERRUPTED
    result = Result.model_validate_json(output)
    assert result.interrupted
    assert [(row.rw, row.complete) for row in result.rows] == [("read", False)]
    assert result.rows[0].bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_gives_its_space_back(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(64 * MIB)
    free = os.statvfs(disk).f_bfree
    process = subprocess.Popen(
        [*TIERBENCH, str(disk), "--size", "32M", "--runtime", "30"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    while not process.stderr.readline().startswith("tierbench: read, "):
        assert process.poll() is None, process.stderr.read()
    assert os.statvfs(disk).f_bfree < free
    process.kill()
    process.wait()
    process.stderr.close()
    for _ in range(100):  # the kernel lets go of a killed process's ring a moment later
        if os.statvfs(disk).f_bfree == free:
            break
        time.sleep(0.05)
    assert os.statvfs(disk).f_bfree == free
    assert {path.name for path in disk.iterdir()} <= {"lost+found"}


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ran(*arguments: str | Path) -> tuple[int, str]:
        code = cli.main([*map(str, arguments), "--quiet"])
        return code, capsys.readouterr().err

    short = [*SHORT, "--rw", "read,write"]
    assert ran(tmp_path, *short) == (exits.OK, "")
    code, output = ran(tmp_path, *short, "--fail-under", "1TiB/s")
    assert code == exits.BELOW
    assert re.search(r"tierbench: read: \d+\.\d\d GB/s is below --fail-under 1099\.51 GB/s", output)
    assert ran(tmp_path, *short, "--fail-under", "1K/s")[0] == exits.OK
    code, output = ran("/dev/null", *short)
    assert (code, output.count("\n")) == (exits.UNSAFE, 1)
    assert "is a device" in output
    code, output = ran(tmp_path / "missing", *short)
    assert code == exits.USAGE
    assert "create it (mkdir -p" in output
    assert ran(tmp_path / "a\x1b[2Jb", *short)[1].count("a\\x1b[2Jb") == 2
    code, output = ran(tmp_path, *short, "--bs", "1MB")
    assert code == exits.USAGE
    assert "1000000 bytes" in output
    for *wrong, words in (
        ["--params", "7X", "--params: invalid number of parameters '7X'"],
        ["--params", "1", "no decoder of 1 parameters"],
        ["--plot", str(tmp_path / "a.txt"), "a.txt"],
    ):
        code, output = ran(tmp_path, *short, *wrong)
        assert code == exits.USAGE, wrong
        assert words in output


@pytest.mark.parametrize(
    "wrong", [[], ["--bs", "4X"], ["--rw", "trim"], ["--direct", "2"], ["--runtime", "-1"]]
)
def test_what_argparse_refuses_is_a_usage_error(tmp_path: Path, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([str(tmp_path), *wrong] if wrong else [])
    assert caught.value.code == exits.USAGE


@pytest.mark.parametrize("command", [[], ["tune"], ["profile"], ["tiers"], ["compare", "--fio"]])
def test_an_empty_name_is_no_directory(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*command, ""])
    assert caught.value.code == exits.USAGE
    assert "an empty name is not a directory" in capsys.readouterr().err


def test_repeated_runs_in_a_process_add_no_log_handlers(logging_as_before: None, tmp_path: Path) -> None:
    log = logging.getLogger("tiering")
    log.handlers = []
    counts = []
    for _ in range(3):
        assert cli.main([str(tmp_path / "missing"), "--quiet"]) == exits.USAGE
        counts.append(len(log.handlers))
    assert counts == [1, 1, 1]


def test_what_was_not_measured_is_too_slow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiering.tierbench.load.work_files import WorkFiles

    may_write = WorkFiles.may_write  # the files once, and nothing more
    monkeypatch.setattr(
        WorkFiles, "may_write", lambda files, n: not files.written_bytes and may_write(files, n)
    )
    code = cli.main([str(tmp_path), *SHORT, "--rw", "read,randwrite", "--quiet", "--fail-under", "1K/s"])
    assert code == exits.BELOW
    assert "random write: not measured, so it does not reach --fail-under" in capsys.readouterr().err


def test_an_engine_that_does_not_start_is_a_wrong_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tiering.errors import SwapError
    from tiering.tierbench.load import windows

    def refuse(**options: object) -> None:
        raise SwapError("I/O engine 'io_uring' cannot start", errno=1, filename="", offset=0)

    monkeypatch.setattr(windows, "AioContext", refuse)
    assert cli.main([str(tmp_path), *SHORT, "--quiet", "--ioengine", "io_uring"]) == exits.USAGE
    assert "--ioengine io_uring: I/O engine 'io_uring' cannot start" in capsys.readouterr().err


def test_progress_that_nobody_takes_ends_nothing(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [*TIERBENCH, str(tmp_path), *SHORT, "--rw", "read", "--json"], stdout=subprocess.PIPE, stderr=full
        )
    assert ran.returncode == exits.OK
    assert Result.model_validate_json(ran.stdout).rows


def test_a_second_run_in_the_same_place_is_refused(tmp_path: Path) -> None:
    from tiering.tierbench.load import target

    with target.alone_in([tmp_path]):
        ran = tierbench(tmp_path, *SHORT)
    assert ran.returncode == exits.UNSAFE
    assert "another tierbench is running" in ran.stderr


def test_wrong_bytes_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tiering.tierbench.load.windows import Load

    def checked(load: Load, **_: object) -> None:
        file = Path(f"/proc/self/fd/{load.work_files.files[0][0].fd}")
        with file.open("r+b", buffering=0) as other:
            os.pwrite(other.fileno(), b"x", 4096)
            os.fsync(other.fileno())
        return load._run_interval("read", None, 0.0, None, once=True)

    monkeypatch.setattr(Load, "check", checked)
    assert cli.main([str(tmp_path), *SHORT, "--verify", "--quiet"]) == exits.FAILED
    assert "differ from the bytes written" in capsys.readouterr().err


def test_neither_help_nor_a_run_loads_torch(tmp_path: Path) -> None:
    program = f"""
import sys
from tiering.tierbench import cli, exits
heavy = lambda: {{"torch", "pydantic", "numpy", "rich.console"}} & set(sys.modules)
try:
    cli.main(["--help"])
except SystemExit:
    pass
assert not heavy(), heavy()
assert cli.main([{str(tmp_path)!r}, "--rw", "read", *{SHORT!r}, "--json", "--quiet"]) == 0
assert not {{"torch", "numpy", "rich.console"}} & heavy(), heavy()
"""
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    ran = subprocess.run(
        f"{sys.executable} -m tiering.tierbench.cli {tmp_path} {' '.join(SHORT)} --rw read --csv | head -c 1",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in ran.stderr
    assert ran.stdout == "s"
