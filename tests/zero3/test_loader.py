"""What each rank reads of the training data, and that a run goes on there as if it had not been stopped."""

from __future__ import annotations

import json
import logging
import math
import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from tiering.errors import CheckpointError
from zero3 import plain, random_state
from zero3.loader import TrainingLoader, make_loader


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def loaders(size: int, world_size: int) -> list[TrainingLoader]:
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
    assert isinstance(loader, DataLoader) and isinstance(loader.sampler, RandomSampler)
    assert sorted(read(loader)) == [10 * number for number in range(7)]


class Noisy(Dataset[tuple[int, Tensor]]):
    """Augments each sample by a draw from every global generator, and remembers which were read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        self.read.append(index)
        noise = torch.tensor([random.random(), np.random.random()])
        return index, torch.rand(4) + torch.cat([noise, noise]) - index / self.size


@pytest.fixture(autouse=True)
def _generators_as_they_were() -> Iterator[None]:
    before = random_state.capture()
    yield
    random_state.restore(before)


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def saved(state: Any) -> Any:
    """As a checkpoint would keep it."""
    tensors: dict[str, Tensor] = {}
    return plain.decode(json.loads(json.dumps(plain.encode(state, tensors), sort_keys=True)), tensors)


def numbers(batch: Any) -> list[int]:
    return [int(number) for number in batch]


def test_one_rank_draws_as_a_loader_of_torch() -> None:
    def passes(loader: DataLoader[Any]) -> list[Any]:
        seed_everything(5)
        seen: list[Any] = []
        for _ in range(3):
            for indices, noisy in loader:
                seen.append((numbers(indices), noisy.tolist(), torch.rand(1).item()))
        return [*seen, torch.get_rng_state().tolist()]

    ours = make_loader(Noisy(7), 2, None, rank=0, world_size=1)
    assert passes(ours) == passes(DataLoader(Noisy(7), batch_size=2, shuffle=True))


class Stopped(Exception):
    """In place of kill -9."""


class Run:
    """A training script of three passes: draws in the data set, dropout in the model, draws beside."""

    def __init__(self, size: int, rank: int, world_size: int) -> None:
        seed_everything(100 + rank)
        self.data = Noisy(size)
        self.loader = make_loader(self.data, 2, None, rank=rank, world_size=world_size)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.epoch = self.steps = 0
        self.history: list[Any] = []

    def checkpoint(self) -> Any:
        return saved(
            {
                "epoch": self.epoch,
                "steps": self.steps,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "loader": self.loader.state_dict(),
                "random": random_state.capture(),
            }
        )

    def load(self, checkpoint: Any) -> None:
        self.epoch, self.steps = checkpoint["epoch"], checkpoint["steps"]
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.loader.load_state_dict(checkpoint["loader"])
        random_state.restore(checkpoint["random"])

    def train(self, stop_at: int | None = None) -> Any:
        """Until the end, or until a checkpoint behind ``stop_at`` steps, which is returned."""
        while self.epoch < 3:
            for indices, noisy in self.loader:
                loss = self.model(noisy).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.steps += 1
                self.history.append((self.epoch, numbers(indices), loss.item(), random.random()))
                if self.steps == stop_at:
                    return self.checkpoint()
            self.epoch += 1
        return self.checkpoint()


@pytest.mark.parametrize(("size", "rank", "world_size"), [(7, 0, 1), (6, 0, 1), (11, 0, 2), (11, 1, 2)])
def test_stopped_anywhere_is_as_straight(size: int, rank: int, world_size: int) -> None:
    straight = Run(size, rank, world_size)
    end = straight.train()
    steps = len(straight.history)
    assert steps == 3 * len(straight.loader) and math.isfinite(straight.history[-1][2])
    for stop_at in range(1, steps + 1):
        first = Run(size, rank, world_size)
        checkpoint = first.train(stop_at)
        second = Run(size, rank, world_size)
        seed_everything(stop_at)  # a process of its own
        second.load(checkpoint)
        second_end = second.train()
        assert first.history + second.history == straight.history, stop_at
        left_out = first.data.read
        assert len(second.data.read) == len(straight.data.read) - len(left_out)
        assert second_end["loader"] == end["loader"]
        for name, value in second_end["model"].items():
            assert torch.equal(value, end["model"][name]), (stop_at, name)
        assert torch.equal(second_end["random"]["torch"], end["random"]["torch"])
