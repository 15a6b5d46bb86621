"""The rates of the device that computes, by torch: ``tiering.planning.measure`` has the others, without torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tiering.demo.model import Block
from tiering.planning.measure import SECONDS, repeated
from tiering.planning.rates import Rates

HEAD_WIDTH = 64
WEIGHTS_BYTES = 192 << 20  # of blocks that take turns: more than a cache holds
MOST_BLOCKS = 24  # narrow ones are in a cache when they are trained, too
LINK_BYTES = 256 << 20
SCRATCH = 64 << 20  # bytes that are copied in the device's memory


def measure(
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    tokens: int = 1024,
    width: int = 1024,
    seconds: float = SECONDS,
) -> Rates:
    """FLOP/s of transformer blocks of ``width`` on one sequence of ``tokens``; on a GPU also its link and memory.

    Forward and backward together, as a step has them: 6 operations for each parameter of a matrix and token.
    """
    rates = Rates(flops=_flops(device, dtype, tokens, width, seconds))
    return rates if device.type == "cpu" else rates.updated(_memory_rates(device, seconds))


def _flops(device: torch.device, dtype: torch.dtype, tokens: int, width: int, seconds: float) -> float:
    heads = max(1, width // HEAD_WIDTH)
    each = 12 * width * width
    count = min(MOST_BLOCKS, max(2, -(-WEIGHTS_BYTES // (each * dtype.itemsize))))
    with torch.device(device):
        blocks = [Block(width, heads).to(dtype) for _ in range(count)]
        stream = torch.randn(1, tokens, width, dtype=dtype)

    for block in blocks:
        for parameter in block.parameters():  # a gradient is taken as soon as it is there, as the engine does
            parameter.register_post_accumulate_grad_hook(_drop)

    def train() -> None:
        passed = stream
        for block in blocks:
            passed = block(passed)
        passed.sum().backward()

    with torch.enable_grad():
        return 6.0 * each * count * tokens * _per_second(train, device, seconds)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _memory_rates(device: torch.device, seconds: float) -> Rates:
    pinned = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    source, target = (torch.empty(SCRATCH, dtype=torch.uint8, device=device) for _ in range(2))
    to_device = _per_second(lambda: there.copy_(pinned, non_blocking=True), device, seconds / 4)
    back = _per_second(lambda: pinned.copy_(there, non_blocking=True), device, seconds / 4)
    within = _per_second(lambda: target.copy_(source), device, seconds / 4)
    return Rates(device_link=LINK_BYTES * min(to_device, back), device_memory=2 * SCRATCH * within)


def _per_second(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Calls per second. On a GPU calls are queued by the ten, and all of them are waited for."""
    if device.type == "cpu":
        return repeated(call, seconds)

    def many() -> None:
        for _ in range(10):
            call()
        torch.cuda.synchronize(device)

    return 10 * repeated(many, seconds)
