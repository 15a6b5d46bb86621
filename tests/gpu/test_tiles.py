"""Layers in tiles on a GPU: the same bits everywhere, and what the whole layers compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tiering

from .conftest import DEVICE

pytestmark = pytest.mark.gpu

STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_placement_changes_a_bit(train: Callable[..., Any], precision: str) -> None:
    on_device, host, nvme = (
        train(3, precision=precision, tile=8 << 10, threshold=0, **place)
        for place in ({}, {"offload_param": "cpu", "offload_optimizer": "cpu"}, STREAMED)
    )
    for run in (host, nvme):
        assert run.losses == on_device.losses and run.norms == on_device.norms
        for name, master in on_device.masters.items():
            assert run.masters[name].equal(master), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_compute_what_whole_ones_do(dtype: torch.dtype) -> None:
    """Entries to the bit; products by another shape may be rounded otherwise."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(300, 64), nn.Linear(64, 300)).to(DEVICE, dtype)
    tiled = tiering.tile(copy.deepcopy(whole), "8KiB")
    indices = torch.randint(300, (4, 32), device=DEVICE)
    assert torch.equal(tiled[0](indices), whole[0](indices))
    outputs = []
    for model in (whole, tiled):
        output = model(indices)
        output.float().square().sum().backward()
        outputs.append(output.detach())
    precision = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(*outputs, rtol=precision, atol=precision)
    for layer in (0, 1):
        found = torch.cat([weight.grad for weight in tiled[layer].tile_weights])
        scale = float(whole[layer].weight.grad.abs().max())
        torch.testing.assert_close(found, whole[layer].weight.grad, rtol=precision, atol=precision * scale)
