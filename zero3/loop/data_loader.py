"""The loader that ``initialize(training_data=...)`` gives: shuffled micro-batches, of a rank's own share.

``for batch in loader`` is one pass over the data, in an order that is new each time; ``next(loader)`` goes on from pass
to pass, as RepeatingLoader does with any loader.

Note [Where a run goes on in its data]
    The order of a pass follows from one number: a draw from torch's generator, as everywhere in torch, or for several
    ranks the number of the pass. So a pass, its seed and how many micro-batches were handed out say all. Behind those
    the loader goes on without reading what it leaves out, and without drawing what an undisturbed run had not drawn
    there. A position counts samples of the whole data set, in the order that ranks share: with another number of ranks,
    or another batch size, the pass goes on.

    A pass that was left by ``break`` goes on, too, if the state is taken before the next one begins: most scripts that
    do so stop there. When all was handed out, and the script has not asked for more, what goes on is the end of the
    pass, so that a script which counts its passes counts right; but if nobody can ask any more, it is over.
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

from tiering import logs
from tiering.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


class _Passes:
    """What both samplers do beside shuffling: they count passes, and may begin one in the middle."""

    epoch: int = 0  # the number of the next pass, by torch's name
    last_seed: int = 0  # where the order of the last one came from
    resumed: tuple[int, int] | None = (
        None  # of the next one: its seed, and how many samples of a rank to leave out
    )

    def _begin(self, draw_seed: Callable[[], int]) -> int:
        self.last_seed, left_out = self.resumed or (draw_seed(), 0)
        if self.resumed is None:
            self.epoch += 1
        self.resumed = None
        return left_out


class WholeSampler(_Passes, RandomSampler):
    """All samples, as ``DataLoader(shuffle=True)`` has them: by the same draw, at the same moment."""

    def __iter__(self) -> Iterator[int]:
        left_out = self._begin(_drawn)
        yield from _shuffled(len(self.data_source), self.last_seed)[left_out:]

    def set_epoch(self, epoch: int) -> None:
        """Say which pass comes next, as scripts for several ranks do; its order is drawn in any case."""
        self.epoch = epoch


class RankSampler(_Passes, DistributedSampler[int]):
    """One rank's share of a data set, in an order that is new in every pass, as a loader of one process has it.

    The order follows from the number of the pass, so that ranks agree on it without a word. ``set_epoch`` says which
    pass comes next, as in torch; no run has to. Shares are of one size: the first samples of the pass come twice where
    the ranks do not divide it.
    """

    def __init__(self, data: Dataset[Any], rank: int, world_size: int) -> None:
        super().__init__(data, num_replicas=world_size, rank=rank)

    def __iter__(self) -> Iterator[int]:
        left_out = self._begin(lambda: self.seed + self.epoch)
        order = _shuffled(len(self.dataset), self.last_seed)  # type: ignore[arg-type]  # torch wants a length, too
        for index in range(self.rank + left_out * self.num_replicas, self.total_size, self.num_replicas):
            yield order[index % len(order)]


def _drawn() -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def _shuffled(size: int, seed: int) -> list[int]:
    generator = torch.Generator("cpu")
    generator.manual_seed(seed)
    order: list[int] = torch.randperm(size, generator=generator, device="cpu").tolist()
    return order


@dataclass
class _Position:
    """How far a pass is."""

    pass_number: int = 0
    begun: bool = False  # iter() was called, which draws a number
    seed: int | None = None  # of its order; None until a micro-batch was asked for
    micro_batches: int = 0  # that were handed out


@dataclass(frozen=True)
class _Layout:
    """What micro-batches are of; ``samples`` are the data set's."""

    samples: int
    batch_size: int
    world_size: int
    drop_last: bool = False  # whether a pass ends before a micro-batch that is short

    def micro_batches(self) -> int:
        """In a whole pass, for each rank."""
        share = -(-self.samples // self.world_size)
        return share // self.batch_size if self.drop_last else -(-share // self.batch_size)


class TrainingLoader(DataLoader[Any]):
    """A torch DataLoader that can say where it is, and go on there: see Note [Where a run goes on in its data].

    ``save_checkpoint`` and ``load_checkpoint`` call its ``state_dict`` and ``load_state_dict``, which are about the
    iterator that was made last; an older one goes on as it would in torch.
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
        self._awaited = False  # whether the next iter() goes on at this position
        self._made: Callable[[], _Pass | None] = lambda: None  # weak: whether anybody holds the last iterator
        self._held: _Pass | None = None  # by next(loader)

    def __iter__(self) -> _Pass:  # type: ignore[override]  # torch's has only private things beside next() and len()
        if self._awaited and self._position.pass_number != self.passes.epoch:
            log.warning(
                "set_epoch(%d) begins that pass, in place of the rest of pass %d, in which the checkpoint was saved",
                self.passes.epoch,
                self._position.pass_number,
            )
            self._awaited = False
        if not self._awaited:
            self._position = _Position()
        self._arrive()
        made = _Pass(self, self._position)
        if not self._position.begun:
            made.batches = self.begin(self._position)
        self._made, self._held = weakref.ref(made), None
        return made

    @property
    def data_sampler(self) -> WholeSampler | RankSampler:
        """The sampler, by DeepSpeed's name for it."""
        return self.passes

    def __next__(self) -> Any:
        """The next micro-batch of the pass under way; at its end, or where there is none, the first of another."""
        under_way = self._made()
        for _ in range(2):  # what was loaded may be the end of a pass, too
            self._held = under_way = iter(self) if under_way is None else under_way
            with suppress(StopIteration):
                return next(under_way)
            under_way = None
        raise ConfigError(
            f"a pass over the training data has no micro-batch of {self.batch_size} samples for each rank: give more"
            " data, or set dataloader_drop_last to false"
        )

    def begin(self, position: _Position) -> Iterator[Any]:
        """torch's iterator, which is behind ``position`` when it is asked."""
        self._arrive()
        batches = self._batches_behind(position)
        if self.num_workers:  # they have been told their first samples
            position.seed, position.pass_number = self.passes.last_seed, self.passes.epoch - 1
        return batches

    def _batches_behind(self, position: _Position) -> Iterator[Any]:
        if not position.begun:
            position.begun = True
            return super().__iter__()
        if position.seed is not None:
            assert self.batch_size is not None
            self.passes.resumed = position.seed, position.micro_batches * self.batch_size
        drawn = torch.get_rng_state()  # before the number that torch draws here, which this pass has had
        try:
            return super().__iter__()
        finally:
            torch.set_rng_state(drawn)

    def _arrive(self) -> None:
        """Somebody goes on at the position that was loaded: the pass that comes next is another one."""
        if self._awaited and self._position.seed is not None:
            self.passes.epoch += 1
        self._awaited = False

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, in values that JSON has: the same for every rank of a run."""
        position = self._position
        asked = self._awaited or self._made() is not None
        between = position.seed is None or position.micro_batches >= len(self)
        if not position.begun or (between and not asked):
            position = _Position()
        if position.seed is None:
            position = replace(position, pass_number=self.passes.epoch)
        return asdict(position) | asdict(self._layout())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next ``iter()`` goes on where ``state`` was taken, and so does the iterator that was made last.

        Draws nothing. Raises CheckpointError for a data set of another length, or what is no state of a loader; of a
        run with another batch size or number of ranks, the pass goes on at the last whole round of micro-batches.
        """
        self.check_state_dict(state)
        (position, layout), here = _read(state), self._layout()
        if position.seed is not None and layout != here:
            position = _converted(position, layout, here)
        self._position = position
        self._awaited = True
        self.passes.epoch = position.pass_number
        made = self._made()
        if made is not None:
            made.position, made.batches = position, None
        log.log(
            logs.once(logging.INFO),
            "the training data goes on behind micro-batch %d of %d of pass %d",
            position.micro_batches,
            len(self),
            position.pass_number,
        )

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """CheckpointError if ``load_state_dict`` would not take ``state``; changes nothing."""
        (_, layout), here = _read(state), self._layout()
        if layout.samples != here.samples:
            raise CheckpointError(
                f"the checkpoint is of a run on {layout.samples} samples, and training_data has {here.samples}: give"
                " initialize the same data, or none and go through the new data with a loader of your own"
            )

    def _layout(self) -> _Layout:
        assert self.batch_size is not None
        world_size = self.passes.num_replicas if isinstance(self.passes, RankSampler) else 1
        samples = len(self.dataset)  # type: ignore[arg-type]  # it has a length
        return _Layout(samples, self.batch_size, world_size, self.drop_last)


class _Pass(Iterator[Any]):
    """One pass over the data, as ``iter(loader)`` gives it."""

    def __init__(self, loader: TrainingLoader, position: _Position) -> None:
        self._loader = loader
        self.position = position
        self.batches: Iterator[Any] | None = None  # torch's, once it is needed

    def __next__(self) -> Any:
        position, passes = self.position, self._loader.passes
        if self.batches is None:
            self.batches = self._loader.begin(position)
        position.micro_batches += 1  # one that cannot be read counts, too: torch's iterator goes on behind it
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
        drop_last = state.get("drop_last", False)  # which earlier versions did not have
        layout = _Layout(state["samples"], state["batch_size"], state["world_size"], drop_last)
    except (KeyError, TypeError):
        possible = False
    else:
        possible = _is_possible(position, layout)
    if not possible:
        raise CheckpointError(
            f"the place in the training data is {str(state)[:300]}, which is none; the file is damaged, or from a newer"
            " version"
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


def _converted(position: _Position, layout: _Layout, here: _Layout) -> _Position:
    """The same place in a pass of other micro-batches, or rather before it, where every rank begins one."""
    if position.micro_batches >= layout.micro_batches():
        return replace(position, micro_batches=here.micro_batches())
    done = position.micro_batches * layout.batch_size * layout.world_size
    each = here.batch_size * here.world_size
    log.log(
        logs.once(logging.WARNING),
        "the checkpoint was saved behind sample %d of %d of a pass, in micro-batches of %d on each of %d ranks; here %d"
        " on each of %d go on behind sample %d",
        done,
        here.samples,
        layout.batch_size,
        layout.world_size,
        here.batch_size,
        here.world_size,
        done // each * each,
    )
    return replace(position, micro_batches=done // each)


class RepeatingLoader(Iterator[Any]):
    """Goes through ``loader``, any that can be gone through again, without an end.

    Samplers that count passes by ``set_epoch`` are told when another begins, so that its order is another, too. Over
    the loader that ``initialize`` gave, it goes on from a checkpoint as that does.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)
        self._ended = 0  # passes

    def __next__(self) -> Any:
        with suppress(StopIteration):
            return next(self.data_iter)
        self._begin_another()
        with suppress(StopIteration):
            return next(self.data_iter)
        raise ConfigError(
            f"RepeatingLoader got nothing in a whole pass of {type(self.loader).__name__}: give it a loader that can be"
            " gone through again, as a generator cannot, with at least one batch"
        )

    def _begin_another(self) -> None:
        self._ended += 1
        if not isinstance(self.loader, TrainingLoader):  # which counts by itself
            counting: tuple[Any, ...] = (getattr(self.loader, "sampler", None), self.loader)
            for each in counting:
                if hasattr(each, "set_epoch"):
                    each.set_epoch(getattr(each, "epoch", self._ended - 1) + 1)
        self.data_iter = iter(self.loader)


# The parameters of both functions are those of torch's DataLoader, and the place of the rank.
def make_loader(
    data: Dataset[Any],
    batch_size: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    *,
    rank: int,
    world_size: int,
    drop_last: bool = False,
    workers: int = 0,
    pin_memory: bool = False,
) -> TrainingLoader:
    """Shuffled batches of ``batch_size`` samples, over all of ``data`` or, of several ranks, over this one's share.

    ``drop_last`` leaves out the last batch of a pass if it is short. ``workers`` are processes that read ahead; random
    numbers that ``data`` draws in them are others after a checkpoint. ConfigError for data that cannot be shuffled.
    """
    sampler = (
        WholeSampler(data)  # type: ignore[arg-type]  # which asks for its length
        if _checked_size(data) and world_size == 1
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
    """torch's loader of this rank's share of ``data`` in its own order, as an evaluation reads it, or in ``sampler``'s.

    Checkpoints do not know its place. Shares and errors are those of ``make_loader``.
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
            f"the training data is a {type(data).__name__}, whose samples cannot be asked for by number, and so neither"
            " shuffled nor dealt out to ranks: give a dataset with __getitem__ and __len__, or none, and go through"
            " what this rank reads with a DataLoader of your own"
        )
    if not len(data):
        raise ConfigError("the training data is empty: give a dataset with at least one sample")
    return len(data)
