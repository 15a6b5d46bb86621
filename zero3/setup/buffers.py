"""Moves the buffers of a model to the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from tiering.config.training import TieringConfig
from zero3.params.precision import COMPUTE_DTYPES
from zero3.ranks.collectives import Collectives


def move_buffers(
    model: nn.Module,
    device: torch.device,
    config: TieringConfig,
    kept_in_fp32: frozenset[nn.Parameter],
    collectives: Collectives | None,
) -> None:
    """Move all buffers to ``device`` with the values of rank 0, in their own dtype unless ``buffer_dtype`` names one.

    Buffers that a module computes with besides its parameters keep their precision: running statistics, routing biases,
    rotary frequencies. The exception is batch normalization in 16 bits on a CPU, where torch has no kernel for both
    dtypes: its buffers take the dtype of the parameters, unless these are ``kept_in_fp32``.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if collectives is not None:
                    values = buffer.detach().to("cpu", copy=True).contiguous()
                    collectives.tables.broadcast(
                        values.view(-1), 0, f"send the first value of buffer {name!r}"
                    )
                    buffer.data = values
                buffer.data = buffer.data.to(device, _dtype_of(module, buffer, device, config, kept_in_fp32))


def _dtype_of(
    module: nn.Module,
    buffer: Tensor,
    device: torch.device,
    config: TieringConfig,
    kept_in_fp32: frozenset[nn.Parameter],
) -> torch.dtype:
    if not buffer.is_floating_point():
        return buffer.dtype
    if config.buffer_dtype is not None:
        return COMPUTE_DTYPES[config.buffer_dtype]
    is_norm = isinstance(module, _NormBase)
    if device.type == "cpu" and is_norm and not kept_in_fp32.intersection(module.parameters()):
        return COMPUTE_DTYPES[config.precision]
    return buffer.dtype
