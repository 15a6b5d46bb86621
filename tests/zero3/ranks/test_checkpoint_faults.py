"""A rank that dies, freezes, raises or is slow while all save: the others hear of it, and the last good one loads."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zero3.ranks.peers
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.integrity import damages
from tiering.checkpoint.manifest import MANIFEST
from tiering.checkpoint.reader import open_checkpoint
from zero3.building.fill import Fill
from zero3.checkpoint.checkpoints import Checkpoints
from zero3.checkpoint.rank_share import Share
from zero3.checkpoint.saving import Saver
from zero3.ranks.tables import Tables

from .pool import Pool, all_ended
from .test_checkpoint import PLACES, Masters, names_in, no_chunks, same, train, trained
from .test_lost import SOON, WATCHFUL, assert_named, die, fail, freeze, left_behind
from .training import start

Ranks = Callable[..., Pool]
MOMENTS = ["before its files", "within its files", "behind its files", "told", "agreed"]
ENDS = [  # fast are the first and the seventh in the foreground, the second and the eighth in the background
    *[("before its files", 1), ("within its files", 0), ("within its files", 1), ("before its files", 0)],
    *[
        ("behind its files", 1),
        ("behind its files", 0),
        ("agreed", 0),
        ("told", 1),
        ("told", 0),
        ("agreed", 1),
    ],
    ("committed", 0),
]
COMMITTED = [("agreed", 1), ("committed", 0)]  # the first rank commits once all are known to have written
IMPATIENT = {"distributed": {"timeout": 2, "silence": 4}}
SAVING = {"sub_group_size": 1000}  # some tiles, so that a file has some chunks


def at(moment: str, end: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Let ``end`` happen at that ``moment`` of a save."""
    chunks: list[int] = []

    def around(owner: Any, name: str, before: Callable[..., bool], after: Callable[..., bool]) -> None:
        function = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before(*args):
                end()
            result = function(*args, **kwargs)
            if after(*args):
                end()
            return result

        patch.setattr(owner, name, wrapped)

    def third(*_: Any) -> bool:
        chunks.append(1)
        return len(chunks) == 3

    def no(*_: Any) -> bool:
        return False

    def yes(*_: Any) -> bool:
        return True

    if moment == "before its files":
        around(Saver, "_save", yes, no)
    elif moment == "within its files":
        around(Saver, "_finish", third, no)
    elif moment == "at every chunk":
        around(Saver, "_finish", yes, no)
    elif moment == "in its own code, after a failure":
        patch.setattr(Share, "chunks", no_chunks)
    elif moment == "behind its files":
        around(Saver, "_save", no, yes)
    elif moment == "told":  # how many words each rank has, and not yet which
        around(Tables, "table", no, lambda self, mine, label: "save its part" in label)
    elif moment == "agreed":
        around(Checkpoints, "_together", lambda self, label, work: label.startswith("commit"), no)
    elif moment == "committed":
        around(CheckpointDirectory, "commit", no, yes)


def save_twice(
    rank: int,
    nvme: Path,
    directory: Path,
    end: Callable[[], None],
    moment: str,
    victim: int,
    background: bool,
    **options: Any,
) -> None:
    """Train; the second save is the ``victim``'s last, if it is not another that ends it."""
    engine = start(nvme, **(WATCHFUL | SAVING | options))
    try:
        train(engine, rank, range(1))
        engine.save_checkpoint(directory, "good")
        train(engine, rank, range(1, 2))
        with pytest.MonkeyPatch.context() as patch:
            if rank == victim:
                at(moment, end, patch)
            engine.save_checkpoint(directory, "next", background=background)
            for number in range(2, 50):
                if rank == victim and moment.startswith("in its own code") and number == 3:
                    end()
                train(engine, rank, range(number, number + 1))
    except BaseException as error:
        engine.__exit__(type(error), error, error.__traceback__)
        error.add_note(f"left: {left_behind(nvme) + left_behind(directory)}")
        raise


def go_on(rank: int, nvme: Path, directory: Path, **options: Any) -> tuple[Masters, int]:
    """Load what is there, and save once more."""
    with start(nvme, other_seeds=True, **(SAVING | options)) as engine:
        engine.load_checkpoint(directory)
        masters, steps = engine.master_state_dict(), engine.global_steps
        engine.save_checkpoint(directory, "later")
        return masters, steps


def assert_goes_on(pool: Pool, nvme: Path, directory: Path, tag: str, **options: Any) -> None:
    """From the checkpoint ``tag``; and what the save that ended has left is gone after the next one."""
    assert CheckpointDirectory(directory).latest() == tag
    runs = pool.run(go_on, nvme, directory, **options)
    expected = pool.run(trained, nvme, 2 if tag == "next" else 1, SAVING | options)[0]
    for masters, steps in runs:
        assert steps == (2 if tag == "next" else 1)
        assert same(masters, expected)
    assert names_in(directory) == {"good", tag, "later", "latest"}
    for saved in CheckpointDirectory(directory).tags():
        assert list(damages(open_checkpoint(directory / saved.tag))) == []


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("moment", "victim"), ENDS)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("place", ["stage 1, nvme", pytest.param("stage 3", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_while_all_save(
    doomed: Ranks,
    ranks: Ranks,
    nvme: Path,
    tmp_path: Path,
    place: str,
    moment: str,
    victim: int,
    background: bool,
) -> None:
    pool, saved, options = doomed(2), tmp_path / "saved", PLACES[place]
    pids = pool.pids
    outcomes = pool.outcomes(save_twice, nvme, saved, die, moment, victim, background, **options)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    assert_named(outcomes[1 - victim], "RankLostError", f"rank {victim}", str(pids[victim]))
    pool.close()
    assert all_ended(pids)
    assert_goes_on(ranks(2), nvme, saved, "next" if (moment, victim) in COMMITTED else "good", **options)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
@pytest.mark.parametrize(
    ("moment", "background"), [("within its files", True), ("told", False), ("agreed", False)]
)
def test_a_rank_that_freezes_while_all_save(
    doomed: Ranks, ranks: Ranks, nvme: Path, tmp_path: Path, victim: int, moment: str, background: bool
) -> None:
    pool, saved = doomed(2), tmp_path / "saved"
    outcomes = pool.outcomes(save_twice, nvme, saved, freeze, moment, victim, background, frozen=[victim])
    assert_named(outcomes[1 - victim], "RankLostError", f"rank {victim}")
    pool.broken = True
    pool.close()  # or it would come back to the lock that it holds
    assert_goes_on(ranks(2), nvme, saved, "next" if (moment, victim) in COMMITTED else "good")


@pytest.mark.parametrize("moment", ["in its own code, after a failure", "in its own code", "agreed"])
def test_a_rank_whose_own_code_raises_while_all_save(
    doomed: Ranks, ranks: Ranks, nvme: Path, tmp_path: Path, moment: str
) -> None:
    """It is told of that, and of nothing that follows from it."""
    pool, saved = doomed(2), tmp_path / "saved"
    other, victim = pool.outcomes(save_twice, nvme, saved, fail, moment, 1, True)
    assert victim.error is not None and victim.error.kind == "OwnError", victim.report()
    assert "left: []" in victim.error.trace
    assert_named(other, "RankLostError", "rank 1", "OwnError: the tokenizer is gone")
    assert CheckpointDirectory(saved).partials() == []


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)  # the main thread hears of it; this is the saver's, which would end the save meanwhile


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_interrupt_in_a_save_stays_one(doomed: Ranks, nvme: Path, tmp_path: Path, world_size: int) -> None:
    saved = tmp_path / "saved"
    outcomes = doomed(world_size).outcomes(save_twice, nvme, saved, interrupt, "within its files", 0, False)
    assert outcomes[0].error is not None and outcomes[0].error.kind == "KeyboardInterrupt", outcomes[
        0
    ].report()
    for other in outcomes[1:]:
        assert_named(other, "RankLostError", "rank 0", "KeyboardInterrupt")
    assert names_in(saved) == {"good", "latest"}


def doze() -> None:
    time.sleep(1)


def close_at_once(rank: int, nvme: Path, directory: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        engine = start(nvme, **(WATCHFUL | SAVING))
        at("within its files", die, patch) if rank == 1 else at("at every chunk", doze, patch)
        time.sleep(3)  # the other has seen this process by then, and knows it again when it is gone
        engine.save_checkpoint(directory, background=True)
        try:
            engine.close()
        except BaseException as error:
            error.add_note(f"left: {left_behind(nvme) + left_behind(directory)}")
            raise


@pytest.mark.slow
def test_a_rank_that_is_killed_while_another_closes(doomed: Ranks, nvme: Path, tmp_path: Path) -> None:
    """Whose checkpoint is not there, then: its close() says so, however long its own files would take."""
    other, _ = doomed(2).outcomes(close_at_once, nvme, tmp_path / "saved")
    assert_named(other, "RankLostError", "rank 1")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_three_ranks_name_the_one_that_was_killed(
    doomed: Ranks, ranks: Ranks, nvme: Path, tmp_path: Path, moment: str, victim: int
) -> None:
    pool, saved = doomed(3), tmp_path / "saved"
    for outcome in pool.outcomes(save_twice, nvme, saved, die, moment, victim, True):
        if outcome.rank != victim:
            assert_named(outcome, "RankLostError", f"rank {victim}")
    pool.close()
    steps = 2 if (moment, min(victim, 1)) in COMMITTED else 1
    assert [loaded for _, loaded in ranks(2).run(go_on, nvme, saved)] == [steps, steps]


def leave_out(rank: int, nvme: Path, directory: Path, load: bool, **options: Any) -> None:
    """Only the first rank saves, or loads."""
    with start(nvme, **(WATCHFUL | options)) as engine:
        train(engine, rank, range(1))
        if rank == 0:
            engine.load_checkpoint(directory) if load else engine.save_checkpoint(directory)
        train(engine, rank, range(1, 5))


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("stage", [3, 0])
def test_a_rank_that_leaves_out_a_save(
    doomed: Ranks, nvme: Path, tmp_path: Path, stage: int, load: bool
) -> None:
    """As "if rank == 0: engine.save_checkpoint(DIR)", which other libraries want."""
    label = "find the checkpoint" if load else "begin a checkpoint"
    for outcome in doomed(2).outcomes(leave_out, nvme, tmp_path, load, stage=stage):
        assert outcome.error is not None and outcome.error.kind == "RankOrderError", outcome.report()
        assert label in outcome.error.message and outcome.seconds < SOON


def save_slowly(rank: int, nvme: Path, directory: Path, slow: int, delay: float, background: bool) -> Any:
    """A rank whose disk is slow: the save takes it longer than anything that ranks wait for."""
    finish = Saver._finish

    def slowly(*arguments: Any) -> None:
        time.sleep(delay if rank == slow else 0.0)
        finish(*arguments)

    with start(nvme, **IMPATIENT, **SAVING) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero3.ranks.peers, "SLICE", 0.2)  # so that it is known soon whether somebody has moved
        train(engine, rank, range(1))
        patch.setattr(Saver, "_finish", slowly)
        saving = engine.save_checkpoint(directory, "slow", background=background)
        if background:  # the next step waits for copies, and close() for the rest
            train(engine, rank, range(1, 2))
            saving.wait()
        return saving.done, saving.seconds


def load_slowly(rank: int, nvme: Path, directory: Path, slow: int) -> float:
    fill = Fill._fill

    def slowly(*arguments: Any, **options: Any) -> None:
        time.sleep(0.7 if rank == slow else 0.0)
        fill(*arguments, **options)

    with start(nvme, **IMPATIENT, **SAVING) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero3.ranks.peers, "SLICE", 0.2)  # so that it is known soon whether somebody has moved
        patch.setattr(Fill, "_fill", slowly)
        began = time.monotonic()
        engine.load_checkpoint(directory)
        return time.monotonic() - began


@pytest.mark.slow
def test_a_load_that_takes_one_rank_longer_than_the_timeout(ranks: Ranks, nvme: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    ranks(2).run(save_slowly, nvme, saved, 1, 0.0, False)
    for seconds in ranks(2).run(load_slowly, nvme, saved, 1):
        assert seconds > 3, "the load was not slow"


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_takes_one_rank_longer_than_the_timeout(
    ranks: Ranks, nvme: Path, tmp_path: Path, background: bool
) -> None:
    """A rank that waits for its disk moves as long as the disk does."""
    saved = tmp_path / "saved"
    for done, seconds in ranks(2).run(save_slowly, nvme, saved, 1, 0.05, background):
        assert done and seconds > 3, "the save was not slow"
    assert list(damages(open_checkpoint(saved / "slow"))) == []


def save_and_prune(rank: int, nvme: Path, directory: Path) -> int:
    with start(nvme) as engine:
        for number in range(2):
            train(engine, rank, range(number, number + 1))
            engine.save_checkpoint(directory, keep=1)
        train(engine, rank, range(2, 3))
        return int(engine.global_steps)


def test_ranks_stay_together_whatever_pruning_meets(ranks: Ranks, nvme: Path, tmp_path: Path) -> None:
    """Only the first one prunes, after all have agreed that the checkpoint is there."""
    saved = tmp_path / "saved"
    (saved / "global_step0").mkdir(parents=True)
    content = (
        '{"crc32": "00000000", "content": {"format": "tiering-checkpoint", "run": "mine", "step": 1e999}}'
    )
    (saved / "global_step0" / MANIFEST).write_text(content)
    assert ranks(2).run(save_and_prune, nvme, saved) == [3, 3]
    assert names_in(saved) == {"global_step0", "global_step2", "latest"}


STEPS = 30


def endure(rank: int, nvme: Path, directory: Path, background: bool) -> tuple[Masters, int]:
    """Go on from what is there to the end, and save after each step."""
    with start(nvme, **(WATCHFUL | SAVING)) as engine:
        engine.load_checkpoint(directory)
        began = engine.global_steps
        for number in range(began, STEPS):
            train(engine, rank, range(number, number + 1))
            engine.save_checkpoint(directory, keep=2, background=background)
        return engine.master_state_dict(), began


def kill_soon(pid: int, directory: Path, delay: float) -> None:
    """Some time after the next checkpoint has appeared."""
    latest = directory / "latest"
    before = latest.read_bytes() if latest.exists() else b""
    while not latest.exists() or latest.read_bytes() == before:
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_are_killed_at_any_moment_come_to_the_same_end(
    doomed: Ranks, ranks: Ranks, nvme: Path, tmp_path: Path, seed: int, background: bool
) -> None:
    chance, saved = random.Random(seed), tmp_path / "saved"
    for _ in range(6):
        pool, victim = doomed(2), chance.randrange(2)
        killer = threading.Thread(
            target=kill_soon, args=(pool.pids[victim], saved, chance.uniform(0, 0.15)), daemon=True
        )
        killer.start()
        outcomes = pool.outcomes(endure, nvme, saved, background)
        killer.join()
        assert outcomes[victim].exit_code == -signal.SIGKILL, outcomes[victim].report()
        survivor = outcomes[1 - victim]
        assert survivor.error is not None and survivor.error.kind == "RankLostError", survivor.report()
        pool.broken = True
        pool.close()
    expected = ranks(2).run(trained, nvme, STEPS, SAVING)[0]
    for masters, began in ranks(2).run(endure, nvme, saved, background):
        assert began >= 6 and same(masters, expected)
    assert names_in(saved) == {f"global_step{STEPS - 1}", f"global_step{STEPS}", "latest"}
