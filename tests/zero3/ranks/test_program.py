"""Collectives of a script's own beside an engine: a rank that is lost has a name there, too, and soon."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tiering.comm as comm
from zero3.ranks.peers import newest

from . import models
from .pool import Outcome, Pool
from .together import Together, eventually
from .training import start

Ranks = Callable[..., Pool]
SILENCE = 1.0
WATCHFUL = {"distributed": {"timeout": 60, "silence": SILENCE}}


class OwnError(Exception):
    pass


def values(rank: int, nvme: Path) -> list[Any]:
    """Every collective of tiering.comm, on two ranks, beside an engine and without one."""
    outcomes: list[Any] = []
    # Engines that earlier tests of this process have dropped.
    gc.collect()
    for beside in (start(nvme, models.Blocks), contextlib.nullcontext()):
        with beside as engine:
            # Another test of this process may have left an engine open.
            assert newest() is not None or engine is None
            outcomes.append(everything(rank))
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


def everything(rank: int) -> list[Any]:
    def mine(count: int = 1) -> torch.Tensor:
        return torch.full((count,), float(rank + 1))

    total, sent, least = mine(), mine(), mine()
    whole, part, exchanged = torch.empty(2), torch.empty(1), torch.empty(2)
    listed = [torch.empty(1), torch.empty(1)]
    objects, scattered, broadcast = [None, None], [None], ["of", rank]
    comm.all_reduce(total)
    work = comm.all_reduce(least, op=comm.ReduceOp.MIN, async_op=True)
    comm.broadcast(sent, 1)
    comm.all_gather_single(whole, mine())
    comm.all_gather(listed, mine())
    comm.reduce_scatter_single(part, mine(2))
    comm.all_to_all_single(exchanged, mine(2))
    comm.all_gather_object(objects, {"rank": rank})
    comm.broadcast_object_list(broadcast, src=1)
    comm.scatter_object_list(scattered, ["a", "b"] if rank == 0 else None, src=0)
    (comm.send if rank == 0 else comm.recv)(received := torch.tensor([7.0 * (1 - rank)]), 1 - rank)
    comm.barrier()
    work.wait()
    tensors = [total, least, sent, whole, torch.cat(listed), part, exchanged, received]
    return [*(tensor.tolist() for tensor in tensors), objects, broadcast, scattered]


def test_every_collective_does_what_torchs_does(ranks: Ranks, nvme: Path) -> None:
    first, second = ranks(2).run(values, nvme)
    common = [[3.0], [1.0], [2.0], [1.0, 2.0], [1.0, 2.0], [3.0], [1.0, 2.0], [7.0]]
    objects = [[{"rank": 0}, {"rank": 1}], ["of", 1]]
    assert first == [*common, *objects, ["a"]]
    assert second == [*common, *objects, ["b"]]


def lose(rank: int, nvme: Path, how: str, call: str) -> None:
    """Rank 1 is lost behind the first step; the other is in ``call`` by then."""
    with start(nvme, models.Blocks, threshold=0, **WATCHFUL) as engine:
        for shares in models.vectors(1, 2):
            engine.backward(engine(*shares[rank]))
            engine.step()
        if rank == 1:
            time.sleep(0.5)
            if how == "error":
                raise OwnError("the tokenizer is gone")
            if how == "exit":
                engine.close()
                os._exit(0)
            os.kill(os.getpid(), getattr(signal, how))
            time.sleep(600)
        if call == "torch":
            threading.Thread(target=lambda: (time.sleep(3 * SILENCE), os._exit(7)), daemon=True).start()
            dist.all_reduce(torch.ones(1))
        elif call == "all_gather_object":
            comm.all_gather_object([None, None], rank)
        elif call == "barrier":
            comm.barrier()
        else:
            comm.all_reduce(torch.ones(1))


def lost(outcome: Outcome) -> str:
    assert outcome.error is not None and outcome.error.kind == "RankLostError", outcome.report()
    assert outcome.seconds < 20, "as long as torch's own"
    return outcome.error.message


@pytest.mark.parametrize("call", ["all_reduce", "all_gather_object", "barrier"])
def test_a_frozen_rank_is_named(doomed: Ranks, nvme: Path, call: str) -> None:
    message = lost(doomed(2).outcomes(lose, nvme, "SIGSTOP", call, frozen=[1], limit=60)[0])
    assert "rank 1 (host" in message and "gave no sign of life" in message
    assert message.endswith(f"Rank 0 was waiting in {call} of the program.")


HOW = {
    "SIGKILL": "died without an error message",
    "error": "OwnError: the tokenizer is gone",
    "exit": "has closed its engine, and all_reduce of the program needs it",
}


def test_a_rank_that_ends_is_named(doomed: Ranks, nvme: Path) -> None:
    for how, words in HOW.items():
        message = lost(doomed(2).outcomes(lose, nvme, how, "all_reduce", limit=60)[0])
        assert "rank 1 (host" in message and words in message


@pytest.mark.slow
def test_torchs_own_collectives_hang_and_the_log_has_the_name(doomed: Ranks, nvme: Path) -> None:
    outcome = doomed(2).outcomes(lose, nvme, "SIGSTOP", "torch", frozen=[1], limit=60)[0]
    assert outcome.exit_code == 7, outcome.report()
    assert "CRITICAL zero3.ranks.heartbeat: [rank 0] [TIER-RANK-LOST] rank 1 (host" in outcome.log
    assert "gave no sign of life" in outcome.log


def test_silence_is_logged_once_and_so_is_its_end(
    together: Callable[..., Together], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="zero3.ranks.heartbeat")
    them = together(2, silence=0.5)
    write = them.ranks[1]._heartbeat.store.write_beat
    them.silence(1)
    eventually(lambda: caplog.records)
    turns = them.ranks[0]._heartbeat.turns
    eventually(lambda: them.ranks[0]._heartbeat.turns > turns + 5)
    them.ranks[1]._heartbeat.store.write_beat = write
    eventually(lambda: len(caplog.records) > 1)
    silence, end = caplog.records
    assert silence.levelname == "CRITICAL" and "rank 1 (host" in silence.getMessage()
    assert end.getMessage() == "rank 1 gives signs of life again"
    assert them.ranks[0]._heartbeat.failure is None
