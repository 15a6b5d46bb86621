"""Ranks that are about to do different things learn it before they have begun; what they say alike is agreed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from tiering.errors import RankOrderError
from zero3.ranks.peers import Peers

from .together import SOON, Together, eventually, refusal


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_all_ranks_say_alike_is_agreed(together: Callable[..., Together], world_size: int) -> None:
    them = together(world_size)
    for turn in range(20):
        calls = [them.call(peers.agree, f"gather {turn}") for peers in them.ranks]
        assert [call.result(SOON) for call in calls] == [None] * world_size
    keys = them.ranks[0]._heartbeat.store._store
    assert not keys.check(["question/collective/19"]), "what was agreed stays in the store"


def test_agree_returns_to_nobody_before_the_last_rank_has_asked(together: Callable[..., Together]) -> None:
    them = together(3)
    early = [them.call(them.ranks[rank].agree, "gather 'a'") for rank in (0, 2)]
    eventually(lambda: them.ranks[1]._heartbeat.store.confirmations("collective", 1) == 2)
    assert not any(call.done() for call in early)
    them.ranks[1].agree("gather 'a'")
    assert [call.result(SOON) for call in early] == [None, None]


def test_a_mismatch_is_raised_on_all_ranks_and_names_both_modules(together: Callable[..., Together]) -> None:
    them = together(4)
    whats = ["gather 'layers.4'", "gather 'layers.3'", "gather 'layers.4'", "gather 'layers.4'"]
    calls = [them.call(peers.agree, label) for peers, label in zip(them.ranks, whats, strict=True)]
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
        peers.issue("gather 'a'")
    first, second, third = them.ranks
    second.issue("gather 'b'")
    if not late:
        third.issue("gather 'b'")
    question = them.call(first.agree, "gather 'b'")
    if late:
        eventually(lambda: second._heartbeat.store.confirmations("collective", 2) == 2)
        assert not question.done()
        third.issue("gather 'b'")
    assert question.result(SOON) is None
    first.issue("gather 'c'")  # and the numbers go on from there
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
    for label in ("'b'", "'c'"):
        assert all(label in str(call.exception()) for call in [*waits, asks])


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
    first.issue("gather 'a'", group="gather")
    first.issue("reduce 'a'", group="reduction")
    second.issue("reduce 'a'", group="reduction")
    second.issue("gather 'a'", group="gather")
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
                peers.issue(f"gather {turn}")
            meetings[turn].come()
            pending.append(turn)
            while pending and (turn == turns - 1 or len(pending) > choice.randrange(4)):
                waited = pending.pop(0)
                peers.wait(meetings[waited], f"gather {waited}")
            time.sleep(choice.random() * 0.01)
        return peers._position.last()["collective"][0]

    calls = [them.call(train, peers) for peers in them.ranks]
    assert [call.result(2 * SOON) for call in calls] == [turns] * world_size
