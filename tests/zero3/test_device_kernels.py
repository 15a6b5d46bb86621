"""The optimizer's kernels as torch operations give the bits of the C kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from optim_cpu import kernels
from optim_cpu.formats import round_parameters
from optim_cpu.kernels import DType, Rule
from zero3 import device_kernels
from zero3.grads import KERNEL_DTYPES


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


def adam(step: int, *, lr: float = 1e-3, beta: float = 0.9, weight_decay: float = 0.1, **own: Any) -> Rule:
    return kernels.adam(
        lr=lr, beta1=beta, beta2=0.95, eps=1e-8, weight_decay=weight_decay, step=step, **own
    )  # fmt: skip


def lion(step: int, *, lr: float = 1e-3, beta: float = 0.9, weight_decay: float = 0.1, **own: Any) -> Rule:
    return kernels.lion(lr=lr, beta1=beta, beta2=0.4, weight_decay=weight_decay, step=step, **own)


def adagrad(step: int, *, lr: float = 1e-2, beta: float = 0.9, weight_decay: float = 0.1, **own: Any) -> Rule:
    return kernels.adagrad(lr=lr, lr_decay=beta, eps=1e-10, weight_decay=weight_decay, step=step, **own)


def sgd(step: int, *, lr: float = 1e-2, beta: float = 0.9, weight_decay: float = 0.1, **own: Any) -> Rule:
    options = {"dampening": 0.3, "nesterov": False} | own
    return kernels.sgd(lr=lr, momentum=beta, weight_decay=weight_decay, step=step, **options)


RULES: dict[str, Callable[..., Rule]] = {
    "adamw": adam,
    "adam": partial(adam, decoupled=False),
    "lion": lion,
    "adagrad": adagrad,
    "sgd": sgd,
    "sgd, nesterov": partial(sgd, dampening=0.0, nesterov=True),
    "sgd without momentum": lambda step, beta=0.0, **own: sgd(step, beta=0.0, **own),
}


@pytest.fixture(params=RULES)
def rule_at(request: pytest.FixtureRequest) -> Callable[..., Rule]:
    return RULES[request.param]


@pytest.fixture
def exact_sqrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's sqrt on a CPU is not correctly rounded; that of a GPU is, and so is one by way of float64."""
    sqrt = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda t: sqrt(t.double()).float())


def step_in_c(
    rule: Rule, tensors: list[Tensor], grad: Tensor, *, out: Tensor | None = None, grad_scale: float = 1.0
) -> None:
    param, *state = tensors
    batch = kernels.StepBatch()
    batch.add(
        param.numel(),
        batch.add_rule(rule),
        param=param.data_ptr(),
        state=tuple(tensor.data_ptr() for tensor in state),
        grad=grad.data_ptr(),
        grad_dtype=KERNEL_DTYPES[grad.dtype],
        out=0 if out is None else out.data_ptr(),
        out_dtype=DType.BF16 if out is None else KERNEL_DTYPES[out.dtype],
    )
    batch.run(grad_scale)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_every_rule(
    rule_at: Callable[..., Rule], half: torch.dtype, maximize: bool, exact_sqrt: None
) -> None:
    """Several steps, gradients and parameters of 16 bits; state that the rule does not have stays as it is."""
    generator = torch.Generator().manual_seed(2)
    ours = [torch.randn(5000, generator=generator), torch.zeros(5000), torch.zeros(5000)]
    theirs = [tensor.clone() for tensor in ours]
    out, expected = torch.empty(5000, dtype=half), torch.empty(5000, dtype=half)
    start = ours[0].clone()
    for step in range(1, 4):
        grad = torch.randn(5000, generator=generator).to(half)
        rule = rule_at(step, maximize=maximize)
        device_kernels.step(rule, ours[0], ours[1:], grad, out=out, grad_scale=0.37)
        step_in_c(rule, theirs, grad, out=expected, grad_scale=0.37)
    assert all(map(same_bits, ours, theirs))
    assert same_bits(out, expected)
    assert not torch.equal(ours[0], start)
    assert [bool(tensor.any()) for tensor in ours[1:]] == [i < rule.state_count for i in range(2)]


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-50, 0.1])
@pytest.mark.parametrize("lr", [0.0, 1e-3, 1e20])
def test_every_rule_at_the_edges(
    rule_at: Callable[..., Rule],
    lr: float,
    weight_decay: float,
    beta: float,
    request: pytest.FixtureRequest,
    exact_sqrt: None,
) -> None:
    """Both forms of an average, decay that float32 does not hold, a warmup's lr of 0; zeros, subnormals, infinities,
    and NaN, of which the kernels store only one."""
    if beta == 0 and request.node.callspec.params["rule_at"] == "sgd, nesterov":
        beta = 0.1  # it needs some
    special = torch.tensor([0.0, -0.0, 1e-42, -1e-42, 3e38, -1e19, math.inf, -math.inf, 1.0, -2.5, math.nan])
    special = torch.cat([special, torch.tensor([-1, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)])
    param, grad = (t.flatten() for t in torch.meshgrid(special, special, indexing="ij"))
    ours = [param.clone(), torch.full_like(param, -0.0), torch.zeros_like(param)]
    theirs = [tensor.clone() for tensor in ours]
    for step in range(1, 4):
        rule = rule_at(step, lr=lr, beta=beta, weight_decay=weight_decay)
        device_kernels.step(rule, ours[0], ours[1:], grad, out=None, grad_scale=1.0)
        step_in_c(rule, theirs, grad)
    for name, one, other in zip(("param", "state 0", "state 1"), ours, theirs, strict=True):
        assert same_bits(one, other), name
    assert ours[0].isnan().any() and not ours[0].isnan().all()


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
    canonical = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}[dtype]
    stored = one.view(torch.int32 if dtype is torch.float32 else torch.int16)
    assert set(stored[one.isnan()].tolist()) == {canonical}
