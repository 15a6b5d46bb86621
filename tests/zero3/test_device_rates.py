"""FLOP/s of the device: the operations of blocks by the seconds that they took, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tiering.planning.rates import Rates
from zero3 import device_rates

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operations_are_those_of_parameters_and_tokens(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    width, tokens, blocks = 64, 16, []
    build = device_rates.Block

    def block(*sizes: int) -> torch.nn.Module:
        made = build(*sizes)
        blocks.append(made)
        return made

    def one_in_two_seconds(call: Callable[[], object], seconds: float) -> float:
        call()
        return 0.5

    monkeypatch.setattr(device_rates, "Block", block)
    monkeypatch.setattr(device_rates, "repeated", one_in_two_seconds)
    monkeypatch.setattr(device_rates, "WEIGHTS_BYTES", 3 * 12 * width * width * dtype.itemsize)
    with torch.no_grad():  # whatever surrounds it
        told = device_rates.measure(CPU, dtype, tokens=tokens, width=width)
    assert len(blocks) == 3
    matrices = sum(p.numel() for block in blocks for p in block.parameters() if p.ndim == 2)
    assert told == Rates(flops=6 * matrices * tokens / 2)
    assert {p.dtype for block in blocks for p in block.parameters()} == {dtype}
    assert all(p.grad is None for block in blocks for p in block.parameters())  # taken as they came


def test_gradients_are_computed_and_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(device_rates, "_drop", lambda parameter: taken.append(parameter.grad))
    device_rates.measure(CPU, torch.float32, tokens=8, width=64, seconds=0)
    assert len(taken) == 2 * 12 * device_rates.MOST_BLOCKS  # one call to warm up and one that counts
    assert all(gradient is not None for gradient in taken)


def test_wide_blocks_are_few_and_narrow_ones_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    monkeypatch.setattr(device_rates, "repeated", lambda call, seconds: 1.0)
    build = device_rates.Block
    for width in (64, 1024, 8192):
        made = []
        monkeypatch.setattr(
            device_rates, "Block", lambda *sizes, made=made: made.append(sizes) or build(64, 1)
        )
        device_rates.measure(CPU, width=width, tokens=1)
        counts.append((made[0], len(made)))
    assert counts == [((64, 1), 24), ((1024, 16), 8), ((8192, 128), 2)]
