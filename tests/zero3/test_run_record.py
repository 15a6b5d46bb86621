"""What an engine tells of its I/O: the engine in use, what it really uses, and what went over each path."""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiering.aio import AioContext
from tiering.config import TelemetryConfig
from tiering.telemetry import find_pages
from zero3.collectives import World
from zero3.run_record import RunRecord

STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}


@pytest.mark.parametrize("chosen", ["auto", "threads"])
def test_a_snapshot_tells_the_io_engine_and_what_went_over_the_path(
    start: Callable[..., Any], micro_batches: Any, chosen: str
) -> None:
    engine = start(**STREAMED, io={"engine": chosen})
    for tokens, targets in micro_batches(2):
        engine.backward(engine(tokens, targets))
        engine.step()
    snapshot = engine.snapshot()
    told = snapshot.io_engine
    with AioContext(engine=chosen) as like:
        assert told.name == like.engine
    if told.name == "io_uring":
        assert {"registered_buffers", "registered_files"} <= set(told.flags)
        tiers = engine._tiers
        assert told.registered_bytes == tiers.host.capacity + tiers.device_arena.capacity
    else:
        assert (told.flags, told.registered_bytes) == ([], 0)
    (path,) = snapshot.io
    for direction in (path.read, path.written):
        assert direction.ops > 0
        assert sum(direction.latency_buckets) == direction.ops
        assert direction.latency_buckets[-1] > 0
        # A transfer takes between a microsecond and a minute.
        slowest = len(direction.latency_buckets) - 1
        assert 10 <= slowest <= math.log2(60e9)
        assert direction.errors_by_errno == {}
    assert 0.0 <= path.queue_full_seconds <= path.read.busy_seconds + path.written.busy_seconds


def test_checksums_are_told(start: Callable[..., Any]) -> None:
    assert "verify" in start(**STREAMED, verify=True).snapshot().io_engine.flags


def test_without_swap_space_there_is_no_io_engine(start: Callable[..., Any]) -> None:
    snapshot = start().snapshot()
    assert (snapshot.io, snapshot.io_engine) == ([], None)


class Counted:
    """Traffic under the test's control."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def count(self, kind: str, nbytes: int) -> None:
        self.calls[kind] += 1
        self.sent[kind] += nbytes


def test_a_rank_tells_who_it_is_and_what_it_sent(start: Callable[..., Any], tmp_path: Path) -> None:
    engine, traffic = start(), Counted()
    traffic.count("control", 1000)  # building the engine is not part of the first step
    world = World(rank=1, size=4, local_rank=1, local_size=2)
    record = RunRecord("many", engine._tiers, engine._schedule.activations, world=world, traffic=traffic)
    traffic.count("all-gather", 300)
    traffic.count("reduce", 50)
    record.end_step()
    traffic.count("reduce", 70)
    record.end_step()
    snapshot = record.snapshot()
    assert (snapshot.rank, snapshot.world_size) == (1, 4)
    assert (snapshot.local_rank, snapshot.local_world_size, snapshot.node) == (1, 2, socket.gethostname())
    assert [(one.kind, one.calls, one.sent_bytes) for one in snapshot.collectives] == [
        ("control", 1, 1000),
        ("all-gather", 1, 300),
        ("reduce", 2, 120),
    ]
    assert [step.sent_bytes for step in snapshot.steps] == [350, 70]
    publisher = record.publish(TelemetryConfig(dir=tmp_path / "pages"))
    (page,) = find_pages(tmp_path / "pages")
    publisher.close()
    assert (page.run_name, page.rank) == ("many", 1)


def test_one_rank_alone_sends_nothing(start: Callable[..., Any]) -> None:
    snapshot = start().snapshot()
    assert (snapshot.rank, snapshot.world_size, snapshot.collectives) == (0, 1, [])
