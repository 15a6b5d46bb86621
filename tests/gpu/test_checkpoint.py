"""A run that is ended after a save and goes on from it, on a GPU: the bits of one that was never ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import DEVICE

pytestmark = pytest.mark.gpu

PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "all on nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
    "part cached": {"offload_param": "nvme", "offload_optimizer": "nvme", "host_budget": "6MiB"},
    "split": {"offload_optimizer": "cpu", "state": "split+bf16"},
}
STEPS, SAVED_AFTER = 6, 3


def trained(engine: Any, batches: list[Any]) -> list[float]:
    losses = []
    for tokens, targets in batches:
        loss = engine(tokens, targets)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    masters = engine.master_state_dict()
    return masters | {
        f"{name} {kind}": engine.get_fp32_state(name, kind) for name in masters for kind in engine.state_names
    }


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_ended(
    start: Callable[..., Any],
    micro_batches: Callable[..., Any],
    tmp_path: Path,
    placement: str,
    background: bool,
) -> None:
    batches = list(micro_batches(STEPS))
    first = start(**PLACEMENTS[placement])
    trained(first, batches[:SAVED_AFTER])
    torch.cuda.manual_seed(7)
    saving = first.save_checkpoint(tmp_path / "saves", background=background)
    after = torch.rand(4, device=DEVICE)
    straight = trained(first, batches[SAVED_AFTER:])
    saving.wait()
    expected = state_of(first)
    first.close()

    torch.cuda.manual_seed(8)
    torch.manual_seed(8)
    second = start(**PLACEMENTS[placement])
    path, _ = second.load_checkpoint(tmp_path / "saves")
    assert path is not None
    assert torch.equal(torch.rand(4, device=DEVICE), after), "the GPU draws other numbers"
    assert trained(second, batches[SAVED_AFTER:]) == straight
    state = state_of(second)
    assert state.keys() == expected.keys()
    assert [name for name in state if not torch.equal(state[name], expected[name])] == []
