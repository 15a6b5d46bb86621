"""A call that a signal or a user's own code ends, at any moment, is done again, with the same bits."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.crossed import crossed
from tests.signals import interrupted
from tests.zero3.plain import (
    TIGHT,
    Tower,
    assert_nothing_held,
    differing,
    inputs,
    tower,
    update,
)
from zero3.passes import moved_activations

Start = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("starve_soon")


def time_out(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("the user's own")


MOMENTS = {"forward": 600, "backward": 950, "step": 2000}  # about as many as there are


@pytest.fixture
def alarms() -> Iterator[None]:
    """The handler of SIGALRM raises, as that of a watchdog."""
    before = signal.signal(signal.SIGALRM, time_out)
    yield
    signal.signal(signal.SIGALRM, before)


ACTIVATIONS: dict[str, Any] = {"activations": "nvme", "activation_budget": "32KiB", "host_budget": "512KiB"}


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("during", "number", "options"),
    [
        *((during, number, {}) for during in MOMENTS for number in (signal.SIGINT, signal.SIGALRM)),
        *((during, signal.SIGINT, ACTIVATIONS) for during in ("forward", "backward")),
    ],
)
def test_an_interrupt_at_any_moment(
    start: Start,
    during: str,
    number: int,
    options: dict[str, Any],
    alarms: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it ended is done again; a step that has begun is not ended by it. The bits are those of a calm run."""
    monkeypatch.setattr(moved_activations, "SMALLEST", 512)
    count = MOMENTS[during] * (2 if options else 1)
    moments = random.Random(during).sample(range(1, count), 40)
    met: list[str] = []

    def train(engine: Any, during: str) -> list[float]:
        losses = []
        for x, moment in zip(inputs(len(moments)), moments, strict=True):
            if during == "forward":
                interrupted(partial(engine, x), moment, met, number)
            loss = engine(x)
            losses.append(loss.item())
            failed = during == "backward" and interrupted(partial(engine.backward, loss), moment, met, number)
            if during != "backward" or failed:
                engine.backward(engine(x) if failed else loss)
            steps = engine.global_steps
            if during == "step":
                interrupted(engine.step, moment, met, number)
            if engine.global_steps == steps:
                engine.step()
            assert engine.global_steps == steps + 1, met[-1]
            assert_nothing_held(engine)
        return losses

    calm, disturbed = start(tower(), **TIGHT), start(tower(), **TIGHT | options)
    expected = train(calm, "")
    assert train(disturbed, during) == expected, met
    assert differing(disturbed.master_state_dict(), calm.master_state_dict()) == [], met
    assert len(met) > len(moments) // 2, "most moments were never reached"
    if options:
        gc.collect()
        moved = disturbed._schedule._moved
        assert moved.written_bytes > 0 and moved.used == {"host": 0, "nvme": 0}


def fail(kind: str) -> None:
    if kind == "exception":
        raise ValueError("the user's own")
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # Python answers the signal at one of these
        pass


class Failing(torch.autograd.Function):
    armed = ""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Failing.armed:
            fail(Failing.armed)
        return grad


class Fragile(Tower):
    """Runs a function of the user's in its middle, and one block under checkpointing."""

    armed = ""

    def __init__(self) -> None:
        super().__init__()
        weight: Any = self.get_submodule("blocks.1.1").weight
        weight.register_post_accumulate_grad_hook(lambda _: fail(self.armed) if self.armed else None)

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        x = self.into(x)
        first, two, three = self.blocks
        x = x + checkpoint(two, x + first(x), use_reentrant=False)
        x = x + three(Failing.apply(x))
        result: Tensor = self.out(x).float().pow(2).mean()
        return result


def plant(engine: Any, where: str, kind: str) -> Callable[[], None]:
    """Let ``kind`` happen once the model's pass comes to ``where``; returns what removes it."""
    layer = engine.module.get_submodule("blocks.1")
    if where == "custom function":
        Failing.armed = kind
        return lambda: setattr(Failing, "armed", "")
    if where == "hook after accumulation, before ours":
        engine.module.armed = kind
        return lambda: setattr(engine.module, "armed", "")
    if where == "recomputation":
        runs: list[int] = []
        handle = layer[2].register_forward_hook(lambda *_: fail(kind) if runs else runs.append(1))
    elif where == "forward pre-hook":
        handle = layer[1].register_forward_pre_hook(lambda *_: fail(kind))
    elif where == "forward hook of a group":
        handle = layer.register_forward_hook(lambda *_: fail(kind))
    elif where == "forward hook of the model":
        handle = engine.module.register_forward_hook(lambda *_: fail(kind))
    elif where == "backward hook":
        handle = engine.module.get_submodule("blocks.0").register_full_backward_hook(lambda *_: fail(kind))
    elif where == "parameter's hook":
        handle = layer[1].weight.register_hook(lambda _: fail(kind))
    else:
        handle = layer[1].weight.register_post_accumulate_grad_hook(lambda _: fail(kind))
    return handle.remove


WHERE = [
    "forward pre-hook",
    "forward hook of a group",
    "forward hook of the model",
    "recomputation",
    "custom function",
    "backward hook",
    "parameter's hook",
    "hook after accumulation",
    "hook after accumulation, before ours",
]


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("where", "kind"), crossed(WHERE, ["exception", "ctrl-c"]))
def test_what_the_users_own_code_raises(start: Start, where: str, kind: str) -> None:
    """In each micro-batch once: it is done again, from the first of its step on, and changes nothing."""
    options = {**TIGHT, "accumulation": 2}
    torch.manual_seed(5)
    disturbed = start(Fragile(), **options)
    torch.manual_seed(5)
    calm = start(Fragile(), **options)
    raised = (
        pytest.raises(ValueError, match="own") if kind == "exception" else pytest.raises(KeyboardInterrupt)
    )
    inputs_in_16_bits = [x.bfloat16().requires_grad_() for x in inputs(6)]
    for pair in zip(inputs_in_16_bits[::2], inputs_in_16_bits[1::2], strict=True):
        for failing in (0, 1):
            for x in pair[:failing]:
                update(disturbed, x)
            remove = plant(disturbed, where, kind)
            with raised:
                disturbed.backward(disturbed(pair[failing]))
            remove()
            assert_nothing_held(disturbed)
            if "forward" in where and failing:
                break  # the gradients of the first are kept
        for x in pair[1:] if "forward" in where else pair:
            update(disturbed, x)
        for x in pair:
            update(calm, x)
    assert disturbed.global_steps == calm.global_steps == 3
    assert disturbed.get_global_grad_norm() == calm.get_global_grad_norm()
    assert differing(disturbed.master_state_dict(), calm.master_state_dict()) == []


def test_a_failing_scheduler_is_told_after_the_step(start: Start) -> None:
    engine, calm = start(tower(), **TIGHT), start(tower(), **TIGHT)

    class Schedule(torch.optim.lr_scheduler.LambdaLR):
        fails = False

        def step(self, epoch: int | None = None) -> None:
            if self.fails:
                fail("exception")
            super().step(epoch)

    engine.lr_scheduler = Schedule(engine.optimizer, lambda step: 1.0)
    engine.lr_scheduler.fails = True
    first, second = inputs(2)
    with pytest.raises(ValueError, match="own"):
        update(engine, first)
    engine.lr_scheduler.fails = False
    update(engine, second)
    update(calm, first)
    update(calm, second)
    assert differing(engine.master_state_dict(), calm.master_state_dict()) == []
