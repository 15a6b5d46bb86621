"""The stock Trainer with ``TrainingArguments(deepspeed=...)``, for a model that is a line: y = a x + b."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments

from .trainers import ADAMW

WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
ZERO: dict[int, dict[str, Any]] = {
    2: {"stage": 2},
    3: {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def ds_config(stage: int, *without: str, **sections: Any) -> dict[str, Any]:
    """A configuration in which everything that can be is "auto", without some sections and with others."""
    given = {
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": ZERO[stage],
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    } | sections
    return copy.deepcopy({name: section for name, section in given.items() if name not in without})


class LineConfig(PreTrainedConfig):
    model_type = "line"

    def __init__(self, a: float = 0.0, b: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.a, self.b = a, b
        self.hidden_size = 1


class Line(PreTrainedModel):
    config_class = LineConfig

    def __init__(self, config: LineConfig) -> None:
        super().__init__(config)
        self.a = nn.Parameter(torch.tensor([config.a]))
        self.b = nn.Parameter(torch.tensor([config.b]))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The line keeps the values of its configuration."""

    def forward(self, input_x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        y = input_x * self.a + self.b
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


def points(count: int, seed: int = 42) -> list[dict[str, Tensor]]:
    """Points near the line y = 2 x + 3."""
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(2, count, generator=generator)
    return [{"input_x": at, "labels": 2 * at + 3 + 0.1 * off} for at, off in zip(x, noise, strict=True)]


def arguments(output: Path, settings: Any = None, **options: Any) -> TrainingArguments:
    """Arguments of a run with DeepSpeed; without ``settings``, of one without it."""
    given = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False}
    # With use_cpu, transformers would not use DeepSpeed; without, it wants a GPU for bf16.
    with mock.patch("transformers.training_args.is_torch_bf16_gpu_available", return_value=True):
        return TrainingArguments(str(output), deepspeed=settings, use_cpu=settings is None, **given | options)


def line_trainer(
    output: Path, settings: Any, *, a: float = 0.0, b: float = 0.0, count: int = 64, **options: Any
) -> Trainer:
    """A Trainer of three epochs of eight batches, unless ``options`` say otherwise."""
    args = arguments(output, settings, **options)
    return Trainer(Line(LineConfig(a, b)), args, train_dataset=points(count), eval_dataset=points(count))


def line(trainer: Trainer) -> tuple[float, float]:
    """The values of a and b."""
    return trainer.model.a.item(), trainer.model.b.item()
