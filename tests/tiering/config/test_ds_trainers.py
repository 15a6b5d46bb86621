"""Files that are written for a trainer load without its arguments, and each key fares as it does with them."""

from __future__ import annotations

from typing import Any

import pytest

from tiering.config.ds_config import KeyVerdict, LoadContext, Origin, examine

from .ds_shapes import content, shapes
from .trainer_shapes import CLIPPED, EITHER, REFUSED, SHAPES, shape

FOR_TRAINER = LoadContext(for_trainer=True)
ARGUMENTS: dict[str, Any] = {
    "learning_rate": 2e-5,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "warmup_steps": 100,
    "max_steps": 1000,
}
WITHOUT_AUTO = [name for name in shapes() if '"auto"' not in shapes()[name].path.read_text(encoding="utf-8")]


def test_all_files_for_a_trainer_load_but_those_that_split_tensors() -> None:
    assert (len(SHAPES), len(REFUSED)) == (60, 2)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_a_file_for_a_trainer_loads(name: str, ranks: int) -> None:
    config, report = examine(shape(name), world_size=ranks, context=FOR_TRAINER)
    assert {entry.key for entry in report.refused} == REFUSED.get(name, set())
    assert (config is None) == (name in REFUSED)
    by_trainer = [entry for entry in report.entries if entry.origin is Origin.TRAINER]
    assert {entry.value for entry in by_trainer} <= {"auto"}
    assert all(entry.note.startswith("filled by the trainer: ") for entry in by_trainer)
    assert bool(by_trainer) == (name != "lmflow zero3 evaluation")


@pytest.mark.parametrize("name", SHAPES)
def test_no_verdict_depends_on_the_numbers_of_the_trainer(name: str) -> None:
    enabled = {each: SHAPES[name].get(each, {}).get("enabled", False) for each in ("bf16", "fp16")}
    # One precision: the one that the file sets, or else fp16, whose section has keys of its own.
    precision = {each: enabled[each] is True for each in enabled}
    if not any(precision.values()):
        precision["fp16" if enabled["fp16"] == "auto" else "bf16"] = True
    _, unknown = examine(shape(name), context=FOR_TRAINER)
    _, known = examine(shape(name), context=LoadContext(arguments=ARGUMENTS | precision, strict=False))
    expected = {entry.key: entry.verdict for entry in known.entries}
    assert {entry.key: entry.verdict for entry in unknown.entries} == expected
    filled = {entry.verdict for entry in unknown.entries if entry.origin is Origin.TRAINER}
    assert filled <= {KeyVerdict.HONOURED, KeyVerdict.MAPPED}


@pytest.mark.parametrize("name", WITHOUT_AUTO)
def test_a_file_without_auto_gets_the_same_report(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = shapes()[name]
    for variable, value in given.environment.items():
        monkeypatch.setenv(variable, value)
    reports = [
        examine(
            content(given),
            world_size=given.ranks,
            context=LoadContext(given.hidden_size, given.dtype, for_trainer=for_trainer),
        )[1]
        for for_trainer in (False, True)
    ]
    assert reports[0].entries == reports[1].entries and reports[0].outcome == reports[1].outcome


def test_what_the_trainer_decides_is_not_claimed() -> None:
    _, report = examine(shape("trainer zero3"), world_size=4, context=FOR_TRAINER)
    assert report.outcome == (
        "batch of the trainer, precision of the trainer, ZeRO stage 3, parameters on cpu, optimizer state on cpu,"
        " AdamW, WarmupLR, clipping of the trainer"
    )
    notes = {entry.key: entry.note for entry in report.entries}
    assert notes["optimizer.params.betas"] == "filled by the trainer: adam_beta1, adam_beta2"
    assert notes["train_batch_size"].endswith(": per_device_train_batch_size, gradient_accumulation_steps")
    _, partial = examine(shape("fastchat s2"), context=FOR_TRAINER)
    assert "gradient_accumulation_steps" not in {entry.key for entry in partial.defaults}


def test_arguments_that_are_known_are_filled_in() -> None:
    arguments = {
        "learning_rate": 0.25,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
    }
    known = LoadContext(arguments=arguments, for_trainer=True)
    config, report = examine(shape("trainer zero2"), context=known)
    assert config is not None and config.optimizer is not None
    assert (config.optimizer.lr, config.train_batch_size) == (0.25, 6)
    assert report.outcome.startswith("batch 6 = 3 x 2 micro-batches, precision of the trainer")
    entries = {entry.key: entry for entry in report.entries}
    assert entries["optimizer.params.lr"].origin is Origin.AUTO
    assert entries["train_micro_batch_size_per_gpu"].value == 3
    assert entries["optimizer.params.betas"].origin is Origin.TRAINER


def test_a_whole_batch_in_the_file_leaves_its_factors_to_the_trainer() -> None:
    settings = shape("trainer zero2") | {"train_batch_size": 48}
    config, report = examine(settings, world_size=8, context=FOR_TRAINER)
    assert config is not None and config.train_batch_size == 48
    origins = {entry.key: entry.origin for entry in report.entries}
    assert origins["train_batch_size"] is Origin.FILE
    assert origins["train_micro_batch_size_per_gpu"] is Origin.TRAINER


@pytest.mark.parametrize(
    ("changes", "key", "note"),
    [
        ({"steps_per_print": "auto"}, "steps_per_print", "only for keys that a trainer fills in"),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage", "only for keys that a trainer"),
        ({"gradient_cliping": 1}, "gradient_cliping", "did you mean gradient_clipping?"),
        ({"optimizer": {"type": "Lamb", "params": {"lr": "auto"}}}, "optimizer.type", "changes the training"),
    ],
)
def test_a_trainer_does_not_excuse_other_problems(changes: dict[str, Any], key: str, note: str) -> None:
    config, report = examine(EITHER | CLIPPED | changes, context=FOR_TRAINER)
    assert config is None and [(entry.key, note in entry.note) for entry in report.refused] == [(key, True)]
