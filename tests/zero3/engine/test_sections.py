"""Sections of the configuration that change what training does: as a plain loop does it, and the same everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiering
from tests.zero3.conftest import config
from tests.zero3.plain import (
    PLACEMENTS,
    STREAMED,
    WIDTH,
    Outcome,
    PlainLoop,
    Tower,
    assert_near,
    assert_same_everywhere,
    differing,
    inputs,
    run_engine,
    run_plain,
    update,
)
from tiering.placement.workload import Tier
from zero3.optimizer import schedulers
from zero3.params.precision import COMPUTE_DTYPES

Start = Callable[..., Any]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def start(nvme: Path) -> Iterator[Start]:
    """As everywhere, and ``sections`` are added to the configuration."""
    engines = []

    def make(model: nn.Module, *, model_parameters: Any = None, sections: Any = None, **options: Any) -> Any:
        settings = config(nvme, **options) | (sections or {})
        engine = tiering.initialize(model=model, config=settings, model_parameters=model_parameters).engine
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def assert_same_as_on_the_device(
    start: Start, build: Callable[[], nn.Module], script: Callable[[Any], list[float]], **options: Any
) -> Outcome:
    """For what the plain loop has no counterpart of: engines among each other."""
    reference = run_engine(start, build, script, **options)
    everywhere = {name: {"smallest": False, **where} for name, where in PLACEMENTS.items()}
    everywhere["the smallest budgets"] = {"smallest": True, **STREAMED}
    for name, where in everywhere.items():
        run = run_engine(start, build, script, **options, **where)
        assert run.losses == reference.losses, name
        assert differing(run.masters, reference.masters) == [], name
        assert differing(run.state, reference.state) == [], name
    return reference


def autocast_of(loop: Any, dtype: torch.dtype) -> Any:
    """What the section does for an engine, a plain loop does by itself."""
    return torch.autocast("cpu", dtype) if isinstance(loop, PlainLoop) else nullcontext()


class Checkpointed(Tower):
    """Its blocks are recomputed in backward, where no forward of the engine is running that could set autocast."""

    reentrant = False

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        result: Tensor = self.out(x).float().pow(2).mean()
        return result


class CheckpointedReentrantly(Checkpointed):
    reentrant = True


@pytest.mark.one_of(2)
@pytest.mark.parametrize("build", [Tower, Checkpointed, CheckpointedReentrantly])
def test_autocast_by_the_configuration(start: Start, build: type[Tower]) -> None:
    ran_in: list[torch.dtype] = []

    def script(loop: Any) -> list[float]:
        ran_in.clear()
        hooked = loop.module.get_submodule("blocks.1.1")
        hooked.register_forward_hook(lambda *arguments: ran_in.append(arguments[2].dtype))
        losses = []
        for x in inputs(4):
            with autocast_of(loop, torch.bfloat16):
                loss = loop(x.requires_grad_())
            losses.append(loss.item())
            loop.backward(loss)
            loop.step()
        return losses

    section = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    run = assert_same_everywhere(start, build, script, sections=section)
    assert {*ran_in} == {torch.bfloat16} and len(ran_in) == (4 if build is Tower else 8)
    assert {value.dtype for value in run.state.values()} == {torch.float32}


def test_autocast_to_fp16_scales_the_loss(start: Start) -> None:
    """The scale begins at 65536, halves with each overflow, and the steps of those are skipped."""
    scales: list[float] = []

    def script(loop: Any) -> list[float]:
        plain, scale, figures = isinstance(loop, PlainLoop), 65536.0, []
        scales.clear()
        if plain:
            for p in loop.module.parameters():
                p.register_hook(lambda grad: grad / scale)
        for x in inputs(5):
            with autocast_of(loop, torch.float16):
                loss = loop(6 * x)
            loop.backward(loss * scale if plain else loss)
            norm = loop.get_global_grad_norm()
            figures += [loss.item(), norm] if math.isfinite(norm) else [loss.item()]
            if plain and not math.isfinite(norm):
                loop._grads.clear()
                scale /= 2
            else:
                loop.step()
            scales.append(scale if plain else loop.loss_scale.value)
        assert scales == [32768.0, 32768.0, 32768.0, 16384.0, 16384.0]
        return figures

    section = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    run = assert_same_as_on_the_device(start, Tower, script, sections=section)
    assert_near(run, run_plain(Tower, script), "bf16")  # weights that round the other way, as in 16 bits


SCHEDULES: dict[str, tuple[type[Any], dict[str, Any], list[float]]] = {
    "WarmupLR": (
        schedulers.WarmupLR,
        {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0.0, 0.0, 0.0025, 0.005, 0.0075, 0.01],  # before the first update, and after each
    ),
    "OneCycle": (
        schedulers.OneCycle,
        {"cycle_min_lr": 0.0, "cycle_max_lr": 0.01, "cycle_first_step_size": 2, "cycle_min_mom": 0.5},
        [0.0, 0.005, 0.01, 0.005, 0.0, 0.0],
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_by_the_configuration(start: Start, kind: str) -> None:
    """One step of it per update, not per micro-batch."""
    schedule, params, expected = SCHEDULES[kind]
    rates: list[float] = []
    betas = set()

    def script(loop: Any) -> list[float]:
        plain = isinstance(loop, PlainLoop)
        scheduler = schedule(loop.optimizer, **params) if plain else loop.lr_scheduler
        assert type(scheduler) is schedule and scheduler.optimizer is loop.optimizer
        rates[:] = [loop.optimizer.param_groups[0]["lr"]]
        losses = []
        for number, x in enumerate(inputs(10)):
            losses.append(update(loop, x))
            if number % 2:
                if plain:
                    scheduler.step()
                rates.append(loop.optimizer.param_groups[0]["lr"])
                betas.add(loop.optimizer.param_groups[0]["betas"])
        assert rates == pytest.approx(expected)
        return losses

    section = {"scheduler": {"type": kind, "params": params}}
    assert_same_everywhere(start, Tower, script, accumulation=2, sections=section)
    assert len(betas) == (1 if kind == "WarmupLR" else 3), "OneCycle cycles the first beta"


def test_a_skipped_step_leaves_the_schedule(start: Start) -> None:
    _, params, expected = SCHEDULES["WarmupLR"]

    def script(engine: Any) -> list[float]:
        rates = []
        for number, x in enumerate(inputs(7)):
            update(engine, x * float("inf") if number in (2, 4) else x)
            rates.append(engine.optimizer.param_groups[0]["lr"])
        assert engine.skipped_steps == 2
        return rates

    section = {"scheduler": {"type": "WarmupLR", "params": params}}
    run = assert_same_as_on_the_device(start, Tower, script, sections=section)
    first, two, three, four, five = expected[1:]
    assert run.losses == pytest.approx([first, two, two, three, three, four, five])


class Structured(nn.Module):
    """Takes its inputs in structures, some of them no floats; nothing in it casts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs: dict[str, Any], weights: list[Tensor], *, power: int) -> Tensor:
        x = self.embedding(inputs["tokens"]) + inputs["features"][0]
        for layer, weight in zip(self.layers, weights, strict=True):
            x = x + torch.tanh(layer(x)) * weight
        self.seen = [inputs["tokens"].dtype, inputs["features"][0].dtype, weights[0].dtype, type(power)]
        result: Tensor = x.float().pow(power).mean()
        return result


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_inputs_are_cast_by_the_configuration(start: Start, precision: str) -> None:
    """``auto_cast`` gives what a caller's own casts give, and leaves what is no floating-point number."""
    dtype = COMPUTE_DTYPES[precision]

    def script(engine: Any, cast: Callable[[Tensor], Tensor] = lambda x: x) -> list[float]:
        losses = []
        for number, x in enumerate(inputs(5)):
            tokens = torch.arange(number, number + 4)
            weights = [cast(row) for row in x[:3]]
            loss = engine({"tokens": tokens, "features": (cast(x),)}, weights, power=2)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            assert engine.module.seen == [torch.int64, dtype, dtype, int]
        assert engine.skipped_steps == 0
        return losses

    fixed: dict[str, Any] = {"fp16": {"initial_scale_power": 8}} if precision == "fp16" else {}
    casting = {
        **fixed,
        "sections": {precision: {"enabled": True, **fixed.get("fp16", {}), "auto_cast": True}},
    }
    run = assert_same_as_on_the_device(start, Structured, script, precision=precision, **casting)
    by_hand = run_engine(
        start, Structured, lambda engine: script(engine, lambda x: x.to(dtype)), precision=precision, **fixed
    )
    assert run.losses == by_hand.losses and len({*run.losses}) == 5
    assert differing(run.masters, by_hand.masters) == []
    with pytest.raises(RuntimeError, match="dtype") as refusal:  # the layers have 16 bits, the features fp32
        run_engine(start, Structured, script, precision=precision, **fixed)
    (note,) = refusal.value.__notes__
    assert f"computes in {dtype} and was called with torch.float32" in note
    assert f"{precision}.auto_cast" in note


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Conv1d(3, 4, 2), (2, 3, 8)), (nn.BatchNorm1d(4), (2, 4)), (nn.GRU(4, 4), (3, 2, 4))],
    ids=["convolution", "normalisation", "recurrent"],
)
def test_an_error_about_dtypes_names_auto_cast(
    start: Start, layer: nn.Module, shape: tuple[int, ...]
) -> None:
    engine = start(layer)
    with pytest.raises((RuntimeError, ValueError)) as refusal:
        engine(torch.zeros(shape))
    assert "bf16.auto_cast" in refusal.value.__notes__[0]


class Positioned(nn.Module):
    """Adds a buffer of fp32 to activations, as M2M100 does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("positions", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.positions).sum()


def test_an_error_about_dtypes_names_buffers_and_their_key(start: Start) -> None:
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError) as refusal:
        start(Positioned())(x)
    (note,) = refusal.value.__notes__
    assert "computes in torch.bfloat16, and these buffers are not in it: positions. If" in note
    assert "set data_types.buffer_dtype to 'bf16'" in note
    engine = start(Positioned(), sections={"data_types": {"buffer_dtype": "bf16"}})
    assert engine(x).dtype is torch.bfloat16


class Weighted(nn.Module):
    """Its gradients are its inputs, exactly: whatever they become was done to them afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(3, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = sum((w.float() * x).sum() for w in self.layers)
        return result


@pytest.mark.one_of(3)
@pytest.mark.parametrize("accum_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_accumulate_in_the_dtype_of_the_configuration(
    start: Start, precision: str, accum_dtype: str
) -> None:
    """Each sum is rounded once, to ``data_types.grad_accum_dtype``; what arrives is in the compute dtype."""

    def script(engine: Any) -> list[float]:
        assert engine.plan.workload.grad_itemsize == DTYPES[accum_dtype].itemsize
        losses, expected = [], torch.zeros(3, WIDTH)
        for number, x in enumerate(inputs(12)):
            loss = engine(x[:3])
            losses.append(loss.item())
            engine.backward(loss)
            arrived = (x[:3] / 4).to(DTYPES[precision]).float()
            expected = (expected + arrived).to(DTYPES[accum_dtype]).float()
            if number % 4 == 3:
                for name in engine.master_state_dict():
                    assert torch.equal(engine.get_fp32_gradient(name), expected), name
                expected = torch.zeros(3, WIDTH)
            engine.step()
        assert engine.global_steps == 3
        return losses

    section = {"data_types": {"grad_accum_dtype": accum_dtype}}
    assert_same_as_on_the_device(
        start, Weighted, script, precision=precision, accumulation=4, sections=section
    )


STAGES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    **{
        f"{stage}, optimizer {name}": {"stage": stage, "offload_optimizer": device, "cache_in_host": False}
        for stage in (1, 2, 3)
        for name, device in (("on the device", "none"), ("on the host", "cpu"), ("on nvme", "nvme"))
    },
    **{
        f"{stage}, a share leaves for {device}": {
            "stage": stage,
            "offload_optimizer": device,
            "ratio": 0.4,
            "cache_in_host": False,
        }
        for stage in (1, 2)
        for device in ("cpu", "nvme")
    },
    "1, smallest": {"stage": 1, "offload_optimizer": "nvme", "cache_in_host": False, "smallest": True},
    "2, smallest": {"stage": 2, "offload_optimizer": "nvme", "cache_in_host": False, "smallest": True},
    "3, parameters on the host": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "3, all on nvme": STREAMED,
}


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_every_stage_trains_alike_wherever_its_optimizer_is(start: Start, precision: str) -> None:
    def script(engine: Any) -> list[float]:
        tiers.append({tier.name for tier in Tier if "optimizer state" in engine.plan.contents(tier)})
        return [update(engine, x) for x in inputs(4)]

    tiers: list[set[str]] = []
    runs = {}
    for name, options in STAGES.items():
        runs[name] = run_engine(start, Tower, script, precision=precision, **options)
        if "nvme" in options.values():
            assert "NVME" in tiers[-1], name
    reference = runs.pop("0")
    assert len({*reference.losses}) == 4
    for name, run in runs.items():
        assert run.losses == reference.losses, name
        assert differing(run.masters, reference.masters) == [], name
        assert differing(run.state, reference.state) == [], name
