"""What each rank reads of the training data."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from zero3.loader import make_loader


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def loaders(size: int, world_size: int) -> list[DataLoader[int]]:
    return [
        make_loader(Numbers(size), 2, None, rank=rank, world_size=world_size) for rank in range(world_size)
    ]


def read(loader: DataLoader[int]) -> list[int]:
    return [int(number) for batch in loader for number in batch]


@pytest.mark.parametrize(("size", "twice"), [(12, 0), (10, 2)])
def test_ranks_share_the_data_evenly(size: int, twice: int) -> None:
    shares = [read(loader) for loader in loaders(size, 3)]
    assert [len(share) for share in shares] == [4, 4, 4]
    count = Counter(number for share in shares for number in share)
    assert set(count) == set(range(size))
    assert sum(times - 1 for times in count.values()) == twice


def test_every_pass_has_an_order_of_its_own_that_ranks_agree_on() -> None:
    both = loaders(40, 2)
    passes = [[read(loader) for loader in both] for _ in range(3)]
    for first, second in passes:
        assert sorted(first + second) == list(range(40))
    assert len({tuple(first) for first, _ in passes}) == 3


def test_set_epoch_chooses_the_pass_as_in_torch() -> None:
    loader = loaders(40, 2)[1]
    torchs = DistributedSampler(Numbers(40), num_replicas=2, rank=1)
    for epoch in (0, 5, 6):
        torchs.set_epoch(epoch)
        if epoch == 5:
            loader.sampler.set_epoch(5)
        assert read(loader) == list(torchs)


def test_one_rank_reads_everything_as_before() -> None:
    loader = make_loader(Numbers(7), 2, lambda batch: torch.tensor(batch) * 10, rank=0, world_size=1)
    assert type(loader.sampler) is RandomSampler
    assert sorted(read(loader)) == [10 * number for number in range(7)]
