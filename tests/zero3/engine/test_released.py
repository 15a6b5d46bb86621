"""release(): a model that was trained by an engine is an ordinary one again, and may be initialized once more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero3.conftest import SmallModel, batches
from tests.zero3.plain import STREAMED, differing
from tiering.errors import ConfigError, EngineStateError, PlacementError
from zero3.state import whole_copies

Start = Callable[..., Any]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme": {**STREAMED, "threshold": 0},
}
EMPTY_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


def built() -> SmallModel:
    torch.manual_seed(3)
    return SmallModel()


def steps(engine: Any, count: int, seed: int = 7) -> list[float]:
    losses = []
    for tokens, targets in batches(count * engine.settings.gradient_accumulation_steps, seed):
        loss = engine(tokens, targets)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def carried_over(engine: Any) -> SmallModel:
    """A new model with the values that ``engine.state_dict()`` gives."""
    model = built()
    model.load_state_dict(engine.state_dict(), assign=True)
    model.head.weight = model.embedding.weight
    return model


@pytest.mark.one_of(2)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("place", PLACEMENTS)
def test_training_again_after_release(start: Start, place: str, precision: str) -> None:
    """Bit-equal with a new model that was given the values, and a plain step in between counts."""
    options = {**PLACEMENTS[place], "precision": precision}
    model = built()
    params = list(model.parameters())
    engine = start(model, **options)
    steps(engine, 2)
    expected = carried_over(engine)
    weights = copy.deepcopy(engine.state_dict())
    engine.release()

    assert_ordinary(model)
    assert all(first is other for first, other in zip(model.parameters(), params, strict=True))
    assert differing(model.state_dict(), weights) == []
    assert plain_step(model) == plain_step(expected)
    assert differing(model.state_dict(), expected.state_dict()) == []
    assert differing(model.state_dict(), weights) != []

    again, other = start(model, **options), start(expected, **options)
    assert steps(again, 2, seed=8) == steps(other, 2, seed=8)
    assert differing(again.master_state_dict(), other.master_state_dict()) == []
    assert differing(again.state_dict(), other.state_dict()) == []


def plain_step(model: nn.Module) -> float:
    tokens, targets = next(batches(1, seed=9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss: Tensor = model(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def assert_ordinary(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        assert type(param) is nn.Parameter, name
        assert param.grad is None, name
        assert not param._post_accumulate_grad_hooks, name
    for name, module in model.named_modules():
        assert all(not getattr(module, hooks) for hooks in EMPTY_HOOKS), name
        assert module._compiled_call_impl is None, name


@pytest.mark.parametrize("place", PLACEMENTS)
def test_masters_are_kept_on_request(start: Start, place: str) -> None:
    model = built()
    model.position.requires_grad_(False)
    engine = start(model, **PLACEMENTS[place])
    steps(engine, 2)
    masters, frozen = engine.master_state_dict(), engine.state_dict()["position.weight"]
    engine.release(masters=True)
    assert differing({name: model.get_parameter(name).data for name in masters}, masters) == []
    assert torch.equal(model.position.weight, frozen)
    assert differing(start(model, **PLACEMENTS[place]).master_state_dict(), masters) == []


def test_parameters_that_do_not_fit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on as if nobody had asked."""
    losses = []
    for asks in (False, True):
        engine = start(built(), **PLACEMENTS["nvme"])
        steps(engine, 1)
        if asks:
            with monkeypatch.context() as patch:
                patch.setattr(whole_copies, "available_memory", lambda: 5 << 10)
                with pytest.raises(
                    PlacementError, match=r"KiB on cpu .* 5\.00 KiB are free .* save_16bit_model"
                ):
                    engine.release()
        losses.append(steps(engine, 2, seed=8))
    assert losses[0] == losses[1]


def test_release_asks_for_an_engine_at_rest(start: Start) -> None:
    engine = start(built())
    with pytest.raises(ConfigError, match="on cpu, not on meta"):
        engine.release("meta")
    engine.module.blocks[0].register_forward_hook(lambda *_: engine.release())
    with pytest.raises(EngineStateError, match="release was called while a forward"):
        steps(engine, 1)


def test_edits_and_waiting_gradients(start: Start) -> None:
    """An edit of a parameter that stays on the device counts; gradients without a step are dropped."""
    model = built()
    engine = start(model)
    with torch.no_grad():
        model.norm.weight.fill_(2.0)
    tokens, targets = next(batches(1))
    engine.backward(engine(tokens, targets))
    engine.release()
    assert torch.equal(model.norm.weight, torch.full_like(model.norm.weight, 2.0))
    assert_ordinary(model)


def test_calls_after_the_end(start: Start) -> None:
    model, other = built(), built()
    released_engine, closed_engine = start(model), start(other, **PLACEMENTS["nvme"])
    loss = released_engine(*next(batches(1)))
    released_engine.release()
    released_engine.release()
    released_engine.close()
    closed_engine.close()
    for engine in (released_engine, closed_engine):
        engine.zero_grad()
        engine.optimizer.zero_grad()
        engine.module.zero_grad()
    with pytest.raises(
        EngineStateError, match=r"forward was called after release\(\); initialize the model again"
    ):
        released_engine(*next(batches(1)))
    with pytest.raises(EngineStateError, match=r"called after close\(\) or release\(\)"):
        loss.backward()
    for call in (closed_engine.release, lambda: closed_engine(*next(batches(1)))):
        with pytest.raises(
            EngineStateError, match=r"after close\(\), which drops .* release\(\) instead of close"
        ):
            call()
    with pytest.raises(EngineStateError, match=r"'embedding.weight' belonged .* closed.*release\(\)"):
        start(other)


def test_a_model_that_was_not_trained_can_be_afterwards(start: Start) -> None:
    model = built()
    model.position.requires_grad_(False)
    engine = start(model, rule=None, **PLACEMENTS["nvme"])
    assert not any(param.requires_grad for param in model.parameters())
    engine.release()
    assert [name for name, param in model.named_parameters() if not param.requires_grad] == [
        "position.weight"
    ]
    engine = start(model)
    before = engine.master_state_dict()
    steps(engine, 1)
    assert set(differing(engine.master_state_dict(), before)) == set(before)


def test_an_optimizer_without_a_kernel(start: Start) -> None:
    model = built()
    engine = start(model, client=lambda params: torch.optim.RMSprop(params, lr=1e-3), rule=None)
    steps(engine, 1)
    weights = copy.deepcopy(engine.state_dict())
    engine.release()
    assert_ordinary(model)
    assert differing(model.state_dict(), weights) == []
