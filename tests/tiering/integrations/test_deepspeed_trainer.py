"""transformers' tests of its Trainer with DeepSpeed, under the shim: the stock Trainer with its own options.

transformers ships no tests. These are written after the names of its tests/trainer/distributed/
test_trainer_distributed_deepspeed.py of November 2026, and assert what those assert:

- the configuration (this file): test_hf_ds_config_mismatch, test_deepspeed_plugin_from_config,
  test_auto_value_resolution, test_ds_config_dtype_resolution, test_ds_config_file_path_vs_dict_equivalent,
  test_ds_config_no_optimizer_no_scheduler, test_ds_config_auto_vs_missing_fields, test_ds_config_object;
- one process (this file): test_mixed_precision_model_and_optimizer_dtypes (by safe_get_full_fp32_param: this engine has
  no flat partitions of the masters), test_basic_training, test_optimizer_scheduler_combos, test_gradient_accumulation,
  test_optimizer_with_cpu_offload, test_stage3_nvme_offload, test_early_get_last_lr, test_save_checkpoints (the files of
  this engine in place of *.pt), test_can_resume_training_errors, test_can_resume_training_normal,
  test_load_state_dict_from_zero_checkpoint, test_load_best_model, test_hyperparameter_search;
- models under ZeRO-3 (test_deepspeed_models.py): test_init_zero3, test_from_config_zero3_weight_init,
  test_init_zero3_missing_params, test_arange_bf16, test_init_zero3_moe_weight_conversion,
  test_init_zero3_variance_scaling, test_resize_token_embeddings_zero3;
- architectures (test_deepspeed_architectures.py): test_zero_to_fp32 (models made here, in place of the hub's);
- two ranks (test_deepspeed_ranks.py): test_torchrun_accelerate_deepspeed_zero2_env_parity and its zero3,
  test_training, test_training_mixed_precision, test_training_with_gradient_accumulation,
  test_training_and_can_resume_normally, test_basic_run_with_cpu_offload, test_eval.

Not applicable: test_alst_ulysses_sp (this engine has no sequence parallelism). test_deepspeed_cases.py has most of
these names for TieringTrainer.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from tiering.errors import EngineStateError

from .line_trainers import WARMUP, arguments, ds_config, line, line_trainer
from .shimmed import forget_process, under_shim
from .trainers import ADAMW, config, llama, reported, sentences, t5

pytestmark = pytest.mark.slow

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "": torch.float32}
COMBINATIONS = [*itertools.product([2, 3], ["bf16", "fp16"])]


@under_shim()
def test_hf_ds_config_mismatch(tmp_path: Path) -> None:
    settings = ds_config(
        2,
        train_micro_batch_size_per_gpu=4,
        train_batch_size=1000,
        gradient_accumulation_steps=4,
        gradient_clipping=1.1,
        fp16={"enabled": False},
    )
    settings["optimizer"]["params"]["betas"] = [0.8, 0.89]
    trainer = line_trainer(
        tmp_path,
        settings,
        fp16=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        adam_beta1=0.9,
        adam_beta2=0.99,
    )
    with pytest.raises(ValueError, match="mismatch TrainingArguments") as raised:
        trainer.train()
    for key in (
        *("per_device_train_batch_size", "train_batch_size", "gradient_accumulation_steps"),
        *("max_grad_norm", "betas", "fp16"),
    ):
        assert key in str(raised.value)


@pytest.mark.parametrize("stage", [2, 3])
@under_shim()
def test_deepspeed_plugin_from_config(stage: int, tmp_path: Path) -> None:
    assert arguments(tmp_path, ds_config(stage)).deepspeed_plugin.zero_stage == stage


@under_shim()
def test_auto_value_resolution(tmp_path: Path) -> None:
    options = {"learning_rate": 3e-4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    args = arguments(tmp_path, ds_config(2), bf16=True, **options)
    resolved = args.hf_deepspeed_config.config
    assert resolved["train_micro_batch_size_per_gpu"] == 4
    assert resolved["gradient_accumulation_steps"] == 2
    assert resolved["train_batch_size"] == 8
    assert resolved["optimizer"]["params"]["lr"] == 3e-4
    assert (resolved["bf16"]["enabled"], resolved["fp16"]["enabled"]) == (True, False)
    # The engine has these values.
    trainer = line_trainer(tmp_path, ds_config(2), bf16=True, **options)
    trainer.train()
    engine = trainer.model_wrapped
    assert engine.get_batch_info() == (8, 4, 2)
    assert engine.bfloat16_enabled()
    assert not engine.fp16_enabled()


@pytest.mark.parametrize("half", DTYPES)
@under_shim()
def test_ds_config_dtype_resolution(half: str, tmp_path: Path) -> None:
    options = {half: True} if half else {}
    assert arguments(tmp_path, ds_config(2), **options).hf_deepspeed_config.dtype() is DTYPES[half]


@under_shim()
def test_ds_config_file_path_vs_dict_equivalent(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(ds_config(3)))
    one, other = arguments(tmp_path, ds_config(3)), arguments(tmp_path, str(file))
    assert one.hf_deepspeed_config.config == other.hf_deepspeed_config.config
    assert one.deepspeed_plugin.zero_stage == other.deepspeed_plugin.zero_stage == 3


@under_shim()
def test_ds_config_no_optimizer_no_scheduler(tmp_path: Path) -> None:
    trainer = line_trainer(tmp_path, ds_config(2, "optimizer", "scheduler"), fp16=True)
    resolved = trainer.args.hf_deepspeed_config.config
    assert resolved.keys().isdisjoint({"optimizer", "scheduler"})
    trainer.train()
    # transformers makes two groups: with and without weight decay.
    assert [len(group["params"]) for group in trainer.optimizer.param_groups] == [2, 0]
    assert type(trainer.lr_scheduler).__name__ == "LambdaLR"


@under_shim()
def test_ds_config_auto_vs_missing_fields(tmp_path: Path) -> None:
    options = {"learning_rate": 5e-5, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    batch = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    auto = arguments(tmp_path, ds_config(2), **options)
    resolved = auto.hf_deepspeed_config.config
    assert [resolved[name] for name in batch] == [4, 2, 8]
    assert resolved["optimizer"]["params"]["lr"] == 5e-5
    missing = arguments(tmp_path, ds_config(2, *batch, "gradient_clipping"), **options)
    resolved = missing.hf_deepspeed_config.config
    assert resolved.keys().isdisjoint({batch[0], batch[2], "gradient_clipping"})
    # accelerate sets a default of its own.
    assert resolved.get("gradient_accumulation_steps") != 2
    assert auto.deepspeed_plugin.zero_stage == missing.deepspeed_plugin.zero_stage == 2


@pytest.mark.parametrize("stage", [2, 3])
@under_shim()
def test_mixed_precision_model_and_optimizer_dtypes(stage: int, tmp_path: Path) -> None:
    from deepspeed.utils import safe_get_full_fp32_param

    trainer = line_trainer(tmp_path, ds_config(stage), bf16=True, learning_rate=0.1)
    trainer.train()
    for param in trainer.model.parameters():
        assert param.dtype == torch.bfloat16
        master = safe_get_full_fp32_param(param)
        assert master.dtype == torch.float32
        # The master has digits that the parameter lacks.
        assert not master.equal(master.bfloat16().float())
        assert master.bfloat16().equal(param)


@under_shim()
def test_ds_config_object(tmp_path: Path) -> None:
    from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled

    options: dict[str, Any] = {"count": 8, "fp16": True}
    trainer = line_trainer(tmp_path, ds_config(3), **options)
    assert is_deepspeed_zero3_enabled()
    trainer = line_trainer(tmp_path, ds_config(3), **options)
    trainer.train()
    assert is_deepspeed_zero3_enabled()
    trainer = line_trainer(tmp_path, ds_config(2), **options)
    assert not is_deepspeed_zero3_enabled()
    assert deepspeed_config()["zero_optimization"]["stage"] == 2
    trainer.accelerator.state._reset_state()
    # transformers remembers the configuration as long as the arguments live.
    del trainer
    assert not is_deepspeed_zero3_enabled()
    assert not deepspeed_config()


@pytest.mark.parametrize(("stage", "half"), COMBINATIONS)
@under_shim()
def test_basic_training(stage: int, half: str, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(ds_config(stage)))
    trainer = line_trainer(tmp_path, str(file), learning_rate=0.1, logging_steps=1, **{half: True})
    trainer.train()
    assert type(trainer.model_wrapped).__module__.partition(".")[0] == "zero3"
    assert trainer.model_wrapped.zero_optimization_stage() == stage
    assert reported(trainer)[-1]["loss"] < 0.5 * reported(trainer)[0]["loss"]


@pytest.mark.parametrize("without", [(), ("optimizer",), ("scheduler",), ("optimizer", "scheduler")])
@under_shim()
def test_optimizer_scheduler_combos(without: tuple[str, ...], tmp_path: Path) -> None:
    settings = ds_config(2, *without)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "none"}
    trainer = line_trainer(tmp_path, settings, bf16=True)
    trainer.train()
    assert trainer.model.a.item() != 0
    own_schedule = (
        trainer.lr_scheduler if without == ("optimizer", "scheduler") else trainer.lr_scheduler.scheduler
    )
    assert type(own_schedule).__name__ == ("LambdaLR" if "scheduler" in without else "WarmupLR")
    assert len(trainer.optimizer.param_groups) == (2 if "optimizer" in without else 1)


@pytest.mark.parametrize(("stage", "half"), COMBINATIONS)
@under_shim()
def test_gradient_accumulation(stage: int, half: str, tmp_path: Path) -> None:
    ends = []
    # With this scale no step is an overflow.
    settings = ds_config(stage, fp16={"enabled": "auto", "initial_scale_power": 4})
    for size, accumulated in ((16, 1), (4, 4)):
        options = {
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": accumulated,
            half: True,
        }
        trainer = line_trainer(tmp_path, settings, learning_rate=1e-3, **options)
        loss = trainer.train().training_loss
        masters = [trainer.model_wrapped.get_fp32_parameter(name).item() for name in "ab"]
        ends.append((loss, *masters))
        assert masters[0] != 0
    assert ends[0][1:] == pytest.approx(ends[1][1:], abs=1e-4)
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-3)


@pytest.mark.parametrize("without", [(), ("optimizer",)], ids=["of the file", "own"])
@pytest.mark.parametrize("stage", [2, 3])
@under_shim()
def test_optimizer_with_cpu_offload(stage: int, without: tuple[str, ...], tmp_path: Path) -> None:
    settings = ds_config(stage, *without)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if without:
        settings["zero_force_ds_cpu_optimizer"] = False
    trainer = line_trainer(tmp_path, settings, bf16=True, learning_rate=0.1, logging_steps=1)
    trainer.train()
    assert trainer.model_wrapped.zero_cpu_offload()
    assert reported(trainer)[-1]["loss"] < 0.5 * reported(trainer)[0]["loss"]


@under_shim()
def test_stage3_nvme_offload(tmp_path: Path) -> None:
    settings = ds_config(3, tiering={"cache_in_host": False})
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    settings["zero_optimization"] |= {"offload_optimizer": place, "offload_param": place}
    trainer = line_trainer(tmp_path, settings, fp16=True, learning_rate=0.1, logging_steps=1)
    trainer.train()
    nvme = next(tier for tier in trainer.model_wrapped.snapshot().tiers if tier.name == "nvme")
    assert nvme.used > 0
    assert reported(trainer)[-1]["loss"] < reported(trainer)[0]["loss"]


@pytest.mark.parametrize(("stage", "half"), COMBINATIONS)
@under_shim()
def test_early_get_last_lr(stage: int, half: str, tmp_path: Path) -> None:
    """In fp16, the first steps overflow: the rate is logged before the schedule has run."""
    options = {"count": 8, "per_device_train_batch_size": 8, "logging_steps": 1, half: True}
    settings = ds_config(stage, fp16={"enabled": "auto", "initial_scale_power": 32, "hysteresis": 1})
    trainer = line_trainer(tmp_path, settings, **options)
    trainer.train()
    assert all("learning_rate" in entry for entry in reported(trainer))
    # Here the optimizer has run in bf16 alone.
    assert (trainer.model.a.item() == 0) == (half == "fp16")
    assert trainer.model_wrapped.skipped_steps == (3 if half == "fp16" else 0)


@pytest.mark.parametrize(("stage", "half"), COMBINATIONS)
@under_shim()
def test_save_checkpoints(stage: int, half: str, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 5, "learning_rate": 0.1, half: True}
    trainer = line_trainer(tmp_path, ds_config(stage), **options)
    trainer.train()
    for step in (5, 10, 15, 20):
        folder = tmp_path / f"checkpoint-{step}"
        for name in ("model.safetensors", "training_args.bin", "trainer_state.json", "config.json"):
            assert (folder / name).is_file()
        assert (folder / f"global_step{step}/checkpoint.json").is_file()
    checkpoint = get_last_checkpoint(str(tmp_path))
    again = line_trainer(tmp_path, ds_config(stage), **options)
    again.train(resume_from_checkpoint=checkpoint)
    assert line(again) == line(trainer)


@pytest.mark.parametrize(("stage", "half"), COMBINATIONS)
@under_shim()
def test_can_resume_training_errors(stage: int, half: str, tmp_path: Path) -> None:
    trainer = line_trainer(tmp_path, ds_config(stage), **{half: True})
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(FileNotFoundError, match="checkpoint-5-bogus"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5-bogus"))


@pytest.mark.parametrize(
    ("stage", "half", "without"),
    [
        (*each, tuple(itertools.compress(("optimizer", "scheduler"), left_out)))
        for each in COMBINATIONS
        for left_out in itertools.product([False, True], repeat=2)
    ],
)
@under_shim()
def test_can_resume_training_normal(stage: int, half: str, without: tuple[str, ...], tmp_path: Path) -> None:
    # With this scale no step is an overflow.
    settings = ds_config(stage, *without, fp16={"enabled": "auto", "initial_scale_power": 1})
    options = {"count": 128, "save_strategy": "steps", "save_steps": 5, "learning_rate": 0.1, half: True}
    trainer = line_trainer(tmp_path, settings, **options)
    trainer.train()
    ends = line(trainer), _comparable(trainer)
    for step in (5, 15):
        again = line_trainer(tmp_path, settings, **options)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert (line(again), _comparable(again)) == ends
    # DeepSpeed's own engine cannot: the same Trainer once more.
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert (line(again), _comparable(again)) == ends


def _comparable(trainer: Any) -> dict[str, Any]:
    """The state of a Trainer without what differs from run to run."""
    found = dataclasses.asdict(trainer.state)
    history = found.pop("log_history")
    varying = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss"}
    found["log_history"] = [
        # A norm that is no number is that of an overflow.
        {name: str(value) for name, value in entry.items() if name not in varying}
        for entry in history
    ]
    return found


@pytest.mark.parametrize(("stage", "half"), COMBINATIONS)
@under_shim()
def test_load_state_dict_from_zero_checkpoint(stage: int, half: str, tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint

    options: dict[str, Any] = {"count": 4, "per_device_train_batch_size": 4, "num_train_epochs": 1}
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 0.1, half: True}
    trainer = line_trainer(tmp_path, ds_config(stage), **options, **saves)
    trainer.train()
    expected, before = line(trainer), _comparable(trainer)
    model = load_state_dict_from_zero_checkpoint(trainer.model, get_last_checkpoint(str(tmp_path)))
    assert (model.a.item(), model.b.item()) == expected
    assert _comparable(trainer) == before


@pytest.mark.parametrize("stage", [2, 3])
@under_shim()
def test_load_best_model(stage: int, tmp_path: Path) -> None:
    from transformers import Trainer

    args = arguments(
        tmp_path,
        ds_config(stage, "optimizer", "scheduler"),
        max_steps=4,
        learning_rate=0.5,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        bf16=True,
    )
    data = {"train_dataset": sentences(64), "eval_dataset": sentences(8, seed=8)}
    trainer = Trainer(t5(), args, **data)
    trainer.train()
    losses = [entry["eval_loss"] for entry in reported(trainer) if "eval_loss" in entry]
    # At this rate a later model is worse than an earlier one.
    assert min(losses) < losses[-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)


@pytest.mark.parametrize("optimizer", ["own", "of the file"])
@pytest.mark.parametrize(("stage", "place"), [(2, "device"), (3, "device"), (3, "nvme")])
@under_shim()
def test_evaluation_may_come_first_and_training_twice(
    stage: int, place: str, optimizer: str, tmp_path: Path
) -> None:
    """With DeepSpeed's own engine, transformers fails here."""
    from transformers import Trainer

    decaying = {"type": "WarmupDecayLR", "params": WARMUP["params"] | {"total_num_steps": "auto"}}
    sections = {"optimizer": ADAMW, "scheduler": decaying} if optimizer == "of the file" else {}
    settings = ds_config(stage, "optimizer", "scheduler") | sections
    settings["zero_optimization"] |= config(place, tmp_path, stage)["zero_optimization"]

    def trainer(model: Any, with_settings: Any, steps: int) -> Any:
        batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        rate = {"learning_rate": 1e-3, "warmup_steps": 2, "logging_steps": 1}
        args = arguments(tmp_path, with_settings, max_steps=steps, **batch, **rate)
        return Trainer(model, args, train_dataset=sentences(64), eval_dataset=sentences(8, seed=8))

    # A Trainer for each run; the optimizer of the file is compared with itself, because its schedule is another one.
    expected, model = [], llama()
    reference = settings if sections else None
    if stage == 3:
        expected += [{"eval_loss": trainer(model, reference, 5).evaluate()["eval_loss"]}]
    for steps in (5, 7):
        last = trainer(model, reference, steps)
        last.train()
        expected += reported(last)
    expected += [{"eval_loss": last.evaluate()["eval_loss"]}]
    forget_process()

    found, once = [], trainer(llama(), settings, 5)
    # ZeRO-2 has no evaluation without training.
    if stage == 3:
        found += [{"eval_loss": once.evaluate()["eval_loss"]}]
    for steps in (5, 7):
        once.args.max_steps = steps
        once.train()
        found += reported(once)
        assert once.model_wrapped.zero_optimization_stage() == stage
        assert len(once.optimizer.param_groups) == (1 if sections else 2)
    found += [{"eval_loss": once.evaluate()["eval_loss"]}]
    assert len(found) == (14 if stage == 3 else 13)
    for entry, other in zip(found, expected, strict=True):
        assert entry == pytest.approx(other, rel=1e-5)


@under_shim()
def test_a_model_that_memory_cannot_hold_is_trained_once(tmp_path: Path) -> None:
    trainer = line_trainer(tmp_path, ds_config(3), fp16=True)
    trainer.train()
    with (
        mock.patch("zero3.state.whole_copies.available_memory", return_value=1),
        pytest.raises(EngineStateError, match=r"'[a-z.]*' belonged to an engine that was closed"),
    ):
        trainer.train()


@pytest.mark.skipif(find_spec("optuna") is None, reason="optuna is not installed")
@under_shim()
def test_hyperparameter_search(tmp_path: Path) -> None:
    import optuna
    from transformers import Trainer

    from .line_trainers import Line, LineConfig, points

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rates, firsts = iter([0.1, 1e-3, 0.2]), set()

    def objective(metrics: dict[str, float]) -> float:
        firsts.add((trainer.args.learning_rate, reported(trainer)[0]["loss"]))
        return metrics["eval_loss"]

    args = arguments(tmp_path, ds_config(3), fp16=True, eval_strategy="epoch", logging_steps=1)
    data = {"train_dataset": points(64), "eval_dataset": points(64)}
    trainer = Trainer(None, args, model_init=lambda: Line(LineConfig()), **data)
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", *[next(rates)] * 2)},
        compute_objective=objective,
        direction="minimize",
        n_trials=3,
    )
    # Each trial has begun with a model of its own, which it has trained.
    (loss,) = {loss for _, loss in firsts}
    assert firsts == {(rate, loss) for rate in (0.1, 1e-3, 0.2)}
    assert best.hyperparameters == {"learning_rate": 0.2}
    assert best.objective < 0.1 * loss
