"""Against a plain PyTorch loop the difference is rounding only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optim_cpu.formats import split

STEPS, LR, DECAY = 5, 1e-3, 0.1
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}


def plain_fp32(model: nn.Module, micro_batches: Any, accumulation: int, **adamw: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, **adamw)
    losses = []
    for number, (tokens, targets) in enumerate(micro_batches, start=1):
        loss = model(tokens, targets)
        losses.append(loss.item())
        (loss / accumulation).backward()
        if number % accumulation == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.95)])
def test_fp32_differs_by_rounding(
    train: Callable[..., Any],
    small_model: type[nn.Module],
    micro_batches: Callable[..., Any],
    accumulation: int,
    betas: tuple[float, float],
) -> None:
    torch.manual_seed(3)
    model = small_model()
    losses = plain_fp32(model, micro_batches(STEPS * accumulation), accumulation, betas=betas)
    run = train(
        STEPS, precision="fp32", accumulation=accumulation, optimizer={"betas": list(betas)}, **STREAMED
    )
    assert run.losses == pytest.approx(losses, rel=1e-5)
    for name, parameter in model.named_parameters():
        # An element whose gradient is rounding noise may step either way, by lr at most.
        difference = (run.masters[name] - parameter.detach()).abs()
        assert float(difference.max()) <= 2 * LR * STEPS
        assert float((difference > 1e-5).float().mean()) < 0.01, name


def test_bf16_keeps_fp32_masters_as_a_plain_loop_would(
    train: Callable[..., Any], small_model: type[nn.Module], micro_batches: Callable[..., Any]
) -> None:
    torch.manual_seed(3)
    model = small_model()
    masters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    model.bfloat16()
    optimizer = torch.optim.AdamW(masters.values(), lr=LR, weight_decay=DECAY)
    losses = []
    for tokens, targets in micro_batches(STEPS):
        loss = model(tokens, targets)
        losses.append(loss.item())
        loss.backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            masters[name].grad = p.grad.float()
            p.grad = None
        nn.utils.clip_grad_norm_(masters.values(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    run = train(STEPS, accumulation=1, **STREAMED)
    assert run.losses == pytest.approx(losses, rel=2e-3)
    for name, master in masters.items():
        assert float((run.masters[name] - master.detach()).abs().max()) <= 2 * LR * STEPS, name
        assert torch.equal(run.weights[name], split(run.masters[name])[0]), name


def test_norm_is_that_of_the_gradients(
    start: Callable[..., Any], small_model: type[nn.Module], micro_batches: Callable[..., Any]
) -> None:
    torch.manual_seed(3)
    model = small_model()
    for tokens, targets in micro_batches(2):
        (model(tokens, targets) / 2).backward()
    expected = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]).norm()
    engine = start(precision="fp32", **STREAMED)
    assert engine.get_global_grad_norm() is None
    for tokens, targets in micro_batches(2):
        engine.backward(engine(tokens, targets))
        engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(float(expected), rel=1e-6)
