"""state_dict in both directions with torch.optim, exact continuation in every format, copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import optim_cpu
from optim_cpu.fused_optimizer import STATE_FORMATS
from tests.crossed import crossed

from .stepping import (
    CLASSES,
    EVERY_OPTION,
    SHAPES,
    assert_near,
    assert_same,
    give_gradients,
    ids,
    ours,
    parameters,
    torchs,
    twins,
)


def steps(optimizer: Any, params: list[Parameter], start: int, end: int) -> None:
    for i in range(start, end):
        give_gradients(params, seed=i, missing=[2] if i % 3 == 0 else [])
        optimizer.step()


@pytest.mark.parametrize(("name", "options"), EVERY_OPTION, ids=ids)
@pytest.mark.parametrize("from_torch", [True, False])
def test_state_passes_between_torchs_class_and_ours(
    name: str, options: dict[str, Any], from_torch: bool
) -> None:
    """Saved by one after five steps, loaded by the other, which then goes on as if it had been there all the time."""
    makers: list[Callable[..., Any]] = [torchs, ours] if from_torch else [ours, torchs]
    straight = parameters()
    first = twins(straight)
    whole, half = torchs(name, straight, **options), makers[0](name, first, **options)
    steps(whole, straight, 0, 12)
    steps(half, first, 0, 5)
    second = twins(first)
    other = makers[1](name, second)
    other.load_state_dict(copy.deepcopy(half.state_dict()))
    for key, value in options.items():
        assert other.param_groups[0][key] == value
    steps(other, second, 5, 12)
    assert_near(second, straight)


def test_what_is_saved_looks_like_torchs() -> None:
    for name, options in EVERY_OPTION:
        mine = parameters()
        theirs = twins(mine)
        my, their = ours(name, mine, **options), torchs(name, theirs, **options)
        steps(my, mine, 1, 3)
        steps(their, theirs, 1, 3)
        saved, expected = my.state_dict(), their.state_dict()
        own = {"state_format", "stochastic_rounding", "seed"}
        own |= {"bias_correction"} if name.startswith("Adam") else set()
        for group, like in zip(saved["param_groups"], expected["param_groups"], strict=True):
            assert set(group) - own == set(like)
            assert {k: v for k, v in group.items() if k not in {*own, "foreach"}} == {
                k: v for k, v in like.items() if k != "foreach"
            }
        assert set(saved["state"]) == {k for k, v in expected["state"].items() if v}
        for key, state in saved["state"].items():
            like = expected["state"][key]
            assert set(state) == set(like) | ({"step"} if name == "SGD" else set())
            for k, value in like.items():
                assert (state[k].dtype, state[k].shape, state[k].stride()) == (
                    value.dtype,
                    value.shape,
                    value.stride(),
                )
            step = state["step"]
            assert step.dtype is torch.float32 and step.shape == () and step.untyped_storage().nbytes() == 4


@pytest.mark.parametrize(
    ("way", "name", "dtype", "state_format"),
    crossed(
        ["load", "file", "deepcopy", "pickle", "optimizer before model"],
        [*CLASSES, "Lion"],
        [torch.float32, torch.bfloat16, torch.float16],
        STATE_FORMATS,
    ),
)
def test_a_run_continues_to_the_bit(name: str, dtype: torch.dtype, state_format: str, way: str) -> None:
    if dtype is torch.float16 and state_format.startswith("split"):
        state_format = state_format.replace("split", "bf16")[:4]
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "state_format": state_format, "seed": 7}
    options |= {"momentum": 0.9} if name == "SGD" else {}
    shapes = SHAPES[:6]
    straight = parameters(shapes, dtype)
    whole = ours(name, straight, **options)
    steps(whole, straight, 0, 7)
    params = parameters(shapes, dtype)
    optimizer = ours(name, params, **options)
    steps(optimizer, params, 0, 4)
    if way == "deepcopy":
        params, optimizer = copy.deepcopy((params, optimizer))
    elif way == "pickle":
        params, optimizer = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        saved = optimizer.state_dict()
        if way == "file":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        fresh = parameters(shapes, dtype, seed=5)
        values = [p.detach().clone() for p in params]
        if way != "optimizer before model":
            for param, value in zip(fresh, values, strict=True):
                param.data.copy_(value)
        other = ours(name, fresh, **options)
        other.load_state_dict(saved)
        if way == "optimizer before model":
            with torch.no_grad():
                for param, value in zip(fresh, values, strict=True):
                    param.copy_(value)
        steps(optimizer, params, 4, 6)  # what was loaded is a copy
        params, optimizer = fresh, other
    steps(optimizer, params, 4, 7)
    assert_same(params, straight)
    for p, q in zip(params, straight, strict=True):
        assert set(optimizer.state[p]) == set(whole.state[q])
        for key, value in whole.state[q].items():
            assert optimizer.state[p][key].dtype == value.dtype
            assert torch.equal(optimizer.state[p][key], value), key


def test_stochastic_rounding_needs_seed_and_place_only() -> None:
    """Elements have their place among all parameters: a missing gradient elsewhere moves no random bits."""
    runs = []
    for missing in ([], [0]):
        params = parameters([(40,), (300,)])
        optimizer = optim_cpu.AdamW(params, state_format="bf16", seed=3)
        give_gradients(params, seed=1, missing=missing)
        optimizer.step()
        runs.append(optimizer.state[params[1]]["exp_avg_sq"])
    other = optim_cpu.AdamW(params := parameters([(40,), (300,)]), state_format="bf16", seed=4)
    give_gradients(params, seed=1)
    other.step()
    nearest = optim_cpu.AdamW(
        more := parameters([(40,), (300,)]), state_format="bf16", stochastic_rounding=False
    )
    give_gradients(more, seed=1)
    nearest.step()
    assert more[1].grad is not None
    exact = 0.001 * more[1].grad.square()
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], other.state[params[1]]["exp_avg_sq"])
    twin = [Parameter(torch.ones(300)) for _ in range(2)]
    for param in twin:
        param.grad = torch.linspace(0.1, 1, 300)
    both = optim_cpu.AdamW(twin, state_format="bf16")
    both.step()
    assert not torch.equal(*(both.state[p]["exp_avg_sq"] for p in twin))
    assert torch.equal(nearest.state[more[1]]["exp_avg_sq"], exact.bfloat16())


@pytest.mark.parametrize("older", [False, True])
def test_options_of_a_checkpoint_win_and_what_torchs_lacks_stays(older: bool) -> None:
    params = parameters([(4,)])
    their = torch.optim.Adam(twins(params), lr=0.25)
    saved = their.state_dict()
    if older:
        del saved["param_groups"][0]["decoupled_weight_decay"]
    my = optim_cpu.AdamW(params, lr=0.5, state_format="bf16", seed=9)
    my.load_state_dict(saved)
    (group,) = my.param_groups
    assert (group["lr"], group["state_format"], group["seed"]) == (0.25, "bf16", 9)
    assert group["decoupled_weight_decay"] is True  # AdamW is AdamW
    fp32 = optim_cpu.AdamW(parameters([(4,)]))
    fp32.load_state_dict(my.state_dict())
    assert fp32.param_groups[0]["state_format"] == "bf16"


def test_adagrad_has_its_state_from_the_start_as_torchs_needs_it() -> None:
    mine = parameters([(4,), (2, 3), (5,)])
    theirs = twins(mine)
    my = optim_cpu.Adagrad(mine[:2], initial_accumulator_value=0.25)
    my.add_param_group({"params": mine[2:], "initial_accumulator_value": 0.5})
    sums = [my.state[p]["sum"].unique().tolist() for p in mine]
    assert sums == [[0.25], [0.25], [0.5]]
    their = torch.optim.Adagrad([{"params": theirs[:2]}, {"params": theirs[2:]}])
    their.load_state_dict(copy.deepcopy(my.state_dict()))
    steps(my, mine, 1, 4)
    steps(their, theirs, 1, 4)
    assert_near(mine, theirs)


@pytest.mark.parametrize("old", STATE_FORMATS)
@pytest.mark.parametrize("new", STATE_FORMATS)
def test_a_changed_format_converts_state(old: str, new: str) -> None:
    params = parameters([(64,), (3, 5)], torch.bfloat16)
    optimizer = optim_cpu.AdamW(params, lr=1e-3, state_format=old)
    for i in range(3):
        give_gradients(params, seed=i)
        optimizer.step()
    before = {p: dict(optimizer.state[p]) for p in params}
    values = [p.detach().clone() for p in params]
    optimizer.param_groups[0]["state_format"] = new
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["betas"] = (0.0, 0.0)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert_same(params, values)
    for param in params:
        state = optimizer.state[param]
        assert ("master" in state, "remainder" in state) == ("split" not in new, "split" in new)
        assert state["exp_avg"].dtype is (torch.bfloat16 if "bf16" in new else torch.float32)
        assert torch.equal(master_of(param, state), master_of(param, before[param]))
        assert float(state["step"]) == 4


@pytest.mark.parametrize(("old", "new"), [("fp32", "split"), ("split", "fp32")])
def test_a_parameter_edited_while_its_format_changes_stays_edited(old: str, new: str) -> None:
    params = parameters([(64,)], torch.bfloat16)
    optimizer = optim_cpu.AdamW(params, weight_decay=0, state_format=old)
    give_gradients(params, seed=0)
    optimizer.step()
    master = master_of(params[0], optimizer.state[params[0]])
    with torch.no_grad():
        params[0][:2] = torch.tensor([0.0, 3.0])
    optimizer.param_groups[0].update(lr=0.0, state_format=new)
    optimizer.step()
    assert params[0][:2].tolist() == [0.0, 3.0]
    after = master_of(params[0], optimizer.state[params[0]])
    assert torch.equal(after[2:], master[2:])
    assert torch.equal(after.bfloat16()[:2], params[0][:2])


def master_of(param: Parameter, state: dict[str, Any]) -> torch.Tensor:
    if "master" in state:
        master: torch.Tensor = state["master"]
        return master
    bits = (param.detach().view(torch.int16).int() << 16) + state["remainder"].int()
    return bits.view(torch.float32)


def test_torchs_moments_of_bfloat16_parameters_are_widened() -> None:
    theirs = parameters([(50,)], torch.bfloat16)
    their = torch.optim.AdamW(theirs)
    give_gradients(theirs, seed=0)
    their.step()
    mine = twins(theirs)
    my = optim_cpu.AdamW(mine)
    my.load_state_dict(copy.deepcopy(their.state_dict()))
    assert my.state[mine[0]]["exp_avg"].dtype is torch.bfloat16
    my.param_groups[0]["lr"] = 0.0
    mine[0].grad = torch.zeros_like(mine[0])
    my.step()
    expected = their.state[theirs[0]]["exp_avg"].float()
    assert my.state[mine[0]]["exp_avg"].dtype is torch.float32
    torch.testing.assert_close(my.state[mine[0]]["exp_avg"], expected * 0.9, rtol=1e-6, atol=0)


def test_loaded_state_is_taken_whatever_its_order_in_memory() -> None:
    straight = [Parameter(torch.arange(12.0).reshape(3, 4).t())]
    params = twins(straight)
    a, b = optim_cpu.AdamW(straight), optim_cpu.AdamW(params)
    give_gradients(straight, params, seed=0)
    a.step()
    b.step()
    saved = copy.deepcopy(a.state_dict())
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].contiguous()
    saved["state"][0]["step"] = 1  # as an old torch's
    b.load_state_dict(saved)
    a.step()
    b.step()
    assert_same(straight, params)
    assert_same([a.state[straight[0]]["exp_avg"]], [b.state[params[0]]["exp_avg"]])


def saved_adamw() -> dict[str, Any]:
    params = [("a", parameters([(4,)])[0]), ("b", parameters([(2, 3)])[0])]
    optimizer = optim_cpu.AdamW(params)
    give_gradients([p for _, p in params], seed=0)
    optimizer.step()
    return copy.deepcopy(optimizer.state_dict())


def wrong(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    saved = saved_adamw()
    change(saved)
    return saved


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["state"][1].update(exp_avg=torch.zeros(5)),
         r"state 'exp_avg' of parameter 1 of param group 0 \('b', shape \(2, 3\)\) is of shape \(5,\)"),
        (lambda s: s["state"][1].update(exp_avg=3), "state 'exp_avg' of parameter 1 .* is a int"),
        (lambda s: s["state"][0].update(master=torch.zeros(5)), r"state 'master' of parameter 0 .*'a'.* shape \(5,\)"),
        (lambda s: s["state"][0].pop("exp_avg_sq"), "parameter 0 .* has 'exp_avg' but no 'exp_avg_sq'; load a whole"),
        (lambda s: s["state"][0].pop("step"), "parameter 0 .* has 'exp_avg' but no 'step'"),
        (lambda s: s["state"][0].update(max_exp_avg_sq=torch.zeros(4)), "'max_exp_avg_sq' .*no kernel for it"),
        (lambda s: s["state"].update({0: {"momentum_buffer": torch.zeros(4)}}),
         "has 'momentum_buffer', but AdamW keeps 'exp_avg'; it was saved by another"),
        (lambda s: s["param_groups"][0].update(lr=-1), "AdamW, param group 0: .*lr must be"),
        (lambda s: s["param_groups"][0].update(amsgrad=True), "AdamW, param group 0: amsgrad=True is not supported"),
        (lambda s: s["param_groups"].append(s["param_groups"][0]), "different number of parameter groups"),
        (lambda s: s["param_groups"][0]["params"].pop(), "doesn't match the size"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_the_optimizer_goes_on(change: Any, message: str) -> None:
    straight = parameters([(4,), (2, 3)])
    params = twins(straight)
    a, b = optim_cpu.AdamW(straight), optim_cpu.AdamW(zip("ab", params, strict=True))
    give_gradients(straight, params, seed=0)
    a.step()
    b.step()
    with pytest.raises(ValueError, match=message):
        b.load_state_dict(wrong(change))
    a.step()
    b.step()
    assert_same(straight, params)


def test_hooks_of_loading_and_saving_see_plain_tensors() -> None:
    params = parameters([(4,)], torch.bfloat16)
    optimizer = optim_cpu.AdamW(params)
    give_gradients(params, seed=0)
    optimizer.step()
    types = []

    def rename(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        types.append(type(saved["state"][0]["master"]))
        saved["state"][0] = {**saved["state"][0], "exp_avg": torch.full((4,), 2.0)}
        return saved

    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.register_load_state_dict_post_hook(lambda o: types.append(type(o.state[params[0]]["exp_avg"])))
    optimizer.load_state_dict(optimizer.state_dict())
    assert types == [torch.Tensor, torch.Tensor]
    assert optimizer.state[params[0]]["exp_avg"].tolist() == [2.0] * 4
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


@pytest.mark.parametrize("change", ["step", "array", "parameter", "all", "key", "in place"])
def test_state_changed_by_hand_counts(change: str) -> None:
    """Replacing or clearing state between steps does what it says, though the batch was built before."""
    params = parameters([(6,)])
    optimizer = optim_cpu.AdamW(params, weight_decay=0)
    for i in range(3):
        give_gradients(params, seed=i)
        optimizer.step()
    state = optimizer.state[params[0]]
    before = params[0].detach().clone()
    expected_step, moment, square = 4.0, state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    if change == "step":
        state["step"] = torch.tensor(10.0)
        expected_step = 11.0
    elif change == "array":
        state["exp_avg"] = torch.zeros(6)
        moment = torch.zeros(6)
    elif change == "in place":
        state["step"].fill_(20)
        state["exp_avg"].zero_()
        expected_step, moment = 21.0, torch.zeros(6)
    else:
        if change == "parameter":
            optimizer.state[params[0]] = {}
        elif change == "all":
            optimizer.state.clear()
        else:
            state.clear()
        expected_step, moment, square = 1.0, torch.zeros(6), torch.zeros(6)
    optimizer.step()
    assert params[0].grad is not None
    expected = moment + (params[0].grad - moment) * 0.1
    state = optimizer.state[params[0]]
    torch.testing.assert_close(state["exp_avg"], expected, rtol=1e-6, atol=1e-7)
    assert float(state["step"]) == expected_step
    fresh = [Parameter(before)]
    other = optim_cpu.AdamW(fresh, weight_decay=0)
    fresh[0].grad = params[0].grad
    other.state[fresh[0]] = {"step": torch.tensor(expected_step - 1), "exp_avg": moment, "exp_avg_sq": square}
    other.step()
    assert_same(params, fresh)
