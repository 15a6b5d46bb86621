"""How much of the device's room a run takes: the formula of the plan, met to the byte and never exceeded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tiering.config.training import format_size
from tiering.storage.arena import PAGE, round_up
from tiering.telemetry import ActivationStatus
from zero3.observe.run_record import RunIdentity, RunRecord

WIDTH, BLOCKS = 64, 6
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
BLOCK = round_up(WIDTH * WIDTH * 2)  # bytes in bf16
OUTER = round_up(2 * WIDTH * WIDTH * 2)


class Stack(nn.Module):
    """Equal blocks; ``outer``: and a group around them, which is unsharded all the while."""

    def __init__(self, *, outer: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.small = nn.Parameter(torch.ones(8))
        self.around = nn.Parameter(torch.ones(2 * WIDTH, WIDTH) / WIDTH) if outer else None

    def forward(self, x: Tensor) -> Tensor:
        if self.around is not None:
            x = (x @ self.around.T)[:, :WIDTH]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x * self.small.repeat(WIDTH // 8)).float().square().mean()


def run(engine: Any, steps: int = 3) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(4, WIDTH, dtype=torch.bfloat16)))
        engine.step()


def used_bytes(engine: Any) -> int:
    """The most bytes of unsharded groups, those fetched ahead included, at one time."""
    most: int = engine._tiers.working.peak
    return most


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 2, 3, 50])
def test_the_peak_is_the_persistent_groups_and_the_deepest_chain_and_the_prefetch(
    start: Callable[..., Any], outer: bool, ahead: int
) -> None:
    """Prefetch counts elements, as DeepSpeed does; whole blocks are used of them."""
    engine = start(
        Stack(outer=outer), accumulation=1, threshold=100, prefetch=ahead * WIDTH * WIDTH, **STREAMED
    )
    run(engine)
    around = OUTER if outer else 0
    everything = around + BLOCKS * BLOCK
    assert engine.plan.working_bytes == min(everything, around + BLOCK + ahead * BLOCK)
    assert used_bytes(engine) == engine.plan.working_bytes, "room that was planned is not used"
    (device,) = [tier for tier in engine.snapshot().tiers if tier.name == "device"]
    assert device.peak == engine.plan.working_bytes + PAGE  # the small parameter's page


def test_the_next_block_is_fetched_however_small_the_prefetch(start: Callable[..., Any]) -> None:
    engine = start(Stack(outer=True), accumulation=1, threshold=100, prefetch=1, **STREAMED)
    run(engine)
    assert engine.plan.working_bytes == used_bytes(engine) == OUTER + 2 * BLOCK


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_the_device_budget_caps_the_prefetch(start: Callable[..., Any], spare: int) -> None:
    budget = PAGE + OUTER + (1 + spare) * BLOCK
    engine = start(
        Stack(outer=True), accumulation=1, threshold=100, prefetch=10**6, device_budget=budget, **STREAMED
    )
    run(engine)
    assert engine.plan.working_bytes == used_bytes(engine) == budget - PAGE


def test_evaluation_and_generation_take_no_more(start: Callable[..., Any]) -> None:
    engine = start(Stack(outer=True), accumulation=1, threshold=100, prefetch=WIDTH * WIDTH, **STREAMED)
    run(engine)
    with torch.no_grad():
        for _ in range(3):
            engine(torch.ones(1, WIDTH, dtype=torch.bfloat16))
    run(engine)
    assert used_bytes(engine) == OUTER + 2 * BLOCK


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_checkpoints_its_own_forward_takes_no_more(
    start: Callable[..., Any], reentrant: bool
) -> None:
    """As transformers does: forward is wrapped, so that hooks stay outside, and none runs in the recomputation."""
    model = Stack(outer=False)
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
    engine = start(model, accumulation=1, threshold=100, prefetch=0, **STREAMED)
    for _ in range(3):
        x = torch.ones(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        engine.backward(engine(x))
        engine.step()
    assert used_bytes(engine) == BLOCK


ROW = 4 * WIDTH * 2  # bytes of an activation in bf16
# The input and what each tanh gives, the small parameter repeated, and the square in fp32.
KEPT = (1 + BLOCKS) * ROW + WIDTH * 2 + 2 * ROW


def activations(engine: Any) -> Any:
    return engine._schedule._saved.activations


@pytest.mark.parametrize(
    ("placement", "again"), [(STREAMED, KEPT), ({}, 0)], ids=["by hooks", "by the graph"]
)
def test_activations_are_what_autograd_keeps_and_gone_with_it(
    start: Callable[..., Any], placement: dict[str, Any], again: int
) -> None:
    engine = start(Stack(outer=False), accumulation=1, threshold=100, **placement)
    counted = activations(engine)
    for expected in (KEPT, again, again):
        loss = engine(torch.ones(4, WIDTH, dtype=torch.bfloat16))
        counted.backward_of(loss)
        assert (counted.used, counted.peak) == (expected, KEPT)
        engine.backward(loss)
        engine.step()
        del loss
        assert (counted.used, counted.peak) == (0, KEPT)


@pytest.mark.parametrize(
    ("placement", "nbytes"), [(STREAMED, KEPT), ({}, KEPT - ROW)], ids=["by hooks", "by the graph"]
)
def test_checkpointed_activations_are_not_recomputed_to_be_counted(
    start: Callable[..., Any], placement: dict[str, Any], nbytes: int
) -> None:
    """The graph does not show what checkpointing itself holds: here, of all that is kept, the first input."""
    model, ran = Stack(outer=False), []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: ran.append(1))
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    engine = start(model, accumulation=1, threshold=100, prefetch=0, **placement)
    loss = engine(torch.ones(4, WIDTH, dtype=torch.bfloat16, requires_grad=True))
    calls, counted = len(ran), activations(engine)
    counted.backward_of(loss)
    assert len(ran) == calls
    assert counted.used == nbytes
    engine.backward(loss)
    del loss
    assert (counted.used, counted.peak) == (0, nbytes)


def test_activations_are_shown_beside_the_tiers_and_told_after_the_first_step(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(Stack(outer=False), accumulation=1, threshold=100, **STREAMED)
    record = RunRecord(RunIdentity("beside"), engine._tiers, activations(engine))
    caplog.set_level("INFO", "zero3.observe.run_record")
    loss = engine(torch.ones(4, WIDTH, dtype=torch.bfloat16))
    assert record.snapshot().activations == ActivationStatus(used=KEPT, peak=KEPT)
    engine.backward(loss)
    engine.step()
    del loss
    caplog.clear()
    for _ in range(2):
        record.end_step()
    assert record.snapshot().activations == ActivationStatus(used=0, peak=KEPT)
    (message,) = [line.message for line in caplog.records if line.name == "zero3.observe.run_record"]
    assert (
        message == f"in addition to the tiers, activations of the first step took up to {format_size(KEPT)}"
    )
