"""Activations that are not kept, but computed again in backward: torch's, by DeepSpeed's names.

The non-reentrant kind: it gives the same gradients, also where no input of the function requires one (DeepSpeed's then
gives none, in silence), takes keyword arguments, and draws the same random numbers again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from tiering import logs

log = logging.getLogger(__name__)

_options: dict[str, Any] | None = None  # of the last ``configure``


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, whose intermediate results backward computes again."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


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
    """Remember that it was called; none of the options has an effect here, which is said once."""
    global _options
    first = _options is None
    _options = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    asked = ", ".join(name for name, value in _options.items() if value)
    if first and asked:
        log.log(
            logs.once(logging.INFO),
            "checkpointing.configure: %s: no effect here; what a checkpointed function was given is kept where it is",
            asked,
        )


def is_configured() -> bool:
    """Whether ``configure`` was called."""
    return _options is not None


def reset() -> None:
    """Nothing to do: no activation outlives its backward."""
