"""Runs of several ranks that stop, are saved, and go on to the same bits; other runs start from the same bits."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tiering
from tests.zero3.checkpoint.snapshotted import assert_same_checkpoints
from tests.zero3.conftest import config
from tests.zero3.resuming import (
    MIXED,
    ON_CPU,
    STREAMED,
    Left,
    Model,
    after_snapshot,
    interrupted,
    straight,
    tokens,
    train,
)
from tiering.checkpoint.reader import open_checkpoint
from tiering.errors import EngineStateError
from zero3.checkpoint.saving import Saver

from . import models
from .pool import Pool

Ranks = Callable[[int], Pool]
# Most steps before the save are skipped.
SCALED = {"precision": "fp16", "fp16": {"initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}}
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0, "precision": "bf16"},
    "stage 0, a client's optimizer": {"stage": 0, "rule": None, "client": torch.optim.RMSprop},
    "stage 1": {"stage": 1, "accumulation": 2},
    "stage 1, nvme": {"stage": 1, "offload_optimizer": "nvme", "cache_in_host": False, "precision": "bf16"},
    "stage 2": {"stage": 2, "precision": "bf16", "accumulation": 2, "state": "split+bf16"},
    "stage 2, nvme": {"stage": 2, "offload_optimizer": "nvme", "cache_in_host": False, **SCALED},
    "stage 3": {"clip": 0.3},
    "stage 3, host": {**ON_CPU, "precision": "bf16", "clip": 0.3},
    "stage 3, nvme": {**STREAMED, **SCALED, "clip": 0.3},
    "stage 3, part cached": {**MIXED, "accumulation": 2, "state": "split", "precision": "bf16"},
    "stage 3, in small tiles": {**STREAMED, "sub_group_size": 1, "prefetch": 0},
    "stage 3, nothing persistent": {"threshold": 0, "precision": "bf16", "state": "bf16"},
}


def begin(
    nvme: Path,
    build: Callable[[], nn.Module] = Model,
    data: Any = None,
    client: Callable[..., Any] | None = None,
    resume: Path | None = None,
    **options: Any,
) -> Any:
    """``client``: an optimizer of the user's, which steps itself. ``resume``: the directory that is loaded next."""
    settings = config(nvme, **({"precision": "fp32", "accumulation": 1, "threshold": 40} | options))
    arguments: dict[str, Any] = {} if data is None else {"training_data": data}
    if resume is not None:
        arguments["resume"] = resume
    if client is not None:
        arguments["optimizer"] = lambda params: client(params, lr=1e-3)
    return tiering.initialize(model=build(), config=settings, **arguments).engine


def own(rank: int, engine: Any, micro_batches: range) -> list[float]:
    """Each rank has data, dropout and other random numbers of its own."""
    if micro_batches.start == 0:
        torch.manual_seed(100 + rank)
        random.seed(rank)
    losses = []
    for number in micro_batches:
        loss = engine(tokens(1000 * rank + number)) * (1 + random.random())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def compare(
    rank: int, nvme: Path, directory: Path, meanwhile: int, cases: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """For each case what differs between a straight run and one that was interrupted."""
    outcomes = {}
    for name, settings_of_case in cases.items():
        budget = f"{200 * int(os.environ['WORLD_SIZE'])}KiB"  # of all ranks
        options = settings_of_case | ({"host_budget": budget} if "host_budget" in settings_of_case else {})
        make, teach = partial(begin, nvme, **options), partial(own, rank)
        accumulated = options.get("accumulation", 1)
        expected = straight(make, 6 * accumulated, teach)
        resumed = interrupted(
            make,
            6 * accumulated,
            3 * accumulated,
            directory / name,
            train=teach,
            meanwhile=meanwhile * accumulated,
        )
        outcomes[name] = resumed.differences(expected), expected.losses, expected.rest["steps"][1]
    return outcomes


def assert_goes_on(pool: Pool, nvme: Path, tmp_path: Path, meanwhile: int, *names: str) -> None:
    cases = {name: CASES[name] for name in names}
    of_all = pool.run(compare, nvme, tmp_path / "saved", meanwhile, cases)
    for rank, outcomes in enumerate(of_all):
        for name, (differences, losses, skipped) in outcomes.items():
            assert differences == [], f"{name}, rank {rank}"
            assert losses != of_all[rank - 1][name][1], f"{name}: ranks train on the same"
            assert bool(skipped) == ("fp16" in cases[name]), f"{name}: {skipped} steps were skipped"


SNAPSHOTS: dict[str, dict[str, Any]] = {
    "stage 1": {
        **CASES["stage 1, nvme"],
        "precision": "fp32",
        "step": "in_backward",
        "swap_versions": 2,
    },
    "stage 2": CASES["stage 2, nvme"],
    "stage 3": CASES["stage 3, part cached"],
    "stage 3, in small tiles": CASES["stage 3, in small tiles"],
}


def from_snapshots(
    rank: int, nvme: Path, directory: Path, names: tuple[str, ...]
) -> dict[str, tuple[list[str], list[str]]]:
    """For each case what differs between a straight run and one that goes on from a snapshot, and the files left."""
    outcomes = {}
    for name in names:
        budget = f"{200 * int(os.environ['WORLD_SIZE'])}KiB"  # of all ranks
        options = {**SNAPSHOTS[name], "accumulation": 1, "snapshots": True, "host_budget": budget}
        make, teach = partial(begin, nvme, **options), partial(own, rank)
        expected = straight(make, 6, teach)
        resumed = after_snapshot(make, 6, 3, directory / name, train=teach)
        outcomes[name] = (
            resumed.differences(expected),
            [file.name for file in nvme.iterdir() if f"rank{rank}-" in file.name],
        )
    return outcomes


def assert_go_on_from_snapshots(pool: Pool, nvme: Path, tmp_path: Path, *names: str) -> None:
    for outcomes in pool.run(from_snapshots, nvme, tmp_path / "saved", names):
        for number, (name, (differences, files)) in enumerate(outcomes.items(), start=1):
            assert differences == [], name
            # One for each case: that of its last snapshot.
            assert len(files) == number, name


def test_two_ranks_go_on_from_a_snapshot(ranks: Ranks, nvme: Path, tmp_path: Path) -> None:
    assert_go_on_from_snapshots(ranks(2), nvme, tmp_path, "stage 1", "stage 3")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_of_every_stage_go_on_from_a_snapshot(
    ranks: Ranks, nvme: Path, tmp_path: Path, world_size: int
) -> None:
    assert_go_on_from_snapshots(ranks(world_size), nvme, tmp_path, *SNAPSHOTS)


def resumes_as_announced(rank: int, nvme: Path, directory: Path, name: str) -> dict[str, list[str]]:
    """By tag, what differs between a straight run and one with ``initialize(resume=...)``."""
    options = {**SNAPSHOTS[name], "accumulation": 1, "snapshots": True, "host_budget": "400KiB"}
    make, teach = partial(begin, nvme, **options), partial(own, rank)
    expected = straight(make, 6, teach)
    torch.manual_seed(1)
    # There is no checkpoint yet: the parameters have their first values.
    engine = make(resume=directory)
    losses = teach(engine, range(3))
    engine.snapshot_state(directory)
    engine.save_checkpoint(directory, "checkpoint")
    engine.close()
    differences = {}
    for tag in ("snapshot", "checkpoint"):
        torch.manual_seed(99)
        engine = make(resume=directory)
        with pytest.raises(EngineStateError, match=r"without values.*call load_checkpoint first"):
            engine(tokens(0))
        engine.load_checkpoint(directory, tag)
        differences[tag] = Left.by(engine, losses + teach(engine, range(3, 6))).differences(expected)
        engine.close()
    return differences


@pytest.mark.parametrize("name", ["stage 1", "stage 3"])
def test_two_ranks_resume_as_announced(ranks: Ranks, nvme: Path, tmp_path: Path, name: str) -> None:
    for differences in ranks(2).run(resumes_as_announced, nvme, tmp_path / "saved", name):
        assert differences == {"snapshot": [], "checkpoint": []}


def save_behind_training(rank: int, nvme: Path, directory: Path, name: str) -> tuple[Path, Path]:
    """A checkpoint from a snapshot, saved while later steps are trained, and one of the same step."""
    options = {**SNAPSHOTS[name], "accumulation": 1, "snapshots": True, "host_budget": "400KiB"}
    torch.manual_seed(1)
    engine = begin(nvme, **options)
    own(rank, engine, range(3))
    engine.snapshot_state(directory, {"rank": rank})
    expected = engine.save_checkpoint(directory, "expected", {"rank": rank}).path
    let, copy = threading.Event(), Saver._copy

    def hold(*arguments: Any) -> None:
        assert let.wait(60)
        copy(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "_copy", hold)
        saving = engine.save_checkpoint(directory, background=True, from_snapshot=True)
        # No step of any rank waits for the savers.
        own(rank, engine, range(3, 5))
        let.set()
        saving.wait()
    engine.close()
    return saving.path, expected


@pytest.mark.parametrize("name", ["stage 1", "stage 3"])
def test_two_ranks_save_their_snapshot_behind_training(
    ranks: Ranks, nvme: Path, tmp_path: Path, name: str
) -> None:
    path, expected = ranks(2).run(save_behind_training, nvme, tmp_path / "saved", name)[0]
    assert path.name == "global_step3"
    assert_same_checkpoints(path, expected)


def take_snapshot(rank: int, nvme: Path, directory: Path) -> dict[str, Tensor]:
    """The masters and moments of a snapshot that two ranks have made."""
    torch.manual_seed(1)
    engine = begin(nvme, snapshots=True, **CASES["stage 3, part cached"] | {"host_budget": "400KiB"})
    own(rank, engine, range(4))
    engine.snapshot_state(directory)
    left = Left.by(engine).tensors
    engine.close()
    return left


def test_one_rank_loads_the_snapshot_of_two(ranks: Ranks, nvme: Path, tmp_path: Path) -> None:
    left = ranks(2).run(take_snapshot, nvme, tmp_path / "saved")[0]
    torch.manual_seed(1)
    engine = begin(nvme, **{**ON_CPU, "accumulation": 2, "state": "split", "precision": "bf16"})
    engine.load_checkpoint(tmp_path / "saved")
    loaded = Left.by(engine).tensors
    engine.close()
    # Buffers are those of a rank: the running statistics.
    assert loaded.keys() == left.keys()
    different = [name for name in left if not torch.equal(left[name], loaded[name])]
    assert all("statistics" in name for name in different), different


@pytest.mark.parametrize("meanwhile", [0, 2])
def test_two_ranks_go_on_as_if_they_had_not_stopped(
    ranks: Ranks, nvme: Path, tmp_path: Path, meanwhile: int
) -> None:
    """``meanwhile``: steps that are trained while the checkpoint is saved in the background."""
    assert_goes_on(ranks(2), nvme, tmp_path, meanwhile, "stage 1", "stage 3, part cached")


@pytest.mark.slow
def test_two_ranks_go_on_from_what_was_saved_in_the_background(
    ranks: Ranks, nvme: Path, tmp_path: Path
) -> None:
    assert_goes_on(ranks(2), nvme, tmp_path, 2, "stage 2", "stage 3, nvme")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("meanwhile", [0, 1, 3])
@pytest.mark.parametrize("case", CASES)
def test_every_stage_and_placement_goes_on(
    ranks: Ranks, nvme: Path, tmp_path: Path, case: str, meanwhile: int, world_size: int
) -> None:
    assert_goes_on(ranks(world_size), nvme, tmp_path, meanwhile, case)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.3), nn.Tanh(), nn.Linear(20, 3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.layers(x), target)


def labelled() -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    return TensorDataset(
        torch.randn(19, 6, generator=generator), torch.randint(3, (19,), generator=generator)
    )


def through_the_data(rank: int, engine: Any, micro_batches: range) -> list[float]:
    if micro_batches.start == 0:
        torch.manual_seed(100 + rank)
    losses: list[float] = []
    while len(losses) < len(micro_batches):
        for batch in engine.training_dataloader:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if len(losses) == len(micro_batches):
                break
    return losses


def read_on(rank: int, nvme: Path, directory: Path, save_at: int) -> tuple[list[str], Any]:
    """A pass has five micro-batches for each rank. Each rank also has a client_state of its own."""
    make, teach = partial(begin, nvme, Classifier, labelled()), partial(through_the_data, rank)
    expected = straight(make, 12, teach)
    differences = interrupted(make, 12, save_at, directory, train=teach).differences(expected)
    with make() as engine:
        engine.load_checkpoint(directory)
        engine.save_checkpoint(directory, "mine", {"rank": rank, "values": torch.full((2,), rank)})
        client_state = engine.load_checkpoint(directory, "mine")[1]
    return differences, (client_state["rank"], client_state["values"].tolist())


@pytest.mark.parametrize("save_at", [7, 1, 5, 6, 9, 10, 11])
def test_each_rank_goes_on_in_its_share_of_the_data(
    ranks: Ranks, nvme: Path, tmp_path: Path, save_at: int
) -> None:
    outcomes = ranks(2).run(read_on, nvme, tmp_path / "saved", save_at)
    assert outcomes == [([], (0, [0, 0])), ([], (1, [1, 1]))]


# ---- other ranks, other stages, other groups ----

BUILDS: dict[str, Callable[[], nn.Module]] = {
    "all sorts": Model,
    "uneven": models.Blocks,
    "partly frozen": models.PartlyFrozen,
    "tied": models.Tied,
    "tiny": models.Tiny,
}
DATA = models.Choices((0, 1), (1, 2), (0, 2), (0, 1), same=True)  # block 3 is never used, others now and then


def teach(build: str, rank: int, engine: Any, micro_batches: range) -> list[float]:
    """The same batch on every rank: what a step does is the same, whatever their number, but for rounding."""
    if build == "all sorts":
        return train(engine, micro_batches)
    losses = []
    for number, shares in enumerate(DATA(micro_batches.stop, 1)):
        if number in micro_batches:
            x, only = shares[0]
            loss = engine(x, only) if build in ("uneven", "partly frozen") else engine(x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def save(rank: int, nvme: Path, directory: Path, build: str, options: dict[str, Any]) -> Left:
    torch.manual_seed(1)
    with begin(nvme, BUILDS[build], **options) as engine:
        losses = teach(build, rank, engine, range(3))
        engine.save_checkpoint(directory)
        return Left.by(engine, losses)


def load(
    rank: int, nvme: Path, directory: Path, build: str, cases: list[dict[str, Any]]
) -> list[tuple[Left, Left]]:
    """For each case what it has loaded, and what two steps make of that."""
    outcomes = []
    for options in cases:
        torch.manual_seed(50)
        with begin(nvme, BUILDS[build], **options) as engine:
            engine.load_checkpoint(directory)
            loaded = Left.by(engine)
            torch.manual_seed(7)
            outcomes.append((loaded, Left.by(engine, teach(build, rank, engine, range(3, 5)))))
    return outcomes


STAGES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "offload_optimizer": "nvme", "cache_in_host": False},
    {"stage": 2, "sub_group_size": 1},
    {"stage": 3, **STREAMED},
]
ELSEWHERE = [*STAGES, {"stage": 3, "threshold": 0}, {"stage": 3, "threshold": 100_000, "sub_group_size": 100}]


def assert_the_same_elsewhere(
    ranks: Ranks,
    nvme: Path,
    directory: Path,
    build: str,
    saved_by: int,
    loaded_by: int,
    saved: dict[str, Any],
    elsewhere: list[dict[str, Any]],
) -> None:
    expected = ranks(saved_by).run(save, nvme, directory, build, saved)[0]
    assert any(value.abs().max() > 0 for name, value in expected.tensors.items() if "exp_avg_sq" in name), (
        "nothing was trained"
    )
    of_all = ranks(loaded_by).run(load, nvme, directory, build, elsewhere)
    for rank, outcomes in enumerate(of_all):
        for options, (loaded, later) in zip(elsewhere, outcomes, strict=True):
            loaded.losses, loaded.rest["norm"] = expected.losses, expected.rest["norm"]
            assert loaded.differences(expected) == [], f"rank {rank}, {options}"
            first = outcomes[0][1]
            assert float(later.rest["norm"]) == pytest.approx(float(first.rest["norm"]), rel=1e-12)
            later.rest["norm"] = first.rest["norm"]
            assert later.differences(first) == [], f"rank {rank}: {options} trains as no other"
            assert later.differences(loaded) != []


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (1, 2), (2, 1), (3, 2), (1, 4), (4, 3)])
def test_all_other_runs_load_the_same_bits(
    ranks: Ranks, nvme: Path, tmp_path: Path, saved_by: int, loaded_by: int
) -> None:
    """And each of the same number of ranks trains on to the same bits."""
    assert_the_same_elsewhere(
        ranks, nvme, tmp_path / "saved", "uneven", saved_by, loaded_by, {"stage": 3}, ELSEWHERE
    )


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 2), (2, 3), (3, 1), (2, 2)])
@pytest.mark.parametrize("number", range(len(ELSEWHERE)))
@pytest.mark.parametrize("build", BUILDS)
def test_every_pair_of_runs(
    ranks: Ranks, nvme: Path, tmp_path: Path, build: str, number: int, saved_by: int, loaded_by: int
) -> None:
    assert_the_same_elsewhere(
        ranks, nvme, tmp_path / "saved", build, saved_by, loaded_by, ELSEWHERE[number], ELSEWHERE
    )


@pytest.mark.slow
def test_two_ranks_load_what_each_stage_has_saved(ranks: Ranks, nvme: Path, tmp_path: Path) -> None:
    for number, saved in enumerate(STAGES):
        assert_the_same_elsewhere(
            ranks, nvme, tmp_path / str(number), "all sorts", 2, 1, saved, [{"precision": "fp32"}]
        )


def load_both(rank: int, nvme: Path, directory: Path, cases: list[dict[str, Any]]) -> list[tuple[Left, Left]]:
    """For each case what it has loaded without frozen parameters, which it has, and then with them."""
    outcomes = []
    for options in cases:
        torch.manual_seed(1)
        with begin(nvme, models.PartlyFrozen, **options) as engine:
            teach("partly frozen", rank, engine, range(1))
            engine.load_checkpoint(directory, "part")
            part = Left.by(engine)
            engine.load_checkpoint(directory, "whole")
            outcomes.append((part, Left.by(engine)))
    return outcomes


def save_both(rank: int, nvme: Path, directory: Path, options: dict[str, Any]) -> Left:
    torch.manual_seed(1)
    with begin(nvme, models.PartlyFrozen, **options) as engine:
        teach("partly frozen", rank, engine, range(3))
        for tag in ("whole", "part"):
            engine.save_checkpoint(directory, tag, exclude_frozen_parameters=tag == "part")
        return Left.by(engine)


@pytest.mark.slow
def test_frozen_parameters_that_were_excluded_stay_on_all_ranks(
    ranks: Ranks, nvme: Path, tmp_path: Path
) -> None:
    for number, saved in enumerate(({"stage": 1}, {"stage": 3, **STREAMED})):
        directory = tmp_path / str(number)
        expected = ranks(2).run(save_both, nvme, directory, saved)[0]
        excluded = open_checkpoint(directory / "part").manifest.excluded
        assert len(excluded) == 7 and "blocks.2.up.weight" in excluded
        for outcomes in ranks(3).run(load_both, nvme, directory, STAGES):
            for part, whole in outcomes:
                for outcome in (part, whole):
                    outcome.rest["norm"] = expected.rest["norm"]
                    assert outcome.differences(expected) == []
