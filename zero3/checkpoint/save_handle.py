"""The handle of a save, its request, and the time for which it stops training."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tiering import _logs
from tiering.checkpoint.manifest import Manifest
from tiering.errors import CheckpointError, TieringError
from zero3.checkpoint.saver import Saver
from zero3.device.timeline import StallClock

log = logging.getLogger(__name__)


class Saving:
    """A save. Once it is ``done``, the checkpoint is at ``path``, unless there was an ``error``.

    Then ``nbytes`` is the size of this rank's files, ``seconds`` the time from the call to the end of the save, at
    ``ended_at`` in Unix time, and ``stalled`` the part of ``seconds`` in which training waited.
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
        # Waits until the save is done.
        self._finish = finish
        self.error_was_raised = False

    def wait(self) -> None:
        """Wait until the save is done; all ranks call this together. Raises CheckpointError if the save has failed."""
        if not self.done:
            self._finish()
        self.error_was_raised = self.error_was_raised or self.error is not None
        if self.error is not None:
            raise self.error

    def raise_error(self) -> None:
        """Raise the error of the save if it has not been raised."""
        if not self.error_was_raised:
            self.wait()

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done else "under way"
        return f"<Saving {self.path}, {state}>"


class SaveRequest(NamedTuple):
    """Arguments of a save; all but ``save_dir`` must be equal on all ranks."""

    save_dir: str
    tag: str
    latest: bool
    exclude_frozen: bool
    keep: int | None
    background: bool

    def __str__(self) -> str:
        options = (
            f"save_latest={self.latest}, exclude_frozen_parameters={self.exclude_frozen}, keep={self.keep},"
            f" background={self.background}"
        )
        return f"'{self.tag}' to {self.save_dir} ({options})"

    @staticmethod
    def check_same(requests: Sequence[SaveRequest]) -> None:
        """CheckpointError, on all ranks alike, unless all requests are equal but for their directories.

        The first time that directories differ, a warning is logged: a script may name one by its clock.
        """
        for rank, request in enumerate(requests):
            if request._replace(save_dir=requests[0].save_dir) != requests[0]:
                raise CheckpointError(
                    f"rank {rank} is to save {request}, and rank 0 {requests[0]}: all ranks save one checkpoint"
                    " together; call save_checkpoint with the same arguments, except for client_state"
                )
        different = next((rank for rank, each in enumerate(requests) if each != requests[0]), None)
        if different is not None and not _warned_of_directories:
            _warned_of_directories.add(requests[0].save_dir)
            log.log(
                _logs.once(logging.WARNING),
                "save_checkpoint was called with %s on rank 0, and with %s on rank %d: all ranks save to the directory"
                " of rank 0",
                *(requests[0].save_dir, requests[different].save_dir, different),
            )


class RunningSave(NamedTuple):
    """A running save. ``partial`` becomes the checkpoint; ``manifest`` has no files until the save ends."""

    request: SaveRequest
    saving: Saving
    saver: Saver
    manifest: Manifest
    partial: Path
    stall_timer: StallTimer


class StallTimer:
    """Measures the time of a save, and the part of it in which training waits. Any thread may read it."""

    def __init__(self, stalls: StallClock) -> None:
        self._stalls = stalls
        self._began = time.monotonic()
        self._stalled_before = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    @property
    def stalled(self) -> float:
        """Seconds in which training waited for the save."""
        since = self._since
        return self._stalled_before + (0.0 if since is None else time.monotonic() - since)

    @contextmanager
    def stalling(self) -> Iterator[None]:
        """Training waits within the block."""
        self._since = time.monotonic()
        try:
            with self._stalls.waiting_for("checkpoint"):
                yield
        finally:
            since, self._since = self._since, None
            self._stalled_before += time.monotonic() - since


_warned_of_directories: set[str] = set()
"""The directory that the warning named."""

uncommitted: set[Path] = set()
"""Checkpoints that ranks have begun in the background, and not yet committed together."""


@atexit.register
def _warn_of_uncommitted() -> None:
    for path in sorted(uncommitted):
        log.warning(
            "checkpoint %s is not committed, though its files may be written: the script ended before all ranks agreed"
            " on it; call engine.close(), or wait() of the save, before the script ends",
            path,
        )
