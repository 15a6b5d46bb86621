"""The cases of transformers' tests of its Trainer with DeepSpeed, by their names, for a Trainer on the engine.

Not repeated are those that are elsewhere here under other names: test_hf_ds_config_mismatch, test_load_best_model,
test_can_resume_training_errors and test_hyperparameter_search (test_transformers.py, test_checkpoints.py), and tests of
models that are built or loaded under ZeRO-3 (test_models.py).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from tiering.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint

from .trainers import ADAMW, config, different, llama, reported, state, tiered

SCHEDULE = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
BATCH = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
}
HALVES = {
    "fp16": {"enabled": "auto", "initial_scale_power": 10},
    "bf16": {"enabled": "auto"},
}
COMBINATIONS = [
    (2, "fp16"),
    (3, "bf16"),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, "bf16"), (3, "fp16"))),
]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def ds_config(stage: int, tmp_path: Path, place: str = "device", **sections: Any) -> dict[str, Any]:
    """A configuration as those of transformers' tests: everything is "auto"; a section None is left out."""
    given = {"optimizer": ADAMW, "scheduler": SCHEDULE} | sections
    settings = config(place, tmp_path, stage) | BATCH | HALVES | given
    return {name: section for name, section in settings.items() if section is not None}


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_plugin_from_config(stage: int, tmp_path: Path) -> None:
    trainer = tiered(tmp_path / "out", ds_config(stage, tmp_path))
    trainer.train()
    assert trainer.engine.zero_optimization_stage() == stage
    trainer.engine.close()


def test_auto_value_resolution(tmp_path: Path) -> None:
    settings = ds_config(2, tmp_path)
    trainer = tiered(tmp_path / "out", settings, bf16=True, learning_rate=3e-4, per_device_train_batch_size=4)
    trainer.train()
    engine = trainer.engine
    assert {key: engine.config[key] for key in BATCH} == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
    }
    assert engine.config["optimizer"]["params"]["lr"] == 3e-4
    assert (engine.config["bf16"]["enabled"], engine.config["fp16"]["enabled"]) == (True, False)
    assert max(entry["learning_rate"] for entry in reported(trainer)) == 3e-4
    # The user's mapping is unchanged.
    assert settings["optimizer"]["params"]["lr"] == "auto"
    engine.close()


@pytest.mark.parametrize("half", ["bf16", "fp16", ""])
def test_ds_config_dtype_resolution(half: str, tmp_path: Path) -> None:
    trainer = tiered(tmp_path / "out", ds_config(2, tmp_path), **({half: True} if half else {}))
    trainer.train()
    assert {param.dtype for param in trainer.model.parameters()} == {DTYPES[half or "fp32"]}
    trainer.engine.close()


def test_ds_config_file_path_vs_dict_equivalent(tmp_path: Path) -> None:
    settings = ds_config(3, tmp_path)
    file = tmp_path / "ds_config.json"
    file.write_text("// a comment\n" + json.dumps(settings))
    states = []
    for given in (settings, str(file), file):
        trainer = tiered(tmp_path / "out", given)
        trainer.train()
        states.append(state(trainer))
        trainer.engine.close()
    assert different(states[0], states[1]) == different(states[0], states[2]) == []


def test_ds_config_auto_vs_missing_fields(tmp_path: Path) -> None:
    """Unlike transformers, which leaves keys that the file lacks to DeepSpeed's defaults: the loop is the Trainer's."""
    whole = ds_config(2, tmp_path)
    states = []
    for settings in (whole, {name: value for name, value in whole.items() if name not in {*BATCH, *HALVES}}):
        trainer = tiered(tmp_path / "out", settings, max_grad_norm=0.5)
        trainer.train()
        assert trainer.engine.get_batch_info() == (4, 2, 2)
        assert trainer.engine.gradient_clipping() == 0.5
        states.append(state(trainer))
        trainer.engine.close()
    assert different(*states) == []


def test_ds_config_object(tmp_path: Path) -> None:
    """One configuration after another in one process, and a trainer that never trains between them."""
    for stage in (3, 2, 3):
        tiered(tmp_path / "out", ds_config(5 - stage, tmp_path), fp16=True)
        trainer = tiered(tmp_path / "out", ds_config(stage, tmp_path), fp16=True)
        trainer.train()
        assert trainer.engine.zero_optimization_stage() == stage
        trainer.engine.close()


@pytest.mark.parametrize(("stage", "half"), COMBINATIONS)
def test_basic_training(stage: int, half: str, tmp_path: Path) -> None:
    trainer = tiered(tmp_path / "out", ds_config(stage, tmp_path), learning_rate=1e-2, **{half: True})
    trainer.train()
    assert reported(trainer)[-1]["loss"] < reported(trainer)[0]["loss"]
    trainer.engine.close()


@pytest.mark.parametrize("sections", [*itertools.product([None, ADAMW], [None, SCHEDULE])])
def test_optimizer_scheduler_combos(sections: tuple[Any, Any], tmp_path: Path) -> None:
    optimizer, schedule = sections
    trainer = tiered(
        tmp_path / "out", ds_config(2, tmp_path, optimizer=optimizer, scheduler=schedule), bf16=True
    )
    before = llama().lm_head.weight
    trainer.train()
    assert type(trainer.lr_scheduler).__name__ == ("WarmupLR" if schedule else "LambdaLR")
    # The Trainer's own optimizer decays norms and biases in a group of their own.
    assert len(trainer.optimizer.param_groups) == (1 if optimizer else 2)
    assert not trainer.engine.get_fp32_parameter("lm_head.weight").equal(before)
    trainer.engine.close()


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("stage", "half"), [*COMBINATIONS, (2, "fp32"), (3, "fp32")])
def test_gradient_accumulation(stage: int, half: str, tmp_path: Path) -> None:
    left = []
    for batch, accumulated in ((8, 1), (2, 4)):
        trainer = tiered(
            tmp_path / "out",
            ds_config(stage, tmp_path),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulated,
            **({half: True} if half != "fp32" else {}),
        )
        trainer.train()
        left.append((reported(trainer), trainer.engine.get_fp32_parameter("lm_head.weight")))
        trainer.engine.close()
    (whole, weight), (parts, accumulated_weight) = left
    tolerance = 1e-5 if half == "fp32" else 1e-2
    for entry, expected in zip(parts, whole, strict=True):
        assert entry["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert torch.allclose(weight, accumulated_weight, atol=1e-5 if half == "fp32" else 1e-3)


@pytest.mark.parametrize("optimizer", [None, ADAMW], ids=["own", "files"])
@pytest.mark.parametrize("stage", [2, 3])
def test_optimizer_with_cpu_offload(stage: int, optimizer: Any, tmp_path: Path) -> None:
    settings = ds_config(stage, tmp_path, optimizer=optimizer)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    trainer = tiered(tmp_path / "out", settings, bf16=True)
    trainer.train()
    assert trainer.engine.zero_cpu_offload()
    assert reported(trainer)[-1]["loss"] < reported(trainer)[0]["loss"]
    trainer.engine.close()


def test_stage3_nvme_offload(tmp_path: Path) -> None:
    settings = ds_config(3, tmp_path, "nvme", tiering={"cache_in_host": False})
    settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    trainer = tiered(tmp_path / "out", settings, fp16=True)
    trainer.train()
    nvme = next(tier for tier in trainer.engine.snapshot().tiers if tier.name == "nvme")
    assert nvme.used > 0
    trainer.engine.close()


@pytest.mark.parametrize(("stage", "half"), COMBINATIONS)
def test_early_get_last_lr(stage: int, half: str, tmp_path: Path) -> None:
    """The rate is logged before the first update: in fp16, the first steps overflow."""
    settings = ds_config(
        stage, tmp_path, fp16={"enabled": "auto", "initial_scale_power": 32, "hysteresis": 1}
    )
    trainer = tiered(tmp_path / "out", settings, max_steps=1, **{half: True})
    trainer.train()
    assert reported(trainer)[0]["learning_rate"] == trainer.lr_scheduler.get_last_lr()[0] or half == "bf16"
    assert trainer.engine.skipped_steps == (1 if half == "fp16" else 0)
    trainer.engine.close()


@pytest.mark.parametrize(("stage", "half"), COMBINATIONS)
def test_save_checkpoints(stage: int, half: str, tmp_path: Path) -> None:
    settings = ds_config(stage, tmp_path)
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, half: True}
    trainer = tiered(tmp_path / "out", settings, **options)
    trainer.train()
    for step in (2, 4, 6):
        folder = tmp_path / f"out/checkpoint-{step}"
        for name in ("model.safetensors", "training_args.bin", "trainer_state.json", "config.json"):
            assert (folder / name).is_file()
        assert (folder / "tiering/checkpoint.json").is_file()
    again = tiered(tmp_path / "out", settings, llama(99), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-4"))
    assert different(state(again), state(trainer)) == []
    again.engine.close()
    trainer.engine.close()


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("stage", "half", "optimizer", "schedule"),
    [
        (3, "bf16", None, None),
        (2, "fp16", ADAMW, SCHEDULE),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in itertools.product([2, 3], ["fp16", "bf16"], [None, ADAMW], [None, SCHEDULE])
        ),
    ],
)
def test_can_resume_training_normal(
    stage: int, half: str, optimizer: Any, schedule: Any, tmp_path: Path
) -> None:
    settings = ds_config(stage, tmp_path, optimizer=optimizer, scheduler=schedule)
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "max_steps": 20, half: True}
    trainer = tiered(tmp_path / "out", settings, **options)
    trainer.train()
    # A pass over the data has 16 updates. The last resumption is by the same trainer.
    again = None
    for step in (5, 15, 15):
        if again is None or step == 5:
            again = tiered(tmp_path / "out", settings, llama(99), **options)
        again.train(resume_from_checkpoint=str(tmp_path / f"out/checkpoint-{step}"))
        assert different(state(again), state(trainer)) == []
        assert reported(again) == reported(trainer)
    again.engine.close()
    trainer.engine.close()


@pytest.mark.parametrize(("stage", "half"), COMBINATIONS)
def test_load_state_dict_from_zero_checkpoint(stage: int, half: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 6, half: True}
    trainer = tiered(tmp_path / "out", ds_config(stage, tmp_path), **options)
    trainer.train()
    checkpoint = get_last_checkpoint(str(tmp_path / "out"))
    model = load_state_dict_from_zero_checkpoint(llama(99), checkpoint)
    assert different(model.state_dict(), trainer.engine.master_state_dict()) == []
    trainer.engine.close()
