"""step_adamw: one step on flat tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from optim_cpu import kernels
from optim_cpu.adam import step_adamw
from optim_cpu.kernels import DType, StepBatch

from . import reference
from .cases import ADAM as HYPER
from .cases import address, same_bits
from .reference import F32, Array


def make_state(rng: np.random.Generator, n: int) -> tuple[F32, F32, F32, F32]:
    p, m, v, g = (rng.standard_normal(n, dtype=np.float32) for _ in range(4))
    return p, m * np.float32(0.01), v * v * np.float32(1e-4), g


def step(
    p: F32, m: F32, v: F32, grad: Array, grad_dtype: DType, *, grad_scale: float = 1.0, **changed: Any
) -> None:
    batch = StepBatch()
    batch.add(
        len(p), batch.add_rule(kernels.adam(**(HYPER | changed))), param=address(p), state=(address(m), address(v)),
        grad=address(grad), grad_dtype=grad_dtype,
    )  # fmt: skip
    batch.run(grad_scale)


def tensors(n: int = 8) -> dict[str, torch.Tensor]:
    return {name: torch.ones(n) for name in ("master", "exp_avg", "exp_avg_sq", "grad")}


OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "step": 1}


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_step_adamw_equals_the_formula_and_writes_out(
    decoupled: bool, grad_dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    p, m, v, g = (torch.from_numpy(x).reshape(4, 25) for x in make_state(np.random.default_rng(1), 100))
    g = g.to(grad_dtype)
    out = None if out_dtype is None else torch.zeros(4, 25, dtype=out_dtype)
    before = [x.float().numpy().copy() for x in (p, m, v, g)]
    hyper = HYPER | {"weight_decay": 0.1, "step": 1, "decoupled": decoupled, "grad_scale": 0.25}
    expected = reference.adamw(*before, **hyper)
    step_adamw(p, m, v, g, out=out, grad_scale=0.25, decoupled=decoupled, **OPTIONS)
    for result, want in zip((p, m, v), expected, strict=True):
        assert same_bits(result.numpy(), want)
    if out_dtype is torch.bfloat16 and out is not None:
        assert same_bits(out.view(torch.uint16).numpy(), reference.round_parameter(expected[0], True))
    elif out is not None:
        assert torch.equal(out, p.to(out.dtype))


def test_step_adamw_writes_out_over_the_gradient() -> None:
    p, m, v, g = (torch.from_numpy(x) for x in make_state(np.random.default_rng(2), 100))
    g = g.bfloat16()
    step_adamw(p, m, v, g, out=g, **OPTIONS)
    assert same_bits(g.view(torch.uint16).numpy(), reference.round_parameter(p.numpy(), True))


@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq", "grad", "out"])
def test_step_adamw_says_which_tensor_is_wrong(name: str) -> None:
    good: dict[str, Any] = tensors() | {"out": torch.zeros(8)}
    with pytest.raises(TypeError, match=rf"\b{name} is torch.float64; it must be"):
        step_adamw(**(good | {name: torch.ones(8, dtype=torch.float64)}), **OPTIONS)
    with pytest.raises(ValueError, match=rf"\b{name} is on meta"):
        step_adamw(**(good | {name: torch.ones(8, device="meta")}), **OPTIONS)
    with pytest.raises(ValueError, match=rf"\b{name} is not contiguous"):
        step_adamw(**(good | {name: torch.ones(16)[::2]}), **OPTIONS)
    if name != "master":
        with pytest.raises(ValueError, match=rf"\b{name} has shape \(7,\), but master has \(8,\)"):
            step_adamw(**(good | {name: torch.ones(7)}), **OPTIONS)
    assert all(torch.equal(x, torch.ones(8)) for key, x in good.items() if key != "out")
