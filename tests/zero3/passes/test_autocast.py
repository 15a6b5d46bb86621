"""Autocast over weights that come and go: what it casts must not stay behind."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tiering
from tests.zero3.conftest import config

WIDTH = 32
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False).tanh()
        return x.float().pow(2).mean()


class Casts(TorchDispatchMode):
    """The copies of weights that autocast has made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.shape == (WIDTH, WIDTH):
            self.made.append(weakref.ref(result.untyped_storage()))
        return result

    @property
    def alive(self) -> int:
        return sum(cast() is not None for cast in self.made)


@pytest.mark.parametrize("training", [True, False])
def test_the_sections_autocast_keeps_the_copy_of_no_block_that_is_done(nvme: Path, training: bool) -> None:
    """torch's cache would keep all of them until the forward ends: half the model, on a device that has no room."""
    settings = config(nvme, precision="fp32", accumulation=1, **STREAMED)
    torch.manual_seed(3)
    model, alive = Tower(), list[int]()
    settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    with tiering.initialize(model=model, config=settings).engine as engine, Casts() as casts:
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: alive.append(casts.alive))
        with torch.set_grad_enabled(training):
            loss = engine(torch.ones(2, WIDTH))
        assert alive == [0, 0, 0, 0]
        assert len(casts.made) == len(model.blocks)
        if training:
            engine.backward(loss)
            engine.step()
