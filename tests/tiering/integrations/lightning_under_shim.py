"""A program: Lightning's own DeepSpeedStrategy, with the engine under the name of DeepSpeed, against DDP.

python -m tests.tiering.integrations.lightning_under_shim PLACE STAGE DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tiering.integrations import deepspeed as shim

shim.install()

import torch  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import DeepSpeedStrategy  # noqa: E402

from .lightning_runs import Regression, blocks, loader, regression, trainer  # noqa: E402

PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_optimizer": True, "offload_parameters": True},
    "nvme": {
        "offload_optimizer": True,
        "offload_parameters": True,
        "remote_device": "nvme",
        "offload_params_device": "nvme",
        "offload_optimizer_device": "nvme",
    },
}


class OnCpus(DeepSpeedStrategy):
    """Without the check for GPUs, whose devices have an index."""

    def setup_environment(self) -> None:
        self.parallel_devices = [
            torch.device("cpu", rank) for rank in range(len(self.parallel_devices or []))
        ]
        super(DeepSpeedStrategy, self).setup_environment()


class BuiltByTheStrategy(Regression):
    """Builds its layers where the strategy lets it: in stage 3 under ``zero.Init``."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(3)
            self.net = blocks()


def strategy(place: str, stage: int, root: Path) -> OnCpus:
    return OnCpus(stage=stage, nvme_path=str(root), **PLACES[place])


def weights(model: Any) -> dict[str, Any]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


def run(chosen: Any, kind: type[Regression], root: Path) -> dict[str, Any]:
    """Losses of a fit, the loss of a test after it, losses of a second fit, and of a third by another Trainer."""
    model = regression(kind)
    saves = ModelCheckpoint(root, filename="{step}", every_n_train_steps=10, save_top_k=-1)
    fits = trainer(chosen(), root, callbacks=[saves], enable_model_summary=True)
    fits.fit(model, loader(), loader(8))
    found: dict[str, Any] = {
        "losses": model.losses,
        "rates": model.rates,
        "metrics": _values(fits.callback_metrics),
    }
    found["tested"] = fits.test(model, loader(8), verbose=False)[0]
    model.losses = []
    fits.fit_loop.max_epochs = 2
    fits.fit(model, loader(), loader(8))
    found["again"] = model.losses
    model.losses = []
    trainer(chosen(), root).fit(model, loader())
    found["third"] = model.losses
    return found


def _values(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in metrics.items()}


def resumed(chosen: Any, kind: type[Regression], root: Path) -> dict[str, Any]:
    """Losses and weights of a run of two passes over the data, and of one that continues it after the first."""
    found: dict[str, Any] = {}
    for name, path in (("whole", None), ("resumed", str(root / "epoch=0.ckpt"))):
        model = regression(kind, seed=3 if path is None else 99)
        saves = ModelCheckpoint(root, filename="{epoch}", save_top_k=-1)
        trainer(chosen(), root, max_epochs=2, callbacks=[saves]).fit(model, loader(), ckpt_path=path)
        found[name] = {"losses": model.losses[-40:], "weights": weights(model)}
    return found


def main(place: str, stage: int, root: Path) -> dict[str, Any]:
    kind = BuiltByTheStrategy if place == "nvme" else Regression
    found: dict[str, Any] = {}
    for name, chosen in (("stock", lambda: "ddp"), ("ours", lambda: strategy(place, stage, root))):
        found[name] = run(chosen, kind, root / name)
    found["resumed"] = resumed(lambda: strategy(place, stage, root), kind, root / "resumed")
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))))
