"""A rank that dies, freezes, raises, leaves or goes astray: the others end with an error that names it, and soon.

Ten minutes is what torch waits by itself. Here everything is over in seconds, on every rank that can still speak; the
engine can then be closed, and leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zero3.ranks.peers
from tests.zero3.conftest import SmallModel

from . import models
from .pool import Outcome, Pool, all_ended
from .training import start, tokens

Ranks = Callable[..., Pool]
SOON = 15.0  # seconds; the shortest of torch's own limits is minutes
PLACES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
}
MOMENTS = ["forward", "backward", "between", "step", "after the step"]
WATCHFUL = {"distributed": {"timeout": 60, "silence": 3}}


class OwnError(Exception):
    """What a user's code raises."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise OwnError("the tokenizer is gone")


def leave() -> None:
    os._exit(3)  # as a process that a batch system ends, without a word


def sleep() -> None:
    time.sleep(600)


def meet(
    rank: int,
    nvme: Path,
    end: Callable[[], None],
    moment: str,
    victims: tuple[int, ...] = (1,),
    **options: Any,
) -> list[str]:
    """Train until ``end`` happens to the ``victims`` in the second step. What was left after close, if that comes."""
    engine = start(nvme, **(WATCHFUL | options))
    moments: list[int] = []

    def perhaps(now: str) -> None:
        if rank in victims and now == moment and len(moments) == 1:
            end()

    apply = engine._updates._apply
    engine._updates._apply = lambda *arguments: (perhaps("step"), apply(*arguments))[1]
    engine.module.blocks[1].register_forward_hook(lambda *_: perhaps("forward"))
    engine.module.blocks[1].register_full_backward_hook(lambda *_: perhaps("backward"))
    try:
        for shares in tokens(6, int(os.environ["WORLD_SIZE"])):
            engine.backward(engine(*shares[rank]))
            perhaps("between")
            engine.step()
            perhaps("after the step")
            moments.append(engine.global_steps)
    except BaseException as error:
        engine.close()
        error.add_note(f"left: {left_behind(nvme)}")
        raise
    engine.close()
    return left_behind(nvme)


def left_behind(nvme: Path) -> list[str]:
    """Swap files that this process still holds open, by what their links say."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(link.readlink()))
        except FileNotFoundError:  # the one that lists
            continue
    return [name for name in targets if name.startswith(str(nvme))]


def assert_named(outcome: Outcome, kind: str, *words: str, soon: float = SOON) -> None:
    assert outcome.error is not None, outcome.report()
    assert outcome.error.kind == kind, outcome.report()
    for word in words:
        assert word in outcome.error.message, outcome.report()
    assert outcome.seconds < soon, outcome.report()
    assert "left: []" in outcome.error.trace, outcome.report()


@pytest.mark.one_of(2)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("place", ["stage 1", "stage 3, nvme"])
def test_a_rank_that_is_killed(doomed: Ranks, nvme: Path, place: str, moment: str) -> None:
    pool = doomed(2)
    pids = pool.pids
    other, victim = pool.outcomes(meet, nvme, die, moment, **PLACES[place])
    assert victim.exit_code == -signal.SIGKILL
    assert_named(other, "RankLostError", "rank 1", str(pids[1]))
    assert list(nvme.iterdir()) == []
    pool.close()
    assert all_ended(pids)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("how", [die, leave, fail])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_is_lost_at_any_moment_in_any_stage(
    doomed: Ranks, nvme: Path, place: str, how: Callable[[], None], moment: str
) -> None:
    other, victim = doomed(2).outcomes(meet, nvme, how, moment, **PLACES[place])
    assert not victim.fine
    assert_named(other, "RankLostError", "rank 1")


@pytest.mark.parametrize("victim", [0, 2])
def test_three_ranks_name_the_one_that_was_killed_first(doomed: Ranks, nvme: Path, victim: int) -> None:
    """Not each other, who end because of it."""
    outcomes = doomed(4).outcomes(meet, nvme, die, "backward", (victim,))
    for outcome in outcomes:
        if outcome.rank != victim:
            assert_named(outcome, "RankLostError", f"rank {victim}")


@pytest.mark.parametrize("moment", ["forward", "step"])
def test_a_rank_that_is_frozen(doomed: Ranks, nvme: Path, moment: str) -> None:
    """Nothing breaks its connections: only its silence tells."""
    other, _ = doomed(2).outcomes(meet, nvme, freeze, moment, frozen=[1])
    assert_named(other, "RankLostError", "rank 1")


@pytest.mark.parametrize("moment", ["between", "after the step"])
@pytest.mark.parametrize("place", ["stage 1", "stage 3, nvme"])
def test_a_rank_whose_own_code_raises(doomed: Ranks, nvme: Path, place: str, moment: str) -> None:
    other, victim = doomed(2).outcomes(meet, nvme, fail, moment, **PLACES[place])
    assert victim.error is not None and victim.error.kind == "OwnError"
    assert "left: []" in victim.error.trace
    assert_named(other, "RankLostError", "rank 1")


@pytest.mark.parametrize("moment", ["forward", "backward", "step"])
def test_an_error_inside_the_engine_is_quoted_to_the_others(doomed: Ranks, nvme: Path, moment: str) -> None:
    other, _ = doomed(2).outcomes(meet, nvme, fail, moment)
    assert_named(other, "RankLostError", "rank 1", "OwnError: the tokenizer is gone")


def close_early(rank: int, nvme: Path, steps: list[int]) -> int:
    with start(nvme, **WATCHFUL) as engine:
        for shares in tokens(steps[rank], 2):
            engine.backward(engine(*shares[rank]))
            engine.step()
    try:
        return engine.global_steps
    finally:
        assert left_behind(nvme) == []


def test_a_rank_that_has_fewer_batches_and_closes(doomed: Ranks, nvme: Path) -> None:
    """The commonest way to an end without an end: a loader that is not the same length everywhere."""
    other, victim = doomed(2).outcomes(close_early, nvme, [5, 3])
    assert victim.value == 3
    assert other.error is not None and other.error.kind == "RankLostError", other.report()
    assert "rank 1" in other.error.message and "closed" in other.error.message
    assert other.seconds < SOON


@pytest.mark.slow
def test_a_rank_that_never_comes(doomed: Ranks, nvme: Path) -> None:
    """It is alive, and nobody can know that it will not: ``timeout`` says when to stop."""
    impatient = {"distributed": {"timeout": 4, "silence": 3}}
    outcomes = doomed(2).outcomes(meet, nvme, sleep, "between", limit=30, frozen=[1], **impatient)
    assert_named(outcomes[0], "DistributedError", "rank 1")


def stray(rank: int, nvme: Path, skipped: str, **options: Any) -> None:
    """Rank 1 leaves out a call of the second step."""
    with start(nvme, distributed={"timeout": 6, "silence": 3}, **options) as engine:
        for number, shares in enumerate(tokens(4, 2)):
            calls = {"backward", "step"} - ({skipped} if rank == 1 and number == 1 else set())
            loss = engine(*shares[rank])
            if "backward" in calls:
                engine.backward(loss)
            if "step" in calls:
                engine.step()


@pytest.mark.parametrize("skipped", ["backward", "step"])
@pytest.mark.parametrize("place", ["stage 1", "stage 3"])
def test_a_rank_that_leaves_out_a_call(doomed: Ranks, nvme: Path, place: str, skipped: str) -> None:
    for outcome in doomed(2).outcomes(stray, nvme, skipped, **PLACES[place]):
        assert outcome.error is not None, outcome.report()
        assert {"DistributedError", "EngineStateError"} & {*outcome.error.kinds}, outcome.report()
        assert outcome.seconds < SOON, outcome.report()


def build_apart(rank: int, nvme: Path, apart: str, differing_rank: int) -> None:
    """Rank ``which`` has another model, or another configuration, than the others."""
    width, options = 48, {}
    if rank == differing_rank:
        width, options = {
            "a shape": (32, {}),
            "the stage": (48, {"stage": 2}),
            "accumulation": (48, {"accumulation": 4}),
            "the learning rate": (48, {"optimizer": {"lr": 0.5}}),
            "precision": (48, {"precision": "bf16"}),
            "a threshold": (48, {"threshold": 0}),
        }[apart]
    start(nvme, lambda: SmallModel(width), **(WATCHFUL | options)).close()


APART = {
    "a shape": "embedding.weight",
    "the stage": "stage",
    "accumulation": "train_batch_size",
    "the learning rate": "lr",
    "precision": "precision",
    "a threshold": "threshold",
}


@pytest.mark.parametrize("differing_rank", [0, 1])
@pytest.mark.parametrize("apart", APART)
def test_ranks_that_start_from_different_things_are_told_the_first_difference(
    doomed: Ranks, nvme: Path, apart: str, differing_rank: int
) -> None:
    for outcome in doomed(2).outcomes(build_apart, nvme, apart, differing_rank):
        assert outcome.error is not None and "TieringError" in outcome.error.kinds, outcome.report()
        assert APART[apart] in outcome.error.message, outcome.report()
        assert "rank" in outcome.error.message and outcome.seconds < SOON


def refuse(rank: int, nvme: Path) -> None:
    """What cannot be planned on rank 1 alone: nobody may wait for it."""
    budget = {"device_budget": "64KiB"} if rank == 1 else {}
    start(nvme, **(WATCHFUL | budget)).close()


@pytest.mark.slow
def test_a_plan_that_one_rank_cannot_make_ends_all(doomed: Ranks, nvme: Path) -> None:
    for outcome in doomed(2).outcomes(refuse, nvme):
        assert outcome.error is not None and "TieringError" in outcome.error.kinds, outcome.report()
        assert outcome.seconds < SOON


def again(rank: int, nvme: Path) -> list[float]:
    """After an error on all ranks the process can have another engine, on the same process group."""
    losses = []
    for spoil in (True, False):
        engine = start(nvme, models.Blocks, threshold=0)
        try:
            for shares in models.vectors(2, 2):
                x = shares[rank][0][:, :3] if spoil else shares[rank][0]
                loss = engine(x)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        except (RuntimeError, ValueError):
            assert spoil
        finally:
            engine.close()
    return losses


def test_after_the_same_error_on_all_ranks_there_may_be_another_engine(ranks: Ranks, nvme: Path) -> None:
    first, second = ranks(2).run(again, nvme)
    assert len(first) == len(second) == 2


class Interrupted(nn.Module):
    """Raises in the middle of its blocks, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.Blocks()
        self.inner.blocks[1].register_forward_hook(self._perhaps)
        self.fails = False

    def _perhaps(self, *_: Any) -> None:
        if self.fails:
            raise OwnError("told to")

    def forward(self, x: Any, choice: bool) -> Any:
        self.fails = choice
        return self.inner(x)


def go_on(rank: int, nvme: Path, **options: Any) -> Any:
    """A forward that raises on all ranks alike is given up, and the next one trains on: as in one process."""
    with start(nvme, Interrupted, threshold=0, **options) as engine:
        for number, shares in enumerate(models.vectors(4, 2)):
            try:
                loss = engine(*shares[rank], number == 1)
            except OwnError:
                continue
            engine.backward(loss)
            engine.step()
        return engine.global_steps, engine.master_state_dict()


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_in_forward_on_all_ranks_alike_is_survived(ranks: Ranks, nvme: Path, place: str) -> None:
    first, second = ranks(2).run(go_on, nvme, **PLACES[place])
    assert first[0] == second[0] == 3
    assert all(value.equal(second[1][name]) for name, value in first[1].items())


def go_on_after(rank: int, nvme: Path, **options: Any) -> None:
    """Rank 1 catches what a block raises in its second forward, and takes the next batch; so do all in the first."""
    with start(nvme, **options) as engine:
        raising: list[BaseException] = []
        engine.module.blocks[1].register_forward_hook(lambda *_: raise_last(raising))
        for number, shares in enumerate(tokens(4, 2)):
            raising[:] = [OwnError("of all")] * (number == 0) + [ValueError("a bad image")] * (
                number == 2
            ) * rank
            try:
                loss = engine(*shares[rank])
            except (OwnError, ValueError):
                continue
            engine.backward(loss)
            engine.step()


def raise_last(errors: list[BaseException]) -> None:
    if errors:
        raise errors.pop()


@pytest.mark.parametrize("place", ["stage 3", "stage 2"])
def test_an_exception_that_one_rank_caught_is_named_where_ranks_part(
    doomed: Ranks, nvme: Path, place: str
) -> None:
    first, second = doomed(2).outcomes(go_on_after, nvme, threshold=0, **WATCHFUL, **PLACES[place])
    assert first.error is not None, first.report()
    for outcome in (each for each in (first, second) if each.error is not None):
        words = "continued after a forward that raised ValueError: a bad image"
        assert words in outcome.error.message, outcome.report()


def slow_data(rank: int, nvme: Path, **options: Any) -> None:
    with start(nvme, **options) as engine, pytest.MonkeyPatch.context() as patch:
        # Silence is counted from the second look on.
        patch.setattr(zero3.ranks.peers, "SLICE", 0.2)
        for number, shares in enumerate(tokens(2, 2)):
            if rank == 1 and number == 1:
                time.sleep(4)
            engine.backward(engine(*shares[rank]))
            engine.step()


@pytest.mark.slow
def test_a_rank_in_the_scripts_own_code_is_said_to_be_there(doomed: Ranks, nvme: Path) -> None:
    options = {"distributed": {"timeout": 1.5, "silence": 20}, "threshold": 0}
    first, _ = doomed(2).outcomes(slow_data, nvme, **options)
    assert first.error is not None and "rank 1 in code outside the engine" in first.error.message, (
        first.report()
    )
