"""The application in process: what pages say is what the JSON says, and no page stops it from answering."""

from __future__ import annotations

import ast
import asyncio
import errno
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import jsonschema
import pytest
from fastapi.testclient import TestClient

from service.app import create_app
from service.responses import examples
from service.responses.plan import compared
from service.status_files import StatusFiles
from service.watch import Watch
from tiering.telemetry import StatusFile, StatusWriter, TelemetryError, find_status_files

from .conftest import Publish
from .full_view import DESCRIPTION
from .full_view import SNAPSHOT as FULL
from .processes import until

(EXAMPLE,) = examples.example().runs[0].ranks
SNAPSHOT = EXAMPLE.snapshot
assert SNAPSHOT is not None
OF_THE_MOMENT = {"user", "taken_at", "published_at", "heartbeat_age", "directory", "latest", "ended"}


@pytest.fixture
def client(directory: Path) -> Iterator[TestClient]:
    with TestClient(
        create_app(Watch(StatusFiles(directory, keep_stale_seconds=3600), max_age=0)),
        base_url="http://localhost",
    ) as client:
        yield client


@pytest.fixture
def writer(directory: Path, publishing: Publish) -> StatusWriter:
    return publishing(directory, SNAPSHOT, EXAMPLE.description)


def get(client: TestClient, path: str) -> Any:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def the_rank(client: TestClient) -> dict[str, Any]:
    (run,) = get(client, "/v1/status")["runs"]
    (rank,) = run["ranks"]
    return rank


def lasting(answer: Any) -> Any:
    """Without what depends on when it was asked."""
    if isinstance(answer, dict):
        return {name: lasting(value) for name, value in answer.items() if name not in OF_THE_MOMENT}
    return [lasting(value) for value in answer] if isinstance(answer, list) else answer


def test_without_runs_the_answers_are_empty(client: TestClient) -> None:
    for path, answer in examples.example_responses().items():
        if "runs" in type(answer).model_fields and "{" not in path:
            assert client.get(path).json()["runs"] == []
    assert client.get("/livez").json() == {"status": "ok"}


@pytest.mark.usefixtures("writer")
def test_the_answers_about_a_page_are_the_examples_of_the_schema(client: TestClient, directory: Path) -> None:
    """The examples are made of the View that this page shows: every field of the page comes through every endpoint."""
    for path, expected in examples.example_responses().items():
        if path not in ("/v1/history", "/healthz"):
            answer = client.get(path.replace("{run_id}", SNAPSHOT.run_id))
            assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
            assert lasting(answer.json()) == lasting(expected.model_dump(mode="json")), path
    health = client.get("/healthz").json()
    assert health["directory"] == client.get("/v1/status").json()["directory"] == str(directory)
    assert (health["ready"], health["subscribers"], health["directory_problem"]) == (True, 0, None)
    assert health["readings"] > 9
    assert time.time() - 60 < health["started_at"] < health["last_reading_at"] < time.time()


def test_the_answers_are_what_the_page_says() -> None:
    """Whatever a page and an answer call by one name is the same."""
    answers = examples.example_responses()
    status = answers["/v1/status"].runs[0]
    for answer in (status.ranks[0], *(answers[f"/v1/{noun}"].runs[0].ranks[0] for noun in NOUNS)):
        fields = {**vars(SNAPSHOT), **vars(EXAMPLE.description)}
        shared = fields.keys() & type(answer).model_fields.keys()
        assert len(shared) > 1
        assert {name: getattr(answer, name) for name in shared} == {name: fields[name] for name in shared}
    of_status = {
        "rank",
        "steps",
        "tiers",
        "io",
        "checkpoint",
        "broken",
        "stalls",
        "phase_since",
        "global_step",
    }
    assert of_status < type(status.ranks[0]).model_fields.keys()
    assert (status.state, status.ranks_expected, status.ranks_live) == ("training", 1, 1)
    assert (status.step_seconds, status.stall_share) == pytest.approx((2.75, 0.6 / 2.75))
    assert (status.device, status.configuration) == (
        "cuda:0 NVIDIA RTX 4090",
        "batch 16 = 8 x 1 x 2 ranks, bf16",
    )
    documented = re.findall(
        "`([a-z ]+)`", Path("docs/design/architecture.md").read_text().split("## Stall causes")[1]
    )
    assert {*SNAPSHOT.stalls, *SNAPSHOT.steps[0].stalls} <= {*documented}, "causes that no engine tells"
    gib = 1 << 30
    assert [
        (it.name, it.planned // gib, it.found // gib) for it in answers["/v1/plan"].runs[0].ranks[0].compared
    ] == [
        ("device peak", 7, 7),
        ("host peak", 4, 4),
        ("nvme peak", 9, 9),
        ("read from NVMe", 9, 9),
        ("written to NVMe", 9, 9),
        ("sent to other ranks", 2, 2),
    ]


NOUNS = ("tiers", "bandwidth", "steps", "config", "plan")


def test_the_schema_is_that_of_its_examples(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    answering = examples.example_responses()
    assert set(schema["paths"]) == {*answering, "/v1/events", "/metrics"}
    for path in answering:
        content = schema["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
        jsonschema.validate(content["example"], content["schema"] | {"components": schema["components"]})
        assert content["example"] == answering[path].model_dump(mode="json")
    for name, model in schema["components"]["schemas"].items():
        for field, properties in model.get("properties", {}).items():
            if name.endswith(("Summary", "History", "Health", "Readiness")) or name == "RankStatus":
                assert "description" in properties or field in UNDERSTOOD, f"{name}.{field}"
    paths = {"/v1/tiers", "/v1/bandwidth", "/v1/steps", "/v1/config", "/v1/plan", "/v1/history"}
    for path in paths:
        assert {"200", "404", "422", "503"} <= set(schema["paths"][path]["get"]["responses"])
    rank = schema["components"]["schemas"]["RankStatus"]["properties"]
    assert rank["state"]["enum"] == [
        "live",
        "silent",
        "stale",
        "newer-version",
        "torn",
        "unreadable",
        "unreachable",
    ]


UNDERSTOOD = {"rank", "state", "ready", "name", "version"}


@pytest.mark.usefixtures("writer")
def test_what_is_not_here_or_not_understood_is_refused_in_words(client: TestClient) -> None:
    for path, status, message in (
        ("/v1/runs/nothing", 404, "/v1/runs lists the runs that have one"),
        (f"/v1/runs/{SNAPSHOT.run_name}", 404, f"use an id: {SNAPSHOT.run_id}"),
        ("/v1/tiers?run=nothing", 404, "no run with this id"),
        ("/v1/steps?rank=7", 404, "rank 7 has no status file"),
        ("/v1/history?run=nothing", 404, "no run with this id"),
        ("/v1/status?run=nothing", 404, "no run with this id"),
        ("/v1/events?run=nothing", 404, "no run with this id"),
        ("/v1/plan?rank=all", 422, "rank: Input should be a valid integer"),
        ("/v1/plan?rank=-1", 422, "rank: Input should be greater than or equal to 0"),
        ("/v1/events?interval=0", 422, "interval: Input should be greater than or equal to 0.25"),
        ("/v1/events?interval=nan", 422, "interval: Input should be"),
        ("/v1/status?rank=99", 422, "rank: unknown parameter; /v1/status takes run"),
        ("/v1/steps?run=nothing&rnak=1", 422, "rnak: unknown parameter; /v1/steps takes run, rank"),
        ("/v1/runs?run=nothing", 422, "run: unknown parameter; /v1/runs takes none"),
        (f"/v1/runs/{SNAPSHOT.run_id}?rank=", 422, "rank: unknown parameter; /v1/runs/{run_id} takes none"),
        ("/v1/events?RUN=nothing", 422, "RUN: unknown parameter; /v1/events takes run, interval"),
        ("/v1/plan?%ff%0a=1", 422, "unknown parameter; /v1/plan takes run, rank"),
        (f"/v1/tiers?{'x' * 1500}", 422, "xxx: unknown parameter; /v1/tiers takes run, rank"),
        (f"/v1/plan?run={'x' * 1500}", 422, "run: String should have at most 200 characters"),
    ):
        answer = client.get(path)
        assert answer.status_code == status
        assert message in answer.json()["detail"]
        assert len(answer.content) < 200
    for path in ("/docs", "/redoc", "/v1", "/../etc/passwd", "/v1/tiers/", "/page/../app.py"):
        assert client.get(path).status_code == 404


def test_filters_leave_the_run_and_rank_that_are_asked_for(
    client: TestClient, directory: Path, publishing: Publish
) -> None:
    for run_id in ("a-1", "b-1"):
        for rank in (1, 0):
            publishing(
                directory, replace(SNAPSHOT, run_name="x", run_id=run_id, rank=rank, local_world_size=2)
            )

    def shown(query: str) -> list[tuple[str, list[int]]]:
        answer = client.get(f"/v1/tiers{query}").json()
        return [(run["id"], [rank["rank"] for rank in run["ranks"]]) for run in answer["runs"]]

    assert shown("") == [("a-1", [0, 1]), ("b-1", [0, 1])]
    assert shown("?run=b-1") == [("b-1", [0, 1])]
    assert shown("?rank=1") == [("a-1", [1]), ("b-1", [1])]
    assert shown("?run=a-1&rank=0") == [("a-1", [0])]
    assert [run["id"] for run in get(client, "/v1/status?run=b-1")["runs"]] == ["b-1"]
    assert [len(get(client, path)["runs"]) for path in ("/v1/status", "/v1/runs")] == [2, 2]


@pytest.mark.parametrize(
    ("loss", "shown"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (None, None)]
)
def test_a_diverged_loss_is_told_from_a_missing_one(
    client: TestClient, writer: StatusWriter, loss: float | None, shown: str | None
) -> None:
    writer.publish(replace(SNAPSHOT, loss=loss))
    assert client.get("/v1/status").json()["runs"][0]["ranks"][0]["loss"] == shown
    assert client.get("/v1/runs").json()["runs"][0]["loss"] == shown


def test_damage_is_shown_and_survived(client: TestClient, writer: StatusWriter) -> None:
    for damage, state in (
        (lambda: os.truncate(writer.path, 200), "unreadable"),
        (lambda: writer.path.write_bytes(os.urandom(4096)), "unreadable"),
        (lambda: overwrite(writer.path, 8, 99), "newer-version"),
        (lambda: overwrite(writer.path, 24, 7), "torn"),
    ):
        writer.publish(SNAPSHOT)
        assert the_rank(client)["state"] == "live"
        damage()
        rank = the_rank(client)
        assert (rank["state"], rank["step"], rank["rank"], rank["tiers"]) == (state, None, 0, [])
        assert rank["reason"] != ""
        unready = client.get("/readyz")
        assert (unready.status_code, unready.json()["ready"]) == (503, False)
        assert rank["reason"] in unready.json()["reasons"][0]
        assert client.get("/healthz").status_code == 503
        assert client.get("/livez").status_code == 200


def overwrite(path: Path, offset: int, value: int) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), value.to_bytes(4, "little"), offset)


def test_a_page_without_a_writer_goes_stale_and_is_swept(
    client: TestClient, directory: Path, writer: StatusWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = writer.path.read_bytes()
    writer.close()
    writer.path.write_bytes(content)
    # A reading that began before is everybody's until it is over.
    until(lambda: [run["state"] for run in get(client, "/v1/runs")["runs"]] == ["ended"])
    rank = the_rank(client)
    assert (rank["state"], rank["reason"], rank["step"]) == ("stale", "the writer is gone", SNAPSHOT.step)
    os.utime(writer.path, (time.time() - 61,) * 2)
    with monkeypatch.context() as read_only:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(30, "Read-only file system")

        read_only.setattr(Path, "unlink", refuse)
        assert Watch(StatusFiles(directory)).view().runs[0].over, "what cannot be removed is shown"
    assert Watch(StatusFiles(directory)).view().runs == ()  # keeps them for 60 s
    assert not writer.path.exists()


def test_a_lost_directory_is_a_503_with_the_reason_until_it_is_back(
    client: TestClient, directory: Path, publishing: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problem() -> str:
        answers = [client.get(path) for path in ("/v1/status", "/v1/history", "/metrics", "/readyz")]
        assert [answer.status_code for answer in answers] == [503] * 4
        health = client.get("/healthz")
        assert (health.status_code, client.get("/livez").status_code) == (503, 200)
        (problem,) = {answer.json()["detail"] for answer in answers} | {*health.json()["reasons"]}
        assert health.json()["directory_problem"] == problem
        return problem

    assert get(client, "/v1/status")["runs"] == []
    assert not directory.exists(), "who only looks makes nothing"
    directory.mkdir(0o700)
    directory.chmod(0o777)
    assert "is open to others" in problem()
    directory.chmod(0o700)
    assert get(client, "/v1/status")["runs"] == []
    directory.rmdir()
    assert get(client, "/v1/status")["runs"] == []
    publishing(directory, SNAPSHOT)
    assert the_rank(client)["state"] == "live"

    def no_entry(_: Path) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as closed:  # root may read what it closed to itself
        closed.setattr(os, "scandir", no_entry)
        assert "cannot be read: Permission denied" in problem()
    assert the_rank(client)["state"] == "live"


def test_a_directory_of_any_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / os.fsdecode(b"\xff")
    client = TestClient(create_app(Watch(StatusFiles(directory), max_age=0)), base_url="http://localhost")
    for path in ("/v1/status", "/healthz"):
        assert client.get(path).json()["directory"] == f"{tmp_path}/?"
    monkeypatch.setattr(
        "service.status_files.find_status_files",
        Mock(side_effect=OSError(errno.EMFILE, "Too many open files")),
    )
    for path in ("/v1/status", "/metrics"):
        refused = client.get(path)
        assert refused.status_code == 503
        assert f"{tmp_path}/? cannot be read: Too many open files" in refused.json()["detail"]


def test_a_bad_directory_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TelemetryError, match="not a directory"):
        Watch(StatusFiles(tmp_path / "file"))


@pytest.mark.usefixtures("writer")
def test_however_many_ask_the_pages_are_read_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(StatusFiles(directory), max_age=3600)
    read = watch._read
    monkeypatch.setattr(watch, "_read", lambda: time.sleep(0.05) or read())  # the others come meanwhile

    readers = []
    aside = asyncio.to_thread
    monkeypatch.setattr("service.watch.asyncio.to_thread", lambda it: readers.append(it) or aside(it))

    async def together() -> list[Any]:
        return await asyncio.gather(*(watch.now() for _ in range(200)))

    views = asyncio.run(together())
    assert all(view is views[0] for view in views)
    assert (views[0].readings, watch.view(), len(readers)) == (1, views[0], 1)


def test_a_directory_that_hangs_is_an_answer(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread waits for it, whoever asks, and what it finds in the end is told."""
    find, requests, answers = find_status_files, [], threading.Event()

    def hanging(asked_for: Path) -> list[StatusFile]:
        requests.append(asked_for)
        answers.wait()
        return find(asked_for)

    async def scene() -> None:
        watch = Watch(StatusFiles(directory), max_age=0)
        monkeypatch.setattr("service.watch.READ_TIMEOUT", 0.02)
        monkeypatch.setattr("service.status_files.find_status_files", hanging)
        for _ in range(3):
            with pytest.raises(TelemetryError, match="has not answered for"):
                await watch.now()
        assert requests == [directory]
        answers.set()
        monkeypatch.setattr("service.watch.READ_TIMEOUT", 20)
        assert (await watch.now()).runs == ()

    asyncio.run(scene())


def test_a_publication_is_one_however_often_it_is_read(directory: Path, writer: StatusWriter) -> None:
    watch = Watch(StatusFiles(directory), max_age=0)
    assert [watch.view().changes for _ in range(3)] == [1, 1, 1]
    before = time.time()
    writer.publish(SNAPSHOT)
    assert (watch.view().changes, watch.view().readings) == (2, 5)
    assert before <= watch.view().runs[0].ranks[0].published_at <= time.time()


@pytest.mark.usefixtures("writer")
def test_history_goes_on_whatever_happens_to_the_pages(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("history", "app"):
        monkeypatch.setattr(f"service.{module}.INTERVAL", 0.01)
    with TestClient(
        create_app(Watch(StatusFiles(directory), max_age=0)), base_url="http://localhost"
    ) as client:

        def entries() -> int:
            return sum(len(run["at"]) for run in get(client, "/v1/history")["runs"])

        def grows() -> bool:
            before = entries()
            until(lambda: entries() > before)
            return True

        assert grows()
        with monkeypatch.context() as broken:
            broken.setattr("service.history._entry", lambda *_: 1 / 0)
            until(lambda: "ZeroDivisionError" in caplog.text)
        assert grows()
        (run,) = get(client, "/v1/history")["runs"]
        latest = get(client, "/v1/status")["runs"][0]["latest"]
        assert latest.keys() == run.keys() - {"id", "name", "interval"}
        assert latest["at"] >= run["at"][-1]


def test_the_sidecar_loads_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys, service.cli, service.serve_command, service.terminal\n"
        "forbidden = ('torch', 'numpy', 'zero3', 'optim_cpu')\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in forbidden))\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'tiering'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    forbidden, ours = done.stdout.splitlines()
    assert forbidden == "[]"
    facade = (
        "_command_line",
        "_lazy",
        "_module_finder",
        "_placeholders",
        "_text",
        "_unsupported",
        "_version",
    )
    allowed = (*(f"tiering.{name}." for name in facade), "tiering.errors.", "tiering.telemetry.")
    assert [name for name in ast.literal_eval(ours) if not f"{name}.".startswith(allowed)] == ["tiering"]


def test_activations_are_compared_with_a_plan_that_has_them() -> None:
    planned = DESCRIPTION.plan
    assert planned is not None
    moving = [
        replace(step, read_bytes=70, activation_read_bytes=30, written_bytes=60, activation_written_bytes=50)
        for step in FULL.steps
    ]
    found = {}
    for counts in (False, True):
        more = {"activations": 30} if counts else {}
        plan = replace(planned, read=planned.read | more, written=planned.written | more)
        pairs = compared(plan, replace(FULL, steps=moving))
        found[counts] = {pair.name: pair.found for pair in pairs if "NVMe" in pair.name}
    assert found[False] == {"read from NVMe": 40, "written to NVMe": 10}
    assert found[True] == {"read from NVMe": 70, "written to NVMe": 60}
