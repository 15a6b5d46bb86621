"""Lightning's Trainer and Fabric report on the engine what they report with DistributedDataParallel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn

import tiering.integrations.pytorch_lightning
from tiering.errors import CheckpointError, ConfigError, EngineStateError, ResidencyError
from tiering.integrations.lightning import REGISTERED, TieringFabricStrategy, TieringStrategy

from .lightning_runs import Regression, blocks, loader, places, regression, trainer

PLACES = ("device", "cpu", "nvme")
# Of lightning itself, about torch's names and about a single rank.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*`weights_only` was not set"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
]


@pytest.fixture(autouse=True, scope="module")
def variables() -> Iterator[None]:
    """Remove the variables that Lightning sets."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave the process without a process group."""
    # torch's shows the rank.
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """A run with DistributedDataParallel: its model, validation loss and predictions."""
    return fitted("ddp", tmp_path_factory.mktemp("plain"))


def fitted(strategy: Any, root: Path, **options: Any) -> tuple[Any, Any, Any]:
    fits = trainer(strategy, root, **options)
    model = regression()
    fits.fit(model, loader(), loader())
    val_loss = fits.callback_metrics["val_loss"].item()
    predictions = torch.cat(fits.predict(model, loader()))
    return model, val_loss, predictions


@pytest.mark.parametrize("place", PLACES)
def test_a_run_reports_what_ddp_does(place: str, plain: tuple[Any, Any, Any], tmp_path: Path) -> None:
    model, val_loss, predictions = fitted(TieringStrategy(**places(tmp_path)[place]), tmp_path)
    expected, expected_val_loss, expected_predictions = plain
    assert len(model.losses) == 40
    assert model.losses == pytest.approx(expected.losses, rel=1e-6, abs=1e-7)
    assert model.rates == expected.rates
    assert val_loss == pytest.approx(expected_val_loss, rel=1e-6)
    assert torch.allclose(predictions, expected_predictions, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REGISTERED)
def test_a_registered_name_is_a_strategy(name: str, plain: tuple[Any, Any, Any], tmp_path: Path) -> None:
    model = fitted(name, tmp_path)[0]
    assert model.losses == pytest.approx(plain[0].losses, rel=1e-6, abs=1e-7)
    settings = model.trainer.strategy.engine.settings
    assert settings.zero.stage == REGISTERED[name].get("stage", 3)
    assert settings.zero.offload_optimizer.device == REGISTERED[name].get("offload_optimizer", "none")


def test_the_trainer_of_pytorch_lightning_works_too(tmp_path: Path) -> None:
    class Other(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = blocks()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return ((self.net(batch[0]) - batch[1]) ** 2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    before = Other()
    values = {name: value.clone() for name, value in before.state_dict().items()}
    strategy = tiering.integrations.pytorch_lightning.TieringStrategy(**places(tmp_path)["nvme"])
    fits = pytorch_lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    fits.fit(before, loader(8))
    assert fits.global_step == 4
    assert not torch.equal(strategy.release().net[0].weight, values["net.0.weight"])


class Manual(Regression):
    """Regression that steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        # Unlike Adam's, its step shows the scale of the gradients.
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)]


def test_manual_optimization(tmp_path: Path) -> None:
    losses = {}
    for name in ("ddp", "tiering"):
        model = regression(Manual)
        trainer(name, tmp_path, accumulate_grad_batches=1, gradient_clip_val=None).fit(model, loader())
        losses[name] = model.losses
    assert losses["tiering"] == pytest.approx(losses["ddp"], rel=1e-6, abs=1e-7)


class Late(Regression):
    """Regression that builds its layers in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(3)
            self.net = blocks()


def test_configure_model_builds_without_memory(tmp_path: Path) -> None:
    reference = regression(Late)
    trainer("ddp", tmp_path).fit(reference, loader())
    strategy = TieringStrategy(**places(tmp_path)["nvme"])
    model = regression(Late)
    with strategy.model_sharded_context():
        model.configure_model()
    assert model.net[0].weight.shape == (16, 8)
    with pytest.raises(ResidencyError, match="built without memory"):
        model.net[0].weight.untyped_storage()
    model = regression(Late)
    trainer(strategy, tmp_path).fit(model, loader())
    assert model.losses == pytest.approx(reference.losses, rel=1e-6, abs=1e-7)


# The first steps in fp16 are skipped.
@pytest.mark.one_of(2)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true"])
def test_half_precisions_train_with_fp32_masters(precision: str, tmp_path: Path) -> None:
    model = regression()
    fits = trainer(TieringStrategy(**places(tmp_path)["nvme"]), tmp_path, precision=precision, max_epochs=6)
    fits.fit(model, loader())
    engine = fits.strategy.engine
    assert engine.settings.precision == ("fp16" if precision.startswith("16") else "bf16")
    assert engine.get_fp32_parameter("net.0.weight").dtype == torch.float32
    assert sum(model.losses[-40:]) < sum(model.losses[:40])
    assert all(parameter.dtype != torch.float32 for parameter in model.parameters())


@pytest.mark.one_of(3)
@pytest.mark.parametrize("place", PLACES)
def test_a_resumed_run_continues_with_the_same_bits(place: str, tmp_path: Path) -> None:
    strategy = TieringStrategy(**places(tmp_path)[place])
    whole = regression()
    saves = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, every_n_epochs=1, save_last=True)
    fits = trainer(strategy, tmp_path, max_epochs=3, callbacks=[saves])
    fits.fit(whole, loader())
    weights = fits.model.state_dict()
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        *(f"epoch={epoch}-step={20 * (epoch + 1)}.ckpt" for epoch in range(3)),
        "last.ckpt",
    ]
    resumed = regression(seed=8)
    saves = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, every_n_epochs=1, save_last=True)
    again = trainer(TieringStrategy(**places(tmp_path)[place]), tmp_path, max_epochs=3, callbacks=[saves])
    again.fit(resumed, loader(), ckpt_path=tmp_path / "saved/epoch=0-step=20.ckpt")
    assert resumed.losses == whole.losses[40:]
    assert resumed.rates == whole.rates[40:]
    assert again.global_step == 60
    assert all(torch.equal(value, weights[name]) for name, value in again.model.state_dict().items())


def cut(checkpoint: Path) -> None:
    """Damage the checkpoint of the engine in that of Lightning."""
    (weights,) = checkpoint.glob("*/weights-00001-*")
    weights.write_bytes(weights.read_bytes()[:-8])


def test_the_best_checkpoint_is_tested_and_others_are_removed(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path / "saved", monitor="val_loss", save_top_k=1)
    fits = trainer("tiering_stage_3_offload", tmp_path, max_epochs=3, callbacks=[saves])
    model = regression()
    fits.fit(model, loader(), loader())
    assert [str(path) for path in (tmp_path / "saved").iterdir()] == [saves.best_model_path]
    tested = fits.test(model, loader(), ckpt_path="best", verbose=False)
    assert tested[0]["test_loss"] == pytest.approx(saves.best_model_score.item(), rel=1e-6)
    cut(Path(saves.best_model_path))
    with pytest.raises(CheckpointError, match=r"load another checkpoint \(ckpt_path=\)"):
        fits.test(model, loader(), ckpt_path="best", verbose=False)


def test_weights_alone_are_a_file_that_any_strategy_loads(tmp_path: Path) -> None:
    fits = trainer(TieringStrategy(**places(tmp_path)["nvme"]), tmp_path)
    model = regression()
    fits.fit(model, loader())
    fits.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    weights = fits.model.state_dict()
    loaded = Regression.load_from_checkpoint(tmp_path / "weights.ckpt")
    assert loaded.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
    tests = trainer("tiering", tmp_path)
    other = regression(seed=9)
    tests.test(other, loader(), ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    assert all(torch.equal(value, weights[name]) for name, value in tests.model.state_dict().items())


def test_a_file_of_another_strategy_gives_its_weights_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = trainer("ddp", tmp_path)
    model = regression()
    plain.fit(model, loader())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    resumed = regression(seed=8)
    fits = trainer("tiering", tmp_path)
    fits.fit(resumed, loader(), ckpt_path=tmp_path / "plain.ckpt")
    assert fits.global_step == 20
    values = model.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in fits.model.state_dict().items())
    assert "the optimizer starts with new state" in caplog.text


def test_hyperparameters_that_are_no_values_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fits = trainer("tiering", tmp_path)
    model = regression()
    model.hparams["activation"] = nn.Tanh()
    fits.fit(model, loader(8))
    fits.save_checkpoint(tmp_path / "saved.ckpt")
    assert "is saved without hyperparameters" in caplog.text
    trainer("tiering", tmp_path).test(
        regression(), loader(), ckpt_path=tmp_path / "saved.ckpt", verbose=False
    )


def test_a_model_is_fitted_twice_and_given_back(tmp_path: Path) -> None:
    whole = regression()
    trainer("ddp", tmp_path, max_epochs=2).fit(whole, loader())
    model = regression()
    fits = trainer(TieringStrategy(**places(tmp_path)["cpu"]), tmp_path)
    fits.fit(model, loader())
    assert model.losses == pytest.approx(whole.losses[:40], rel=1e-6, abs=1e-7)
    weights = fits.model.state_dict()
    other = trainer("tiering", tmp_path)
    other.fit(model, loader())
    assert len(model.losses) == 80
    assert not torch.equal(other.model.state_dict()["net.0.weight"], weights["net.0.weight"])
    released = other.strategy.release()
    assert released is model
    assert isinstance(model.net[0].weight.sum().item(), float)
    trainer("ddp", tmp_path).test(model, loader(), verbose=False)


def test_the_sections_of_a_configuration_step(tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
    }
    fits = trainer(TieringStrategy(config), tmp_path)
    model = regression()
    fits.fit(model, loader())
    assert model.rates[0] < model.rates[4] < 0.01
    assert model.rates[-1] == 0.01
    assert fits.lr_scheduler_configs[0].interval == "step"


class Skipping(Regression):
    """Returns no loss for each second batch."""

    def training_step(self, batch: list[Any], batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_without_a_loss_updates_nothing(tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 1, "max_steps": 6, "use_distributed_sampler": False}
    models = [regression(Skipping) for _ in range(2)]
    for strategy, model in zip(("auto", "tiering"), models, strict=True):
        running = trainer(strategy, tmp_path, **options)
        running.fit(model, loader())
        assert running.global_step == 6
    running.strategy.release()
    for ours, stock in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-7)
    with pytest.raises(EngineStateError, match="returned None for the last micro-batch"):
        trainer("tiering", tmp_path).fit(regression(Skipping), loader())


def test_early_stopping_and_an_exception_end_a_run(tmp_path: Path) -> None:
    stops = EarlyStopping("val_loss", patience=1, min_delta=1e9)
    fits = trainer("tiering", tmp_path, max_epochs=9, callbacks=[stops], enable_checkpointing=False)
    fits.fit(regression(), loader(), loader())
    assert fits.current_epoch == 2

    class Failing(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 5:
                raise ArithmeticError("the sixth batch")
            return super().training_step(batch, batch_idx)

    model = regression(Failing)
    with pytest.raises(ArithmeticError, match="the sixth batch"):
        trainer("tiering", tmp_path).fit(model, loader())
    trainer("tiering", tmp_path).test(model, loader(), verbose=False)


class NoOptimizer(Regression):
    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer")
def test_what_an_engine_cannot_honour_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="configure_optimizers returned 0 optimizers"):
        trainer("tiering", tmp_path).fit(regression(NoOptimizer), loader())
    with pytest.raises(ConfigError, match="unsupported precision='64-true'"):
        trainer("tiering", tmp_path, precision="64-true")
    with pytest.raises(ConfigError, match="offload_optimizer to nvme needs nvme_path"):
        TieringStrategy(offload_optimizer="nvme")
    with pytest.raises(ConfigError, match="invalid offload_parameters='gpu'"):
        TieringStrategy(offload_parameters="gpu")
    for argument in ({"stage": 2}, {"offload_optimizer": "cpu"}):
        with pytest.raises(ConfigError, match="got config and arguments for stage or offload"):
            TieringStrategy({}, **argument)
    with pytest.raises(ConfigError, match="contradicts the section 'fp16'"):
        trainer(TieringStrategy({"fp16": {"enabled": True}}), tmp_path, precision="bf16-true").fit(
            regression(), loader()
        )
    with pytest.raises(ConfigError, match="clip_algorithm='value' is not supported"):
        trainer("tiering", tmp_path, gradient_clip_algorithm="value").fit(regression(), loader())
    with pytest.raises(EngineStateError, match="the strategy has no engine yet"):
        _ = TieringStrategy().engine


# Fabric


def fabric_run(strategy: Any, precision: str = "32-true", saved: Path | None = None) -> list[Any]:
    """Loss, norm and rate of each of ten updates; ``saved`` is saved after the fifth, or read if it is there."""
    torch.manual_seed(3)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=precision)
    fabric.launch()
    plain_model = blocks()
    plain_optimizer = torch.optim.AdamW(plain_model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(plain_optimizer, 3, 0.5)
    model, optimizer = fabric.setup(plain_model, plain_optimizer)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "batches": 0}
    if resumes := saved is not None and saved.exists():
        fabric.load(saved, state)
    updates = []
    for number, (numbers, sums) in enumerate(fabric.setup_dataloaders(loader(80, 4))):
        if number < state["batches"]:
            continue
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            loss = ((model(numbers) - sums) ** 2).mean() / 2
            fabric.backward(loss)
        if number % 2 == 0:
            continue
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        updates.append((loss.item(), norm.item(), optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if number == 9 and saved is not None and not resumes:
            state["batches"] = number + 1
            fabric.save(saved, state)
    return updates


@pytest.mark.parametrize("place", PLACES)
def test_a_loop_of_fabric_reports_what_ddp_does_and_resumes(place: str, tmp_path: Path) -> None:
    expected = fabric_run("ddp")
    whole = fabric_run(TieringFabricStrategy(**places(tmp_path)[place]), saved=tmp_path / "saved")
    assert len(whole) == 10
    for update, plain_update in zip(whole, expected, strict=True):
        assert update == pytest.approx(plain_update, rel=1e-6)
    resumed = fabric_run(TieringFabricStrategy(**places(tmp_path)[place]), saved=tmp_path / "saved")
    assert resumed == whole[5:]


def test_fabric_in_half_precision_and_its_refusals(tmp_path: Path) -> None:
    updates = fabric_run("tiering", "bf16-true")
    assert len(updates) == 10
    strategy = TieringFabricStrategy(**places(tmp_path)["nvme"])
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    with fabric.init_module():
        model = blocks()
    with pytest.raises(ResidencyError, match="built without memory"):
        model[0].weight.untyped_storage()
    with pytest.raises(ConfigError, match=r"fabric\.setup got 2 optimizers"):
        fabric.setup(model, *(torch.optim.SGD([param], lr=0.1) for param in list(model.parameters())[:2]))
    with pytest.raises(ConfigError, match="an optimizer cannot be set up alone"):
        fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(EngineStateError, match="0 engines"):
        fabric.backward(torch.zeros((), requires_grad=True))
    front, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="has 0 models"):
        fabric.save(tmp_path / "none", {"step": 1})
    fabric.save(tmp_path / "one", {"model": front, "step": 1})
    with pytest.raises(CheckpointError, match="has no 'epoch'"):
        fabric.load(tmp_path / "one", {"model": front, "epoch": 0})
    assert fabric.load(tmp_path / "one", {"model": front}) == {"step": 1}
    cut(tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"; load another checkpoint$"):
        fabric.load(tmp_path / "one", {"model": front})
    with pytest.raises(ConfigError, match="unsupported norm_type"):
        fabric.clip_gradients(front, optimizer, max_norm=1.0, norm_type=1.0)
    with pytest.raises(ConfigError, match="clip_val is not supported"):
        fabric.clip_gradients(front, optimizer, clip_val=1.0)
    assert strategy.release() is model
    assert model[0].weight.sum().item() != 0.0


# Other processes

# Of a run in this process.
RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE")


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.lightning_runs", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment, **streams)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["nvme", "device", "cpu"])
def test_two_ranks_report_what_ddp_does(place: str, tmp_path: Path) -> None:
    for strategy in ("ddp", place):
        _, errors = start("ranks", strategy, str(tmp_path)).communicate(timeout=100)
        assert (tmp_path / f"{strategy}.pt").is_file(), errors
    expected, result = (torch.load(tmp_path / f"{name}.pt") for name in ("ddp", place))
    assert result.keys() == expected.keys() >= {"losses", "rates", "val_loss", "test_loss"}
    for name, values in expected.items():
        assert result[name] == pytest.approx(values, rel=1e-5, abs=1e-7), name


@pytest.mark.slow
def test_a_killed_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    with start("killed", "nvme", str(tmp_path)) as child:
        assert child.stdout is not None
        steps = (int(line) for line in child.stdout if line.strip().isdigit())
        assert next(step for step in steps if step >= 32) >= 32
        child.kill()
    whole, resumed = regression(), regression(seed=8)
    trainer(TieringStrategy(**places(tmp_path)["nvme"]), tmp_path, max_epochs=3).fit(whole, loader())
    saves = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, every_n_epochs=1)
    again = trainer(TieringStrategy(**places(tmp_path)["nvme"]), tmp_path, max_epochs=3, callbacks=[saves])
    again.fit(resumed, loader(), ckpt_path=tmp_path / "saved/epoch=0-step=20.ckpt")
    assert resumed.losses == whole.losses[40:]
