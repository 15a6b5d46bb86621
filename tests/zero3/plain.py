"""One training script, run by a plain PyTorch loop and by the engine wherever state may live, and compared.

The plain loop keeps float32 masters beside parameters in the compute dtype, accumulates gradients in the dtype in which
the engine does, and rounds parameters as our optimizers do: against it the engine differs by rounding only. Adam's
epsilon is large here, so that an update is a smooth function of its gradient, and comparisons can be tight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from optim_cpu.formats import round_parameters
from tiering.errors import PlacementError
from tiering.placement.placement import place
from tiering.placement.plan import Budgets, Plan
from tiering.storage import arena

WIDTH = 32
STREAMED: dict[str, Any] = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
TIGHT: dict[str, Any] = {
    **STREAMED,
    "host_budget": "256KiB",
    "device_budget": "128KiB",
    "accumulation": 1,
    "threshold": 0,
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme": STREAMED,
    "nvme, nothing fetched ahead": {**STREAMED, "prefetch": 0},
}
ADAM: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.99]}
CLIP = 1.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ONE_BIT = {"fp32": 2**-23, "bf16": 2**-7}  # relative
# (losses relative, masters absolute): sums in another order; in bf16, also a parameter that rounds the other way.
ROUNDING = {"fp32": (1e-5, 2e-6), "bf16": (5e-3, 5e-4)}

Groups = Callable[[nn.Module], list[dict[str, Any]]]


class Loop(Protocol):
    """What a training script drives: an engine, or the plain loop."""

    module: nn.Module
    optimizer: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> Any: ...
    def step(self) -> None: ...
    def no_sync(self) -> Any: ...
    def get_global_grad_norm(self) -> float | None: ...
    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...


Script = Callable[[Any], list[float]]  # trains a Loop, returns its losses


class PlainLoop:
    """The loop that a user of PyTorch would write, with the calls of an engine."""

    def __init__(
        self, module: nn.Module, precision: str, accumulation: int, clip: float, groups: Groups | None
    ) -> None:
        self.module = module
        self.named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.masters = {name: p.detach().float().clone().requires_grad_() for name, p in self.named.items()}
        for param in module.parameters():  # buffers keep their dtype
            param.data = param.data.to(DTYPES[precision])
        for part in module.modules():
            if isinstance(part, nn.BatchNorm1d):  # torch has no kernel for both on a CPU
                part.to(DTYPES[precision])
        self._write_parameters()
        of = {p: self.masters[name] for name, p in self.named.items()}
        chosen = groups(module) if groups else [{"params": list(of)}]
        self.optimizer = torch.optim.AdamW(
            [{**group, "params": [of[p] for p in group["params"]]} for group in chosen],
            lr=ADAM["lr"],
            eps=ADAM["eps"],
            weight_decay=ADAM["weight_decay"],
            betas=tuple(ADAM["betas"]),
        )
        self._accumulation, self._clip = accumulation, clip
        self._dtype = torch.float32 if accumulation > 1 else DTYPES[precision]
        self._grads: dict[str, Tensor] = {}
        self._micro_steps = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        (loss / self._accumulation).backward(retain_graph=retain_graph)
        self.take_gradients()

    def take_gradients(self) -> None:
        for name, p in self.named.items():
            grad, p.grad = p.grad, None
            if grad is not None:
                grad = grad.to(self._dtype)
                self._grads[name] = self._grads[name] + grad if name in self._grads else grad

    def step(self) -> None:
        self.take_gradients()  # of a loss.backward()
        self._micro_steps += 1
        if self._micro_steps % self._accumulation:
            return
        norm = self.get_global_grad_norm()
        scale = min(1.0, self._clip / (norm + 1e-6)) if self._clip else 1.0
        for name, grad in self._grads.items():
            self.masters[name].grad = grad.float() * scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._grads.clear()
        self._write_parameters()

    def get_global_grad_norm(self) -> float:
        self.take_gradients()
        return math.sqrt(sum(float(grad.double().pow(2).sum()) for grad in self._grads.values()))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    def train(self, mode: bool = True) -> PlainLoop:
        self.module.train(mode)
        return self

    def eval(self) -> PlainLoop:
        return self.train(False)

    def _write_parameters(self) -> None:
        for name, p in self.named.items():
            round_parameters(self.masters[name].detach(), p.detach())


@dataclass
class Outcome:
    """What a script leaves: its losses, the masters, and the module's state in the compute dtype."""

    losses: list[float]
    masters: dict[str, Tensor]
    state: dict[str, Tensor]


def run_plain(
    build: Callable[[], nn.Module],
    script: Script,
    precision: str = "fp32",
    accumulation: int = 1,
    clip: float = CLIP,
    groups: Groups | None = None,
) -> Outcome:
    torch.manual_seed(11)
    loop = PlainLoop(build(), precision, accumulation, clip, groups)
    torch.manual_seed(12)
    losses = script(loop)
    masters = {name: master.detach() for name, master in loop.masters.items()}
    return Outcome(losses, masters, loop.module.state_dict())


@contextmanager
def starved_soon() -> Iterator[None]:
    """A lease that nobody gives back shows as an ArenaError, not as a test that hangs."""
    before, arena.STARVED_AFTER_SECONDS = arena.STARVED_AFTER_SECONDS, 2.0
    try:
        yield
    finally:
        arena.STARVED_AFTER_SECONDS = before


@starved_soon()
def run_engine(
    start: Callable[..., Any],
    build: Callable[[], nn.Module],
    script: Script,
    *,
    groups: Groups | None = None,
    smallest: bool = False,
    **options: Any,
) -> Outcome:
    """Keyword arguments left over are the engine's configuration. ``smallest``: with the least budgets that work."""
    options = {"precision": "fp32", "accumulation": 1, "clip": CLIP, "threshold": 0} | options

    def begin(**budgets: int) -> Any:
        torch.manual_seed(11)
        model = build()
        parameters = groups(model) if groups else None
        return start(model, model_parameters=parameters, optimizer=ADAM, **options, **budgets)

    engine = _in_least_room(begin) if smallest else begin()
    torch.manual_seed(12)
    losses = script(engine)
    outcome = Outcome(losses, engine.master_state_dict(), engine.state_dict())
    assert_nothing_held(engine)
    engine.close()
    return outcome


def _in_least_room(begin: Callable[..., Any]) -> Any:
    engine = begin()
    engine.close()
    least = least_budgets(engine.plan)
    return begin(host_budget=least.host, device_budget=least.device)


def least_budgets(plan: Plan) -> Budgets:
    """The least host budget, and then the least device budget, in which ``plan`` could be made (to 8 KiB)."""
    budgets = plan.budgets
    for tier in ("host", "device"):
        sizes = (replace(budgets, **{tier: kib << 10}) for kib in range(8, 4096, 8))
        budgets = next(smaller for smaller in sizes if _is_enough(plan, smaller))
    return budgets


def _is_enough(plan: Plan, budgets: Budgets) -> bool:
    try:
        place(plan.workload, budgets)
    except PlacementError:
        return False
    return True


def assert_nothing_held(engine: Any) -> None:
    """Between steps no group is unsharded, and no hooks of ours are in force."""
    unsharded = [group.name for group in engine._groups if group.residency.name == "UNSHARDED"]
    assert unsharded == [], f"still unsharded: {unsharded}"
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def differing(first: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names whose bytes differ, or that only one side has."""

    def raw(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().view(-1).view(torch.uint8)

    both = set(first) & set(other)
    return sorted(
        set(first) ^ set(other) | {name for name in both if not raw(first[name]).equal(raw(other[name]))}
    )


def assert_near(run: Outcome, plain: Outcome, precision: str) -> None:
    """Rounding is the only difference between an engine's run and the plain loop's."""
    relative, absolute = ROUNDING[precision]
    assert len(run.losses) == len(plain.losses)
    for number, (ours, theirs) in enumerate(zip(run.losses, plain.losses, strict=True)):
        assert math.isclose(ours, theirs, rel_tol=relative), f"loss {number}: {ours}, plain {theirs}"
    assert set(run.masters) == set(plain.masters)
    for name, master in plain.masters.items():
        away = float((run.masters[name] - master).abs().max())
        assert away <= absolute, f"master of {name}: {away} away"
    assert set(run.state) == set(plain.state)
    for name, value in plain.state.items():
        away = float((run.state[name].float() - value.float()).abs().max())
        assert away <= absolute + float(value.abs().max()) * ONE_BIT[precision], f"{name}: {away} away"


def assert_same_everywhere(
    start: Callable[..., Any],
    build: Callable[[], nn.Module],
    script: Script,
    *,
    precision: str = "fp32",
    trains: bool = True,
    roomy: bool = False,
    **options: Any,
) -> Outcome:
    """On the device as the plain loop but for rounding; to the bit the same wherever else state lives.

    Returns the run on the device. ``trains``: what the script returns must change from step to step. ``roomy``: only
    where more groups are unsharded at once than a plan counts on.
    """
    plain_options: dict[str, Any] = {
        key: options[key] for key in ("accumulation", "clip", "groups") if key in options
    }
    plain = run_plain(build, script, precision, **plain_options)
    reference = run_engine(start, build, script, precision=precision, **options)
    if trains:
        assert 1 < len(plain.losses) < 2 * len({*plain.losses}), "the losses do not change"
    assert_near(reference, plain, precision)
    for name, placement in PLACEMENTS.items():
        if roomy and placement.get("prefetch") == 0:
            continue
        assert_same(
            run_engine(start, build, script, precision=precision, **options, **placement), reference, name
        )
    if roomy:
        return reference
    least = run_engine(start, build, script, precision=precision, smallest=True, **options, **STREAMED)
    assert_same(least, reference, "the smallest budgets")
    return reference


def assert_same(run: Outcome, reference: Outcome, where: str) -> None:
    assert run.losses == reference.losses, where
    assert differing(run.masters, reference.masters) == [], where
    assert differing(run.state, reference.state) == [], where


class Tower(nn.Module):
    """Blocks between a root group's layers; a scalar loss from ``forward``."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
            )
            for _ in range(layers)
        )
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        x = self.into(x.to(self.into.weight.dtype))
        for index, block in enumerate(self.blocks):
            if index != skip:
                x = x + block(x)
        result: Tensor = self.out(x).float().pow(2).mean()
        return result


def tower(layers: int = 3) -> Tower:
    torch.manual_seed(5)
    return Tower(layers)


def inputs(count: int, seed: int = 1) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(4, WIDTH, generator=generator)


def update(loop: Loop, x: Tensor, **options: Any) -> float:
    loss = loop(x, **options)
    loop.backward(loss)
    loop.step()
    return float(loss.detach())


def by_its_own(loop: Any) -> list[float]:
    """Updates by the loss's own backward."""
    losses = []
    for x in inputs(4):
        loss = loop(x)
        losses.append(loss.item())
        loss.backward()
        loop.step()
    return losses


def with_no_sync(loop: Any) -> list[float]:
    """Updates of three micro-batches, each of which brings another block no gradient."""
    losses = []
    for number, x in enumerate(inputs(9)):
        loss = loop(x, skip=number % 3)
        losses.append(loss.item())
        if number % 3 < 2:
            with loop.no_sync():
                loop.backward(loss)
        else:
            loop.backward(loss)
            loop.step()
    return losses
