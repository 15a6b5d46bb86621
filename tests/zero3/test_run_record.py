"""What an engine tells of its I/O: the engine in use, what it really uses, and what went over each path."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tiering.aio import AioContext

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
