"""The optimizer's kernels as torch operations give the bits of the C kernels."""

from __future__ import annotations

import pytest
import torch

from optim_cpu import kernels
from optim_cpu.adam import step_adamw
from optim_cpu.formats import round_parameters
from optim_cpu.kernels import DType
from zero3 import device_kernels
from zero3.device_kernels import AdamOptions


@pytest.mark.parametrize("numel", [1, 31, 4095, 4096, 4097, 3 * 4096 + 5, 50_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_of_squares(numel: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kernels, "BLOCKS_AT_ONCE", 3)
    flat = (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e3).to(dtype)
    code = DType.FP32 if dtype is torch.float32 else DType.BF16
    assert device_kernels.sum_of_squares(flat) == kernels.sum_of_squares(flat.data_ptr(), code, numel)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_accumulate(overwrite: bool, target: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(1000, generator=generator).bfloat16()
    one = torch.randn(1000, generator=generator).to(target)
    other = one.clone()
    codes = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16}
    device_kernels.accumulate(one, grad, overwrite=overwrite)
    kernels.accumulate(
        other.data_ptr(), codes[target], grad.data_ptr(), DType.BF16, 1000, overwrite=overwrite
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adamw(decoupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's sqrt on a CPU is not correctly rounded; that of a GPU is, and so is one by way of float64.
    sqrt = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda t: sqrt(t.double()).float())
    generator = torch.Generator().manual_seed(2)
    ours = [torch.randn(5000, generator=generator) for _ in range(2)]
    ours.append(torch.rand(5000, generator=generator))
    theirs = [tensor.clone() for tensor in ours]
    out, expected = torch.empty(5000, dtype=torch.bfloat16), torch.empty(5000, dtype=torch.bfloat16)
    for step in range(1, 4):
        grad = torch.randn(5000, generator=generator).bfloat16()
        options = AdamOptions(1e-3, 0.9, 0.95, 1e-8, 0.1, step, decoupled)
        device_kernels.adam(*ours, grad, out, options, 0.37)
        step_adamw(
            *theirs, grad, out=expected, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=step,
            grad_scale=0.37, decoupled=decoupled,
        )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-50, 0.1])
@pytest.mark.parametrize("lr", [0.0, 1e-3, 1e20])
def test_adam_at_the_edges(
    lr: float, weight_decay: float, beta1: float, decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both forms of an average, decay that float32 does not hold, a warmup's lr of 0; zeros, subnormals, infinities."""
    sqrt = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda t: sqrt(t.double()).float())
    special = torch.tensor([0.0, -0.0, 1e-42, -1e-42, 3e38, float("inf"), -float("inf"), 1.0, -2.5])
    param, grad = (t.flatten() for t in torch.meshgrid(special, special[[0, 1, 2, 3, 7, 8]], indexing="ij"))
    ours = [param.clone(), torch.zeros_like(param), torch.zeros_like(param)]
    theirs = [tensor.clone() for tensor in ours]
    for step in range(1, 4):
        options = AdamOptions(lr, beta1, 0.95, 1e-8, weight_decay, step, decoupled)
        device_kernels.adam(*ours, grad, None, options, 1.0)
        step_adamw(
            *theirs, grad, lr=lr, betas=(beta1, 0.95), eps=1e-8, weight_decay=weight_decay, step=step,
            decoupled=decoupled,
        )  # fmt: skip
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.nan_to_num(7.0).signbit(), b.nan_to_num(7.0).signbit())
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a[~a.isnan()], b[~b.isnan()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_parameters(dtype: torch.dtype) -> None:
    bits = torch.randint(
        -(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(3), dtype=torch.int64
    )
    bits[::2] = bits[::2] & ~0xFFFF | 0x8000  # just between two bf16
    master = bits.to(torch.int32).view(torch.float32)
    one, other = torch.empty(100_000, dtype=dtype), torch.empty(100_000, dtype=dtype)
    device_kernels.round_parameters(master, one)
    round_parameters(master, other)
    assert torch.equal(one.isnan(), other.isnan())
    assert torch.equal(one.nan_to_num(nan=0), other.nan_to_num(nan=0))
