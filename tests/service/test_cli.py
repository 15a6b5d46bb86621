"""What ``tierd`` refuses to start with, in one line each, and what it makes of its arguments."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvicorn

import service.cli
import service.serve_command
from service.http.bearer import TokenError, load_token

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
        assert refused("--port", str(port), "--dir", str(directory)) == (
            f"tierd: cannot listen on 127.0.0.1 port {port}: "
            "the port is in use, perhaps by another tierd; choose another --port"
        )


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
    assert load_token(file, other) == TOKEN.encode()
    assert load_token(None, {"TIERD_TOKEN": TOKEN}) == TOKEN.encode()
    assert load_token(None, {}) is None
    for wrong in (other, {"TIERD_TOKEN": ""}):  # what was meant as a token never counts as none
        with pytest.raises(TokenError):
            load_token(None, wrong)


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
