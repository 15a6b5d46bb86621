"""A loop counts the ranks that train together: each trains on its own batches, and one of them is the main process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState

from tests.zero3.ranks.pool import Pool
from tiering.errors import EngineStateError
from tiering.integrations import _ranks
from tiering.integrations.accelerate import Accelerator

from .loops import Loop, forget, parts
from .programs import TORCHRUN, output_of
from .trainers import config, llama, tiered


def launched(directory: Path, function: str, *arguments: str) -> list[Any]:
    """What each of two ranks of torchrun has seen in ``function`` of on_two_ranks.py."""
    output_of(
        *TORCHRUN, "-m", "tests.tiering.integrations.on_two_ranks", function, str(directory), *arguments
    )
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]


def check(ranks: list[Any]) -> None:
    for rank, seen in enumerate(ranks):
        stock = seen["stock"]
        assert (seen.pop("kind"), stock.pop("kind")) == ("DEEPSPEED", "MULTI_CPU")
        for counted in (seen, stock):
            assert counted["processes"] == 2
            assert (counted["index"], counted["is main"]) == (rank, rank == 0)
            assert counted["gathered"] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "stage"), [("nvme", "3"), ("device", "2")])
def test_a_loop_of_accelerate_with_deepspeed(place: str, stage: str, tmp_path: Path) -> None:
    ranks = launched(tmp_path, "loop", place, stage)
    check(ranks)
    for seen in ranks:
        assert seen["batches"] == seen["stock"]["batches"] == 16
        for (loss, norm, _), (expected, other, _) in zip(
            seen["reports"], seen["stock"]["reports"], strict=True
        ):
            assert (loss, norm) == pytest.approx((expected, other), rel=1e-5)
    # The losses of a rank are those of its own batches.
    assert ranks[0]["reports"][0][0] != ranks[1]["reports"][0][0]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("use_cpu",), ("early",)], ids=["alone", "use_cpu", "early"])
def test_a_trainer_with_deepspeed(options: tuple[str, ...], tmp_path: Path) -> None:
    ranks = launched(tmp_path, "trainer", "nvme", "3", *options)
    check(ranks)
    for seen in ranks:
        assert seen["type"] == "DeepSpeedEngine"
        assert len(seen["reports"]) == 22
        for ours, theirs in zip(seen["reports"], seen["stock"]["reports"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Pool]:
    # Of the test: accelerate keeps what it has counted.
    pool = Pool(2, tmp_path / "ranks")
    yield pool
    pool.close()


def counted(rank: int, settings: Any) -> tuple[int, int, float]:
    """Processes, batches and the first loss of an Accelerator that is not told that it is on CPUs."""
    forget()
    made = Accelerator(tiering_config=settings, gradient_accumulation_steps=2)
    loop = Loop(made)
    found = made.num_processes, len(loop.loader), loop.run(1)[0][0]
    made.free_memory()
    return found


@pytest.mark.slow
def test_our_accelerator_counts_ranks_on_cpus(ranks: Pool, tmp_path: Path) -> None:
    one, other = ranks.run(counted, config("nvme", tmp_path))
    assert one[:2] == other[:2] == (2, 16)
    assert one[2] != other[2]


def refused(rank: int, out: Path, settings: Any) -> list[str]:
    """The errors of loops that count one process."""
    forget()
    PartialState()
    errors = []
    with pytest.raises(EngineStateError) as raised:
        Accelerator(tiering_config=settings).prepare(*parts())
    errors.append(str(raised.value))
    trainer = tiered(out, settings, llama(), use_cpu=False)
    with pytest.raises(EngineStateError) as raised:
        trainer.train()
    return [*errors, str(raised.value)]


@pytest.mark.slow
def test_a_loop_that_counts_one_process_is_refused(ranks: Pool, tmp_path: Path) -> None:
    for errors in ranks.run(refused, tmp_path / "out", config("nvme", tmp_path)):
        for error in errors:
            assert "2 ranks train together, but the loop counts 1" in error


def test_a_count_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with _ranks.counted(1):
        pass
    with pytest.raises(EngineStateError, match="1 ranks train together, but the loop counts 2"):
        _ranks.check(2)
    # As initialize sets them, where srun has started the ranks.
    with pytest.raises(EngineStateError, match="2 ranks train together"), _ranks.counted(1):
        monkeypatch.setenv("WORLD_SIZE", "2")


def test_ranks_of_a_trainer_share_no_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared() -> int:
        return 2 if started else 1

    started: list[bool] = []
    monkeypatch.setattr(_ranks.groups, "_get_sequence_parallel_world_size", shared, raising=False)
    with _ranks.counted(1):
        pass
    with pytest.raises(EngineStateError, match="sequence_parallel_size 2"), _ranks.counted(1):
        started.append(True)
