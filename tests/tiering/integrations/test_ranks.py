"""A Trainer on the engine with two ranks reports what the stock Trainer reports with two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import LlamaForCausalLM, TrainerCallback

from tests.zero3.ranks.pool import Pool

from .trainers import (
    PLACES,
    TieredSeq2SeqTrainer,
    config,
    different,
    llama,
    reported,
    sentences,
    seq2seq,
    state,
    stock,
    tiered,
)

STEPS: dict[str, Any] = {"max_steps": 20, "eval_strategy": "steps", "eval_steps": 10}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(2, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


def run(rank: int, out: Path, settings: Any, **options: Any) -> list[dict[str, float]]:
    """What a run reports; ``settings`` None is the stock Trainer."""
    trainer = stock(out, **options) if settings is None else tiered(out, settings, **options)
    trainer.train()
    if settings is not None:
        trainer.engine.close()
    return reported(trainer)


@pytest.fixture(scope="module")
def plain(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, float]]]:
    return ranks.run(run, tmp_path_factory.mktemp("stock"), None, **STEPS)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("place", PLACES)
def test_two_ranks_report_what_the_stock_trainer_does(
    place: str, ranks: Pool, plain: list[list[dict[str, float]]], tmp_path: Path
) -> None:
    found = ranks.run(run, tmp_path / "out", config(place, tmp_path), **STEPS)
    for ours, theirs in zip(found, plain, strict=True):
        assert len(ours) == 22
        for entry, expected in zip(ours, theirs, strict=True):
            assert entry == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2])
def test_each_stage_does(
    stage: int, ranks: Pool, plain: list[list[dict[str, float]]], tmp_path: Path
) -> None:
    found = ranks.run(run, tmp_path / "out", config("device", tmp_path, stage), **STEPS)
    for entry, expected in zip(found[0], plain[0], strict=True):
        assert entry == pytest.approx(expected, rel=1e-5)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_half_precision_follows(
    half: str, ranks: Pool, plain: list[list[dict[str, float]]], tmp_path: Path
) -> None:
    found = ranks.run(run, tmp_path / "out", config("nvme", tmp_path), **STEPS, **{half: True})
    for entry, expected in zip(found[0], plain[0], strict=True):
        name = "loss" if "loss" in entry else "eval_loss"
        assert entry[name] == pytest.approx(expected[name], rel=0.01)


class Loaded(TrainerCallback):
    """The state of the engine when training begins."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.trainer: Any = None

    def on_train_begin(self, *args: Any, **_: Any) -> None:
        self.state = state(self.trainer)


def resume(
    rank: int, out: Path, settings: Any, saved: Path | bool | None, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, float]]]:
    """State at the begin and at the end, and the reports, of a run from ``saved``, or a new one that saves.

    ``saved`` True is the last complete checkpoint.
    """
    loaded = Loaded()
    given = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, **options}
    model = llama(seed=3 if saved is None else 99)
    loaded.trainer = tiered(out, settings, model, callbacks=[loaded], **given)
    loaded.trainer.train(resume_from_checkpoint=str(saved) if isinstance(saved, Path) else saved)
    left = state(loaded.trainer)
    loaded.trainer.engine.close()
    return loaded.state, left, reported(loaded.trainer)


ONE = {"per_device_train_batch_size": 4}
"""The options with which one rank has the batches of two."""


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_ranks(
    ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config("nvme", tmp_path)
    by_two = ranks.run(resume, tmp_path / "two", settings, None)[0]
    by_one = resume(0, tmp_path / "one", settings, None, **ONE)
    checkpoints = {name: tmp_path / name / "checkpoint-4" for name in ("one", "two")}
    # What the last step of the first half left is what either number of ranks begins with.
    once = resume(0, tmp_path / "one", settings, checkpoints["one"], **ONE)
    # The last checkpoint lacks a file of a rank: it is not taken.
    (tmp_path / "two/checkpoint-8/rng_state_1.pth").unlink()
    twice = ranks.run(resume, tmp_path / "two", settings, True)[0]
    assert different(once[1], by_one[1]) == different(twice[1], by_two[1]) == []
    crossed = {
        "one": ranks.run(resume, tmp_path / "crossed1", settings, checkpoints["one"])[0],
        "two": resume(0, tmp_path / "crossed2", settings, checkpoints["two"], **ONE),
    }
    assert different(crossed["one"][0], once[0]) == different(crossed["two"][0], twice[0]) == []
    for name, expected in (("one", by_one), ("two", by_two)):
        for entry, other in zip(crossed[name][2], expected[2], strict=True):
            assert entry == pytest.approx(other, rel=1e-5)


def predictions(rank: int, out: Path, settings: Any) -> Any:
    """Generated tokens, more on rank 1 than on rank 0."""
    trainer = seq2seq(TieredSeq2SeqTrainer, out, tiering_config=settings)
    trainer.train()
    made = trainer.predict(sentences(4, seed=9), max_new_tokens=3 + 4 * rank).predictions
    trainer.engine.close()
    return made


def test_ranks_generate_until_the_last_has_its_tokens(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(predictions, tmp_path / "out", config("nvme", tmp_path))
    assert first.shape == second.shape
    assert (first == second).all()


def saved(rank: int, out: Path, settings: Any) -> dict[str, Tensor]:
    trainer = tiered(out, settings)
    trainer.train()
    trainer.save_model(str(out / "model"))
    values = trainer.engine.state_dict()
    trainer.engine.close()
    return values


def test_two_ranks_save_one_model(ranks: Pool, tmp_path: Path) -> None:
    values, _ = ranks.run(saved, tmp_path / "out", config("nvme", tmp_path))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out/model").state_dict()
    assert different(loaded, values) == []
