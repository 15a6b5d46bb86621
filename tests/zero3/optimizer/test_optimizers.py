"""Every update rule over tiers: to the bit as optim_cpu's optimizers in a plain loop, wherever the state lives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import optim_cpu
from tests.crossed import crossed
from tests.fakes.fake_device import FakeDevice
from tests.zero3.scales import (
    CASES,
    CLIP,
    LR,
    PLACEMENTS,
    PRECISIONS,
    STEPS,
    WHOLE,
    Case,
    Run,
    Scales,
    assert_same,
    param_groups,
    script,
    settings,
    train_plainly,
    train_rule,
)
from tiering.errors import ConfigError, EngineStateError, PlacementError
from tiering.placement.placement import make_plan
from tiering.placement.plan import Plan, Staging
from tiering.placement.workload import Tier
from tiering.storage.arena import PAGE
from zero3.optimizer.tile_batch import TileBatch
from zero3.optimizer.tile_stepper import TileStepper
from zero3.optimizer.tiles import Tile
from zero3.setup import assembly


@pytest.fixture
def run(start: Callable[..., Any]) -> Callable[..., Run]:
    return partial(train_rule, start)


def mixed_budgets(plan: Plan) -> dict[str, dict[str, Any]]:
    """Everything may go to NVMe, and the host has the least that works (gradients stream, too), or some more."""
    load = replace(plan.workload, offload_param=Tier.NVME, offload_optimizer=Tier.NVME, sub_group_numel=1)
    for pages in range(1, 400):
        least = replace(plan.budgets, host=pages * PAGE, nvme=1 << 30)
        with suppress(PlacementError):
            tight = make_plan(load, least)
            break
    assert Tier.NVME in tight.grad_tiers
    more = least.host + tight.total(Tier.NVME) // 2
    loose = make_plan(load, replace(least, host=more))
    assert 0 < loose.total(Tier.NVME) < tight.total(Tier.NVME)
    streamed = {"offload_param": "nvme", "offload_optimizer": "nvme", "sub_group_size": 1}
    return {
        "least host budget": streamed | {"host_budget": least.host},
        "part cached": streamed | {"host_budget": more},
    }


@pytest.mark.one_of(4)
@pytest.mark.parametrize(("rule", "precision", "accumulation"), crossed(CASES, PRECISIONS, [1, 2]))
def test_every_rule_gives_the_bits_of_a_plain_loop_wherever_its_state_lives(
    rule: str,
    precision: str,
    accumulation: int,
    run: Callable[..., Run],
    differing: Callable[..., list[str]],
) -> None:
    case = CASES[rule]
    reference = run(case, precision, accumulation)
    assert reference.optimizer.state_names == case.state
    assert max(reference.norms) > CLIP
    plain = train_plainly(case.make, case.options, precision, accumulation, reference.norms)
    assert_same(reference, plain, differing, "plain")
    for name, placement in (PLACEMENTS | mixed_budgets(reference.plan)).items():
        moved = run(case, precision, accumulation, **placement)
        assert_same(moved, reference, differing, name)
        assert moved.optimizer.steps == reference.optimizer.steps, name


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_groups_with_and_without_momentum_in_one_optimizer(
    start: Callable[..., Any], differing: Callable[..., list[str]], precision: str, placement: dict[str, Any]
) -> None:
    """State for all if any has it; a momentum that begins later begins with its first gradient, undampened."""

    def groups(model: nn.Module, momentum: float) -> list[dict[str, Any]]:
        rest, shifts = param_groups(model, {})
        return [{**rest, "momentum": momentum}, shifts | {"momentum": 0.8}]

    def begin_later(engine: Any) -> Run:
        norms = []
        for number, (inputs, _) in enumerate(script(STEPS, 1)):
            engine.optimizer.param_groups[0]["momentum"] = 0.9 if number > 1 else 0.0
            for x, skip in inputs:
                engine.backward(engine(x, skip))
                engine.step()
            norms.append(engine.get_global_grad_norm())
        return Run(norms, engine.master_state_dict(), engine.state_dict(), {}, engine.optimizer)

    class BeginsLater(optim_cpu.SGD):
        def step(self, closure: Any = None) -> Any:
            number = self.__dict__.setdefault("number", 0)
            self.number = number + 1
            self.param_groups[0]["momentum"] = 0.9 if number > 1 else 0.0
            for group, rate in zip(self.param_groups, (LR, LR / 2), strict=True):
                group["lr"] = rate
            super().step(closure)

    model = Scales()
    options = {"lr": LR, "momentum": 0.9, "dampening": 0.5}
    engine = start(
        model,
        model_parameters=groups(model, 0.0),
        rule="SGD",
        optimizer=options,
        **settings(precision),
        **placement,
    )
    run = begin_later(engine)
    assert engine.optimizer.state_names == ("momentum_buffer",)
    plain = train_plainly(
        lambda chosen: BeginsLater(chosen, LR, 0.9, 0.5),
        options,
        precision,
        1,
        run.norms,
        groups=lambda model, _: groups(model, 0.0),
    )
    assert differing(run.masters, plain.masters) == []
    assert differing(run.weights, plain.weights) == []


def test_sgd_without_momentum_has_no_state(start: Callable[..., Any]) -> None:
    def plan(**options: Any) -> Any:
        return start(Scales(), rule="SGD", optimizer={"lr": LR}, **settings(), **WHOLE, **options).plan

    offloaded = plan(offload_optimizer="nvme")
    assert offloaded.workload.state_tensors == 0
    assert offloaded.staging == Staging()
    assert offloaded.total(Tier.NVME) == offloaded.total(Tier.HOST) - sum(
        group.trainable_numel * 4 for group in offloaded.workload.groups
    )
    assert all("optimizer state" not in offloaded.contents(tier) for tier in Tier)
    streamed = plan(offload_optimizer="nvme", offload_param="nvme").staging
    assert (streamed.slots > 0, streamed.param_offset) == (True, 0)


@pytest.mark.parametrize("placement", ["host", "all on nvme"])
def test_options_that_no_kernel_takes_are_refused_before_anything_has_changed(
    start: Callable[..., Any], differing: Callable[..., list[str]], placement: str
) -> None:
    model = Scales()
    engine = start(
        model, model_parameters=param_groups(model, {}), rule="SGD", **settings(), **PLACEMENTS[placement]
    )
    before, steps = engine.master_state_dict(), dict(engine.optimizer.steps)

    def step() -> None:
        engine.backward(engine(torch.ones(40), 0))
        engine.optimizer.prepare()

    engine.optimizer.param_groups[1]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"^SGD, param group 1: sgd: lr must be 0 or more"):
        step()
    engine.optimizer.param_groups[1]["lr"] = LR
    engine.optimizer.param_groups[1]["momentum"] = 0.5
    with pytest.raises(EngineStateError, match=r"param group 1 has momentum 0\.5 now, but had none at init"):
        step()
    assert differing(engine.master_state_dict(), before) == []
    assert engine.optimizer.steps == steps
    with pytest.raises(EngineStateError, match=r"call engine\.step"):
        engine.optimizer.step()


def test_options_are_loaded_into_the_same_dicts_and_state_is_refused(start: Callable[..., Any]) -> None:
    model = Scales()
    engine = start(model, model_parameters=param_groups(model, {}), rule="Lion", **settings())
    optimizer = engine.optimizer
    groups, dicts = optimizer.param_groups, list(optimizer.param_groups)
    saved = optimizer.state_dict()
    saved["param_groups"][1]["lr"] = 0.25
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is groups
    assert all(group is other for group, other in zip(optimizer.param_groups, dicts, strict=True))
    assert dicts[1]["lr"] == 0.25
    assert all(
        param is other
        for param, other in zip(dicts[0]["params"], param_groups(model, {})[0]["params"], strict=True)
    )
    with pytest.raises(EngineStateError, match="cannot load state onto the tiers"):
        optimizer.load_state_dict({"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []})
    with pytest.raises(EngineStateError, match="a param group was added after initialize"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


@pytest.mark.one_of(3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tiles_are_stepped_by_torch_operations_to_the_same_bits(
    case: Case,
    precision: str,
    run: Callable[..., Run],
    differing: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of a GPU are; with a square root that is rounded correctly, which a CPU's in torch is not."""
    reference = run(case, precision, 2)
    sqrt, stepped = torch.Tensor.sqrt, []
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda t: sqrt(t.double()).float())
    monkeypatch.setattr(TileStepper, "_tiles_with", lambda self, tile: self._on_device)
    on_device = TileBatch.add_on_device

    def counted(self: TileBatch, tile: Tile, *rules: Any) -> None:
        stepped.append(tile)
        on_device(self, tile, *rules)

    monkeypatch.setattr(TileBatch, "add_on_device", counted)
    moved = run(case, precision, 2, sub_group_size=1)
    assert len(stepped) > 3 * STEPS
    assert differing(moved.masters, reference.masters) == []
    assert differing(moved.weights, reference.weights) == []
    assert differing(moved.state, reference.state) == []


@pytest.mark.parametrize(
    ("share", "remedy"),
    [
        (
            {"offload_optimizer": "cpu", "ratio": 0.5},
            r"ratio 0\.5 keeps .* set ratio to 1, or .* to 'cpu' or 'none'",
        ),
        ({}, r"without offload_optimizer .* offload both, or set offload_param.device to 'cpu'"),
    ],
)
def test_a_gpu_steps_no_parameters_that_it_cannot_reach(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, share: dict[str, Any], remedy: str
) -> None:
    monkeypatch.setattr(assembly, "streams_of", lambda device: FakeDevice().streams)
    with pytest.raises(ConfigError, match=remedy):
        start(Scales(), offload_param="nvme", **share)
