"""The application in process: what pages say is what the JSON says, and no page stops it from answering."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

import service
from service.app import create_app
from tiering.telemetry import (
    ActivationStatus,
    CollectiveStatus,
    ConfigurationStatus,
    DirectionStatus,
    IoEngineStatus,
    PageWriter,
    PathStatus,
    Snapshot,
    StepRecord,
    TelemetryError,
    TierStatus,
)

MIB = 1 << 20
SAID = Snapshot(
    run_name="gpt 25M",
    rank=1,
    world_size=2,
    pid=4321,
    started_at=1_700_000_000.5,
    step=12,
    phase="step",
    loss=3.5,
    configuration=ConfigurationStatus(
        "ds_config.json",
        "batch 8 = 2 x 4 ranks, bf16",
        {"honoured": 3, "no effect": 1},
        ["zero_optimization.reduce_bucket_size"],
    ),
    tiers=[
        TierStatus("host", 96 * MIB, 16384 * MIB, 60 * MIB, 90 * MIB, {"parameters": 50 * MIB}),
        TierStatus("nvme", 900 * MIB, 99999 * MIB, 400 * MIB, 400 * MIB, {"optimizer state": 300 * MIB}),
    ],
    activations=ActivationStatus(3 * MIB, 7 * MIB),
    io=[
        PathStatus(
            "/nvme/swap",
            "libaio",
            True,
            DirectionStatus(500 * MIB, 500, 2, 0, 3, 0.5, 800.0 * MIB, 1000.0 * MIB),
            DirectionStatus(
                400 * MIB, 400, 0, 1, 0, 0.4, 700.0 * MIB, 1000.0 * MIB, {"EIO": 1}, [0] * 18 + [300, 100]
            ),
            queue_full_seconds=0.3,
            measured_bytes_per_second=10**9,
        )
    ],
    io_engine=IoEngineStatus("libaio", ["verify"], 0, {"io_uring": "EPERM (Operation not permitted)"}),
    collectives=[CollectiveStatus("all-gather", 40, 80 * MIB, 5.0 * MIB)],
    stalls={"parameter fetch": 0.5},
    steps=[StepRecord(12, 1.0, 0.25, 0.5, 0.25, 0.125, 30 * MIB, 24 * MIB, 6 * MIB)],
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def client(directory: Path) -> Iterator[TestClient]:
    with TestClient(create_app(directory, keep_stale_seconds=3600)) as client:
        yield client


@pytest.fixture
def writer(directory: Path) -> Iterator[PageWriter]:
    writer = PageWriter("gpt 25M", 1, 2, directory=directory)
    writer.publish(SAID)
    yield writer
    writer.close()


def the_rank(client: TestClient) -> dict[str, Any]:
    answer = client.get("/v1/status")
    assert answer.status_code == 200
    (run,) = answer.json()["runs"]
    (rank,) = run["ranks"]
    return rank


def test_without_runs_the_answer_is_empty(client: TestClient) -> None:
    assert client.get("/v1/status").json() == {"runs": []}
    assert client.get("/livez").json() == {"status": "ok"}


@pytest.mark.usefixtures("writer")
def test_a_live_page_is_shown_whole(client: TestClient) -> None:
    answer = client.get("/v1/status")
    assert answer.headers["content-type"] == "application/json"
    (run,) = answer.json()["runs"]
    assert run["run_name"] == "gpt 25M"
    (rank,) = run["ranks"]
    assert 0 <= rank.pop("heartbeat_age") < 60
    direction = {"bytes": 500 * MIB, "ops": 500, "retries": 2, "errors": 0, "in_flight": 3}
    assert rank["io"][0]["read"] == direction | {
        "busy_seconds": 0.5,
        "bytes_per_second": 800.0 * MIB,
        "average_bytes_per_second": 1000.0 * MIB,
        "errors_by_errno": {},
        "latency_buckets": [],
    }
    written = rank["io"][0].pop("written")
    assert (written["errors"], written["errors_by_errno"]) == (1, {"EIO": 1})
    assert written["latency_buckets"] == [0] * 18 + [300, 100]
    rank["io"][0].pop("read")
    assert rank == {
        "rank": 1,
        "state": "live",
        "reason": "",
        "world_size": 2,
        "pid": 4321,
        "started_at": 1_700_000_000.5,
        "step": 12,
        "phase": "step",
        "loss": 3.5,
        "configuration": {
            "source": "ds_config.json",
            "outcome": "batch 8 = 2 x 4 ranks, bf16",
            "counts": {"honoured": 3, "no effect": 1},
            "without_effect": ["zero_optimization.reduce_bucket_size"],
            "deprecated": [],
        },
        "tiers": [
            {
                "name": "host",
                "budget": 96 * MIB,
                "capacity": 16384 * MIB,
                "used": 60 * MIB,
                "peak": 90 * MIB,
                "by_kind": {"parameters": 50 * MIB},
            },
            {
                "name": "nvme",
                "budget": 900 * MIB,
                "capacity": 99999 * MIB,
                "used": 400 * MIB,
                "peak": 400 * MIB,
                "by_kind": {"optimizer state": 300 * MIB},
            },
        ],
        "activations": {"used": 3 * MIB, "peak": 7 * MIB},
        "io": [
            {
                "path": "/nvme/swap",
                "engine": "libaio",
                "direct": True,
                "queue_full_seconds": 0.3,
                "measured_bytes_per_second": 10**9,
            }
        ],
        "io_engine": {
            "name": "libaio",
            "flags": ["verify"],
            "registered_bytes": 0,
            "passed_over": {"io_uring": "EPERM (Operation not permitted)"},
        },
        "collectives": [
            {
                "kind": "all-gather",
                "calls": 40,
                "sent_bytes": 80 * MIB,
                "sent_bytes_per_second": 5.0 * MIB,
            }
        ],
        "stalls": {"parameter fetch": 0.5},
        "steps": [
            {
                "step": 12,
                "seconds": 1.0,
                "forward": 0.25,
                "backward": 0.5,
                "update": 0.25,
                "stall": 0.125,
                "read_bytes": 30 * MIB,
                "written_bytes": 24 * MIB,
                "sent_bytes": 6 * MIB,
            }
        ],
    }


def test_ranks_are_grouped_by_run_in_order(client: TestClient, directory: Path) -> None:
    writers = []
    for name, rank in (("b", 1), ("a", 0), ("b", 0), ("b", 2)):
        writers.append(PageWriter(name, rank, 3, directory=directory))
        writers[-1].publish(replace(SAID, run_name=name, rank=rank, world_size=3))
    shown = [
        (run["run_name"], [rank["rank"] for rank in run["ranks"]])
        for run in client.get("/v1/status").json()["runs"]
    ]
    assert shown == [("a", [0]), ("b", [0, 1, 2])]
    for writer in writers:
        writer.close()


def test_pages_of_a_restarted_rank_stand_side_by_side(client: TestClient, directory: Path) -> None:
    """Same run, same rank: the page of the one that died goes stale beside its successor's, and hides nothing."""
    before = PageWriter("a", 1, 2, directory=directory)
    before.publish(replace(SAID, run_name="a", pid=1, started_at=1.0))
    died = before.path.read_bytes()
    after = PageWriter("a", 1, 2, directory=directory)
    after.publish(replace(SAID, run_name="a", pid=2, started_at=2.0))
    before.close()
    before.path.write_bytes(died)
    (run,) = client.get("/v1/status").json()["runs"]
    assert [(rank["rank"], rank["pid"], rank["state"]) for rank in run["ranks"]] == [
        (1, 1, "stale"),
        (1, 2, "live"),
    ]
    after.close()


@pytest.mark.parametrize(
    ("loss", "shown"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (None, None)]
)
def test_a_diverged_loss_is_told_from_a_missing_one(
    client: TestClient, writer: PageWriter, loss: float | None, shown: str | None
) -> None:
    writer.publish(replace(SAID, loss=loss, steps=[StepRecord(1, math.inf)]))
    assert the_rank(client)["loss"] == shown


def test_damage_is_shown_and_survived(client: TestClient, writer: PageWriter) -> None:
    for damage, state in (
        (lambda: os.truncate(writer.path, 200), "unreadable"),
        (lambda: os.truncate(writer.path, 0), "unreadable"),
        (lambda: writer.path.write_bytes(os.urandom(4096)), "unreadable"),
        (lambda: overwrite(writer.path, 8, 99), "newer-version"),
        (lambda: overwrite(writer.path, 24, 7), "torn"),
    ):
        writer.publish(SAID)
        assert the_rank(client)["state"] == "live"
        damage()
        rank = the_rank(client)
        assert (rank["state"], rank["step"], rank["rank"], rank["tiers"]) == (state, None, 1, [])
        assert rank["reason"] != ""
        assert client.get("/livez").status_code == 200


def overwrite(path: Path, offset: int, value: int) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), value.to_bytes(4, "little"), offset)


def test_a_page_without_a_writer_goes_stale_and_is_swept(directory: Path) -> None:
    keeping = TestClient(create_app(directory, keep_stale_seconds=3600))
    writer = PageWriter("gpt", directory=directory)
    writer.publish(replace(SAID, run_name="gpt", rank=0))
    content = writer.path.read_bytes()
    writer.close()
    page = directory / writer.path.name
    page.write_bytes(content)
    rank = the_rank(keeping)
    assert (rank["state"], rank["reason"], rank["step"]) == ("stale", "the writer is gone", 12)
    assert page.exists()
    os.utime(page, (time.time() - 31,) * 2)
    with TestClient(create_app(directory)) as forgetting:  # keeps them for 30 s
        assert forgetting.get("/v1/status").json() == {"runs": []}
    assert not page.exists()


def test_a_directory_lost_to_others_is_a_503_with_the_reason(client: TestClient, directory: Path) -> None:
    directory.chmod(0o777)
    answer = client.get("/v1/status")
    assert answer.status_code == 503
    assert "writable by others" in answer.json()["detail"]
    directory.chmod(0o700)
    assert client.get("/v1/status").status_code == 200
    directory.rmdir()
    assert client.get("/v1/status").json() == {"runs": []}


def test_a_bad_directory_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TelemetryError, match="not a directory"):
        create_app(tmp_path / "file")


def test_the_page_is_self_contained(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "/v1/status" in answer.text
    assert "://" not in answer.text, "the page must not load anything from elsewhere"
    assert "innerHTML" not in answer.text, "what pages say is text, never markup"


def test_the_schema_describes_the_answer(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    assert set(schema["paths"]) == {"/v1/status", "/livez"}
    rank = schema["components"]["schemas"]["RankStatus"]["properties"]
    assert rank["tiers"]["items"] == {"$ref": "#/components/schemas/TierStatus"}
    assert rank["state"]["enum"] == ["live", "stale", "newer-version", "torn", "unreadable"]
    for path in ("/docs", "/redoc", "/v1", "/../etc/passwd"):
        assert client.get(path).status_code == 404


def test_the_sidecar_loads_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys, service.app, service.cli\n"
        "forbidden = ('torch', 'numpy', 'zero3', 'optim_cpu')\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in forbidden))\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'tiering'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    forbidden, ours = done.stdout.splitlines()
    assert forbidden == "[]"
    assert ast.literal_eval(ours) == [
        "tiering",
        "tiering.errors",
        "tiering.lazy",
        "tiering.telemetry",
        "tiering.telemetry.directory",
        "tiering.telemetry.page",
        "tiering.telemetry.publisher",
        "tiering.telemetry.snapshot",
    ]


def test_the_sidecar_imports_nothing_of_tiering_but_telemetry() -> None:
    imported = set()
    for source in Path(service.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
    ours = {name for name in imported if name and name.split(".")[0] in ("tiering", "zero3", "optim_cpu")}
    assert ours == {"tiering.telemetry"}
