"""Configurations to change, and questions to ask of what becomes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tiering.config.ds_config import KeyEntry, KeyReport, load
from tiering.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3},
}
UNCLIPPED: dict[str, Any] = MINIMAL | {"gradient_clipping": 0}

ZERO3_NVME: dict[str, Any] = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 4,
            "pipeline_read": True,
            "pipeline_write": True,
            "fast_init": False,
        },
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e8,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "aio": {
        "block_size": 262144,
        "queue_depth": 32,
        "thread_count": 1,
        "single_submit": False,
        "overlap_events": True,
    },
    "tensorboard": {"enabled": True, "output_path": "logs"},
    "elasticity": {"enabled": False},
    "tiering": {"host_budget": "256MiB", "cache_in_host": False},
}


def changed(path: str, value: Any, base: dict[str, Any] = MINIMAL) -> dict[str, Any]:
    """A copy of ``base`` with ``value`` at the dotted ``path``."""
    copy: dict[str, Any] = json.loads(json.dumps(base))
    node = copy
    *sections, name = path.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[name] = value
    return copy


def without(path: str, base: dict[str, Any] = MINIMAL) -> dict[str, Any]:
    copy = changed(path, None, base)
    node = copy
    *sections, name = path.split(".")
    for section in sections:
        node = node[section]
    del node[name]
    return copy


def entry(report: KeyReport, key: str) -> KeyEntry:
    (entry,) = [entry for entry in report.entries if entry.key == key]
    return entry


def refusal(config: dict[str, Any], world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        load(config, world_size=world_size)
    return str(caught.value)
