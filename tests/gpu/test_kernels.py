"""The optimizer's arithmetic on a GPU gives the bits of the C kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optim_cpu import kernels
from optim_cpu.kernels import DType, Rule, StateFormat
from zero3 import device_kernels

pytestmark = pytest.mark.gpu

CODES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}
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


RULES: dict[str, Callable[[int], Rule]] = {
    "adamw": lambda step: kernels.adam(
        lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, decoupled=True
    ),
    "adam": lambda step: kernels.adam(
        lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, decoupled=False
    ),
    "lion": lambda step: kernels.lion(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1, step=step),
    "adagrad": lambda step: kernels.adagrad(lr=1e-2, lr_decay=0.1, eps=1e-10, weight_decay=0.1, step=step),
    "sgd": lambda step: kernels.sgd(
        lr=1e-2, momentum=0.9, dampening=0.3, nesterov=False, weight_decay=0.1, step=step
    ),
    "sgd, nesterov": lambda step: kernels.sgd(
        lr=1e-2, momentum=0.9, dampening=0.0, nesterov=True, weight_decay=0.1, step=step
    ),
    "sgd without momentum": lambda step: kernels.sgd(
        lr=1e-2, momentum=0.0, dampening=0.0, nesterov=False, weight_decay=0.1, step=step
    ),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_every_rule(name: str, grad_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Values of every magnitude: some squares overflow, so infinities and NaN come up, too."""
    numel = 300_007
    ours = [spread(numel, 3), torch.zeros(numel), torch.zeros(numel)]
    theirs = [tensor.cuda() for tensor in ours]
    out = torch.empty(numel, dtype=out_dtype)
    out_there = out.cuda()
    batch = kernels.StepBatch()
    for step in range(1, 6):
        grad = spread(numel, 10 + step).mul(1e15).to(grad_dtype)
        rule = RULES[name](step)
        device_kernels.step(rule, theirs[0], theirs[1:], grad.cuda(), out=out_there, grad_scale=0.37)
        batch.clear()
        batch.add(
            numel,
            batch.add_rule(rule),
            param=ours[0].data_ptr(),
            state=(ours[1].data_ptr(), ours[2].data_ptr()),
            grad=grad.data_ptr(),
            grad_dtype=CODES[grad_dtype],
            out=out.data_ptr(),
            out_dtype=CODES[out_dtype],
        )
        batch.run(0.37)
    for which, mine, there in zip(("param", "state 0", "state 1"), ours, theirs, strict=True):
        assert torch.equal(mine.view(torch.int32), there.cpu().view(torch.int32)), which
    assert torch.equal(out.view(torch.int16), out_there.cpu().view(torch.int16))
    assert not torch.equal(ours[0], spread(numel, 3))


@pytest.mark.parametrize("name", ["adamw", "sgd", "sgd without momentum"])
@pytest.mark.parametrize("state_format", StateFormat)
@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
def test_every_format(
    name: str, state_format: StateFormat, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masters in halves, moments in bfloat16 rounded to the nearest or by chance, in pieces that begin anywhere."""
    monkeypatch.setattr(device_kernels, "ELEMENTS_AT_ONCE", 99_991)
    numel, first_index = 300_007, (1 << 32) - 150_000
    state_dtype = torch.float32 if state_format is StateFormat.FP32 else torch.bfloat16
    ours = {
        "state 0": torch.zeros(numel, dtype=state_dtype),
        "state 1": torch.zeros(numel, dtype=state_dtype),
    }
    master = spread(numel, 3)
    if splits:
        ours["param"] = torch.empty(numel, dtype=torch.bfloat16)
        ours["remainder"] = torch.empty(numel, dtype=torch.int16)
        kernels.split(
            ours["param"].data_ptr(), ours["remainder"].data_ptr(), master.data_ptr(), master.numel()
        )
    else:
        ours |= {"param": master.clone(), "out": torch.empty(numel, dtype=torch.bfloat16)}
    theirs = {which: tensor.cuda() for which, tensor in ours.items()}
    if splits:
        device_kernels.split(master.cuda(), theirs["param"].zero_(), theirs["remainder"].zero_())
        assert_same_bits(ours, theirs)
    batch = kernels.StepBatch()
    for step in range(1, 4):
        grad = spread(numel, 10 + step).mul(1e15).bfloat16()
        rule = RULES[name](step)
        device_kernels.step(
            rule,
            theirs["param"],
            [theirs["state 0"], theirs["state 1"]],
            grad.cuda(),
            out=theirs.get("out"),
            grad_scale=0.37,
            remainder=theirs.get("remainder"),
            state_format=state_format,
            first_index=first_index,
        )
        batch.clear()
        batch.add(
            numel,
            batch.add_rule(rule),
            param=ours["param"].data_ptr(),
            remainder=ours["remainder"].data_ptr() if splits else 0,
            state=(ours["state 0"].data_ptr(), ours["state 1"].data_ptr()),
            state_format=state_format,
            grad=grad.data_ptr(),
            grad_dtype=DType.BF16,
            out=0 if splits else ours["out"].data_ptr(),
            out_dtype=DType.BF16,
            first_index=first_index,
        )
        batch.run(0.37)
        assert_same_bits(ours, theirs)
    if splits:
        joined = device_kernels.join(theirs["param"], theirs["remainder"]).cpu()
        assert not torch.equal(joined, master)
    else:
        assert not torch.equal(ours["param"], master)


def assert_same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for which, mine in ours.items():
        there = theirs[which].cpu()
        assert torch.equal(mine.view(torch.uint8), there.view(torch.uint8)), which
