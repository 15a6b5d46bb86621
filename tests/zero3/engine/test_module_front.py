"""as_module(): an engine as an nn.Module with the names, parameters and attributes of its model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero3.conftest import SmallModel, batches
from tests.zero3.plain import STREAMED, differing
from tiering.errors import EngineStateError

Start = Callable[..., Any]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme": {**STREAMED, "threshold": 0},
}
EVERYWHERE = pytest.mark.parametrize("place", PLACEMENTS)


class Configured(SmallModel):
    """Has an attribute of its own, a method that calls the model, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"name": "small"}
        self.register_buffer("seen", torch.zeros(3))

    def generate(self, tokens: Tensor) -> float:
        return float(self(tokens, tokens))


def built() -> Configured:
    torch.manual_seed(3)
    return Configured()


@EVERYWHERE
def test_a_loop_over_the_module_trains_as_one_over_the_engine(start: Start, place: str) -> None:
    options = {**PLACEMENTS[place], "accumulation": 1}
    by_module, by_engine = start(built(), **options), start(built(), **options)
    model, optimizer = by_module.as_module(), by_module.as_optimizer()
    for tokens, targets in batches(2):
        model.train()
        model(tokens, targets).backward()
        optimizer.step()
        model.zero_grad()
        by_engine.backward(by_engine(tokens, targets))
        by_engine.step()
    assert differing(by_module.master_state_dict(), by_engine.master_state_dict()) == []
    assert differing(model.state_dict(), by_engine.state_dict()) == []


def test_names_are_the_models_own(start: Start) -> None:
    engine = start(built(), **STREAMED)
    front, model = engine.as_module(), engine.module
    assert engine.as_module() is front and isinstance(front, nn.Module)
    assert front.module is model
    assert [(name, id(param)) for name, param in front.named_parameters()] == [
        (name, id(param)) for name, param in model.named_parameters()
    ]
    assert [name for name, _ in front.named_buffers()] == ["seen"]
    assert [name for name, _ in front.named_children()] == [name for name, _ in model.named_children()]
    assert [name for name, _ in front.named_modules()] == [name for name, _ in model.named_modules()]
    assert front.get_submodule("blocks.0.norm") is model.blocks[0].norm
    assert list(front.state_dict()) == list(model.state_dict())


def test_attributes_are_the_models(start: Start) -> None:
    front = start(built()).as_module()
    model = front.module
    assert front.config is model.config
    tokens = next(batches(1))[0]
    with torch.no_grad():
        assert front.generate(tokens) == model.generate(tokens)
    front.config = {"name": "other"}
    front.note = 1
    assert model.config == {"name": "other"} and model.note == 1
    front.norm = nn.Identity()
    assert model.norm is front.norm
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = front.absent
    # accelerate replaces forward of a prepared model.
    forward = front.forward
    front.forward = lambda *inputs: forward(*inputs)
    assert "forward" not in vars(model)


def test_modes_are_the_models(start: Start) -> None:
    model = built().eval()
    front = start(model).as_module()
    assert not front.training and not model.training
    assert front.train() is front and front.training and model.blocks[0].training
    front.eval()
    assert not model.training and not model.blocks[0].training


def test_no_sync(start: Start) -> None:
    engine = start(built(), accumulation=1)
    front, optimizer = engine.as_module(), engine.as_optimizer()
    tokens, targets = next(batches(1))
    with front.no_sync():
        front(tokens, targets).backward()
        with pytest.raises(EngineStateError, match=r"step was called inside no_sync\(\)"):
            optimizer.step()
    front(tokens, targets).backward()
    optimizer.step()
    assert engine.global_steps == 1


@EVERYWHERE
def test_a_deep_copy_is_an_ordinary_model(start: Start, place: str) -> None:
    engine = start(built(), **PLACEMENTS[place])
    duplicate = copy.deepcopy(engine.as_module())
    assert type(duplicate) is Configured
    assert all(type(param) is nn.Parameter for param in duplicate.parameters())
    assert differing(duplicate.state_dict(), engine.state_dict()) == []
    with pytest.raises(EngineStateError, match="the module of an engine cannot be pickled"):
        pickle.dumps(engine.as_module())


def test_after_release_it_is_a_plain_model(start: Start) -> None:
    engine = start(built(), precision="fp32", **STREAMED)
    front, values = engine.as_module(), engine.state_dict()
    engine.release()
    assert differing(front.state_dict(), values) == []
    assert all(type(param) is nn.Parameter for param in front.parameters())
    with pytest.raises(EngineStateError, match=r"forward was called after release\(\)"):
        front(*next(batches(1)))


@EVERYWHERE
def test_a_trainer_trains_twice(start: Start, place: str) -> None:
    """release() between both, as a trainer that makes its engine anew: bit-equal with a new model of these values."""
    options = {**PLACEMENTS[place], "precision": "fp32", "accumulation": 1}
    model = built()
    first = start(model, **options)
    old = first.as_module(), first.as_optimizer()
    for tokens, targets in batches(2):
        old[0](tokens, targets).backward()
        old[1].step()
    first.release()
    for each in old:
        each.zero_grad()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    carried = built()
    carried.load_state_dict(values)
    runs = []
    for each in (model, carried):
        engine = start(each, **options)
        module, optimizer = engine.as_module(), engine.as_optimizer()
        assert module is not old[0] and optimizer is not old[1]
        for tokens, targets in batches(2, seed=8):
            module(tokens, targets).backward()
            optimizer.step()
        runs.append(engine.master_state_dict())
    assert differing(*runs) == []


def test_zero_grad_of_the_model_after_close_does_nothing(start: Start) -> None:
    """As a trainer calls it on the model that it was given."""
    engine = start(built(), **STREAMED)
    engine.close()
    engine.module.zero_grad()
    engine.as_module().zero_grad()
    assert all(param.grad is None for param in engine.module.parameters())
