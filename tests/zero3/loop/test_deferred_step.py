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
from tests.zero3.loop.step_times import (
    FP16,
    LOOKS,
    MODELS_AND_HABITS,
    SCRIPTS,
    assert_bits,
    assert_bits_in_least_room,
    assert_bits_of_model,
    trained,
    with_overflows,
)
from tests.zero3.plain import STREAMED, Tower, inputs, update
from tiering.errors import ConfigError, SwapError
from tiering.storage.read_ahead import StagingPipeline

Start = Callable[..., Any]
DEFERRED = {"step": "deferred"}


@pytest.mark.one_of(6)
@pytest.mark.parametrize(("model", "habit"), MODELS_AND_HABITS)
def test_a_deferred_step_gives_the_bits_of_a_step_at_once(
    start: Start, model: str, habit: tuple[str, int]
) -> None:
    assert_bits_of_model(start, DEFERRED, model, habit)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("state", ["fp32", "split", "bf16", "split+bf16"])
def test_within_the_smallest_budgets(start: Start, state: str) -> None:
    """Gradients stream, and most parameters are larger than any buffer."""
    assert_bits_in_least_room(start, DEFERRED, precision="bf16", state=state)


def test_clipped_and_skipped_steps(start: Start) -> None:
    assert_bits(start, DEFERRED, Tower, partial(with_overflows, updates=8, factor=0.1), **FP16)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_other_ways_to_train(start: Start, script: Callable[[Any], list[float]]) -> None:
    assert_bits(start, DEFERRED, Tower, script, precision="bf16")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bytes arrive before somebody waits for them, so a deferred step does nothing by itself."""
    monkeypatch.setattr(StagingPipeline, "first_arrived", lambda self, tiles: None)


def saved(engine: Any, path: Path) -> Any:
    engine.save_checkpoint(path)
    assert engine.load_checkpoint(path)[0] is not None
    return engine.master_state_dict()


def released(engine: Any) -> Any:
    engine.release()
    return dict(engine.module.state_dict())


def set_and_read(engine: Any) -> Any:
    name = "blocks.1.0.weight"
    engine.set_fp32_state(name, "exp_avg", torch.zeros_like(engine.get_fp32_state(name, "exp_avg")))
    update(engine, next(inputs(1, seed=6)))
    return engine.master_state_dict()


USES: dict[str, Callable[[Any], Any]] = {
    **LOOKS,
    "gradient": lambda engine: tiering.utils.safe_get_full_grad(engine.module.blocks[1][0].weight) is None,
    "set": set_and_read,
    "release": released,
}


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("look", USES)
def test_whoever_looks_sees_the_stepped_values(start: Start, look: str) -> None:
    expected = USES[look](trained(start))
    engine = trained(start, **DEFERRED)
    assert engine._updates.deferring, "nothing is left of the step: this test shows nothing"
    found = USES[look](engine)
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
def test_a_read_that_fails_in_forward_is_made_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    x = next(inputs(1))
    expected = update(trained(start), x)
    engine = trained(start, **DEFERRED)
    assert engine._updates.deferring
    acquire, failures = StagingPipeline.acquire, iter(range(2))

    def fail_twice(*args: Any) -> Any:
        for _ in failures:
            raise SwapError("planted", errno=errno.EIO, filename="swap", offset=0)
        return acquire(*args)

    monkeypatch.setattr(StagingPipeline, "acquire", fail_twice)
    for _ in range(2):
        with pytest.raises(SwapError, match="planted"):
            engine(x)
        assert engine._updates.deferring
    assert update(engine, x) == expected


@pytest.mark.usefixtures("late")
def test_a_backward_that_cannot_complete_the_step_leaves_it_to_the_next_call(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(start).master_state_dict()
    engine = trained(start, **DEFERRED)

    def fail(*_: Any) -> None:
        raise SwapError("planted", errno=errno.EIO, filename="swap", offset=0)

    loss = 2 * torch.ones((), requires_grad=True)
    with monkeypatch.context() as patched:
        patched.setattr(StagingPipeline, "expect_only", fail)
        with pytest.raises(SwapError, match="planted"):
            engine.backward(loss)
    assert engine._updates.deferring
    torch.testing.assert_close(engine.master_state_dict(), expected, rtol=0, atol=0)


def test_what_cannot_be_deferred_is_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match="remove one of them"):
        start(Tower(), step_in_backward=True, clip=0.0, **DEFERRED)
    model = Tower()
    client = torch.optim.Rprop(model.parameters())
    with pytest.raises(ConfigError, match=r"tiering.step is 'deferred': set it to 'after'"):
        start(model, client=client, rule=None, **DEFERRED)
    assert start(model, client=client, rule=None, step="auto").plan.workload.step == "after"


@pytest.mark.parametrize(
    ("options", "takes"),
    [
        ({}, "after"),
        ({"offload_optimizer": "nvme", "cache_in_host": False}, "after"),
        ({"offload_param": "cpu", "offload_optimizer": "nvme", "cache_in_host": False}, "after"),
        (STREAMED, "deferred"),
        ({**STREAMED, "swap_versions": 2}, "deferred"),
    ],
    ids=str,
)
def test_auto_defers_what_moves(
    start: Start, caplog: pytest.LogCaptureFixture, options: dict[str, Any], takes: str
) -> None:
    caplog.set_level("INFO")
    engine = start(Tower(), accumulation=1, step="auto", **options)
    assert engine.plan.workload.step == takes
    assert bool(engine._updates.deferred.groups) is (takes == "deferred")
    assert f"tiering.step 'auto' takes {takes!r}: " in caplog.text
    assert "has no effect" not in caplog.text


def test_parameters_that_stay_on_the_device_are_stepped_at_once(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A module can read them in a way that no hook sees."""
    engine = start(Tower(), accumulation=1, offload_optimizer="nvme", cache_in_host=False, **DEFERRED)
    assert "tiering.step 'deferred' has no effect" in caplog.text
    update(engine, next(inputs(1)))
    assert not engine._updates.deferring


@pytest.mark.usefixtures("late")
def test_parameters_in_host_memory_are_hidden_until_they_are_stepped(start: Start) -> None:
    """Nothing moves: compute uses them where they are, and between their uses nobody can."""
    options: dict[str, Any] = {"accumulation": 1, "offload_param": "cpu", "offload_optimizer": "nvme"}
    engines = []
    for step in ({}, DEFERRED):
        torch.manual_seed(11)
        engines.append(start(Tower(), cache_in_host=False, **options, **step))
    used_at: list[bool] = []
    groups = {param: group for group in engines[1]._groups for param in group.params}
    for block in engines[1].module.blocks:
        home = groups[block[1].weight].home
        block[1].register_forward_hook(
            lambda module, *_, home=home: used_at.append(
                0 <= module.weight.data_ptr() - home.address < home.tensor.numel()
            )
        )
    losses = [[update(engine, x) for x in inputs(3, seed=4)] for engine in engines]
    assert losses[0] == losses[1]
    assert used_at
    assert all(used_at)
    assert engines[1]._updates.deferring
    assert not any(group.is_shown for group in engines[1]._groups if group.moves)
    assert engines[0].plan.nvme_traffic() == engines[1].plan.nvme_traffic()


@pytest.mark.parametrize(
    ("step", "optimizer", "state"),
    [
        (DEFERRED, "cpu", "fp32"),
        (DEFERRED, "cpu", "split"),
        ({"step": "in_backward", "swap_versions": 2}, "nvme", "fp32"),
    ],
)
def test_an_edit_in_a_backward_that_fails_reaches_the_master(
    start: Start, step: dict[str, Any], optimizer: str, state: str
) -> None:
    """The memory has it, and compute uses it."""

    def script(engine: Any) -> list[float]:
        weight = engine.module.blocks[1][1].weight

        def edit_and_fail(_: torch.Tensor) -> None:
            with torch.no_grad():
                weight.mul_(2)
            raise ZeroDivisionError

        losses = [update(engine, x) for x in inputs(2)]
        handle = weight.register_hook(edit_and_fail)
        with pytest.raises(ZeroDivisionError):
            update(engine, next(inputs(1)))
        handle.remove()
        return losses + [update(engine, x) for x in inputs(3)]

    host = {
        "in host memory": {"offload_param": "cpu", "offload_optimizer": optimizer, "cache_in_host": False}
    }
    assert_bits(start, step, Tower, script, host, precision="bf16", state=state)
