"""The loader of ``initialize(training_data=...)``: shuffled micro-batches of one rank's part of the data.

``for batch in loader`` is one pass over the data, in a new order each time; ``next(loader)`` continues from pass to
pass, as RepeatingLoader does with any loader.

Note [Position in the training data]
    One seed determines the order of a pass: a draw from torch's generator, as everywhere in torch, or with several
    ranks the number of the pass. So the position is the pass, its seed and the number of micro-batches returned. After
    a load, the loader skips those without reading them, and draws no random number that an uninterrupted run does not
    draw. A position counts samples of the whole data set, in the order that ranks share, so a pass can continue with
    another number of ranks or another batch size.

    A pass that the script left by ``break`` also continues, if the state is saved before the next pass begins, because
    most scripts that save there stop there. If all micro-batches were returned, and the script has not requested
    another one, a resumed run begins at the end of the pass, so that a script that counts passes counts correctly. If
    the iterator no longer exists, the pass has ended.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from tiering import _logs
from tiering.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


class _Passes:
    """The common part of both samplers: they count passes, and can begin a pass in the middle.

    ``epoch`` is the number of the next pass, by torch's name, and ``last_seed`` the seed of the last one. ``resumed``
    is set for a pass that continues: its seed, and the number of samples of a rank to skip.
    """

    epoch: int = 0
    last_seed: int = 0
    resumed: tuple[int, int] | None = None

    def _begin(self, draw_seed: Callable[[], int]) -> int:
        self.last_seed, skipped_samples = self.resumed or (draw_seed(), 0)
        if self.resumed is None:
            self.epoch += 1
        self.resumed = None
        return skipped_samples


class WholeSampler(_Passes, RandomSampler):
    """All samples, in the order of ``DataLoader(shuffle=True)``: from the same draw, at the same moment."""

    def __iter__(self) -> Iterator[int]:
        skipped_samples = self._begin(_draw_seed)
        yield from _shuffled(len(self.data_source), self.last_seed)[skipped_samples:]

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass, as scripts for several ranks do; its order is drawn in any case."""
        self.epoch = epoch


class RankSampler(_Passes, DistributedSampler[int]):
    """One rank's part of a data set, in a new order in every pass.

    The number of the pass determines the order, so that ranks agree on it without communication. ``set_epoch`` sets
    the number of the next pass, as in torch, and is optional. All parts have one size: if the number of samples is not
    a multiple of the number of ranks, the first samples of the pass are used twice.
    """

    def __init__(self, data: Dataset[Any], rank: int, world_size: int) -> None:
        super().__init__(data, num_replicas=world_size, rank=rank)

    def __iter__(self) -> Iterator[int]:
        skipped_samples = self._begin(lambda: self.seed + self.epoch)
        order = _shuffled(len(self.dataset), self.last_seed)  # type: ignore[arg-type]  # torch requires a length
        for index in range(
            self.rank + skipped_samples * self.num_replicas, self.total_size, self.num_replicas
        ):
            yield order[index % len(order)]


def _draw_seed() -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def _shuffled(size: int, seed: int) -> list[int]:
    generator = torch.Generator("cpu")
    generator.manual_seed(seed)
    order: list[int] = torch.randperm(size, generator=generator, device="cpu").tolist()
    return order


@dataclass
class _Position:
    """The position in a pass. Checkpoints contain the fields under these names.

    ``begun``: iter() was called, which draws a random number. ``seed`` is the seed of the order, or None until the
    first micro-batch is requested. ``micro_batches`` is the number of micro-batches returned.
    """

    pass_number: int = 0
    begun: bool = False
    seed: int | None = None
    micro_batches: int = 0


@dataclass(frozen=True)
class _Layout:
    """The sizes that determine micro-batches. ``samples`` is the size of the data set.

    With ``drop_last`` a pass ends before a short micro-batch.
    """

    samples: int
    batch_size: int
    world_size: int
    drop_last: bool = False

    def micro_batches(self) -> int:
        """Micro-batches of a whole pass, for each rank."""
        share = -(-self.samples // self.world_size)
        return share // self.batch_size if self.drop_last else -(-share // self.batch_size)


class TrainingLoader(DataLoader[Any]):
    """A torch DataLoader with a position that can be saved and restored: see Note [Position in the training data].

    ``save_checkpoint`` and ``load_checkpoint`` call ``state_dict`` and ``load_state_dict``, which concern the iterator
    that was made last; an older one continues as in torch.
    """

    def __init__(
        self,
        data: Dataset[Any],
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        sampler: WholeSampler | RankSampler,
        *,
        drop_last: bool = False,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(
            data,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            num_workers=workers,
            pin_memory=pin_memory,
        )
        self.passes = sampler
        self._position = _Position()
        # Whether the next iter() continues at this position.
        self._resumes = False
        # A weak reference to the last iterator: None once no script holds it.
        self._last_pass: Callable[[], _Pass | None] = lambda: None
        # The iterator of next(loader).
        self._held_pass: _Pass | None = None

    def __iter__(self) -> _Pass:  # type: ignore[override]  # torch's has only private things beside next() and len()
        if self._resumes and self._position.pass_number != self.passes.epoch:
            log.warning(
                "set_epoch(%d) starts that pass and skips the rest of pass %d, in which the checkpoint was saved",
                self.passes.epoch,
                self._position.pass_number,
            )
            self._resumes = False
        if not self._resumes:
            self._position = _Position()
        self._end_resume()
        iterator = _Pass(self, self._position)
        if not self._position.begun:
            iterator.batches = self.begin(self._position)
        self._last_pass, self._held_pass = weakref.ref(iterator), None
        return iterator

    @property
    def data_sampler(self) -> WholeSampler | RankSampler:
        """The sampler, by DeepSpeed's name for it."""
        return self.passes

    def __next__(self) -> Any:
        """The next micro-batch of the current pass; at its end, or without a pass, the first one of the next pass."""
        under_way = self._last_pass()
        # Twice, because the loaded position may be the end of a pass.
        for _ in range(2):
            self._held_pass = under_way = iter(self) if under_way is None else under_way
            with suppress(StopIteration):
                return next(under_way)
            under_way = None
        raise ConfigError(
            f"a pass over the training data has no micro-batch of {self.batch_size} samples for each rank: provide more"
            " data, or set dataloader_drop_last to false"
        )

    def begin(self, position: _Position) -> Iterator[Any]:
        """torch's iterator over the micro-batches after ``position``."""
        self._end_resume()
        batches = self._batches_behind(position)
        # Workers have already read the sampler for their first samples.
        if self.num_workers:
            position.seed, position.pass_number = self.passes.last_seed, self.passes.epoch - 1
        return batches

    def _batches_behind(self, position: _Position) -> Iterator[Any]:
        if not position.begun:
            position.begun = True
            return super().__iter__()
        if position.seed is not None:
            assert self.batch_size is not None
            self.passes.resumed = position.seed, position.micro_batches * self.batch_size
        # torch draws a number here that this pass has drawn before: restore the state afterwards.
        random_state = torch.get_rng_state()
        try:
            return super().__iter__()
        finally:
            torch.set_rng_state(random_state)

    def _end_resume(self) -> None:
        """The loaded position is in use now: count its pass, so that the next pass is another one."""
        if self._resumes and self._position.seed is not None:
            self.passes.epoch += 1
        self._resumes = False

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values, which are equal on every rank of a run."""
        position = self._position
        is_in_use = self._resumes or self._last_pass() is not None
        is_between_passes = position.seed is None or position.micro_batches >= len(self)
        if not position.begun or (is_between_passes and not is_in_use):
            position = _Position()
        if position.seed is None:
            position = replace(position, pass_number=self.passes.epoch)
        return asdict(position) | asdict(self._layout())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position ``state``, for the next ``iter()`` and for the iterator that was made last.

        This draws no random numbers. After a run with another batch size or number of ranks, the pass continues after
        the last complete round of micro-batches over all ranks. Raises CheckpointError for a data set of another
        length, or an invalid ``state``.
        """
        self.check_state_dict(state)
        (position, layout), current_layout = _read(state), self._layout()
        if position.seed is not None and layout != current_layout:
            position = _converted(position, layout, current_layout)
        self._position = position
        self._resumes = True
        self.passes.epoch = position.pass_number
        iterator = self._last_pass()
        if iterator is not None:
            iterator.position, iterator.batches = position, None
        log.log(
            _logs.once(logging.INFO),
            "the training data continues after micro-batch %d of %d of pass %d",
            position.micro_batches,
            len(self),
            position.pass_number,
        )

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """CheckpointError if ``load_state_dict`` would refuse ``state``; changes nothing."""
        (_, layout), current_layout = _read(state), self._layout()
        if layout.samples != current_layout.samples:
            raise CheckpointError(
                f"the checkpoint is of a run on {layout.samples} samples, but training_data has"
                f" {current_layout.samples}: pass the same data to initialize, or pass none and read the new data with"
                " a loader of your own"
            )

    def _layout(self) -> _Layout:
        assert self.batch_size is not None
        world_size = self.passes.num_replicas if isinstance(self.passes, RankSampler) else 1
        samples = len(self.dataset)  # type: ignore[arg-type]  # it has a length
        return _Layout(samples, self.batch_size, world_size, self.drop_last)


class _Pass(Iterator[Any]):
    """One pass over the data: the iterator of ``iter(loader)``."""

    def __init__(self, loader: TrainingLoader, position: _Position) -> None:
        self._loader = loader
        self.position = position
        # torch's iterator, once it is needed.
        self.batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        position, passes = self.position, self._loader.passes
        if self.batches is None:
            self.batches = self._loader.begin(position)
        # Before the read: a micro-batch that cannot be read counts, because torch's iterator continues after it.
        position.micro_batches += 1
        try:
            return next(self.batches)
        except StopIteration:
            position.begun = False
            raise
        finally:
            if position.seed is None:
                position.seed, position.pass_number = passes.last_seed, passes.epoch - 1

    def __len__(self) -> int:
        return len(self._loader)


def _read(state: Mapping[str, Any]) -> tuple[_Position, _Layout]:
    try:
        position = _Position(*(state[field.name] for field in fields(_Position)))
        # Earlier versions did not save drop_last.
        drop_last = state.get("drop_last", False)
        layout = _Layout(state["samples"], state["batch_size"], state["world_size"], drop_last)
    except (KeyError, TypeError):
        possible = False
    else:
        possible = _is_possible(position, layout)
    if not possible:
        raise CheckpointError(
            f"invalid data position {str(state)[:300]}: the checkpoint is damaged, or from a newer version"
        )
    return position, layout


def _is_possible(position: _Position, layout: _Layout) -> bool:
    counts = (position.pass_number, position.micro_batches, *astuple(layout)[:3])
    if not all(type(count) is int and 0 <= count < 2**62 for count in counts):
        return False
    if not (
        type(position.begun) is type(layout.drop_last) is bool and layout.batch_size and layout.world_size
    ):
        return False
    if position.seed is None:
        return position.micro_batches == 0
    return position.begun and type(position.seed) is int and 0 <= position.seed < 2**64


def _converted(position: _Position, layout: _Layout, current_layout: _Layout) -> _Position:
    """``position`` in micro-batches of another size, rounded down to a complete round over all ranks."""
    if position.micro_batches >= layout.micro_batches():
        return replace(position, micro_batches=current_layout.micro_batches())
    samples_done = position.micro_batches * layout.batch_size * layout.world_size
    round_samples = current_layout.batch_size * current_layout.world_size
    log.log(
        _logs.once(logging.WARNING),
        "the checkpoint was saved after sample %d of %d of a pass, in micro-batches of %d on each of %d ranks; this"
        " run, with %d on each of %d ranks, continues after sample %d",
        samples_done,
        current_layout.samples,
        layout.batch_size,
        layout.world_size,
        current_layout.batch_size,
        current_layout.world_size,
        samples_done // round_samples * round_samples,
    )
    return replace(position, micro_batches=samples_done // round_samples)


class RepeatingLoader(Iterator[Any]):
    """Repeats the passes of ``loader``, which must allow more than one, without an end.

    A sampler with ``set_epoch`` gets the number of each new pass, which then has a new order. With the loader of
    ``initialize``, it resumes from a checkpoint as that does.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)
        self._passes_ended = 0

    def __next__(self) -> Any:
        with suppress(StopIteration):
            return next(self.data_iter)
        self._begin_next_pass()
        with suppress(StopIteration):
            return next(self.data_iter)
        raise ConfigError(
            f"RepeatingLoader got no batch in a pass of {type(self.loader).__name__}: pass a loader with at least one"
            " batch that allows more than one pass, which a generator does not"
        )

    def _begin_next_pass(self) -> None:
        self._passes_ended += 1
        # A TrainingLoader counts by itself.
        if not isinstance(self.loader, TrainingLoader):
            counting: tuple[Any, ...] = (getattr(self.loader, "sampler", None), self.loader)
            for each in counting:
                if hasattr(each, "set_epoch"):
                    each.set_epoch(getattr(each, "epoch", self._passes_ended - 1) + 1)
        self.data_iter = iter(self.loader)


# The parameters of both functions are those of torch's DataLoader, with the rank and the number of ranks.
def make_loader(
    data: Dataset[Any],
    batch_size: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    *,
    rank: int,
    world_size: int,
    shared: bool = False,
    drop_last: bool = False,
    workers: int = 0,
    pin_memory: bool = False,
) -> TrainingLoader:
    """Shuffled batches of ``batch_size`` samples of ``data``, or with several ranks of this rank's part of it.

    ``shared``: other ranks load the same part, in the same order, whatever random numbers they have drawn.

    ``drop_last`` skips the last batch of a pass if it is short. ``workers`` is the number of processes that read ahead;
    random numbers that ``data`` draws in them differ after a load. ConfigError for data that cannot be shuffled.
    """
    sampler = (
        WholeSampler(data)  # type: ignore[arg-type]  # which reads its length
        if _checked_size(data) and world_size == 1 and not shared
        else RankSampler(data, rank, world_size)
    )
    return TrainingLoader(
        data,
        batch_size,
        collate_fn,
        sampler,
        drop_last=drop_last,
        workers=workers,
        pin_memory=pin_memory and torch.cuda.is_available(),
    )


def make_ordered_loader(
    data: Dataset[Any],
    batch_size: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    *,
    rank: int,
    world_size: int,
    sampler: Sampler[int] | None = None,
    drop_last: bool = False,
    workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """torch's loader of this rank's part of ``data``, in the order of ``data`` or of ``sampler``, for evaluations.

    Checkpoints do not contain its position. Parts and errors are those of ``make_loader``.
    """
    if sampler is None and _checked_size(data) and world_size == 1:
        sampler = SequentialSampler(data)  # type: ignore[arg-type]  # as above
    elif sampler is None:
        sampler = DistributedSampler(data, world_size, rank, shuffle=False)
    return DataLoader(
        data,
        batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=workers,
        pin_memory=pin_memory and torch.cuda.is_available(),
    )


def _checked_size(data: Any) -> int:
    has_both = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if isinstance(data, IterableDataset) or not has_both:
        raise ConfigError(
            f"the training data is a {type(data).__name__}, which has no index, and so can be neither shuffled nor"
            " distributed to ranks: pass a dataset with __getitem__ and __len__, or pass none and use a DataLoader of"
            " your own"
        )
    if not len(data):
        raise ConfigError("the training data is empty: pass a dataset with at least one sample")
    return len(data)
