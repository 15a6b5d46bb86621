"""A collective that cannot end is a message on every rank: who broke the run, where everybody was, what to do."""

from __future__ import annotations

import itertools
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import zero3.ranks.heartbeat
import zero3.ranks.peers
import zero3.ranks.process_groups
from tiering.errors import DistributedError, RankLostError
from zero3.ranks.peers import Peers, Stillness
from zero3.ranks.process_groups import sever
from zero3.ranks.store import Process, spell

from .together import SOON, Device, Done, Together, Transfer, eventually, refusal

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
    assert all(them.ranks[rank]._heartbeat.failure.rank == 1 for rank in (0, 2))


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
    them.ranks[1].issue("gather 'a'")
    them.ranks[1].close()
    eventually(lambda: them.ranks[0]._heartbeat.observed[1].beat.state == "closed")
    turns = them.ranks[0]._heartbeat.turns
    eventually(lambda: them.ranks[0]._heartbeat.turns > turns + 2)
    transfer.end()
    assert first.result(SOON) is None
    error = refusal(them.wait(0, "gather 'b'"))
    assert type(error) is RankLostError
    assert re.search(
        r"rank 1 \(host .*\) has closed its engine after collective 1, and rank 0 .* \(collective 2\)",
        str(error),
    )
    assert "same number of batches" in str(error)


def test_a_group_needs_its_members_only(together: Callable[..., Together]) -> None:
    """Ranks 0 and 2 agree without rank 1, whose end is no end of their waits. A failure of it is."""
    them = together(3, members={"gather": (0, 2)}, patience=0.2)
    for label in ("gather 'a'", "gather 'b'"):
        calls = [them.call(them.ranks[rank].agree, label, group="gather") for rank in (0, 2)]
        assert [call.result(SOON) for call in calls] == [None, None]
    transfer = Transfer()
    them.ranks[0].issue("gather 'c'", group="gather")
    wait = them.call(them.ranks[0].wait, transfer, "gather 'c'", group="gather")
    them.ranks[1].close()
    eventually(lambda: them.ranks[0]._heartbeat.observed[1].beat.state == "closed")
    turns = them.ranks[0]._heartbeat.turns
    eventually(lambda: them.ranks[0]._heartbeat.turns > turns + 2)
    assert not wait.done()
    them.ranks[2].fail("out of disk")
    assert "rank 2 (host" in str(refusal(wait))


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
    caplog.set_level(logging.INFO, logger="zero3.ranks.peers")
    them = together(3, patience=0.2)
    transfer = Transfer()
    for rank in (1, 2):
        them.note(rank, "loading of data")
    them.ranks[2].issue("gather 'a'")
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
    with pytest.raises(DistributedError, match="no rank has made progress"):
        eventually(lambda: them.ranks[3].wait(Done(), "x"))


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
    monkeypatch.setattr(zero3.ranks.peers.time, "monotonic", lambda: now[0])
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
    eventually(lambda: heartbeat.observed[1].silence > 0)
    real = time.monotonic
    monkeypatch.setattr(zero3.ranks.heartbeat, "time", SimpleNamespace(monotonic=lambda: real() + 3600))
    turns = heartbeat.turns
    eventually(lambda: heartbeat.turns > turns + 5)
    assert not call.done()
    them.ranks[1].fail("enough")
    refusal(call)


# ---- a backend whose wait returns at once ----


@pytest.mark.parametrize("how", ["fails", "falls silent", "closes"])
def test_a_device_is_aborted_once_without_any_wait(together: Callable[..., Together], how: str) -> None:
    device = Device()
    reasons = device.reasons
    them = together(3, silence=1.0, device=device)
    them.ranks[0].issue("gather 'a'")
    them.ranks[2].issue("gather 'a'")
    if how == "fails":
        them.ranks[1].fail("out of memory")
    elif how == "closes":
        them.ranks[1].close()
    else:
        them.silence(1)
    expected = 3 if how == "falls silent" else 2  # who is believed dead is told, too; who did it is not
    eventually(lambda: len(reasons) >= expected)
    with pytest.raises(RankLostError, match=r"rank 1 \(host"):
        them.ranks[0].check()
    them.close()
    assert len(reasons) == expected
    assert all("rank 1 (host" in message for message in reasons)


def test_a_device_is_not_aborted_for_ranks_that_are_not_watched(together: Callable[..., Together]) -> None:
    """A rank watches its successor; what it knows of the others is old, and that is not their silence."""
    device = Device()
    reasons = device.reasons
    them = together(4, silence=0.5, device=device)
    clocks = [peers._heartbeat._clock for peers in them.ranks]
    for peers, clock in zip(them.ranks, clocks, strict=True):
        eventually(lambda peers=peers, clock=clock: peers._heartbeat._clock > clock + 1.0)
    assert reasons == []


def test_a_device_that_waits_while_nobody_moves_is_a_wait_as_any_other(
    together: Callable[..., Together],
) -> None:
    """All ranks are alive and in step, and the network between them is not: no CPU waits for it."""
    device = Device()
    reasons, queued = device.reasons, device.queued
    them = together(2, timeout=0.3, device=device)
    clock = them.ranks[0]._heartbeat._clock
    eventually(lambda: them.ranks[0]._heartbeat._clock > clock + 0.7)
    assert reasons == [], "a rank that waits for nothing has no reason to move"
    for peers in them.ranks:
        peers.issue("gather 'a'")
    queued.append("gather 'a'")
    eventually(lambda: len(reasons) == 2)
    for message in reasons:
        assert re.search(
            r"no rank has made progress for 0 s: ranks 0-1 in .*, after collective 1; the device of rank \d is"
            r" waiting to"
            r" gather 'a'\. To see why", message
        )  # fmt: skip
    with pytest.raises(DistributedError, match="the device of rank"):
        them.ranks[1].check()


def test_ranks_that_part_see_each_other_off(together: Callable[..., Together]) -> None:
    them = together(2)
    calls = [them.call(peers.meet, "close", SOON) for peers in them.ranks]
    assert [call.result(SOON) for call in calls] == [True, True]
    assert not any(peers.broken for peers in them.ranks)
    assert them.ranks[0].meet("close again", 0.2) is False, "nobody else comes"
    them.ranks[1].fail("no such file")
    assert them.ranks[0].meet("close at last", SOON) is False, "nobody will"
    assert all(peers.broken for peers in them.ranks)


class Communicator:
    """Of NCCL, whose abort waits for the device: for what all of them do there."""

    def __init__(self, device: threading.Barrier) -> None:
        self.aborted = False
        self._device = device

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self._device.wait(SOON)
        self.aborted = True


def test_communicators_are_aborted_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One after the other, the first would wait for what the second still does. One that never ends keeps nobody."""
    device = threading.Barrier(2)
    both = [Communicator(device) for _ in range(2)]
    sever(both)
    assert all(device.aborted for device in both)
    monkeypatch.setattr(zero3.ranks.process_groups, "SEVERING_TIMEOUT", 0.1)
    alone = Communicator(device)
    sever([alone])
    assert not alone.aborted
    assert "connections with other ranks could not be closed" in caplog.text
    device.abort()  # and the thread that waits for it


# ---- the store ----


def lose_the_store_of(peers: Peers) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    peers._heartbeat.store.write_beat = refuse
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

    them.ranks[0]._heartbeat.store.write_beat = hang
    assert stuck.wait(SOON)
    transfer = Transfer()
    transfer.end("Connection closed by peer [127.0.0.1]:1234")
    error = refusal(them.wait(0, "gather 'a'", transfer))
    hanging.set()
    assert type(error) is DistributedError
    assert "no answer; and Connection closed by peer [127.0.0.1]:1234" in str(error)


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
    assert not process.is_visible(), "it may be on another machine"
    assert replace(process, pids=this.pids).is_visible(), "it has ended here"
    child.wait()


def test_ranks_in_words() -> None:
    assert spell([3]) == "rank 3"
    assert spell([5, 0, 2, 1]) == "ranks 0-2, 5"
    assert spell([1, 3]) == "ranks 1, 3"
