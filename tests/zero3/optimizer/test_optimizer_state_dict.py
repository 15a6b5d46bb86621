"""What ``optimizer.state_dict()`` holds of an engine's optimizer, and into which engines it can be loaded."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zero3.plain import STREAMED, Tower, differing, inputs, update
from tiering.errors import EngineStateError

Start = Callable[..., Any]
PLACED = pytest.mark.parametrize("placement", [{}, STREAMED], ids=["device", "nvme"])


def begin(start: Start, placement: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(5)
    return start(Tower(), precision="bf16", accumulation=1, threshold=0, **options, **placement)


def round_trip(state: dict[str, Any]) -> Any:
    """``state`` as a script finds it in its file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@PLACED
def test_options_are_loaded_after_the_checkpoint_and_not_without(
    start: Start, tmp_path: Path, placement: dict[str, Any]
) -> None:
    batches = list(inputs(5))
    engine = begin(start, placement)
    for x in batches[:3]:
        update(engine, x)
    engine.optimizer.param_groups[0]["lr"] = 0.5
    saved = round_trip(engine.optimizer.state_dict())
    engine.optimizer.param_groups[0]["lr"] = 1e-3
    engine.save_checkpoint(tmp_path / "saved")
    engine.optimizer.load_state_dict(saved)
    for x in batches[3:]:
        update(engine, x)
    straight = engine.master_state_dict()

    resumed = begin(start, placement)
    with pytest.raises(EngineStateError, match=r"of step 3.*has 0.*engine\.load_checkpoint"):
        resumed.optimizer.load_state_dict(saved)
    assert resumed.optimizer.param_groups[0]["lr"] == 1e-3
    resumed.load_checkpoint(tmp_path / "saved")
    resumed.optimizer.load_state_dict(saved)
    assert resumed.optimizer.param_groups[0]["lr"] == 0.5
    for x in batches[3:]:
        update(resumed, x)
    assert differing(resumed.master_state_dict(), straight) == []
    with pytest.raises(EngineStateError, match="of step 3"):
        resumed.optimizer.load_state_dict(saved)


@PLACED
def test_options_alone_can_be_loaded(start: Start, placement: dict[str, Any]) -> None:
    """Of a fresh engine, without the mark, and of a rule that keeps no state."""
    fresh = begin(start, placement)
    fresh.optimizer.load_state_dict(round_trip(fresh.optimizer.state_dict()))
    update(fresh, next(inputs(1)))
    saved = round_trip(fresh.optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    del saved["tiers"]
    other = begin(start, placement)
    other.optimizer.load_state_dict(saved)
    assert other.optimizer.param_groups[0]["lr"] == 0.25

    stateless = begin(start, placement, rule="SGD", optimizer={"lr": 0.1})
    update(stateless, next(inputs(1)))
    begin(start, placement, rule="SGD").optimizer.load_state_dict(
        round_trip(stateless.optimizer.state_dict())
    )
