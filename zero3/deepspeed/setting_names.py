"""The settings of an engine under DeepSpeed's names."""

from __future__ import annotations

import torch

from tiering.config.training import OffloadConfig, OffloadOptimizerConfig, TieringConfig
from zero3.params.precision import COMPUTE_DTYPES


class SettingNames:
    """Methods of ``DeepSpeedEngine`` that return a setting. The engine sets the attribute."""

    settings: TieringConfig

    def zero_optimization(self) -> bool:
        """Whether the stage is 1 or higher."""
        return self.settings.zero.stage > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.settings.zero.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether each rank keeps only its shard of the gradients."""
        return self.settings.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether each rank keeps only its shard of the parameters."""
        return self.settings.zero.stage >= 3

    def zero_offload_optimizer(self) -> OffloadOptimizerConfig | None:
        """The section offload_optimizer; None if optimizer state stays on the device."""
        section = self.settings.zero.offload_optimizer
        return None if section.device == "none" else section

    def zero_offload_param(self) -> OffloadConfig | None:
        """The section offload_param; None if parameters stay on the device."""
        section = self.settings.zero.offload_param
        return None if section.device == "none" else section

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer state is kept in host memory."""
        return self.settings.zero.offload_optimizer.device == "cpu"

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return self.settings.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return self.settings.precision == "bf16"

    def torch_autocast_enabled(self) -> bool:
        """Whether forwards run under torch.autocast."""
        return self.settings.autocast is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """The dtype of torch.autocast; None without it."""
        return None if self.settings.autocast is None else COMPUTE_DTYPES[self.settings.autocast]

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic."""
        return not self.settings.loss_scale.scale

    def gradient_clipping(self) -> float:
        """The maximum norm of the gradients; 0 is no clipping."""
        return self.settings.gradient_clipping

    def steps_per_print(self) -> int | None:
        """The number of updates between progress lines; None for no lines."""
        return self.settings.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether the time of each phase of a step is logged."""
        return self.settings.wall_clock_breakdown

    def dataloader_drop_last(self) -> bool:
        """Whether the last micro-batch of training_data is skipped if it is short."""
        return self.settings.dataloader_drop_last
