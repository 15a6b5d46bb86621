"""A LightningModule, its data, and runs of it on two ranks and in a process that is killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from tiering.integrations.lightning import TieringStrategy

WIDTH = 16


def places(nvme: Path) -> dict[str, dict[str, Any]]:
    """The arguments of a strategy for everything at each place."""
    return {
        "device": {},
        "cpu": {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
        "nvme": {"offload_optimizer": "nvme", "offload_parameters": "nvme", "nvme_path": nvme},
    }


def blocks() -> nn.Sequential:
    layers = [nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
    return nn.Sequential(*layers)


class Regression(LightningModule):
    """Sums eight numbers. ``losses`` are those of the micro-batches, ``rates`` the learning rate at each."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = blocks()
        self.losses: list[float] = []
        self.rates: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        numbers, sums = batch
        return ((self.net(numbers) - sums) ** 2).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.1)
        schedule = {"scheduler": StepLR(optimizer, step_size=3, gamma=0.7), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def regression(kind: type[Regression] = Regression, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return kind()


def loader(samples: int = 80, batch_size: int = 2) -> DataLoader[Any]:
    numbers = torch.randn(samples, 8, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(numbers, numbers.sum(1, keepdim=True)), batch_size=batch_size)


def trainer(strategy: Any, root: Path, **options: Any) -> Trainer:
    """A Trainer of 20 updates of two micro-batches, without output."""
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "enable_checkpointing": "callbacks" in options,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "logger": False,
        "default_root_dir": root,
    }
    return Trainer(strategy=strategy, **defaults | options)


class _Pace(Callback):
    """Prints each step, and waits after it."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        print(trainer.global_step, flush=True)
        time.sleep(0.05)


def _on_two_ranks(strategy: str, root: Path) -> None:
    """Fit and test; rank 0 writes losses, rates and test_loss."""
    chosen = strategy if strategy == "ddp" else TieringStrategy(**places(root)[strategy])
    fits = trainer(chosen, root, devices=2, gradient_clip_val=None)
    model = regression()
    fits.fit(model, loader(), loader())
    metrics = {name: value.item() for name, value in fits.callback_metrics.items()}
    metrics |= fits.test(model, loader(), verbose=False)[0]
    if fits.is_global_zero:
        torch.save({"losses": model.losses, "rates": model.rates, **metrics}, root / f"{strategy}.pt")


def _until_killed(place: str, root: Path) -> None:
    saves = ModelCheckpoint(root / "saved", save_top_k=-1, every_n_epochs=1)
    chosen = TieringStrategy(**places(root)[place])
    trainer(chosen, root, max_epochs=3, callbacks=[saves, _Pace()]).fit(regression(), loader())


if __name__ == "__main__":
    {"ranks": _on_two_ranks, "killed": _until_killed}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
