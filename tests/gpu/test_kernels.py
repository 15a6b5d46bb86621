"""The optimizer's arithmetic on a GPU gives the bits of the C kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from optim_cpu import kernels
from optim_cpu.adam import step_adamw
from optim_cpu.kernels import DType
from zero3 import device_kernels
from zero3.device_kernels import AdamOptions

pytestmark = pytest.mark.gpu

CODES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16}
NUMELS = [1, 31, 4095, 4096, 4097, 3 * 4096 + 5, 50_001, 1_000_003]


def spread(numel: int, seed: int) -> Tensor:
    """Values of every magnitude that training meets, denormal ones too."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-44, 12, (numel,), generator=generator).double()
    return (torch.randn(numel, generator=generator).double() * 10**exponents).float()


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_of_squares(numel: int, dtype: torch.dtype) -> None:
    flat = spread(numel, numel).to(dtype)
    expected = kernels.sum_of_squares(flat.data_ptr(), CODES[dtype], numel)
    assert expected > 0
    assert device_kernels.sum_of_squares(flat.cuda()) == expected


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_sum_of_squares_shows_what_is_not_finite(bad: float) -> None:
    flat = spread(10_000, 1)
    flat[7777] = bad
    assert not math.isfinite(device_kernels.sum_of_squares(flat.cuda()))


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_accumulate(overwrite: bool, source: torch.dtype, target: torch.dtype) -> None:
    grad, held = spread(10_001, 1).to(source), spread(10_001, 2).to(target)
    on_gpu = held.cuda()
    device_kernels.accumulate(on_gpu, grad.cuda(), overwrite=overwrite)
    kernels.accumulate(
        held.data_ptr(), CODES[target], grad.data_ptr(), CODES[source], 10_001, overwrite=overwrite
    )
    assert torch.equal(on_gpu.cpu().view(torch.uint8), held.view(torch.uint8))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_adamw(decoupled: bool, grad_dtype: torch.dtype) -> None:
    numel = 300_007
    ours = [spread(numel, 3), spread(numel, 4), spread(numel, 5).abs()]
    theirs = [tensor.cuda() for tensor in ours]
    out = torch.empty(numel, dtype=torch.bfloat16)
    out_there = out.cuda()
    for step in range(1, 6):
        grad = spread(numel, 10 + step).clamp(-1e15, 1e15).to(grad_dtype)
        options = AdamOptions(1e-3, 0.9, 0.95, 1e-8, 0.1, step, decoupled)
        device_kernels.adam(*theirs, grad.cuda(), out_there, options, 0.37)
        step_adamw(
            *ours, grad, out=out, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=step,
            grad_scale=0.37, decoupled=decoupled,
        )  # fmt: skip
    for name, mine, there in zip(("master", "exp_avg", "exp_avg_sq"), ours, theirs, strict=True):
        assert torch.equal(mine.view(torch.int32), there.cpu().view(torch.int32)), name
    assert torch.equal(out.view(torch.int16), out_there.cpu().view(torch.int16))
    assert not torch.equal(ours[0], spread(numel, 3))
