"""Against a plain PyTorch loop on the same GPU the difference is rounding only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optim_cpu.formats import split

from .conftest import DEVICE

pytestmark = pytest.mark.gpu

STEPS, LR, DECAY = 5, 1e-3, 0.1
PLACEMENTS = [
    pytest.param({}, id="device"),
    pytest.param({"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}, id="nvme"),
]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_fp32_differs_by_rounding(
    train: Callable[..., Any],
    small_model: type[nn.Module],
    micro_batches: Callable[..., Any],
    placement: dict[str, Any],
    accumulation: int,
) -> None:
    torch.manual_seed(3)
    model = small_model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    losses = []
    for number, (tokens, targets) in enumerate(micro_batches(STEPS * accumulation), start=1):
        loss = model(tokens, targets)
        losses.append(loss.item())
        (loss / accumulation).backward()
        if number % accumulation == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    run = train(STEPS, precision="fp32", accumulation=accumulation, **placement)
    assert run.losses[0] == losses[0], "before the first update there is nothing to differ"
    assert run.losses == pytest.approx(losses, rel=1e-5)
    for name, parameter in model.named_parameters():
        # An element whose gradient is rounding noise may step either way, by lr at most.
        difference = (run.masters[name] - parameter.detach().cpu()).abs()
        assert float(difference.max()) <= 2 * LR * STEPS
        assert float((difference > 1e-5).float().mean()) < 0.01, name


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bf16_keeps_fp32_masters_as_a_plain_loop_would(
    train: Callable[..., Any],
    small_model: type[nn.Module],
    micro_batches: Callable[..., Any],
    placement: dict[str, Any],
) -> None:
    torch.manual_seed(3)
    model = small_model().to(DEVICE)
    masters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    model.bfloat16()

    def round_masters() -> None:
        """As the kernels do: torch takes the even one of two that are equally near, they the larger one."""
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(split(masters[name].detach().cpu())[0])

    round_masters()
    optimizer = torch.optim.AdamW(masters.values(), lr=LR, weight_decay=DECAY)
    losses, norms = [], []
    for tokens, targets in micro_batches(STEPS):
        loss = model(tokens, targets)
        losses.append(loss.item())
        loss.backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            masters[name].grad = p.grad.float()
            p.grad = None
        norms.append(float(nn.utils.clip_grad_norm_(masters.values(), 1.0)))
        optimizer.step()
        round_masters()
    run = train(STEPS, **placement)
    assert run.losses[0] == losses[0]
    assert run.norms[0] == pytest.approx(norms[0], rel=1e-6)
    assert run.losses == pytest.approx(losses, rel=2e-3)
    for name, master in masters.items():
        assert float((run.masters[name] - master.detach().cpu()).abs().max()) <= 2 * LR * STEPS, name
        assert torch.equal(run.weights[name], split(run.masters[name])[0]), name
