"""load_state_dict and copy_ on parameters whose values are elsewhere: stored as torch would, on every placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tiering
from tests.zero3.conftest import SmallModel, batches
from tests.zero3.plain import STREAMED, differing
from tiering.config.fields import format_size
from tiering.errors import EngineStateError, PlacementError, ResidencyError
from zero3.state import whole_copies

Start = Callable[..., Any]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme": {**STREAMED, "threshold": 0},
    "split": {**STREAMED, "threshold": 0, "state": "split"},
}
EVERYWHERE = pytest.mark.parametrize("place", PLACEMENTS)


class Buffered(SmallModel):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))


def built() -> Buffered:
    torch.manual_seed(3)
    return Buffered()


def values(seed: int = 5) -> dict[str, Tensor]:
    """A state_dict in fp32, with the tie."""
    torch.manual_seed(seed)
    state = {name: torch.randn_like(value) for name, value in Buffered().state_dict().items()}
    state["head.weight"] = state["embedding.weight"]
    return state


def train(engine: Any, steps: int = 1) -> None:
    for tokens, targets in batches(steps):
        engine.backward(engine(tokens, targets))
        engine.step()


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("place", "precision"),
    # "split" is a format of 16-bit parameters.
    [(place, "bf16") for place in PLACEMENTS] + [(place, "fp32") for place in PLACEMENTS if place != "split"],
)
@pytest.mark.parametrize("through", ["model", "module front"])
def test_values_are_loaded_in_training(start: Start, place: str, precision: str, through: str) -> None:
    """The next step is bit-equal to that of a model that was built with them; moments stay."""
    options = {"precision": precision, "accumulation": 1}
    engine = start(built(), **options, **PLACEMENTS[place])
    train(engine)
    moment = engine.get_fp32_state("blocks.0.up.weight", "exp_avg")
    loader = engine.module if through == "model" else engine.as_module()
    result = loader.load_state_dict(values())
    assert result.missing_keys == [] and result.unexpected_keys == []
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    expected = {name: value if name == "count" else value.to(dtype) for name, value in values().items()}
    assert differing(engine.state_dict(), expected) == []
    assert differing(dict(loader.state_dict()), expected) == []
    for name, master in engine.master_state_dict().items():
        torch.testing.assert_close(master, expected[name].float(), rtol=2**-8, atol=0)
    assert torch.equal(engine.get_fp32_state("blocks.0.up.weight", "exp_avg"), moment)

    resident = start(built(), **options, state="split" if place == "split" else "fp32")
    train(resident)
    resident.module.load_state_dict(values())
    train(engine, 2)
    train(resident, 2)
    assert differing(engine.master_state_dict(), resident.master_state_dict()) == []


@EVERYWHERE
def test_a_part_of_the_names(start: Start, place: str) -> None:
    """As adapters are loaded; the other parameters keep every bit of their masters."""
    engine = start(built(), accumulation=1, **PLACEMENTS[place])
    train(engine)
    before = engine.master_state_dict()
    part = {name: value for name, value in values().items() if name.startswith("blocks.1.")}
    result = engine.module.load_state_dict(part | {"absent": torch.zeros(1)}, strict=False)
    assert result.unexpected_keys == ["absent"]
    after = engine.master_state_dict()
    assert set(differing(after, before)) == set(part)
    weights = engine.state_dict()
    assert all(torch.equal(weights[name], value.bfloat16()) for name, value in part.items())


@EVERYWHERE
def test_what_does_not_match_is_refused_as_by_torch(start: Start, place: str) -> None:
    engine = start(built(), **PLACEMENTS[place])
    before = engine.master_state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict"):
        engine.as_module().load_state_dict({}, strict=True)
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.up\.weight"):
        engine.as_module().load_state_dict({"blocks.0.up.weight": torch.zeros(2, 3)}, strict=False)
    assert differing(engine.master_state_dict(), before) == []


def test_copy_broadcasts_rounds_and_returns_the_parameter(start: Start) -> None:
    engine = start(**STREAMED)
    weight = engine.module.blocks[0].up.weight
    with torch.no_grad():
        assert weight.copy_(torch.tensor(1 / 3)) is weight
    master = engine.get_fp32_parameter("blocks.0.up.weight")
    assert torch.equal(master, torch.full((192, 48), 1 / 3).bfloat16().float())
    with torch.no_grad(), pytest.raises(RuntimeError, match="expanded size"):
        weight.copy_(torch.zeros(5))
    with pytest.raises(ResidencyError, match=r"copy of 'blocks\.0\.up\.weight'"):
        weight.copy_(torch.zeros(192, 48))
    with torch.no_grad(), pytest.raises(ResidencyError):
        weight.copy_(engine.module.blocks[1].up.weight)


def test_nothing_is_stored_inside_gathered_of_another_parameter(start: Start) -> None:
    engine = start(**STREAMED)
    with (
        tiering.gathered(engine.module.position.weight),
        torch.no_grad(),
        pytest.raises(EngineStateError, match=r"cannot be set inside gathered\(\)"),
    ):
        engine.module.blocks[0].up.weight.copy_(torch.zeros(192, 48))


@EVERYWHERE
def test_copies_that_do_not_fit_are_refused(
    start: Start, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sizes, before anything is read; the engine goes on, and exports need no room."""
    engine = start(built(), accumulation=1, **PLACEMENTS[place])
    numel = sum(param.numel() for param in engine.module.parameters())
    monkeypatch.setattr(whole_copies, "available_memory", lambda: 10 << 10)
    refused = (
        r"state_dict\(\) needs \S+ KiB of host memory for copies of the parameters, but 10\.00 KiB are free\. Save the"
        r" model without copies: engine\.save_checkpoint"
    )
    if place in ("device", "cpu"):
        # The parameters are in memory already.
        assert len(engine.module.state_dict()) == 24
    else:
        with pytest.raises(PlacementError, match=refused) as refusal:
            engine.as_module().state_dict()
        assert f"needs {format_size(2 * numel)} of host memory" in str(refusal.value)
        # A part that fits.
        assert len(engine.module.blocks[0].norm.state_dict()) == 2
    with pytest.raises(PlacementError, match=refused):
        engine.state_dict()
    with pytest.raises(PlacementError, match=r"master_state_dict\(\) needs"):
        engine.master_state_dict()
    train(engine)
    assert engine.global_steps == 1
