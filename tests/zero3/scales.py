"""A model whose gradients are exact, trained by the engine and by a plain loop with any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import optim_cpu
from optim_cpu.formats import round_parameters
from tiering.placement.plan import Plan

STEPS, CLIP, LR = 3, 7.2, 2.0**-6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = list(DTYPES)
FORMATS = ["fp32", "split", "bf16", "split+bf16"]


class Scale(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 40))
        self.shift = nn.Parameter(torch.randn(40))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.weight * x).float().pow(2).sum() + (self.shift * x).float().sum()) / 64


class Scales(nn.Module):
    """Elementwise, so that gradients do not depend on how a library adds up; some of it frozen or unused at times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Scale(rows) for rows in (130, 60, 120, 60, 100, 130))
        self.outer = Scale(90)
        self.frozen = nn.Parameter(torch.randn(50, 40), requires_grad=False)

    def forward(self, x: Tensor, skip: int) -> Tensor:
        x = x.to(self.frozen.dtype)
        total: Tensor = self.outer(x) + (self.frozen * x).float().sum()
        for index, block in enumerate(self.blocks):
            if index != skip:
                total = total + block(x)
        return total


@dataclass(frozen=True)
class Case:
    """An update rule as the configuration names it, and the same as an optimizer of a plain loop."""

    name: str
    options: dict[str, Any]  # DeepSpeed's
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    state: tuple[str, ...]


CASES = {
    "AdamW": Case(
        "AdamW",
        {"lr": LR, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1},
        lambda groups: optim_cpu.AdamW(groups, LR, (0.8, 0.9), 1e-6, 0.1),
        ("exp_avg", "exp_avg_sq"),
    ),
    "Adam": Case(
        "Adam",
        {"lr": LR, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1, "adam_w_mode": False},
        lambda groups: optim_cpu.Adam(groups, LR, (0.8, 0.9), 1e-6, 0.1),
        ("exp_avg", "exp_avg_sq"),
    ),
    "Lion": Case(
        "Lion",
        {"lr": LR, "betas": [0.8, 0.9], "weight_decay": 0.1},
        lambda groups: optim_cpu.Lion(groups, LR, (0.8, 0.9), 0.1),
        ("exp_avg",),
    ),
    "Adagrad": Case(
        "Adagrad",
        {"lr": LR, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-6},
        lambda groups: optim_cpu.Adagrad(groups, LR, 0.1, 0.1, 0.3, 1e-6),
        ("sum",),
    ),
    "SGD": Case(
        "SGD", {"lr": LR, "weight_decay": 0.1}, lambda groups: optim_cpu.SGD(groups, LR, weight_decay=0.1), ()
    ),
    "SGD, momentum": Case(
        "SGD",
        {"lr": LR, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        lambda groups: optim_cpu.SGD(groups, LR, 0.9, 0.5, 0.1),
        ("momentum_buffer",),
    ),
    "SGD, Nesterov": Case(
        "SGD",
        {"lr": LR, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        lambda groups: optim_cpu.SGD(groups, LR, 0.9, 0, 0.1, True),
        ("momentum_buffer",),
    ),
}
WHOLE = {"cache_in_host": False}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "optimizer on nvme": {"stage": 1, "offload_optimizer": "nvme", **WHOLE},
    "all on nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "sub_group_size": 1, **WHOLE},
    "nothing leaves": {"stage": 2, "offload_optimizer": "nvme", "ratio": 0.0, **WHOLE},
    "a share leaves": {"offload_optimizer": "nvme", "ratio": 0.3, **WHOLE},
    "a share leaves to the host": {
        "offload_param": "nvme",
        "offload_optimizer": "cpu",
        "ratio": 0.6,
        **WHOLE,
    },
}


@dataclass
class Run:
    norms: list[float]
    masters: dict[str, Tensor]
    weights: dict[str, Tensor]
    state: dict[str, Tensor]  # by the parameter's name and the state's
    optimizer: torch.optim.Optimizer
    plan: Plan | None = None


def param_groups(model: nn.Module, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What is shifted has a rate of its own, and goes uphill."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    rest = [p for name, p in named if not name.endswith("shift")]
    shifts = [p for name, p in named if name.endswith("shift")]
    return [{"params": rest}, {"params": shifts, "maximize": True, "lr": LR / 2, "weight_decay": 0.0}]


def script(steps: int, accumulation: int) -> Iterator[tuple[list[tuple[Tensor, int]], float]]:
    """For each update its inputs and a factor of the learning rates; blocks are left out by turns."""
    generator = torch.Generator().manual_seed(9)
    for step in range(steps):
        yield [(torch.randn(40, generator=generator), step % 4) for _ in range(accumulation)], 1 - step / 8


def train_engine(engine: Any, accumulation: int, steps: int = STEPS) -> Run:
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    norms = []
    for inputs, factor in script(steps, accumulation):
        for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        for x, skip in inputs:
            engine.backward(engine(x, skip))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    masters = engine.master_state_dict()
    state = {
        f"{name}: {key}": engine.get_fp32_state(name, key) for name in masters for key in engine.state_names
    }
    run = Run(norms, masters, engine.state_dict(), state, engine.optimizer, engine.plan)
    engine.close()
    return run


def train_rule(
    start: Callable[..., Any], case: Case, precision: str = "bf16", accumulation: int = 1, **options: Any
) -> Run:
    """Scales, trained by an engine that the configuration gives the rule of ``case``."""
    model = Scales()
    rule = {
        "rule": case.name,
        "optimizer": case.options,
        "model_parameters": param_groups(model, case.options),
    }
    engine = start(model, **settings(precision, accumulation), **rule, **options)
    return train_engine(engine, accumulation)


def assert_same(
    run: Run,
    expected: Run,
    differing: Callable[[dict[str, Tensor], dict[str, Tensor]], list[str]],
    where: str,
) -> None:
    assert run.norms == expected.norms, where
    assert differing(run.masters, expected.masters) == [], where
    assert differing(run.weights, expected.weights) == [], where
    assert differing(run.state, expected.state) == [], where


def train_plainly(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    options: dict[str, Any],
    precision: str,
    accumulation: int,
    norms: list[float],
    groups: Callable[[nn.Module, dict[str, Any]], list[dict[str, Any]]] = param_groups,
) -> Run:
    """The loop that a user would write, on fp32 masters; ``norms`` are the engine's, which adds in another order."""
    model = Scales()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {p: p.detach().clone().requires_grad_() for p in named.values()}
    chosen = [{**group, "params": [masters[p] for p in group["params"]]} for group in groups(model, options)]
    optimizer = make(chosen)
    rates = [group["lr"] for group in optimizer.param_groups]
    model.to(DTYPES[precision])
    for p, master in masters.items():
        round_parameters(master.detach(), p.detach())
    accumulated = torch.float32 if accumulation > 1 else DTYPES[precision]
    for (inputs, factor), norm in zip(script(len(norms), accumulation), norms, strict=True):
        for x, skip in inputs:
            (model(x, skip) / accumulation).backward()
            for p, master in masters.items():
                if p.grad is not None:
                    grad = p.grad.to(accumulated).float()
                    master.grad = grad if master.grad is None else master.grad + grad
                    p.grad = None
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        for master in masters.values():
            if master.grad is not None:
                master.grad.mul_(min(1.0, CLIP / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        for p, master in masters.items():
            round_parameters(master.detach(), p.detach())
    state = {
        f"{name}: {key}": value
        for name, p in named.items()
        for key, value in optimizer.state[masters[p]].items()
        if isinstance(value, Tensor) and key != "step"
    }
    weights = {name: masters[p].detach() for name, p in named.items()}
    return Run(norms, weights, model.state_dict(), state, optimizer)


def settings(precision: str = "fp32", accumulation: int = 1, **options: Any) -> dict[str, Any]:
    """For an engine whose optimizer comes from elsewhere."""
    fp16 = {"loss_scale": 1.0}
    return {"precision": precision, "accumulation": accumulation, "clip": CLIP, "fp16": fp16} | options
