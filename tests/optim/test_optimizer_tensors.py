"""What tensors the optimizer classes take: 16-bit parameters and masters, orders in memory, and refusals by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import optim_cpu
from optim_cpu.formats import join, round_parameters
from optim_cpu.fused_optimizer import STATE_FORMATS
from tests.crossed import crossed

from .stepping import assert_same, give_gradients, ours, parameters, twins

OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1}, "Adam": {"lr": 1e-3}, "Lion": {"lr": 1e-4},
    "Adagrad": {"lr": 1e-2}, "SGD": {"lr": 1e-2, "momentum": 0.9},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_parameter_is_its_float32_master_rounded(name: str, dtype: torch.dtype) -> None:
    """Tiny steps add up: the master takes the same course as a float32 parameter that gets the same gradients."""
    halves = parameters(dtype=dtype)
    wholes = [Parameter(p.detach().float()) for p in halves]
    a, b = ours(name, halves, **OPTIONS[name]), ours(name, wholes, **OPTIONS[name])
    for i in range(20):
        give_gradients(halves, seed=i)
        for half, whole in zip(halves, wholes, strict=True):
            assert half.grad is not None
            whole.grad = half.grad.float()
        a.step()
        b.step()
    for half, whole in zip(halves, wholes, strict=True):
        assert torch.equal(a.state[half]["master"], whole)
        expected = torch.empty_like(half)
        round_parameters(whole.detach(), expected)
        assert torch.equal(half, expected)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("moments", ["", "+bf16"])
def test_a_split_master_is_a_whole_one_to_the_bit(name: str, moments: str) -> None:
    runs = []
    for state_format in ("split" + moments, moments[1:] or "fp32"):
        params = parameters(dtype=torch.bfloat16)
        optimizer = ours(name, params, state_format=state_format, **OPTIONS[name])
        for i in range(20):
            give_gradients(params, seed=i)
            optimizer.step()
        runs.append((params, [optimizer.state[p] for p in params]))
    assert_same(runs[0][0], runs[1][0])
    for param, split, whole in zip(runs[0][0], runs[0][1], runs[1][1], strict=True):
        assert split["remainder"].dtype is torch.int16
        assert torch.equal(join(param, split["remainder"]), whole["master"])
        for key in set(split) - {"remainder"}:
            assert torch.equal(split[key], whole[key])


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_may_have_another_dtype(dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    params, like = parameters([(30,)], dtype), parameters([(30,)], dtype)
    grad = torch.randn(30, generator=torch.Generator().manual_seed(1)).to(grad_dtype)
    a, b = optim_cpu.AdamW(params), optim_cpu.AdamW(like)
    for param, g in ((params[0], grad), (like[0], grad.float())):
        param.grad = torch.zeros_like(param)
        param.grad.data = g  # past the check of assignment, as gradient hooks and accumulators do
    a.step()
    b.step()
    assert_same(params, like)


def edit(param: Parameter, value: float, how: str) -> None:
    with torch.no_grad():
        if how == "in place":
            param[:2] = value
        elif how == "load_state_dict":
            module = torch.nn.Module()
            module.register_parameter("p", param)
            module.load_state_dict({"p": torch.cat([torch.full((2,), value), param[2:].float()])})
        elif how == "another tensor":
            param.data = torch.cat([torch.full((2,), value).to(param.dtype), param[2:]])
        else:
            param.data[:2] = value


@pytest.mark.parametrize(
    ("how", "state_format", "dtype", "value"),
    crossed(
        ["in place", "load_state_dict", "another tensor", "through data"],
        STATE_FORMATS,
        [torch.float32, torch.bfloat16, torch.float16],
        [0.0, -0.0, 3.0, float("inf"), float("-inf")],
    ),
)
def test_a_parameter_edited_between_steps_stays_edited(
    how: str, state_format: str, dtype: torch.dtype, value: float
) -> None:
    if dtype is torch.float16 and state_format.startswith("split"):
        return
    params = parameters([(400,)], dtype)
    (param,) = params
    optimizer = optim_cpu.AdamW(params, lr=1e-3, weight_decay=0, state_format=state_format)
    for i in range(5):
        give_gradients(params, seed=i)
        optimizer.step()
    edit(param, value, how)
    if how == "through data":
        optimizer.follow_parameters()
    untouched = twins(params)
    state = {k: v.clone() for k, v in optimizer.state[param].items()}
    optimizer.param_groups[0].update(lr=0.0)
    optimizer.step()
    assert_same(params, untouched)
    assert param[:2].tolist() == [value, value]
    after = optimizer.state[param]
    if "master" in state:
        assert after["master"][:2].tolist() == [value, value]
        assert torch.equal(after["master"][2:], state["master"][2:])
        assert not torch.equal(after["master"][2:], param[2:].float())
    if "remainder" in state:
        assert torch.equal(after["remainder"][2:], state["remainder"][2:])
        rounded = torch.empty_like(param)
        round_parameters(join(param, after["remainder"]), rounded)
        assert torch.equal(rounded, param)  # none of them is NaN


def test_a_write_through_data_is_undone_by_a_whole_master_unless_told() -> None:
    """Why follow_parameters exists; its docstring and the class's say so."""
    params = parameters([(4,)], torch.bfloat16)
    optimizer = optim_cpu.SGD(params, lr=0.0)
    give_gradients(params, seed=0)
    optimizer.step()
    before = params[0].detach().clone()
    params[0].data.fill_(2.0)
    optimizer.step()
    assert torch.equal(params[0], before)
    params[0].data.fill_(2.0)
    optimizer.follow_parameters()
    optimizer.step()
    assert params[0].tolist() == [2.0] * 4


def test_a_master_from_elsewhere_keeps_its_ties() -> None:
    """A master half-way between two bfloat16 agrees with either: torch rounds it to even, these optimizers away."""
    tie = 1.0 + 2.0**-8
    params = [Parameter(torch.tensor([tie, tie]).bfloat16())]
    assert params[0].tolist() == [1.0, 1.0]
    optimizer = optim_cpu.SGD(params, lr=0.0)
    optimizer.state[params[0]]["master"] = torch.tensor([tie, tie])
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    assert optimizer.state[params[0]]["master"].tolist() == [tie, tie]
    assert params[0].tolist() == [1.0 + 2.0**-7] * 2


def test_a_model_may_change_its_dtype_between_steps() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = optim_cpu.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16):
        model.to(dtype)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        expected = twins(list(model.parameters()))
        optimizer.step()
        assert_same(list(model.parameters()), expected)
        for param in model.parameters():
            assert ("master" in optimizer.state[param]) == (dtype is not torch.float32)
    assert {float(s["step"]) for s in optimizer.state.values()} == {5}


def test_a_parameter_may_become_its_master() -> None:
    """As the class says: what the 16-bit parameter cannot hold is not lost when training goes on in float32."""
    (half,) = parameters([(300,)], torch.bfloat16)
    wide = Parameter(half.detach().float())
    mine, plain = optim_cpu.AdamW([half], lr=1e-4), optim_cpu.AdamW([wide], lr=1e-4)
    for i in range(6):
        if i == 3:
            half.data, half.grad = mine.state[half]["master"], None
        give_gradients([half], [wide], seed=i)
        if i < 3:
            assert half.grad is not None
            wide.grad = half.grad.float()
        mine.step()
        plain.step()
    assert half.dtype is torch.float32
    assert_same([half], [wide])


def orders(shape: tuple[int, ...]) -> dict[str, Tensor]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    wide = torch.zeros(*shape[:-1], 2 * shape[-1])
    wide[..., ::2] = x
    tensors = {
        "contiguous": x,
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "gaps": wide[..., ::2],
    }
    if len(shape) == 4:
        tensors["channels_last"] = x.contiguous(memory_format=torch.channels_last)
    return tensors


@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (5, 1), (1, 7), (6, 5), (1, 1, 3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_order_of_gradients_gives_the_same_step(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    results = []
    for p_order in ("contiguous", "transposed", "channels_last"):
        for g_order in ("contiguous", "transposed", "channels_last", "gaps"):
            if not {p_order, g_order} <= set(orders(shape)):
                continue
            param = Parameter(orders(shape)[p_order].to(dtype))
            optimizer = optim_cpu.AdamW([param], lr=0.1)
            for scale in (1.0, 2.0, 3.0):
                grad = orders(shape)[g_order].to(dtype)
                if g_order == "gaps":
                    grad = torch.stack([grad, grad], -1)[..., 0]
                param.grad = (
                    grad * scale if g_order != "gaps" else (torch.stack([grad * scale] * 2, -1)[..., 0])
                )
                optimizer.step()
            results.append([param, optimizer.state[param]["exp_avg_sq"]])
            assert optimizer.state[param]["exp_avg"].stride() == param.stride()
    for other in results[1:]:
        assert_same(results[0], other)
    assert len(results) >= 6


def test_a_gradient_may_change_its_order_and_dtype_from_step_to_step() -> None:
    a, b = parameters([(6, 5)]), parameters([(6, 5)])
    mine, plain = optim_cpu.AdamW(a, lr=0.1), optim_cpu.AdamW(b, lr=0.1)
    for i, order in enumerate(["contiguous", "transposed", "gaps", "expanded", "contiguous", "gaps"]):
        grad = torch.full((), float(i)).expand(6, 5) if order == "expanded" else orders((6, 5))[order]
        a[0].grad, b[0].grad = grad, grad.contiguous()
        mine.step()
        plain.step()
        assert_same(a, b)


def test_a_gradient_of_a_transposed_parameter_may_change_its_order() -> None:
    a = [Parameter(orders((6, 5))["transposed"])]
    b = [Parameter(orders((6, 5))["contiguous"])]
    mine, plain = optim_cpu.AdamW(a, lr=0.1), optim_cpu.AdamW(b, lr=0.1)
    for order in ("transposed", "gaps", "transposed", "contiguous"):
        a[0].grad, b[0].grad = orders((6, 5))[order], orders((6, 5))["contiguous"]
        mine.step()
        plain.step()
        assert_same(a, b)


def test_a_parameter_of_another_dtype_at_the_same_address_is_seen() -> None:
    param = Parameter(torch.ones(4))
    optimizer = optim_cpu.SGD([param], lr=0.5)
    param.grad = torch.ones(4)
    optimizer.step()
    memory = param.data
    memory.fill_(7.0)
    address = param.data_ptr()
    param.data = memory.view(torch.bfloat16)[:4]
    with torch.no_grad():
        param.fill_(1.0)
    assert param.data_ptr() == address
    optimizer.step()
    assert param.tolist() == [0.5] * 4
    assert memory[2:].tolist() == [7.0] * 2


def sparse(param: Parameter) -> Tensor:
    return torch.ones_like(param).to_sparse()


def replaced(grad: Tensor) -> Callable[[Parameter], Tensor]:
    def make(param: Parameter) -> Tensor:
        param.grad = torch.zeros_like(param)
        param.grad.data = grad
        return param.grad

    return make


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize(
    ("param", "grad", "error", "message"),
    [
        (torch.ones(4, dtype=torch.float64), torch.ones_like, TypeError, "is torch.float64; it must be float32, bf"),
        (torch.ones(4, dtype=torch.complex64), torch.ones_like, TypeError, "is torch.complex64; it must be"),
        (torch.ones(4, device="meta"), torch.ones_like, ValueError, "is on meta; .* move the model there, or use"),
        (torch.ones(8)[::2], torch.ones_like, ValueError, r"has strides \(2,\), which do not cover one block"),
        (torch.ones(1).expand(4), torch.ones_like, ValueError, r"has strides \(0,\), which do not cover one block"),
        (torch.ones(4), sparse, TypeError, "the gradient of .* is sparse .*dense gradients .*SparseAdam"),
        (torch.ones(4), replaced(torch.ones(4).double()), TypeError, "the gradient of .* is torch.float64; it must"),
        (torch.ones(4), replaced(torch.ones(5)), ValueError, r"the gradient of .* shape \(5,\); it must be"),
    ],
)  # fmt: skip
def test_what_cannot_be_stepped_is_named_and_nothing_is_touched(
    param: Tensor, grad: Any, error: type[Exception], message: str, built: bool
) -> None:
    good = parameters([(3,)])[0]
    bad = Parameter(param)
    optimizer = optim_cpu.AdamW([{"params": [("norm", good)]}, {"params": [("layer.0.weight", bad)]}])
    good.grad = torch.ones(3)
    if built:
        if bad.dtype is not torch.float32 or bad.device.type != "cpu" or not bad.is_contiguous():
            return
        bad.grad = torch.ones(4)
        optimizer.step()
    before, state = good.detach().clone(), copy.deepcopy(dict(optimizer.state[good]))
    gradient = grad(bad)
    if bad.grad is not gradient:
        bad.grad = gradient
    with pytest.raises(error, match=message) as raised:
        optimizer.step()
    assert "parameter 0 of param group 1 ('layer.0.weight', shape (4,))" in str(raised.value)
    assert torch.equal(good, before)
    assert str(optimizer.state[good]) == str(state)
    bad.grad = None
    optimizer.step()
    assert float(optimizer.state[good]["step"]) == 1 + built


def test_float16_cannot_be_split() -> None:
    params = parameters([(3,)], torch.float16)
    optimizer = optim_cpu.AdamW(params, state_format="split+bf16")
    give_gradients(params, seed=0)
    with pytest.raises(
        TypeError, match=r"parameter 0 of param group 0 \(shape \(3,\)\) is float16.* 'fp32' or 'bf16'"
    ):
        optimizer.step()
    optimizer.param_groups[0]["state_format"] = "bf16"
    optimizer.step()
    assert float(optimizer.state[params[0]]["step"]) == 1


def test_inference_tensors_and_tensors_without_memory_are_refused() -> None:
    with torch.inference_mode():
        frozen = torch.ones(3)
    frozen.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"made under torch.inference_mode"):
        optim_cpu.SGD([frozen]).step()
    (freed,) = parameters([(3,)])
    freed.grad = torch.ones(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="is a Parameter without plain memory of its own"):
        optim_cpu.SGD([freed]).step()


def test_shared_memory_is_refused_by_both_names() -> None:
    a = Parameter(torch.ones(6))
    b = Parameter(a.detach()[2:])
    a.grad, b.grad = torch.ones(6), torch.ones(4)
    with pytest.raises(
        ValueError, match=r"parameter 0 .*'a'.* and parameter 1 .*'b'.* share memory; .*one Parameter"
    ):
        optim_cpu.SGD([("a", a), ("b", b)]).step()
    assert a.tolist() == [1.0] * 6
    with pytest.warns(UserWarning, match="duplicate parameters"):
        twice = optim_cpu.SGD([a, a])
    with pytest.raises(ValueError, match=r"parameter 1 of param group 0 .* is listed twice"):
        twice.step()


def test_parameters_that_move_in_memory_are_followed() -> None:
    straight = parameters([(9,), (4,)])
    params = twins(straight)
    a, b = optim_cpu.AdamW(straight), optim_cpu.AdamW(params)
    for i in range(6):
        give_gradients(straight, params, seed=i)
        if i == 2:
            params[0].data = params[0].data.clone()
        if i == 4:
            b.state[params[0]]["exp_avg"].data = b.state[params[0]]["exp_avg"].clone()
        a.step()
        b.step()
        assert_same(straight, params)


def test_a_parameter_that_changes_its_order_in_place_is_seen() -> None:
    """At the same address, with gradients that do not change: only the parameter's strides tell."""
    mine, plain = parameters([(4, 4, 4)]), parameters([(4, 4, 4)])
    optimizers = [optim_cpu.SGD(mine, lr=0.1, momentum=0.9), torch.optim.SGD(plain, lr=0.1, momentum=0.9)]
    for dims in ((0, 1), (1, 2), (0, 2), (0, 1), (0, 1)):
        give_gradients(mine, plain, seed=0)
        for (param,), optimizer in zip((mine, plain), optimizers, strict=True):
            optimizer.step()
            param.data = param.data.transpose(*dims)
        torch.testing.assert_close(mine[0], plain[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_parameter_dropped_and_loaded_again_is_seen(dtype: torch.dtype) -> None:
    """The allocator likes to give the same address again: it must not look like the parameter that was there."""
    for n in range(3200, 64000, 3200):  # some of these came back at their address, were it free
        (param,) = parameters([(n,)], dtype)
        optimizer = optim_cpu.SGD([param], lr=0.0)
        give_gradients([param], seed=0)
        optimizer.step()
        edited = param.detach().float() + 4.0
        param.data = torch.empty(0, dtype=dtype)
        param.data = edited.to(dtype)
        optimizer.step()
        assert torch.equal(param, edited.to(dtype))


def test_step_counts_stay_on_the_cpu_whatever_the_default_device() -> None:
    params = parameters([(3,)])
    optimizer = optim_cpu.AdamW(params)
    for i in range(2):
        give_gradients(params, seed=i)
        with torch.device("meta"):
            optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"].item() == 2


def test_the_grad_scaler_unscales_and_skips() -> None:
    params = parameters([(5,)])
    expected = twins(params)
    give_gradients(params, expected, seed=0)
    optim_cpu.AdamW(expected).step()
    optimizer = optim_cpu.AdamW(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    assert params[0].grad is not None
    params[0].grad.mul_(1024)
    scaler.step(optimizer)
    scaler.update()
    assert_same(params, expected)
    scaler.scale(torch.zeros(()))
    params[0].grad.fill_(float("inf"))
    scaler.step(optimizer)
    assert_same(params, expected)
