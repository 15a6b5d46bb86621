"""The sides by name: what each case starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from frame.reference_model import Model
from frame.side import Spec

PLAIN = "plain PyTorch"
DEEPSPEED_CPU = "DeepSpeed, cpu offload"


def plain(model: Model, name: str = PLAIN) -> Spec:
    return Spec(name, "step.plain", model)


def in_memory(model: Model, name: str = "ours, in RAM") -> Spec:
    """Everything on the device tier, which on a CPU is RAM; budgets are left to the engine."""
    return Spec(name, "step.ours", model, {"tiering": {}})


def on_nvme(model: Model, name: str, tiering: dict[str, Any], **zero: Any) -> Spec:
    """Parameters and optimizer state may live on NVMe; ``tiering`` is that section of the configuration."""
    return Spec(name, "step.ours", model, {"tiering": tiering, "zero": zero}, on_disk=True)


def deepspeed_cpu(model: Model, peers: Path) -> Spec:
    return Spec(DEEPSPEED_CPU, "step.deepspeed", model, python=peers, grouped=True)


PIPELINED = {"pipeline_read": True, "pipeline_write": True}
# As many buffers as a few blocks need, each of the largest parameter: its default of 5 buffers of 1e8 elements takes
# 1 GB whatever the model.
FITTED_ELEMENTS = 1.05
FITTED_BUFFERS = 24
# Several sub-groups, so that there is something to pipeline: its default of 1e9 elements makes this model one.
SUB_GROUPS = 12
PIPELINE_BUFFERS = 16


def deepspeed_on_nvme(model: Model, peers: Path) -> list[Spec]:
    """The configurations of which the fastest counts: its defaults, and fitted buffers, each pipelined or not."""
    largest = int(FITTED_ELEMENTS * max(4 * model.width**2, 256 * model.width))
    fitted = {"buffer_count": FITTED_BUFFERS, "buffer_size": largest}
    tiles = {"sub_group_size": 12 * model.layers * model.width**2 // SUB_GROUPS}
    ways: dict[str, dict[str, Any]] = {
        "defaults": {},
        "pipelined": {"offload_optimizer": PIPELINED},
        "fitted buffers": {"offload_param": fitted, **tiles},
        "fitted buffers, pipelined": {
            "offload_param": fitted,
            "offload_optimizer": {**PIPELINED, "buffer_count": PIPELINE_BUFFERS},
            **tiles,
        },
    }
    return [
        Spec(
            f"DeepSpeed, NVMe, {way}",
            "step.deepspeed",
            model,
            {"zero": zero},
            on_disk=True,
            python=peers,
            grouped=True,
        )
        for way, zero in ways.items()
    ]
