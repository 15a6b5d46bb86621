"""Pages that break, lie and burst: reading neither raises nor waits nor swells, and shows only what was published."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter
from starlette.routing import BaseRoute

from service.app import create_app
from service.status_files import StatusFiles
from service.watch import Watch
from tiering.telemetry import (
    Description,
    Snapshot,
    StatusFile,
    StatusReading,
    StatusWriter,
    find_status_files,
)
from tiering.telemetry import status_file as status_module

from .numbered import numbered, numbers

MIB = 1 << 20
DIRECTORY_OF_ALL = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

WRITER = """
import sys
from pathlib import Path
from tests.service.numbered import numbered
from tiering.telemetry import Description, StatusWriter, Snapshot

writer = StatusWriter("burst", int(sys.argv[2]), 2, Path(sys.argv[1]), numbered(Description, 7))
ready = [numbered(Snapshot, number) for number in range(1, 100)]
print("ready", flush=True)
while True:
    for snapshot in ready:
        writer.publish(snapshot)
"""


def the_page(directory: Path) -> StatusFile:
    (page,) = find_status_files(directory)
    return page


def is_whole(reading: StatusReading, *published: int) -> bool:
    """Whether it shows nothing, or one publication and nothing else."""
    if reading.snapshot is None:
        return reading.state != "live"
    return reading.snapshot in [numbered(Snapshot, number) for number in published]


# --- updates that stop anywhere -------------------------------------------------------------------------


# No name with "Error": this happens to the writer, which does not report it.
class Cut(Exception):  # noqa: N818
    """The writer ends here."""


@contextmanager
def cut(write: int, share: float) -> Iterator[None]:
    """Of the next writes to files, ``write`` are whole, the next is made up to that share, and none follows."""
    whole, done = os.pwrite, 0

    def pwrite(fd: int, content: bytes, offset: int) -> int:
        nonlocal done
        done += 1
        if done > write:
            whole(fd, content[: int(share * len(content))], offset)
            raise Cut
        return whole(fd, content, offset)

    with mock.patch.object(os, "pwrite", pwrite):
        yield


@DIRECTORY_OF_ALL
@given(
    before=st.integers(1, 40),
    after=st.integers(41, 80),
    write=st.integers(0, 2),
    share=st.floats(0, 1),
    killed=st.booleans(),
)
def test_an_update_that_stops_anywhere_mixes_nothing(
    tmp_path: Path, before: int, after: int, write: int, share: float, killed: bool
) -> None:
    directory = tmp_path / f"{time.monotonic_ns()}"
    writer = StatusWriter("cut", 0, 1, directory, numbered(Description, 7))
    writer.publish(numbered(Snapshot, before))
    with cut(write, share), pytest.raises(Cut):
        writer.publish(numbered(Snapshot, after))
    if killed:  # the kernel closes what it had open
        os.close(writer._fd)
    reading = the_page(directory).read()
    assert is_whole(reading, before, after)
    if killed:
        assert reading.state in ("stale", "unreadable")
        return
    writer.publish(numbered(Snapshot, 90))
    healed = the_page(directory).read()
    assert (healed.state, healed.snapshot) == ("live", numbered(Snapshot, 90))
    assert healed.description == numbered(Description, 7)
    writer.close()


@pytest.mark.slow
def test_writers_without_pause_are_read_whole(tmp_path: Path) -> None:
    steps_by_rank: dict[int, set[float]] = {0: set(), 1: set()}
    with ExitStack() as open_writers:
        for rank in steps_by_rank:
            command = [sys.executable, "-c", WRITER, str(tmp_path), str(rank)]
            writer = open_writers.enter_context(
                subprocess.Popen(
                    command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            )
            open_writers.callback(writer.kill)
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        end = time.monotonic() + 60
        while min(map(len, steps_by_rank.values())) < 30:
            assert time.monotonic() < end, steps_by_rank
            for page in find_status_files(tmp_path):
                reading = page.read()
                assert reading.state in ("live", "torn"), reading.reason
                if reading.snapshot is not None:
                    (number,) = numbers(reading.snapshot)
                    assert reading.snapshot == numbered(Snapshot, int(number))
                    assert reading.description == numbered(Description, 7)
                    steps_by_rank[page.rank].add(number)


# --- headers that lie ------------------------------------------------------------------------------------

EXTREMES = st.sampled_from(
    [0, 1, 11, 55, 56, 67, 68, 69, 4096, 1 << 16, 1 << 20, (1 << 31) - 1, (1 << 32) - 1]
) | (st.sampled_from([1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 4096, (1 << 64) - 1]))
"""Also where a field of 32 bits takes their remainder."""


@DIRECTORY_OF_ALL
@given(
    lies=st.dictionaries(st.sampled_from(status_module.Header._fields[1:]), EXTREMES, max_size=2),
    flips=st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 255)), max_size=3),
    length=st.none() | st.integers(0, 20_000) | st.just(1 << 40),
    alive=st.booleans(),
)
def test_a_header_that_lies_shows_nothing_else_and_costs_nothing(
    tmp_path: Path,
    lies: dict[str, int],
    flips: list[tuple[int, int]],
    length: int | None,
    alive: bool,
) -> None:
    directory = tmp_path / f"{time.monotonic_ns()}"
    writer = StatusWriter("lies", 0, 1, directory, numbered(Description, 7))
    writer.publish(numbered(Snapshot, 5))
    with writer.path.open("r+b") as file:
        raw = bytearray(file.read())
        header = status_module.Header.of(bytes(raw))._asdict()
        for name, lie in lies.items():
            small = name in ("version", "header_size", "capacity", "crc", "description_crc")
            header[name] = lie % (1 << 32 if small else 1 << 64)
        raw[: status_module.HEADER.size] = status_module.Header(**header).pack()
        for place, change in flips:
            raw[place] ^= change
        file.seek(0)
        file.write(raw)
        if length is not None:
            file.truncate(length)
    if not alive:
        os.close(writer._fd)
    sizes: list[int] = []
    pread = os.pread

    def counting(fd: int, size: int, offset: int) -> bytes:
        sizes.append(size)
        return pread(fd, size, offset)

    with mock.patch.object(os, "pread", counting):
        reading = the_page(directory).read()
    assert is_whole(reading, 5) or (reading.state == "live" and header["length"] == 0)
    assert reading.description in (None, numbered(Description, 7))
    assert max(sizes) <= MIB
    if alive:
        writer.close()


# --- content that bursts ---------------------------------------------------------------------------------


@contextmanager
def forged(directory: Path, name: str, payload: bytes, description: bytes = b"") -> Iterator[Path]:
    """A page of a writer that lives and says ``payload``, whatever that is, with everything about it right."""
    with closing(StatusWriter(name, directory=directory)) as writer:
        capacity = max(len(payload), status_module.CAPACITY)
        writer._description = description
        header = writer._header(time.time_ns(), payload)._replace(capacity=capacity)
        with writer.path.open("r+b") as file:
            file.write(header.pack() + payload.ljust(capacity, b"\0") + description)
        yield writer.path


def sized(template: str, item: str, size: int) -> bytes:
    """``template`` with as many items in place of its mark as fit that many bytes."""
    items = (size - len(template)) // (len(item) + 1)
    return template.replace('"HERE"', ",".join([item] * items)).encode()


def in_all_lists(item: str, size: int) -> Iterator[bytes]:
    whole = json.loads(numbered(Snapshot, 5).to_json())
    for name in ("steps", "io"):
        yield sized(json.dumps(whole | {name: ["HERE"]}), item, size)


BURSTS: dict[str, Callable[[], Iterator[bytes]]] = {
    "numbers where records should be": lambda: in_all_lists("1", status_module.CAPACITY),
    "the largest that passes": lambda: in_all_lists("1", status_module._MAX_CAPACITY),
    "a million numbers": lambda: in_all_lists("1", 2_000_000),
    "steps without end": lambda: in_all_lists('{"step":1,"seconds":1}', status_module._MAX_CAPACITY),
    "lists in lists": lambda: iter([b"[" * status_module.CAPACITY, b'{"a":' * (status_module.CAPACITY // 5)]),
}


@pytest.mark.parametrize("burst", BURSTS)
def test_no_content_makes_reading_swell(tmp_path: Path, burst: str) -> None:
    for payload in BURSTS[burst]():
        with forged(tmp_path, "burst", payload):
            tracemalloc.start()
            try:
                reading = the_page(tmp_path).read()
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert (reading.state, reading.snapshot) == ("unreadable", None) or burst == "steps without end"
        assert peak < 16 * MIB


# --- what is served of it --------------------------------------------------------------------------------

INTEGERS = st.sampled_from([-1, 0, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**30, 10**400])
FLOATS = st.sampled_from([-1.0, 0.0, 5e-324, 1e308, -1e308, float("nan"), float("inf"), float("-inf")])
TEXTS = st.sampled_from(
    [
        "",
        "\0",
        "\x1b[31m",
        'a"b\\c\nd\re',
        "{{ x }} ${y} %s",
        "../../etc/passwd",
        "<script>",
        "é\u202e\U0001f600",
        "x" * 300,
    ]
)
WRONG = st.sampled_from([None, True, {}, [], [[[]]], "1", 0.5])


Place = tuple[str | int, ...]
Lies = list[tuple[Place, Any]]


def places(value: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Everything in a JSON value, and the way to it."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*path, key), inner
        yield from places(inner, (*path, key))


def hostile(value: Any) -> st.SearchStrategy[Any]:
    """What has the type of ``value``, mostly, and is nothing that an engine would say."""
    match value:
        case bool():
            fitting: st.SearchStrategy[Any] = st.booleans()
        case int():
            fitting = INTEGERS
        case float():
            fitting = FLOATS | INTEGERS
        case str():
            fitting = TEXTS
        case list():
            fitting = st.sampled_from([[], value * 2])
        case _:
            fitting = st.dictionaries(TEXTS, st.sampled_from(list(value.values())), max_size=3)
    return st.one_of(*8 * [fitting], WRONG)


def lies(kind: type[Snapshot | Description]) -> st.SearchStrategy[Lies]:
    """Places in such a record, and what stands there in place of the truth."""
    paths = st.sampled_from(list(places(json.loads(numbered(kind, 5).to_json()))))
    return st.lists(paths.flatmap(lambda place: st.tuples(st.just(place[0]), hostile(place[1]))), max_size=3)


def page_of(kind: type[Snapshot | Description], replaced: Lies) -> bytes:
    whole = json.loads(numbered(kind, 5).to_json())
    for path, lie in sorted(replaced, key=lambda item: -len(item[0])):  # a part before what it is part of
        holder = whole
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = lie
    return json.dumps(whole).encode()


def strict(answer: str) -> Any:
    """JSON, which has no NaN."""
    return json.loads(answer, parse_constant=lambda name: pytest.fail(f"{name} in {answer[:200]}"))


def routes(app: FastAPI) -> Iterator[BaseRoute]:
    """Those of ``app``, and of the routers in it, which newer versions of FastAPI keep as they are."""
    for route in app.routes:
        router = getattr(route, "original_router", None)
        yield from [route] if router is None else router.routes


def ask_everything(directory: Path) -> dict[str, Any]:
    """The answer of every endpoint, each of them as its model says; of events, the first."""
    answers: dict[str, Any] = {}
    app = create_app(Watch(StatusFiles(directory, keep_stale_seconds=3600)))
    with TestClient(app, base_url="http://localhost") as client:
        runs = strict(client.get("/v1/runs").text)["runs"]
        for route in routes(app):
            if not isinstance(route, APIRoute) or not route.include_in_schema or route.path == "/v1/events":
                continue
            for run in runs[:2] if "{run_id}" in route.path else [{}]:
                answer = client.get(route.path.replace("{run_id}", quote(run.get("id", ""), safe="")))
                if answer.status_code == 200 and route.response_model is not None:
                    TypeAdapter(route.response_model).validate_json(answer.content)
                    strict(answer.text)
                allowed = {
                    "/readyz": (200, 503),
                    "/healthz": (200, 503),
                    "/v1/runs/{run_id}": (200, 404, 414),
                }
                assert answer.status_code in allowed.get(route.path, (200,)), answer.text[:300]
                answers[route.path] = answer
        assert app.openapi()["paths"].keys() - answers.keys() <= {"/v1/events", "/v1/runs/{run_id}"}
        assert len(list(text_string_to_metric_families(answers["/metrics"].text))) > 10
        text = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}).text
        assert len(list(openmetrics.text_string_to_metric_families(text))) > 10
    return answers


@pytest.mark.slow
@settings(
    phases=[Phase.generate],
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(pages=st.lists(st.tuples(lies(Snapshot), lies(Description)), min_size=8, max_size=8))
def test_whatever_pages_say_is_answered(tmp_path: Path, pages: list[tuple[Lies, Lies]]) -> None:
    directory = tmp_path / f"{time.monotonic_ns()}"
    with ExitStack() as forgeries:
        for number, (snapshot, description) in enumerate(pages):
            records = page_of(Snapshot, snapshot), page_of(Description, description)
            forgeries.enter_context(forged(directory, f"run{number % 3}", *records))
        answers = ask_everything(directory)
    assert sum(len(run["ranks"]) for run in answers["/v1/status"].json()["runs"]) == 8


def test_whatever_lies_in_the_directory_is_answered(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path)
    with closing(StatusWriter("whole", directory=tmp_path)) as writer, socket.socket(socket.AF_UNIX) as bound:
        writer.publish(numbered(Snapshot, 5))
        os.mkfifo(tmp_path / "fifo.0.1-1.page")
        (tmp_path / "directory.0.1-1.page").mkdir()
        (tmp_path / "link.0.1-1.page").symlink_to(writer.path)
        (tmp_path / "loop.0.1-1.page").symlink_to("loop.0.1-1.page")
        (tmp_path / "nothing.0.1-1.page").symlink_to("/nonexistent")
        bound.bind(str(tmp_path / "socket.0.1-1.page"))
        with (tmp_path / "sparse.0.1-1.page").open("wb") as sparse:
            sparse.truncate(1 << 40)
        for strange in (b"\xff\xfe.page", b"new\nline.1.x.page", b".page", b"a." + b"9" * 240 + b".x.page"):
            (Path(os.fsdecode(name + b"/" + strange))).touch()
        answers = ask_everything(tmp_path)
        shown = [rank for run in answers["/v1/status"].json()["runs"] for rank in run["ranks"]]
        assert sorted(rank["state"] for rank in shown) == ["live"] + 11 * ["unreadable"]
        assert [numbers(rank["tiers"]) for rank in shown if rank["state"] == "live"] == [{5.0}]
