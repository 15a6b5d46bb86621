"""The configuration of a Trainer's engine: a DeepSpeed configuration, completed from TrainingArguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiering.config import ds_config
from tiering.errors import ConfigError

Config = Mapping[str, Any] | str | Path

_SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_PRECISION = ("bf16", "bfloat16", "fp16", "torch_autocast", "amp")
_HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def completed(config: Config) -> dict[str, Any]:
    """``config`` with "auto" for the keys that it lacks and that TrainingArguments determine.

    These are the sizes of a batch, ``gradient_clipping`` and, if the configuration names no precision, ``bf16`` and
    ``fp16``. Without the section "optimizer", the Trainer makes the optimizer; without "scheduler", the schedule.
    """
    filled = {**ds_config.mapping_of(config)}
    for key in _SIZES:
        filled.setdefault(key, "auto")
    has_dtype = "param_dtype" in (filled.get("data_types") or {})
    if not has_dtype and not any(section in filled for section in _PRECISION):
        filled |= {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    return filled


def known(args: Any, model: nn.Module, max_steps: int) -> dict[str, Any]:
    """The values of ``args`` (TrainingArguments) that a configuration may have, by their names there.

    ``max_steps`` is the number of updates of the run. 16-bit weights of ``model`` request their precision, unless
    ``args`` requests another one: a Trainer computes in the dtype of the weights.
    """
    requested = {
        "bf16": bool(args.bf16 or args.bf16_full_eval),
        "fp16": bool(args.fp16 or args.fp16_full_eval),
    }
    if not any(requested.values()) and (half := _HALVES.get(_dtype_of(model))):
        requested[half] = True
    names = (
        *("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "learning_rate"),
        *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    )
    return {
        **{name: getattr(args, name) for name in names},
        **requested,
        "max_steps": max_steps,
        "warmup_steps": args.get_warmup_steps(max_steps),
    }


def check(args: Any) -> None:
    """Raise ConfigError that lists the settings of ``args`` (TrainingArguments) that a tiered model cannot honour."""
    is_set = {
        "deepspeed": args.deepspeed,
        "fsdp": args.fsdp,
        "torch_compile": args.torch_compile,
        "save_on_each_node": args.save_on_each_node,
    }
    problems = [f"{name}: {_REMEDIES[name]}" for name, value in is_set.items() if value]
    if problems:
        raise ConfigError(
            "\n  ".join(["TrainingArguments has settings that do not work with tiering:", *problems])
        )


_REMEDIES = {
    "deepspeed": "pass the file as tiering_config instead",
    "fsdp": "remove it; the engine shards the model, by zero_optimization.stage",
    "torch_compile": (
        "remove it, because a compiled model does not see that parameters move between tiers; compile the blocks of the"
        " model in place (block.compile()) before you make the Trainer"
    ),
    "save_on_each_node": "remove it, and name a directory in output_dir that all nodes share",
}


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of most elements of floating-point parameters; frozen codes in float8 do not count."""
    elements: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        if param.is_floating_point() and param.itemsize > 1:
            elements[param.dtype] += param.numel()
    return max(elements, key=lambda dtype: elements[dtype], default=torch.float32)
