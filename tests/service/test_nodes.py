"""``tierd --of``: the runs of several nodes as one, and nodes that are slow, of another version, or hostile."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import service.cli
from service.app import create_app
from service.ended_runs import EndedRuns
from service.nodes import nodes as nodes_module
from service.nodes.addresses import MAX_NODES, Address, AddressError, NodeList, parse
from service.nodes.connection import MAX_BODY
from service.nodes.nodes import Nodes, RemoteFile, _parsed, _ranks, _reading, _State
from service.responses.readings import readings
from service.responses.status import SCHEMA_VERSION, Status
from service.run_log import RunLog
from service.view import Node, RankView, Reading, RunView, View, view_of
from service.watch import Watch
from tiering.telemetry import Snapshot, StatusReading, StatusWriter, StepRecord

from .conftest import Publish
from .full_view import FULL, SNAPSHOT
from .processes import Sidecar, tierd, until

TOKEN = "c2VjcmV0LW9mLW5vZGVz"
BODY = readings(FULL).model_dump_json().encode()
HERE = Address("127.0.0.1", 8471, token=TOKEN.encode())


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "INTERVAL", 0.05)
    monkeypatch.setattr(nodes_module, "PER_NODE", 0.0)
    monkeypatch.setattr(nodes_module, "FILE_INTERVAL", 0.05)
    monkeypatch.delenv("TIERD_OF_TOKEN", raising=False)


def token_file(path: Path, token: str = TOKEN) -> Path:
    path.write_text(token)
    path.chmod(0o600)
    return path


@contextmanager
def server(respond: Callable[[socket.socket], object]) -> Iterator[int]:
    """A node of which each connection gets ``respond``; the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with closing(connection):
                    try:
                        respond(connection)
                    except OSError:
                        continue

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def http(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = (f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", "")
    return "\r\n".join(lines).encode() + body


@contextmanager
def republished(writers: dict[StatusWriter, Snapshot]) -> Iterator[None]:
    """Ranks that publish every second, as engines do: on a busy machine, they would be silent before a test ends."""
    ended = threading.Event()

    def publish() -> None:
        while not ended.wait(1.0):
            for writer, snapshot in writers.items():
                writer.publish(snapshot)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_what_a_node_answers_gives_the_view_that_it_has() -> None:
    diverged = replace(SNAPSHOT, loss=float("inf"), run_id="nan-1")
    planted = RunView("gpt-1@train", "gpt", (RankView(0, "torn", "an update", 1.0),), "train")
    there = replace(
        FULL,
        runs=(*FULL.runs, RunView("nan-1", "gpt 25M", (RankView(0, "live", "", 0.1, diverged),)), planted),
    )
    body = readings(there).model_dump_json().encode()
    json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    ranks = _parsed(body, HERE)
    view = view_of(
        Reading([_reading(rank, 0.0) for rank in ranks], (Node("a:1", "", 1.0, 4),)), FULL.taken_at
    )
    by_id = {run.id: run for run in view.runs}
    for run in FULL.runs:
        (first, second), (was_first, was_second) = by_id[run.id].ranks, run.ranks
        assert first == was_first
        assert second == replace(was_second, reason=second.reason) and "14 s" in second.reason
        assert (by_id[run.id].user, by_id[run.id].name) == (run.user, run.name)
        assert (run.expected, by_id[run.id].expected) == (2, 4), "those of this node; those of all"
    assert by_id["nan-1"].ranks[0].snapshot == diverged
    assert by_id["gpt-1"].ranks[0].state == "torn"
    assert [(run.id, run.ranks[0].snapshot) for run in view.closed] == [
        (run.id, run.ranks[0].snapshot) for run in FULL.closed
    ]
    assert view.closed[0].ranks[0].ended == FULL.closed[0].ranks[0].ended


def test_descriptions_are_requested_when_a_rank_is_new() -> None:
    class Fake:
        view, targets = FULL, list[str]()

        async def get(self, target: str) -> bytes:
            self.targets.append(target)
            return readings(self.view, not target.endswith("=false")).model_dump_json().encode()

    fake, state = Fake(), _State(HERE)
    short, long = "/v1/readings?descriptions=false", "/v1/readings"

    def ask() -> list[object]:
        fake.targets.clear()
        state.ranks = asyncio.run(_ranks(state, fake))  # type: ignore[arg-type]
        return [rank.description for rank in state.ranks]

    described = ask()
    assert fake.targets == [long] and described[0] == FULL.runs[0].ranks[0].description
    assert (ask(), fake.targets) == (described, [short])
    new = replace(FULL.runs[0].ranks[0], rank=7, snapshot=replace(SNAPSHOT, rank=7))
    fake.view = replace(FULL, runs=(replace(FULL.runs[0], ranks=(*FULL.runs[0].ranks, new)),))
    assert len(ask()) == len(described) + 1 and fake.targets == [short, long]
    ask()
    assert fake.targets == [short]


ANSWERS: list[tuple[str, bytes]] = [
    ("does not speak HTTP", b"SSH-2.0-OpenSSH_9.2\r\n"),
    ("does not speak HTTP", b""),
    ("does not speak HTTP", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000),
    ("does not speak HTTP", b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"),
    ("requires another token", http(TOKEN.encode(), status="401 Unauthorized")),
    ("older than this one", http(b"", status="404 Not Found")),
    ("--allow-host", http(b"", status="421 Misdirected Request")),
    ("run directory cannot be read", http(b"", status="503 Service Unavailable")),
    ("HTTP status 302", http(b"", "location: http://127.0.0.1:1/", status="302 Found")),
    ("larger than 4 MiB", http(b" " * (MAX_BODY + 1))),
    ("larger than 4 MiB", http(gzip.compress(b" " * (MAX_BODY + 1)), "content-encoding: gzip")),
    ("not valid gzip", http(b"plain", "content-encoding: gzip")),
    ("not valid gzip", http(gzip.compress(BODY)[:-20], "content-encoding: gzip")),
    ("not valid: 1 error", http(b"[")),
    ("not valid: 2 errors", http(BODY.replace(b'"rank":0', b'"rank":"x"', 2))),
    ("update this tierd", http(b'{"schema_version": %d, "news": []}' % (SCHEMA_VERSION + 1))),
    ("update its tierd", http(b'{"schema_version": %d, "readings": []}' % (SCHEMA_VERSION - 1))),
    ("contains the token", http(BODY.replace(b"gpt 25M", TOKEN.encode()))),
    ("not answered within 0.3 s", http(BODY)[:-1]),
]


@pytest.mark.parametrize(("words", "answer"), ANSWERS, ids=[words for words, _ in ANSWERS])
def test_an_answer_that_is_no_answer_is_told_in_plain_words(
    words: str, answer: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if "within" in words:
        monkeypatch.setattr("service.nodes.connection.TIMEOUT", 0.3)
    ended = threading.Event()

    def respond(connection: socket.socket) -> None:
        if not (request := connection.recv(4096)):
            return  # the test has ended before it was sent
        assert f"Authorization: Bearer {TOKEN}\r\n".encode() in request
        connection.sendall(answer)
        if "within" in words:
            ended.wait(10)

    with server(respond) as port, Nodes(NodeList(f"127.0.0.1:{port}", token=TOKEN.encode())) as nodes:
        watch = Watch(nodes)
        (node,) = watch.view().nodes or ()
        assert words in node.problem and node.answered_at is None
        with TestClient(create_app(watch), base_url="http://localhost") as client:
            shown = client.get("/v1/status").json()["nodes"]
            assert shown == [
                {
                    "address": f"127.0.0.1:{port}",
                    "answers": False,
                    "problem": node.problem,
                    "answered_at": None,
                    "ranks": 0,
                }
            ]
            assert f'tiering_node_up{{node="127.0.0.1:{port}"}} 0.0' in client.get("/metrics").text
            reasons = client.get("/readyz").json()["reasons"]
            assert reasons[0] == f"node 127.0.0.1:{port} does not answer: {node.problem}"
            until(lambda: "does not answer" in caplog.text)
            assert TOKEN not in caplog.text + client.get("/v1/status").text + client.get("/metrics").text
        ended.set()


def test_a_node_that_refuses_or_has_no_name_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with Nodes(NodeList(f"127.0.0.1:{port},nowhere.invalid,https://127.0.0.1:{port}")) as nodes:
        refused, nameless, _ = nodes.read().nodes or ()
    assert refused.problem == "the connection is refused: no tierd listens there"
    assert nameless.problem == "its name cannot be resolved"
    with (
        server(lambda connection: connection.sendall(b"no TLS")) as port,
        Nodes(NodeList(f"https://127.0.0.1:{port}")) as nodes,
    ):
        (node,) = nodes.read().nodes or ()
    assert node.address == f"https://127.0.0.1:{port}" and node.problem.startswith("TLS failed: ")


def test_ranks_of_a_node_that_is_lost_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """One failed request is no loss. A rank that has ended is not lost with its node."""
    lives, ended = (
        FULL.runs[0].ranks[0],
        RankView(1, "stale", "the writer is gone", 1.0, replace(SNAPSHOT, rank=1)),
    )
    body = readings(replace(FULL, runs=(replace(FULL.runs[0], ranks=(lives, ended)),), closed=()))
    answers = [http(body.model_dump_json().encode()), b"", http(body.model_dump_json().encode()), b"", b""]
    seen: list[str] = []

    def respond(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answers.pop(0) if answers else b"")

    with server(respond) as port, Nodes(NodeList(f"127.0.0.1:{port}")) as nodes:
        watch = Watch(nodes, max_age=0)

        def is_lost() -> bool:
            (node,) = watch.view().nodes or ()
            seen.append(node.problem)
            return bool(node.problem)

        until(is_lost)
        assert not answers, "it was given up after two failures in a row"
        view = watch.view()
        (run,) = view.runs
        reason = f"127.0.0.1:{port} does not answer: {seen[-1]}"
        assert [(rank.state, rank.reason) for rank in run.ranks] == [
            ("unreachable", reason),
            ("stale", "the writer is gone"),
        ]
        assert run.state == "degraded" and run.ranks[0].snapshot == lives.snapshot
        assert (run.ranks[0].heartbeat_age or 0) > 0.125


def test_a_run_on_two_nodes_is_one_run(
    tmp_path: Path,
    publishing: Publish,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With real sidecars: all outputs show it, and what is missing."""
    steps = [
        StepRecord(number, 1.0, stall=0.5, stalls={"gather": 0.5}, ended_at=1.0) for number in range(2, 12)
    ]
    snapshot = Snapshot("gpt", 0, 4, 1, time.time(), 8, run_id="gpt-1", local_world_size=2, steps=steps)
    fast = [replace(step, stall=0.0, stalls={}) for step in steps]
    directories = [tmp_path / "a", tmp_path / "b"]
    writers = {}
    for rank in range(4):
        of_rank = replace(snapshot, rank=rank, node=f"node{rank // 2}", steps=fast if rank == 2 else steps)
        writers[publishing(directories[rank // 2], of_rank)] = of_rank
    tokens = token_file(tmp_path / "token")
    with ExitStack() as stack:
        stack.enter_context(republished(writers))
        sidecars: list[Sidecar] = [
            stack.enter_context(tierd(directory, "--token-file", str(tokens))) for directory in directories
        ]
        first, second = (sidecar.url.removeprefix("http://") for sidecar in sidecars)
        file = tmp_path / "nodes"
        file.write_text(f"# two nodes\n{first} {tokens}\n")
        nodes = stack.enter_context(Nodes(NodeList(file=file)))
        client = stack.enter_context(
            TestClient(create_app(Watch(nodes, max_age=0)), base_url="http://localhost")
        )

        def run() -> dict[str, object]:
            (run,) = client.get("/v1/status").json()["runs"]
            return run

        assert (run()["state"], run()["ranks_expected"], run()["ranks_live"]) == ("degraded", 4, 2)
        assert "2 of the 4 ranks on all nodes have no status file" in client.get("/v1/status").text
        file.write_text(f"{first} {tokens}\n{second}  {tokens}\n")
        until(lambda: run()["ranks_live"] == 4)
        assert [(rank["rank"], rank["node"], rank["straggler"]) for rank in run()["ranks"]] == [
            (0, "node0", False),
            (1, "node0", False),
            (2, "node1", True),
            (3, "node1", False),
        ]
        assert run()["state"] == "training"
        assert client.get("/readyz").status_code == 200
        metrics = client.get("/metrics").text
        assert f'tiering_node_up{{node="{second}"}} 1.0' in metrics
        assert 'tiering_run_ranks_up{run="gpt-1"} 4.0' in metrics
        assert "tiering_steps_total{" not in metrics, "the nodes have the metrics of the ranks"
        by_rank = client.get("/v1/steps").json()["runs"][0]["ranks"]
        assert [len(rank["steps"]) for rank in by_rank] == 4 * [10]
        assert [len(rank["steps"]) for rank in run()["ranks"]] == 4 * [8]
        monkeypatch.setenv("TIERD_OF_TOKEN", TOKEN)
        of = ["--once", "--of", f"{first},{second}"]
        assert service.cli.main(of) == 0
        output = capsys.readouterr().out
        assert output.index("straggler") < output.index("live")
        assert service.cli.main([*of, "--format", "json"]) == 0
        assert [len(run.ranks) for run in Status.model_validate_json(capsys.readouterr().out).runs] == [4]
        sidecars[1].process.kill()
        until(lambda: run()["ranks_live"] == 2)
        (warning,) = [each for each in run()["warnings"] if each["code"] == "rank-unreachable"]
        assert warning["ranks"] == [2, 3] and warning["text"].startswith(f"node {second} does not answer: ")
        reasons = client.get("/readyz").json()["reasons"]
        assert reasons[1] == f"run gpt: 2 ranks cannot be seen: {warning['text'][5:].partition(';')[0]}"
        assert service.cli.main(of) == 1
        output = capsys.readouterr().out
        assert output.startswith("1 of 2 nodes does not answer\n") and f"{second}: the connection" in output
        file.write_text("")
        until(lambda: "no node is named; the nodes stay as they were" in caplog.text)
        assert len(client.get("/v1/status").json()["nodes"]) == 2, "an invalid file changes nothing"


def test_a_lost_node_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run_log = RunLog(EndedRuns())
    for problem in ("", "gone", "gone again", "", ""):
        run_log.add(View(1.0, (), nodes=(Node("a:1", problem, 1.0, 0), Node("b:1", "", 1.0, 0))))
    assert [record.getMessage() for record in caplog.records] == [
        "node a:1 does not answer: gone",
        "node a:1 answers again",
    ]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("gpu1", Address("gpu1", 8471)),
        ("GPU1:99", Address("gpu1", 99)),
        ("http://10.0.0.1:8471/", Address("10.0.0.1", 8471)),
        ("https://gpu1.example.org", Address("gpu1.example.org", 443, True)),
        ("[fd00::1]:80", Address("fd00::1", 80)),
        ("fd00::1", None),
        ("gpu1:99999", None),
        ("gpu1:0", None),
        ("gpu1..example.org", None),
        ("gpu1/v1", None),
        ("ftp://gpu1", None),
        ("gpu 1", None),
        ("g\u00e4u1", None),
        ("", None),
        ("me:hunter2@gpu1", None),
    ],
)
def test_addresses(text: str, address: Address | None) -> None:
    if address is not None:
        assert parse(text) == address
        assert parse(str(address)) == address
    else:
        with pytest.raises(AddressError, match="address") as refused:
            parse(text)
        assert "hunter2" not in str(refused.value)


def test_lists_of_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [str(address) for address in NodeList("b,a:8471,,b:8471,https://[::1]").addresses] == [
        "b:8471",
        "a:8471",
        "https://[::1]:443",
    ]
    assert TOKEN not in repr(NodeList("b", token=TOKEN.encode()).addresses)
    for text, words in (
        (",", "no node is named"),
        (",".join(f"n{i}" for i in range(MAX_NODES + 1)), "at most 256"),
    ):
        with pytest.raises(AddressError, match=words):
            NodeList(text)
    file, mine = tmp_path / "nodes", token_file(tmp_path / "mine")
    file.write_text(f"# all\n\na  {mine} # with a token of its own\nb\n")
    nodes = NodeList(file=file, token=b"another-token-of-16")
    assert [address.token for address in nodes.addresses] == [TOKEN.encode(), b"another-token-of-16"]
    assert not nodes.reread()
    for content, words in (
        ("a b c", "at most one token file"),
        ("a /nowhere/token", "token file /nowhere/token cannot be read"),
        ("a@b", "no user name"),
        ("x" * (300 << 10), "larger than 256 KiB"),
    ):
        file.write_text(content)
        with pytest.raises(AddressError, match=words):
            nodes.reread()
        assert len(nodes.addresses) == 2
        assert not nodes.reread(), "an error is raised once"
    file.unlink()
    with pytest.raises(AddressError, match="cannot be read: No such file"):
        nodes.reread()
    assert not nodes.reread(), "an error is raised once"
    for arguments, words in (
        (["--of-file", str(file)], "cannot be read: No such file"),
        (["--of", "a@b"], "no user name"),
        (
            ["--of", "a", "--of-token-file", str(tmp_path / "none")],
            "cannot be read: No such file or directory; write the token that the nodes require",
        ),
    ):
        assert service.cli.main(["--once", *arguments]) == 2
        assert words in capsys.readouterr().err
    for arguments in (["--of", "a", "--of-file", "b"], ["--of", "a", "--dir", "b"]):
        with pytest.raises(SystemExit):
            service.cli.main(["--once", *arguments])
        assert "cannot be combined" in capsys.readouterr().err


def test_a_token_that_crosses_a_network_is_warned_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    monkeypatch.setenv("TIERD_OF_TOKEN", TOKEN)
    monkeypatch.setattr("service.nodes.nodes.Nodes", opened.append)
    for of, is_told in (("10.0.0.1,gpu2", True), ("127.0.0.1,localhost,[::1],https://gpu3", False)):
        options = service.cli.options_of(["--of", of])
        service.cli.open_source(options, Path())
        error = capsys.readouterr().err
        assert ("10.0.0.1:8471 and 1 more is sent without encryption" in error) == is_told == bool(error)
        assert TOKEN not in error


def test_names_of_runs_of_two_users_are_kept_apart() -> None:
    reading = StatusReading("live", 0.1, replace(SNAPSHOT, run_id="same"), "")
    ranks = [(RemoteFile("same", 0, owner), reading) for owner in ("ann", "bob")]
    view = view_of(Reading(ranks, ()), 1.0)
    assert [(run.id, run.user) for run in view.runs] == [("same@ann", "ann"), ("same@bob", "bob")]
