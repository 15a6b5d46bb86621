"""Blocks over chunks of rows on a GPU: the same bits everywhere, and the same random numbers again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from .conftest import DEVICE

pytestmark = pytest.mark.gpu

STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False, "threshold": 0}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_placement_changes_a_bit(train: Callable[..., Any], precision: str) -> None:
    on_device, host, nvme = (
        train(3, precision=precision, accumulation=1, block_rows=1, **place)
        for place in ({}, {"offload_param": "cpu", "offload_optimizer": "cpu"}, STREAMED)
    )
    for run in (host, nvme):
        assert run.losses == on_device.losses and run.norms == on_device.norms
        for name, master in on_device.masters.items():
            assert run.masters[name].equal(master), name


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, stream: Tensor) -> Tensor:
        return functional.dropout(stream * self.weight, 0.5, self.training)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropping() for _ in range(2))

    def forward(self, stream: Tensor) -> Tensor:
        for block in self.blocks:
            stream = block(stream)
        return stream.square().sum() / 64


def test_chunks_draw_the_same_random_numbers_again(start: Callable[..., Any]) -> None:
    """The gradient of each element is that of the elements which the forward has kept."""
    engine = start(Stack(), precision="fp32", accumulation=1, clip=0.0, block_rows=2)
    stream = torch.randn(5, 32, 64, device=DEVICE, requires_grad=True)
    loss = engine(stream)
    engine.backward(loss)
    scale = 4 * torch.linspace(0.5, 1.5, 64, device=DEVICE) ** 2
    kept = stream.grad != 0
    assert 0.2 < float(kept.float().mean()) < 0.3
    expected = 2 / 64 * scale**2 * stream.detach() * kept
    torch.testing.assert_close(stream.grad, expected)
    assert float(loss.detach()) == pytest.approx(
        float((scale * stream * kept).detach().square().sum()) / 64, rel=1e-4
    )
