"""Ranks that do not come together: an error that says why and what to do, in the time that was given."""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tiering.errors import ConfigError, DistributedError, RankLostError
from tiering.storage import descriptors
from zero3.ranks import joining
from zero3.ranks.joining import meet

from . import models
from .pool import Pool
from .training import start

Ranks = Callable[..., Pool]
SECOND = timedelta(seconds=1)


def refused(kind: type[Exception], within: timedelta = SECOND, **environment: str | None) -> str:
    for name, value in environment.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    with pytest.raises(kind) as caught:
        meet("gloo", within)
    assert not dist.is_initialized()
    return str(caught.value)


def one_rank(rank: int, only: int, kind: type[Exception], port: int, patience: float = 20.0) -> str:
    """One of two ranks comes, of those that no torchrun serves: rank 0 is to listen at ``port``."""
    joining.PATIENCE = patience
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return refused(kind) if rank == only else ""


def test_a_variable_of_the_launcher_is_missing(doomed: Ranks) -> None:
    names = {"MASTER_ADDR": None, "MASTER_PORT": None}
    for message in doomed(2).run(without, names):
        assert "MASTER_ADDR, MASTER_PORT is not set in its environment" in message
        assert "torchrun" in message


def without(rank: int, names: dict[str, str | None]) -> str:
    return refused(ConfigError, **names)


def test_the_port_is_another_programs(doomed: Ranks) -> None:
    """Rank 0 cannot have it; another rank is connected, and nobody speaks to it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        first = doomed(2).run(one_rank, 0, ConfigError, port)[0]
        second = doomed(2).run(one_rank, 1, DistributedError, port, patience=0.5, limit=30)[1]
    assert f"rank 0 cannot listen at 127.0.0.1:{port}" in first
    assert "MASTER_PORT" in first and "--standalone" in first
    assert f"the process that listens at 127.0.0.1:{port} has not answered within 1 seconds" in second


@pytest.mark.slow
def test_rank_0_has_not_started(doomed: Ranks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    message = doomed(2).run(one_rank, 1, DistributedError, port)[1]
    assert f"could not reach rank 0 at 127.0.0.1:{port} within 1 seconds" in message


def test_who_did_not_answer_is_named(doomed: Ranks) -> None:
    messages = doomed(3).run(all_but, 1)
    for rank in (0, 2):
        assert "not all ranks joined within 1 seconds" in messages[rank]
    assert "rank 1 did not answer" in messages[0]


def test_rank_0_did_not_answer(doomed: Ranks) -> None:
    assert "rank 0 did not answer" in doomed(2).run(all_but, 0)[1]


def all_but(rank: int, missing: int) -> str:
    return "" if rank == missing else refused(DistributedError)


def killed_between_groups(rank: int, nvme: Path) -> float:
    """Rank 1 is killed when it is about to make the second group of its engine, in which others wait for it."""
    groups: list[Any] = []
    new_group = dist.new_group

    def make(*args: Any, **kwargs: Any) -> Any:
        if rank == 1 and groups:
            os.kill(os.getpid(), signal.SIGKILL)
        groups.append(new_group(*args, **kwargs))
        return groups[-1]

    dist.new_group = make
    began = time.monotonic()
    with pytest.raises(
        RankLostError, match=r"rank 1 \(host .* died without an error message.*waiting in new_group"
    ):
        start(nvme, models.Blocks, distributed={"timeout": 60, "silence": 20})
    return time.monotonic() - began


def test_a_rank_that_dies_while_an_engine_connects_is_named(doomed: Ranks, nvme: Path) -> None:
    outcome = doomed(2).outcomes(killed_between_groups, nvme, limit=60)[0]
    assert outcome.fine, outcome.report()
    assert outcome.value < 15, "that is the silence of a rank that was never seen"


def limits(rank: int, hard: int | None) -> int:
    """By how much the soft limit is above what is in use, after joining with 8 left of it, or ``hard``."""
    in_use, most = descriptors.in_use(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 8, most if hard is None else in_use + hard))
    joining.join(torch.device("cpu"), 60.0)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - in_use


def test_the_soft_limit_of_open_files_is_raised_for_the_ranks_that_there_are(doomed: Ranks) -> None:
    for more in doomed(2).run(limits, None):
        assert more >= 2 * joining.SOCKETS + joining.OTHER_FILES


def test_a_hard_limit_that_is_too_low_is_refused_with_the_number(doomed: Ranks) -> None:
    for outcome in doomed(2).outcomes(limits, 9):
        assert outcome.error is not None and outcome.error.kind == "ConfigError", outcome.report()
        assert "the connections of 2 ranks take about" in outcome.error.message
        assert "ulimit -Hn" in outcome.error.message


def sockets(rank: int, nvme: Path) -> tuple[int, int]:
    """Sockets that torch's group and an engine take, and for how many ``joining`` makes room."""
    before = open_sockets()
    with start(nvme, models.Blocks):
        return open_sockets() - before, joining.SOCKETS * dist.get_world_size()


def open_sockets() -> int:
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += entry.readlink().name.startswith("socket:")
        except FileNotFoundError:
            continue
    return count


def test_as_many_sockets_are_open_as_room_is_made_for(doomed: Ranks, nvme: Path) -> None:
    for sockets_open, room in doomed(4).run(sockets, nvme):
        assert 0 < sockets_open <= room + 3


def resources(rank: int, nvme: Path) -> list[tuple[int, int]]:
    """Threads and sockets before an engine and when it is closed, which somebody keeps."""
    start(nvme, models.Blocks).close()  # what torch and others open once
    gc.collect()
    gc.disable()
    try:
        counts = [(len(list(Path("/proc/self/task").iterdir())), open_sockets())]
        engine = start(nvme, models.Blocks, threshold=0)
        for shares in models.vectors(1, 2):
            engine.backward(engine(*shares[rank]))
            engine.step()
        engine.close()
        return [*counts, (len(list(Path("/proc/self/task").iterdir())), open_sockets())]
    finally:
        gc.enable()


def test_a_closed_engine_keeps_no_threads_and_no_sockets(doomed: Ranks, nvme: Path) -> None:
    for before, after in doomed(2).run(resources, nvme):
        assert after == before
