"""as_optimizer(): a loop that owns accumulation trains to the bits of the engine's own loop."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero3.conftest import batches
from tests.zero3.plain import STREAMED, Tower, differing, inputs, run_plain
from tiering.errors import ConfigError, EngineStateError

Start = Callable[..., Any]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme": {**STREAMED, "threshold": 0},
}
EVERYWHERE = pytest.mark.parametrize("place", PLACEMENTS)
# As many backwards in each update.
ACCUMULATION = 2
UPDATES = 3
BACKWARDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "engine.backward": lambda engine, loss: engine.backward(loss),
    "scale_wrt_gas": lambda engine, loss: engine.backward(loss, scale_wrt_gas=False),
    "engine.scale": lambda engine, loss: engine.scale(loss).backward(),
    "loss.backward": lambda engine, loss: loss.backward(),
}


def by_engine(engine: Any) -> list[float]:
    """The engine's own loop; returns the norms."""
    norms = []
    for tokens, targets in batches(UPDATES * ACCUMULATION):
        engine.backward(engine(tokens, targets))
        engine.step()
        if engine.was_step_applied():
            norms.append(engine.get_global_grad_norm())
    return norms


def by_loop(
    engine: Any, backward: Callable[[Any, Tensor], Any], *, no_sync: bool = False, steps: int = UPDATES
) -> list[float]:
    """A trainer's loop, which divides its losses; returns the norms."""
    optimizer, norms = engine.as_optimizer(), []
    for number, (tokens, targets) in enumerate(batches(steps * ACCUMULATION), start=1):
        is_last = number % ACCUMULATION == 0
        with engine.no_sync() if no_sync and not is_last else nullcontext():
            backward(engine, engine(tokens, targets) / ACCUMULATION)
        if is_last:
            optimizer.step()
            norms.append(engine.get_global_grad_norm())
            optimizer.zero_grad()
    return norms


@pytest.mark.one_of(5)
@EVERYWHERE
@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_loop_that_accumulates_trains_as_the_engine_does(start: Start, place: str, backward: str) -> None:
    options = {**PLACEMENTS[place], "precision": "fp32", "accumulation": ACCUMULATION}
    own, driven = start(**options), start(**options)
    expected = by_engine(own)
    assert by_loop(driven, BACKWARDS[backward]) == expected
    assert differing(driven.master_state_dict(), own.master_state_dict()) == []
    assert driven.global_steps == UPDATES and driven.global_samples == own.global_samples


@EVERYWHERE
def test_no_sync_for_all_backwards_but_the_last(start: Start, place: str) -> None:
    options = {**PLACEMENTS[place], "precision": "bf16", "accumulation": ACCUMULATION}
    own, driven = start(**options), start(**options)
    assert by_loop(driven, BACKWARDS["loss.backward"], no_sync=True) == by_engine(own)
    assert differing(driven.master_state_dict(), own.master_state_dict()) == []


def test_fp16_needs_the_scale_of_the_engine(start: Start) -> None:
    options: dict[str, Any] = {
        "precision": "fp16",
        "accumulation": ACCUMULATION,
        "fp16": {"initial_scale_power": 8},
    }
    own, driven = start(**options, **STREAMED), start(**options, **STREAMED)
    driven.as_optimizer()
    with pytest.raises(
        EngineStateError, match=r"loss.backward\(\) does not multiply by the loss scale \(256\)"
    ):
        driven(*next(batches(1))).backward()
    expected = by_engine(own)
    assert by_loop(driven, BACKWARDS["engine.scale"]) == expected
    assert differing(driven.master_state_dict(), own.master_state_dict()) == []


def test_an_overflow_skips_the_step_and_a_loop_can_tell(start: Start) -> None:
    engine = start(precision="fp16", accumulation=1, fp16={"initial_scale_power": 8, "hysteresis": 1})
    optimizer = engine.as_optimizer()
    (tokens, targets), before = next(batches(1)), engine.master_state_dict()
    skipped = [optimizer.step_was_skipped]
    for factor in (1e6, 1.0):
        engine.backward(engine(tokens, targets) * factor)
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        if factor > 1:
            assert differing(engine.master_state_dict(), before) == []
            assert engine.loss_scale.value == 128
    assert skipped == [False, True, False]
    norm = engine.get_global_grad_norm()
    assert norm is not None and math.isfinite(norm)
    assert differing(engine.master_state_dict(), before) != []


def test_schedulers_of_torch_and_of_transformers_change_the_engines_rate(start: Start) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    engine = start(accumulation=1)
    optimizer = engine.as_optimizer()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is engine.optimizer.param_groups
    schedulers = {
        "torch": torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=2),
        "transformers": transformers.get_linear_schedule_with_warmup(optimizer, 0, 4),
    }
    rates: dict[str, list[float]] = {}
    for name, scheduler in schedulers.items():
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        for tokens, targets in batches(2):
            engine.backward(engine(tokens, targets))
            optimizer.step()
            scheduler.step()
            rates.setdefault(name, []).append(engine.optimizer.param_groups[0]["lr"])
    assert rates["torch"] == pytest.approx([1.5e-3, 2e-3])
    assert rates["transformers"] == pytest.approx([0.75e-3, 0.5e-3])


def test_a_scheduler_that_steps_after_the_optimizer_warns_of_nothing(start: Start) -> None:
    """torch marks the call of ``step`` on the instance; warnings are errors here."""
    engine = start(accumulation=1)
    optimizer = engine.as_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine.backward(engine(*next(batches(1))))
    optimizer.step()
    scheduler.step()
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_step_runs_a_closure_and_hooks(start: Start) -> None:
    engine = start(accumulation=1)
    optimizer, calls = engine.as_optimizer(), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        calls.append("closure")
        optimizer.zero_grad()
        loss: Tensor = engine(*next(batches(1)))
        engine.backward(loss)
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() > 0 and engine.global_steps == 1
    assert calls == ["before", "closure", "after"]


def test_a_closure_may_read_gradients(start: Start) -> None:
    """Lightning runs the hooks of a script, which may log the norms of gradients, in the closure of a step."""
    engine = start(accumulation=1)
    optimizer, read = engine.as_optimizer(), []

    def closure() -> None:
        engine.backward(engine(*next(batches(1))))
        read.extend(param.grad for param in engine.module.parameters())

    optimizer.step(closure)
    assert set(read) == {None} and engine.was_step_applied()
    engine.backward(engine(*next(batches(1))))
    with pytest.raises(
        EngineStateError, match=r"^\[TIER-STATE\] SGD.step\(\) .* call release\(\) of the engine"
    ):
        torch.optim.SGD(engine.module.parameters(), lr=0.1).step()


@pytest.mark.parametrize("configured", [0.0, 0.05, 10.0])
def test_clipping_by_the_loop(start: Start, configured: float) -> None:
    """The lower of both norms counts, for one step."""

    def plain(loop: Any) -> list[float]:
        for x in inputs(2):
            loop.backward(loop(x))
            loop.step()
            loop._clip = configured
        return []

    def build() -> nn.Module:
        torch.manual_seed(11)
        return Tower()

    limit = 0.1
    expected = run_plain(build, plain, clip=min(limit, configured or limit))
    options: dict[str, Any] = {"precision": "fp32", "accumulation": 1, "clip": configured, "threshold": 0}
    adam = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.99]}
    engine = start(build(), optimizer=adam, **options, **STREAMED)
    optimizer = engine.as_optimizer()
    torch.manual_seed(12)
    for number, x in enumerate(inputs(2)):
        engine.backward(engine(x))
        if not number:
            norm = engine.get_global_grad_norm()
            assert optimizer.clip_grad_norm_(limit) == norm > limit
        optimizer.step()
    for name, master in engine.master_state_dict().items():
        torch.testing.assert_close(master, expected.masters[name], rtol=0, atol=2e-6)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_the_norm_of_an_overflow_is_that_of_torch(start: Start, value: float) -> None:
    engine = start(accumulation=1, precision="fp16", fp16={"loss_scale": 64})
    ((tokens, targets),) = batches(1)
    engine.backward(engine(tokens, targets))
    spoilt = engine.get_fp32_gradient("blocks.0.up.weight")
    spoilt[1, 2] = value
    engine.set_fp32_gradient("blocks.0.up.weight", spoilt)
    expected = float(nn.utils.get_total_norm([spoilt]))
    assert engine.as_optimizer().clip_grad_norm_(1.0) == pytest.approx(expected, nan_ok=True)


def test_clipping_is_refused_where_it_would_do_nothing(start: Start) -> None:
    optimizer = start(accumulation=1).as_optimizer()
    with pytest.raises(EngineStateError, match="without a backward since the last step"):
        optimizer.clip_grad_norm_(1.0)
    with pytest.raises(ConfigError, match="max_norm 0; it must be greater than 0"):
        optimizer.clip_grad_norm_(0)
    optimizer = start(accumulation=1, clip=0.0, step_in_backward=True).as_optimizer()
    with pytest.raises(ConfigError, match="in_backward"):
        optimizer.clip_grad_norm_(1.0)


@EVERYWHERE
def test_zero_grad_drops_gradients(start: Start, place: str) -> None:
    """Those of the dropped micro-batches have no part in the next update."""
    options = {**PLACEMENTS[place], "precision": "fp32", "accumulation": ACCUMULATION}
    dropping, own = start(**options), start(**options)
    optimizer = dropping.as_optimizer()
    for tokens, targets in batches(2, seed=99):
        dropping(tokens, targets).backward()
    optimizer.zero_grad()
    dropping.as_module().zero_grad()
    assert by_loop(dropping, BACKWARDS["loss.backward"]) == by_engine(own)
    assert differing(dropping.master_state_dict(), own.master_state_dict()) == []


@EVERYWHERE
def test_step_in_backward_with_no_sync(start: Start, place: str) -> None:
    options = {**PLACEMENTS[place], "precision": "fp32", "accumulation": ACCUMULATION, "clip": 0.0}
    own, driven = start(**options), start(**options, step_in_backward=True)
    by_engine(own)
    by_loop(driven, BACKWARDS["loss.backward"], no_sync=True)
    assert differing(driven.master_state_dict(), own.master_state_dict()) == []
    driven(*next(batches(1))).backward()
    with pytest.raises(EngineStateError, match="a second backward before step"):
        driven(*next(batches(1))).backward()


@EVERYWHERE
def test_resuming(start: Start, place: str, tmp_path: Any) -> None:
    """Options by state_dict, state by the engine's checkpoint; the continuation is bit-equal."""
    options = {**PLACEMENTS[place], "precision": "bf16", "accumulation": ACCUMULATION}
    first = start(**options)
    by_loop(first, BACKWARDS["loss.backward"], steps=1)
    saved = first.as_optimizer().state_dict()
    assert saved["state"] == {}
    assert saved["tiers"] == {"step": 1, "updates": 1}
    first.save_checkpoint(tmp_path / "checkpoints")
    by_loop(first, BACKWARDS["loss.backward"])

    resumed = start(**options)
    optimizer = resumed.as_optimizer()
    with pytest.raises(EngineStateError, match=r"engine.load_checkpoint\(save_dir\) before this"):
        optimizer.load_state_dict(saved)
    resumed.load_checkpoint(tmp_path / "checkpoints")
    groups = optimizer.param_groups
    # As accelerate does when it prepares an optimizer.
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is groups is resumed.optimizer.param_groups
    by_loop(resumed, BACKWARDS["loss.backward"])
    assert differing(resumed.master_state_dict(), first.master_state_dict()) == []


def test_an_optimizer_without_a_kernel_keeps_its_state(start: Start) -> None:
    torch.manual_seed(3)
    model = Tower()
    engine = start(
        model,
        client=torch.optim.RMSprop(model.parameters(), lr=1e-3),
        precision="fp32",
        accumulation=1,
        rule=None,
    )
    optimizer = engine.as_optimizer()
    for x in inputs(2):
        engine(x).backward()
        optimizer.step()
    assert optimizer.state is engine.optimizer.state and len(optimizer.state) > 0
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups is engine.optimizer.client.param_groups
    assert optimizer.state is engine.optimizer.client.state


def test_what_a_front_refuses(start: Start) -> None:
    engine = start(accumulation=ACCUMULATION)
    engine.backward(engine(*next(batches(1))))
    with pytest.raises(
        EngineStateError, match="as_optimizer was called with gradients that no step has used"
    ):
        engine.as_optimizer()
    engine.step()
    with pytest.raises(
        EngineStateError, match="as_optimizer was called with gradients that no step has used"
    ):
        engine.as_optimizer()
    engine.backward(engine(*next(batches(1))))
    engine.step()
    optimizer = engine.as_optimizer()
    assert engine.as_optimizer() is optimizer
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(EngineStateError, match="cannot be copied or pickled"):
            duplicate(optimizer)
    with pytest.raises(EngineStateError, match="step was called without a backward"):
        optimizer.step()
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(*next(batches(1))))
    with pytest.raises(EngineStateError, match=r"set_gradient_accumulation_boundary\(False\)"):
        optimizer.step()


def test_a_grad_scaler_is_refused(start: Start) -> None:
    engine = start(accumulation=1)
    optimizer = engine.as_optimizer()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(engine(*next(batches(1)))).backward()
    with pytest.raises(EngineStateError, match="leave the GradScaler out"):
        scaler.step(optimizer)


def test_a_model_without_an_optimizer_has_no_front(start: Start) -> None:
    engine = start(rule=None)
    with pytest.raises(EngineStateError, match="as_optimizer was called on an engine without an optimizer"):
        engine.as_optimizer()


@pytest.mark.parametrize("end", ["close", "release"])
def test_the_end_of_the_engine(start: Start, end: str) -> None:
    """zero_grad does nothing, step names the call that has ended the engine."""
    engine = start(accumulation=1, **STREAMED)
    optimizer, module = engine.as_optimizer(), engine.as_module()
    getattr(engine, end)()
    optimizer.zero_grad()
    module.zero_grad()
    with pytest.raises(EngineStateError, match=rf"step was called after {end}\(\)"):
        optimizer.step()


def test_set_train_batch_size_leaves_the_accumulation_to_the_loop(start: Start) -> None:
    engine = start(precision="fp32", accumulation=1)
    engine.as_optimizer()
    engine.set_train_batch_size(8)
    norms = by_loop(engine, BACKWARDS["loss.backward"])
    own = start(precision="fp32", accumulation=ACCUMULATION)
    assert norms == by_engine(own)
    assert engine.global_samples == 8 * UPDATES
