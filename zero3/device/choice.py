"""The device on which this process computes."""

from __future__ import annotations

import os

import torch

from tiering.errors import ConfigError


def chosen_device() -> torch.device:
    """The GPU if there is one, else the CPU. TIERING_DEVICE (cpu or cuda) overrides this."""
    name = os.environ.get("TIERING_DEVICE", "")
    if name not in ("", "cpu", "cuda"):
        raise ConfigError(f"TIERING_DEVICE is {name!r}; use 'cpu' or 'cuda'")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "TIERING_DEVICE is 'cuda' but torch finds no GPU; install a CUDA build, or use 'cpu'"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
