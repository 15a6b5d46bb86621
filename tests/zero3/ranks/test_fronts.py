"""The engine as an optimizer and a module, on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.zero3.conftest import SmallModel
from tests.zero3.plain import differing

from .pool import Pool
from .training import start, tokens

Ranks = Callable[..., Pool]
PLACES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 2": {"stage": 2},
    "stage 3": {},
    "nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
}
ACCUMULATION = 2
UPDATES = 2
Run = tuple[list[float], dict[str, Tensor]]


def by_engine(rank: int, nvme: Path, options: dict[str, Any]) -> Run:
    """The engine counts micro-batches, and exchanges the gradients of both at once."""
    norms = []
    with start(nvme, accumulation=ACCUMULATION, **options) as engine:
        for shares in tokens(UPDATES * ACCUMULATION, 2):
            engine.backward(engine(*shares[rank]))
            engine.step()
            if engine.was_step_applied():
                norms.append(engine.get_global_grad_norm())
        return norms, engine.master_state_dict()


def by_loop(rank: int, nvme: Path, options: dict[str, Any]) -> Run:
    """The loop counts them."""
    norms = []
    with start(nvme, accumulation=ACCUMULATION, **options) as engine:
        model, optimizer = engine.as_module(), engine.as_optimizer()
        for number, shares in enumerate(tokens(UPDATES * ACCUMULATION, 2), start=1):
            is_last = number % ACCUMULATION == 0
            with nullcontext() if is_last else model.no_sync():
                (model(*shares[rank]) / ACCUMULATION).backward()
            if is_last:
                norms.append(optimizer.clip_grad_norm_(1e9))
                optimizer.step()
                model.zero_grad()
        return norms, engine.master_state_dict()


@pytest.mark.parametrize("place", PLACES)
def test_a_loop_that_accumulates_trains_as_the_engine_does(ranks: Ranks, nvme: Path, place: str) -> None:
    pool, options = ranks(2), PLACES[place]
    (norms, masters), _ = pool.run(by_engine, nvme, options)
    for loop_norms, loop_masters in pool.run(by_loop, nvme, options):
        assert loop_norms == norms
        assert differing(loop_masters, masters) == []


class Generating(SmallModel):
    def generate(self, tokens: Tensor, synced_gpus: bool = False) -> bool:
        return synced_gpus


def generate(rank: int, nvme: Path, options: dict[str, Any]) -> tuple[bool, bool, bool]:
    with start(nvme, Generating, **options) as engine:
        model = engine.as_module()
        return model.generate(None), model.generate(None, synced_gpus=False), engine.generate(None)


@pytest.mark.parametrize(("place", "synced"), [("stage 2", False), ("stage 3", True)])
def test_generate_runs_forwards_until_the_last_rank_has_its_tokens(
    ranks: Ranks, nvme: Path, place: str, synced: bool
) -> None:
    assert ranks(2).run(generate, nvme, PLACES[place]) == [(synced, False, synced)] * 2


def one_rank_skips(rank: int, nvme: Path) -> str:
    """Rank 1 has no batch in the second update."""
    with start(nvme, distributed={"timeout": 6, "silence": 5}) as engine:
        model, optimizer = engine.as_module(), engine.as_optimizer()
        for number, shares in enumerate(tokens(2, 2)):
            if rank == 0 or number == 0:
                model(*shares[rank]).backward()
            optimizer.step()
    return ""


def test_a_rank_without_a_backward_is_an_error_on_all(doomed: Ranks, nvme: Path) -> None:
    first, second = doomed(2).outcomes(one_rank_skips, nvme)
    assert second.error is not None and "step was called without a backward" in second.error.message
    assert first.error is not None and "DistributedError" in first.error.kinds, first.report()
    assert "rank 1" in first.error.message
