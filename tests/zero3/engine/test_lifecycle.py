"""From initialize to close: several engines in one process, interrupts at any moment, and what is left afterwards."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiering
from tests.crossed import crossed
from tests.zero3.plain import (
    STREAMED,
    WIDTH,
    Tower,
    assert_nothing_held,
    differing,
    inputs,
    starved_soon,
    update,
)
from tiering.errors import EngineStateError, TieringError
from zero3.passes import moved_activations

Start = Callable[..., Any]
TIGHT: dict[str, Any] = {
    **STREAMED,
    "host_budget": "256KiB",
    "device_budget": "128KiB",
    "accumulation": 1,
    "threshold": 0,
}


@pytest.fixture(autouse=True)
def starve_soon() -> Iterator[None]:
    with starved_soon():
        yield


def tower(layers: int = 3) -> Tower:
    torch.manual_seed(5)
    return Tower(layers)


ROOT = Path(tiering.__file__).parent.parent
OURS = (str(ROOT / "zero3"), str(ROOT / "tiering"))


def time_out(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("the user's own")


def interrupted(
    call: Callable[[], Any], moment: int, met: list[str], number: int = signal.SIGINT, times: int = 1
) -> bool:
    """Call ``call`` with signal ``number`` at the ``moment``-th point in our own code where Python looks for signals.

    That is where a function of ours is entered, and where one returns that is not in Python. ``met`` gets the point's
    name, if there are as many. Returns whether the interrupt ended the call.
    """
    passed = 0

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal passed
        code = frame.f_code
        # In a finalizer, as one of a generator, Python prints the exception and goes on: nobody can answer it there.
        if (
            event not in ("call", "c_return")
            or not code.co_filename.startswith(OURS)
            or code.co_name in ("__del__", "<genexpr>")
        ):
            return
        passed += 1
        if passed == moment:
            met.append(f"{Path(code.co_filename).name}:{frame.f_lineno}, {code.co_name} ({event})")
            for _ in range(times):
                signal.raise_signal(number)

    sys.setprofile(look)
    try:
        call()
    except (KeyboardInterrupt, TimeoutError):
        return True
    finally:
        sys.setprofile(None)
    return False


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


def test_a_second_signal_in_a_step_leaves_an_engine_that_can_be_closed(start: Start, alarms: None) -> None:
    """It does not wait, so parameters may be of two steps: the engine says so, or the step was done."""
    refusals: list[str] = []
    for moment in random.Random(9).sample(range(100, MOMENTS["step"] // 2), 12):
        engine = start(tower(), **TIGHT)
        (x,) = inputs(1)
        engine.backward(engine(x))
        met: list[str] = []
        interrupted(engine.step, moment, met, signal.SIGALRM, times=2)
        try:
            engine.backward(engine(x))
        except EngineStateError as error:
            refusals.append(str(error))
        engine.close()
    assert len(refusals) > 3
    assert all("step 1 was ended by TimeoutError" in refusal for refusal in refusals), refusals
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


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


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.layers(x)).float().pow(2).mean()
        return result


def other() -> Other:
    torch.manual_seed(6)
    return Other()


ALONE: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "tower": (tower, TIGHT),
    "other": (other, {**STREAMED, "accumulation": 1, "threshold": 0, "precision": "fp32"}),
}


def trained_alone(start: Start, name: str, model: nn.Module | None = None) -> dict[str, Tensor]:
    build, options = ALONE[name]
    with start(model or build(), **options) as engine:
        for x in inputs(6):
            update(engine, x.to(next(engine.module.parameters()).dtype))
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters


def test_two_models_trained_in_turns(start: Start) -> None:
    """Step by step, then one inside of the other's step: one forward between the other's, one backward likewise."""
    expected = {name: trained_alone(start, name) for name in ALONE}
    first, two = (start(build(), **options) for build, options in ALONE.values())
    for number, x in enumerate(inputs(6)):
        if number < 2:
            update(first, x.bfloat16())
            update(two, x)
        elif number < 4:
            losses = first(x.bfloat16()), two(x)
            two.backward(losses[1])
            first.backward(losses[0])
            first.step()
            two.step()
        else:
            # One loss over both: a single backward pass runs through the two engines.
            loss = first(x.bfloat16()) + two(x)
            loss.backward()
            two.step()
            first.step()
    for name, engine in zip(ALONE, (first, two), strict=True):
        assert differing(engine.master_state_dict(), expected[name]) == [], name
        assert_nothing_held(engine)


def test_two_models_trained_by_two_threads_in_one_directory(start: Start) -> None:
    expected = {name: trained_alone(start, name) for name in ALONE}
    masters: dict[str, dict[str, Tensor]] = {}

    def train(name: str, model: nn.Module) -> None:
        masters[name] = trained_alone(start, name, model)

    # The random numbers that models start from are the process's: they are made one after the other.
    threads = [threading.Thread(target=train, args=(name, build())) for name, (build, _) in ALONE.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ALONE:
        assert differing(masters[name], expected[name]) == [], name


def test_a_model_inside_of_another_models_forward(start: Start) -> None:
    """A frozen teacher, itself on tiers, is called by the student's forward."""

    class Student(nn.Module):
        def __init__(self, teacher: Any) -> None:
            super().__init__()
            self.model = Other()
            self.teacher = [teacher]  # not a part of this model

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.model.layers[0](x))
            with torch.no_grad():
                aim = self.teacher[0](x)
            result: Tensor = (self.model.layers[1](hidden).float().pow(2).mean() - aim).pow(2)
            return result

    def run(**options: Any) -> dict[str, Tensor]:
        teacher = start(tower(), **(options | {"precision": "fp32"}))
        torch.manual_seed(6)
        student = start(Student(teacher), accumulation=1, threshold=0, precision="fp32", **options)
        for x in inputs(4):
            update(student, x)
        assert_nothing_held(teacher)
        assert_nothing_held(student)
        masters: dict[str, Tensor] = student.master_state_dict()
        return masters

    assert differing(run(), run(**STREAMED)) == []


@pytest.mark.slow
def test_fifty_engines_leave_nothing_behind(nvme: Path) -> None:
    section = {"device": "nvme", "nvme_path": str(nvme)}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": section,
            "offload_optimizer": section,
            "stage3_param_persistence_threshold": 0,
        },
        "tiering": {
            "device_budget": "1MiB",
            "host_budget": "1MiB",
            "cache_in_host": False,
            "telemetry": {"enabled": False},
        },
    }
    (x,) = inputs(1)

    def once() -> None:
        with tiering.initialize(model=tower(1), config=config).engine as engine:
            update(engine, x)
            assert list(nvme.iterdir()) == []

    def now() -> dict[str, int]:
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {
            "KiB": resident // 1024,
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "threads": len(list(Path("/proc/self/task").iterdir())),
            "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        }

    for _ in range(10):
        once()
    grown = []
    for _ in range(3):
        before = now()
        for _ in range(50):
            once()
        after = now()
        assert after["descriptors"] == before["descriptors"]
        assert after["threads"] <= before["threads"]
        assert after["mappings"] <= before["mappings"] + 10
        grown.append(after["KiB"] - before["KiB"])
        if grown[-1] <= 2048:
            return
    # Once, or twice, it is the heap of all the tests before this one that has moved; a leak grows every time.
    raise AssertionError(f"each fifty engines leave memory behind, in KiB: {grown}")


def test_calls_after_close_and_without_backward(start: Start) -> None:
    engine = start(tower(), **TIGHT)
    (x,) = inputs(1)
    loss = engine(x)
    with pytest.raises(
        EngineStateError, match=r"without a backward.*call backward\(loss\) of the engine first"
    ):
        engine.step()
    engine.close()
    for call in (
        lambda: engine.backward(loss),
        lambda: engine(x),
        engine.step,
        engine.state_dict,
        engine.master_state_dict,
    ):
        with pytest.raises(EngineStateError, match=r"after close\(\), which drops the parameters' values"):
            call()
    with pytest.raises(TieringError, match="close"):
        loss.backward()
    with pytest.raises(TieringError, match="close"):
        engine.module(x)
