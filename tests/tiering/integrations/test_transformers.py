"""A Trainer on the engine reports what the stock Trainer reports, and offers what it offers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import HfArgumentParser, TrainerCallback, TrainingArguments, default_data_collator

import tiering
from tiering.errors import ConfigError, EngineStateError
from tiering.integrations.transformers import TieringArguments, TieringTrainer

from .trainers import ADAMW, PLACES, arguments, config, differences, llama, reported, sentences, stock, tiered

EVALUATED: dict[str, Any] = {"max_steps": 20, "eval_strategy": "steps", "eval_steps": 5}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = stock(tmp_path_factory.mktemp("stock"), **EVALUATED)
    trainer.train()
    return trainer


@pytest.mark.one_of(4)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "sections",
    [{}, {"tiering": {"tile": "2KiB"}}, {"optimizer": ADAMW}],
    ids=["own", "own in tiles", "files"],
)
def test_a_run_reports_what_the_stock_trainer_does(
    place: str, sections: dict[str, Any], plain: Any, tmp_path: Path
) -> None:
    trainer = tiered(tmp_path / "out", config(place, tmp_path, **sections), **EVALUATED)
    trainer.train()
    assert ("lm_head.tiles.5" in dict(trainer.engine.module.named_modules())) == ("tiering" in sections)
    if "optimizer" in sections:
        # The optimizer of the file decays every parameter, that of the Trainer all but norms.
        assert reported(trainer)[0] == pytest.approx(reported(plain)[0], rel=1e-6)
    else:
        assert list(differences(trainer, plain, 1e-6)) == []
    trainer.engine.close()


class ChunkedLoss:
    """As docs/guide/transformers.md shows it."""

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        model, labels = self.accelerator.unwrap_model(model), inputs.pop("labels")
        hidden = model.model(**inputs).last_hidden_state
        loss = tiering.chunked_cross_entropy(
            hidden, model.lm_head, labels, rows=5, shift=True, reduction="sum"
        )
        loss = loss / ((labels[..., 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)
        return (loss, {}) if return_outputs else loss


class ChunkedTrainer(ChunkedLoss, TieringTrainer): ...


@pytest.mark.one_of(2)
@pytest.mark.parametrize("place", PLACES)
def test_a_loss_in_chunks_reports_what_the_models_own_does(place: str, plain: Any, tmp_path: Path) -> None:
    options = EVALUATED | {"prediction_loss_only": True}
    trainer = tiered(tmp_path / "out", config(place, tmp_path), cls=ChunkedTrainer, **options)
    trainer.train()
    assert list(differences(trainer, plain, 1e-6)) == []
    trainer.engine.close()


@pytest.mark.one_of(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_stage_reports_the_same(stage: int, plain: Any, tmp_path: Path) -> None:
    trainer = tiered(tmp_path / "out", config("device", tmp_path, stage), **EVALUATED)
    trainer.train()
    assert list(differences(trainer, plain, 1e-6)) == []
    trainer.engine.close()


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.01},
        {"max_grad_norm": 0.0},
        {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 1},
        {"lr_scheduler_type": "cosine", "warmup_steps": 0.5},
        {"gradient_checkpointing": True},
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 5.0},
        {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 3},
        {"optim": "sgd"},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")
def test_arguments_have_their_effect(options: dict[str, Any], tmp_path: Path) -> None:
    # A Trainer sets the seed when it is made.
    plain = stock(tmp_path / "stock", **options)
    plain.train()
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path), **options)
    trainer.train()
    assert list(differences(trainer, plain, 2e-6)) == []
    trainer.engine.close()


def test_a_users_optimizer_and_schedule_are_used(tmp_path: Path) -> None:
    trainers = []
    for make, settings in ((stock, None), (tiered, config("nvme", tmp_path))):
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.8, 0.9))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        given = [settings] if settings else []
        trainers.append(make(tmp_path / "out", *given, model=model, optimizers=(optimizer, schedule)))
        trainers[-1].train()
    assert [entry["learning_rate"] for entry in reported(trainers[1])] == [
        3e-3,
        3e-3,
        1.5e-3,
        1.5e-3,
        7.5e-4,
        7.5e-4,
    ]
    assert list(differences(trainers[1], trainers[0], 1e-6)) == []
    trainers[1].engine.close()


@pytest.mark.one_of(2)
@pytest.mark.parametrize("place", PLACES)
def test_evaluation_may_come_first_and_training_twice(place: str, tmp_path: Path) -> None:
    logs = []
    for make, settings in ((stock, []), (tiered, [config(place, tmp_path)])):
        trainer = make(tmp_path / "out", *settings)
        first = trainer.evaluate()["eval_loss"]
        trainer.train()
        logs.append([{"eval_loss": first}, *reported(trainer)])
        trainer.train()
        logs[-1] += reported(trainer)
        logs[-1] += [{"eval_loss": trainer.evaluate()["eval_loss"]}]
    for entry, expected in zip(*logs, strict=True):
        assert entry == pytest.approx(expected, rel=2e-6)
    trainer.engine.close()


def test_a_trainer_without_data_to_train_with_only_evaluates(tmp_path: Path) -> None:
    settings = config("nvme", tmp_path, optimizer=ADAMW)
    trainer = tiered(tmp_path / "out", settings, train_dataset=None)
    expected = stock(tmp_path / "stock").evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert not trainer.engine.optimizer.trains
    trainer.engine.close()


def test_parameters_are_updated_in_the_last_backward_of_a_step(tmp_path: Path) -> None:
    """Which backward is the last one before a step, the Trainer says, also in a single process."""
    plain = stock(tmp_path / "stock", max_grad_norm=0.0)
    plain.train()
    settings = config("nvme", tmp_path, tiering={"step_in_backward": True, "max_skipped_steps": 0})
    trainer = tiered(tmp_path / "out", settings, max_grad_norm=0.0)
    trainer.train()
    for entry, expected in zip(reported(trainer), reported(plain), strict=True):
        assert entry["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    trainer.engine.close()


def test_a_process_with_several_gpus_uses_one(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out")
    args._n_gpu = 2
    trainer = TieringTrainer(
        llama(), args, train_dataset=sentences(8), tiering_config=config("cpu", tmp_path)
    )
    assert (trainer.args.n_gpu, trainer._train_batch_size) == (1, 2)


def test_the_batch_size_is_found_again(tmp_path: Path) -> None:
    """As accelerate's decorator finds it: the first attempts run out of memory."""
    attempts: list[int] = []

    def collate(examples: list[Any]) -> Any:
        attempts.append(len(examples))
        if len(examples) > 2:
            raise RuntimeError("CUDA out of memory.")
        return default_data_collator(examples)

    options: dict[str, Any] = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path), data_collator=collate, **options)
    trainer.train()
    assert attempts[0] == 4
    assert len(reported(trainer)) == 6
    trainer.engine.close()


@pytest.mark.slow
def test_save_model_holds_no_model(tmp_path: Path) -> None:
    with tiering.zero.Init():
        model = llama(hidden_size=512, intermediate_size=2048, num_hidden_layers=12, vocab_size=4096)
    nbytes = sum(param.numel() * 4 for param in model.parameters())
    settings = config("nvme", tmp_path, tiering={"host_budget": "64MiB"})
    trainer = tiered(tmp_path / "out", settings, model)
    trainer.save_model(str(tmp_path / "warm"))
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    before = resident("VmRSS")
    trainer.save_model(str(tmp_path / "model"))
    assert nbytes > 200 << 20
    assert resident("VmHWM") - before < 64 << 20
    assert (tmp_path / "model/model.safetensors").stat().st_size > nbytes
    trainer.engine.close()


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def test_predictions_are_those_of_the_stock_trainer(tmp_path: Path) -> None:
    trainers = [stock(tmp_path / "stock"), tiered(tmp_path / "out", config("nvme", tmp_path))]
    ours, theirs = (trainer.predict(sentences(6, seed=9)).predictions for trainer in reversed(trainers))
    assert ours.shape == (6, 12, 96)
    assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    trainers[1].engine.close()


def test_metrics_are_computed(tmp_path: Path) -> None:
    def accuracy(prediction: Any) -> dict[str, float]:
        guesses = prediction.predictions.argmax(-1)[:, :-1]
        return {"accuracy": float((guesses == prediction.label_ids[:, 1:]).mean())}

    options: dict[str, Any] = {"compute_metrics": accuracy, "learning_rate": 1e-2, "max_steps": 30}
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path), **options)
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.2
    trainer.engine.close()


def test_logs_have_the_traffic(tmp_path: Path) -> None:
    settings = config("nvme", tmp_path, tiering={"cache_in_host": False})
    trainer = tiered(tmp_path / "out", settings, eval_strategy="steps", eval_steps=3)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 6
    assert all(entry["nvme_gb_per_s"] > 0 and entry["stall_s"] >= 0 for entry in entries)
    assert all("stall_s" not in entry for entry in trainer.state.log_history if "eval_loss" in entry)
    io = trainer.engine.snapshot().io[0]
    for name, total in (("nvme_read_gb", io.read.bytes), ("nvme_write_gb", io.written.bytes)):
        assert 0.5 * total < sum(entry[name] for entry in entries) * 1e9 <= total
    trainer.engine.close()


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_half_precision_follows_the_stock_trainer(half: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 12, "learning_rate": 1e-2}
    plain = stock(tmp_path / "stock", **options)
    plain.train()
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path), **{half: True}, **options)
    trainer.train()
    assert trainer.engine.module.dtype == getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[half])
    assert trainer.engine.master_state_dict()["lm_head.weight"].dtype == torch.float32
    for entry, expected in zip(reported(trainer), reported(plain), strict=True):
        assert entry["loss"] == pytest.approx(expected["loss"], rel=0.02)
    trainer.engine.close()


class Applied(TrainerCallback):
    """Which steps have updated the parameters."""

    def __init__(self) -> None:
        self.steps: list[bool] = []

    def on_optimizer_step(self, *args: Any, optimizer: Any, **_: Any) -> None:
        self.steps.append(not optimizer.step_was_skipped)


def test_an_overflow_skips_the_step_and_the_schedule(tmp_path: Path) -> None:
    settings = config("nvme", tmp_path, fp16={"enabled": "auto", "initial_scale_power": 24, "hysteresis": 1})
    applied = Applied()
    trainer = tiered(tmp_path / "out", settings, fp16=True, max_steps=12, warmup_steps=0, callbacks=[applied])
    trainer.train()
    assert applied.steps[0] is False
    assert applied.steps[-1] is True
    updates = [sum(applied.steps[:number]) for number in range(12)]
    rates = [entry["learning_rate"] for entry in reported(trainer)]
    assert rates == pytest.approx([1e-3 * (1 - count / 12) for count in updates])
    assert trainer.engine.skipped_steps == 12 - sum(applied.steps)
    assert trainer.state.global_step == 12
    trainer.engine.close()


def test_weights_in_half_precision_request_it(tmp_path: Path) -> None:
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path), llama().bfloat16())
    trainer.train()
    assert trainer.engine.bfloat16_enabled()
    trainer.engine.close()


def test_full_evaluation_in_half_precision(tmp_path: Path) -> None:
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path), train_dataset=None, bf16_full_eval=True)
    expected = stock(tmp_path / "stock", bf16_full_eval=True).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-3)
    trainer.engine.close()


def test_a_released_model_is_an_ordinary_one(tmp_path: Path) -> None:
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path))
    trainer.train()
    expected = trainer.engine.state_dict()
    model = trainer.release()
    assert all(param.equal(expected[name]) for name, param in model.named_parameters())
    with pytest.raises(EngineStateError, match="has no engine yet"):
        _ = trainer.engine
    trainer.train()
    trainer.engine.close()


def test_another_trainer_takes_the_model_over(tmp_path: Path) -> None:
    logs = []
    for make, settings in ((stock, []), (tiered, [config("nvme", tmp_path)])):
        model = llama()
        first = make(tmp_path / "out", *settings, model=model)
        first.train()
        second = make(tmp_path / "out", *settings, model=model, learning_rate=1e-4)
        second.train()
        logs.append(reported(second))
    for entry, expected in zip(*logs, strict=True):
        assert entry == pytest.approx(expected, rel=2e-6)
    second.engine.close()


def test_each_trial_of_a_search_trains_a_model_of_its_own(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna", reason="optuna is not installed")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    first_losses: list[float] = []

    def objective(metrics: dict[str, float]) -> float:
        first_losses.append(reported(trainer)[0]["loss"])
        return metrics["eval_loss"]

    options = {"eval_strategy": "steps", "eval_steps": 6, "model_init": lambda: llama()}
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path), **options)
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-3)},
        compute_objective=objective,
        n_trials=2,
    )
    assert first_losses == [first_losses[0]] * 2
    plain = stock(tmp_path / "stock", learning_rate=best.hyperparameters["learning_rate"], **options)
    plain.train()
    assert best.objective == pytest.approx(plain.state.log_history[-2]["eval_loss"], rel=1e-6)
    trainer.engine.close()


def test_the_configuration_comes_from_the_arguments(tmp_path: Path) -> None:
    parser = HfArgumentParser((TrainingArguments, TieringArguments))
    given = ["--output_dir", str(tmp_path), "--tiering_config", "ds.json", "--use_cpu"]
    args, ours = parser.parse_args_into_dataclasses(given)
    assert vars(ours) == {"tiering_config": "ds.json"}
    args.tiering_config = config("nvme", tmp_path)
    trainer = TieringTrainer(llama(), args, train_dataset=sentences(8))
    trainer.save_model(str(tmp_path / "model"))
    assert trainer.engine.zero_offload_param().device == "nvme"
    trainer.engine.close()


def test_a_trainer_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TieringTrainer needs a configuration"):
        tiered(tmp_path / "out", None)


def test_arguments_that_cannot_be_honoured_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)torch_compile: remove it.*save_on_each_node: remove it"):
        tiered(tmp_path / "out", config("cpu", tmp_path), torch_compile=True, save_on_each_node=True)


def test_all_values_that_differ_from_the_arguments_are_in_one_error(tmp_path: Path) -> None:
    settings = config(
        "cpu",
        tmp_path,
        train_micro_batch_size_per_gpu=4,
        train_batch_size=1000,
        gradient_accumulation_steps=4,
        gradient_clipping=1.1,
        optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.9]}},
        scheduler={"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 100}},
        fp16={"enabled": False},
    )
    trainer = tiered(tmp_path / "out", settings, fp16=True)
    with pytest.raises(ConfigError) as raised:
        trainer.train()
    for key in (
        *("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"),
        *("gradient_clipping", "optimizer.params.betas", "fp16.enabled"),
        *("scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps"),
    ):
        assert f"\n  {key}: " in str(raised.value)
    assert "change the TrainingArguments" in str(raised.value)
    assert "initialize()" not in str(raised.value)
    # The model is untouched.
    assert trainer.model.lm_head.weight.abs().sum() > 0
