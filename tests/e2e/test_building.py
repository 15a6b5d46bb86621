"""Models of transformers built without memory: the bits and the random numbers of an ordinary build."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tiering
from tests.e2e.architectures import ARCHITECTURES, build
from tiering.errors import ConfigError
from zero3.building import tape
from zero3.building.meta import build_on_meta
from zero3.building.zero_init import recipe_of

# transformers renames what everybody calls, peft among them.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")

# Their constructors do what no initialiser repeats.
NOT_ON_META = ("gpt2", "lora", "untied")


def parameters(model: nn.Module) -> dict[str, Tensor]:
    recipes = {name: recipe_of(param) for name, param in model.named_parameters()}
    return {name: recipe.make() for name, recipe in recipes.items() if recipe is not None}


def assert_equal(ordinary: nn.Module, model: nn.Module) -> None:
    values, expected = parameters(model), dict(ordinary.named_parameters())
    assert list(values) == list(expected)
    assert [name for name in expected if not torch.equal(values[name], expected[name].detach())] == []
    for name, buffer in ordinary.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_under_init(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary, after = build(name), torch.rand(3)
    monkeypatch.setattr(tape, "SMALLEST_FREED", 1)
    monkeypatch.setattr(tape, "GROWTH_LIMIT", 0)
    with tiering.zero.Init():
        model = build(name)
    assert torch.equal(torch.rand(3), after)
    assert_equal(ordinary, model)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in (*NOT_ON_META, "vit")])
def test_on_meta(name: str) -> None:
    """A ViT's constructor draws random numbers that nobody uses, so its initialisers draw others here."""
    ordinary, after = build(name), torch.rand(3)
    with torch.device("meta"):
        model = build(name)
    torch.manual_seed(3)
    build_on_meta(model)
    assert torch.equal(torch.rand(3), after)
    assert_equal(ordinary, model)


@pytest.mark.parametrize("name", NOT_ON_META)
def test_on_meta_what_only_constructors_do_is_refused(name: str) -> None:
    with torch.device("meta"):
        model = build(name)
    with pytest.raises(ConfigError, match=r"zero\.Init"):
        build_on_meta(model)
    assert all(param.is_meta for param in model.parameters())
