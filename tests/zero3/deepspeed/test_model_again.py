"""A model is used again as after DeepSpeed: after destroy(), and by another initialize(), as in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiering
from tests.zero3.conftest import SmallModel, batches
from tests.zero3.plain import STREAMED, differing
from tiering.errors import EngineStateError, ResidencyError
from zero3.engine import released
from zero3.state import whole_copies

Start = Callable[..., Any]
PLACEMENTS: dict[str, dict[str, Any]] = {"device": {"stage": 1}, "nvme": {**STREAMED, "threshold": 0}}


def built() -> SmallModel:
    torch.manual_seed(3)
    return SmallModel()


def steps(engine: Any, count: int = 2, seed: int = 7) -> list[float]:
    losses = []
    for tokens, targets in batches(count, seed):
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("place", [pytest.param("device", marks=pytest.mark.slow), "nvme"])
def test_after_destroy_the_model_is_an_ordinary_one(start: Start, place: str) -> None:
    engine = start(built(), **PLACEMENTS[place])
    model = engine.module
    steps(engine)
    weights = {name: values.clone() for name, values in engine.state_dict().items()}
    evaluated = evaluate(engine)
    engine.destroy()
    engine.destroy()
    engine.close()
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert differing(model.state_dict(), weights) == []
    assert evaluate(model) == evaluated
    with pytest.raises(EngineStateError, match=r"forward was called after destroy\(\); initialize the model"):
        evaluate(engine)
    losses = steps(start(model, **PLACEMENTS[place]))
    assert losses == steps(start(carried_over(weights), **PLACEMENTS[place]))


@torch.no_grad()
def evaluate(model: Callable[..., Tensor]) -> float:
    return model(*next(batches(1))).item()


def carried_over(weights: dict[str, Tensor]) -> SmallModel:
    model = built()
    model.load_state_dict(weights, assign=True)
    model.head.weight = model.embedding.weight
    return model


@pytest.mark.parametrize("place", [pytest.param("device", marks=pytest.mark.slow), "nvme"])
def test_another_initialize_continues_from_the_masters(
    start: Start, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = start(built(), accumulation=1, **PLACEMENTS[place])
    steps(first)
    masters = {name: values.clone() for name, values in first.master_state_dict().items()}
    again = start(first.module, accumulation=1, **PLACEMENTS[place])
    assert "was called for a model with an open engine: that engine has ended" in caplog.text
    assert first.ended and not again.ended
    assert differing(again.master_state_dict(), masters) == []
    with pytest.raises(EngineStateError, match=r"after another initialize\(\); .* or use its new engine"):
        steps(first)
    first.destroy()
    # A cell that binds the engine to the name of the model passes the engine.
    third = start(again, accumulation=1, **PLACEMENTS[place])
    assert third.module is first.module and again.ended
    assert len(steps(third)) == 2


def test_a_loop_in_a_function_that_runs_twice(start: Start) -> None:
    """The function has lost its engine when it returns."""
    model = built()

    def train(learning_rate: float) -> dict[str, Tensor]:
        engine = start(model, accumulation=1, optimizer={"lr": learning_rate})
        steps(engine)
        return {name: values.clone() for name, values in engine.master_state_dict().items()}

    ended, continued = train(1e-3), train(0.0)
    assert differing(ended, continued) == []


def test_a_16_bit_model_gets_its_dtype_back(start: Start) -> None:
    first = start(built().bfloat16())
    start(first.module)
    assert {param.dtype for param in first.module.parameters()} == {torch.bfloat16}


def test_a_model_that_does_not_fit_is_closed(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(built(), **PLACEMENTS["nvme"])
    monkeypatch.setattr(whole_copies, "available_memory", lambda: 5 << 10)
    engine.destroy()
    assert "the model has no values after destroy(), because [TIER-PLAN] release needs" in caplog.text
    assert engine.ended
    with pytest.raises(ResidencyError, match="engine is closed"):
        evaluate(engine.module)


def test_a_model_that_fits_into_host_memory_only(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(built(), **PLACEMENTS["nvme"])
    weights = engine.state_dict()
    monkeypatch.setattr(
        released, "shortage", lambda nbytes, device, *_: (nbytes, 0) if device.type == "meta" else None
    )
    engine.device = torch.device("meta")
    engine.destroy()
    assert "after destroy(), the model is in host memory: its parameters do not fit on meta" in caplog.text
    assert engine.ended
    assert differing(engine.module.state_dict(), weights) == []


def test_destroy_inside_a_forward(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(built())
    engine.module.norm.register_forward_hook(lambda *_: engine.destroy())
    with pytest.raises(ResidencyError, match="engine is closed"):
        evaluate(engine)
    assert "because [TIER-STATE] destroy was called while a forward or backward is running" in caplog.text
    assert engine.ended


def test_a_part_of_a_model_with_an_open_engine_is_refused(start: Start) -> None:
    engine = start(built())
    with pytest.raises(EngineStateError, match=r"'norm.weight' belongs to an open engine.*release\(\)"):
        tiering.initialize(model=engine.module.blocks[0], config=engine.config)
    assert len(steps(engine)) == 2
