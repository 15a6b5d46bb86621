"""The loader that ``initialize(training_data=...)`` gives: shuffled micro-batches, of a rank's own share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler


class RankSampler(DistributedSampler[int]):
    """One rank's share of a data set, in an order that is new in every pass, as a loader of one process has it.

    The order follows from the number of the pass, so that ranks agree on it without a word. ``set_epoch`` says which
    pass comes next, as in torch; only a run that is resumed has to. Shares are of one size: the first samples of the
    pass come twice where the ranks do not divide it.
    """

    def __init__(self, data: Dataset[Any], rank: int, world_size: int) -> None:
        super().__init__(data, num_replicas=world_size, rank=rank)

    def __iter__(self) -> Iterator[int]:
        indices = super().__iter__()
        self.epoch += 1
        return indices


def make_loader(
    data: Dataset[Any],
    batch_size: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    *,
    rank: int,
    world_size: int,
) -> DataLoader[Any]:
    """Shuffled batches of ``batch_size`` samples, over all of ``data`` or, of several ranks, over this one's share."""
    if world_size == 1:
        return DataLoader(data, batch_size=batch_size, shuffle=True, collate_fn=collate_fn)
    sampler = RankSampler(data, rank, world_size)
    return DataLoader(data, batch_size=batch_size, sampler=sampler, collate_fn=collate_fn)
