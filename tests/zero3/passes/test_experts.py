"""Frozen experts are fetched when a pass calls them, and only those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.zero3.experts import EXPERTS, LAYERS, WIDTH, ExpertBlock, drawn_routes, expert_model
from tests.zero3.inside import wait_for_transfers
from zero3.deepspeed.leaves import set_z3_leaf_modules
from zero3.params.param_group import Residency

PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "nvme": {"offload_param": "nvme", "cache_in_host": False},
    "nvme, nothing ahead": {"offload_param": "nvme", "cache_in_host": False, "prefetch": 0},
    "nvme, much ahead": {"offload_param": "nvme", "cache_in_host": False, "prefetch": 10**5},
    "nvme, part cached": {"offload_param": "nvme", "host_budget": "300KiB"},
}
HABIT: dict[str, Any] = {"accumulation": 1, "threshold": 600, "prefetch": 1}
EXPERT_BYTES = 2 * 2 * WIDTH * 2 * WIDTH


def read_bytes(engine: Any) -> int:
    wait_for_transfers(engine)
    return sum(path.read.bytes for path in engine.snapshot().io)


def passes(engine: Any, routes: list[list[list[int]]], *, training: bool) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for chosen in routes:
        x = torch.randn(3, WIDTH, generator=generator).to(torch.bfloat16)
        if training:
            loss = engine(x, chosen)
            engine.backward(loss)
            engine.step()
        else:
            with torch.no_grad():
                loss = engine(x, chosen)
        losses.append(loss.item())
    return losses


def check_alike(start: Callable[..., Any], places: list[str], *, count: int, checkpointed: bool) -> None:
    """``count`` passes with few experts, as many with all, and with few again: all values have the same bits."""
    few, every = drawn_routes(count), [[list(range(EXPERTS))] * LAYERS] * count
    results = []
    for place in places:
        engine = start(expert_model(checkpointed=checkpointed), **{**HABIT, **PLACES[place]})
        losses = passes(engine, few + every + few, training=True)
        losses += passes(engine, few + every + few, training=False)
        results.append((losses, engine.master_state_dict() | engine.state_dict()))
    for losses, values in results[1:]:
        assert losses == results[0][0]
        assert [name for name in values if not torch.equal(values[name], results[0][1][name])] == []


def test_passes_with_other_experts_compute_the_same_bits(start: Callable[..., Any]) -> None:
    check_alike(start, ["device", "nvme"], count=1, checkpointed=False)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True], ids=["saved", "checkpointed"])
def test_passes_with_other_experts_compute_the_same_bits_everywhere(
    start: Callable[..., Any], checkpointed: bool
) -> None:
    check_alike(start, list(PLACES), count=3, checkpointed=checkpointed)


def dense_bytes(engine: Any) -> int:
    """Bytes of the groups that move and are no experts."""
    return sum(
        group.layout.numel * group.dtype.itemsize
        for group in engine._groups
        if group.moves and group.routing is None
    )


@pytest.mark.parametrize(
    ("place", "training"),
    [
        ("nvme", True),
        ("nvme, much ahead", False),
        pytest.param("nvme", False, marks=pytest.mark.slow),
        pytest.param("nvme, much ahead", True, marks=pytest.mark.slow),
        pytest.param("nvme, nothing ahead", True, marks=pytest.mark.slow),
    ],
)
def test_a_pass_reads_the_experts_that_it_calls_and_no_others(
    start: Callable[..., Any], place: str, training: bool
) -> None:
    engine = start(expert_model(), **{**HABIT, **PLACES[place]})
    experts = [group for group in engine._groups if group.routing is not None]
    assert len(experts) == LAYERS * EXPERTS
    assert {group.layout.numel * 2 for group in experts} == {EXPERT_BYTES}
    passes(engine, drawn_routes(3), training=training)
    before = read_bytes(engine)
    passes(engine, drawn_routes(5, chosen=3), training=training)
    uses = 2 if training else 1
    assert read_bytes(engine) - before == 5 * uses * (dense_bytes(engine) + LAYERS * 3 * EXPERT_BYTES)


def test_layers_that_are_fetched_ahead_leave_room_for_an_expert(start: Callable[..., Any]) -> None:
    """Behind a block of experts are layers that would fill the device, and then have to be read again."""

    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = expert_model().layers[0]
            self.layers = nn.ModuleList([block, *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(12))])
            self.requires_grad_(False)

        def forward(self, x: torch.Tensor, routes: list[list[int]]) -> torch.Tensor:
            x = self.layers[0](x, routes[0])
            for layer in self.layers[1:]:
                x = layer(x)
            return x.float().pow(2).mean()

    engine = start(Tail(), rule=None, **{**HABIT, **PLACES["nvme, much ahead"], "prefetch": 2 * 10**4})
    passes(engine, drawn_routes(3), training=False)
    before = read_bytes(engine)
    passes(engine, drawn_routes(4, chosen=3), training=False)
    assert read_bytes(engine) - before == 4 * (dense_bytes(engine) + 3 * EXPERT_BYTES)
    # The tail does not fit beside the block and an expert.
    assert engine.plan.working_bytes < dense_bytes(engine) + EXPERT_BYTES


def test_experts_that_two_passes_have_all_used_are_fetched_ahead(start: Callable[..., Any]) -> None:
    """And the dense part of the next block is fetched while the experts of the block before it are called."""
    engine = start(expert_model(), **{**HABIT, **PLACES["nvme, much ahead"]})
    group_of = {entry: group for group in engine._groups for entry in group.entries if group.moves}
    first, second = engine.module.layers[:2]
    ahead: list[tuple[bool, bool]] = []

    def look(*_: object) -> None:
        watched = group_of[first.experts[1]], group_of[second]
        ahead.append(tuple(group.residency is not Residency.SHARDED for group in watched))

    first.experts[0].register_forward_pre_hook(look)
    every = [list(range(EXPERTS))] * LAYERS
    few = [[0, 1]] * LAYERS
    passes(engine, [few, few, few, every, every, every, few, every], training=False)
    # The order is recorded in the first pass. Experts that are fetched ahead come before the next block.
    assert ahead == [(False, False), *[(False, True)] * 4, (True, False), (True, False), (False, True)]


def test_experts_in_a_leaf_module_are_fetched_together(start: Callable[..., Any]) -> None:
    model = expert_model()
    set_z3_leaf_modules(model, [ExpertBlock])
    engine = start(model, **{**HABIT, **PLACES["nvme"]})
    assert not any(group.routing for group in engine._groups)
    passes(engine, drawn_routes(2), training=False)
    before = read_bytes(engine)
    passes(engine, drawn_routes(2), training=False)
    assert read_bytes(engine) - before == 2 * dense_bytes(engine) > 2 * LAYERS * EXPERTS * EXPERT_BYTES
