"""The optimizer classes beside torch.optim's: every option, param groups, schedulers, closures, hooks, autograd."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler

import optim_cpu
from optim_cpu import kernels, tensor_batch

from .stepping import (
    CLASSES,
    EVERY_OPTION,
    assert_near,
    assert_same,
    give_gradients,
    ids,
    ours,
    parameters,
    torchs,
    twins,
)

NAMES = [*CLASSES, "Lion"]


@pytest.mark.parametrize(("name", "options"), EVERY_OPTION, ids=ids)
def test_thirty_steps_are_torchs_but_for_rounding(name: str, options: dict[str, Any]) -> None:
    mine = parameters()
    theirs = twins(mine)
    my, their = ours(name, mine, **options), torchs(name, theirs, **options)
    for i in range(30):
        give_gradients(mine, theirs, seed=i)
        my.step()
        their.step()
    assert_near(mine, theirs)
    for a, b in zip(mine, theirs, strict=True):
        for key, value in their.state[b].items():
            assert_near([my.state[a][key]], [value])


def lion_step(p: Tensor, g: Tensor, m: Tensor, *, lr: float, betas: tuple[float, float], wd: float) -> None:
    """Algorithm 2 of the paper, with its decay outside of the sign."""
    update = (betas[0] * m + (1 - betas[0]) * g).sign()
    p -= lr * (update + wd * p)
    m.copy_(betas[1] * m + (1 - betas[1]) * g)


@pytest.mark.parametrize("maximize", [False, True])
def test_lion_is_the_papers(maximize: bool) -> None:
    mine = parameters()
    theirs = [p.detach().double() for p in mine]
    moments = [torch.zeros_like(p) for p in theirs]
    my = optim_cpu.Lion(mine, lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1, maximize=maximize)
    for i in range(30):
        give_gradients(mine, seed=i)
        for p, m, param in zip(theirs, moments, mine, strict=True):
            assert param.grad is not None
            grad = param.grad.double() * (-1 if maximize else 1)
            lion_step(p, grad, m, lr=3e-3, betas=(0.8, 0.95), wd=0.1)
        my.step()
    assert_near(mine, [p.float() for p in theirs])
    assert_near([my.state[p]["exp_avg"] for p in mine], [m.float() for m in moments])


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_torchs_in_name_order_and_default(name: str) -> None:
    mine = inspect.signature(getattr(optim_cpu, name)).parameters
    own: dict[str, object] = {"state_format": "fp32", "stochastic_rounding": True, "seed": 0}
    own |= {"bias_correction": True} if name.startswith("Adam") else {}
    assert {key: mine[key].default for key in own} == own
    if name == "Lion":
        assert [(p.name, p.default) for p in list(mine.values())[1:4]] == [
            ("lr", 1e-4), ("betas", (0.9, 0.99)), ("weight_decay", 0.0),
        ]  # fmt: skip
        return
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    expected = {key: (p.default, p.kind) for key, p in theirs.items()}
    assert {key: (p.default, p.kind) for key, p in mine.items() if key not in own} == expected
    assert [key for key, p in mine.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        key for key, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr", -1.0, "lr must be 0 or more"), ("lr", torch.ones(2), "lr must be a number or a tensor of one element"),
        ("weight_decay", -0.5, "weight_decay must be 0 or more"), ("betas", (1.0, 0.9), "beta1 must be at least 0"),
        ("betas", (0.9, 1.0), "beta2 must be"), ("eps", -1e-8, "eps must be 0 or more"),
        ("momentum", -0.1, "momentum must be 0 or more"), ("lr_decay", -1.0, "lr_decay must be"),
        ("initial_accumulator_value", -1.0, "initial_accumulator_value must be 0 or more"),
        ("nesterov", True, "nesterov must come with a momentum"),
        ("state_format", "fp16", "state_format must be one of fp32, bf16, split, split"),
        ("seed", -1, "seed must be an integer from 0"), ("seed", 1.5, "seed must be an integer"),
        ("amsgrad", True, "amsgrad=True is not supported: .*torch.optim"),
        ("capturable", True, "capturable=True is not supported: .*leave it False"),
        ("differentiable", True, "differentiable=True is not supported: .*torch.optim"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_by_name_wherever_they_come(
    name: str, option: str, value: Any, message: str
) -> None:
    make = getattr(optim_cpu, name)
    if option not in inspect.signature(make).parameters:
        with pytest.raises(TypeError, match=option):
            make(parameters(), **{option: value})
        return
    with pytest.raises(ValueError, match=rf"{name}, param group 0: ([a-z]+: )?{message}"):
        make(parameters(), **{option: value})
    optimizer = make(parameters([(2,)]))
    with pytest.raises(ValueError, match=rf"{name}, param group 1: ([a-z]+: )?{message}"):
        optimizer.add_param_group({"params": parameters([(3,)]), option: value})
    assert len(optimizer.param_groups) == 1
    if option in ("amsgrad", "capturable", "differentiable", "initial_accumulator_value"):
        return
    (param,) = optimizer.param_groups[0]["params"]
    before, param.grad = param.detach().clone(), torch.ones(2)
    good, optimizer.param_groups[0][option] = optimizer.param_groups[0][option], value
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(param, before)
    optimizer.param_groups[0][option] = good
    optimizer.step()
    assert not torch.equal(param, before)
    for state in optimizer.state.values():
        assert state.get("step", 1) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [({"lr": "0.1"}, TypeError), ({"betas": (0.1, 0.2, 0.3)}, ValueError), ({"betas": 3}, TypeError)],
)
def test_options_of_a_wrong_kind_say_whose_they_are(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^Adam, param group 0: "):
        optim_cpu.Adam(parameters([(2,)]), **options)


def test_foreach_and_fused_change_nothing() -> None:
    plain, other = parameters(), parameters()
    a, b = optim_cpu.AdamW(plain), optim_cpu.AdamW(other, fused=True, foreach=True)
    give_gradients(plain, other, seed=0)
    a.step()
    b.step()
    assert_same(plain, other)


@pytest.mark.parametrize("name", CLASSES)
def test_tensors_as_lr_follow_schedulers(name: str) -> None:
    mine = parameters([(50,)])
    theirs = twins(mine)
    my, their = ours(name, mine, lr=torch.tensor(0.1)), torchs(name, theirs, lr=0.1)
    schedulers = [lr_scheduler.ExponentialLR(o, 0.8) for o in (my, their)]
    for i in range(10):
        give_gradients(mine, theirs, seed=i)
        for optimizer, scheduler in zip((my, their), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    assert isinstance(my.param_groups[0]["lr"], Tensor)
    assert float(my.param_groups[0]["lr"]) == pytest.approx(0.1 * 0.8**10)
    assert_near(mine, theirs)


@pytest.mark.parametrize(("name", "options"), [("AdamW", {}), ("SGD", {"momentum": 0.9})])
def test_one_cycle_moves_lr_and_momentum(name: str, options: dict[str, Any]) -> None:
    mine = parameters([(50,), (3,)])
    theirs = twins(mine)
    my, their = ours(name, mine, **options), torchs(name, theirs, **options)
    schedulers = [lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20) for o in (my, their)]
    for i in range(19):
        give_gradients(mine, theirs, seed=i)
        for optimizer, scheduler in zip((my, their), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    assert_near(mine, theirs)


@pytest.mark.parametrize(("name", "options"), EVERY_OPTION, ids=ids)
def test_parameters_without_gradient_are_skipped_and_counted_for_themselves(
    name: str, options: dict[str, Any]
) -> None:
    mine = parameters()
    theirs = twins(mine)
    my, their = ours(name, mine, **options), torchs(name, theirs, **options)
    for i in range(12):
        give_gradients(mine, theirs, seed=i, missing=[j for j in range(len(mine)) if (i + j) % (j + 2) == 0])
        my.step()
        their.step()
    assert_near(mine, theirs)
    counts = [[float(o.state[p].get("step", 0)) for p in side] for o, side in ((my, mine), (their, theirs))]
    if name != "SGD":
        assert counts[0] == counts[1]
        assert len(set(counts[0])) > 2


def test_no_gradient_at_all_is_no_step() -> None:
    params = parameters()
    before = twins(params)
    optimizer = optim_cpu.AdamW(params)
    optimizer.step()
    assert_same(params, before)
    assert optimizer.state_dict()["state"] == {}


def test_groups_have_their_own_options_and_may_come_later() -> None:
    mine = parameters()
    theirs = twins(mine)
    my, their = (
        make("AdamW", [{"params": side[:2], "lr": 0.1}, {"params": side[2:4], "betas": (0.5, 0.8)}], lr=0.01)
        for make, side in ((ours, mine), (torchs, theirs))
    )
    for i in range(10):
        if i == 4:
            for optimizer, side in ((my, mine), (their, theirs)):
                optimizer.add_param_group({"params": side[4:], "weight_decay": 0.3})
        if i == 7:
            for optimizer in (my, their):
                optimizer.param_groups[1]["lr"] = 0.5
                optimizer.param_groups[2]["maximize"] = True
        give_gradients(mine, theirs, seed=i)
        my.step()
        their.step()
    assert_near(mine, theirs)
    assert [float(my.state[p]["step"]) for p in mine] == [10] * 4 + [6] * 3


def test_momentum_may_be_switched_on_and_off() -> None:
    mine = parameters([(9,)])
    theirs = twins(mine)
    my, their = ours("SGD", mine, lr=0.1), torchs("SGD", theirs, lr=0.1)
    for i in range(9):
        for optimizer in (my, their):
            optimizer.param_groups[0]["momentum"] = 0.9 if 3 <= i < 5 or i >= 7 else 0.0
        give_gradients(mine, theirs, seed=i)
        my.step()
        their.step()
    assert_near(mine, theirs)


def test_a_parameter_that_leaves_a_group_is_not_stepped() -> None:
    params = parameters([(4,), (5,)])
    optimizer = optim_cpu.SGD(params, lr=1.0)
    give_gradients(params, seed=0)
    optimizer.step()
    leaver = optimizer.param_groups[0]["params"].pop(0)
    before = leaver.detach().clone()
    optimizer.step()
    assert torch.equal(leaver, before)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_groups_and_gradients_are_torchs(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(CLASSES)))
    sizes = data.draw(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 3)), min_size=1, max_size=8))
    mine = parameters(sizes, seed=data.draw(st.integers(0, 9)))
    theirs = twins(mine)
    cuts = sorted({0, len(mine), *data.draw(st.lists(st.integers(0, len(mine)), max_size=3))})
    keys = ["momentum", "nesterov"] if name == "SGD" else []
    groups: list[list[dict[str, Any]]] = [[], []]
    for start, end in pairwise(cuts):
        options = {
            "lr": data.draw(st.sampled_from([0.0, 1e-3, 0.1])),
            "weight_decay": data.draw(st.sampled_from([0, 0.1])),
        }
        options |= dict.fromkeys(keys, data.draw(st.sampled_from([0.9, 0.5])) if keys else 0)
        options |= {"nesterov": data.draw(st.booleans())} if keys else {}
        for side, params in zip(groups, (mine, theirs), strict=True):
            side.append({"params": params[start:end], **options})
    my, their = ours(name, groups[0]), torchs(name, groups[1])
    for i in range(data.draw(st.integers(1, 6))):
        missing = data.draw(st.sets(st.integers(0, len(mine) - 1)))
        give_gradients(mine, theirs, seed=i, missing=missing)
        if data.draw(st.booleans()):
            kernels.set_thread_count(data.draw(st.integers(1, 3)))
        my.step()
        their.step()
    assert_near(mine, theirs)


def test_closures_run_with_autograd_and_their_loss_comes_back() -> None:
    (x,) = parameters([(3,)])
    optimizer = optim_cpu.SGD([x], lr=0.25)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (x * x).sum()
        loss.backward()
        return loss

    before = x.detach().clone()
    loss = optimizer.step(closure)
    assert float(loss.detach()) == float((before * before).sum())
    assert torch.equal(x, before / 2)


def test_hooks_run_around_the_step() -> None:
    params = parameters([(3,)])
    optimizer = optim_cpu.AdamW(params)
    order: list[Any] = []
    optimizer.register_step_pre_hook(
        lambda o, args, kwargs: order.append(("pre", params[0].detach().clone()))
    )
    optimizer.register_step_post_hook(
        lambda o, args, kwargs: order.append(("post", params[0].detach().clone()))
    )
    give_gradients(params, seed=0)
    before = params[0].detach().clone()
    optimizer.step()
    assert [name for name, _ in order] == ["pre", "post"]
    assert torch.equal(order[0][1], before)
    assert torch.equal(order[1][1], params[0]) and not torch.equal(before, params[0])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_and_backward_make_a_training_loop(set_to_none: bool) -> None:
    models = [
        torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)) for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        optim_cpu.AdamW(models[0].parameters(), lr=0.01), torch.optim.AdamW(models[1].parameters(), lr=0.01),
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for _ in range(15):
        x = torch.randn(4, 6, generator=generator)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            assert all(p.grad is None or not p.grad.any() for p in model.parameters())
            model(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_autograd_notices_that_a_saved_parameter_was_stepped() -> None:
    (x,) = parameters([(3,)])
    loss = (x * x * x).sum()
    optimizer = optim_cpu.SGD([x])
    x.grad = torch.ones(3)
    version = x._version
    optimizer.step()
    assert x._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_threads_and_instruction_sets_give_one_result() -> None:
    results = []
    for threads in (1, 2, 5):
        for isa in kernels.available_instruction_sets():
            kernels.set_thread_count(threads)
            kernels.set_instruction_set(isa)
            params = parameters([(70_001,), *[(i,) for i in range(40)]], torch.bfloat16)
            optimizer = optim_cpu.AdamW(params, state_format="split+bf16")
            for i in range(3):
                give_gradients(params, seed=i)
                optimizer.step()
            results.append([*params, *(optimizer.state[p]["exp_avg_sq"] for p in params)])
    for other in results[1:]:
        assert_same(results[0], other)


def test_many_small_tensors_with_counts_of_their_own() -> None:
    mine = parameters([(1 + i % 5,) for i in range(300)])
    theirs = twins(mine)
    my = optim_cpu.Adam([{"params": [p], "lr": 1e-3 * (1 + i)} for i, p in enumerate(mine)])
    their = torch.optim.Adam([{"params": [p], "lr": 1e-3 * (1 + i)} for i, p in enumerate(theirs)])
    for i in range(6):
        give_gradients(mine, theirs, seed=i, missing=range(i * 40, 300))
        my.step()
        their.step()
    assert_near(mine, theirs)


def test_a_forked_child_steps_as_its_parent() -> None:
    params = parameters([(40_000,), (3,)])
    optimizer = optim_cpu.AdamW(params)
    give_gradients(params, seed=0)
    optimizer.step()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        optimizer.step()
        os.write(write, params[0].detach().numpy()[-50:].tobytes())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        content = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    optimizer.step()
    assert content == params[0].detach().numpy()[-50:].tobytes()


def test_an_interrupt_during_the_run_counts_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters([(3,)])
    optimizer = optim_cpu.AdamW(params)
    give_gradients(params, seed=0)
    optimizer.step()
    run = kernels.StepBatch.run

    def interrupted(self: kernels.StepBatch, grad_scale: float = 1.0) -> None:
        run(self, grad_scale)
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels.StepBatch, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    monkeypatch.undo()
    optimizer.step()
    assert float(optimizer.state[params[0]]["step"]) == 3
    straight = parameters([(3,)])
    other = optim_cpu.AdamW(straight)
    give_gradients(straight, seed=0)
    for _ in range(3):
        other.step()
    assert_same(params, straight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_checked_twice_while_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    params = parameters(dtype=dtype)
    optimizer = optim_cpu.AdamW(params, lr=0.1)
    give_gradients(params, seed=0)
    optimizer.step()
    added, prepared = [], []
    add, fit = kernels.StepBatch.add, tensor_batch.fit_master
    monkeypatch.setattr(
        kernels.StepBatch, "add", lambda *args, **kwargs: (added.append(args), add(*args, **kwargs))[1]
    )
    monkeypatch.setattr(
        tensor_batch, "fit_master", lambda *args, **kwargs: (prepared.append(args), fit(*args, **kwargs))
    )
    for i in range(3):
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.zero_grad()
        give_gradients(params, seed=i)
        optimizer.step()
    assert (len(added), len(prepared)) == (0, 0)
    give_gradients(params, seed=3, missing=[1])
    optimizer.step()
    assert (len(added), len(prepared)) == (len(params) - 1, 0)
    with torch.no_grad():
        params[0].mul_(2)
    optimizer.step()
    assert len(prepared) == (dtype is torch.bfloat16)


def test_a_removed_parameter_is_let_go() -> None:
    params = parameters([(3,), (4,)])
    optimizer = optim_cpu.AdamW(params)
    give_gradients(params, seed=0)
    optimizer.step()
    moment = weakref.ref(optimizer.state[params[0]]["exp_avg"])
    removed = optimizer.param_groups[0]["params"].pop(0)
    del optimizer.state[removed]
    optimizer.step()
    assert moment() is None


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_imports_without_torch() -> None:
    code = "import sys, optim_cpu; print('torch' in sys.modules, 'AdamW' in dir(optim_cpu))"
    assert run_python(code) == "False True"
    with pytest.raises(AttributeError, match="no attribute 'Adamw'"):
        _ = optim_cpu.Adamw


def test_an_unknown_instruction_set_is_told_at_once_and_the_first_step_loads_no_compiler() -> None:
    code = (
        "import sys, torch, optim_cpu\nfrom optim_cpu import kernels\n"
        "try: optim_cpu.SGD([torch.zeros(1)])\nexcept ValueError as error: print(error)\n"
        "kernels.set_instruction_set('portable')\n"
        "p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)\n"
        "o = optim_cpu.AdamW([p], state_format='bf16'); o.step(); o.zero_grad(); o.load_state_dict(o.state_dict())\n"
        "print(int(o.state[p]['step']), 'torch._dynamo' in sys.modules)"
    )
    warning, first_step = run_python(code, TIERING_ISA="mmx").splitlines()
    assert "TIERING_ISA is 'mmx'" in warning
    assert first_step == "1 False"


def test_a_subclass_may_wrap_step() -> None:
    class Doubled(optim_cpu.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            super().step()
            return super().step(closure)

    param = Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    Doubled([param], lr=0.25).step()
    assert param.tolist() == [0.5, 0.5]
