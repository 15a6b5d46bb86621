"""Blocks that are called in another order than in the step before: on all ranks alike, or on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tiering.placement.workload import Tier

from .models import WIDTH, Block, Choices, loss_of, vectors
from .pool import Pool
from .training import Batch, Trained, assert_as_emulated, start, train

Ranks = Callable[..., Pool]


class Called(nn.Module):
    """Blocks, and the data say which are called, in which order. One parameter of a block is in no forward."""

    CHECKPOINTS: bool | None = None  # reentrant ones, or others

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(6))
        self.blocks[2].unused = nn.Parameter(torch.ones(WIDTH))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        x = (x.to(self.scale.dtype) * self.scale).requires_grad_()
        for number in order:
            block = self.blocks[number]
            if self.CHECKPOINTS is None or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.CHECKPOINTS)
        return loss_of(x)


class CalledReentrant(Called):
    CHECKPOINTS = True


class CalledAgain(Called):
    CHECKPOINTS = False


AB, BA, BACKWARDS = (0, 1, 2, 3, 4, 5), (3, 4, 5, 0, 1, 2), (5, 4, 3, 2, 1, 0)
TOWERS = Choices(AB, BA, same=True)
PLACES: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2, nvme": {"stage": 2, "offload_optimizer": "nvme", "cache_in_host": False},
    "stage 3, nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
    "stage 3, no prefetch": {"stage": 3, "prefetch": 0},
}
LOOPS: dict[str, dict[str, Any]] = {"": {}, "accumulation": {"accumulation": 2}, "no_sync": {"no_sync": 1}}


class FromStep:
    """All ranks alike, but ``rank`` from micro-batch ``first`` on, which calls blocks as ``order`` says."""

    def __init__(self, rank: int, first: int, order: tuple[int, ...]) -> None:
        self.rank, self.first, self.order = rank, first, order

    def __call__(self, count: int, world_size: int) -> Iterator[list[Batch]]:
        for number, shares in enumerate(vectors(count, world_size)):
            yield [
                (x, self.order if rank == self.rank and number >= self.first else AB)
                for rank, (x,) in enumerate(shares)
            ]


def case_of(data: Any, **options: Any) -> dict[str, Any]:
    return {"build": Called, "data": data, "threshold": 0, "steps": 4, **options}


def test_towers_in_changing_order_train_in_every_stage(ranks: Ranks, nvme: Path) -> None:
    """To the bit as in one process, and so, with one backward per step, as in each other stage."""
    for place in PLACES.values():
        assert_as_emulated(ranks(2), nvme, **case_of(TOWERS, **place))


@pytest.mark.slow
@pytest.mark.parametrize("build", [CalledReentrant, CalledAgain])
@pytest.mark.parametrize("place", ["stage 3", "stage 2", "stage 3, nvme"])
def test_towers_in_changing_order_under_checkpointing(
    ranks: Ranks, nvme: Path, place: str, build: Any
) -> None:
    case = case_of(TOWERS, **PLACES[place], accumulation=2) | {"build": build}
    assert_as_emulated(ranks(2), nvme, **case)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("order", [BACKWARDS, (5, 1, 0, 4)])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("place", PLACES)
def test_an_order_may_change_on_all_ranks_at_any_time(
    ranks: Ranks, nvme: Path, place: str, loop: str, order: tuple[int, ...]
) -> None:
    data = Choices(AB, AB, AB, order, AB, same=True)
    assert_as_emulated(ranks(2), nvme, **case_of(data, **PLACES[place], **LOOPS[loop]))


@pytest.mark.parametrize("place", ["stage 2", "stage 2, nvme", "stage 0", "stage 1"])
def test_one_rank_may_call_blocks_in_its_own_order_where_parameters_are_whole(
    ranks: Ranks, nvme: Path, place: str
) -> None:
    """Between two ranks even gradients that come late lose nothing: a half is exact."""
    assert_as_emulated(ranks(2), nvme, **case_of(FromStep(1, 1, BACKWARDS), **PLACES[place]))


@pytest.mark.slow
def test_every_rank_draws_its_layers_and_one_calls_them_in_its_own_order(ranks: Ranks, nvme: Path) -> None:
    """Late gradients are rounded once more than those of stage 1, which keeps whole ones, and that is all."""
    data = Choices((0, 2, 3), (5, 3, 1), (4,), (1, 2, 0, 5), ())
    for loop in LOOPS.values():
        exact = assert_as_emulated(ranks(3), nvme, **case_of(data, stage=1, **loop))
        for run, expected in zip(
            ranks(3).run(train, nvme, **case_of(data, stage=2, **loop)), exact, strict=True
        ):
            torch.testing.assert_close(run.masters, expected.masters, rtol=1e-5, atol=1e-6)
            assert run.losses == pytest.approx(expected.losses, rel=1e-5)


def needed(rank: int, nvme: Path, **options: Any) -> int:
    with start(nvme, Called, **options) as engine:
        total: int = engine.plan.total(Tier.DEVICE)
        return total


@pytest.mark.slow
def test_the_room_for_gradients_changes_no_bit_of_ranks_with_orders_of_their_own(
    ranks: Ranks, nvme: Path
) -> None:
    """Three ranks, two of which contradict the first: their late gradients meet in the same sums in every room."""
    options = {"threshold": 0, "stage": 2, "precision": "bf16"}
    data = Choices(AB, BACKWARDS, (3, 1, 5, 0, 2))
    usual = max(ranks(3).run(needed, nvme, **options))
    results: list[list[Trained]] = []
    for budget in (3 * usual, 3 * (usual - 1), 300 * usual):
        case = case_of(data, **options, device_budget=f"{budget}") | {"steps": 3}
        results.append(ranks(3).run(train, nvme, **case))
    plans = [
        max(ranks(3).run(needed, nvme, **options, device_budget=f"{budget}"))
        for budget in (3 * usual, 3 * (usual - 1))
    ]
    assert plans[1] < plans[0] == usual, "both have the same room"
    for others in results[1:]:
        for run, expected in zip(others, results[0], strict=True):
            assert run.differing(expected) == []


def evaluated(rank: int, nvme: Path, between: tuple[int, ...] | None, **options: Any) -> list[float]:
    """Losses of a run that looks at the model in another order between its steps, or does not."""
    losses = []
    with start(nvme, Called, **options) as engine:
        for shares in vectors(4, 2):
            if between is not None:
                with torch.no_grad():
                    engine(shares[rank][0], between)
            loss = engine(shares[rank][0], BA)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("stage", [3, 2])
def test_evaluation_in_another_order_changes_nothing(ranks: Ranks, nvme: Path, stage: int) -> None:
    options = {"threshold": 0, "stage": stage, "prefetch": 0}
    plain = ranks(2).run(evaluated, nvme, None, **options)
    assert ranks(2).run(evaluated, nvme, AB, **options) == plain
