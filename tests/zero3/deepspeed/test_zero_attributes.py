"""The attributes ds_... of parameters, which scripts for DeepSpeed read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import tiering
from tests.zero3.plain import STREAMED, differing
from tiering.runtime.zero.partition_parameters import ZeroParamStatus

Start = Callable[..., Any]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme": STREAMED,
}


def maybe_zero_3(param: Any) -> Tensor:
    """As scripts have it that save adapters themselves."""
    if hasattr(param, "ds_id"):
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with tiering.zero.GatheredParameters([param]):
            return param.data.detach().cpu().clone()
    return param.detach().cpu().clone()


@pytest.mark.parametrize("place", PLACEMENTS)
def test_what_scripts_read_of_deepspeeds_parameters(start: Start, place: str) -> None:
    engine = start(**PLACEMENTS[place])
    moves = {
        name
        for group in engine._groups
        if group.moves
        for name in (piece.name for piece in group.layout.pieces)
    }
    assert bool(moves) is (place == "nvme")
    for name, param in engine.module.named_parameters():
        expected = ZeroParamStatus.NOT_AVAILABLE if name in moves else ZeroParamStatus.AVAILABLE
        assert param.ds_status is expected, name
        assert (param.ds_shape, param.ds_numel) == (param.shape, param.numel())
        assert param.partition_numel() == param.numel()
        assert hasattr(param, "ds_id") is (name in moves)
        with pytest.raises(AttributeError):
            param.ds_status = ZeroParamStatus.AVAILABLE
        with tiering.gathered(param):
            assert param.ds_status is ZeroParamStatus.AVAILABLE and not hasattr(param, "ds_id")
    found = {name: maybe_zero_3(param) for name, param in engine.module.named_parameters()}
    weights = engine.state_dict()
    assert differing(found, {name: weights[name] for name in found}) == []
    identities = [param.ds_id for param in engine.module.parameters() if hasattr(param, "ds_id")]
    assert len(set(identities)) == len(identities)
    engine.release()
    assert not any(hasattr(param, "ds_status") for param in engine.module.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_parameters_are_whole(start: Start, stage: int) -> None:
    param = start(stage=stage).module.norm.weight
    assert not any(hasattr(param, name) for name in ("ds_id", "ds_status", "ds_shape", "ds_numel"))


def test_parameters_of_zero_init(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiering.zero.Init():
        layer = nn.Linear(3, 2)
    assert layer.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE and hasattr(layer.weight, "ds_id")
    assert (layer.weight.ds_shape, layer.weight.ds_numel) == ((2, 3), 6)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert layer.weight.partition_numel() == 2
    with tiering.gathered(layer.weight):
        assert layer.weight.ds_status is ZeroParamStatus.AVAILABLE
    assert layer.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
