"""Tensor subclasses live on tiers by the tensors inside of them, and come back as the same objects."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiering
from tests.zero3.wrapped import NAMES, WIDTH, Coded, Model, Negated, coded
from tiering.errors import CheckpointError, ConfigError, ResidencyError
from zero3.building.wrapped_parameters import WrappedParameters
from zero3.params import inner_tensors
from zero3.passes.saved_tensors import Activations

Start = Callable[..., Any]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
}
ONE = {"precision": "bf16", "accumulation": 1, "threshold": 0}


def bits(weight: Tensor) -> tuple[type, Tensor, Tensor]:
    inner = weight.inner if isinstance(weight, Negated) else weight
    assert isinstance(inner, Coded) and type(inner.codes) is Tensor
    return type(weight), inner.codes.clone(), inner.scale.clone()


def inputs() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()


def losses(engine: Any, steps: int = 3) -> list[float]:
    result = []
    for _ in range(steps):
        loss = engine(inputs()).float().pow(2).mean()
        result.append(loss.item())
        engine.backward(loss)
        engine.step()
    return result


def test_placement_changes_no_bit(start: Start) -> None:
    results = []
    for placement in PLACEMENTS.values():
        model = Model()
        weights = {name: module.weight for name, module in model.named_modules() if hasattr(module, "weight")}
        before = {name: bits(weight) for name, weight in weights.items() if not name.endswith("adapter")}
        names = list(dict(model.named_parameters()))
        engine = start(model, **ONE, **placement)
        history = losses(engine)
        state = engine.state_dict()
        assert {name for name in state if "adapter" not in name} == set(NAMES)
        assert torch.equal(state["blocks.1.up.weight.codes"], before["blocks.1.up"][1])
        results.append((history, {name: state[name].tolist() for name in state if "adapter" in name}))
        engine.release()
        assert list(dict(model.named_parameters())) == names
        for name, (kind, codes, scale) in before.items():
            weight = model.get_submodule(name).weight
            assert weight is weights[name] and isinstance(weight, nn.Parameter)
            after = bits(weight)
            assert after[0] is kind and torch.equal(after[1], codes) and torch.equal(after[2], scale), name
    assert results[0] == results[1] == results[2]
    plain = Model()
    loss = plain(inputs()).float().pow(2).mean()
    assert results[0][0][0] == loss.item() and results[0][0][0] != results[0][0][-1]


def test_values_that_are_elsewhere_are_fetched_or_refused(start: Start) -> None:
    model = Model()
    weight = model.blocks[2].down.weight
    expected = weight.inner.codes.clone()
    engine = start(model, **ONE, **PLACEMENTS["nvme"])
    assert weight.shape == (WIDTH, WIDTH) and weight.dtype is torch.bfloat16
    for read in (
        lambda: weight + 1,
        weight.detach,
        lambda: copy.deepcopy(weight),
        lambda: torch.ops.aten.sum(weight),
        lambda: weight.inner.codes + 1,
    ):
        with pytest.raises(ResidencyError, match=r"'blocks\.2\.down\.weight\.inner\.codes'.*on NVMe"):
            read()
    assert "resharded: 'blocks.2.down.weight.inner.codes'" in repr(weight)
    with tiering.gathered(weight) as shown:
        assert shown is weight and type(weight) is Negated and torch.equal(weight.inner.codes, expected)
        values = weight.detach() + 0
    assert torch.equal(
        values, -Coded(expected, bits(Model().blocks[2].down.weight)[2], values.dtype).decoded()
    )
    with pytest.raises(ResidencyError):
        weight + 1
    engine.close()
    with pytest.raises(ResidencyError, match="engine is closed"):
        weight + 1


def test_a_checkpoint_holds_the_inner_tensors(start: Start, tmp_path: Path) -> None:
    engine = start(Model(), **ONE, **PLACEMENTS["host"])
    losses(engine, 1)
    engine.save_checkpoint(tmp_path)
    expected = losses(engine, 2)
    other = Model()
    with torch.no_grad():
        for block in other.blocks:
            block.up.weight.codes.neg_()
    resumed = start(other, **ONE, **PLACEMENTS["nvme"])
    resumed.load_checkpoint(tmp_path)
    assert losses(resumed, 2) == expected
    floats = Model()
    floats.blocks[1].up.weight = nn.Parameter(torch.ones(WIDTH, WIDTH).bfloat16(), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"blocks\.1\.up\.weight"):
        start(floats, **ONE).load_checkpoint(tmp_path)


class Sealed(Coded):
    __slots__ = ()

    @property
    def codes(self) -> Tensor:  # type: ignore[override]
        return self.hidden_codes

    @codes.setter
    def codes(self, values: Tensor) -> None:
        if hasattr(self, "hidden_codes"):
            raise AttributeError("codes are final")
        self.hidden_codes = values


class Opaque(Coded):
    __tensor_flatten__ = None  # type: ignore[assignment]


def with_weight(make: Callable[[], Tensor], **options: Any) -> nn.Module:
    model = nn.Linear(WIDTH, WIDTH)
    model.weight = nn.Parameter(make(), **{"requires_grad": False} | options)
    return model


def transposed() -> Tensor:
    weight = coded(torch.bfloat16)
    weight.codes = weight.codes.T
    return weight


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: with_weight(lambda: coded(torch.bfloat16), requires_grad=True),
            r"'weight', a Coded, requires a gradient.*requires_grad_\(False\)",
        ),
        (lambda: with_weight(transposed), r"'weight', a Coded, holds 'codes', which is not contiguous.*quantize"),
        (
            lambda: with_weight(lambda: Sealed(*bits(coded(torch.bfloat16))[1:], torch.bfloat16)),
            r"'weight', a Sealed, does not let 'codes' be replaced \(codes are final\).*quantize",
        ),
    ],
    ids=["trained", "not contiguous", "sealed"],
)  # fmt: skip
def test_what_cannot_be_tiered_is_refused_by_name(
    start: Start, make: Callable[[], nn.Module], words: str
) -> None:
    model = make()
    with pytest.raises(ConfigError, match=words):
        start(model, **ONE)
    assert isinstance(model.weight, Coded) and list(dict(model.named_parameters())) == ["weight", "bias"]


def test_activations_count_the_tensors_inside_of_a_saved_wrapper() -> None:
    weight = coded(torch.float32)
    activations = Activations([], has_hooks=False)
    loss = (torch.ones(WIDTH, WIDTH, requires_grad=True) * weight).sum()
    activations.backward_of(loss)
    assert activations.used == weight.codes.nbytes + weight.scale.nbytes


def test_a_plan_counts_the_inner_tensors_and_leaves_the_model(start: Start) -> None:
    model = Model()
    names = list(dict(model.named_parameters()))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
    }
    planned = tiering.plan_for(model=model, config=settings).workload.groups
    assert list(dict(model.named_parameters())) == names and type(model.head.weight.codes) is Tensor
    plain = Model()
    for module in plain.modules():
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            module.weight = nn.Parameter(module.weight.detach() + 0, requires_grad=False)
    # One byte less for each code, one scale in fp32 for each row.
    spared = sum(
        group.param_bytes for group in tiering.plan_for(model=plain, config=settings).workload.groups
    )
    spared -= sum(group.param_bytes for group in planned)
    assert spared == pytest.approx(6 * (WIDTH * WIDTH - 4 * WIDTH), abs=4 * 4096)


@pytest.mark.parametrize("make", [coded, lambda dtype: Negated(coded(dtype))], ids=["plain", "nested"])
def test_a_wrapper_on_another_device_keeps_its_inner_tensors(make: Callable[..., Tensor]) -> None:
    """As with a model in host memory and an engine on a GPU; the meta device is one that each machine has."""
    model = with_weight(lambda: make(torch.bfloat16))
    weight, before = model.weight, bits(model.weight)
    weight.note = "kept"
    apart = WrappedParameters.split(model, torch.device("meta"))
    assert model.weight is weight and weight.device.type == "meta" and weight.note == "kept"
    assert all(param.device.type == "cpu" for param in model.parameters())
    apart.join()
    assert model.weight is weight and weight.device.type == "cpu" and isinstance(weight, nn.Parameter)
    assert type(weight) is before[0] and not weight.requires_grad
    assert torch.equal(bits(weight)[1], before[1]) and torch.equal(bits(weight)[2], before[2])


def test_a_wrapper_that_cannot_move_is_named_and_stays() -> None:
    model = nn.Sequential(with_weight(lambda: coded(torch.bfloat16)))
    weight, before = model[0].weight, bits(model[0].weight)
    reference = weakref.ref(weight)
    with pytest.raises(
        ConfigError, match=r"parameter '0\.weight', a Coded on cpu, cannot become one on meta"
    ):
        WrappedParameters.split(model, torch.device("meta"))
    assert list(dict(model.named_parameters())) == ["0.weight", "0.bias"] and model[0].weight is reference()
    assert torch.equal(bits(weight)[1], before[1]) and torch.equal(bits(weight)[2], before[2])


def test_an_interrupted_split_leaves_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_weight(lambda: coded(torch.bfloat16))
    weight, before, link = model.weight, bits(model.weight), inner_tensors.link

    def interrupted(wrapped: Tensor, parts: Any) -> None:
        link(wrapped, parts)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(inner_tensors, "link", interrupted)
        with pytest.raises(KeyboardInterrupt):
            WrappedParameters.split(model)
    assert list(dict(model.named_parameters())) == ["weight", "bias"] and model.weight is weight
    assert type(weight) is before[0] and torch.equal(bits(weight)[1], before[1])
    # Otherwise a second start would take it for one that an engine has.
    assert inner_tensors.parts_of(weight) == (weight,)


def test_an_optimizer_over_all_parameters(start: Start) -> None:
    """Also over the frozen ones, which are none of the model's while an engine runs; then a second engine."""
    model = Model()
    first = start(model, **ONE, rule=None, client=torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses(first)
    second = start(model, **ONE, **PLACEMENTS["nvme"])
    assert first.ended and losses(second, 1)[0] < losses(start(Model(), **ONE), 1)[0]


def test_a_start_that_fails_leaves_the_model(start: Start) -> None:
    model = Model()
    names = list(dict(model.named_parameters()))
    weight = model.blocks[1].down.weight
    before = bits(weight)
    with pytest.raises(ConfigError, match="quantize"):
        start(model, **ONE, quantize={"type": "nf4", "modules": ["blocks.1.up"]})
    assert list(dict(model.named_parameters())) == names
    assert model.blocks[1].down.weight is weight and torch.equal(bits(weight)[1], before[1])
