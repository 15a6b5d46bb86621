"""fp16: the scale follows overflows, and a skipped step leaves everything as it was, wherever it lives."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tiering.errors import EngineStateError

Start = Callable[..., Any]
PLACEMENTS = {
    "device": {},
    "host": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
    "mixed": {"offload_param": "nvme", "offload_optimizer": "nvme", "host_budget": "900KiB"},
}
EVERYWHERE = pytest.mark.parametrize("placement", PLACEMENTS)


def everything(engine: Any) -> dict[str, Tensor]:
    """Masters, parameters and state, by name."""
    state = {f"master.{name}": value for name, value in engine.master_state_dict().items()}
    state |= {f"param.{name}": value for name, value in engine.state_dict().items()}
    for name, _ in engine.module.named_parameters():
        for key in engine.state_names:
            state[f"{key}.{name}"] = engine.get_fp32_state(name, key)
    return state


def update(engine: Any, micro_batches: Any, seed: int, *, spoil: bool = False) -> None:
    for tokens, targets in micro_batches(engine.settings.gradient_accumulation_steps, seed=seed):
        loss = engine(tokens, targets)
        engine.backward(loss * 1e6 if spoil else loss)  # overflows in fp16 at any scale that is used here
        engine.step()


@pytest.mark.one_of(3)
@EVERYWHERE
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_skipped_step_leaves_every_state_untouched_and_the_scale_follows(
    start: Start, micro_batches: Any, differing: Any, placement: str, accumulation: int
) -> None:
    scaling = {"initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 2, "min_loss_scale": 32}
    engine = start(precision="fp16", accumulation=accumulation, fp16=scaling, **PLACEMENTS[placement])
    update(engine, micro_batches, 0)
    before, steps = everything(engine), dict(engine.optimizer.steps)
    assert engine.loss_scale.value == 256
    update(engine, micro_batches, 1, spoil=True)
    assert engine.loss_scale.value == 256, "hysteresis 2 forgives the first overflow"
    update(engine, micro_batches, 1, spoil=True)
    assert engine.loss_scale.value == 128
    assert differing(everything(engine), before) == []
    assert engine.optimizer.steps == steps and engine.skipped_steps == 2 and engine.global_steps == 3
    for seed in (2, 3, 4):
        update(engine, micro_batches, seed)
    assert engine.loss_scale.value == 256, "a window without overflow doubles it"
    assert differing(everything(engine), before) != []


@pytest.mark.one_of(3)
@pytest.mark.parametrize("fp16", [{}, {"loss_scale": 1024}, {"initial_scale_power": 10}])
def test_placement_changes_no_bit_of_fp16_training(
    start: Start, micro_batches: Any, differing: Any, fp16: dict[str, Any]
) -> None:
    def run(placement: str) -> tuple[dict[str, Tensor], list[float]]:
        engine = start(precision="fp16", accumulation=2, fp16=fp16, **PLACEMENTS[placement])
        norms = []
        for seed in range(5):
            update(engine, micro_batches, seed, spoil=seed == 2)
            norms.append(repr((engine.get_global_grad_norm(), engine.loss_scale.value)))
        return everything(engine), norms

    expected, norms = run("device")
    for placement in PLACEMENTS:
        state, found_norms = run(placement)
        assert differing(state, expected) == [] and found_norms == norms, placement


def test_the_norm_and_the_gradients_are_unscaled(start: Start, micro_batches: Any) -> None:
    engine = start(precision="fp16", accumulation=1, fp16={"loss_scale": 512})
    plain = start(precision="fp32", accumulation=1)
    for each in (engine, plain):
        ((tokens, targets),) = micro_batches(1)
        each.backward(each(tokens, targets))
    name = "blocks.0.up.weight"
    scaled, expected = engine.get_fp32_gradient(name), plain.get_fp32_gradient(name)
    assert torch.allclose(scaled, expected, rtol=0.05, atol=2e-3)
    waiting = engine.get_global_grad_norm()
    assert waiting == pytest.approx(plain.get_global_grad_norm(), rel=0.01)
    engine.step()
    assert engine.get_global_grad_norm() == waiting


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_norm_of_a_skipped_step_is_infinite(start: Start, micro_batches: Any, precision: str) -> None:
    """As in DeepSpeed, before step() and after it; telemetry has the norm as it was computed."""
    engine = start(precision=precision, accumulation=1, fp16={"loss_scale": 64})
    assert engine.get_global_grad_norm() is None
    norms = []
    for factor in (math.inf, 1.0, math.inf, 1.0):
        ((tokens, targets),) = micro_batches(1)
        engine.backward(engine(tokens, targets) * factor)
        waiting = engine.get_global_grad_norm()
        engine.step()
        assert engine.get_global_grad_norm() == waiting
        norms.append((waiting, engine.snapshot().gradient_norm))
    assert [waiting == math.inf for waiting, _ in norms] == [True, False, True, False]
    assert not math.isfinite(norms[2][1])
    assert norms[3][0] == norms[3][1]
    assert engine.skipped_steps == 2


def test_an_overflow_at_the_minimum_is_an_error_that_leaves_the_engine_usable(
    start: Start, micro_batches: Any, differing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(
        precision="fp16",
        accumulation=1,
        fp16={"initial_scale_power": 5, "hysteresis": 1, "min_loss_scale": 16},
    )
    before = everything(engine)
    with caplog.at_level(logging.INFO):
        update(engine, micro_batches, 0, spoil=True)
    assert "is not finite at loss scale 32; it is 16 now" in caplog.text
    with pytest.raises(EngineStateError, match="at its minimum, 16"):
        update(engine, micro_batches, 0, spoil=True)
    assert differing(everything(engine), before) == []
    update(engine, micro_batches, 1)
    assert differing(everything(engine), before) != []


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
def test_skipped_steps_in_a_row_are_an_error_that_leaves_the_engine_usable(
    start: Start, micro_batches: Any, differing: Any, precision: str
) -> None:
    fp16 = {"loss_scale": 16} if precision == "fp16" else {}
    engine = start(precision=precision, fp16=fp16, accumulation=1, max_skipped_steps=3)

    def train(*, spoil: bool) -> None:
        ((tokens, targets),) = micro_batches(1)
        engine.backward(engine(tokens, targets) * (float("nan") if spoil else 1.0))
        engine.step()

    before = everything(engine)
    train(spoil=True)
    train(spoil=True)
    train(spoil=False)
    assert differing(everything(engine), before) != []
    before = everything(engine)
    train(spoil=True)
    train(spoil=True)
    for count in (3, 4):
        message = f"{count} steps in a row.*up to step {3 + count}.*those of step 3.*max_skipped_steps"
        with pytest.raises(EngineStateError, match=message):
            train(spoil=True)
    assert differing(everything(engine), before) == []
    assert engine.skipped_steps == 6 and engine.global_steps == 7
    train(spoil=False)
    assert differing(everything(engine), before) != []


def test_without_a_limit_steps_are_skipped_for_ever(start: Start, micro_batches: Any) -> None:
    default, unlimited = start(accumulation=1), start(accumulation=1, max_skipped_steps=0)
    assert default.settings.tiering.max_skipped_steps == 50
    ((tokens, targets),) = micro_batches(1)
    for _ in range(51):
        unlimited.backward(unlimited(tokens, targets) * float("nan"))
        unlimited.step()
    assert unlimited.skipped_steps == 51


def test_backward_without_the_scale_is_refused_with_what_to_call(start: Start, micro_batches: Any) -> None:
    engine = start(precision="fp16", accumulation=1, fp16={"loss_scale": 512})
    ((tokens, targets),) = micro_batches(1)
    with pytest.raises(EngineStateError, match=r"engine\.scale\(loss\)\.backward\(\)"):
        engine(tokens, targets).backward()
    engine.scale(engine(tokens, targets)).backward()
    engine.step()
    assert engine.global_steps == 1 and engine.skipped_steps == 0


@EVERYWHERE
def test_an_option_that_no_step_can_use_is_refused_and_nothing_is_lost(
    start: Start, micro_batches: Any, differing: Any, placement: str
) -> None:
    engine = start(accumulation=1, **PLACEMENTS[placement])
    update(engine, micro_batches, 0)
    before = everything(engine)
    engine.optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        update(engine, micro_batches, 1)
    assert differing(everything(engine), before) == []
    engine.optimizer.param_groups[0]["lr"] = 1e-3
    update(engine, micro_batches, 1)
    assert differing(everything(engine), before) != []
