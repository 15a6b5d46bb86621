"""All ranks save, or none; whatever hinders one of them is told to all, and training goes on."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import tiering.checkpoint.directory
import zero3.checkpoint.checkpoints
import zero3.checkpoint.opening
import zero3.checkpoint.saving
from tests.zero3.inside import saver_of
from tiering._interrupts import EXIT_SAVED
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.reader import open_checkpoint
from tiering.errors import CheckpointError, SwapError
from zero3.checkpoint import random_state
from zero3.checkpoint.checkpoints import Checkpoints
from zero3.checkpoint.rank_share import Share
from zero3.checkpoint.saving import Saver, uncommitted

from .pool import Pool, Raised, in_words
from .training import start, tokens

Ranks = Callable[[int], Pool]
Masters = dict[str, Tensor]
PLACES: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 1, nvme": {"stage": 1, "offload_optimizer": "nvme", "cache_in_host": False, "host_budget": "8MiB"},
}


def train(engine: Any, rank: int, steps: range) -> None:
    for number, shares in enumerate(tokens(steps.stop, int(os.environ["WORLD_SIZE"]))):
        if number in steps:
            engine.backward(engine(*shares[rank]))
            engine.step()


class Unreadable(Mapping[str, Any]):
    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        raise ZeroDivisionError("in the user's code")

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


def no_swap(*_: Any) -> None:
    raise SwapError("swap_in of 'blocks.1' failed", errno=errno.EIO, filename="swap", offset=0)


def no_chunks(*_: Any) -> None:
    raise RuntimeError("nobody foresaw this")


def no_room(*_: Any) -> None:
    raise MemoryError("no windows")


def not_synced(path: Path) -> None:
    """The directory with the files, which ``commit`` begins with."""
    if ".partial-" in path.name:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


@contextmanager
def limited() -> Iterator[None]:
    """No file of this process may grow beyond a page."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def no_fault(**_: Any) -> Iterator[None]:
    yield


# What hinders a save: the rank on which, how, what else it is called with, and the words of all ranks' errors.
HINDRANCES: dict[str, tuple[int, Callable[[], Any], dict[str, Any], str]] = {
    "a limit of file sizes": (1, limited, {}, "EFBIG"),
    "a limit on the first rank": (0, limited, {}, "EFBIG"),
    "no directory on its node": (
        1,
        lambda: patched(zero3.checkpoint.checkpoints.Path, "is_dir", lambda self: False),
        {},
        "does not exist on this node: save to a file system that all nodes share",
    ),
    "no memory": (1, lambda: patched(zero3.checkpoint.saving.Arena, "map", no_room), {}, "no windows"),
    "swap space": (
        1,
        lambda: patched(zero3.checkpoint.saving.Saver, "_copy", no_swap),
        {},
        "swap_in of 'blocks.1' failed",
    ),
    "what nobody foresaw": (1, lambda: patched(Share, "chunks", no_chunks), {}, "nobody foresaw this"),
    "a client_state of no plain form": (1, no_fault, {"client_state": {"x": object()}}, "client_state['x']"),
    "a client_state that raises": (1, no_fault, {"client_state": Unreadable()}, "in the user's code"),
    "no commit": (
        0,
        lambda: patched(tiering.checkpoint.directory, "fsync", not_synced),
        {},
        "see dmesg; save to another one",
    ),
    "another tag": (1, no_fault, {"tag": "mine"}, "rank 1 is to save 'mine'"),
    "another number to keep": (1, no_fault, {"keep": 3}, "keep=3"),
    "not the frozen": (1, no_fault, {"exclude_frozen_parameters": True}, "exclude_frozen_parameters=True"),
    "not the latest": (1, no_fault, {"save_latest": False}, "save_latest=False"),
}


def hinder(
    rank: int, nvme: Path, directory: Path, names: list[str], background: bool, options: dict[str, Any]
) -> tuple[dict[str, Raised], Masters]:
    """Train, and try to save where something hinders one rank; the errors, and where training has come to."""
    messages: dict[str, Raised] = {}
    with start(nvme, **options) as engine:
        train(engine, rank, range(1))
        engine.save_checkpoint(directory, "good")
        for number, name in enumerate(names, start=1):
            victim, hindrance, arguments, _ = HINDRANCES[name]
            call = {"save_dir": directory, "tag": "bad", "background": background}
            with hindrance() if rank == victim else no_fault():
                try:
                    saving = engine.save_checkpoint(**call | (arguments if rank == victim else {}))
                    if background:
                        saver_of(engine).join()  # with what hinders it
                except Exception as error:
                    messages[name] = in_words(error)
                train(engine, rank, range(number, number + 1))
                if name not in messages:
                    try:
                        saving.wait()
                    except Exception as error:
                        messages[name] = in_words(error)
        engine.save_checkpoint(directory, "better")
        return messages, engine.master_state_dict()


def trained(rank: int, nvme: Path, steps: int, options: dict[str, Any]) -> Masters:
    with start(nvme, **options) as engine:
        train(engine, rank, range(steps))
        return engine.master_state_dict()


def loaded(rank: int, nvme: Path, directory: Path, tag: str | None, options: dict[str, Any]) -> Masters:
    with start(nvme, other_seeds=True, **options) as engine:
        engine.load_checkpoint(directory, tag)
        return engine.master_state_dict()


def same(first: Masters, other: Masters) -> bool:
    return set(first) == set(other) and all(value.equal(other[name]) for name, value in first.items())


def names_in(directory: Path) -> set[str]:
    """Without the lock, which a run that was killed leaves."""
    return {each.name for each in directory.iterdir()} - {".lock"}


def assert_all_or_none(pool: Pool, nvme: Path, directory: Path, place: str, *, background: bool) -> None:
    options = PLACES[place]
    names = [name for name in HINDRANCES if "nvme" not in place or "limit" not in name]  # of swap files, too
    runs = pool.run(hinder, nvme, directory, names, background, options)
    for name in names:
        victim, _, _, words = HINDRANCES[name]
        for rank, (messages, _) in enumerate(runs):
            assert words in messages[name].message, f"{name}, rank {rank}: {messages}"
            if rank != victim and not name.startswith(("another", "not the")):
                assert (
                    messages[name].kind == "CheckpointError"
                    and f"rank {victim} could not" in messages[name].message
                )
    assert names_in(directory) == {"good", "better", "latest"}, "something was left"
    assert CheckpointDirectory(directory).latest() == "better"
    expected = pool.run(trained, nvme, len(names) + 1, options)[0]
    assert all(same(masters, expected) for _, masters in runs), "a save that failed has changed training"
    assert same(pool.run(loaded, nvme, directory, None, options)[0], expected)
    first = pool.run(trained, nvme, 1, options)[0]
    assert same(pool.run(loaded, nvme, directory, "good", options)[1], first)


@pytest.mark.parametrize("place", PLACES)
def test_what_hinders_one_rank_is_told_to_all(ranks: Ranks, nvme: Path, tmp_path: Path, place: str) -> None:
    assert_all_or_none(ranks(2), nvme, tmp_path / "saved", place, background=False)


@pytest.mark.parametrize("place", PLACES)
def test_what_hinders_one_rank_in_the_background_is_told_to_all(
    ranks: Ranks, nvme: Path, tmp_path: Path, place: str
) -> None:
    assert_all_or_none(ranks(2), nvme, tmp_path / "saved", place, background=True)


def warned(rank: int, nvme: Path, directory: Path) -> list[Any]:
    """What a save that has failed in the background leaves to be told, when, and what later saves make of it."""
    notes: list[Any] = []
    with start(nvme) as engine:
        train(engine, rank, range(1))
        for background in (True, False):
            with patched(Share, "chunks", no_chunks) if rank == 1 else no_fault():
                engine.save_checkpoint(directory, "bad", background=True)
                saver_of(engine).join()
            train(engine, rank, range(1, 2))  # in which all are told
            try:
                saving = engine.save_checkpoint(directory, f"good{background}", background=background)
            except CheckpointError as error:
                notes.append("nobody foresaw this" in str(error))
                engine._checkpoints.finish()
            else:
                notes.append(str(saving))
        with patched(Share, "chunks", no_chunks) if rank == 1 else no_fault():
            engine.save_checkpoint(directory, "bad", background=True)
            saver_of(engine).join()
        try:
            engine.close()
        except CheckpointError as error:
            notes.append("nobody foresaw this" in str(error))
    return notes


def test_a_failure_in_the_background_is_told_and_is_no_reason_not_to_save(
    ranks: Ranks, nvme: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    for notes in ranks(2).run(warned, nvme, saved):
        assert notes == [True, f"<Saving {saved / 'goodFalse'}, done>", True]
    assert names_in(saved) == {"goodTrue", "goodFalse", "latest"}


def damaged(rank: int, nvme: Path, directory: Path, options: dict[str, Any]) -> list[Any]:
    """Errors of loading what is damaged for rank 1 alone, and of training then; what another checkpoint makes good."""
    messages: list[Any] = []
    with start(nvme, **options) as engine:
        train(engine, rank, range(1))
        engine.save_checkpoint(directory, "good")
        train(engine, rank, range(1, 2))
        engine.save_checkpoint(directory, "bad")
        expected = engine.master_state_dict()
        if rank == 0:
            flip_last_byte(directory / "bad" / "exp_avg-00002-of-00002.safetensors")
        for attempt in (
            lambda: engine.load_checkpoint(directory, "bad"),
            lambda: train(engine, rank, range(1)),
            lambda: load_here(engine, directory if rank == 0 else directory / "good", "good"),
            lambda: load_here(engine, directory if rank == 0 else directory.parent),
            lambda: load_another_save(engine, rank, directory),
            lambda: spoilt_load(engine, rank, directory),
        ):
            try:
                attempt()
            except Exception as error:
                messages.append(in_words(error))
            else:
                messages.append(None)
        engine.load_checkpoint(directory, "good")
        train(engine, rank, range(1, 2))
        return [*messages, same(engine.master_state_dict(), expected), engine.global_steps]


def load_here(engine: Any, directory: Path, tag: str | None = None) -> None:
    """Load by a path that is another directory on each rank, as on disks of nodes."""
    with chdir(directory):
        engine.load_checkpoint(".", tag)


def load_another_save(engine: Any, rank: int, directory: Path) -> None:
    """Somebody has saved there between two ranks' looks."""

    def opened(path: Path) -> Any:
        checkpoint = open_checkpoint(path)
        return replace(checkpoint, manifest=replace(checkpoint.manifest, created="later"))

    with patched(zero3.checkpoint.opening, "open_checkpoint", opened) if rank == 1 else no_fault():
        engine.load_checkpoint(directory, "good")


def spoilt_load(engine: Any, rank: int, directory: Path) -> None:
    """The last thing that is taken over cannot be, on rank 1."""
    with patched(random_state, "restore", no_chunks) if rank == 1 else no_fault():
        engine.load_checkpoint(directory, "good")


def flip_last_byte(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("place", PLACES)
def test_what_one_rank_cannot_load_is_told_to_all(
    ranks: Ranks, nvme: Path, tmp_path: Path, place: str
) -> None:
    for rank, answers in enumerate(ranks(2).run(damaged, nvme, tmp_path / "saved", PLACES[place])):
        torn, trained, missing, elsewhere, another, spoilt, *end = answers
        assert torn.kind == "CheckpointError" and "exp_avg-00002-of-00002.safetensors" in torn.message
        assert ("rank 1 could not load the checkpoint" in torn.message) == (rank == 0)
        assert trained.kind == "EngineStateError" and "load_checkpoint did not end" in trained.message
        assert missing.kind == "CheckpointError"
        assert ("rank 1 could not find the checkpoint" in missing.message) == (rank == 0)
        assert elsewhere.kind == "CheckpointError" and "rank 1 None" in elsewhere.message
        assert another.kind == "CheckpointError" and "ranks find different saves in" in another.message
        assert (
            "nobody foresaw this" in spoilt.message
            and spoilt.kind == ("CheckpointError", "RuntimeError")[rank]
        )
        assert end == [True, 2]


def disturbed(rank: int, nvme: Path, directory: Path) -> tuple[list[str], int]:
    """A load of files of two saves, and one whose checkpoint is pruned when rank 1 opens it."""
    refusals = []
    with start(nvme) as engine:
        for number in range(3):
            train(engine, rank, range(number, number + 1))
            engine.save_checkpoint(directory, save_latest=number < 2)
        if rank == 0:
            for file in (directory / "global_step1").glob("*-00002-of-*"):
                shutil.copyfile(file, directory / "global_step3" / file.name)
        try:
            engine.load_checkpoint(directory, "global_step3")
        except CheckpointError as error:
            refusals.append(str(error))

        def pruned(path: Path) -> Any:
            if path.exists() and path.name == "global_step2":
                (directory / "latest").write_text("global_step1")
                shutil.rmtree(path)
            return open_checkpoint(path)

        with patched(zero3.checkpoint.opening, "open_checkpoint", pruned) if rank == 1 else no_fault():
            engine.load_checkpoint(directory)
        return refusals, engine.global_steps


def test_ranks_refuse_a_mixture_and_look_again_together(ranks: Ranks, nvme: Path, tmp_path: Path) -> None:
    for refusals, steps in ranks(2).run(disturbed, nvme, tmp_path / "saved"):
        [message] = refusals
        assert "-00002-of-00002." in message and "is damaged: it belongs to save" in message
        assert "files of two saves are mixed in this directory" in message
        assert steps == 1


def resumed_by_nobody(rank: int, nvme: Path, directory: Path) -> tuple[Any, int]:
    with start(nvme) as engine:
        return engine.load_checkpoint(directory), engine.global_steps


def test_an_empty_directory_begins_a_run(ranks: Ranks, nvme: Path, tmp_path: Path) -> None:
    assert ranks(2).run(resumed_by_nobody, nvme, tmp_path) == [((None, {}), 0)] * 2
    assert names_in(tmp_path) == {"nvme"}


def crowded(rank: int, nvme: Path, directory: Path) -> list[Any]:
    """Two runs of all ranks, one directory: each saves while the other one does, and then after it."""
    messages: list[Any] = []
    let, copy = threading.Event(), Saver._copy

    def hold(*args: Any) -> None:
        assert let.wait(30)
        copy(*args)

    with start(nvme) as other, start(nvme) as engine:
        train(engine, rank, range(1))
        with patched(Saver, "_copy", hold):
            saving = engine.save_checkpoint(directory, "mine", background=True)
            try:
                other.save_checkpoint(directory, "other")
            except CheckpointError as error:
                messages.append(str(error))
            let.set()
            saving.wait()
        other.save_checkpoint(directory, "other", background=True).wait()
        train(engine, rank, range(1, 2))
        engine.save_checkpoint(directory, "mine")
    return messages


def test_two_runs_take_turns_in_one_directory(ranks: Ranks, nvme: Path, tmp_path: Path) -> None:
    [first], [second] = ranks(2).run(crowded, nvme, tmp_path / "saved")
    refusal = "another engine of this process is saving to"
    assert refusal in first and "rank 0 could not" not in first
    assert "rank 0 could not begin a checkpoint" in second and refusal in second
    assert names_in(tmp_path / "saved") == {"mine", "other", "latest"}


def preempted(rank: int, nvme: Path, directory: Path, earlier: str) -> Any:
    """Rank 1 is asked to stop in its third step, while an ``earlier`` save is under way, or has failed."""
    with start(nvme) as engine:
        engine.save_and_exit_on(save_dir=directory)
        train(engine, rank, range(2))
        with patched(Share, "chunks", no_chunks) if rank == 1 and earlier == "failed" else no_fault():
            engine.save_checkpoint(directory, "earlier", background=True)
            if earlier == "failed":
                saver_of(engine).join()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            train(engine, rank, range(2, 6))
        except SystemExit as stopped:
            return stopped.code, engine.global_steps
    return None


@pytest.mark.parametrize("earlier", ["under way", "failed"])
def test_a_rank_that_is_asked_to_stop_saves_with_all(
    ranks: Ranks, nvme: Path, tmp_path: Path, earlier: str
) -> None:
    saved = tmp_path / "saved"
    assert ranks(2).run(preempted, nvme, saved, earlier) == [(EXIT_SAVED, 3)] * 2
    assert same(ranks(2).run(loaded, nvme, saved, None, {})[0], ranks(2).run(trained, nvme, 3, {})[0])
    assert ({"earlier"} <= names_in(saved)) == (earlier == "under way")
    assert CheckpointDirectory(saved).latest() == "global_step3"


def uneven(rank: int, nvme: Path, directory: Path, slow: int) -> list[Any]:
    """A rank whose saver is slow: when each of the others says that it is done."""
    save, conclude = Saver._save, Checkpoints._finish_together
    states: list[Any] = []
    ends: list[bool] = []

    def slowly(self: Any, *arguments: Any) -> None:
        save(self, *arguments)
        time.sleep(0.4)  # copies are made, so that no step waits for those

    def concluded(self: Any) -> None:
        ends.append(self._under_way.saver.has_ended)
        conclude(self)

    with (
        start(nvme) as engine,
        patched(Checkpoints, "_finish_together", concluded),
        patched(Saver, "_save", slowly) if rank == slow else no_fault(),
    ):
        train(engine, rank, range(1))
        saving = engine.save_checkpoint(directory, background=True)
        for number in range(1, 200):
            train(engine, rank, range(number, number + 1))
            states.append(saving.done)
            if saving.done:
                break
        states.append((directory / "global_step1" / "checkpoint.json").exists())
        return [*states, saving.error, *ends, 0 < saving.stalled <= saving.seconds]


def pruned_late(rank: int, nvme: Path, directory: Path) -> list[Any]:
    """The first rank removes nothing before the second one has gone on."""
    events, prune, gone_on = [], CheckpointDirectory.prune, directory.parent / "gone on"

    def waiting(*arguments: Any) -> None:
        for _ in range(3000):
            if gone_on.exists():
                events.append("told")
                break
            time.sleep(0.01)
        prune(*arguments)

    with start(nvme) as engine:
        engine.save_checkpoint(directory)
        train(engine, rank, range(1))
        with patched(CheckpointDirectory, "prune", waiting):
            saving = engine.save_checkpoint(directory, keep=1, background=True)
            begun = saving.path in uncommitted
            saving.wait()
        if rank == 1:
            gone_on.touch()
        return [*events, begun, saving.path in uncommitted]


def test_ranks_go_on_while_the_first_removes_what_is_old(ranks: Ranks, nvme: Path, tmp_path: Path) -> None:
    assert ranks(2).run(pruned_late, nvme, tmp_path / "saved") == [["told", True, False], [True, False]]
    assert names_in(tmp_path / "saved") == {"global_step1", "latest"}


@pytest.mark.parametrize("slow", [1, 0])
def test_ranks_agree_in_which_step_a_save_in_the_background_was_done(
    ranks: Ranks, nvme: Path, tmp_path: Path, slow: int
) -> None:
    first, second = ranks(2).run(uneven, nvme, tmp_path / "saved", slow)
    assert first == second
    *before, done, there, error, over, waited = first
    assert before and not any(before)
    assert over, "the step waited for the slow rank"
    assert (done, there, error, waited) == (True, True, None, True)
