"""A collective that cannot end is a message on every rank: who broke the run, where everybody was, what to do."""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero3.heartbeat
import zero3.peers
from tiering.errors import DistributedError, RankLostError, RankOrderError, TieringError
from zero3.board import Process, spell
from zero3.peers import Peers, Stillness

from .pool import Outcome, Pool

Ranks = Callable[..., Pool]
SOON = 20.0  # seconds that a wait for something certain may take


class Transfer:
    """A collective of a backend that can say when its time is up: gloo's words."""

    def __init__(self) -> None:
        self.error: str | None = None
        self._ended = threading.Event()

    def end(self, error: str | None = None) -> None:
        self.error = error
        self._ended.set()

    def wait(self, timeout: timedelta = timedelta(seconds=SOON)) -> bool:
        if not self._ended.wait(timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True


class Together:
    """Ranks as threads of one process; each call runs on a thread of its own."""

    def __init__(self, world_size: int, **settings: Any) -> None:
        store = dist.HashStore()
        self._threads = ThreadPoolExecutor(2 * world_size)
        settings = {"timeout": SOON, "silence": SOON, "beat": 0.05, "patience": SOON} | settings
        self.ranks = [Peers(store, rank, world_size, **settings) for rank in range(world_size)]
        for peers in self.ranks:
            eventually(lambda peers=peers: len(peers._heartbeat.seen) == world_size - 1)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads.submit(function, *args, **kwargs)

    def wait(self, rank: int, what: str, transfer: Transfer | None = None) -> Future[Any]:
        self.ranks[rank].issued(what)
        return self.call(self.ranks[rank].wait, transfer or Transfer(), what)

    def note(self, rank: int, doing: str) -> None:
        """Note, and wait until it is in the store."""
        self.ranks[rank].note(doing)
        eventually(lambda: self.ranks[rank]._heartbeat.board.read([rank], [])[rank].doing == doing)

    def silence(self, rank: int) -> None:
        """Its process is frozen, as far as the others can tell."""
        self.ranks[rank]._heartbeat.board.write = lambda *_: None

    def close(self) -> None:
        for peers in self.ranks:
            peers.close()
        self._threads.shutdown()


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Together]]:
    monkeypatch.setattr(zero3.peers, "FIRST_SLICE", 0.02)
    monkeypatch.setattr(zero3.peers, "SLICE", 0.05)
    made: list[Together] = []

    def start(world_size: int = 2, **settings: Any) -> Together:
        made.append(Together(world_size, **settings))
        return made[-1]

    yield start
    for them in made:
        them.close()


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.005)


def refusal(call: Future[Any]) -> DistributedError:
    error = call.exception(SOON)
    assert isinstance(error, DistributedError), error
    return error


# ---- order ----


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_all_ranks_say_alike_is_agreed(together: Callable[..., Together], world_size: int) -> None:
    them = together(world_size)
    for turn in range(20):
        calls = [them.call(peers.agree, f"gather {turn}") for peers in them.ranks]
        assert [call.result(SOON) for call in calls] == [None] * world_size
    keys = them.ranks[0]._heartbeat.board._store
    assert not keys.check(["question/collective/19"]), "what was agreed stays in the store"


def test_agree_returns_to_nobody_before_the_last_rank_has_asked(together: Callable[..., Together]) -> None:
    them = together(3)
    early = [them.call(them.ranks[rank].agree, "gather 'a'") for rank in (0, 2)]
    eventually(lambda: them.ranks[1]._heartbeat.board.same("collective", 1) == 2)
    assert not any(call.done() for call in early)
    them.ranks[1].agree("gather 'a'")
    assert [call.result(SOON) for call in early] == [None, None]


def test_a_mismatch_is_raised_on_all_ranks_and_names_both_modules(together: Callable[..., Together]) -> None:
    them = together(4)
    whats = ["gather 'layers.4'", "gather 'layers.3'", "gather 'layers.4'", "gather 'layers.4'"]
    calls = [them.call(peers.agree, what) for peers, what in zip(them.ranks, whats, strict=True)]
    for call in calls:
        error = refusal(call)
        assert type(error) is RankOrderError
        assert "rank 1 (host " in str(error)
        assert "gather 'layers.3'" in str(error)
        assert "gather 'layers.4'" in str(error)
        assert "(collective 1)" in str(error)
        assert "leaf_module" in str(error)


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_only_issued_answers_a_question(together: Callable[..., Together], late: bool) -> None:
    them = together(3)
    for peers in them.ranks:
        peers.issued("gather 'a'")
    first, second, third = them.ranks
    second.issued("gather 'b'")
    if not late:
        third.issued("gather 'b'")
    question = them.call(first.agree, "gather 'b'")
    if late:
        eventually(lambda: second._heartbeat.board.same("collective", 2) == 2)
        assert not question.done()
        third.issued("gather 'b'")
    assert question.result(SOON) is None
    first.issued("gather 'c'")  # and the numbers go on from there
    calls = [them.call(peers.agree, "gather 'c'") for peers in (second, third)]
    assert [call.result(SOON) for call in calls] == [None, None]


def test_a_rank_that_waits_for_its_own_collective_notices_the_question(
    together: Callable[..., Together],
) -> None:
    them = together(3)
    waits = [them.wait(rank, "gather 'b'") for rank in (0, 2)]
    asks = them.call(them.ranks[1].agree, "gather 'c'")
    for call in [*waits, asks]:
        assert type(refusal(call)) is RankOrderError
    assert "rank 1" in str(asks.exception())
    for what in ("'b'", "'c'"):
        assert all(what in str(call.exception()) for call in [*waits, asks])


def test_different_collectives_are_noticed_without_a_question(together: Callable[..., Together]) -> None:
    them = together(2)
    calls = [them.wait(0, "gather 'b'"), them.wait(1, "reduce 'a'")]
    for call in calls:
        error = refusal(call)
        assert type(error) is RankOrderError
        assert "rank 1" in str(error)
        assert "is about to reduce 'a' where rank 0" in str(error)


def test_groups_of_collectives_are_numbered_apart(together: Callable[..., Together]) -> None:
    them = together(2)
    first, second = them.ranks
    first.issued("gather 'a'", group="gather")
    first.issued("reduce 'a'", group="reduction")
    second.issued("reduce 'a'", group="reduction")
    second.issued("gather 'a'", group="gather")
    calls = [them.call(peers.agree, "gather 'b'", group="gather") for peers in them.ranks]
    assert [call.result(SOON) for call in calls] == [None, None]
    other = [them.call(peers.agree, f"reduce {peers.rank}", group="reduction") for peers in them.ranks]
    assert all("(reduction 2)" in str(refusal(call)) for call in other)


class Meeting:
    """A collective of threads: it ends for each when all have come."""

    def __init__(self, world_size: int) -> None:
        self._missing = world_size
        self._all = threading.Event()
        self._lock = threading.Lock()

    def come(self) -> Meeting:
        with self._lock:
            self._missing -= 1
            if not self._missing:
                self._all.set()
        return self

    def wait(self, timeout: timedelta) -> bool:
        if not self._all.wait(timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        return True


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_mixture_of_asking_and_issuing_is_agreed(together: Callable[..., Together], seed: int) -> None:
    """Each rank asks or not as it likes, issues ahead, dawdles: the same words in the same order are no error."""
    world_size, turns = 4, 30 if seed == 0 else 300
    them = together(world_size, beat=0.02)
    meetings = [Meeting(world_size) for _ in range(turns)]

    def train(peers: Peers) -> int:
        choice = random.Random(seed * world_size + peers.rank)
        pending: list[int] = []
        for turn in range(turns):
            if choice.random() < 0.3:
                peers.agree(f"gather {turn}")
            else:
                peers.issued(f"gather {turn}")
            meetings[turn].come()
            pending.append(turn)
            while pending and (turn == turns - 1 or len(pending) > choice.randrange(4)):
                waited = pending.pop(0)
                peers.wait(meetings[waited], f"gather {waited}")
            time.sleep(choice.random() * 0.01)
        return peers._position.last()["collective"][0]

    calls = [them.call(train, peers) for peers in them.ranks]
    assert [call.result(2 * SOON) for call in calls] == [turns] * world_size


# ---- ranks that are lost ----


def test_the_error_of_one_rank_is_quoted_by_all_and_stays(together: Callable[..., Together]) -> None:
    them = together(3)
    waits = [them.wait(rank, "gather 'a'") for rank in (0, 2)]
    them.ranks[1].note("forward of 'layers.1'")
    them.ranks[1].fail(ValueError("no such token"))
    for rank, call in zip((0, 2), waits, strict=True):
        error = refusal(call)
        assert type(error) is RankLostError
        assert re.search(
            r"^\[TIER-RANK-LOST\] rank 1 \(host \S+, pid \d+\) failed in forward of 'layers.1': "
            r"ValueError: no such token", str(error)
        )  # fmt: skip
        assert str(error).endswith(f"Rank {rank} was waiting to gather 'a' (collective 1).")
        them.ranks[rank].fail(error)  # what an engine does with every error: not a new cause
        for again in (
            lambda r=rank: them.ranks[r].agree("b"),
            lambda r=rank: them.ranks[r].wait(Transfer(), "b"),
        ):
            with pytest.raises(RankLostError, match=re.escape(str(error))):
                again()
    with pytest.raises(RankLostError, match="ValueError: no such token"):
        them.ranks[1].agree("anything")
    assert them.ranks[0]._heartbeat.board.failure().rank == 1


def test_the_first_of_two_failures_is_the_one_that_all_name(together: Callable[..., Together]) -> None:
    them = together(3)
    them.ranks[2].fail("out of disk")
    them.ranks[1].fail("lost its peer")
    for peers in them.ranks:
        with pytest.raises(RankLostError, match=r"rank 2 \(.*: out of disk"):
            peers.wait(Transfer(), "gather 'a'")


def test_a_closed_engine_ends_only_waits_that_it_is_missing_from(together: Callable[..., Together]) -> None:
    them = together(2)
    transfer = Transfer()
    first = them.wait(0, "gather 'a'", transfer)
    them.ranks[1].issued("gather 'a'")
    them.ranks[1].close()
    eventually(lambda: them.ranks[0]._heartbeat.seen[1].beat.state == "closed")
    turns = them.ranks[0]._heartbeat.turns
    eventually(lambda: them.ranks[0]._heartbeat.turns > turns + 2)
    transfer.end()
    assert first.result(SOON) is None
    error = refusal(them.wait(0, "gather 'b'"))
    assert type(error) is RankLostError
    assert re.search(
        r"rank 1 \(host .*\) has closed its engine after collective 1, and rank 0 .* collective 2", str(error)
    )
    assert "same number of batches" in str(error)


def test_the_end_of_a_program_is_told(together: Callable[..., Together]) -> None:
    them = together(2)
    call = them.wait(0, "gather 'a'")
    them.ranks[1]._at_exit()
    assert "rank 1 (host" in str(refusal(call))
    assert "has ended its program after collective 0, and rank 0" in str(refusal(call))


def test_ranks_that_fall_silent_together_are_named_together(together: Callable[..., Together]) -> None:
    them = together(4, silence=1.0)
    for rank in (1, 2):
        them.note(rank, "a long kernel")
        them.silence(rank)
    for call in [them.wait(0, "gather 'a'"), them.wait(3, "gather 'a'")]:
        error = refusal(call)
        assert type(error) is RankLostError
        assert "ranks 1-2 (host " in str(error)
        assert "no sign of life for" in str(error)
        assert "last seen in a long kernel" in str(error)
        assert "tiering.distributed.silence" in str(error)


def test_silence_is_no_fault_while_nobody_waits(together: Callable[..., Together]) -> None:
    them = together(2, silence=0.25)
    them.silence(1)
    clock = them.ranks[0]._heartbeat._clock
    eventually(lambda: them.ranks[0]._heartbeat._clock > clock + 1.0)
    assert them.ranks[0]._heartbeat.failure is None


def test_a_broken_collective_waits_for_the_name_of_who_broke_it(together: Callable[..., Together]) -> None:
    """The connection breaks at once, the silence is noticed later: both ranks name the silent one, not each other."""
    them = together(3)
    them.silence(1)
    broken = [Transfer(), Transfer()]
    calls = [them.wait(rank, "gather 'a'", transfer) for rank, transfer in zip((0, 2), broken, strict=True)]
    broken[0].end("Connection closed by peer [127.0.0.1]:1234")
    assert "rank 1 (host" in str(refusal(calls[0]))
    them.ranks[0].fail(calls[0].exception())
    broken[1].end("Connection closed by peer [127.0.0.1]:5678")
    error = refusal(calls[1])
    assert type(error) is RankLostError
    assert "rank 1 (host" in str(error)
    assert "rank 0" not in str(error)


def test_a_broken_collective_of_living_ranks_says_so(together: Callable[..., Together]) -> None:
    them = together(3)
    them.note(2, "step")
    broken, whole = Transfer(), Transfer()
    calls = [them.wait(0, "gather 'a'", broken), them.wait(1, "gather 'a'", whole)]
    broken.end("message truncated")
    for call in calls:
        error = refusal(call)
        assert type(error) is DistributedError
        assert "could not gather 'a' (collective 1): message truncated" in str(error)
        assert "rank 2 in step" in str(error)


# ---- ranks that are slow ----


def test_a_slow_rank_is_waited_for_with_one_warning(
    together: Callable[..., Together], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="zero3.peers")
    them = together(3, patience=0.2)
    transfer = Transfer()
    for rank in (1, 2):
        them.note(rank, "loading of data")
    them.ranks[2].issued("gather 'a'")
    call = them.wait(0, "gather 'a'", transfer)
    eventually(lambda: caplog.records)
    time.sleep(0.3)  # time for a second warning, which must not come
    transfer.end()
    assert call.result(SOON) is None
    warning, info = caplog.records
    assert (warning.levelname, info.levelname) == ("WARNING", "INFO")
    assert "rank 0 has been waiting to gather 'a' (collective 1) for" in warning.getMessage()
    assert "; rank 1 in loading of data" in warning.getMessage()
    assert re.fullmatch(r"rank 1 came after \d\.\d s", info.getMessage())


def test_when_nobody_moves_the_message_says_where_everybody_is(together: Callable[..., Together]) -> None:
    them = together(4, timeout=0.6)
    for rank in (1, 2, 3):
        them.note(rank, "evaluation")
    error = refusal(them.wait(0, "gather 'a'"))
    assert type(error) is DistributedError
    assert "rank 0 waiting to gather 'a' (collective 1); ranks 1-3 in evaluation" in str(error)
    assert "tiering.distributed.timeout" in str(error)
    with pytest.raises(DistributedError, match="no rank has moved"):
        eventually(lambda: them.ranks[3].wait(Done(), "x"))


class Done:
    def wait(self, timeout: timedelta | None = None) -> bool:
        return False


def test_a_rank_that_moves_is_waited_for_beyond_the_timeout(together: Callable[..., Together]) -> None:
    them = together(2, timeout=0.5)
    transfer = Transfer()
    call = them.wait(0, "gather 'a'", transfer)
    began = time.monotonic()
    for batch in itertools.count():
        them.ranks[1].note(f"batch {batch}")
        time.sleep(0.05)
        if time.monotonic() - began > 1.2:
            break
    transfer.end()
    assert call.result(SOON) is None


def test_time_that_a_process_was_suspended_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(zero3.peers.time, "monotonic", lambda: now[0])
    still = Stillness(2.0)
    seconds = []
    for passed, state in [(1, "a"), (1, "a"), (3600, "a"), (1, "a"), (1, "b"), (1, "b")]:
        now[0] += passed
        seconds.append(still.seconds(state))
    assert seconds == [0, 1, 3, 4, 0, 1]


def test_nor_does_it_count_as_silence_of_the_others(
    together: Callable[..., Together], monkeypatch: pytest.MonkeyPatch
) -> None:
    them = together(2, silence=10.0)
    them.silence(1)
    call = them.wait(0, "gather 'a'")
    heartbeat = them.ranks[0]._heartbeat
    eventually(lambda: heartbeat.seen[1].silence > 0)
    real = time.monotonic
    monkeypatch.setattr(zero3.heartbeat, "time", SimpleNamespace(monotonic=lambda: real() + 3600))
    turns = heartbeat.turns
    eventually(lambda: heartbeat.turns > turns + 5)
    assert not call.done()
    them.ranks[1].fail("enough")
    refusal(call)


# ---- a backend whose wait returns at once ----


@pytest.mark.parametrize("how", ["fails", "falls silent", "closes"])
def test_on_lost_is_told_once_without_any_wait(together: Callable[..., Together], how: str) -> None:
    told: list[str] = []
    them = together(3, silence=1.0, on_lost=told.append)
    them.ranks[0].issued("gather 'a'")
    them.ranks[0].wait(Done(), "gather 'a'", blocking=False)
    them.ranks[2].issued("gather 'a'")
    if how == "fails":
        them.ranks[1].fail("out of memory")
    elif how == "closes":
        them.ranks[1].close()
    else:
        them.silence(1)
    expected = 3 if how == "falls silent" else 2  # who is believed dead is told, too; who did it is not
    eventually(lambda: len(told) >= expected)
    with pytest.raises(RankLostError, match=r"rank 1 \(host"):
        them.ranks[0].wait(Done(), "gather 'a'", blocking=False)
    them.close()
    assert len(told) == expected
    assert all("rank 1 (host" in message for message in told)


def test_on_lost_is_not_told_of_ranks_that_nobody_looks_at(together: Callable[..., Together]) -> None:
    """A rank watches its successor; what it knows of the others is old, and that is not their silence."""
    told: list[str] = []
    them = together(4, silence=0.5, on_lost=told.append)
    clocks = [peers._heartbeat._clock for peers in them.ranks]
    for peers, clock in zip(them.ranks, clocks, strict=True):
        eventually(lambda peers=peers, clock=clock: peers._heartbeat._clock > clock + 1.0)
    assert told == []


# ---- the store ----


def lose_the_store_of(peers: Peers) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    peers._heartbeat.board.write = refuse
    eventually(lambda: peers._heartbeat.store_lost)


def test_without_a_store_a_rank_goes_on_as_long_as_its_collectives_do(
    together: Callable[..., Together],
) -> None:
    them = together(2, silence=0.5)
    transfer = Transfer()
    lose_the_store_of(them.ranks[0])
    call = them.wait(0, "gather 'a'", transfer)
    turns, clock = them.ranks[0]._heartbeat.turns, them.ranks[0]._heartbeat._clock
    eventually(lambda: them.ranks[0]._heartbeat._clock > clock + 0.3)
    transfer.end()
    assert call.result(SOON) is None
    assert them.ranks[0]._heartbeat.turns - turns < 50, "the heartbeat races"
    error = refusal(them.wait(0, "gather 'b'"))
    assert type(error) is DistributedError
    assert "cannot reach the rendezvous store (served by rank 0): Connection reset by peer" in str(error)
    assert "rank 0 waiting to gather 'b' (collective 2); rank 1 in code outside the engine" in str(error)


def test_a_broken_collective_while_the_store_hangs(together: Callable[..., Together]) -> None:
    them = together(2, silence=1.0)
    hanging, stuck = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        stuck.set()
        hanging.wait(SOON)

    them.ranks[0]._heartbeat.board.write = hang
    assert stuck.wait(SOON)
    transfer = Transfer()
    transfer.end("Connection closed by peer [127.0.0.1]:1234")
    error = refusal(them.wait(0, "gather 'a'", transfer))
    hanging.set()
    assert type(error) is DistributedError
    assert "it does not answer; and Connection closed by peer [127.0.0.1]:1234" in str(error)


# ---- processes ----


def peers_of(rank: int, world_size: int, name: str, **settings: Any) -> Peers:
    zero3.peers.FIRST_SLICE, zero3.peers.SLICE = 0.05, 0.1
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    peers = Peers(store, rank, world_size, **{"timeout": SOON, "silence": SOON, "beat": 0.1} | settings)
    peers.agree("start")
    eventually(lambda: len(peers._heartbeat.seen) == world_size - 1)
    return peers


def reduce(peers: Peers, what: str) -> float:
    value = torch.tensor([float(peers.rank)])
    work = dist.all_reduce(value, async_op=True)
    peers.issued(what)
    peers.wait(work, what)
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
        zero3.peers.sever(dist.group.WORLD)  # and the connections of this rank break, as they do when it ends
        dist.destroy_process_group()
        raise


def messages(outcomes: Sequence[Outcome], ranks: Sequence[int], kind: type[TieringError]) -> list[str]:
    said = []
    for rank in ranks:
        error = outcomes[rank].error
        assert error is not None and error.kind == kind.__name__, outcomes[rank].report()
        said.append(error.message)
    return said


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_killed_rank_is_named_by_all_others(doomed: Ranks, world_size: int) -> None:
    pool = doomed(world_size)
    pid = pool.pids[1]
    outcomes = pool.outcomes(lose, world_size, "SIGKILL", limit=60)
    others = [rank for rank in range(world_size) if rank != 1]
    for rank, message in zip(others, messages(outcomes, others, RankLostError), strict=True):
        assert re.search(
            rf"rank 1 \(host \S+, pid {pid}\) died without a word, last seen in backward of 'layers.2'",
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
    peers.issued("gather 'a'")
    if rank == 1:
        time.sleep(0.3)
        peers.close()
        os._exit(0)
    transfer = Transfer()
    threading.Timer(0.7, transfer.end).start()
    peers.wait(transfer, "gather 'a'")  # rank 1 has done its part: its end is none of this wait's business
    eventually(lambda: peers._heartbeat.seen[1].beat.process.is_dead())
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
    zero3.peers.FIRST_SLICE, zero3.peers.SLICE = 0.05, 0.1
    meeting = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 2:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("port", str(served.port))
        meeting.wait(["ready0", "ready1"], timedelta(seconds=SOON))
        os.kill(os.getpid(), getattr(signal, how))
    store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False)
    peers = Peers(store, rank, 2, timeout=SOON, silence=0.8, beat=0.1)
    peers.agree("start")
    peers.note("forward")
    meeting.set(f"ready{rank}", "")
    if rank == 0:
        peers.issued("gather 'a'")
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


def stay_together(rank: int, told: str) -> int:
    peers = peers_of(rank, 2, "suspended", silence=0.7, timeout=1.0)
    peers.note("suspended")
    Path(told).touch()
    for turn in range(30):
        peers.agree(f"turn {turn}")
        time.sleep(0.05)
    peers.close()
    return rank


def test_a_job_that_is_suspended_and_resumed_goes_on(doomed: Ranks, tmp_path: Path) -> None:
    pool = doomed(2)
    told = tmp_path / "told"

    def suspend() -> None:
        eventually(told.exists)
        for pid in pool.pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)  # beyond both limits
        for pid in pool.pids:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.2)

    thread = threading.Thread(target=suspend)
    thread.start()
    outcomes = pool.outcomes(stay_together, str(told), limit=60)
    thread.join()
    assert [outcome.value for outcome in outcomes] == [0, 1], [outcome.report() for outcome in outcomes]


ENDS = """
import os, signal, sys, threading
import torch.distributed as dist
from zero3.peers import Peers

read, write = os.pipe()
rank = 1 if os.fork() == 0 else 0
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(write, b"%d" % store.port)
else:
    store = dist.TCPStore("127.0.0.1", int(os.read(read, 9)), is_master=False)
peers = Peers(store, rank, 2, timeout=20, silence=20, beat=0.1)
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


# ---- small things ----


def test_a_process_of_the_same_number_is_another_one() -> None:
    this = Process.this()
    assert this.state() in ("R", "S")
    assert not this.is_dead()
    later = Process(this.host, this.pid, this.started + 1)
    assert later.state() is None
    assert later.is_dead()
    child = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    process = Process(this.host, child.pid, started)
    eventually(lambda: process.state() == "Z")
    assert process.is_dead()
    child.wait()


def test_ranks_in_words() -> None:
    assert spell([3]) == "rank 3"
    assert spell([5, 0, 2, 1]) == "ranks 0-2, 5"
    assert spell([1, 3]) == "ranks 1, 3"
