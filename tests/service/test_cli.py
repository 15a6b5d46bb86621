"""What ``tierd`` refuses to start with, in one line each, and what it makes of its arguments."""

from __future__ import annotations

import json
import logging
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import uvicorn

import service.cli
import service.serve_command
import service.stacks_command
from service.http.bearer import OF_CLIENTS, TokenError, load_token
from service.http.port_owner import listener_of
from tiering.telemetry import Publisher, Snapshot, StatusWriter, status_file_opening

from .conftest import Publish
from .processes import Sidecar, running

TOKEN = "Zm9yZ2V0LW1lLW5vdC4"


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """``refused(*arguments)`` is the one line of a ``tierd`` that does not start, in this process."""
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: pytest.fail("it started"))
    # A process cannot lower its niceness again.
    monkeypatch.setattr(service.serve_command, "lower_priority", lambda _: None)
    monkeypatch.delenv("TIERD_TOKEN", raising=False)

    def main(*arguments: str) -> str:
        assert service.cli.main([*arguments]) == 2
        output, errors = capfd.readouterr()
        assert output == ""
        # A handler that is left would write to a stream that pytest closes.
        assert not logging.getLogger("service").handlers
        (line,) = errors.splitlines()
        return line

    return main


def test_a_taken_port_is_one_clear_line(directory: Path, refused: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        own_name = Path("/proc/self/comm").read_text().strip()
        user = pwd.getpwuid(os.geteuid()).pw_name
        assert refused("--port", str(port), "--dir", str(directory)) == (
            f"tierd: cannot listen on 127.0.0.1 port {port}: the port is in use by process {os.getpid()} ({own_name})"
            f" of user {user}; choose another --port"
        )
    # Of a user without a name, whose processes this one may not look into.
    table = directory / "net" / "tcp"
    table.parent.mkdir(parents=True)
    row = "0: 0100007F:2117 00000000:0000 0A 00000000:00000000 00:00000000 00000000 4242424 0 99 1 0 100 0 0 10 0"
    table.write_text(f"a head\n   {row}\n")
    assert listener_of(0x2117, directory) == "by a process of user 4242424"
    descriptors = directory / "7" / "fd"
    descriptors.mkdir(parents=True)
    (descriptors / "3").symlink_to("socket:[99]")
    (directory / "7" / "comm").write_bytes(b"\x1b[31m\xff\n")
    assert listener_of(0x2117, directory) == "by process 7 (?[31m\ufffd) of user 4242424"
    assert listener_of(0x2118, directory) == "by another process"


def test_the_stacks_of_the_ranks_that_answer_are_printed(
    directory: Path, publishing: Publish, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Snapshot("gpt", 0, 2, 4321, 1.0, run_id="gpt-1")
    with closing(
        Publisher(StatusWriter("gpt-1", 0, 2, directory), lambda: snapshot, answers_stacks=True)
    ) as answering:
        answering.start()
        assert service.cli.main(["stacks", "gpt", "--dir", str(directory)]) == 0
        output = capsys.readouterr().out
        assert output.startswith("rank 0 (process 4321)\nThread MainThread:\n") and "in _answers\n" in output
        # Two who ask at once both get an answer.
        with ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(service.cli.main, ["stacks", "gpt", "--dir", str(directory)]) for _ in range(2)
            ]
        assert [each.result() for each in asked] == [0, 0]
        capsys.readouterr()
        publishing(directory, replace(snapshot, rank=1, pid=4322))
        monkeypatch.setattr(service.stacks_command, "WAIT_SECONDS", 0.6)
        assert service.cli.main(["stacks", "gpt-1", "--dir", str(directory)]) == 1
    output, errors = capsys.readouterr()
    assert output.startswith("rank 0 (process 4321)\nThread MainThread:\n")
    assert errors.startswith("tierd: rank 1 (process 4322) has not answered for 0.6 s: ")
    assert {path.suffix for path in directory.iterdir()} == {".page"}, "nothing of the requests stays"
    for error, status, text in (
        (
            OSError(28, "No space left on device"),
            2,
            "tierd: the stacks cannot be requested: [Errno 28] No space",
        ),
        (KeyboardInterrupt(), 130, ""),
    ):
        monkeypatch.setattr(service.stacks_command, "request_stacks", Mock(side_effect=error))
        assert service.cli.main(["stacks", "gpt", "--dir", str(directory)]) == status
        assert capsys.readouterr().err.startswith(text)
    assert service.cli.main(["stacks", "other", "--dir", str(directory)]) == 2
    assert capsys.readouterr().err == (
        f"tierd: no rank of a run 'other' publishes in {directory}; runs there: gpt-1\n"
    )


THEIRS = """
import os, sys
from pathlib import Path
from tiering.telemetry import Publisher, Snapshot, StatusWriter

snapshot = Snapshot("theirs", 0, 1, os.getpid(), 1.0, run_id="theirs-1")
writer = StatusWriter("theirs-1", 0, 1, Path(sys.argv[1]))
publisher = Publisher(writer, lambda: snapshot, answers_stacks=True)
publisher.start()
print("ready", flush=True)
sys.stdin.read()
"""
# Another user, who may read this Python wherever it is.
AS_USER = ("setpriv", "--reuid=12345", "--regid=12345", "--clear-groups")
READING = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="root and setpriv are needed to be another user",
)
def test_a_capability_shows_all_users_and_root_gets_their_stacks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        # As /tmp. A directory that a user cannot write to is no directory for temporary files.
        base.chmod(0o1777)
        theirs = base / "tiering-12345"
        theirs.mkdir(mode=0o700)
        os.chown(theirs, 12345, 12345)
        monkeypatch.setattr(status_file_opening, "_temporary_directories", lambda: [base])
        command = [*AS_USER, *READING, sys.executable, "-c", THEIRS, str(theirs)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
            assert training.stdout is not None
            assert training.stdout.readline() == "ready\n"
            assert service.cli.main(["stacks", "theirs", "--all-users", "--dir", str(base / "own")]) == 0
            output = capfd.readouterr().out
            assert output.startswith(f"rank 0 (process {training.pid})\nThread MainThread:\n")
            assert {path.suffix for path in theirs.iterdir()} == {".page"}
            assert service.cli.main(["stacks", "other", "--all-users", "--dir", str(base / "own")]) == 2
            error = capfd.readouterr().err
            assert error.startswith("tierd: no rank of a run 'other' publishes for any user; runs there: ")
            assert "theirs-1" in error
            # A third user, whose own run directory is empty.
            (base / "none").mkdir(mode=0o700)
            os.chown(base / "none", 12346, 12346)
            reader = [AS_USER[0], "--reuid=12346", "--regid=12346", AS_USER[3], *READING, sys.executable]
            shown = subprocess.run(
                [
                    *reader,
                    "-m",
                    "service.cli",
                    "--once",
                    "--all-users",
                    "--json",
                    "--dir",
                    str(base / "none"),
                ],
                capture_output=True,
                text=True,
                env=os.environ | {"TMPDIR": place},
            )
            training.kill()
    runs = (
        {run["id"]: run["user"] for run in json.loads(shown.stdout)["runs"]} if shown.stdout else shown.stderr
    )
    assert runs["theirs-1"] == "12345"
    for command, words in ((["--once"], "CAP_DAC_READ_SEARCH"), (["stacks", "x"], "needs root")):
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        monkeypatch.setattr(service.cli, "_may_read_all_files", lambda: False)
        with pytest.raises(SystemExit):
            service.cli.options_of([*command, "--all-users"])
        assert words in capfd.readouterr().err


def test_an_impossible_address_is_one_clear_line(
    directory: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERD_TOKEN", TOKEN)
    for host, port, message in (
        ("127.0.0.1", "99999", "port 99999: a port must be a number from 0 to 65535"),
        ("127.0.0.1", "-1", "port -1: a port must be a number from 0 to 65535"),
        ("192.0.2.1", "0", "cannot listen on 192.0.2.1 port 0: Cannot assign"),
        ("no.such.host.invalid", "0", "cannot listen on no.such.host.invalid port 0: "),
        ("", "0", "cannot listen on  port 0: "),
        ("ex" * 40 + ".example", "0", " port 0: "),
    ):
        assert message in refused("--host", host, "--port", port, "--dir", str(directory))


def test_a_bad_directory_is_one_clear_line(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name, message in (
        ("file", "is not a directory"),
        ("open", "is open to others (mode 0777); name a new directory, which is created with mode 0700"),
    ):
        for how in (["--port", "0"], ["--once"]):
            assert f"run directory {tmp_path / name} {message}" in refused(
                *how, "--dir", str(tmp_path / name)
            )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:0.0.0.0", "192.0.2.1", "0"])
def test_no_other_machine_reaches_it_without_a_token(
    directory: Path, refused: Callable[..., str], host: str
) -> None:
    line = refused("--host", host, "--port", "0", "--dir", str(directory))
    assert f"{host} can be reached from other machines, and no token is set" in line
    assert "secrets.token_urlsafe(32)" in line


def test_what_is_no_token_or_no_secret_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    file = tmp_path / "token"

    def refusal(content: bytes, mode: int = 0o600, owner: int = -1) -> str:
        file.unlink(missing_ok=True)
        file.write_bytes(content)
        file.chmod(mode)
        if owner >= 0:
            os.chown(file, owner, -1)
        line = refused("--token-file", str(file), "--port", "0", "--dir", str(tmp_path / "run"))
        assert len(content) < 5 or content.decode("latin-1") not in line, "nobody reads it in a log"
        return line

    assert "has 0 characters; a token must have 16 to 1024" in refusal(b" \n")
    assert "has 15 characters" in refusal(b"x" * 15)
    assert "has 1026 characters" in refusal(b"x" * 5000)
    for odd in (b"sixteen letters and a space", "sixteen létters".encode() * 2, b"sixteen letters\0" * 2):
        assert "not allowed in a header" in refusal(odd)
    assert "(mode 0640, user" in refusal(b"x" * 32, 0o640)
    assert "can be read or changed by other users; make one" in refusal(b"x" * 32, 0o604)
    if os.geteuid() == 0:
        assert "user 12345) can be read or changed by other users" in refusal(b"x" * 32, 0o600, 12345)
    file.unlink()
    assert "cannot be read: No such file" in refused("--token-file", str(file), "--dir", str(tmp_path))
    os.mkfifo(file)
    assert "is not a regular file" in refused("--token-file", str(file), "--dir", str(tmp_path))


def test_a_token_comes_from_a_file_or_else_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o400)
    other = {"TIERD_TOKEN": "another token"}
    assert load_token(file, other, OF_CLIENTS) == TOKEN.encode()
    assert load_token(None, {"TIERD_TOKEN": TOKEN}, OF_CLIENTS) == TOKEN.encode()
    assert load_token(None, {}, OF_CLIENTS) is None
    for wrong in (other, {"TIERD_TOKEN": ""}):  # what was meant as a token never counts as none
        with pytest.raises(TokenError):
            load_token(None, wrong, OF_CLIENTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--uds x --port 0", "--uds cannot be combined with --host or --port"),
        ("--uds x --host localhost", "--uds cannot be combined with"),
        ("--json", "unrecognized arguments: --json"),
        ("top --once", "unrecognized arguments: --once"),
        ("top --host ::1", "unrecognized arguments: --host ::1"),
        ("--once --expect-ranks 8", "unrecognized arguments: --expect-ranks 8"),
        ("--interval 5", "unrecognized arguments: --interval 5"),
        ("--allow-host node7:8471", "is not a host name without a port"),
        ("--nice -5", "invalid choice: -5"),
        ("--expect-ranks -1", "--expect-ranks -1 is not a number of ranks"),
        ("top --interval 0", "0 is not between 0.25 and 60 seconds"),
        ("top --interval nan", "nan is not between"),
        ("top --interval soon", "invalid seconds value: 'soon'"),
        ("bottom", "invalid choice: 'bottom'"),
        ("--once --of-token-file x", "--of-token-file needs --of or --of-file"),
        ("--otlp-steps", "--otlp-steps needs --otlp"),
    ],
)
def test_contradictions_are_told(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        service.cli.main(arguments.split())
    assert stop.value.code == 2
    output, errors = capsys.readouterr()
    assert (output, message in errors) == ("", True), errors


def test_it_prints_what_ships_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in (
        ("dashboard", '"panels"'),
        ("alerts", "groups:"),
        ("metrics", "| `tiering_rank_up`"),
    ):
        assert service.cli.main([name]) == 0
        assert message in capsys.readouterr().out


def test_looking_once_loads_no_server(tmp_path: Path) -> None:
    """Scripts ask often, and half of their waiting would be for that."""
    (tmp_path / "run").mkdir(mode=0o700)
    script = f"import sys, service.cli; service.cli.main(['--once', '--dir', {str(tmp_path / 'run')!r}])"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    assert "service.terminal.rendering" in done.stdout
    assert not {"fastapi", "uvicorn", "prometheus_client", "torch"} & set(done.stdout.split())


def test_the_run_directory_of_the_environment_is_the_default(tmp_path: Path) -> None:
    with running("-m", "service.cli", "--host", "::1", "--port", "0", TIERING_RUN_DIR=str(tmp_path)) as (
        process,
        line,
    ):
        if not line:
            assert "cannot listen on ::1" in process.communicate()[1]
            pytest.skip("this machine has no IPv6 loopback")
        assert line.startswith("tierd: http://[::1]:")
        assert line.endswith(f"/ shows the runs in {tmp_path}")
        assert Sidecar(process, line.split()[1].rstrip("/")).get("/v1/runs")["runs"] == []
