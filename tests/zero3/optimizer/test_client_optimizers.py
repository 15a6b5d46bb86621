"""Optimizers that a caller brings along: taken over where a kernel does the same, else stepped on the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optim_cpu
import tiering
from tests.fakes.fake_device import FakeDevice
from tests.zero3.scales import (
    CASES,
    DTYPES,
    LR,
    PLACEMENTS,
    PRECISIONS,
    Scales,
    param_groups,
    settings,
    train_engine,
    train_plainly,
)
from tiering.errors import ConfigError, EngineStateError
from tiering.placement.workload import Tier
from zero3.building.zero_init import recipe_of


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def adamw(module: Any, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda groups: module.AdamW(groups, LR, (0.8, 0.9), 1e-6, 0.1, **options)


def adam(module: Any, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda groups: module.Adam(groups, LR, (0.8, 0.9), 1e-6, 0.1, **options)


class Renamed(torch.optim.AdamW):
    """A subclass that changes no step."""


class Halved(torch.optim.SGD):
    """A subclass with a step of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.div_(2)
        super().step(closure)


TAKEN_OVER: dict[str, tuple[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "torch AdamW": ("AdamW", adamw(torch.optim)),
    "torch AdamW, foreach": ("AdamW", adamw(torch.optim, foreach=True)),
    "torch AdamW, fused": ("AdamW", adamw(torch.optim, fused=True)),
    "torch AdamW, a subclass": ("AdamW", lambda groups: Renamed(groups, LR, (0.8, 0.9), 1e-6, 0.1)),
    "torch Adam": ("Adam", adam(torch.optim)),
    "torch Adam, decoupled": ("AdamW", adam(torch.optim, decoupled_weight_decay=True)),
    "torch SGD": ("SGD", lambda groups: torch.optim.SGD(groups, LR, weight_decay=0.1)),
    "torch SGD, momentum": ("SGD, momentum", lambda groups: torch.optim.SGD(groups, LR, 0.9, 0.5, 0.1)),
    "torch SGD, Nesterov": ("SGD, Nesterov", lambda groups: torch.optim.SGD(groups, LR, 0.9, 0, 0.1, True)),
    "torch Adagrad": ("Adagrad", lambda groups: torch.optim.Adagrad(groups, LR, 0.1, 0.1, 0.3, 1e-6)),
    "optim_cpu AdamW": ("AdamW", CASES["AdamW"].make),
    "optim_cpu Adam": ("Adam", CASES["Adam"].make),
    "optim_cpu Lion": ("Lion", CASES["Lion"].make),
    "optim_cpu Adagrad": ("Adagrad", CASES["Adagrad"].make),
    "optim_cpu SGD": ("SGD, momentum", CASES["SGD, momentum"].make),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("case", "make"), TAKEN_OVER.values(), ids=TAKEN_OVER)
def test_an_optimizer_that_the_kernels_know_is_taken_over(
    case: str,
    make: Callable[[Any], torch.optim.Optimizer],
    start: Callable[..., Any],
    differing: Callable[..., list[str]],
) -> None:
    """Its rule and options are; and its groups are the very same, for whoever holds them."""
    model = Scales()
    client = make([{**group, "kept": index} for index, group in enumerate(param_groups(model, {}))])
    groups, dicts = client.param_groups, list(client.param_groups)
    engine = start(model, client=client, rule=None, **settings("bf16", 2), **PLACEMENTS["all on nvme"])
    assert engine.optimizer.param_groups is groups is client.param_groups
    assert all(group is other for group, other in zip(groups, dicts, strict=True))
    assert [group["kept"] for group in groups] == [0, 1]
    assert not client.state
    run = train_engine(engine, 2)
    plain = train_plainly(CASES[case].make, {}, "bf16", 2, run.norms)
    assert differing(run.masters, plain.masters) == []
    by_its_own = train_plainly(make, {}, "bf16", 2, run.norms)
    for name, master in by_its_own.masters.items():
        assert float((run.masters[name] - master).abs().max()) < 1e-4, name


def test_a_scheduler_made_for_the_original_steers_what_took_it_over(start: Callable[..., Any]) -> None:
    model = Scales()
    client = torch.optim.SGD(trained(model), torch.tensor(LR))
    scheduler = torch.optim.lr_scheduler.LambdaLR(client, lambda update: float(update == 0))
    engine = start(model, client=client, rule=None, **settings(), **PLACEMENTS["host"])
    masters = [engine.master_state_dict()]
    for _ in range(2):
        engine.backward(engine(torch.ones(40), 0))
        engine.step()
        scheduler.step()  # no warning that the optimizer has not stepped
        masters.append(engine.master_state_dict())
    assert not torch.equal(masters[0]["outer.weight"], masters[1]["outer.weight"])
    assert torch.equal(masters[1]["outer.weight"], masters[2]["outer.weight"])
    assert float(engine.optimizer.param_groups[0]["lr"]) == 0


def test_a_function_of_the_parameters_makes_the_optimizer(start: Callable[..., Any]) -> None:
    model, calls = Scales(), []

    def make(params: Any) -> torch.optim.Optimizer:
        calls.append(list(params))
        return torch.optim.SGD(calls[-1], LR)

    engine = start(model, client=make, rule=None, **settings())
    assert list(map(id, calls[0])) == list(map(id, trained(model)))
    assert engine.optimizer.rule.name == "SGD"
    other = Scales()
    groups = param_groups(other, {})
    engine = start(other, client=torch.optim.Adam, model_parameters=groups, rule=None, **settings())
    assert engine.optimizer.rule.name == "Adam"
    assert [group["lr"] for group in engine.optimizer.param_groups] == [1e-3, LR / 2]


def test_the_optimizer_that_is_given_wins_and_that_is_said(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = Scales()
    client = torch.optim.SGD(trained(model), LR)
    engine = start(model, client=client, rule="Lion", **settings())
    assert engine.optimizer.rule.name == "SGD"
    assert "the SGD given to initialize() is used, the configuration's optimizer section (Lion) is not" in (
        caplog.text
    )


FOREIGN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, LR, eps=1e-6, momentum=0.5),
    "AdamW, amsgrad": adamw(torch.optim, amsgrad=True),
    "SGD with a step of its own": lambda groups: Halved(groups, LR, 0.9),
}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_any_other_optimizer_steps_fp32_on_the_device(
    make: Callable[[Any], torch.optim.Optimizer],
    precision: str,
    accumulation: int,
    start: Callable[..., Any],
    differing: Callable[..., list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Scales()
    client = make(param_groups(model, {}))
    with caplog.at_level("INFO"):
        engine = start(
            model, client=client, rule=None, stage=0, sub_group_size=1, **settings(precision, accumulation)
        )
    assert engine.plan.workload.grad_itemsize == 4
    assert f"{type(client).__name__} steps on the device by itself" in caplog.text
    assert engine.optimizer.param_groups is client.param_groups
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    state = 0 if precision == "fp32" else 4
    trained = sum(group.trainable_numel for group in engine.plan.workload.groups)
    assert engine.plan.contents(Tier.DEVICE).get("optimizer state", 0) == state * trained
    run = train_engine(engine, accumulation)
    assert {p.dtype for p in model.parameters()} == {DTYPES[precision]}
    assert all(p.grad is None for p in model.parameters())
    assert {p.dtype for state in client.state.values() for p in state.values() if p.dim()} == {torch.float32}
    plain = train_plainly(make, {}, precision, accumulation, run.norms)
    assert differing(run.masters, plain.masters) == []
    assert differing(run.weights, plain.weights) == []


def test_gradients_kept_in_16_bits_reach_a_client_in_fp32(
    start: Callable[..., Any], differing: Callable[..., list[str]]
) -> None:
    runs = []
    for accum_dtype in ("fp32", "bf16"):  # of one micro-batch in bf16: the same values
        model = Scales()
        client = torch.optim.RMSprop(param_groups(model, {}), LR)
        engine = start(model, client=client, rule=None, grad_accum_dtype=accum_dtype, **settings("bf16"))
        assert engine.plan.workload.grad_itemsize == (4 if accum_dtype == "fp32" else 2)
        runs.append(train_engine(engine, 1))
    assert differing(runs[0].masters, runs[1].masters) == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_a_gpu_the_cpu_touches_nothing_of_a_clients_step(
    start: Callable[..., Any],
    differing: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
) -> None:
    def run() -> Any:
        torch.manual_seed(3)
        model = Scales()
        client = torch.optim.RMSprop(param_groups(model, {}), LR)
        return train_engine(start(model, client=client, rule=None, **settings(precision)), 1)

    expected = run()
    with FakeDevice() as gpu:
        gpu.run_engines(monkeypatch)
        outcome = run()
    assert differing(outcome.masters, expected.masters) == []
    assert differing(outcome.weights, expected.weights) == []


def test_state_of_a_client_is_saved_and_loaded_in_fp32(start: Callable[..., Any]) -> None:
    def begin() -> Any:
        model = Scales()
        client = torch.optim.RMSprop(param_groups(model, {}), LR)
        return start(model, client=client, rule=None, **settings("bf16"))

    first, other = begin(), begin()
    first.backward(first(torch.randn(40, generator=torch.Generator().manual_seed(1)), 9))
    first.step()
    saved = first.optimizer.state_dict()
    saved["param_groups"][1]["lr"] = LR / 4
    other.optimizer.load_state_dict(saved)
    assert {p.dtype for p in other.module.parameters()} == {torch.bfloat16}
    assert other.optimizer.param_groups is other.optimizer.client.param_groups
    assert other.optimizer.param_groups[1]["lr"] == LR / 4
    with pytest.raises(EngineStateError, match="a param group was added after initialize"):
        other.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    loaded = other.optimizer.state_dict()["state"]
    assert loaded.keys() == saved["state"].keys()
    for number, values in saved["state"].items():
        average = values["square_avg"]
        assert not torch.equal(average.bfloat16().float(), average)
        assert torch.equal(loaded[number]["square_avg"], average)


def test_an_exception_in_a_clients_step_leaves_the_parameters_their_data(start: Callable[..., Any]) -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert self.param_groups[0]["params"][0].dtype is torch.float32
            raise RuntimeError("out of luck")

    model = Scales()
    client = Fails(trained(model), LR)
    engine = start(model, client=client, rule=None, **settings("bf16"))
    engine.backward(engine(torch.ones(40), 0))
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(p.grad is None for p in model.parameters())


def in_two_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    return [{"params": trained(model)[:2]}, {"params": trained(model)[2:], **options}]


def with_seed(optimizer: torch.optim.Optimizer, seed: int) -> torch.optim.Optimizer:
    optimizer.param_groups[1]["seed"] = seed
    return optimizer


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(trained(model), LR)
    for param in trained(model):
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any], str]] = {
    "a client, offloaded": (
        lambda model: torch.optim.RMSprop(trained(model), LR),
        {"offload_optimizer": "cpu"},
        r"the RMSprop needs parameters and state on the device, but offload_optimizer.device is 'cpu'. Use AdamW, ",
    ),
    "a client, parameters offloaded": (
        lambda model: adamw(torch.optim, amsgrad=True)(trained(model)),
        {"offload_param": "nvme"},
        r"the AdamW needs .* offload_param.device is 'nvme'. .* without amsgrad, .* to 'none'$",
    ),
    "a closure": (
        lambda model: torch.optim.LBFGS(trained(model)),
        {},
        "the step of LBFGS takes a closure",
    ),
    "stepped before": (stepped, {}, "the AdamW has stepped before, .* pass a new optimizer"),
    "two state formats": (
        lambda model: optim_cpu.AdamW(in_two_groups(model, state_format="bf16"), LR),
        {},
        "the param groups of the AdamW have state_format fp32 and bf16 .*; the tiers keep one: give all groups",
    ),
    "two ways to round": (
        lambda model: optim_cpu.Lion(
            in_two_groups(model, stochastic_rounding=False), LR, state_format="bf16"
        ),
        {},
        r"the param groups of the Lion have .* \(or differ in stochastic_rounding\)",
    ),
    "half of a master that is none": (
        lambda model: optim_cpu.AdamW(trained(model), LR, state_format="split+bf16"),
        {},
        "the AdamW has state_format 'split.bf16', but the precision is fp32, .*: make it with state_format='bf16'",
    ),
    "a seed that was changed to nonsense": (
        lambda model: with_seed(optim_cpu.AdamW(in_two_groups(model), LR, state_format="bf16"), -1),
        {},
        r"Adam, param group 1: seed must be an integer from 0 to 2\^64 - 1, got -1",
    ),
    "a format that contradicts the configuration": (
        lambda model: optim_cpu.AdamW(trained(model), LR, state_format="bf16"),
        {"state": "split+bf16", "precision": "bf16"},
        r"the AdamW has state_format 'bf16', but tiering.state is 'split\+bf16': make it with .*='split\+bf16', or",
    ),
    "a client that has no bf16 state": (
        lambda model: torch.optim.RMSprop(trained(model), LR),
        {"state": "bf16"},
        "the RMSprop has no kernel here .* tiering.state is 'bf16': set it to 'fp32', or use AdamW",
    ),
    "a client that steps all at once": (
        lambda model: torch.optim.RMSprop(trained(model), LR),
        {"step_in_backward": True, "clip": 0.0},
        "the RMSprop has no kernel here .* tiering.step is 'in_backward': set it to 'after', or use AdamW",
    ),
    "no optimizer": (lambda _: "AdamW", {}, "takes a torch.optim.Optimizer, or a function .* not str"),
    "a function of something else": (lambda _: lambda params: list(params), {}, "that makes one, not list"),
    "a parameter left out": (
        lambda model: torch.optim.SGD(trained(model)[1:], LR),
        {},
        r"1 parameters require gradients but are not in the SGD \(blocks.0.weight",
    ),
    "a parameter of another model": (
        lambda model: torch.optim.SGD([*trained(model), nn.Parameter(torch.ones(2))], LR),
        {},
        "the SGD lists 1 parameters that are not the model's",
    ),
    "an option that no kernel takes": (
        lambda model: torch.optim.SGD(in_two_groups(model, dampening=float("inf")), LR, 0.9),
        {},
        "SGD, param group 1: sgd: dampening must be finite",
    ),
}


@pytest.mark.parametrize(("client", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_stepped_is_refused(
    client: Callable[[nn.Module], Any],
    options: dict[str, Any],
    message: str,
    start: Callable[..., Any],
) -> None:
    model = Scales()
    with pytest.raises(ConfigError, match=message):
        start(model, client=client(model), rule=None, **(settings() | options))
    assert all(bool(param.isfinite().all()) for param in model.parameters())


def test_parameters_that_are_frozen_may_be_listed(start: Callable[..., Any]) -> None:
    model = Scales()
    client = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.5)
    engine = start(model, client=client, rule=None, **settings())
    before = model.frozen.detach().clone()
    run = train_engine(engine, 1, steps=1)
    assert torch.equal(run.weights["frozen"], before)
    assert "frozen" not in run.masters


def test_an_optimizer_over_parameters_without_memory_is_taken_over(
    start: Callable[..., Any], differing: Callable[..., list[str]]
) -> None:
    """As made by zero.Init. Adagrad's sums have memory, which torch fills, until they start on the tiers."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.pow(2).sum()

    runs = []
    for meta in (False, True):
        torch.manual_seed(8)
        with tiering.zero.Init() if meta else nullcontext():
            model = Model()
        assert all((recipe_of(p) is not None) == meta for p in model.parameters())
        client = torch.optim.Adagrad(model.parameters(), LR, initial_accumulator_value=0.5)
        engine = start(model, client=client, rule=None, **settings(), **PLACEMENTS["all on nvme"])
        before = engine.master_state_dict()
        engine.backward(engine(torch.ones(40)))
        engine.step()
        runs.append(engine.master_state_dict())
        assert len(differing(before, runs[-1])) == 4
    assert differing(*runs) == []
