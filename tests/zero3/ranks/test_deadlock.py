"""Rings of ranks that wait for each other, found in what they tell; and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from zero3.ranks import deadlock
from zero3.ranks.store import Beat, Process

from . import models
from .pool import Pool
from .training import start

HERE = Process("host", 1, 2)
Waits = tuple[str, int]


def beat(waits: Waits | None, count: int = 1, **reached: int) -> Beat:
    progress = {group: (number, f"{group} {number}") for group, number in reached.items()}
    return Beat(count, HERE, "", (*waits, "something") if waits else None, progress)


def test_two_ranks_in_different_groups_wait_for_each_other() -> None:
    beats = {0: beat(("gather", 5), gather=5, control=2), 1: beat(("control", 3), gather=4, control=3)}
    assert deadlock.find(0, beats) == deadlock.find(1, beats) == beats


def test_a_rank_that_computes_will_come() -> None:
    beats = {0: beat(("gather", 5), gather=5), 1: beat(None, gather=4)}
    assert deadlock.find(0, beats) == {}


def test_ranks_in_the_same_collective_wait_for_nobody() -> None:
    beats = {rank: beat(("gather", 5), gather=5, control=2) for rank in range(3)}
    assert deadlock.find(1, beats) == {}


def test_a_ring_of_three_and_one_that_waits_for_it() -> None:
    ring = {
        0: beat(("a", 2), a=2, b=2, c=1),
        1: beat(("b", 2), a=1, b=2, c=2),
        2: beat(("c", 2), a=2, b=1, c=2),
    }
    beats = ring | {3: beat(("d", 1), a=2, b=2, c=2, d=1)}
    assert set(deadlock.find(0, ring)) == {0, 1, 2}
    assert set(deadlock.find(3, beats)) == {0, 1, 2}  # whoever looks names those that are tied, not itself


def test_a_group_that_a_rank_never_was_in() -> None:
    beats = {0: beat(("gather", 1), gather=1), 1: beat(("control", 1), control=1)}
    assert set(deadlock.find(0, beats)) == {0, 1}


def test_a_rank_blocks_no_group_to_which_it_does_not_belong() -> None:
    """Rank 1 has not reached that gather, and never will; rank 2 has."""
    beats = {
        0: beat(("gather", 1), gather=1),
        1: beat(("control", 1), control=1),
        2: beat(("gather", 1), gather=1),
    }
    assert deadlock.find(0, beats, {"gather": (0, 2)}) == {}
    assert deadlock.find(1, beats, {"gather": (0, 2)}) == {}, "it waits for rank 0, which waits for nobody"
    assert set(deadlock.find(0, beats)) == {0, 1}


def test_one_look_is_not_enough() -> None:
    """The beats may be of different moments, and one of the ranks on its way since."""
    once = {0: beat(("gather", 5), 3, gather=5), 1: beat(("control", 3), 8, gather=4)}
    again = {0: beat(("gather", 5), 4, gather=5), 1: beat(("control", 3), 9, gather=4)}
    assert deadlock.is_deadlock(once, again)
    assert not deadlock.is_deadlock({}, once)
    assert not deadlock.is_deadlock(once, {})
    assert not deadlock.is_deadlock({}, {})
    assert not deadlock.is_deadlock(once, again | {1: once[1]})  # no new beat of rank 1
    assert not deadlock.is_deadlock(once, again | {1: beat(("control", 4), 9, gather=4)})  # it has moved on
    assert not deadlock.is_deadlock(once, again | {1: beat(("control", 3), 9, gather=5)})
    assert not deadlock.is_deadlock(once, {0: again[0]})


def test_ranks_wait_for_each_other_with_two_engines() -> None:
    first, other = beat(("gather", 5), gather=5, control=2), beat(None, gather=4)
    first = replace(first, last_elsewhere={"engine 1 control": (6, "x")})
    other = replace(
        other, waits_elsewhere=("engine 1 control", 7, "x"), last_elsewhere={"engine 1 control": (7, "x")}
    )
    waits = deadlock.find(0, {0: first, 1: other})
    assert list(waits) == [0, 1]
    assert deadlock.is_deadlock(
        waits, {rank: replace(each, count=each.count + 1) for rank, each in waits.items()}
    )
    assert not deadlock.find(0, {0: first, 1: replace(other, last={"gather": (5, "x")})}), (
        "it has come by now"
    )


def crossed(rank: int, nvme: Path) -> None:
    """Two engines, whose steps rank 1 takes in the other order."""
    options = {"threshold": 0, "stage": 2, "distributed": {"timeout": 60, "silence": 20}}
    first, second = (start(nvme, models.Blocks, **options) for _ in range(2))
    for number, shares in enumerate(models.vectors(3, 2)):
        for engine in (second, first) if rank and number == 2 else (first, second):
            engine.backward(engine(*shares[rank]))
            engine.step()


def test_two_engines_in_opposite_order_are_named_soon(doomed: Callable[..., Pool], nvme: Path) -> None:
    for outcome in doomed(2).outcomes(crossed, nvme, limit=60):
        assert outcome.error is not None and outcome.error.kind == "RankOrderError", outcome.report()
        assert "ranks 0-1 wait for each other" in outcome.error.message
        assert "engine" in outcome.error.message
        assert outcome.seconds < 20
