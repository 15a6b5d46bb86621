"""How a program trains, wherever its state lives: what the result depends on, beside the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

import tiering
from zero3.params.precision import COMPUTE_DTYPES

RULES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 2e-3, "eps": 1e-3, "weight_decay": 0.1},
    "Adam": {"lr": 2e-3, "eps": 1e-3, "weight_decay": 0.01},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Adagrad": {"lr": 2e-3, "eps": 1e-3},
    "Lion": {"lr": 1e-4, "weight_decay": 0.01},
}
PLAIN = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}
"""Rules whose update is smooth enough for a comparison with torch's own optimizers; Lion is not, and not there."""


@dataclass(frozen=True)
class Training:
    """Precision, accumulation, clipping and optimizer."""

    precision: str = "fp32"
    accumulation: int = 1
    clip: float = 0.0
    scale_power: int = 8  # of the first loss scale in fp16
    scale_window: int = 1000
    rule: str = "AdamW"
    decay_groups: bool = False
    client: bool = False  # the optimizer is given as an object, not by name
    sums: str = "auto"  # dtype in which gradients add up
    may_step_in_backward: bool = False
    may_split: bool = True
    block_rows: int | None = None
    tile: int = 0  # bytes in the compute dtype; larger layers are cut into tiles

    @classmethod
    def draw(cls, rng: random.Random) -> Training:
        in_backward = rng.random() < 0.2
        rule = rng.choice(("AdamW", "AdamW", "AdamW", "Adam", "SGD", "Adagrad", "Lion"))
        return cls(
            precision=rng.choice(
                ("fp32", "bf16") if in_backward else ("fp32", "fp32", "bf16", "bf16", "fp16")
            ),
            accumulation=rng.choice((1, 1, 2, 3)),
            clip=0.0 if in_backward else rng.choice((0.0, 0.5)),
            scale_power=rng.choice((8, 15)),
            scale_window=rng.choice((2, 1000)),
            rule=rule,
            decay_groups=rng.random() < 0.4,
            client=rule in ("AdamW", "SGD") and rng.random() < 0.15,
            sums=rng.choice(("auto", "auto", "fp32")),
            may_step_in_backward=in_backward,
        )

    @property
    def splits(self) -> bool:
        """Whether the state has a lossless format beside fp32."""
        return self.precision == "bf16" and self.may_split

    def config(self) -> dict[str, Any]:
        params = RULES[self.rule] | ({"adam_w_mode": False} if self.rule == "Adam" else {})
        named = {} if self.client else {"optimizer": {"type": self.rule, "params": params}}
        return named | {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "bf16": {"enabled": self.precision == "bf16"},
            "fp16": {
                "enabled": self.precision == "fp16",
                "initial_scale_power": self.scale_power,
                "hysteresis": 1,
                "loss_scale_window": self.scale_window,
            },
            "data_types": {"grad_accum_dtype": None if self.sums == "auto" else self.sums},
            "tiering": {"block_rows": self.block_rows, "tile": self.tile},
        }

    def cut(self, model: nn.Module) -> None:
        """Cut ``model``, in fp32, into the tiles that the configuration makes."""
        if self.tile:
            fp32 = torch.float32.itemsize // COMPUTE_DTYPES[self.precision].itemsize
            tiering.tile(model, fp32 * self.tile)

    def given(self, model: nn.Module) -> dict[str, Any]:
        """What ``initialize`` is given beside the model and the configuration."""
        groups = self.param_groups(model)
        if self.client:
            return {"optimizer": self.plain_optimizer(groups)}
        return {"model_parameters": groups} if self.decay_groups else {}

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """All that is trained; with ``decay_groups`` what has more than one dimension apart."""
        trained = [param for param in model.parameters() if param.requires_grad]
        if not self.decay_groups:
            return [{"params": trained}]
        matrices = [param for param in trained if param.dim() > 1]
        others = [param for param in trained if param.dim() <= 1]
        groups = [{"params": matrices, "lr": 1.5 * RULES[self.rule]["lr"]}, {"params": others}]
        return [group for group in groups if group["params"]]

    def plain_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        make: Callable[..., torch.optim.Optimizer] = PLAIN[self.rule]
        return make(groups, **RULES[self.rule])

    def __str__(self) -> str:
        values = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        return ", ".join(f"{name}={value}" for name, value, usual in values if value != usual) or "plain"
