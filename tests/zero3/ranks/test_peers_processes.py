"""Processes that are killed, frozen, suspended or end by themselves: what the others are told of them, and what not."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero3.ranks.peers
import zero3.ranks.process_groups
import zero3.ranks.store
from tiering.errors import DistributedError, RankLostError, RankOrderError, TieringError
from zero3.ranks.heartbeat import Limits
from zero3.ranks.peers import Peers

from .pool import Outcome, Pool
from .together import SOON, Transfer, eventually

Ranks = Callable[..., Pool]


def peers_of(rank: int, world_size: int, name: str, **settings: Any) -> Peers:
    zero3.ranks.peers.FIRST_SLICE, zero3.ranks.peers.SLICE = 0.05, 0.1
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    peers = Peers(
        store, rank, world_size, Limits(**{"timeout": SOON, "silence": SOON, "beat": 0.1} | settings)
    )
    peers.agree("start")
    eventually(lambda: len(peers._heartbeat.observed) == world_size - 1)
    return peers


def reduce(peers: Peers, label: str) -> float:
    value = torch.tensor([float(peers.rank)])
    work = dist.all_reduce(value, async_op=True)
    peers.issue(label)
    peers.wait(work, label)
    return float(value)


def lose(rank: int, world_size: int, how: str, **settings: Any) -> tuple[int, float]:
    peers = peers_of(rank, world_size, "lose", **settings)
    total = reduce(peers, "reduce 1")
    if rank == 1:
        peers.note("backward of 'layers.2'")
        time.sleep(0.3)  # a beat passes
        if how in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), getattr(signal, how))
        try:
            raise ValueError("of rank 1")
        except ValueError as error:
            peers.fail(error)
            raise
    try:
        return os.getpid(), total + reduce(peers, "reduce 2")
    except DistributedError as error:
        peers.fail(error)
        # And the connections of this rank break, as they do when it ends.
        zero3.ranks.process_groups.sever([dist.group.WORLD])
        dist.destroy_process_group()
        raise


def messages(outcomes: Sequence[Outcome], ranks: Sequence[int], kind: type[TieringError]) -> list[str]:
    texts = []
    for rank in ranks:
        error = outcomes[rank].error
        assert error is not None and error.kind == kind.__name__, outcomes[rank].report()
        texts.append(error.message)
    return texts


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_killed_rank_is_named_by_all_others(doomed: Ranks, world_size: int) -> None:
    pool = doomed(world_size)
    pid = pool.pids[1]
    outcomes = pool.outcomes(lose, world_size, "SIGKILL", limit=60)
    others = [rank for rank in range(world_size) if rank != 1]
    for rank, message in zip(others, messages(outcomes, others, RankLostError), strict=True):
        assert re.search(
            rf"rank 1 \(host \S+, pid {pid}\) died without an error message, last seen in backward of 'layers.2'",
            message,
        )
        assert message.endswith(f"Rank {rank} was waiting to reduce 2 (collective 3).")
        assert outcomes[rank].seconds < SOON, "it took the silence to notice"


def test_a_frozen_rank_is_named_after_its_silence(doomed: Ranks) -> None:
    outcomes = doomed(3).outcomes(lose, 3, "SIGSTOP", silence=1.0, frozen=[1], limit=60)
    for message in messages(outcomes, [0, 2], RankLostError):
        assert "rank 1 (host" in message
        assert "gave no sign of life for" in message
        assert "(its process still exists, in state T)" in message


def keep_the_interpreter(seconds: float, *, computing: bool) -> None:
    """No other thread of Python's runs meanwhile."""
    if not computing:
        ctypes.PyDLL(None).usleep(int(1e6 * seconds))
        return
    count, took = 10**6, 0.0
    while took < seconds:
        count = max(2 * count, int(count * seconds / took * 1.1) if took else 0)
        began = time.monotonic()
        sum(range(count))  # one call of C's
        took = time.monotonic() - began


def keep(rank: int, world_size: int, name: str, *, computing: bool, **settings: Any) -> float:
    peers = peers_of(rank, world_size, name, **settings)
    peers.note("a long call")
    total = reduce(peers, "reduce 1")
    if rank == 1:
        time.sleep(0.3)  # a beat passes
        keep_the_interpreter(2.0, computing=computing)
    return total + reduce(peers, "reduce 2")


@pytest.mark.slow
def test_a_rank_that_computes_without_releasing_the_interpreter_lives(ranks: Ranks) -> None:
    assert ranks(2).run(keep, 2, "alive", computing=True, silence=1.0) == [2.0] * 2


@pytest.mark.slow
def test_only_its_own_host_sees_a_rank_compute_and_tells_the_others(ranks: Ranks) -> None:
    """Rank 0 is on another host; rank 2, beside rank 1, vouches for it."""
    assert ranks(3).run(keep_of_two_hosts, silence=1.0) == [6.0] * 3


def keep_of_two_hosts(rank: int, **settings: Any) -> float:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(zero3.ranks.store.socket, "gethostname", lambda: "another")
        return keep(rank, 3, "two hosts", computing=True, **settings)


@pytest.mark.parametrize(("computing", "timeout"), [(False, 20.0), (True, 1.5)])
def test_a_rank_that_neither_speaks_nor_computes_or_never_ends_is_lost(
    doomed: Ranks, computing: bool, timeout: float
) -> None:
    outcomes = doomed(2).outcomes(
        keep, 2, "lost", computing=computing, silence=1.0, timeout=timeout, limit=60
    )
    error = outcomes[0].error
    assert error is not None and error.kind in ("RankLostError", "DistributedError"), outcomes[0].report()
    assert "a long call" in error.message
    assert outcomes[0].seconds < SOON


def test_the_exception_of_a_rank_is_quoted_by_the_others(doomed: Ranks) -> None:
    outcomes = doomed(2).outcomes(lose, 2, "error", limit=60)
    messages_of_others = messages(outcomes, [0], RankLostError)
    assert "rank 1 (host" in messages_of_others[0]
    assert (
        "failed in backward of 'layers.2', after collective 2: ValueError: of rank 1" in messages_of_others[0]
    )
    assert outcomes[1].error.kind == "ValueError"


def deviate(rank: int) -> float:
    peers = peers_of(rank, 2, "deviate")
    values = [torch.ones(4), torch.full((4,), 2.0)]
    if rank == 0:  # goes by what it has recorded
        total = reduce(peers, "gather 'layers.1'")
        return total + reduce(peers, "gather 'layers.2'")
    peers.agree("gather 'layers.1'")
    work = dist.all_reduce(values[0][:1], async_op=True)
    peers.wait(work, "gather 'layers.1'")
    peers.agree("gather 'layers.3'")
    raise AssertionError("nobody may get here")


def test_a_deviation_from_the_recorded_order_is_a_message_on_both_sides(doomed: Ranks) -> None:
    outcomes = doomed(2).outcomes(deviate, limit=60)
    for message in messages(outcomes, [0, 1], RankOrderError):
        assert "is about to gather 'layers.3' where rank 0" in message
        assert "is about to gather 'layers.2' (collective 3)" in message


def close_and_leave(rank: int) -> str:
    peers = peers_of(rank, 2, "leave")
    peers.issue("gather 'a'")
    if rank == 1:
        time.sleep(0.3)
        peers.close()
        os._exit(0)
    transfer = Transfer()
    threading.Timer(0.7, transfer.end).start()
    peers.wait(transfer, "gather 'a'")  # rank 1 has done its part: its end is none of this wait's business
    eventually(lambda: peers._heartbeat.observed[1].beat.process.is_dead())
    try:
        reduce(peers, "gather 'b'")
    except RankLostError as error:
        return str(error)
    return ""


def test_a_rank_that_closed_and_ended_has_not_died(doomed: Ranks) -> None:
    outcomes = doomed(2).outcomes(close_and_leave, limit=60)
    assert "has closed its engine after collective 2" in (outcomes[0].value or outcomes[0].report())


def lose_the_store(rank: int, how: str) -> int:
    """Rank 2 serves the store of the two others; that is all it does."""
    zero3.ranks.peers.FIRST_SLICE, zero3.ranks.peers.SLICE = 0.05, 0.1
    meeting = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 2:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("port", str(served.port))
        meeting.wait(["ready0", "ready1"], timedelta(seconds=SOON))
        os.kill(os.getpid(), getattr(signal, how))
    store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False)
    peers = Peers(store, rank, 2, Limits(timeout=SOON, silence=0.8, beat=0.1))
    peers.agree("start")
    peers.note("forward")
    meeting.set(f"ready{rank}", "")
    if rank == 0:
        peers.issue("gather 'a'")
        peers.wait(Transfer(), "gather 'a'")
    peers.agree("gather 'a'")
    return rank


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_store_that_is_gone_or_frozen_is_named(doomed: Ranks, how: str) -> None:
    frozen = [2] if how == "SIGSTOP" else []
    outcomes = doomed(3).outcomes(lose_the_store, how, frozen=frozen, limit=60)
    for message in messages(outcomes, [0, 1], DistributedError):
        assert re.search(
            r"cannot reach the rendezvous store at 127.0.0.1:\d+ \(served by torchrun\)", message
        )
        assert "Last known: " in message


def stay_together(rank: int, signal_file: str) -> int:
    peers = peers_of(rank, 2, "suspended", silence=0.7, timeout=1.0)
    peers.note("suspended")
    Path(signal_file).touch()
    for turn in range(30):
        peers.agree(f"turn {turn}")
        time.sleep(0.05)
    peers.close()
    return rank


@pytest.mark.slow
def test_a_job_that_is_suspended_and_resumed_goes_on(doomed: Ranks, tmp_path: Path) -> None:
    pool = doomed(2)
    signal_file = tmp_path / "told"

    def suspend() -> None:
        eventually(signal_file.exists)
        for pid in pool.pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)  # beyond both limits
        for pid in pool.pids:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.2)

    thread = threading.Thread(target=suspend)
    thread.start()
    outcomes = pool.outcomes(stay_together, str(signal_file), limit=60)
    thread.join()
    assert [outcome.value for outcome in outcomes] == [0, 1], [outcome.report() for outcome in outcomes]


ENDS = """
import os, signal, sys, threading
import torch.distributed as dist
from zero3.ranks.heartbeat import Limits
from zero3.ranks.peers import Peers

read, write = os.pipe()
rank = 1 if os.fork() == 0 else 0
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(write, b"%d" % store.port)
else:
    store = dist.TCPStore("127.0.0.1", int(os.read(read, 9)), is_master=False)
peers = Peers(store, rank, 2, Limits(timeout=20, silence=20, beat=0.1))
peers.agree("start")
peers.note("own code")
if rank == 1:
    held, forked = threading.Event(), threading.Event()

    def hold():
        with peers._heartbeat.changed:
            held.set()
            forked.wait()

    threading.Thread(target=hold).start()  # a fork may come while the heartbeat holds its lock
    held.wait()
    worker = os.fork()
    if not worker:
        signal.alarm(20)  # were it to wait for that lock
        sys.exit()
    forked.set()
    assert os.waitpid(worker, 0)[1] == 0
    peers.agree("after the worker has ended")
    raise ValueError("nobody catches this")
try:
    peers.agree("after the worker has ended")
    peers.agree("gather 'a'")
except Exception as error:
    print(type(error).__name__, error)
os.waitpid(-1, 0)
"""


def test_an_uncaught_exception_is_quoted_and_the_end_of_a_forked_worker_is_not_that_of_the_rank() -> None:
    run = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, check=False
    )
    assert re.match(
        r"RankLostError \[TIER-RANK-LOST\] rank 1 \(host \S+, pid \d+\) failed in own code, after collective 2: "
        r"ValueError: nobody catches this", run.stdout
    ), run.stderr  # fmt: skip
