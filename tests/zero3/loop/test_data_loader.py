"""What each rank reads of the training data, and that a run goes on there as if it had not been stopped."""

from __future__ import annotations

import json
import logging
import math
import random
from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from tiering.errors import CheckpointError, ConfigError
from zero3.checkpoint import encoding, random_state
from zero3.loop.data_loader import RepeatingLoader, TrainingLoader, make_loader, make_ordered_loader


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
    return encoding.decode(json.loads(json.dumps(encoding.encode(state, tensors), sort_keys=True)), tensors)


def numbers(batch: Any) -> list[int]:
    return [int(number) for number in batch]


def test_one_rank_draws_as_a_loader_of_torch() -> None:
    def passes(loader: DataLoader[Any]) -> list[Any]:
        seed_everything(5)
        rows: list[Any] = []
        for _ in range(3):
            for indices, noisy in loader:
                rows.append((numbers(indices), noisy.tolist(), torch.rand(1).item()))
        return [*rows, torch.get_rng_state().tolist()]

    ours = make_loader(Noisy(7), 2, None, rank=0, world_size=1)
    assert passes(ours) == passes(DataLoader(Noisy(7), batch_size=2, shuffle=True))


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


@pytest.mark.parametrize("world_size", [1, 2])
def test_stopped_at_every_step_is_as_straight(world_size: int) -> None:
    straight = Run(7, 0, world_size)
    straight.train()
    history: list[Any] = []
    checkpoint = Run(7, 0, world_size).checkpoint()
    while checkpoint["epoch"] < 3:
        run = Run(7, 0, world_size)
        run.load(checkpoint)
        checkpoint = run.train(run.steps + 1)
        history += run.history
    assert history == straight.history


class Script:
    """Any order of what a script can do with a loader; ``seen`` is all that it notices.

    It asks for batches in one of three ways: of ``iter(loader)``, of a RepeatingLoader, or of the loader itself.
    """

    def __init__(self, world_size: int, way: str) -> None:
        self.loader = make_loader(Noisy(5), 2, None, rank=0, world_size=world_size)
        self.iter = {"iter": iter, "repeating": RepeatingLoader, "loader": lambda loader: loader}[way]
        self.iterator: Iterator[Any] | None = None
        self.seen: list[Any] = []

    def do(self, event: str) -> None:
        if event == "draw":
            self.seen.append(torch.rand(1).item())
        elif event == "iter":
            self.iterator = self.iter(self.loader)
        elif event == "leave":
            self.iterator = None
        elif self.iterator is not None:
            try:
                indices, noisy = next(self.iterator)
                self.seen.append((numbers(indices), noisy.tolist()))
            except StopIteration:
                self.seen.append("end")
                self.iterator = None


events = st.lists(st.sampled_from(["iter", "next", "next", "next", "draw", "leave"]), max_size=14)


@given(events, events, st.sampled_from([1, 2]), st.sampled_from(["iter", "repeating", "loader"]))
@settings(max_examples=200, deadline=None)
def test_every_order_of_events_goes_on_as_straight(
    before: list[str], after: list[str], world_size: int, way: str
) -> None:
    seed_everything(1)
    straight = Script(world_size, way)
    for event in before:
        straight.do(event)
    state, drawn = saved([straight.loader.state_dict(), random_state.capture()])
    holds = straight.iterator is not None
    if state["begun"] and not holds and way != "loader":
        return  # left in mid-pass: that goes on, as the next test says
    straight.seen.clear()
    for event in after:
        straight.do(event)

    seed_everything(2)
    resumed = Script(world_size, way)
    resumed.loader.load_state_dict(state)
    random_state.restore(drawn)
    assert resumed.loader.state_dict() == state
    if holds:
        resumed.do("iter")
        assert resumed.loader.state_dict() == state
    for event in after:
        resumed.do(event)
    assert resumed.seen == straight.seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_loader_goes_on_from_pass_to_pass(world_size: int) -> None:
    loader = make_loader(Numbers(8), 2, None, rank=0, world_size=world_size)
    share = 8 // world_size
    for endless in (loader, RepeatingLoader(loader)):
        passes = [[int(n) for _ in range(share // 2) for n in next(endless)] for _ in range(3)]
        assert [len({*each}) for each in passes] == [share] * 3
        assert len({*map(tuple, passes)}) == 3
    short = make_loader(Numbers(8), 9, None, rank=0, world_size=world_size, drop_last=True)
    with pytest.raises(
        ConfigError, match="no micro-batch of 9 samples for each rank: provide more data, or set"
    ):
        next(short)
    at = iter(loader)
    assert len({*numbers(next(at)), *numbers(next(loader))}) == 4  # it is in the pass of who came last
    assert len([*at]) == share // 2 - 2


def test_what_repeats_tells_samplers_of_the_next_pass() -> None:
    sampler = DistributedSampler(Numbers(40), num_replicas=2, rank=1)
    whole = []
    for epoch in (3, 4, 5):
        sampler.set_epoch(epoch)
        whole.append([*sampler])
    sampler.set_epoch(3)
    repeating = RepeatingLoader(DataLoader(Numbers(40), batch_size=20, sampler=sampler))
    assert [numbers(next(repeating)) for _ in whole] == whole
    once = RepeatingLoader(iter([1, 2]))
    assert [next(once), next(once)] == [1, 2]
    with pytest.raises(ConfigError, match="no batch in a pass of list_iterator: pass a loader with"):
        next(once)


@pytest.mark.parametrize("world_size", [1, 2])
def test_data_that_workers_read_goes_on_too(world_size: int) -> None:
    loader = make_loader(Numbers(12), 2, None, rank=0, world_size=world_size, workers=1)
    iterator = iter(loader)
    state, drawn = saved([loader.state_dict(), torch.get_rng_state()])
    straight = [numbers(batch) for batch in iterator]
    assert len({*chain(*straight)}) == 12 // world_size
    for count in (0, 2):
        resumed = make_loader(Numbers(12), 2, None, rank=0, world_size=world_size, workers=count // 2)
        resumed.load_state_dict(state | {"micro_batches": count})
        torch.set_rng_state(drawn)
        assert [numbers(batch) for batch in resumed] == straight[count:]


def test_an_ordered_loader_reads_a_share_as_it_lies() -> None:
    def ordered(rank: int, world_size: int, **options: Any) -> list[int]:
        return read(make_ordered_loader(Numbers(7), 2, None, rank=rank, world_size=world_size, **options))

    assert ordered(0, 1) == [0, 1, 2, 3, 4, 5, 6]
    assert [ordered(rank, 2) for rank in (0, 1)] == [[0, 2, 4, 6], [1, 3, 5, 0]]
    assert ordered(0, 1, drop_last=True) == [0, 1, 2, 3, 4, 5]
    assert ordered(1, 2, sampler=[5, 3, 1]) == [5, 3, 1]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Endless(), "is a Endless, which has no index"),
        (DataLoader(Numbers(2)), "is a DataLoader, which has no index"),
        ([], "is empty: pass a dataset with at least one sample"),
    ],
)
def test_data_that_cannot_be_shuffled_is_an_error(data: Any, words: str) -> None:
    for make in (make_loader, make_ordered_loader):
        with pytest.raises(ConfigError, match=f"the training data {words}"):
            make(data, 2, None, rank=0, world_size=1)


def resumed_from(loader: TrainingLoader, **layout: Any) -> TrainingLoader:
    """A loader of a new run over the same data, loaded."""
    resumed = make_loader(
        loader.dataset, **{"batch_size": 2, "collate_fn": None, "rank": 0, "world_size": 1} | layout
    )
    resumed.load_state_dict(saved(loader.state_dict()))
    return resumed


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_pass_that_was_left_goes_on_unless_another_was_begun(world_size: int) -> None:
    loader = make_loader(Numbers(12), 2, None, rank=0, world_size=world_size)
    handed = [int(number) for batch in islice(loader, 2) for number in batch]
    share = handed + read(resumed_from(loader, world_size=world_size))
    assert len(share) == len({*share}) == 12 // world_size
    next(iter(loader))
    assert len(read(resumed_from(loader, world_size=world_size))) == 12 // world_size - 2


def test_a_pass_whose_last_batch_was_handed_out_ends_before_the_next() -> None:
    loader = make_loader(Numbers(4), 2, None, rank=0, world_size=1)
    assert len([*islice(loader, 2)]) == 2
    assert len(read(resumed_from(loader))) == 4  # nobody can ask for the end of it: it is over
    iterator = iter(loader)
    assert len([*islice(iterator, 2)]) == 2
    resumed = resumed_from(loader)
    assert read(resumed) == []
    assert len(read(resumed)) == 4
    assert next(iterator, "end") == "end"
    assert len(read(resumed_from(loader))) == 4


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("count", [0, 1])
def test_an_iterator_that_is_in_use_goes_back_with_its_loader(count: int, world_size: int) -> None:
    seed_everything(3)
    loader = make_loader(Numbers(20), 2, None, rank=0, world_size=world_size)
    first = iter(loader)
    next(first)
    state, drawn = saved([loader.state_dict(), random_state.capture()])
    expected = [*map(numbers, first), read(loader), read(loader)]
    second = iter(loader)
    assert len([*islice(second, count)]) == count
    loader.load_state_dict(state)
    random_state.restore(drawn)
    assert [*map(numbers, second), read(loader), read(loader)] == expected


@pytest.mark.parametrize("world_size", [1, 2])
def test_set_epoch_for_another_pass_begins_that(caplog: pytest.LogCaptureFixture, world_size: int) -> None:
    def order(epoch: int) -> None:
        """Of several ranks the number of the pass decides on it, of one a draw."""
        loader.data_sampler.set_epoch(epoch)
        torch.manual_seed(epoch)

    loader = make_loader(Numbers(40), 2, None, rank=world_size - 1, world_size=world_size)
    whole = {}
    for epoch in (3, 4):
        order(epoch)
        whole[epoch] = read(loader)
    order(3)
    next(iter(loader))
    message = "set_epoch(4) starts that pass and skips the rest of pass 3, in which the checkpoint was saved"
    for epoch, left_out, warnings in ((3, 2, []), (4, 0, [message])):
        resumed = resumed_from(loader, rank=world_size - 1, world_size=world_size)
        resumed.data_sampler.set_epoch(epoch)
        torch.manual_seed(epoch)
        assert read(resumed) == whole[epoch][left_out:]
        assert caplog.messages == warnings


class Torn(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise OSError("unreadable")
        return index


def test_a_batch_that_could_not_be_read_is_behind_the_loader_as_in_torch() -> None:
    torch.manual_seed(0)
    loader = make_loader(Torn(12), 2, None, rank=0, world_size=1)
    iterator = iter(loader)
    with pytest.raises(OSError, match="unreadable"):
        deque(iterator)
    resumed = resumed_from(loader)
    expected = [*map(numbers, iterator)]
    assert [*map(numbers, resumed)] == expected != []


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_last_batch_of_a_pass_is_left_out_if_it_is_short(world_size: int) -> None:
    loader = make_loader(Numbers(11), 4, None, rank=0, world_size=world_size, drop_last=True)
    assert len(loader) == 2 // world_size
    for _ in range(2):
        assert [len(batch) for batch in loader] == [4] * len(loader)
    iterator = iter(loader)
    handed = numbers(next(iterator))
    resumed = resumed_from(loader, batch_size=4, world_size=world_size, drop_last=True)
    assert len([*handed, *read(resumed)]) == 4 * len(loader)
    complete = resumed_from(loader, batch_size=4, world_size=world_size)
    whole = [*handed, *read(complete)]
    # A pass that had ended stays at its end.
    assert len(whole) == len({*whole}) == (11 if world_size == 1 else 4)


layouts = st.tuples(st.integers(1, 4), st.integers(1, 4))  # batch size, ranks


@given(size=st.integers(1, 60), before=layouts, after=layouts, share=st.sampled_from([0.0, 0.3, 0.7, 1.0]))
@settings(max_examples=100, deadline=None)
def test_another_layout_goes_on_in_the_same_pass(
    size: int, before: tuple[int, int], after: tuple[int, int], share: float
) -> None:
    def ranks(batch_size: int, world_size: int) -> list[TrainingLoader]:
        return [
            make_loader(Numbers(size), batch_size, None, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]

    seed_everything(size)
    old, new = ranks(*before), ranks(*after)
    iterators = [iter(loader) for loader in old]
    rounds = int(share * len(old[0]))
    done = [n for _ in range(rounds) for iterator in iterators for n in numbers(next(iterator))]
    states = [loader.state_dict() for loader in old]
    assert all(state == states[0] for state in states)
    for loader in new:
        loader.load_state_dict(saved(states[0]))
    rest = [read(loader) for loader in new]

    assert {*done, *chain(*rest)} == set(range(size))
    if rounds == len(old[0]):
        assert not any(rest)
    elif rounds:
        order = torch.randperm(size, generator=torch.Generator().manual_seed(states[0]["seed"])).tolist()
        assert {*done} == {*order[: len(done)]}
        world_size, one_round = after[1], math.prod(after)
        behind, end = len(done) // one_round * one_round, -(-size // world_size) * world_size
        assert rest == [
            [order[at % size] for at in range(behind + rank, end, world_size)] for rank in range(world_size)
        ]


def test_another_layout_is_told(caplog: pytest.LogCaptureFixture) -> None:
    loader = make_loader(Numbers(100), 4, None, rank=0, world_size=1)
    with caplog.at_level(logging.WARNING):
        resumed_from(loader, batch_size=3)
        assert len([*islice(loader, 5)]) == 5
        resumed_from(loader, batch_size=4)
        assert not caplog.records
        resumed_from(loader, batch_size=3, world_size=2)
    assert "after sample 20 of 100 of a pass, in micro-batches of 4 on each of 1 ranks" in caplog.text
    assert "with 3 on each of 2 ranks, continues after sample 18" in caplog.text
    with caplog.at_level(logging.INFO):
        resumed_from(loader, batch_size=4)
    assert "the training data continues after micro-batch 5 of 25 of pass 0" in caplog.text


def test_other_data_is_an_error_with_both_lengths() -> None:
    loader = make_loader(Numbers(100), 2, None, rank=0, world_size=1)
    other = make_loader(Numbers(101), 2, None, rank=0, world_size=1)
    before = other.state_dict()
    for refuse in (other.check_state_dict, other.load_state_dict):
        with pytest.raises(CheckpointError, match="of a run on 100 samples, but training_data has 101: pass"):
            refuse(loader.state_dict())
    other.check_state_dict(before | {"begun": True, "seed": 1, "micro_batches": 1})
    assert other.state_dict() == before


@pytest.mark.parametrize(
    "change",
    [
        {"pass_number": -1},
        {"pass_number": 2**63},
        {"pass_number": "1"},
        {"begun": 1},
        {"begun": False},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 0.5},
        {"seed": None},
        {"micro_batches": True},
        {"batch_size": 0},
        {"world_size": 0},
        {"samples": None},
    ],
    ids=str,
)
def test_what_is_no_place_is_an_error(change: dict[str, Any]) -> None:
    loader = make_loader(Numbers(10), 2, None, rank=0, world_size=1)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    for broken in (state | change, {key: value for key, value in state.items() if key not in change}):
        with pytest.raises(CheckpointError, match=r"invalid data position \{.+the checkpoint is damaged"):
            loader.load_state_dict(broken)
    assert loader.state_dict() == state
