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
from tiering.errors import EngineStateError, PlacementError, ResidencyError
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
    masters = {name: values.clone() for name, values in engine.master_state_dict().items()}
    evaluated = evaluate(engine)
    engine.destroy()
    engine.destroy()
    engine.close()
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert differing(parameters(model), masters) == []
    assert evaluate(model) == pytest.approx(evaluated, rel=1e-2)
    with pytest.raises(EngineStateError, match=r"forward was called after destroy\(\); initialize the model"):
        evaluate(engine)
    assert differing(start(model, **PLACEMENTS[place]).master_state_dict(), masters) == []


@torch.no_grad()
def evaluate(model: Callable[..., Tensor]) -> float:
    return model(*next(batches(1))).item()


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.data for name, param in model.named_parameters()}


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


def test_each_parameter_gets_its_dtype_back(start: Start) -> None:
    """As for an adapter in fp32 on a model in 16 bits; what is frozen has no master."""
    model = built().bfloat16()
    for module in (model.norm, model.position):
        module.float()
    model.position.requires_grad_(False)
    engine = start(model)
    steps(engine)
    expected, masters = dict(engine.state_dict()), engine.master_state_dict()
    expected |= {name: masters[name] for name in ("norm.weight", "norm.bias")}
    expected["position.weight"] = expected["position.weight"].float()
    engine.destroy()
    assert differing(model.state_dict(), expected) == []
    assert model.head.weight.dtype == torch.bfloat16


def test_a_model_whose_masters_do_not_fit_has_16_bit_values(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(built(), **PLACEMENTS["nvme"])
    weights = engine.state_dict()
    nbytes = 3 * sum(param.numel() for param in engine.module.parameters())
    monkeypatch.setattr(whole_copies, "available_memory", lambda: nbytes)
    with pytest.raises(PlacementError, match=r"release needs .* on cpu"):
        start(engine.module)
    assert not engine.ended
    engine.destroy()
    assert "destroy() puts the model in host memory, without its fp32 masters, because release" in caplog.text
    assert differing(engine.module.state_dict(), weights) == []


def test_packed_weights_need_room_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their elements of fp32 are bytes, which the engine counts in elements of 16 bits."""
    model = built()
    packed = model.position.weight.requires_grad_(False)
    packed.bnb_quantized = True
    codes = packed.data.clone()
    nbytes = 4 * sum(param.numel() for param in model.parameters())
    engine = start(model)
    monkeypatch.setattr(whole_copies, "available_memory", lambda: nbytes)
    engine.destroy()
    assert "without its fp32 masters" not in caplog.text
    assert torch.equal(packed, codes)
    assert model.head.weight.dtype == torch.float32


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
    masters = engine.master_state_dict()
    monkeypatch.setattr(
        released, "shortage", lambda nbytes, device, *_: (nbytes, 0) if device.type == "meta" else None
    )
    engine.device = torch.device("meta")
    engine.destroy()
    assert "destroy() puts the model in host memory, because release needs" in caplog.text
    assert engine.ended
    assert differing(parameters(engine.module), masters) == []


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
