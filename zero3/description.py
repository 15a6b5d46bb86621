"""What an engine tells of itself once, when it is built."""

from __future__ import annotations

import platform

import torch

import tiering
from tiering.telemetry import ConfigurationStatus, Description
from zero3.assembly import Assembly


def describe(parts: Assembly, configuration: ConfigurationStatus | None) -> Description:
    """The engine that is made of ``parts``, and of ``configuration``, if it came from one."""
    parameters = sum(piece.numel for group in parts.groups for piece in group.layout.pieces)
    return Description(
        device=_device(parts.device),
        versions={
            "tiering": tiering.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "linux": platform.release(),
        },
        configuration=configuration,
        plan=parts.plan.status(parameters),
    )


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device} {torch.cuda.get_device_name(device)}"
