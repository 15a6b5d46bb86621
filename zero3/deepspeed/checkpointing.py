"""Activation checkpointing, which recomputes activations in backward: torch's, under DeepSpeed's names.

It is the non-reentrant kind: it gives the same gradients, also if no input of the function requires one (DeepSpeed
silently gives none then), accepts keyword arguments, and draws the same random numbers again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from tiering import _logs
from tiering.config.training import TieringConfig

log = logging.getLogger(__name__)

# Options of the last ``configure``.
_options: dict[str, Any] | None = None


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``; backward recomputes its intermediate results."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


# The signature is that of DeepSpeed.
def configure(
    mpu_: object,
    deepspeed_config: object = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Record the call. ``checkpoint_in_cpu`` sets ``tiering.activations`` to ``host`` in engines initialized later.

    No other option has an effect; the first call logs that.
    """
    global _options
    is_first_call = _options is None
    _options = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    enabled_options = ", ".join(
        name for name, value in _options.items() if value and name != "checkpoint_in_cpu"
    )
    if is_first_call and enabled_options:
        log.log(
            _logs.once(logging.INFO),
            "checkpointing.configure: %s: no effect; the inputs of a checkpointed function are kept in place",
            enabled_options,
        )


def is_configured() -> bool:
    """Whether ``configure`` was called."""
    return _options is not None


def with_options(settings: TieringConfig) -> TieringConfig:
    """``settings`` of an engine, with what ``configure`` has asked for."""
    if _options is None or not _options["checkpoint_in_cpu"] or settings.tiering.activations != "device":
        return settings
    tiers = settings.tiering.model_copy(update={"activations": "host"})
    return settings.model_copy(update={"tiering": tiers})


def reset() -> None:
    """Does nothing: no activation is kept after its backward."""
