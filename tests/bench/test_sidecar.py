"""What bench_sidecar.py hears as a client, what it concludes, and that everything runs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from bench_sidecar import Window, conclude
from frame.report import Report
from frame.side import BENCH
from sidecar import clients
from sidecar.clients import ClientLog, ask
from sidecar.processes import Nodes, ProcessError, Sidecar

import service.nodes.nodes
from service.advice import stragglers
from service.nodes.addresses import NodeList
from service.watch import Watch
from tiering.telemetry import RECENT_STEPS

OK = b"HTTP/1.1 200 OK\r\n"


def heard_of(monkeypatch: pytest.MonkeyPatch, metrics: bytes, events: bytes, **more: float) -> ClientLog:
    """What two scrapers and two subscribers hear of a server that always answers this, and keeps connections."""
    monkeypatch.setattr(clients, "WARM_UP", 0.1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The client leaves when it has all that it wants.
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):
            while request := await reader.readuntil(b"\r\n\r\n"):
                if b"GET /metrics" in request:
                    writer.write(metrics)
                    continue
                writer.write(events[: events.index(b"\r\n\r\n") + 4])
                for place in range(events.index(b"\r\n\r\n") + 4, len(events)):  # in the smallest pieces
                    await asyncio.sleep(0.005)
                    writer.write(events[place : place + 1])

    async def both() -> ClientLog:
        server = await asyncio.start_server(answer, clients.HOST, 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await ask(port, scrapers=2, subscribers=2, seconds=0.3, every=more.get("every", 0.05))
        finally:
            server.close()

    return asyncio.run(both())


METRICS = OK + b"Content-Length: 5\r\n\r\nhello"
EVENTS = OK + b"\r\n" + b" " * 15 + b"event: status\r\n"


def test_clients_count_answers_and_events(monkeypatch: pytest.MonkeyPatch) -> None:
    log = heard_of(monkeypatch, METRICS, EVENTS)
    assert log.errors == {}
    assert log.events == [1, 1]
    assert 2 <= len(log.latencies) <= 14
    assert log.received > 5 * len(log.latencies)
    assert log.seconds == pytest.approx(0.3)
    hammered = heard_of(monkeypatch, METRICS, EVENTS, every=0.0)
    assert len(hammered.latencies) > len(log.latencies)


@pytest.mark.parametrize(
    ("metrics", "events", "expected"),
    [
        (METRICS.replace(b"200", b"503"), EVENTS, "/metrics answered 503"),
        (OK + b"\r\nhello", EVENTS, "/metrics: ValueError"),
        (METRICS, EVENTS.replace(b"200", b"503"), "/v1/events answered 503"),
        (METRICS, OK + b"\r\nnothing", "a subscriber that heard nothing"),
    ],
)
def test_what_is_wrong_is_counted(
    monkeypatch: pytest.MonkeyPatch, metrics: bytes, events: bytes, expected: str
) -> None:
    log = heard_of(monkeypatch, metrics, events)
    assert log.errors[expected] >= 2
    assert json.loads(json.dumps(asdict(log)))["errors"] == log.errors


def test_a_server_that_is_not_there_is_an_error_of_each_client() -> None:
    log = asyncio.run(ask(1, scrapers=3, subscribers=2, seconds=0.1, every=1))
    assert log.errors == {
        "/metrics: ConnectionRefusedError": 3,
        "/v1/events: ConnectionRefusedError": 2,
        "a subscriber that heard nothing": 2,
    }


def a_window(step: float, errors: dict[str, int] | None = None) -> Window:
    log = ClientLog(10.0, 12.0, [0.001, 0.002, 0.009], [2, 3], 4_000_000, errors or {})
    return Window([step, step, 9.0], 0.015, log, 0.5)


@pytest.mark.parametrize(
    ("polled", "alone", "unpublished", "errors", "holds"),
    [
        ([1.02, 1.0, 0.99], [1.0] * 3, [1.0] * 3, {}, (True, True, True)),
        ([1.06, 1.05, 1.04], [1.0] * 3, [1.0] * 3, {}, (True, False, True)),
        ([1.1, 1.1, 0.9], [1.1, 1.1, 0.9], [1.0, 1.0, 0.8], {}, (True, True, False)),
        ([1.0] * 3, [1.0] * 3, [1.0] * 3, {"x": 1}, (False, True, True)),
    ],
)
def test_what_is_concluded(
    polled: list[float],
    alone: list[float],
    unpublished: list[float],
    errors: dict[str, int],
    holds: tuple[bool, ...],
) -> None:
    steps = {"asked": polled, "alone": alone, "unpublished": unpublished}
    rounds = {side: [a_window(step) for step in each] for side, each in steps.items()}
    report = Report("title", {})
    conclude(report, rounds, a_window(1.0, errors), 50_000_000)
    assert tuple(verdict.holds for verdict in report.verdicts) == holds
    times, _, load = report.tables
    assert times.rows[1][1:] == (
        "9",
        f"{sorted(alone)[1] * 1e3:.2f} ({min(alone) * 1e3:.2f}-{max(alone) * 1e3:.2f})",
        "1.5% (1.5%-1.5%)",
    )
    assert load.rows[1] == ("without a break", "3", "2", "2.0", "2.0", "9.0", "2 to 3", "2.0", "0.25")


def test_a_sidecar_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ProcessError, match=r"tierd did not start; .*is not a directory"):
        Sidecar("--dir", str(tmp_path / "file"))


def test_simulated_nodes_are_a_run_that_trains() -> None:
    with (
        Nodes(2, 7) as simulated,
        service.nodes.nodes.Nodes(NodeList(simulated.addresses)) as nodes,
    ):
        view = Watch(nodes).view()
    (run,) = view.runs
    assert (run.state, run.expected, stragglers(run)) == ("training", 14, {13})
    for rank in run.ranks:
        assert rank.snapshot is not None and rank.description is not None
        assert (rank.snapshot.node, len(rank.snapshot.steps)) == (f"node{rank.rank // 7:03}", RECENT_STEPS)
        assert rank.description.device.startswith(f"cuda:{rank.rank % 7} ")


@pytest.mark.slow
def test_everything_runs(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two CPUs are needed: one for the engine, one for the sidecar and its clients")
    command = [sys.executable, str(BENCH / "bench_sidecar.py"), str(tmp_path), "--quick", "--pairs", "1"]
    command += ["--seconds", "0.5", "--hold", "5", "--json", str(tmp_path / "raw.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert {name: len(windows) for name, windows in raw["windows"].items()} == {
        "asked": 1,
        "alone": 1,
        "unpublished": 1,
        "held": 1,
    }
    assert all(window["steps"] for windows in raw["windows"].values() for window in windows)
    (window,) = raw["windows"]["held"]
    assert window["log"]["latencies"] and min(window["log"]["events"]) >= 1
    assert raw["goals"][0] == {"what": "errors", "found": "none", "goal": "none", "holds": True}
    assert [path.name for path in tmp_path.iterdir()] == ["raw.json"]
