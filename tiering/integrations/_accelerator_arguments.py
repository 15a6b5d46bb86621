"""The configuration of an Accelerator's engines: a DeepSpeed configuration, completed from the objects of the loop."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiering.config import ds_config
from tiering.errors import ConfigError

Config = Mapping[str, Any] | str | Path

PRECISIONS = ("no", "bf16", "fp16")
TRAINING = ("optimizer", "scheduler")
"""The sections that only an engine that trains has."""

_PRECISION_SECTIONS = ("bf16", "bfloat16", "fp16", "torch_autocast", "amp")
_LAUNCHER = "ACCELERATE_USE_DEEPSPEED"
_LAUNCHER_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_FILE = "TIERING_CONFIG"


def source(config: Config | None) -> Mapping[str, Any]:
    """The configuration ``config``, or the file that the environment names, as a mapping.

    ``accelerate launch`` with a deepspeed_config_file passes its path to the processes that it starts, and tells them
    to use DeepSpeed, which they forget here. It runs only where it finds DeepSpeed: see tiering.integrations.deepspeed.

    Raises ConfigError if there is none.
    """
    launched = os.environ.pop(_LAUNCHER, "false").lower() == "true"
    if config is None:
        config = os.environ.get(_FILE) or (os.environ.get(_LAUNCHER_FILE) if launched else None)
    if config is None or config == "none":
        raise ConfigError(
            "Accelerator needs a configuration: pass tiering_config=, a path or a dict, set the environment variable"
            f" {_FILE}, or start `python -m tiering.integrations.deepspeed accelerate launch --config_file FILE`, where"
            " FILE names a deepspeed_config_file"
        )
    return ds_config.mapping_of(config)


def precision(config: Mapping[str, Any], requested: str | None) -> str:
    """The precision ("no", "bf16" or "fp16") that ``config`` has, or else ``requested`` of the Accelerator.

    None is the one that ``accelerate launch`` passes. Raises ConfigError if the two differ.
    """
    requested = str(requested or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no").lower()
    if requested not in PRECISIONS:
        raise ConfigError(f"unsupported mixed_precision={requested!r}; tiering has {', '.join(PRECISIONS)}")
    if not any(section in config for section in _PRECISION_SECTIONS):
        return requested
    enabled = {name: (config.get(name) or {}).get("enabled", False) for name in ("bf16", "fp16")}
    enabled["bf16"] = enabled["bf16"] or (config.get("bfloat16") or {}).get("enabled", False)
    found = next((name for name, value in enabled.items() if value is True), None)
    if found is None:
        is_auto = enabled.get(requested) == "auto"
        if requested != "no" and not is_auto:
            raise ConfigError(
                f"mixed_precision={requested!r} contradicts the configuration, in which {requested} is not enabled;"
                f" enable it there, or remove mixed_precision"
            )
        return requested
    if requested not in ("no", found):
        raise ConfigError(
            f"mixed_precision={requested!r} contradicts the section {found!r} of the configuration; remove one of them"
        )
    return found


def accumulation(config: Mapping[str, Any]) -> int | None:
    """The gradient_accumulation_steps of ``config``, or None if the loop determines it."""
    steps = config.get("gradient_accumulation_steps")
    return steps if isinstance(steps, int) else None


def completed(
    config: Mapping[str, Any], precision: str, *, micro_batch_size: int, accumulation: int
) -> dict[str, Any]:
    """``config`` with ``precision`` and the sizes of a batch, where it has none or "auto".

    Raises ConfigError if its gradient_accumulation_steps are not ``accumulation``, which the loop uses.
    """
    filled = dict(config)
    if not any(section in config for section in _PRECISION_SECTIONS):
        if precision != "no":
            filled[precision] = {"enabled": True, "auto_cast": True}
    else:
        for name in ("bf16", "fp16"):
            if (filled.get(name) or {}).get("enabled") == "auto":
                filled[name] = {"auto_cast": True, **filled[name], "enabled": name == precision}
    fill(filled, "gradient_accumulation_steps", accumulation)
    if filled["gradient_accumulation_steps"] != accumulation:
        raise ConfigError(
            f"gradient_accumulation_steps is {filled['gradient_accumulation_steps']} in the configuration, and the"
            f" Accelerator has {accumulation}; remove it from one of them"
        )
    if filled.get("train_micro_batch_size_per_gpu") == "auto" or isinstance(
        filled.get("train_batch_size"), str
    ):
        filled.pop("train_batch_size", None)
    if "train_batch_size" not in filled:
        fill(filled, "train_micro_batch_size_per_gpu", micro_batch_size)
    # The loop clips.
    fill(filled, "gradient_clipping", 0.0)
    return filled


def with_optimizer(config: dict[str, Any], placeholder: Any) -> dict[str, Any]:
    """``config`` with the values of ``placeholder``, a DummyOptim of accelerate, for "auto" in "optimizer"."""
    options = {"lr": placeholder.lr, "weight_decay": placeholder.weight_decay, **placeholder.kwargs}
    return _filled(config, "optimizer", options)


def with_schedule(config: dict[str, Any], placeholder: Any, processes: int) -> dict[str, Any]:
    """``config`` with the values of ``placeholder``, a DummyScheduler of accelerate, for "auto" in "scheduler".

    Its total_num_steps are those of all ``processes`` together; the configuration counts updates.
    """
    optimizer = placeholder.optimizer
    options = {
        "warmup_min_lr": 0,
        "warmup_max_lr": (getattr(optimizer, "defaults", None) or vars(optimizer))["lr"],
        "warmup_num_steps": max(1, placeholder.warmup_num_steps),
    }
    if placeholder.total_num_steps is not None:
        options["total_num_steps"] = math.ceil(placeholder.total_num_steps / processes)
    return _filled(config, "scheduler", options)


def _filled(config: dict[str, Any], section: str, options: Mapping[str, Any]) -> dict[str, Any]:
    params = {
        key: options.get(key, value) if value == "auto" else value
        for key, value in (config[section].get("params") or {}).items()
    }
    return config | {section: config[section] | {"params": params}}


def fill(config: dict[str, Any], key: str, value: Any) -> None:
    """Set ``key`` to ``value`` where it is missing or "auto"."""
    if config.get(key, "auto") == "auto":
        config[key] = value
