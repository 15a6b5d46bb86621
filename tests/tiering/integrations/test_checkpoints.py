"""Checkpoints of a Trainer on the engine: saved, resumed, rotated, and read by transformers."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tiering.errors import CheckpointError
from tiering.integrations._trainer_checkpoints import last_complete

from .trainers import ADAMW, PLACES, config, different, llama, reported, state, tiered

SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto", "total_num_steps": "auto"},
}


SECTIONS: dict[str, dict[str, Any]] = {"own": {}, "files": {"optimizer": ADAMW, "scheduler": SCHEDULE}}


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("place", "sections"),
    [
        pytest.param(
            place,
            SECTIONS[name],
            id=f"{name}-{place}",
            # How the optimizer is made, and where its state is, are independent: one pair is enough each time.
            marks=[] if name == "own" or place == "nvme" else [pytest.mark.slow],
        )
        for name in SECTIONS
        for place in PLACES
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(place: str, sections: dict[str, Any], tmp_path: Path) -> None:
    settings = config(place, tmp_path, **sections)
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 20,
        "num_train_epochs": 2,
    }
    # 16 updates in a pass over the data: the resumed run begins in the first pass and ends in the second.
    whole = tiered(tmp_path / "out", settings, **options)
    whole.train()
    expected, figures = state(whole), reported(whole)
    whole.engine.close()
    again = tiered(tmp_path / "out", settings, llama(seed=99), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-6"))
    assert different(state(again), expected) == []
    assert reported(again) == figures
    again.engine.close()


def test_the_same_trainer_resumes(tmp_path: Path) -> None:
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path), save_strategy="steps", save_steps=2)
    trainer.train()
    expected = state(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    assert different(state(trainer), expected) == []
    trainer.engine.close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("half", ["", "bf16"])
def test_transformers_loads_what_save_model_wrote(place: str, half: str, tmp_path: Path) -> None:
    options = {half: True} if half else {}
    trainer = tiered(tmp_path / "out", config(place, tmp_path), **options)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(loaded) is LlamaForCausalLM
    assert {param.dtype for param in loaded.parameters()} == {torch.bfloat16 if half else torch.float32}
    assert different(loaded.state_dict(), trainer.engine.state_dict()) == []
    assert (tmp_path / "model/training_args.bin").is_file()
    trainer.engine.close()


def test_save_model_before_anything_else_writes_the_first_weights(tmp_path: Path) -> None:
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path))
    trainer.save_model()
    assert (
        different(LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict(), llama().state_dict()) == []
    )
    trainer.engine.close()


def test_a_checkpoint_is_a_model_too(tmp_path: Path) -> None:
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path), save_strategy="steps", save_steps=3)
    trainer.train()
    folder = tmp_path / "out/checkpoint-6"
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors", "training_args.bin"),
        *("trainer_state.json", "scheduler.pt", "rng_state.pth", "tiering", "latest"),
    }
    assert different(LlamaForCausalLM.from_pretrained(folder).state_dict(), trainer.engine.state_dict()) == []
    trainer.engine.close()


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    trainer = tiered(
        tmp_path / "out", config("cpu", tmp_path), save_strategy="steps", save_steps=1, save_total_limit=2
    )
    trainer.train()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-5", "checkpoint-6"]
    trainer.engine.close()


@pytest.mark.one_of(3)
@pytest.mark.parametrize("only_model", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_the_best_model_is_loaded_at_the_end(place: str, only_model: bool, tmp_path: Path) -> None:
    # The rate is far too high: the first evaluation is the best one.
    trainer = tiered(
        tmp_path / "out",
        config(place, tmp_path),
        learning_rate=0.5,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        save_only_model=only_model,
        load_best_model_at_end=True,
    )
    trainer.train()
    best = min(trainer.state.log_history, key=lambda entry: entry.get("eval_loss", 1e9))
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"out/checkpoint-{best['step']}")
    saved = LlamaForCausalLM.from_pretrained(trainer.state.best_model_checkpoint).state_dict()
    assert best["step"] < 6
    assert different(saved, trainer.engine.state_dict()) == []
    assert trainer.evaluate()["eval_loss"] == best["eval_loss"]
    trainer.engine.close()


CUTS = {
    "trainer_state.json": ("trainer_state.json is missing", "trainer_state.json is not valid JSON"),
    "scheduler.pt": ("scheduler.pt is missing", "scheduler.pt is truncated"),
    "rng_state.pth": ("rng_state.pth is missing", "rng_state.pth is truncated"),
    "tiering/checkpoint.json": ("tiering/checkpoint.json is missing", "tiering/checkpoint.json is damaged"),
    "tiering/exp_avg-00001-of-00001.safetensors": (
        "exp_avg-00001-of-00001.safetensors: it cannot be read: No such file",
        "exp_avg-00001-of-00001.safetensors: it has ",
    ),
}
"""What a run says of a checkpoint whose file is missing, and of one whose file is cut."""


def test_a_run_resumes_from_the_last_complete_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config("nvme", tmp_path)
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    trainer = tiered(tmp_path / "out", settings, **options)
    trainer.train()
    expected = state(trainer)
    trainer.engine.close()
    first, second, last = (str(tmp_path / f"out/checkpoint-{step}") for step in (2, 4, 6))
    assert last_complete([first, second, last]) == (last, [])
    for name, problems in CUTS.items():
        file = Path(last) / name
        content = file.read_bytes()
        for left, problem in zip((None, content[: len(content) // 2]), problems, strict=True):
            file.unlink() if left is None else file.write_bytes(left)
            found, (message,) = last_complete([first, second, last])
            assert found == second
            assert message.startswith(f"{last}: ") and problem in message
        file.write_bytes(content)
    # As a kill leaves it while the Trainer saves.
    (Path(last) / "trainer_state.json").write_bytes(b"")
    shutil.rmtree(Path(last) / "tiering")
    again = tiered(tmp_path / "out", settings, llama(seed=99), **options)
    with caplog.at_level(logging.WARNING, "tiering.integrations"):
        again.train(resume_from_checkpoint=True)
    assert (
        f"resuming from {second}, because the save of a later checkpoint was interrupted:"
        f" {last}: tiering/checkpoint.json is missing"
    ) in caplog.text
    assert different(state(again), expected) == []
    # A second save in a folder, interrupted, is no complete checkpoint.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(again.engine, "save_checkpoint", lambda *_, **__: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            again.train(resume_from_checkpoint=second)
    assert last_complete([first, second, last])[1] == [f"{last}: trainer_state.json is missing"]
    for folder in (first, second):
        (Path(folder) / "scheduler.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .*out is complete: .*checkpoint-6: trainer_st"
    ):
        again.train(resume_from_checkpoint=True)
    again.engine.close()


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path))
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match=r"checkpoint-5-bogus' is not a directory; pass a folder"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-5-bogus"))
    llama().save_pretrained(tmp_path / "weights")
    with pytest.raises(CheckpointError, match="to start a new run from the weights in that folder"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "weights"))


def test_save_only_model_writes_no_state(tmp_path: Path) -> None:
    trainer = tiered(
        tmp_path / "out", config("nvme", tmp_path), save_strategy="steps", save_steps=6, save_only_model=True
    )
    trainer.train()
    names = {path.name for path in (tmp_path / "out/checkpoint-6").iterdir()}
    assert "model.safetensors" in names
    assert "tiering" not in names
    trainer.engine.close()
