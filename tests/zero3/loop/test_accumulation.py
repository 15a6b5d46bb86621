"""Several backwards for one step, and the gradient norm before it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from torch import Tensor

from tests.zero3.plain import (
    STREAMED,
    Loop,
    Tower,
    assert_same_everywhere,
    differing,
    inputs,
    run_engine,
    with_no_sync,
)
from tiering.errors import EngineStateError

# The Trainers' tests accumulate in fp32 against a stock Trainer.
PRECISIONS = [pytest.param("fp32", marks=pytest.mark.slow), "bf16"]
Start = Callable[..., Any]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_accumulation_by_configuration(start: Start, precision: str, accumulation: int) -> None:
    def script(loop: Loop) -> list[float]:
        losses = []
        for x in inputs(4 * accumulation):
            loss = loop(x)
            losses.append(loss.item())
            loop.backward(loss)
            loop.step()
        return losses

    assert_same_everywhere(start, Tower, script, precision=precision, accumulation=accumulation)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_several_backwards_in_one_step(start: Start, precision: str) -> None:
    def script(loop: Loop) -> list[float]:
        losses = []
        for number, x in enumerate(inputs(9)):
            loss = loop(x, skip=number % 3)  # the last backward brings one block no gradient
            losses.append(loss.item())
            loop.backward(loss)
            if number % 3 == 2:
                loop.step()
        return losses

    assert_same_everywhere(start, Tower, script, precision=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_backwards_without_sync_and_one_with(start: Start, precision: str) -> None:
    assert_same_everywhere(start, Tower, with_no_sync, precision=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_norm_is_known_before_the_step(start: Start, precision: str, accumulation: int) -> None:
    """Of what is accumulated so far, unscaled, before clipping; reading it twice, or never, changes nothing."""

    def script(loop: Loop, read: bool = True) -> list[float]:
        norms = []
        for number, x in enumerate(inputs(4 * accumulation)):
            loop.backward(loop(x, skip=number % 2))
            if read and number % accumulation == accumulation - 1:
                norm = loop.get_global_grad_norm()
                assert norm is not None
                assert loop.get_global_grad_norm() == norm
                norms.append(norm)
            loop.step()
        return norms

    options: dict[str, Any] = {"precision": precision, "accumulation": accumulation, "clip": 0.05}
    run = assert_same_everywhere(start, Tower, script, **options)
    unread = run_engine(start, Tower, lambda loop: script(loop, read=False), **options, **STREAMED)
    assert differing(unread.masters, run.masters) == []


def test_asking_in_mid_backward_changes_nothing(start: Start) -> None:
    """Gradients that accumulate in a window are no one's to look at until backward has ended."""

    def script(loop: Any, ask: bool = True) -> list[float]:
        def look(_: Tensor) -> None:
            norms.append(loop.get_global_grad_norm())
            with pytest.raises(EngineStateError, match="while a backward is running"):
                loop.get_fp32_gradient("into.weight")

        norms: list[float | None] = []
        handles = [param.register_hook(look) for param in loop.module.parameters() if ask]
        losses = []
        for number, x in enumerate(inputs(6)):
            losses.append(float(loop(x).detach()))
            loop.backward(loop(x))
            if number % 2:
                loop.step()
        assert len(norms) == 6 * len(handles)
        return losses

    unasked = run_engine(start, Tower, lambda loop: script(loop, ask=False), smallest=True, **STREAMED)
    run = run_engine(start, Tower, script, smallest=True, **STREAMED)
    assert run.losses == unasked.losses
    assert differing(run.masters, unasked.masters) == []


def test_micro_batches_that_no_step_has_used_are_told_of(
    start: Start, micro_batches: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    def warnings_of(count: int, *, fails: bool = False) -> int:
        caplog.clear()
        with suppress(ZeroDivisionError), start(accumulation=3) as engine:
            for batch in micro_batches(count):
                engine.backward(engine(*batch))
                engine.step()
            if fails:
                raise ZeroDivisionError
        return caplog.text.count(
            "close() drops the gradients of the last 2 micro-batches, which no step has used: a step needs 3"
        )

    assert warnings_of(5) == 1
    assert warnings_of(6) == 0
    assert warnings_of(5, fails=True) == 0


def test_micro_batches_of_a_backward_that_was_ended_do_not_count(
    start: Start, micro_batches: Callable[..., Any]
) -> None:
    """The next update is of as many as ever, and the same as without it."""
    states = []
    for fails in (True, False):
        engine, batches = start(accumulation=3), list(micro_batches(5))
        if fails:
            engine.backward(engine(*batches[0]))
            engine.step()
            loss = engine(*batches[1])
            loss.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.backward(loss)
        applied = []
        for batch in batches[2:]:
            engine.backward(engine(*batch))
            engine.step()
            applied.append(engine.was_step_applied())
        assert (applied, engine.micro_steps) == ([False, False, True], 3)
        states.append(engine.master_state_dict())
    assert differing(*states) == []
