"""Steps during backward: the bits of steps after it, wherever state lives; and what then is no longer possible."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiering
from optim_cpu.kernels import StepBatch
from tests.zero3.loop.models_in_backward import Checkpointed, FarPeeking, ReadByACheckpoint
from tests.zero3.loop.step_times import (
    EVERYWHERE,
    MODELS_AND_HABITS,
    SCRIPTS,
    assert_bits,
    assert_bits_in_least_room,
    assert_bits_of_model,
    turns,
)
from tests.zero3.plain import (
    ADAM,
    STREAMED,
    WIDTH,
    Tower,
    assert_same,
    differing,
    inputs,
    run_engine,
    update,
)
from tiering.errors import ConfigError, EngineStateError

Start = Callable[..., Any]

SHORT: dict[str, dict[str, Any]] = {name: EVERYWHERE[name] for name in ("device", "smallest tiles")}
IN_BACKWARD = {"step_in_backward": True, "clip": 0.0}


@pytest.mark.one_of(5)
@pytest.mark.parametrize(("model", "habit"), MODELS_AND_HABITS)
def test_steps_in_backward_give_the_bits_of_steps_after_it(
    start: Start, model: str, habit: tuple[str, int]
) -> None:
    assert_bits_of_model(start, IN_BACKWARD, model, habit, clip=0.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_within_the_smallest_budgets(start: Start, precision: str) -> None:
    """Gradients stream, and most parameters are larger than any buffer."""
    assert_bits_in_least_room(start, IN_BACKWARD, precision=precision, clip=0.0)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("state", ["split", "bf16", "split+bf16"])
def test_in_every_state_format(start: Start, state: str) -> None:
    assert_bits(start, IN_BACKWARD, Tower, turns, EVERYWHERE, precision="bf16", state=state, clip=0.0)


def test_with_a_fixed_loss_scale(start: Start) -> None:
    assert_bits(start, IN_BACKWARD, Tower, turns, precision="fp16", fp16={"loss_scale": 8.0}, clip=0.0)


def with_a_penalty(loop: Any) -> list[float]:
    losses = []
    for x in inputs(4):
        with tiering.gathered(loop.module.blocks[1]) as params:
            penalty = sum(param.float().square().sum() for param in params)
        loss = loop(x) + 0.01 * penalty
        losses.append(loss.item())
        loop.backward(loss)
        loop.step()
    return losses


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_penalty_on_gathered_parameters_of_a_checkpointed_block(start: Start, reentrant: bool) -> None:
    """A reentrant checkpoint hands out the block's gradients in a backward of its own, before those of the penalty."""
    assert_bits(start, IN_BACKWARD, partial(Checkpointed, reentrant=reentrant), with_a_penalty, clip=0.0)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_other_ways_to_train(start: Start, script: Callable[[Any], list[float]]) -> None:
    assert_bits(start, IN_BACKWARD, Tower, script, precision="bf16", clip=0.0)


def begin(start: Start, model: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(17)
    settings = {"precision": "bf16", "accumulation": 1, "threshold": 0, "optimizer": ADAM} | IN_BACKWARD
    return start(model or Tower(), **(settings | options))


@pytest.mark.parametrize("place", SHORT.values(), ids=SHORT)
def test_groups_are_stepped_while_backward_still_runs(
    start: Start, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last micro-batch alone; nothing is left to do for ``step``."""
    stepped: list[int] = []
    run = StepBatch.run

    def counted(batch: StepBatch, grad_scale: float = 1.0) -> None:
        stepped.extend([1] * len(batch))
        run(batch, grad_scale)

    monkeypatch.setattr(StepBatch, "run", counted)
    model = Tower()
    when_last_came: list[int] = []
    model.out.weight.register_hook(lambda grad: time.sleep(0.2))  # for a slow disk
    model.into.weight.register_hook(lambda grad: when_last_came.append(len(stepped)))
    engine = begin(start, model, accumulation=2, **place)
    first, second = inputs(2)
    engine.backward(engine(first))
    engine.step()
    assert (stepped, when_last_came) == ([], [0])
    engine.backward(engine(second))
    assert 0 < when_last_came[1] < len(stepped)
    before_step = len(stepped)
    engine.step()
    assert len(stepped) == before_step
    assert engine.global_steps == 1


@pytest.mark.parametrize("place", SHORT.values(), ids=SHORT)
def test_the_rate_is_that_at_the_start_of_backward(start: Start, place: dict[str, Any]) -> None:
    """Changes while it runs, or after it, come too late."""
    engine, calm = begin(start, **place), begin(start, **place)
    engine.module.out.weight.register_hook(  # among the first gradients of a backward
        lambda grad: engine.optimizer.param_groups[0].update(lr=0.5, weight_decay=0.0)
    )
    for n, x in enumerate(inputs(3)):
        for each in (engine, calm):
            each.optimizer.param_groups[0].update(lr=1e-2 / (n + 1), weight_decay=0.1)
            each.backward(each(x))
        engine.optimizer.param_groups[0]["lr"] = 1.0
        for each in (engine, calm):
            each.step()
    assert differing(engine.master_state_dict(), calm.master_state_dict()) == []


@pytest.mark.parametrize("place", SHORT.values(), ids=SHORT)
def test_a_schedule_goes_on_as_always(start: Start, place: dict[str, Any]) -> None:
    masters = []
    for options in ({"step_in_backward": False}, {}):
        engine = begin(start, **options, **place)
        schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
        for x in inputs(4):
            update(engine, x)
            schedule.step()
        masters.append(engine.master_state_dict())
    assert differing(*masters) == []


@pytest.mark.parametrize("place", SHORT.values(), ids=SHORT)
@pytest.mark.parametrize("own", [False, True], ids=["engine.backward", "loss.backward"])
def test_a_second_backward_before_the_step_is_refused(start: Start, own: bool, place: dict[str, Any]) -> None:
    """Its gradients would come too late. Nothing was changed by it: the step and the training go on."""
    engine, calm = begin(start, **place), begin(start, **place)
    batches = list(inputs(3))
    for x in batches:
        for each in (engine, calm):
            each.backward(each(x))
        loss = engine(batches[0])
        with pytest.raises(EngineStateError, match=r"'in_backward'.*step\(\)"):
            loss.backward() if own else engine.backward(loss)
        for each in (engine, calm):
            each.step()
    assert differing(engine.master_state_dict(), calm.master_state_dict()) == []
    assert engine.global_steps == 3


@pytest.mark.parametrize("place", SHORT.values(), ids=SHORT)
def test_gradients_are_gone_when_they_are_used(start: Start, place: dict[str, Any]) -> None:
    engine = begin(start, **place)
    name = "blocks.1.1.weight"
    x = next(inputs(1))
    with engine.no_sync():
        engine.backward(engine(x))
        assert engine.get_fp32_gradient(name).any()  # only added up so far
    engine.backward(engine(x))
    with pytest.raises(EngineStateError, match=r"get_fp32_gradient.*'in_backward'"):
        engine.get_fp32_gradient(name)
    with pytest.raises(EngineStateError, match=r"set_fp32_gradient.*'in_backward'"):
        engine.set_fp32_gradient(name, torch.ones(2 * WIDTH, WIDTH))
    engine.step()


@pytest.mark.parametrize("place", SHORT.values(), ids=SHORT)
def test_the_norm_is_still_the_exact_one(start: Start, place: dict[str, Any]) -> None:
    norms = []
    for options in ({"step_in_backward": False}, {}):
        engine = begin(start, **options, **place)
        norms.append([])
        for x in inputs(3):
            engine.backward(engine(x))
            norms[-1].append(engine.get_global_grad_norm())
            engine.step()
            assert engine.get_global_grad_norm() == norms[-1][-1]
    assert norms[0] == norms[1]
    assert all(norms[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", SHORT.values(), ids=SHORT)
def test_a_gradient_that_is_not_finite_ends_the_training(
    start: Start, place: dict[str, Any], precision: str
) -> None:
    """Some parameters are stepped by then: nothing can be skipped any more, and nothing is hidden."""
    model = Tower()
    engine = begin(start, model, precision=precision, **place)
    batches = list(inputs(3))
    update(engine, batches[0])
    handle = model.get_parameter("blocks.1.1.weight").register_hook(lambda grad: grad * float("inf"))
    engine.backward(engine(batches[1]))
    handle.remove()
    with pytest.raises(EngineStateError, match=r"'blocks\.1\.1\.weight' is not finite.*'in_backward'"):
        engine.step()
    assert (engine.global_steps, engine.skipped_steps) == (1, 0)
    for call in (
        partial(engine, batches[2]),
        engine.step,
        engine.state_dict,
        engine.master_state_dict,
        partial(engine.get_fp32_gradient, "into.weight"),
        partial(engine.get_fp32_parameter, "into.weight"),
    ):
        with pytest.raises(EngineStateError, match=r"partly updated .*close the engine"):
            call()
    engine.close()


@pytest.mark.parametrize("place", SHORT.values(), ids=SHORT)
def test_a_backward_that_fails_after_groups_were_stepped_ends_the_training(
    start: Start, place: dict[str, Any]
) -> None:
    def fail(grad: Tensor) -> None:
        raise ValueError("the user's own hook")

    model = Tower()
    engine = begin(start, model, **place)
    x = next(inputs(1))
    update(engine, x)
    model.into.weight.register_hook(fail)  # the last gradient of a backward
    with pytest.raises(ValueError, match="own hook"):
        engine.backward(engine(x))
    for call in (partial(engine, x), engine.step, engine.state_dict, engine.master_state_dict):
        with pytest.raises(EngineStateError, match="partly updated"):
            call()
    engine.close()


def test_a_backward_of_the_users_own_that_fails_ends_the_training(start: Start) -> None:
    def fail(grad: Tensor) -> None:
        raise ValueError("the user's own hook")

    model = Tower()
    engine = begin(start, model)
    x = next(inputs(1))
    model.into.weight.register_hook(fail)
    with pytest.raises(ValueError, match="own hook"):
        engine(x).backward()
    for call in (engine.state_dict, engine.master_state_dict, partial(engine, x), engine.step):
        with pytest.raises(EngineStateError, match="partly updated"):
            call()
    engine.close()


def test_a_recomputation_does_not_read_what_was_updated(start: Start) -> None:
    engine = begin(start, FarPeeking(checkpointed=True, frozen=False), **STREAMED)
    with pytest.raises(
        EngineStateError,
        match=r"recomputation reads parameters of group 'blocks.2'.*Set tiering.step to 'deferred' or 'after'",
    ):
        engine.backward(engine(next(inputs(1))))
    engine.close()


def test_a_reentrant_checkpoint_reads_a_block_that_is_called_after_it(start: Start) -> None:
    """Where the engine sees the read, the update waits for the end of backward. Else the second part is refused."""
    build = partial(ReadByACheckpoint, reentrant=True)
    after = run_engine(start, build, turns, clip=0.0)
    assert_same(run_engine(start, build, turns, **IN_BACKWARD, **STREAMED), after, "nvme")
    engine = begin(start, build())
    with pytest.raises(
        EngineStateError,
        match=r"'blocks\.2\.weight' got a gradient after .*set step to 'deferred' or 'after'",
    ):
        engine.backward(engine(next(inputs(1))))
    engine.close()


def test_a_pass_before_the_step_computes_with_the_new_parameters(start: Start) -> None:
    """Also with those of a block that was fetched ahead and then left out."""

    def script(engine: Any) -> list[float]:
        losses = []
        for n, x in enumerate(inputs(6)):
            engine.backward(engine(x, skip=1 if n % 2 else None))
            losses.append(float(engine(x).detach()))
            engine.step()
        return losses

    options = {**IN_BACKWARD, "accumulation": 2}
    assert_same(
        run_engine(start, Tower, script, **options, **STREAMED),
        run_engine(start, Tower, script, **options),
        "streamed",
    )


def test_a_loss_that_reaches_no_parameter_changes_none(start: Start) -> None:
    engine = begin(start)
    before = engine.master_state_dict()
    engine.backward(torch.ones((), requires_grad=True) * 2)
    engine.step()
    assert differing(engine.master_state_dict(), before) == []
    assert (engine.global_steps, engine.optimizer.steps) == (1, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"clip": 1.0},
            "tiering.step_in_backward: 'in_backward' with gradient_clipping 1: .* or gradient_clipping to 0",
        ),
        (
            {"precision": "fp16"},
            "dynamic loss scale in fp16: .* or fp16.loss_scale to a fixed scale",
        ),
    ],
)
def test_what_needs_all_gradients_first_is_refused_with_the_line_to_change(
    start: Start, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        begin(start, **options)
    assert re.search(message, str(caught.value))
