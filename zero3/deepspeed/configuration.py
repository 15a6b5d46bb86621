"""``DeepSpeedConfig``: a configuration that is read and checked without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiering.config import ds_config
from tiering.errors import ConfigError, UnsupportedNameError
from zero3.ranks.joining import standing

DeepSpeedConfigError = ConfigError


class DeepSpeedConfig:
    """The settings that ``initialize`` reads from ``config``, under the names of DeepSpeed's class.

    ``config`` is a mapping, the path of a file, or base64 text. Batch sizes are those of this number of ranks; ``mpu``
    and ``mesh_device`` are ignored. ``settings`` is the native configuration, ``report`` the report on every key.
    Raises ConfigError that lists every problem.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | Path,
        mpu: object = None,
        mesh_device: object = None,
    ) -> None:
        self.global_rank, self.world_size = standing()
        self.settings, self.report = ds_config.load(config, world_size=self.world_size)
        settings = self.settings
        self.train_batch_size = settings.train_batch_size
        self.train_micro_batch_size_per_gpu = settings.micro_batch_size
        self.gradient_accumulation_steps = settings.gradient_accumulation_steps
        self.gradient_clipping = settings.gradient_clipping
        self.steps_per_print = settings.steps_per_print
        self.wall_clock_breakdown = settings.wall_clock_breakdown
        self.dataloader_drop_last = settings.dataloader_drop_last
        self.zero_optimization_stage = settings.zero.stage
        self.zero_enabled = settings.zero.stage > 0
        self.zero_config = settings.zero
        self.fp16_enabled = settings.precision == "fp16"
        self.bfloat16_enabled = settings.precision == "bf16"
        self.monitor_config = settings.monitor
        optimizer, scheduler = settings.optimizer, settings.scheduler
        self.optimizer_name = None if optimizer is None else optimizer.type.lower()
        self.optimizer_params = None if optimizer is None else optimizer.model_dump(exclude={"type"})
        self.scheduler_name = None if scheduler is None else scheduler.type
        self.scheduler_params = None if scheduler is None else scheduler.params.model_dump()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"DeepSpeedConfig has no attribute {name!r}", name=name, obj=self)
        raise UnsupportedNameError(
            f"DeepSpeedConfig has no {name!r} here; read the native configuration in its attribute 'settings'"
        )
