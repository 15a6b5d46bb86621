"""What ranks run: one training script, on any configuration; and the same without an engine, to compare with.

``train`` is what every rank does. ``emulate`` is what the ranks together should do, to the bit, written down once more
for a single process: each rank's gradients from its share of the batch, added up in fp32 in the order of the ranks,
divided by their number and rounded once. ``train_whole`` is what a user would have written: one process, the whole
batch, ``torch.optim.AdamW``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import optim_cpu
import tiering
from optim_cpu.formats import round_parameters
from tests.zero3.conftest import SEQUENCE, VOCABULARY, SmallModel, config
from tests.zero3.plain import ADAM, CLIP, DTYPES, differing
from zero3.loop.step import CLIP_EPSILON

from .pool import Pool

ROWS = 2  # of each rank's share of a batch
STEPS = 3

Batch = tuple[Any, ...]
Data = Callable[[int, int], Iterator[list[Batch]]]  # for each micro-batch, the share of every rank
Build = Callable[[], nn.Module]


@dataclass
class Trained:
    """What a run left on one rank. ``losses`` are its own, of every micro-batch."""

    losses: list[float]
    norms: list[float]
    masters: dict[str, Tensor]
    weights: dict[str, Tensor]
    written: int = 0  # bytes that went to NVMe

    def differing(self, other: Trained, *, losses: bool = True) -> list[str]:
        """What is not the same on both sides, to the bit."""
        differences = [f"master of {name}" for name in differing(self.masters, other.masters)]
        differences += differing(self.weights, other.weights)
        if self.norms != other.norms:
            differences.append(f"norms {self.norms}, {other.norms}")
        if losses and self.losses != other.losses:
            differences.append(f"losses {self.losses}, {other.losses}")
        return differences


def tokens(count: int, world_size: int) -> Iterator[list[Batch]]:
    """For SmallModel; every rank draws the whole batch and takes its rows."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        drawn = torch.randint(VOCABULARY, (world_size, ROWS, SEQUENCE + 1), generator=generator)
        yield [(rows[:, :-1], rows[:, 1:]) for rows in drawn]


def train(
    rank: int,
    nvme: Path,
    *,
    build: Build = SmallModel,
    data: Data = tokens,
    steps: int = STEPS,
    no_sync: int = 0,
    **options: Any,
) -> Trained:
    """Train to the end. ``no_sync``: that many backwards before each one that completes them, in a loop of its own."""
    engine = start(nvme, build, **options)
    parts, losses, norms = no_sync + 1, [], []
    with engine:
        micro_batches = steps * parts * engine.settings.gradient_accumulation_steps
        for number, shares in enumerate(data(micro_batches, _world_size()), start=1):
            complete = number % parts == 0
            with nullcontext() if complete else engine.no_sync():
                loss = engine(*shares[rank])
                losses.append(loss.item())
                engine.backward(loss / parts)
            if complete:
                engine.step()
                if engine.micro_steps % engine.settings.gradient_accumulation_steps == 0:
                    norms.append(engine.get_global_grad_norm())
        return trained_state(engine, losses, norms)


def start(
    nvme: Path,
    build: Build = SmallModel,
    *,
    other_seeds: bool = False,
    without_memory: bool = False,
    zero: dict[str, Any] | None = None,
    weights: Path | None = None,
    **options: Any,
) -> Any:
    """An engine. ``other_seeds``: each rank draws weights of its own. ``zero``: more of "zero_optimization"."""
    torch.manual_seed(3 + int(os.environ.get("RANK", "0")) * other_seeds)
    with tiering.zero.Init() if without_memory else nullcontext():
        model = build()
    settings = config(nvme, **(usual() | options))
    settings["zero_optimization"] |= zero or {}
    return tiering.initialize(model=model, config=settings, weights=weights).engine


def usual() -> dict[str, Any]:
    """Options unless a test has its own. Adam's epsilon is large: updates are smooth in their gradients."""
    return {"precision": "fp32", "accumulation": 1, "optimizer": ADAM, "clip": CLIP}


def trained_state(engine: Any, losses: list[float], norms: list[float]) -> Trained:
    masters, weights = engine.master_state_dict(), engine.state_dict()
    return Trained(losses, norms, masters, weights, sum(path.written.bytes for path in engine.snapshot().io))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def emulate(
    world_size: int,
    norms: list[float],
    *,
    build: Build = SmallModel,
    data: Data = tokens,
    no_sync: int = 0,
    stage: int = 3,
    precision: str = "fp32",
    accumulation: int = 1,
    clip: float = CLIP,
    grad_accum_dtype: str | None = None,
    reduce_dtype: str | None = None,
    **_: Any,
) -> list[Trained]:
    """What each rank has to be left with. ``said`` are the norms that the engine reports, one for each step.

    They are checked, and then clip: a norm adds up in an order of its own.
    """
    torch.manual_seed(3)
    model = build()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: p.detach().float().clone().requires_grad_() for name, p in named.items()}
    dtype = DTYPES[precision]
    model.to(dtype)
    follow(named, masters)
    options = {key: tuple(value) if key == "betas" else value for key, value in ADAM.items()}
    optimizer = optim_cpu.AdamW(masters.values(), **options)
    parts, micro_batches = no_sync + 1, accumulation * (no_sync + 1)
    accum_dtype = (
        DTYPES[grad_accum_dtype] if grad_accum_dtype else torch.float32 if accumulation > 1 else dtype
    )
    losses: list[list[float]] = [[] for _ in range(world_size)]
    shares = data(len(norms) * micro_batches, world_size)
    for norm in norms:
        local = [Sums(accum_dtype) for _ in range(world_size)]
        reduced = Sums(accum_dtype)
        for _ in range(micro_batches):
            now = next(shares)
            for rank in range(world_size):
                loss = model(*now[rank])
                losses[rank].append(loss.item())
                (loss / parts / accumulation).backward()
                if stage >= 2:
                    local[rank] = Sums(dtype)  # what this backward gave is reduced at once
                local[rank].take(named)
            if stage >= 2:
                reduced.add(mean(local, reduce_dtype))
        if stage < 2:
            reduced.add(mean(local, reduce_dtype))
        squares = sum(float(grad.double().pow(2).sum()) for grad in reduced.of.values())
        assert math.isclose(norm, math.sqrt(squares), rel_tol=1e-12), f"norm {norm}, not {math.sqrt(squares)}"
        factor = min(1.0, clip / (norm + CLIP_EPSILON)) if clip else 1.0
        for name, grad in reduced.of.items():
            masters[name].grad = grad.float() * factor
        optimizer.step()
        optimizer.zero_grad()
        follow(named, masters)
    detached = {name: master.detach() for name, master in masters.items()}
    return [Trained(own, norms, detached, model.state_dict()) for own in losses]


class Sums:
    """Gradients by name, added up in one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.of: dict[str, Tensor] = {}

    def take(self, named: dict[str, nn.Parameter]) -> None:
        """Those that a backward has left."""
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
        self.add((name, grad.float()) for name, grad in gradients.items())
        for name in gradients:
            named[name].grad = None

    def add(self, values: Iterable[tuple[str, Tensor]]) -> None:
        for name, value in values:
            wide = self.of[name].float() + value if name in self.of else value
            self.of[name] = wide.to(self.dtype)


def mean(local: list[Sums], sent: str | None) -> Iterator[tuple[str, Tensor]]:
    """Over all ranks, in fp32, for each parameter that has a gradient on any of them; ``sent`` in that dtype."""
    for name in {name: None for sums in local for name in sums.of}:
        dtype = DTYPES[sent] if sent else local[0].dtype
        there = [sums.of[name].to(dtype).float() if name in sums.of else None for sums in local]
        zero = torch.zeros_like(next(value for value in there if value is not None))
        total = there[0] if there[0] is not None else zero
        for value in there[1:]:
            total = total + (zero if value is None else value)
        yield name, total * (1.0 / len(local))


def follow(named: dict[str, nn.Parameter], masters: dict[str, Tensor]) -> None:
    for name, p in named.items():
        round_parameters(masters[name].detach(), p.detach())


def train_whole(
    world_size: int,
    *,
    build: Build = SmallModel,
    data: Data = tokens,
    steps: int = STEPS,
    no_sync: int = 0,
    precision: str = "fp32",
    accumulation: int = 1,
    clip: float = CLIP,
    **_: Any,
) -> Trained:
    """One process, every batch whole; ``precision`` "fp64" is as good as exact, but for SmallModel's loss (fp32)."""
    torch.manual_seed(3)
    model = build().to(torch.float64 if precision == "fp64" else torch.float32)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: p.detach().clone().requires_grad_() for name, p in named.items()}
    if precision == "bf16":
        model.to(torch.bfloat16)
        follow(named, masters)
    options = {key: tuple(value) if key == "betas" else value for key, value in ADAM.items()}
    optimizer = torch.optim.AdamW(masters.values(), **options)
    micro_batches = accumulation * (no_sync + 1)
    losses, norms = [], []
    for number, shares in enumerate(data(steps * micro_batches, world_size), start=1):
        loss = model(*(torch.cat(column) for column in zip(*shares, strict=True)))
        losses.append(loss.item())
        (loss / micro_batches).backward()
        for name, p in named.items():
            if p.grad is not None:
                wide, master = p.grad.to(masters[name].dtype), masters[name]
                master.grad = wide if master.grad is None else master.grad + wide
                p.grad = None
        if number % micro_batches == 0:
            norms.append(float(nn.utils.clip_grad_norm_(masters.values(), clip or math.inf)))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for name, p in named.items():
                    p.copy_(masters[name])
    detached = {name: master.detach() for name, master in masters.items()}
    return Trained(losses, norms, detached, model.state_dict())


def assert_as_emulated(pool: Pool, nvme: Path, **case: Any) -> list[Trained]:
    """Train on all ranks of ``pool``: each is left with what ``emulate`` says. Returns what they are left with."""
    runs: list[Trained] = pool.run(train, nvme, **case)
    expected = emulate(pool.world_size, runs[0].norms, **case)
    for rank, (run, emulated) in enumerate(zip(runs, expected, strict=True)):
        assert run.differing(emulated) == [], f"rank {rank}"
    return runs


def assert_as_whole(runs: list[Trained], **case: Any) -> None:
    """All ranks together are as far from the exact result as one process with the whole batch is."""
    exact = train_whole(len(runs), **{**case, "precision": "fp64"})
    assert_rounding_only(runs, train_whole(len(runs), **case), exact)


def assert_rounding_only(runs: list[Trained], plain: Trained, exact: Trained) -> None:
    """All ranks together are about as far from the ``exact`` result as one ``plain`` process is.

    How much rounding does, nobody has to guess: the plain loop shows it. A mean over elements would be within a few
    per cent of the other's; these are the largest of few or of many, of other sums: a factor of 4.
    """
    losses = [math.fsum(each) / len(runs) for each in zip(*(run.losses for run in runs), strict=True)]
    ours, theirs = away(replace(runs[0], losses=losses), exact), away(plain, exact)
    for kind, here, there in zip(("losses", "norms", "masters"), ours, theirs, strict=True):
        assert here <= 4 * max(there, 2**-23), f"{kind} are {here:.2e} away, those of one process {there:.2e}"


def away(run: Trained, exact: Trained) -> list[float]:
    """How far a run is from the exact one: its losses and norms (relative), its masters (absolute), at most."""
    pairs = [(run.losses, exact.losses), (run.norms, exact.norms)]
    relative = [max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)) for ours, theirs in pairs]
    assert set(run.masters) == set(exact.masters)
    return [*relative, max(float((run.masters[n] - m).abs().max()) for n, m in exact.masters.items())]
