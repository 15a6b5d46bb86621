"""A deferred step: the bits of a step at once, wherever state lives; whoever looks sees the stepped values."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tiering
from tests.crossed import crossed
from tests.zero3.loop.test_step_in_backward import (
    EVERYWHERE,
    MODELS,
    SCRIPTS,
    WITH_EACH_MODEL,
    assert_same,
    turns,
)
from tests.zero3.plain import ADAM, STREAMED, Tower, inputs, run_engine, update
from tiering.errors import ConfigError, EngineStateError, SwapError
from tiering.storage.read_ahead import StagingPipeline

Start = Callable[..., Any]
DEFERRED = {"step": "deferred"}


@pytest.mark.one_of(6)
@pytest.mark.parametrize(("model", "habit"), crossed(MODELS, [("bf16", 3), ("fp32", 1), ("bf16", 1)]))
def test_a_deferred_step_gives_the_bits_of_a_step_at_once(
    start: Start, model: str, habit: tuple[str, int]
) -> None:
    build, (precision, accumulation) = MODELS[model], habit
    script = partial(turns, passes=accumulation)
    options: dict[str, Any] = {"precision": precision, "accumulation": accumulation}
    at_once = run_engine(start, build, script, **options)
    assert len({*at_once.losses}) > 1
    for name, placement in (EVERYWHERE if build is Tower else WITH_EACH_MODEL).items():
        assert_same(run_engine(start, build, script, **options, **DEFERRED, **placement), at_once, name)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("state", ["fp32", "split", "bf16", "split+bf16"])
def test_within_the_smallest_budgets(start: Start, state: str) -> None:
    """Gradients stream, and most parameters are larger than any buffer."""
    options: dict[str, Any] = {"precision": "bf16", "state": state}
    at_once = run_engine(start, Tower, turns, **options)
    least = run_engine(start, Tower, turns, smallest=True, **options, **DEFERRED, **STREAMED)
    assert_same(least, at_once, "the smallest budgets")


def with_overflows(loop: Any) -> list[float]:
    """Of eight updates some are skipped, some are clipped, and each has another learning rate."""
    losses = []
    for n, x in enumerate(inputs(8)):
        for group in loop.optimizer.param_groups:
            group["lr"] = ADAM["lr"] / (n + 1)
        losses.append(update(loop, x * (1e4 if n in (2, 3, 6) else 0.1 * n)))
        loop.optimizer.zero_grad()
    return losses


def test_clipped_and_skipped_steps(start: Start) -> None:
    options: dict[str, Any] = {"precision": "fp16", "fp16": {"initial_scale_power": 15, "hysteresis": 1}}
    at_once = run_engine(start, Tower, with_overflows, **options)
    for name, placement in WITH_EACH_MODEL.items():
        assert_same(
            run_engine(start, Tower, with_overflows, **options, **DEFERRED, **placement), at_once, name
        )


@pytest.mark.one_of(2)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_other_ways_to_train(start: Start, script: Callable[[Any], list[float]]) -> None:
    at_once = run_engine(start, Tower, script, precision="bf16")
    for name, placement in WITH_EACH_MODEL.items():
        assert_same(
            run_engine(start, Tower, script, precision="bf16", **DEFERRED, **placement), at_once, name
        )


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bytes arrive before somebody waits for them, so a deferred step does nothing by itself."""
    monkeypatch.setattr(StagingPipeline, "first_arrived", lambda self, tiles: None)


def trained(start: Start, **options: Any) -> Any:
    """An engine behind its second step."""
    torch.manual_seed(11)
    engine = start(Tower(), accumulation=1, threshold=0, sub_group_size=1, **STREAMED, **options)
    for x in inputs(2):
        update(engine, x)
    return engine


def saved(engine: Any, path: Path) -> Any:
    engine.save_checkpoint(path)
    assert engine.load_checkpoint(path)[0] is not None
    return engine.master_state_dict()


def of_copies(engine: Any) -> Any:
    with tiering.gathered(engine.module.blocks[1]) as params:
        return [param.detach().clone() for param in params]


def evaluated(engine: Any) -> Any:
    with torch.no_grad():
        return engine(next(inputs(1, seed=5))).clone()


def released(engine: Any) -> Any:
    engine.release()
    return dict(engine.module.state_dict())


def set_and_read(engine: Any) -> Any:
    name = "blocks.1.0.weight"
    engine.set_fp32_state(name, "exp_avg", torch.zeros_like(engine.get_fp32_state(name, "exp_avg")))
    update(engine, next(inputs(1, seed=6)))
    return engine.master_state_dict()


LOOKS: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda engine: engine.state_dict(),
    "master": lambda engine: engine.get_fp32_parameter("blocks.2.0.weight"),
    "moment": lambda engine: engine.get_fp32_state("blocks.2.0.weight", "exp_avg_sq"),
    "gradient": lambda engine: tiering.utils.safe_get_full_grad(engine.module.blocks[1][0].weight) is None,
    "set": set_and_read,
    "gathered": of_copies,
    "evaluation": evaluated,
    "release": released,
}


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_sees_the_stepped_values(start: Start, look: str) -> None:
    expected = LOOKS[look](trained(start))
    engine = trained(start, **DEFERRED)
    assert engine._updates.deferring, "nothing is left of the step: this test shows nothing"
    found = LOOKS[look](engine)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("late")
def test_a_checkpoint_has_the_stepped_values(start: Start, tmp_path: Path) -> None:
    expected = saved(trained(start), tmp_path / "at once")
    engine = trained(start, **DEFERRED)
    assert engine._updates.deferring
    torch.testing.assert_close(saved(engine, tmp_path / "deferred"), expected, rtol=0, atol=0)


@pytest.mark.usefixtures("late")
def test_gradients_are_used_up_by_the_step(start: Start) -> None:
    """A script that drops gradients after each step does not wait for it, and loses none."""
    engine = trained(start, **DEFERRED)
    engine.zero_grad()
    engine.optimizer.zero_grad()
    engine.module.zero_grad()
    weight = engine.module.blocks[1][0].weight
    assert tiering.utils.safe_get_full_grad(weight) is None
    assert engine._updates.deferring
    # A gradient that is set is one of the next step.
    tiering.utils.safe_set_full_grad(weight, torch.ones(weight.shape))
    assert not engine._updates.deferring
    assert tiering.utils.safe_get_full_grad(weight).eq(1).all()


@pytest.mark.usefixtures("late")
def test_a_group_is_stepped_before_its_use_and_others_later(start: Start) -> None:
    engine = trained(start, **DEFERRED)
    assert engine._updates.deferring
    left: list[bool] = []
    for block in engine.module.blocks:
        block.register_forward_hook(lambda *_: left.append(engine._updates.deferring))
    # No forward uses the last block: backward steps it.
    loss = engine(next(inputs(1)), skip=len(engine.module.blocks) - 1)
    assert left[0], "all groups were stepped before the first one was used"
    engine.backward(loss)
    assert not engine._updates.deferring


@pytest.mark.usefixtures("late")
def test_a_read_that_fails_in_forward_ends_the_run(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained(start, **DEFERRED)
    assert engine._updates.deferring

    def fail(group: Any, *, wait: bool) -> bool:
        raise SwapError("planted", errno=errno.EIO, filename="swap", offset=0)

    monkeypatch.setattr(engine._updates._stepper, "step_group", fail)
    with pytest.raises(SwapError):
        engine(next(inputs(1)))
    for call in (partial(engine, next(inputs(1))), engine.state_dict):
        with pytest.raises(EngineStateError, match=r"partly updated \(step 2 was ended by SwapError"):
            call()


def test_what_cannot_be_deferred_is_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match="remove one of them"):
        start(Tower(), step_in_backward=True, clip=0.0, **DEFERRED)
    model = Tower()
    client = torch.optim.Rprop(model.parameters())
    with pytest.raises(ConfigError, match=r"tiering.step is 'deferred': set it to 'after'"):
        start(model, client=client, rule=None, **DEFERRED)


def test_parameters_that_stay_on_the_device_are_stepped_at_once(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A module can read them in a way that no hook sees."""
    engine = start(Tower(), accumulation=1, offload_optimizer="nvme", cache_in_host=False, **DEFERRED)
    assert "tiering.step 'deferred' has no effect" in caplog.text
    update(engine, next(inputs(1)))
    assert not engine._updates.deferring
