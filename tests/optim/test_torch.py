"""One step beside torch.optim: each optimizer, option and implementation, within a few units of the last place.

From torch's own state each time, so that differences do not add up. A difference of two numbers has no small relative
error, so the unit is the last place of what was added up.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from optim_cpu import kernels
from optim_cpu.kernels import DType, StepBatch

from .test_accuracy import NAMES, one_torch_thread, torch_optimizer

__all__ = ["one_torch_thread"]

F64 = npt.NDArray[np.float64]
N, STEPS, ULP = 5003, 12, 2.0**-23

IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True, "fused": False},
    "for-loop": {"foreach": False, "fused": False},
}

ADAM = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "decoupled": True,
    "maximize": False,
}
ADAGRAD = {"lr": 1e-2, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0, "maximize": False}
SGD = {
    "lr": 0.1,
    "momentum": 0.0,
    "dampening": 0.0,
    "nesterov": False,
    "weight_decay": 0.0,
    "maximize": False,
}

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("adam", ADAM | {"decoupled": decoupled, "maximize": maximize, "weight_decay": wd})
        for decoupled, maximize, wd in itertools.product([True, False], [False, True], [0.0, 0.1])
    ),
    *(("adam", ADAM | changed) for changed in ({"beta1": 0.3, "beta2": 0.4}, {"beta1": 0.0, "beta2": 0.95})),
    *(("adam", ADAM | changed) for changed in ({"eps": 1e-3}, {"lr": 1e-6})),
    *(
        ("adagrad", ADAGRAD | {"lr_decay": d, "weight_decay": wd, "maximize": maximize})
        for d, wd, maximize in itertools.product([0.0, 0.1], [0.0, 0.1], [False, True])
    ),
    *(
        (
            "sgd",
            SGD | {"momentum": m, "dampening": d, "nesterov": n, "weight_decay": wd, "maximize": maximize},
        )
        for (m, d, n), wd, maximize in itertools.product(
            [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.4, False), (0.9, 0.0, True)],
            [0.0, 0.1],
            [False, True],
        )
    ),
]


def sums(
    optimizer: str, hyper: dict[str, Any], p: F64, state: list[F64], g: F64, t: int
) -> tuple[F64, list[F64]]:
    """How large the terms are that make the new parameter, and each new state array."""
    decay = 0 if hyper.get("decoupled") else hyper["weight_decay"]
    decayed = (-g if hyper["maximize"] else g) + decay * p  # may cancel
    g = np.abs(g) + decay * np.abs(p)
    if optimizer == "sgd":
        b = hyper["momentum"] * np.abs(state[0]) + (1 + hyper["dampening"]) * g if state else g
        return np.abs(p) + hyper["lr"] * (g + b), [b]
    if optimizer == "adagrad":
        total, terms = state[0] + decayed * decayed, state[0] + g * g
        return np.abs(p) + hyper["lr"] * g / np.sqrt(total) * (terms / total), [terms]
    b1, b2 = hyper["beta1"], hyper["beta2"]
    m, v = b1 * np.abs(state[0]) + (1 - b1) * g, b2 * state[1] + (1 - b2) * g * g
    return (
        np.abs(p) + hyper["lr"] / (1 - b1**t) * m / (np.sqrt(v / (1 - b2**t)) + hyper["eps"]),
        [m + np.abs(state[0]), v + state[1] + g * g * (1 - b2)],
    )


@pytest.mark.parametrize(("optimizer", "hyper"), OPTIONS, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_step_is_within_few_ulp(optimizer: str, hyper: dict[str, Any], implementation: str) -> None:
    """Seen: parameters 2, averages 1.6, Adagrad's sum with decay 3."""
    generator = torch.Generator().manual_seed(7)
    q = torch.nn.Parameter(torch.randn(N, generator=generator))
    theirs = torch_optimizer(optimizer, q, hyper, **IMPLEMENTATIONS[implementation])
    worst: dict[str, float] = {}
    for t in range(1, STEPS + 1):
        before = dict(theirs.state[q])
        rule = getattr(kernels, optimizer)(**hyper, step=t)
        names = NAMES[optimizer][: rule.state_count]
        p = q.detach().clone()
        state = [before[name].clone() if before.get(name) is not None else torch.zeros(N) for name in names]
        grad = torch.randn(N, generator=generator)
        batch = StepBatch()
        batch.add(
            N, batch.add_rule(rule), param=p.data_ptr(), state=tuple(x.data_ptr() for x in state),
            grad=grad.data_ptr(), grad_dtype=DType.FP32,
        )  # fmt: skip
        old = [x.double().numpy().copy() for x in (p, *state)]
        batch.run()
        q.grad = grad
        theirs.step()
        after = [q.detach(), *(theirs.state[q][name] for name in names)]
        p_terms, state_terms = sums(optimizer, hyper, old[0], old[1:], grad.double().numpy(), t)
        for name, ours, want, terms in zip(
            ["param", *names], [p, *state], after, [p_terms, *state_terms], strict=False
        ):
            ulps = float((np.abs(ours.double().numpy() - want.double().numpy()) / (terms * ULP)).max())
            worst[name] = max(worst.get(name, 0), ulps)
    assert max(worst.values()) <= 3, worst
