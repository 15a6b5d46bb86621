"""Actions during which transfers of swap space fail: the loop does again what an error has undone."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar
from unittest import mock

import torch

from tiering.errors import CheckpointError, SwapError
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.request import Buffer, FilePiece
from tiering.storage.tickets import Ticket
from zero3.device import tiers

from .run import Run
from .table import Effect, action

MOST_FAILURES = 5
"""Transfers that fail in one action; each is met by a few calls."""
MOST_CALLS = 60

T = TypeVar("T")


class FailingContext(AioContext):
    """An I/O context that sends the transfers for which ``fails`` is true to a file where every operation fails."""

    fails: ClassVar[Callable[[str], bool] | None] = None

    def __init__(self, **options: Any) -> None:
        broken = Fault("any", file=0, count=0, error=errno.EIO)
        super().__init__(**options, fault=FaultPlan((broken,)))
        self._fd = os.open(os.devnull, os.O_RDWR)
        assert self.add_file(self._fd, direct=True, name="a broken drive") == broken.file

    def prepare_vector(
        self, kind: Literal["read", "write"], buffer: Buffer, pieces: Sequence[FilePiece], **options: Any
    ) -> Ticket:
        if FailingContext.fails is not None and FailingContext.fails(kind):
            pieces = self.redirected(pieces)
        return super().prepare_vector(kind, buffer, pieces, **options)

    def redirected(self, pieces: Sequence[FilePiece]) -> list[FilePiece]:
        """``pieces`` in the file that fails."""
        return [piece._replace(file=0) for piece in pieces]

    def close(self) -> None:
        is_open = not self._closed
        try:
            super().close()
        finally:
            if is_open:
                os.close(self._fd)


@contextmanager
def possible() -> Iterator[None]:
    """Transfers of engines that start in the block can fail."""
    with mock.patch.object(tiers, "AioContext", FailingContext):
        yield


@contextmanager
def failing_transfers(run: Run, rng: random.Random) -> Iterator[None]:
    """Some transfers that begin in the block fail: of the kinds after which the engine of ``run`` can go on."""
    kinds = () if run.placement is None else run.placement.may_fail(run.training)
    failing, left = rng.choice((kinds, kinds[:1])), [MOST_FAILURES]
    share = rng.choice((0.01, 0.05, 0.2))

    def fails(kind: str) -> bool:
        left[0] -= (failed := kind in failing and left[0] > 0 and rng.random() < share)
        run.transfers_failed |= failed
        return failed

    FailingContext.fails = fails
    try:
        yield
    finally:
        FailingContext.fails = None


def again(call: Callable[[], T]) -> T:
    """What ``call`` returns, which is called again while it meets an error of a transfer."""
    for _ in range(MOST_CALLS):
        try:
            return call()
        except (CheckpointError, SwapError) as error:
            if not isinstance(error, SwapError) and not isinstance(error.__cause__, SwapError):
                raise
            failed = error
    raise failed


class Moment:
    """What a pass changes beside the engine's state: a script that does the pass again goes back to it."""

    def __init__(self, run: Run, rng: random.Random) -> None:
        self._run, self._rng = run, rng
        self._drawn, self._numbers = rng.getstate(), len(run.numbers)
        self._random_state = torch.get_rng_state()
        self._buffers = [buffer.clone() for buffer in run.model.buffers()]

    def go_back(self) -> None:
        self._rng.setstate(self._drawn)
        del self._run.numbers[self._numbers :]
        torch.set_rng_state(self._random_state)
        with torch.no_grad():
            for buffer, value in zip(self._run.model.buffers(), self._buffers, strict=True):
                buffer.copy_(value)


def _update(run: Run, rng: random.Random) -> None:
    """All micro-batches of an update. What an error has undone is done again."""
    first, updated, calls = Moment(run, rng), False, 0
    while not updated:
        before, steps = Moment(run, rng), run.loop.global_steps
        calls += 1
        assert calls < MOST_CALLS, "the faults have ended, and the errors have not"
        try:
            loss = run.loss(rng)
        except SwapError:
            before.go_back()
            continue
        try:
            run.loop.backward(loss)
            updated = run.end_micro_batch()
        except SwapError:
            # A step that is counted has begun: what needs the parameters next continues it.
            updated = run.loop.global_steps > steps
            if updated:
                run.end_step(boundary=True)
            else:
                first.go_back()
                run.gradients_are_gone()


def _look(run: Run, rng: random.Random) -> None:
    """A forward that leaves everything as it was."""
    before = Moment(run, rng)
    try:
        with torch.no_grad():
            run.loss(rng)
    finally:
        before.go_back()


@action(Effect.WEIGHTS, weight=2, plain=False, failing=True)
def updates_with_failing_transfers(run: Run, rng: random.Random) -> None:
    """Updates during which transfers fail."""
    with failing_transfers(run, random.Random(rng.random())):
        for _ in range(2):
            _update(run, rng)
    # A read ahead of a pass that failed is met by the next pass, a write that failed by a read of its bytes.
    again(partial(_look, run, rng))
    for name in run.trained:
        for key in run.loop.state_names:
            again(partial(run.loop.get_fp32_state, name, key))
    again(run.loop.master_state_dict)
    again(run.loop.state_dict)
