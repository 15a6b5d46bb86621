"""A real ``tierd``: where it listens, what a client can do to it, and how it ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.http.server import listen, resolve

from .processes import Sidecar, running, tierd, until

TOKEN = "Zm9yZ2V0LW1lLW5vdC4"
HEAD = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"

# A sidecar whose limits come soon, and whose /v1/status may hang as on a disk that does not answer.
IMPATIENT = """
import sys, threading
import service.cli, service.http.server, service.watch
service.http.server.HEAD_SECONDS = service.http.server.READ_SECONDS = service.http.server.END_SECONDS = 0.4
if "hang" in sys.argv[1]:
    service.watch.Watch._refresh = lambda _: threading.Event().wait()
sys.exit(service.cli.main(["--port", "0", "--dir", sys.argv[2]]))
"""


def port_of(sidecar: Sidecar) -> int:
    return int(sidecar.url.rpartition(":")[2])


@contextlib.contextmanager
def connected(sidecar: Sidecar, request: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port_of(sidecar)), timeout=30) as client:
        client.sendall(request)
        yield client


def at_socket(path: Path, request: bytes = HEAD + b"Connection: close\r\n\r\n") -> str:
    """What is answered at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(str(path))
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(4096), b"")).decode()


def ended_well(process: subprocess.Popen[str], by: int = signal.SIGTERM) -> None:
    process.send_signal(by)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


def closed(client: socket.socket) -> bool:
    """Whether the other side has closed this connection; waits for that."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_it_ends_at_once_while_streams_are_open(directory: Path) -> None:
    ask = HEAD.replace(b"/livez", b"/v1/events") + b"\r\n"
    with tierd(directory) as sidecar, connected(sidecar, ask) as client, connected(sidecar, ask) as other:
        for sock in (client, other):
            received = b""
            while b"event: status" not in received:
                received += sock.recv(4096)
        ended_well(sidecar.process)


@pytest.mark.slow
def test_it_ends_even_when_a_disk_does_not_answer(directory: Path) -> None:
    with running("-c", IMPATIENT, "hang", str(directory)) as (process, line):
        sidecar = Sidecar(process, line.split()[1].rstrip("/"))
        with connected(sidecar, HEAD.replace(b"/livez", b"/v1/status") + b"\r\n") as client:
            assert sidecar.get("/livez") == {"status": "ok"}
            ended_well(process)
            assert closed(client)


def test_who_dawdles_is_cut_off(directory: Path) -> None:
    """Sends half a head, in the first request or a later one, or takes nothing of what was asked for."""
    with running("-c", IMPATIENT, "", str(directory)) as (process, line):
        sidecar = Sidecar(process, line.split()[1].rstrip("/"))
        with connected(sidecar) as silent, connected(sidecar, HEAD) as slow:
            assert closed(slow)
            assert closed(silent)
        with connected(sidecar, HEAD + b"\r\n") as client:
            until(lambda: b'{"status":"ok"}' in client.recv(4096, socket.MSG_PEEK))
            client.recv(4096)
            client.sendall(HEAD)
            assert closed(client)
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", port_of(sidecar)))
            deaf.settimeout(30)
            endless = itertools.repeat((HEAD.replace(b"/livez", b"/openapi.json") + b"\r\n") * 100)
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                all(deaf.sendall(request) is None for request in endless)
        assert sidecar.get("/livez") == {"status": "ok"}
        ended_well(process)


def test_no_crowd_of_clients_takes_the_machine_from_training(sidecar: Sidecar) -> None:
    process = sidecar.process
    assert os.getpriority(os.PRIO_PROCESS, process.pid) >= 10
    limits = re.search(r"Max open files +(\d+) +(\d+)", Path(f"/proc/{process.pid}/limits").read_text())
    assert limits and limits[1] == limits[2]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 900:
        pytest.skip(f"this test opens 700 connections, and may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 900), hard))
    with contextlib.ExitStack() as open_ones:
        idle = [open_ones.enter_context(connected(sidecar)) for _ in range(700)]
        assert sidecar.get("/livez") == {"status": "ok"}
        assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < 600, "before any of them is late"
        assert all(closed(client) for client in idle[:150]), "those that waited longest made room"
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ended_well(process)


@pytest.mark.slow
def test_connections_run_out_before_descriptors_do(sidecar: Sidecar) -> None:
    resource.prlimit(sidecar.process.pid, resource.RLIMIT_NOFILE, (128, 128))
    with contextlib.ExitStack() as open_ones:
        for _ in range(300):
            open_ones.enter_context(connected(sidecar))
        assert sidecar.get("/livez") == {"status": "ok"}
    ended_well(sidecar.process)


def test_what_is_no_request_is_refused_without_a_word(sidecar: Sidecar) -> None:
    """Nobody fills the log of an operator, nor the memory; bodies are not waited for."""
    for request, status in (
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\n\r\n", b"400"),
        (HEAD + b"Host: localhost\r\n\r\n", b"400"),
        (HEAD + b"X: " + b"x" * 40_000, b"400"),
        (HEAD + b"Content-Length: 10\r\n\r\n", b"413"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"413"),
        (HEAD.replace(b"GET", b"POST") + b"Content-Length: 99999999999\r\n\r\n", b"405"),
        (HEAD + b"Connection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n", b"200"),
        (b"GET http://evil.example/livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"404"),
        (b"GET /../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"404"),
    ):
        with connected(sidecar, request) as client:
            answer = b"".join(iter(lambda: client.recv(4096), b""))
            assert answer.split(b" ", 2)[1] == status, (request[:60], answer)
            assert b"\r\nserver:" not in answer.lower()
    ended_well(sidecar.process, by=signal.SIGINT)


def test_another_address_wants_the_token_and_says_so(directory: Path) -> None:
    command = ("-m", "service.cli", "--host", "0.0.0.0", "--port", "0", "--dir", str(directory))
    with running(*command, TIERD_TOKEN=TOKEN) as (process, line):
        match = re.fullmatch(r"tierd: http://0\.0\.0\.0:(\d+)/ shows the runs in .*", line)
        assert match, line or process.communicate()[1]
        url = f"http://127.0.0.1:{match[1]}"
        assert Sidecar(process, url).get("/livez") == {"status": "ok"}
        with pytest.raises(urllib.error.HTTPError) as refused:
            Sidecar(process, url).get("/v1/runs")
        assert refused.value.code == 401
        refused.value.close()
        for host in ("127.0.0.1", socket.gethostname()):
            headers = {"Authorization": f"Bearer {TOKEN}", "Host": host}
            with urllib.request.urlopen(urllib.request.Request(url + "/v1/runs", headers=headers)) as answer:
                assert json.load(answer)["runs"] == []
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "can be reached from other machines without encryption (no TLS)" in errors
    assert TOKEN not in line + output + errors
    assert errors.count("\n") == 1


def test_an_answers_second_packet_waits_for_nobody() -> None:
    with (
        listen(resolve("localhost", 0)) as place,
        socket.create_connection(place.socket.getsockname()[:2]),
        place.socket.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_unix_socket_is_its_owners_alone_and_gone_at_the_end(tmp_path: Path) -> None:
    """Beside that: systemd is told of both, and that nobody reads what is printed does not matter."""
    path, notified = tmp_path / "tierd.sock", tmp_path / "notify"
    nobody, printed = os.pipe()
    os.close(nobody)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(notified))
        systemd.settimeout(60)
        with subprocess.Popen(
            [sys.executable, "-m", "service.cli", "--uds", str(path), "--dir", str(tmp_path / "run")],
            stdout=printed,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"NOTIFY_SOCKET": str(notified)},
        ) as process:
            os.close(printed)
            try:
                assert systemd.recv(100) == b"READY=1"
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
                assert at_socket(path).endswith('{"status":"ok"}')
                whoever = HEAD.replace(b"localhost", b"any.name") + b"Connection: close\r\n\r\n"
                assert at_socket(path, whoever).startswith("HTTP/1.1 200")
                ended_well(process)
                assert systemd.recv(100) == b"STOPPING=1"
            finally:
                process.kill()
    assert not path.exists()


def test_it_needs_no_standard_output(tmp_path: Path) -> None:
    path = tmp_path / "tierd.sock"
    with subprocess.Popen(
        [sys.executable, "-m", "service.cli", "--uds", str(path), "--dir", str(tmp_path / "run")],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.close(1),
    ) as process:
        try:
            until(lambda: path.exists() or process.poll() is not None)
            assert at_socket(path).endswith('{"status":"ok"}')
            ended_well(process)
        finally:
            process.kill()


def test_only_a_socket_without_a_listener_is_replaced(tmp_path: Path) -> None:
    from service.http.server import CannotListenError, listen_at

    path = tmp_path / "tierd.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    place = listen_at(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(CannotListenError, match="the socket is in use, perhaps by another tierd"):
        listen_at(path)
    path.unlink()
    with listen_at(path).socket:  # another's by now: the first leaves it alone
        place.unlink()
        assert path.exists()
    place.socket.close()
    (tmp_path / "file").write_text("precious")
    with pytest.raises(CannotListenError, match="the file exists and is not a socket"):
        listen_at(tmp_path / "file")
    with pytest.raises(CannotListenError, match="No such file or directory"):
        listen_at(tmp_path / "none" / "tierd.sock")
    with pytest.raises(CannotListenError, match="too long"):
        listen_at(tmp_path / ("x" * 120))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    with pytest.raises(CannotListenError, match=r"other users can write to this directory; create your own"):
        listen_at(tmp_path / "open" / "tierd.sock")
    assert (tmp_path / "file").read_text() == "precious"
