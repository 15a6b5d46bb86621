"""A save under way: what it was asked for, how far it is, and what has become of it."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tiering.checkpoint.manifest import Manifest
from tiering.errors import CheckpointError, TieringError
from zero3.checkpoint.saver import Saver
from zero3.device.timeline import StallClock

log = logging.getLogger(__name__)


class Saving:
    """A save: ``path`` is where the checkpoint is once it is ``done``, unless there was an ``error``.

    Then ``nbytes`` are those of this rank's files, ``seconds`` passed from the call until the checkpoint was there, at
    ``ended_at`` in Unix time, and in ``stalled`` of them training stood still.
    """

    def __init__(self, finish: Callable[[], None], path: Path, tag: str) -> None:
        self.path = path
        self.tag = tag
        self.done = False
        self.error: TieringError | None = None
        self.nbytes = 0
        self.seconds = 0.0
        self.stalled = 0.0
        self.ended_at = 0.0
        self._finish = finish  # waits until the save is done
        self.told = False  # whether somebody had the error raised

    def wait(self) -> None:
        """Wait until the checkpoint is there; all ranks call it together. CheckpointError if it could not be saved."""
        if not self.done:
            self._finish()
        self.told = self.told or self.error is not None
        if self.error is not None:
            raise self.error

    def tell(self) -> None:
        """Raise the error if nobody has been told of it."""
        if not self.told:
            self.wait()

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done else "under way"
        return f"<Saving {self.path}, {state}>"


class Asked(NamedTuple):
    """What a save was called with, and all ranks have to want."""

    save_dir: str
    tag: str
    latest: bool
    exclude_frozen: bool
    keep: int | None
    background: bool

    def __str__(self) -> str:
        how = (
            f"save_latest={self.latest}, exclude_frozen_parameters={self.exclude_frozen}, keep={self.keep},"
            f" background={self.background}"
        )
        return f"'{self.tag}' to {self.save_dir} ({how})"

    @staticmethod
    def check_same(of_all: Sequence[Asked]) -> None:
        """CheckpointError, on all ranks alike, unless they want the same."""
        for rank, theirs in enumerate(of_all):
            if theirs != of_all[0]:
                raise CheckpointError(
                    f"rank {rank} is to save {theirs}, and rank 0 {of_all[0]}: all ranks save one checkpoint together,"
                    " each its part; call save_checkpoint with the same arguments, but for client_state"
                )


class UnderWay(NamedTuple):
    """A save under way: ``partial`` becomes the checkpoint. ``manifest`` is as of its beginning, and lacks files."""

    asked: Asked
    saving: Saving
    saver: Saver
    manifest: Manifest
    partial: Path
    standstill: Standstill


class Standstill:
    """How long a save has taken since ``began``, and for how long of it training stood still. Any thread may ask."""

    def __init__(self, stalls: StallClock) -> None:
        self._stalls = stalls
        self._began = time.monotonic()
        self._still = 0.0
        self._since: float | None = None

    @property
    def lasted(self) -> float:
        """Seconds until now."""
        return time.monotonic() - self._began

    @property
    def stalled(self) -> float:
        """Seconds of them in which training stood still."""
        since = self._since
        return self._still + (0.0 if since is None else time.monotonic() - since)

    @contextmanager
    def now(self) -> Iterator[None]:
        """Training stands still within the block."""
        self._since = time.monotonic()
        try:
            with self._stalls.waiting_for("checkpoint"):
                yield
        finally:
            since, self._since = self._since, None
            self._still += time.monotonic() - since


uncommitted: set[Path] = set()
"""Checkpoints that ranks have begun in the background, and not yet agreed on."""


@atexit.register
def _tell_uncommitted() -> None:
    for path in sorted(uncommitted):
        log.warning(
            "checkpoint %s is not there, though its files may be written: the script has ended before all ranks agreed"
            " on it; end with engine.close(), or the save's wait()",
            path,
        )
