"""Gradients that a script assigns to ``.grad``: the step uses them, as a torch optimizer does, wherever state lives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero3.plain import (
    ADAM,
    CLIP,
    ROUNDING,
    STREAMED,
    WIDTH,
    Loop,
    Tower,
    differing,
    inputs,
    run_engine,
    update,
)
from tiering.errors import ConfigError, EngineStateError

Start = Callable[..., Any]
Recipe = Callable[[Any, Tensor], None]  # of one step
WEIGHT = "blocks.1.1.weight"


class TorchLoop:
    """What the engine replaces, in fp32."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        betas = (ADAM["betas"][0], ADAM["betas"][1])
        options = {name: ADAM[name] for name in ("lr", "eps", "weight_decay")}
        self.optimizer = torch.optim.AdamW(module.parameters(), betas=betas, **options)

    def __call__(self, x: Tensor) -> Any:
        return self.module(x)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()


def ask_autograd(loop: Loop, x: Tensor) -> None:
    params = list(loop.module.parameters())
    for p, gradient in zip(params, torch.autograd.grad(loop(x), params), strict=True):
        p.grad = 0.5 * gradient


def replace_some(loop: Loop, x: Tensor) -> None:
    loop.backward(loop(x))
    for p in list(loop.module.parameters())[::3]:
        p.grad = torch.full(p.shape, 0.01)


def replace_with_zeros(loop: Loop, x: Tensor) -> None:
    loop.backward(loop(x))
    for p in loop.module.parameters():
        p.grad = torch.zeros(p.shape)


def drop_some(loop: Loop, x: Tensor) -> None:
    loop.backward(loop(x))
    params = dict(loop.module.named_parameters())
    params[WEIGHT].grad = None
    del params["out.bias"].grad


def drop_before_a_second_backward(loop: Loop, x: Tensor) -> None:
    loop.backward(loop(x))
    loop.module.get_parameter(WEIGHT).grad = None
    loop.backward(loop(-x))


def zero_by_the_module(loop: Loop, x: Tensor) -> None:
    loop.backward(loop(-x))
    loop.module.zero_grad()
    loop.backward(loop(x))


def zero_by_another_optimizer(loop: Loop, x: Tensor) -> None:
    loop.backward(loop(-x))
    torch.optim.SGD([loop.module.get_parameter(WEIGHT)]).zero_grad()
    loop.backward(loop(x))


def assign_before_backward(loop: Loop, x: Tensor) -> None:
    for p in list(loop.module.parameters())[::2]:
        p.grad = torch.full(p.shape, 0.02)
    loop.backward(loop(x))


def assign_twice(loop: Loop, x: Tensor) -> None:
    weight = loop.module.get_parameter(WEIGHT)
    loop.backward(loop(x))
    weight.grad = torch.full(weight.shape, 100.0)
    weight.grad = torch.full(weight.shape, -0.03)


RECIPES: list[Recipe] = [
    ask_autograd,
    replace_some,
    replace_with_zeros,
    drop_some,
    drop_before_a_second_backward,
    zero_by_the_module,
    zero_by_another_optimizer,
    assign_before_backward,
    assign_twice,
]


@pytest.mark.one_of(4)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_uses_what_was_assigned(start: Start, recipe: Recipe) -> None:
    """In every second step: those between show that nothing of it is left."""

    def script(loop: Loop) -> list[float]:
        losses = []
        for number, x in enumerate(inputs(4)):
            if number % 2:
                recipe(loop, x)
                loop.step()
            else:
                losses.append(update(loop, x))
        return losses

    torch.manual_seed(11)
    plain = TorchLoop(Tower())
    losses: Any = script(plain)  # type: ignore[arg-type] # as much of a Loop as the recipes use
    reference = run_engine(start, Tower, script)
    relative, absolute = ROUNDING["fp32"]
    assert reference.losses == pytest.approx(losses, rel=relative)
    for name, param in plain.module.named_parameters():
        assert float((reference.masters[name] - param.detach()).abs().max()) <= absolute, name
    for placement in (STREAMED, {**STREAMED, "smallest": True}):
        run = run_engine(start, Tower, script, **placement)
        assert run.losses == reference.losses
        assert differing(run.masters, reference.masters) == []


def test_an_optimizer_that_steps_by_itself_uses_what_was_assigned(start: Start) -> None:
    torch.manual_seed(5)
    model, plain = Tower(), Tower()
    plain.load_state_dict(model.state_dict())
    ours, theirs = (torch.optim.RMSprop(each.parameters(), lr=1e-3) for each in (model, plain))
    engine = start(model, client=ours, rule=None, precision="fp32", accumulation=1, clip=0.0)
    for x in inputs(3):
        ask_autograd(engine, x)
        engine.step()
        loop = TorchLoop(plain)
        ask_autograd(loop, x)
        theirs.step()
    for name, param in plain.named_parameters():
        assert torch.allclose(engine.get_fp32_parameter(name), param.detach(), atol=1e-6), name


@pytest.mark.parametrize("recipe", [ask_autograd, assign_before_backward])
def test_with_steps_in_backward_what_is_assigned_before_counts(start: Start, recipe: Recipe) -> None:
    """Behind the backward the gradients are used, and cannot be replaced."""

    def script(loop: Loop) -> list[float]:
        losses = []
        for x in inputs(4):
            recipe(loop, x)
            loop.step()
            losses.append(update(loop, x))
        return losses

    reference = run_engine(start, Tower, script, clip=0.0)
    for placement in ({}, STREAMED, {**STREAMED, "smallest": True}):
        run = run_engine(start, Tower, script, clip=0.0, step_in_backward=True, **placement)
        assert run.losses == reference.losses
        assert differing(run.masters, reference.masters) == []
    engine = start(Tower(), precision="fp32", accumulation=1, clip=0.0, step_in_backward=True, **STREAMED)
    engine.backward(engine(next(inputs(1))))
    for values in (None, torch.zeros(2 * WIDTH, WIDTH)):
        with pytest.raises(EngineStateError, match=rf"{WEIGHT}.*in_backward"):
            engine.module.get_parameter(WEIGHT).grad = values


PLACED = pytest.mark.parametrize("placement", [{}, STREAMED], ids=["device", "nvme"])


@PLACED
def test_what_is_assigned_is_not_scaled(start: Start, placement: dict[str, Any]) -> None:
    """By no loss scale, and by no number of micro-batches; the next micro-batch adds its share."""
    scaled = {"loss_scale": 256}
    engine = start(Tower(), precision="fp16", fp16=scaled, accumulation=2, threshold=0, **placement)
    weight = engine.module.get_parameter(WEIGHT)
    first, second = inputs(2)
    update(engine, first)
    weight.grad = torch.full(weight.shape, 0.25, dtype=torch.float16)
    assert torch.equal(engine.get_fp32_gradient(WEIGHT), torch.full(weight.shape, 0.25))
    engine.backward(engine(second))
    both = engine.get_fp32_gradient(WEIGHT)
    weight.grad = None
    assert engine.get_fp32_gradient(WEIGHT) is None
    engine.backward(engine(second))
    assert torch.allclose(both, 0.25 + engine.get_fp32_gradient(WEIGHT), atol=1e-6)


@PLACED
def test_what_was_computed_from_none_does_not_take_a_gradients_place(
    start: Start, placement: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(Tower(), precision="fp32", accumulation=1, threshold=0, **placement)
    weight = engine.module.get_parameter(WEIGHT)
    engine.backward(engine(next(inputs(1))))
    there = engine.get_fp32_gradient(WEIGHT)
    with caplog.at_level(logging.WARNING):
        assert weight.grad is None
    assert "tiering.utils.safe_get_full_grad(param)" in caplog.text
    with pytest.raises(EngineStateError, match=rf"{WEIGHT}.*read as None.*safe_get_full_grad"):
        weight.grad = torch.zeros(weight.shape) if weight.grad is None else weight.grad + 1
    assert torch.equal(engine.get_fp32_gradient(WEIGHT), there)
    engine.set_fp32_gradient(WEIGHT, there + 1)
    engine.step()
    weight.grad = torch.ones(weight.shape)
    assert torch.equal(engine.get_fp32_gradient(WEIGHT), torch.ones(weight.shape))


@PLACED
def test_assignments_that_are_refused(start: Start, placement: dict[str, Any]) -> None:
    model = Tower()
    model.into.requires_grad_(False)
    engine = start(model, precision="fp32", accumulation=1, threshold=0, **placement)
    weight = model.get_parameter(WEIGHT)
    with pytest.raises(ConfigError, match=r"'into\.weight' is frozen"):
        model.into.weight.grad = torch.zeros(WIDTH, WIDTH)
    model.into.weight.grad = None
    with pytest.raises(ConfigError, match=rf"'{WEIGHT}' has shape"):
        weight.grad = torch.zeros(3)
    with pytest.raises(ConfigError, match=rf"'{WEIGHT}' takes dense values"):
        weight.grad = torch.zeros(weight.shape).to_sparse()
    with pytest.raises(TypeError):
        weight.grad = 1.0  # type: ignore[assignment]
    handle = weight.register_hook(lambda gradient: setattr(model.out.bias, "grad", torch.zeros(WIDTH)))
    model.out.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", torch.ones(WIDTH)))
    with pytest.raises(EngineStateError, match=r"'out\.bias'\.grad was assigned in backward.*register_hook"):
        engine.backward(engine(next(inputs(1))))
    handle.remove()


@PLACED
def test_optimizers_and_scalers_of_the_script_are_told_what_to_call(
    start: Start, placement: dict[str, Any]
) -> None:
    engine = start(Tower(), precision="fp32", accumulation=1, threshold=0, **placement)
    foreign = torch.optim.Adam(engine.module.parameters())
    foreign.step()  # of no gradient, as in torch
    before = engine.master_state_dict()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(engine(next(inputs(1)))).backward()
    with pytest.raises(
        EngineStateError, match=r"Adam\.step\(\).*initialize\(optimizer=\.\.\.\).*engine\.step"
    ):
        foreign.step()
    for unscale in (False, True):
        if unscale:
            scaler.unscale_(engine.optimizer)
        with pytest.raises(EngineStateError, match=r"GradScaler.*leave the GradScaler out.*engine\.backward"):
            scaler.step(engine.optimizer)
    assert differing(engine.master_state_dict(), before) == []


@PLACED
def test_a_hook_that_ends_a_backward_leaves_no_gradient(start: Start, placement: dict[str, Any]) -> None:
    """One that was registered before the engine's is called while the gradient is on the parameter."""

    def norm(*, fails: bool) -> Any:
        torch.manual_seed(5)
        model, failing = Tower(), [fails]

        def fail(p: Tensor) -> None:
            assert p.grad is not None
            if failing:
                failing.clear()
                raise RuntimeError("a hook of the script's")

        def clamp(p: Tensor) -> None:
            assert p.grad is not None
            p.grad = p.grad.clamp(-1e-3, 1e-3)

        model.get_parameter(WEIGHT).register_post_accumulate_grad_hook(clamp)
        model.get_parameter(WEIGHT).register_post_accumulate_grad_hook(fail if fails else lambda p: None)
        engine = start(model, precision="fp32", accumulation=1, threshold=0, **placement)
        if fails:
            with pytest.raises(RuntimeError, match="script's"):
                engine.backward(engine(next(inputs(1))))
        engine.backward(engine(next(inputs(1))))
        assert engine.get_fp32_gradient(WEIGHT).abs().max() == torch.tensor(1e-3)
        return engine.get_global_grad_norm()

    assert norm(fails=True) == norm(fails=False)


def test_gradients_from_before_initialize_are_of_no_step(start: Start) -> None:
    def norm(*, earlier: bool) -> Any:
        torch.manual_seed(5)
        model = Tower()
        if earlier:
            model(next(inputs(1))).backward()
        engine = start(model, precision="fp32", accumulation=1)
        engine.backward(engine(next(inputs(1))))
        return engine.get_global_grad_norm()

    assert norm(earlier=True) == norm(earlier=False)
