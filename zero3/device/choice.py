"""Which device this process computes on."""

from __future__ import annotations

import os

import torch

from tiering.errors import ConfigError


def chosen_device() -> torch.device:
    """The GPU if there is one, else the CPU; TIERING_DEVICE=cpu insists."""
    wanted = os.environ.get("TIERING_DEVICE", "")
    if wanted not in ("", "cpu", "cuda"):
        raise ConfigError(f"TIERING_DEVICE is {wanted!r}; use 'cpu' or 'cuda'")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "TIERING_DEVICE is 'cuda' but torch finds no GPU; install a CUDA build, or use 'cpu'"
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
