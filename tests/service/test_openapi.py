"""The schema tells the truth about every answer, and no request reaches a file beside the pages."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import negative_data_rejection, not_a_server_error
from schemathesis.specs.openapi.schemas import OpenApiSchema

from service.app import create_app
from service.http.guard import Access
from service.status_files import StatusFiles
from service.watch import Watch
from tiering.config.ds_config import load
from tiering.telemetry import StatusWriter

from .full_view import DESCRIPTION, SNAPSHOT

# OpenApiSchema is loaded with this file: at its first use, beside threads and greenlets of other tests, Python 3.11 may
# fail to compile what it imports ("AST constructor recursion depth mismatch").
# Checks that call a mistake what is meant so. That the schema has these statuses for the route is another check.
MEANT = {414: [negative_data_rejection], 503: [not_a_server_error]}
# As /v1/tiers: one function for all.
SAME = {f"/v1/{noun}" for noun in ("bandwidth", "steps", "config", "plan")}
KNOWN = {"run_id": "gpt-1a2b3c4d", "run": "gpt-1a2b3c4d", "rank": 1, "descriptions": False}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run directory with two runs, one of two ranks, a key in their configuration, and a file beside it."""
    home = tmp_path_factory.mktemp("home")
    (home / "precious.page").write_text("top secret")
    settings = {"train_batch_size": 4, "comet": {"enabled": False, "api_key": "top secret"}}
    described = replace(DESCRIPTION, configuration=load(settings)[1].status())
    with ExitStack() as pages:
        for run, ranks in (("gpt-1a2b3c4d", 2), ("other-5e6f7a8b", 1)):
            for rank in range(ranks):
                writer = StatusWriter(run, rank, 4, home / "run", described)
                pages.callback(writer.close)
                writer.publish(replace(SNAPSHOT, run_id=run, rank=rank, local_world_size=2))
        yield home


@pytest.fixture(scope="module")
def app(home: Path) -> FastAPI:
    return create_app(Watch(StatusFiles(home / "run"), max_age=0), access=Access(requests_per_second=1e6))


def test_every_answer_is_as_the_schema_says(app: FastAPI) -> None:
    """For what a route takes and for what it does not; those of pages that are there, and of none."""
    schema: OpenApiSchema = schemathesis.openapi.from_asgi(
        "/openapi.json", app, headers={"host": "localhost"}
    )
    statuses: dict[str, set[int]] = {}

    def judge(case: schemathesis.Case) -> None:
        answer = case.call(headers={"host": "localhost"})
        case.validate_response(answer, excluded_checks=MEANT.get(answer.status_code))
        statuses.setdefault(case.operation.path, set()).add(answer.status_code)

    few = settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    for result in schema.exclude(path="/v1/events").get_all_operations():  # a stream does not end
        operation = result.ok()
        takes = {parameter.name: KNOWN[parameter.name] for parameter in operation.query}
        inside = {parameter.name: KNOWN[parameter.name] for parameter in operation.path_parameters}
        for wrong in ({}, {"run": "none"}, {"rank": "x"}):
            judge(operation.Case(query={**takes, **wrong} if takes else {}, path_parameters=inside))
        assert statuses[operation.path] & {200, 503}
        assert {404, 422} <= statuses[operation.path] or "rank" not in takes
        if operation.path in SAME:
            continue
        for mode in GenerationMode if takes else [GenerationMode.POSITIVE]:
            few(given(operation.as_strategy(generation_mode=mode))(judge))()
    assert {path for path, codes in statuses.items() if 503 in codes} == {"/readyz", "/healthz"}, (
        "a rank of the other run has no status file"
    )


ELSEWHERE = (
    "{0}",
    "../{0}",
    "..%2f{0}",
    "..%252f{0}",
    "..\\{0}",
    "%00{0}",
    "{0}%00",
    "file://{1}",
    "{1}",
    "%2e%2e/{0}",
)
OPENED: list[str] | None = None
EARLIER_THREADS: set[int | None] = set()


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if OPENED is None or threading.get_ident() in EARLIER_THREADS:
        return
    if event in ("open", "os.listdir", "os.scandir"):
        OPENED.append(str(arguments[0]))


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """All that this process opens by name while a test runs, in every thread that was not there before."""
    global OPENED
    # Of engines that earlier tests have left open, threads that publish go on.
    EARLIER_THREADS.clear()
    EARLIER_THREADS.update(thread.ident for thread in threading.enumerate())
    EARLIER_THREADS.discard(threading.get_ident())
    if OPENED is None:
        sys.addaudithook(_note)  # stays for good, and notes nothing between tests
    OPENED = []
    yield OPENED
    OPENED = None


async def answered(app: FastAPI, target: str) -> tuple[int, str]:
    """Status and body, for ``target`` as it is: client libraries tidy up dots."""
    status, body = 0, b""

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status, body
        status, body = message.get("status", status), body + message.get("body", b"")

    path, _, query = target.encode().partition(b"?")
    scope = {
        "type": "http",
        "method": "GET",
        "path": unquote(path.decode()),
        "raw_path": path,
        "query_string": query,
        "headers": [(b"host", b"localhost")],
    }
    await app(scope, receive, send)
    return status, body.decode()


def test_no_request_reaches_a_file_or_a_secret(app: FastAPI, home: Path, opened: list[str]) -> None:
    paths = [path for path in app.openapi()["paths"] if path != "/v1/events"]
    bodies = []

    async def ask(targets: Iterable[str]) -> None:
        for target in targets:
            status, body = await answered(app, target)
            assert status in (200, 404, 422, 503), target
            assert "top secret" not in body, target
            bodies.append(body)

    asyncio.run(ask(path.replace("{run_id}", KNOWN["run_id"]) for path in paths))
    harmless = {*opened}  # what is asked for by nobody's choice: the pages, the sidecar's own figures
    assert any(name.endswith(".page") for name in harmless)
    assert any("(hidden)" in body for body in bodies), "the configuration with the key is among them"
    opened.clear()
    targets = []
    for spelling in ELSEWHERE:
        value = spelling.format("precious.page", home / "precious.page")
        targets += [f"{before}{value}" for before in ("/", "/page/", "/page/../", "/v1/runs/", "/v1/")]
        for path in paths:
            path = path.replace("{run_id}", value)
            targets += [path, *(f"{path}?{name}={value}" for name in ("run", "rank", "dir", "path"))]
    asyncio.run(ask(targets))
    assert {*opened} <= harmless
