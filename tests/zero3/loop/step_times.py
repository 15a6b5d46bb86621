"""Steps at other times than after backward: the models, scripts and placements with which their bits are compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import tiering
from tests.crossed import crossed
from tests.zero3.loop.models_in_backward import (
    Checkpointed,
    FarPeeking,
    Peeking,
    Penalised,
    Tied,
    Twice,
    frozen_in_part,
)
from tests.zero3.plain import (
    ADAM,
    PLACEMENTS,
    STREAMED,
    Script,
    Tower,
    assert_same,
    by_its_own,
    inputs,
    run_engine,
    update,
    with_no_sync,
)

Start = Callable[..., Any]
Build = Callable[[], nn.Module]

IN_HOST: dict[str, Any] = {"offload_param": "cpu", "offload_optimizer": "nvme", "cache_in_host": False}
"""The parameters are in host memory, where compute uses them, and the optimizer state is on NVMe."""
EVERYWHERE: dict[str, dict[str, Any]] = {
    "device": {},
    **PLACEMENTS,
    "parameters in host memory": IN_HOST,
    "a share on nvme": {"offload_optimizer": "nvme", "ratio": 0.4, "cache_in_host": False},
    "smallest tiles": {**STREAMED, "sub_group_size": 1},
}
WITH_EACH_MODEL = {
    name: EVERYWHERE[name] for name in ("parameters in host memory", "nvme", "a share on nvme")
}

MODELS: dict[str, Build] = {
    "tower": Tower,
    "tied": Tied,
    "called twice": Twice,
    "read by others": Peeking,
    "checkpointed": partial(Checkpointed, reentrant=False),
    "checkpointed, reentrant": partial(Checkpointed, reentrant=True),
    "checkpointed, called twice": partial(Checkpointed, reentrant=False, order=(1, 0, 1, 2)),
    "checkpointed, reentrant, called twice": partial(Checkpointed, reentrant=True, order=(1, 0, 1, 2)),
    "frozen in part": frozen_in_part,
    "frozen, read by a block far before": partial(FarPeeking, checkpointed=False, frozen=True),
    "frozen, read by a recomputation": partial(FarPeeking, checkpointed=True, frozen=True),
    "checkpointed, reentrant, with a penalty": partial(Penalised, reentrant=True),
}


def turns(loop: Any, passes: int = 1) -> list[float]:
    """Blocks are left out by turns, so that the last pass of an update brings one of them no gradient."""
    return [update(loop, x, skip=n % 4) for n, x in enumerate(inputs(4 * passes))]


MODELS_AND_HABITS = crossed(MODELS, [("bf16", 3), ("fp32", 1), ("bf16", 1)])
"""Each model with a precision and the micro-batches of an update."""
FP16: dict[str, Any] = {"precision": "fp16", "fp16": {"initial_scale_power": 15, "hysteresis": 1}}


def by_scale(loop: Any) -> list[float]:
    losses = []
    for x in inputs(4):
        loss = loop(x)
        losses.append(loss.item())
        loop.scale(loss).backward()
        loop.step()
    return losses


def with_evaluation(loop: Any) -> list[float]:
    """Between updates, and between backward and step, when the parameters are those of the next step already."""
    losses = []
    for x in inputs(4):
        loop.eval()
        with torch.no_grad():
            losses.append(loop(x).item())
        loop.train()
        losses.append(update(loop, x))
    return losses


SCRIPTS = [by_its_own, by_scale, with_no_sync, with_evaluation]


def with_overflows(loop: Any, updates: int, factor: float) -> list[float]:
    """Some updates are skipped, some may be clipped, and each has another learning rate."""
    losses = []
    for n, x in enumerate(inputs(updates)):
        for group in loop.optimizer.param_groups:
            group["lr"] = ADAM["lr"] / (n + 1)
        losses.append(update(loop, x * (1e4 if n in (2, 3, 6) else factor * n)))
        loop.optimizer.zero_grad()
    return losses


def trained(start: Start, **options: Any) -> Any:
    """An engine behind its second step."""
    torch.manual_seed(11)
    engine = start(Tower(), accumulation=1, threshold=0, sub_group_size=1, **STREAMED | options)
    for x in inputs(2):
        update(engine, x)
    return engine


def gathered(engine: Any) -> Any:
    with tiering.gathered(engine.module.blocks[1]) as params:
        return [param.detach().clone() for param in params]


def evaluated(engine: Any) -> Any:
    with torch.no_grad():
        return engine(next(inputs(1, seed=5))).clone()


LOOKS: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda engine: engine.state_dict(),
    "master": lambda engine: engine.get_fp32_parameter("blocks.2.0.weight"),
    "moment": lambda engine: engine.get_fp32_state("blocks.2.0.weight", "exp_avg_sq"),
    "gathered": gathered,
    "evaluation": evaluated,
}
"""Ways to read what a step changes."""


def assert_bits(
    start: Start,
    step: dict[str, Any],
    build: Build,
    script: Script,
    placements: dict[str, dict[str, Any]] = WITH_EACH_MODEL,
    **options: Any,
) -> None:
    """In each of ``placements``, the options of ``step`` change no bit of a run with ``options``."""
    after = run_engine(start, build, script, **options)
    assert len({*after.losses}) > 1
    for name, placement in placements.items():
        assert_same(run_engine(start, build, script, **step | options, **placement), after, name)


def assert_bits_of_model(
    start: Start, step: dict[str, Any], model: str, habit: tuple[str, int], **options: Any
) -> None:
    """``assert_bits`` for an entry of ``MODELS_AND_HABITS``."""
    build, (precision, accumulation) = MODELS[model], habit
    script = partial(turns, passes=accumulation)
    placements = EVERYWHERE if build is Tower else WITH_EACH_MODEL
    options |= {"precision": precision, "accumulation": accumulation}
    assert_bits(start, step, build, script, placements, **options)


def assert_bits_in_least_room(start: Start, step: dict[str, Any], **options: Any) -> None:
    """Gradients stream, and most parameters are larger than any buffer."""
    least = {"the smallest budgets": {"smallest": True, **STREAMED}}
    assert_bits(start, step, Tower, turns, least, **options)
