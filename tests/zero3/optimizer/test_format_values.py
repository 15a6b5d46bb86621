"""The values of each state format: set and read by name, edited, copied into another run; the same in every place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiering
from optim_cpu import formats
from optim_cpu.formats import round_parameters
from tests.zero3.plain import STREAMED, Tower, inputs, update
from tests.zero3.scales import CLIP, FORMATS

Start = Callable[..., Any]
Differing = Callable[[dict[str, Tensor], dict[str, Tensor]], list[str]]

PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "a share on nvme": {"offload_optimizer": "nvme", "ratio": 0.4, "cache_in_host": False},
    "nvme": {**STREAMED, "sub_group_size": 1},
}
NAME = "blocks.1.1.weight"


def same_bits(first: Tensor, other: Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("state", FORMATS)
def test_what_is_set_by_name_is_what_is_got(start: Start, state: str, place: dict[str, Any]) -> None:
    """A master to the bit in every format; a moment as a bf16 holds it, rounded to the nearest, ties away from 0."""
    engine = start(Tower(), accumulation=1, threshold=0, state=state, **place)
    x = next(inputs(1))
    before = engine.master_state_dict()
    generator = torch.Generator().manual_seed(8)
    shape = before[NAME].shape
    values, moments = (torch.randn(shape, generator=generator) for _ in range(2))
    values.view(-1)[:4] = (
        torch.tensor([0x3F808000, 0x3F818000, 0x7F800000, 0x00000001]).int().view(torch.float32)
    )
    moments.view(-1)[:2] = values.view(-1)[:2]  # ties

    engine.set_fp32_parameter(NAME, values)
    assert same_bits(engine.get_fp32_parameter(NAME), values)
    rounded = torch.empty(shape, dtype=torch.bfloat16)
    round_parameters(values, rounded)
    assert same_bits(engine.state_dict()[NAME], rounded)
    others = engine.master_state_dict()
    assert [name for name in before if not same_bits(before[name], others[name])] == [NAME]

    for key in engine.state_names:
        engine.set_fp32_state(NAME, key, moments)
        in_bf16 = torch.empty(shape, dtype=torch.bfloat16)
        round_parameters(moments, in_bf16)
        expected = in_bf16.float() if "bf16" in state else moments
        assert same_bits(engine.get_fp32_state(NAME, key), expected)
    assert same_bits(engine.get_fp32_parameter(NAME), values)

    engine.set_fp32_parameter(NAME, before[NAME])
    engine.backward(engine(x))
    gradient = torch.randn(shape, generator=generator).bfloat16().float()
    engine.set_fp32_gradient(NAME, gradient)
    assert same_bits(engine.get_fp32_gradient(NAME), gradient)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("state", FORMATS)
def test_training_goes_on_from_what_was_set(
    start: Start, state: str, place: dict[str, Any], differing: Differing
) -> None:
    """Masters and state of one run, put into another, make it the same run."""

    def begin() -> Any:
        torch.manual_seed(21)
        return start(Tower(), accumulation=1, threshold=0, clip=CLIP, state=state, **place)

    first, other = begin(), begin()
    batches = list(inputs(4))
    for x in batches[:2]:
        update(first, x)
    for name, master in first.master_state_dict().items():
        other.set_fp32_parameter(name, master)
        for key in first.state_names:
            other.set_fp32_state(name, key, first.get_fp32_state(name, key))
    other.optimizer.steps.update(first.optimizer.steps)
    assert [update(first, x) for x in batches[2:]] == [update(other, x) for x in batches[2:]]
    assert differing(first.master_state_dict(), other.master_state_dict()) == []
    assert differing(first.state_dict(), other.state_dict()) == []


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("state", FORMATS)
def test_parameters_are_their_masters_rounded(start: Start, state: str, place: dict[str, Any]) -> None:
    engine = start(Tower(), accumulation=1, threshold=0, state=state, **place)
    for n, x in enumerate(inputs(3)):
        update(engine, x, skip=n)
    weights = engine.state_dict()
    for name, master in engine.master_state_dict().items():
        rounded = torch.empty_like(weights[name])
        round_parameters(master, rounded)
        assert same_bits(weights[name], rounded), name
        assert not same_bits(rounded.float(), master), name


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("state", FORMATS)
def test_an_edit_leaves_the_other_elements_their_bits(
    start: Start, state: str, place: dict[str, Any]
) -> None:
    """``gathered(modify=True)``: changed elements become their master, whatever its lower half was."""
    engine = start(Tower(), accumulation=1, threshold=0, state=state, **place)
    for x in inputs(2):
        update(engine, x)
    before = engine.get_fp32_parameter(NAME)
    param = engine.module.get_parameter(NAME)
    with tiering.gathered(param, modify=True), torch.no_grad():
        param[3] = 0.5
        param[4] *= 2
    after = engine.get_fp32_parameter(NAME)
    expected = before.clone()
    expected[3] = 0.5
    weights = torch.empty_like(before, dtype=torch.bfloat16)
    round_parameters(before, weights)
    expected[4] = (weights[4] * 2).float()
    assert same_bits(after, expected)
    assert not same_bits(before, weights.float())


@pytest.mark.parametrize("place", ["device", "nvme"])
def test_an_edit_through_data_inside_gathered_costs_a_split_master_nothing(
    start: Start, place: str, differing: Differing
) -> None:
    """What .data gives there is the copy that gathered shows: later steps need not suspect the parameter."""
    after = []
    for state in ("fp32", "split"):
        torch.manual_seed(41)
        engine = start(Tower(), accumulation=1, threshold=0, state=state, **PLACES[place])
        param = engine.module.get_parameter(NAME)
        batches = list(inputs(4))
        for x in batches[:2]:
            update(engine, x)
        with tiering.gathered(param, modify=True):
            param.data[3] = 0.5
        for x in batches[2:]:
            update(engine, x)
        after.append(engine.master_state_dict())
    assert differing(after[1], after[0]) == []


@pytest.mark.parametrize("state", FORMATS[1:])
def test_an_edit_in_place_costs_a_split_master_its_lower_half(
    start: Start, state: str, differing: Differing, caplog: pytest.LogCaptureFixture
) -> None:
    """Parameter and upper half are one: nothing tells which elements were edited. The same wherever it lives."""
    after = []
    for place in PLACES.values():
        caplog.clear()
        torch.manual_seed(41)
        engine = start(Tower(), accumulation=1, threshold=0, state=state, **place)
        layer = engine.module.get_submodule(NAME.rpartition(".")[0])

        def edit(module: nn.Linear, args: Any) -> None:
            with torch.no_grad():
                module.weight[3].fill_(0.5)

        batches = list(inputs(4))
        for x in batches[:2]:
            update(engine, x)
        before = engine.get_fp32_parameter(NAME)
        handle = layer.register_forward_pre_hook(edit)
        with torch.no_grad():
            engine(batches[2])
        handle.remove()
        update(engine, batches[3], skip=1)  # the step leaves this block alone, and finds the edit
        master, weights = engine.get_fp32_parameter(NAME), engine.state_dict()[NAME]
        assert (master[3] == 0.5).all()
        assert same_bits(master[4:], weights[4:].float()) == ("split" in state)
        assert same_bits(master[4:], before[4:]) != ("split" in state)
        assert caplog.text.count(f"'{NAME}' was edited in place with a split state") == ("split" in state)
        after.append(engine.master_state_dict())
    assert differing(after[1], after[0]) == differing(after[2], after[0]) == []


@pytest.mark.parametrize("state", FORMATS)
def test_a_planted_bit_is_one_of_one_master(start: Start, state: str) -> None:
    engine = start(Tower(), accumulation=1, threshold=0, state=state, **STREAMED)
    before = engine.master_state_dict()
    where = engine.flip_bit()
    after = engine.master_state_dict()
    (changed,) = [name for name in before if not same_bits(before[name], after[name])]
    assert repr(changed) in where
    flipped = before[changed].view(torch.int32) ^ after[changed].view(torch.int32)
    assert int((flipped != 0).sum()) == 1


def test_the_master_of_a_split_parameter_starts_from_the_original_values(start: Start) -> None:
    for place in PLACES.values():
        model = Tower()
        original = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine = start(model, state="split", **place)
        masters, weights = engine.master_state_dict(), engine.state_dict()
        for name, values in original.items():
            assert same_bits(masters[name], values), name
            assert same_bits(weights[name], formats.split(values)[0]), name


@pytest.mark.parametrize("state", FORMATS[1:])
def test_a_step_that_is_skipped_changes_no_format(start: Start, state: str, differing: Differing) -> None:
    engine = start(Tower(), accumulation=1, threshold=0, state=state, **PLACES["nvme"])
    batches = list(inputs(3))
    update(engine, batches[0])

    def everything() -> dict[str, Tensor]:
        masters = engine.master_state_dict()
        moments = {f"{n}: {k}": engine.get_fp32_state(n, k) for n in masters for k in engine.state_names}
        weights = {f"{name} itself": value for name, value in engine.state_dict().items()}
        return masters | moments | weights

    before = everything()
    update(engine, batches[1] * float("inf"))
    assert engine.skipped_steps == 1
    assert differing(everything(), before) == []
    update(engine, batches[2])
    assert differing(everything(), before)
