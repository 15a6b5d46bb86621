"""AdamW: equality to the bit with the written formula, and closeness to float64 and to torch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim_cpu import kernels
from optim_cpu.adam import step_adamw
from optim_cpu.kernels import DType, StepBatch

from . import reference
from .reference import F32

HYPER: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "step": 3,
}
NUMPY_TYPE = {DType.FP32: np.float32, DType.BF16: np.uint16, DType.FP16: np.float16}


def encode(x: F32, dtype: DType) -> np.ndarray[Any, Any]:
    if dtype is DType.BF16:
        return reference.f32_to_bf16(x)
    with np.errstate(all="ignore"):
        return x.astype(NUMPY_TYPE[dtype])


def decode(x: np.ndarray[Any, Any], dtype: DType) -> F32:
    return reference.bf16_to_f32(x) if dtype is DType.BF16 else x.astype(np.float32)


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def make_state(rng: np.random.Generator, n: int, *, hard: bool) -> tuple[F32, F32, F32, F32]:
    if hard:
        p, m, v, g = (reference.adversarial(rng, n) for _ in range(4))
        return p, m, np.where(rng.random(n) < 0.9, np.abs(v), v), g
    p, m, v, g = (rng.standard_normal(n).astype(np.float32) for _ in range(4))
    return p, m * np.float32(0.01), v * v * np.float32(1e-4), g


def at_offset(x: np.ndarray[Any, Any], elements: int) -> np.ndarray[Any, Any]:
    """A copy that starts `elements` after a 64-byte boundary."""
    room = np.empty(x.nbytes + 64 + elements * x.itemsize, np.uint8)
    start = -room.ctypes.data % 64 + elements * x.itemsize
    view = room[start : start + x.nbytes].view(x.dtype)
    view[:] = x
    return view


def step(
    p: F32, m: F32, v: F32, grad: np.ndarray[Any, Any], grad_dtype: DType,
    out: np.ndarray[Any, Any] | None = None, out_dtype: DType = DType.BF16,
    *, grad_scale: float = 1.0, decoupled: bool = True, **changed: Any,
) -> None:  # fmt: skip
    batch = StepBatch()
    batch.add(
        len(p), batch.add_rule(kernels.adam(decoupled=decoupled, **(HYPER | changed))), param=p.ctypes.data,
        state=(m.ctypes.data, v.ctypes.data), grad=grad.ctypes.data, grad_dtype=grad_dtype,
        out=0 if out is None else out.ctypes.data, out_dtype=out_dtype,
    )  # fmt: skip
    batch.run(grad_scale)


def check(
    n: int, seed: int, grad_dtype: DType, out_dtype: DType | None, *, offset: int = 0, hard: bool = True,
    grad_scale: float = 0.37, decoupled: bool = True, **changed: Any,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    *state, wide = make_state(rng, n, hard=hard)
    grad = encode(wide, grad_dtype)
    expected = reference.adamw(
        *state, decode(grad, grad_dtype), grad_scale=grad_scale, decoupled=decoupled, **(HYPER | changed)
    )
    p, m, v = (at_offset(x, offset) for x in state)
    grad = at_offset(grad, offset)
    out = None if out_dtype is None else at_offset(np.zeros(n, NUMPY_TYPE[out_dtype]), offset)
    step(
        p,
        m,
        v,
        grad,
        grad_dtype,
        out,
        DType.BF16 if out_dtype is None else out_dtype,
        grad_scale=grad_scale,
        decoupled=decoupled,
        **changed,
    )
    for name, got, want in zip(("p", "m", "v"), (p, m, v), expected, strict=True):
        assert same_bits(got, want), (
            f"{name} differs at {np.flatnonzero(got.view('u4') != want.view('u4'))[:5]}"
        )
    if out is not None and out_dtype is not None:
        assert same_bits(
            out,
            reference.round_parameter(expected[0], out_dtype == DType.BF16)
            if out_dtype is not DType.FP32
            else expected[0],
        )


@pytest.mark.parametrize("grad_dtype", list(DType))
@pytest.mark.parametrize("out_dtype", [None, *DType])
@pytest.mark.parametrize("decoupled", [True, False])
def test_every_remainder_equals_the_formula(
    isa: str, grad_dtype: DType, out_dtype: DType | None, decoupled: bool
) -> None:
    for n in range(101):
        check(n, n, grad_dtype, out_dtype, decoupled=decoupled, offset=n % 7)


@pytest.mark.parametrize("offset", [0, 1, 3, 31])
@pytest.mark.parametrize("out_dtype", [None, *DType])
def test_large_and_streamed_equals_the_formula(isa: str, offset: int, out_dtype: DType | None) -> None:
    check((1 << 18) + 77, 5, DType.BF16, out_dtype, offset=offset)
    check((1 << 18) - 1, 6, DType.FP32, out_dtype, offset=offset, hard=False)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_thread_count_changes_no_bit(isa: str, threads: int) -> None:
    kernels.set_thread_count(threads)
    check(5 * (1 << 15) + 13, 7, DType.BF16, DType.BF16)
    check(9 * (1 << 15), 8, DType.FP32, None, hard=False)


@pytest.mark.parametrize(
    "changed",
    [
        {"step": 1},
        {"step": 10**7},
        {"beta1": 0.0, "beta2": 0.0},
        {"eps": 0.0},
        {"lr": 0.0},
        {"weight_decay": 0.0},
        {"lr": 1e30, "weight_decay": 1e3},
        {"beta1": 0.999999, "beta2": 0.99999999},
    ],
    ids=str,
)
def test_hyperparameters_at_their_edges(isa: str, changed: dict[str, Any]) -> None:
    for decoupled in (True, False):
        check(500, 11, DType.FP32, DType.BF16, decoupled=decoupled, **changed)


@pytest.mark.parametrize("grad_scale", [0.0, -1.0, 1e-45, 3e38, float("inf"), float("nan")])
def test_grad_scale_at_its_edges(isa: str, grad_scale: float) -> None:
    check(500, 12, DType.BF16, DType.BF16, grad_scale=grad_scale)


@given(
    sizes=st.lists(st.integers(0, 70_000), min_size=1, max_size=12),
    threads=st.sampled_from([1, 2, 3, 7]),
    name=st.sampled_from(kernels.available_instruction_sets()),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_a_batch_equals_its_segments_alone(sizes: list[int], threads: int, name: str, seed: int) -> None:
    """Segments share tiles; each must come out as if stepped alone, with its own hyperparameters."""
    rng = np.random.default_rng(seed)
    kernels.set_instruction_set(name)
    kernels.set_thread_count(threads)
    batch, kept = StepBatch(1), []
    for i, n in enumerate(sizes):
        *state, g = make_state(rng, n, hard=False)
        hyper = HYPER | {"lr": 1e-3 * (i + 1), "step": i + 1}
        expected = reference.adamw(*state, g, grad_scale=0.5, decoupled=i % 2 == 0, **hyper)
        p, m, v = (x.copy() for x in state)
        rule = batch.add_rule(kernels.adam(decoupled=i % 2 == 0, **hyper))
        batch.add(
            n, rule, param=p.ctypes.data, state=(m.ctypes.data, v.ctypes.data), grad=g.ctypes.data,
            grad_dtype=DType.FP32,
        )  # fmt: skip
        kept.append((g, (p, m, v), expected))
    assert len(batch) == len(sizes)
    batch.run(0.5)
    for _, got, expected in kept:
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


def test_cutting_a_tensor_anywhere_changes_no_bit(isa: str) -> None:
    n = 200_000
    rng = np.random.default_rng(3)
    p, m, v, g = make_state(rng, n, hard=True)
    grad = reference.f32_to_bf16(g)
    whole = [p.copy(), m.copy(), v.copy(), np.zeros(n, np.uint16)]
    step(*whole[:3], grad, DType.BF16, whole[3])
    parts = [p.copy(), m.copy(), v.copy(), np.zeros(n, np.uint16)]
    cuts = [0, 1, 17, 4096, 99_999, 131_072, n]
    for a, b in itertools.pairwise(cuts):
        step(*(x[a:b] for x in parts[:3]), grad[a:b], DType.BF16, parts[3][a:b])
    assert all(same_bits(a, b) for a, b in zip(whole, parts, strict=True))


def test_out_may_be_the_gradient(isa: str) -> None:
    n = (1 << 18) + 5
    p, m, v, g = make_state(np.random.default_rng(4), n, hard=False)
    grad = reference.f32_to_bf16(g)
    expected = reference.adamw(p, m, v, reference.bf16_to_f32(grad), grad_scale=1.0, decoupled=True, **HYPER)
    step(p, m, v, grad, DType.BF16, grad)
    assert same_bits(p, expected[0])
    assert same_bits(grad, reference.round_parameter(expected[0], True))


def test_nothing_outside_the_range_is_written(isa: str) -> None:
    n = 1001
    p, m, v, g = make_state(np.random.default_rng(5), n + 64, hard=False)
    out = np.full(n + 64, 0xABCD, np.uint16)
    before = [x.copy() for x in (p, m, v, out)]
    step(*(x[32 : 32 + n] for x in (p, m, v)), g[32 : 32 + n], DType.FP32, out[32 : 32 + n])
    for now, then in zip((p, m, v, out), before, strict=True):
        assert same_bits(now[:32], then[:32])
        assert same_bits(now[32 + n :], then[32 + n :])
        assert not same_bits(now[32 : 32 + n], then[32 : 32 + n])


def run_float64(
    p: np.ndarray[Any, Any], grads: list[F32], decoupled: bool, hyper: dict[str, Any]
) -> np.ndarray[Any, Any]:
    p, m, v = p.astype(np.float64), np.zeros(len(p)), np.zeros(len(p))
    lr, b1, b2 = hyper["lr"], hyper["beta1"], hyper["beta2"]
    for t, grad in enumerate(grads, 1):
        g = grad.astype(np.float64)
        if decoupled:
            p = p * (1 - lr * hyper["weight_decay"])
        else:
            g = g + hyper["weight_decay"] * p
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        p = p - lr / (1 - b1**t) * m / (np.sqrt(v) / np.sqrt(1 - b2**t) + hyper["eps"])
    return p


@pytest.mark.parametrize("decoupled", [True, False])
def test_error_against_float64_is_like_torch_fused(isa: str, decoupled: bool) -> None:
    """400 steps. torch fuses multiply and add, so a tenth more is allowed; 1.00 to 1.08 is what was seen."""
    rng = np.random.default_rng(6)
    n, steps, hyper = 4096, 400, HYPER | {"lr": 1e-2, "weight_decay": 0.05}
    p0 = rng.standard_normal(n).astype(np.float32)
    scale = np.exp(rng.uniform(-12, 4, n)).astype(np.float32)
    grads = [rng.standard_normal(n).astype(np.float32) * scale for _ in range(steps)]
    exact = run_float64(p0, grads, decoupled, hyper)

    q = torch.nn.Parameter(torch.from_numpy(p0.copy()))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = kind([q], lr=hyper["lr"], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05, fused=True)
    p, m, v = p0.copy(), np.zeros(n, np.float32), np.zeros(n, np.float32)
    for t, g in enumerate(grads, 1):
        q.grad = torch.from_numpy(g)
        theirs.step()
        step(p, m, v, g, DType.FP32, decoupled=decoupled, **(hyper | {"step": t}))
    ours_error = np.abs(p - exact)
    torch_error = np.abs(q.detach().numpy() - exact)
    assert ours_error.max() <= 1.1 * torch_error.max()
    assert np.sqrt((ours_error**2).mean()) <= 1.1 * np.sqrt((torch_error**2).mean())
    assert ours_error.max() < 400 * 2**-24 * np.abs(exact).max()


def ulps(a: F32, b: F32) -> int:
    """The largest distance, in units of the last place of the larger magnitude."""
    return int((np.abs(a.astype(np.float64) - b) / np.spacing(np.maximum(np.abs(a), np.abs(b)))).max())


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_one_step_is_within_few_ulp_of_torch(decoupled: bool, fused: bool) -> None:
    """From torch's own state each time, so that differences do not add up over steps."""
    rng = np.random.default_rng(7)
    q = torch.nn.Parameter(torch.from_numpy(rng.standard_normal(10_007).astype(np.float32)))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = kind([q], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=fused)
    for t in range(1, 21):
        state = theirs.state[q]
        start = q.detach().clone()
        before = start.clone()
        m = state["exp_avg"].clone() if state else torch.zeros_like(before)
        v = state["exp_avg_sq"].clone() if state else torch.zeros_like(before)
        q.grad = torch.from_numpy(rng.standard_normal(10_007).astype(np.float32))
        theirs.step()
        step_adamw(
            before,
            m,
            v,
            q.grad,
            lr=1e-3,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            step=t,
            decoupled=decoupled,
        )
        state = theirs.state[q]
        # m and p are differences: one rounding of the larger operand can be several ulp of a small result.
        assert float((before - q.detach()).abs().max()) <= 2 * 2**-23 * float(before.abs().max())
        assert float((m - state["exp_avg"]).abs().max()) <= 2 * 2**-23 * float(m.abs().max())
        # With L2, g + weight_decay * p may cancel: compare v where at least half of g is left.
        whole = torch.tensor(decoupled) | ((q.grad + 0.1 * start).abs() > 0.5 * q.grad.abs())
        assert ulps(v[whole].numpy(), state["exp_avg_sq"][whole].numpy()) <= (3 if decoupled else 8)
        larger = before.abs() > 0.1
        assert ulps(before[larger].numpy(), q.detach()[larger].numpy()) <= 3


def tensors(n: int = 8) -> dict[str, torch.Tensor]:
    return {name: torch.ones(n) for name in ("master", "exp_avg", "exp_avg_sq", "grad")}


OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 1}


def test_step_adamw_on_tensors_writes_out() -> None:
    t = tensors(100)
    t["grad"] = torch.linspace(-1, 1, 100).bfloat16().reshape(4, 25)
    t = {name: x.reshape(4, 25) for name, x in t.items()}
    expected = reference.adamw(
        *(t[k].numpy().copy() for k in ("master", "exp_avg", "exp_avg_sq")), t["grad"].float().numpy(),
        grad_scale=0.25, decoupled=True, **(HYPER | {"weight_decay": 0.0, "step": 1}),
    )  # fmt: skip
    out = torch.zeros(4, 25, dtype=torch.float16)
    step_adamw(**t, out=out, grad_scale=0.25, **OPTIONS)
    assert same_bits(t["master"].numpy(), expected[0])
    assert same_bits(t["exp_avg_sq"].numpy(), expected[2])
    assert torch.equal(out, t["master"].half())


@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq", "grad", "out"])
def test_step_adamw_says_which_tensor_is_wrong(name: str) -> None:
    good = tensors() | {"out": torch.zeros(8)}
    with pytest.raises(TypeError, match=rf"\b{name} is torch.float64; it must be"):
        step_adamw(**(good | {name: torch.ones(8, dtype=torch.float64)}), **OPTIONS)
    with pytest.raises(ValueError, match=rf"\b{name} is on meta"):
        step_adamw(**(good | {name: torch.ones(8, device="meta")}), **OPTIONS)
    with pytest.raises(ValueError, match=rf"\b{name} is not contiguous"):
        step_adamw(**(good | {name: torch.ones(16)[::2]}), **OPTIONS)
    if name != "master":
        with pytest.raises(ValueError, match=rf"\b{name} has shape \(7,\), but master has \(8,\)"):
            step_adamw(**(good | {name: torch.ones(7)}), **OPTIONS)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("numel", -1), ("param", 0), ("param", 4098), ("state0", 0), ("state1", 4097), ("grad", 0),
        ("grad", 4097), ("out", 4097), ("out", -2), ("grad_dtype", 3), ("out_dtype", -1), ("remainder", 4097),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named_and_leaves_the_batch_alone(argument: str, value: Any) -> None:
    good = {"numel": 4, "param": 4096, "state0": 4096, "state1": 4096, "grad": 4096, "out": 4096}
    good |= {"grad_dtype": DType.BF16}

    def add(numel: int, state0: int, state1: int, **rest: Any) -> None:
        batch.add(numel, 0, state=(state0, state1), **rest)

    batch = StepBatch(1)
    batch.add_rule(kernels.adam(**HYPER))
    add(**good)
    with pytest.raises(ValueError, match=rf"StepBatch.add: {argument} must be .*, got {value}"):
        add(**(good | {argument: value}))
    assert len(batch) == 1
    batch.clear()
    assert len(batch) == 0
    batch.run(1.0)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("lr", -1e-3), ("lr", float("nan")), ("lr", float("inf")), ("beta1", 1.0), ("beta1", -0.1), ("beta2", 1.0),
        ("beta2", float("nan")), ("eps", -1e-8), ("eps", float("inf")), ("weight_decay", -1.0), ("step", 0),
    ],
)  # fmt: skip
def test_a_bad_hyperparameter_is_named(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"adam: {argument} must be .*, got {value}"):
        kernels.adam(**(HYPER | {argument: value}))
