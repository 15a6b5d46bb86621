"""A step that is begun in backward and may be taken back: the bits of a step after it, clipped and skipped ones too."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import tiering
from tests.zero3.loop.step_times import (
    FP16,
    IN_HOST,
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
from tiering.errors import SwapError
from tiering.storage.aio import Fault
from tiering.storage.read_ahead import StagingPipeline
from zero3.loop import step_ahead
from zero3.loop.step_ahead import StepAhead
from zero3.optimizer.tile_stepper import TileStepper

Start = Callable[..., Any]
AHEAD = {"step_in_backward": True, "swap_versions": 2}
PLACES, PLACE_NAMES = [STREAMED, IN_HOST], ["nvme", "parameters in host memory"]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are begun ahead however many of them are taken back."""
    monkeypatch.setattr(step_ahead, "MOST_IN_VAIN", 1)


@pytest.fixture(autouse=True)
def arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """These backwards are so short that hardly any bytes would arrive in them: wait for those."""

    def first_staged(self: StagingPipeline[Any, Any], tiles: Any) -> Any:
        return next((tile for tile in self._staged if tile in tiles), None)

    monkeypatch.setattr(StagingPipeline, "first_arrived", first_staged)


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many steps were adopted and how many were taken back; how many tiles were written ahead of them."""
    counts: Counter[str] = Counter()

    def adopt(self: StepAhead, original: Any = StepAhead.adopt) -> None:
        counts["tiles"] += len(self._optimizer.stepper._done)
        counts["adopted"] += 1
        original(self)

    def take_back(self: TileStepper, original: Any = TileStepper.take_back) -> None:
        counts["taken back"] += 1
        counts["tiles"] += len(self._done)
        original(self)

    monkeypatch.setattr(StepAhead, "adopt", adopt)
    monkeypatch.setattr(TileStepper, "take_back", take_back)
    return counts


@pytest.mark.one_of(4)
@pytest.mark.parametrize(("model", "habit"), MODELS_AND_HABITS)
def test_a_step_ahead_gives_the_bits_of_a_step_after_backward(
    start: Start, model: str, habit: tuple[str, int], seen: Counter[str]
) -> None:
    assert_bits_of_model(start, AHEAD, model, habit)
    assert seen["adopted"] + seen["taken back"]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("state", ["fp32", "split", "bf16", "split+bf16"])
@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_within_the_smallest_budgets(start: Start, state: str, clip: float, seen: Counter[str]) -> None:
    """Gradients stream, and most parameters are larger than any buffer."""
    assert_bits_in_least_room(start, AHEAD, precision="bf16", state=state, clip=clip)
    assert seen["adopted" if not clip else "taken back"] == 4


def test_clipped_skipped_and_other_steps(start: Start, seen: Counter[str]) -> None:
    script = partial(with_overflows, updates=10, factor=0.01)
    assert_bits(start, AHEAD, Tower, script, clip=0.3, **FP16)
    assert seen["adopted"] > 1
    assert seen["taken back"] > 4
    assert seen["tiles"] > 20


@pytest.mark.one_of(2)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_other_ways_to_train(start: Start, script: Callable[[Any], list[float]]) -> None:
    assert_bits(start, AHEAD, Tower, script, precision="bf16")


def begun(start: Start, **options: Any) -> Any:
    """An engine behind the backward of its third update."""
    engine = trained(start, clip=0.0, **options)
    engine.backward(engine(next(inputs(1, seed=4))))
    return engine


def accumulated(engine: Any) -> Any:
    engine.backward(engine(next(inputs(1, seed=6))))
    return None


def with_a_gradient_set(engine: Any) -> Any:
    weight = engine.module.blocks[1][0].weight
    tiering.utils.safe_set_full_grad(weight, torch.full(weight.shape, 0.01))
    return None


def with_another_rate(engine: Any) -> Any:
    engine.optimizer.param_groups[0]["lr"] *= 2
    return None


def with_a_parameter_left_out(engine: Any) -> Any:
    del engine.optimizer.param_groups[0]["params"][3]
    return None


def with_another_loss_scale(engine: Any) -> Any:
    engine.loss_scale.value *= 2
    return None


USES: dict[str, Callable[[Any], Any]] = {
    "nobody": lambda engine: None,
    **LOOKS,
    "gradient": lambda engine: tiering.utils.safe_get_full_grad(engine.module.blocks[1][0].weight),
    "a further backward": accumulated,
    "a gradient that is set": with_a_gradient_set,
    "another learning rate": with_another_rate,
    "a parameter that is not stepped": with_a_parameter_left_out,
    "another loss scale": with_another_loss_scale,
}


@pytest.mark.parametrize("placement", PLACES, ids=PLACE_NAMES)
@pytest.mark.parametrize("look", USES)
def test_until_step_everybody_sees_the_old_values(
    start: Start, look: str, placement: dict[str, Any], seen: Counter[str]
) -> None:
    def looked(**options: Any) -> tuple[Any, ...]:
        engine = begun(start, precision="bf16", **placement, **options)
        if options:
            assert engine._updates.ahead.under_way
            assert engine._updates._stepper._done, "nothing was stepped ahead: this test shows nothing"
        found = USES[look](engine)
        engine.step()
        if options:
            assert engine._updates.ahead.restore(wait=False), "the step has left parameters to be restored"
        return found, engine.master_state_dict(), engine.state_dict()

    expected, ahead = looked(), looked(**AHEAD)
    torch.testing.assert_close(ahead, expected, rtol=0, atol=0)
    adopted = {"nobody": 3, "a further backward": 3}.get(look, 2)
    assert (seen["adopted"], seen["taken back"]) == (adopted, look != "nobody")


@pytest.mark.parametrize("drop", ["engine", "optimizer"])
def test_gradients_that_are_dropped_have_changed_nothing(start: Start, drop: str) -> None:
    def dropped(**options: Any) -> Any:
        engine = begun(start, **options)
        (engine if drop == "engine" else engine.optimizer).zero_grad()
        before = engine.master_state_dict()
        update(engine, next(inputs(1, seed=7)))
        return before, engine.master_state_dict()

    torch.testing.assert_close(dropped(**AHEAD), dropped(), rtol=0, atol=0)


@pytest.mark.parametrize("placement", PLACES, ids=PLACE_NAMES)
def test_an_exception_in_backward_takes_the_step_back(start: Start, placement: dict[str, Any]) -> None:
    def cut(**options: Any) -> Any:
        engine = begun(start, precision="bf16", **placement, **options)
        engine.step()
        before = engine.master_state_dict(), engine.state_dict()

        def stop(*_: Any) -> None:
            raise RuntimeError("planted")

        hook = engine.module.blocks[0].register_full_backward_hook(stop)
        with pytest.raises(RuntimeError, match="planted"):
            engine.backward(engine(next(inputs(1, seed=8))))
        hook.remove()
        torch.testing.assert_close((engine.master_state_dict(), engine.state_dict()), before, rtol=0, atol=0)
        update(engine, next(inputs(1, seed=9)))
        return engine.master_state_dict()

    torch.testing.assert_close(cut(**AHEAD), cut(), rtol=0, atol=0)


def test_an_io_error_in_backward_leaves_the_step_to_step(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seen: Counter[str]
) -> None:
    def trained(**options: Any) -> Any:
        engine = begun(start, **options)
        engine.step()
        return engine.master_state_dict()

    expected = trained()
    original = TileStepper.advance
    calls = Counter[bool]()

    def fail_once(self: TileStepper, *, finish: bool = False) -> None:
        calls[self._ahead] += 1
        if self._ahead and calls[True] == 8:
            raise SwapError("planted", errno=errno.EIO, filename="swap", offset=0)
        original(self, finish=finish)

    monkeypatch.setattr(TileStepper, "advance", fail_once)
    torch.testing.assert_close(trained(**AHEAD), expected, rtol=0, atol=0)
    assert "a step that was begun in backward begins again after it: " in caplog.text
    assert seen["taken back"] == 1


def test_gradients_that_wait_for_room_do_not_wait_for_a_step_ahead(
    start: Start, plan_fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would give no room to them. And an I/O error that it met would end backward."""
    monkeypatch.setattr(StagingPipeline, "first_arrived", lambda self, tiles: None)
    asked, waited = list[bool](), list[object]()

    def make_room(self: TileStepper, original: Any = TileStepper.make_room) -> bool:
        asked.append(self.has_due)
        return bool(original(self))

    monkeypatch.setattr(TileStepper, "make_room", make_room)
    plan_fault(Fault("write", first=60, count=0, delay=0.02))
    options = {"sub_group_size": 1000, "host_budget": "128KiB", "device_budget": "24KiB", "clip": 0.0}
    engine = start(Tower(), accumulation=1, threshold=0, **STREAMED, **options, **AHEAD)
    for x in inputs(60):
        loss = engine(x)
        with monkeypatch.context() as patched:
            patched.setattr(TileStepper, "_step_streamed", lambda self, tile: waited.append(tile))
            engine.backward(loss)
        assert not waited
        engine.step()
        if any(asked):  # usually in one of the first steps
            break
    assert any(asked), "nobody asked for room while a tile was due: this test shows nothing"


@pytest.mark.parametrize(("clip", "look"), [(1e-6, "nobody"), (0.0, "gradient"), (0.0, "a further backward")])
def test_steps_that_are_mostly_in_vain_are_not_begun_ahead(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seen: Counter[str],
    clip: float,
    look: str,
) -> None:
    monkeypatch.setattr(step_ahead, "MOST_IN_VAIN", 1 / 5)
    caplog.set_level("INFO")
    engine = start(Tower(), accumulation=1, threshold=0, clip=clip, **STREAMED, **AHEAD)
    for x in inputs(4):
        engine.backward(engine(x))
        USES[look](engine)
        engine.step()
    assert seen["taken back"] == 1
    assert (
        "steps are not begun in backward: 1 of the last 1 were taken back, clipped or skipped" in caplog.text
    )


def test_the_last_ten_steps_decide_whether_the_next_one_is_begun_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_ahead, "MOST_IN_VAIN", 1 / 5)
    ahead = StepAhead(MagicMock(), MagicMock(), frozenset())
    pays = []
    for ends in [*20 * ["right"], "clipped", "skipped", *2 * ["clipped"], *10 * ["right"]]:
        if ahead.pays:
            ahead.begin(1.0)
        if ends == "skipped":
            ahead.skip()
        elif ahead.is_right(1.0, unclipped=ends == "right"):
            ahead.adopt()
        pays.append(ahead.pays)
    # Of the last ten, three or four were in vain; the last of these was not begun ahead.
    assert pays == [*22 * [True], *9 * [False], *3 * [True]]


def test_masters_are_read_although_all_slots_are_taken(start: Start) -> None:
    engine = begun(start, precision="bf16", **IN_HOST, **AHEAD)
    updates = engine._updates
    updates.take_back()
    updates._stepper.expect_all()
    # Those that the step ahead had become free when their transfers have ended.
    while len(updates._stepper._pipeline.staged) < engine.plan.staging.slots:
        updates._stepper.read_ahead()
    assert len(updates._stepper._pipeline.staged) == engine.plan.staging.slots
    assert not updates.ahead.restore(wait=False)
    assert updates.ahead.restore()
    assert updates.ahead.restore(wait=False)


def test_parameters_that_compute_reads_at_home_are_not_overwritten() -> None:
    optimizer, gradients, group = MagicMock(), MagicMock(), MagicMock(is_used_at_home=True)
    gradients.take_final.side_effect = [[group], [], []]
    ahead = StepAhead(optimizer, gradients, frozenset({group}))
    ahead.begin(1.0)
    ahead.advance()
    optimizer.step_ahead.assert_not_called()
    group.is_used_at_home = False
    for _ in range(2):
        ahead.advance()
        optimizer.step_ahead.assert_called_once_with(group)


def test_a_skipped_step_is_taken_back_once_and_other_groups_are_left_to_step() -> None:
    optimizer, gradients, group, other = (MagicMock(is_used_at_home=False) for _ in range(4))
    gradients.take_final.return_value = [group, other]
    ahead = StepAhead(optimizer, gradients, frozenset({group}))
    ahead.begin(1.0)
    ahead.advance()
    optimizer.step_ahead.assert_called_once_with(group)
    for _ in range(2):
        ahead.skip()
        assert not ahead.under_way
    optimizer.take_back.assert_called_once_with()
