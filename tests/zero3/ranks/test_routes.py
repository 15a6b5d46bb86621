"""Routes that small shards and this torch do not take: the same bits. A transfer that fails: it keeps its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiering.config.training import DistributedConfig
from tiering.errors import DistributedError
from zero3.device.timeline import StallClock, Timeline
from zero3.params.gathered_storage import DeviceGatheredStorage, ShardGathers
from zero3.params.layout import lay_out
from zero3.ranks import collectives, joining
from zero3.ranks.collectives import Collectives
from zero3.setup import model_size

from .pool import Pool
from .training import Trained, train

Ranks = Callable[[int], Pool]
PLACES: dict[str, dict[str, Any]] = {
    "none": {},
    "cpu": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
    "nvme, no prefetch": {
        "offload_param": "nvme",
        "offload_optimizer": "nvme",
        "cache_in_host": False,
        "prefetch": 0,
    },
}


def from_each_to_all(patch: pytest.MonkeyPatch) -> list[int]:
    """Every shard counts as large: it is sent to every rank at once. Returns a list with an entry for each gather."""
    scatter, calls = collectives.scatter_shards, []
    patch.setattr(collectives, "LARGE", 0)
    patch.setattr(collectives, "scatter_shards", lambda *args: (calls.append(1), scatter(*args))[1])
    return calls


def by_copy(patch: pytest.MonkeyPatch) -> list[int]:
    """A torch that cannot exchange the pointers of storages. Returns a list with an entry for each gather."""
    gather, calls = DeviceGatheredStorage.gather, []

    def counted(storage: DeviceGatheredStorage, *, foreseen: bool) -> None:
        calls.append(1)
        gather(storage, foreseen=foreseen)

    patch.setattr(model_size, "can_exchange", lambda: False)
    patch.setattr(DeviceGatheredStorage, "gather", counted)
    return calls


def train_on(
    rank: int, nvme: Path, route: Callable[[pytest.MonkeyPatch], list[int]], **options: Any
) -> tuple[Trained, int]:
    with pytest.MonkeyPatch.context() as patch:
        calls = route(patch)
        return train(rank, nvme, **options), len(calls)


def same_bits(
    pool: Pool, nvme: Path, route: Callable[[pytest.MonkeyPatch], list[int]], places: Iterable[str]
) -> None:
    habit: dict[str, Any] = {"precision": "bf16", "accumulation": 2, "threshold": 0}
    reference: list[Trained] = pool.run(train, nvme, **habit)
    for name in places:
        runs = pool.run(train_on, nvme, route, **habit, **PLACES[name])
        for rank, ((run, count), expected) in enumerate(zip(runs, reference, strict=True)):
            assert run.differing(expected) == [], f"{name}, rank {rank}"
            assert count > len(run.losses), f"{name}, rank {rank}: the route was not taken"


@pytest.mark.slow
def test_large_shards_that_are_sent_to_every_rank_at_once(ranks: Ranks, nvme: Path) -> None:
    same_bits(ranks(4), nvme, from_each_to_all, ["none", "nvme"])


@pytest.mark.slow
def test_storages_that_cannot_exchange_their_memory(ranks: Ranks, nvme: Path) -> None:
    same_bits(ranks(2), nvme, by_copy, PLACES)


def gather_in_vain(rank: int) -> tuple[bool, int, bool, list[float]]:
    """One of three transfers of a gather fails, for a while: what ``end`` says, what is left to wait for, ..."""
    cpu = torch.device("cpu")
    ours = Collectives(joining.join(cpu, 60.0), cpu, DistributedConfig(), StallClock(Timeline()), None)
    layout = lay_out([(0, "weight", (2048,), True)], 4, ours.world.size)
    gathers = ShardGathers(layout, torch.float32, ours, "block")
    whole = torch.zeros(layout.numel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "LARGE", 0)
        gathers.announce(foreseen=False)
        gathers.begin(whole, torch.full((layout.numel // ours.world.size,), rank + 1.0))
        (pending,) = gathers._under_way
        wait, waits = ours.peers.wait, iter([True])

        def refuse(*args: Any, **kwargs: Any) -> None:
            if not next(waits, False):
                raise DistributedError("the connection is broken")
            wait(*args, **kwargs)

        patch.setattr(ours.peers, "wait", refuse)
        with pytest.raises(DistributedError):
            gathers.finish()
        given_back, works_left = gathers.end() is not None, len(pending.works)
    ours.finish(pending, "gather")
    is_empty = not pending.works
    ours.close()
    return given_back, works_left, is_empty, whole.unique().tolist()


def test_memory_of_a_gather_that_failed_is_not_given_back(ranks: Ranks) -> None:
    """What nobody has waited for may still write there."""
    for outcome in ranks(3).run(gather_in_vain):
        assert outcome == (False, 2, True, [1.0, 2.0, 3.0])
