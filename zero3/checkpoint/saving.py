"""A save of one rank: its request, its handle, and the saver, a thread that streams the rank's state into files.

The saver has windows of its own, so a save uses no memory of the tiers. Training continues during the save: copied
state may change, and an update of a tile waits until the saver has copied it. The saver copies tiles in the order in
which steps update them, so that an update during a save waits little.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tiering import _logs
from tiering.checkpoint.manifest import Manifest
from tiering.checkpoint.rank_writer import RankRecord, RankWriter
from tiering.config.training import IoConfig
from tiering.errors import CheckpointError, TieringError
from tiering.storage.arena import Arena
from tiering.weights.tensor_file import WINDOW, Output, TensorSpec
from zero3.building.weights import STORED_NAMES
from zero3.checkpoint.chunk_reading import PARTIAL_PAGES, ChunkReader, Copies, Reading
from zero3.checkpoint.rank_share import Share
from zero3.checkpoint.run_state import RankState
from zero3.checkpoint.swapped_state import SwappedState
from zero3.device.tiers import Tiers
from zero3.device.timeline import StallClock
from zero3.optimizer.tiles import Tile

log = logging.getLogger(__name__)

# Chunks that are being read.
AHEAD = 8
# Windows in flight to disk, in addition to one for each file.
WRITING = 4


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
    from_snapshot: bool

    def __str__(self) -> str:
        options = (
            f"save_latest={self.latest}, exclude_frozen_parameters={self.exclude_frozen}, keep={self.keep},"
            f" background={self.background}, from_snapshot={self.from_snapshot}"
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


class Source(NamedTuple):
    """What a rank saves: its state apart from the tiers, and the manifest, without files.

    With ``kept``, trained state on the tiers is what the last snapshot keeps.
    """

    state: RankState
    manifest: Manifest
    kept: SwappedState | None = None


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


class Destination(NamedTuple):
    """Where a rank writes: the files of ``rank`` of ``world_size`` in ``directory``. ``save`` is the id of the save."""

    directory: Path
    rank: int
    world_size: int
    save: str


class Saver(threading.Thread):
    """Writes ``share`` and ``state`` of one rank to ``destination``.

    With ``kept``, trained state is read where the last snapshot keeps it: then no step waits. The thread calls
    ``on_written`` when all files are written, and not after an ``error``. It calls ``on_end`` last, with or without an
    error: training no longer waits for the copies.
    """

    def __init__(
        self,
        share: Share,
        state: RankState,
        tiers: Tiers,
        destination: Destination,
        io: IoConfig,
        *,
        kept: SwappedState | None = None,
        on_written: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(name="checkpoint")
        self.error: BaseException | None = None
        # Describes all files, once they are written.
        self.record = RankRecord()
        # Chunks copied, plus files closed afterwards.
        self.progress = 0
        self._share = share
        self._state = state
        self._tiers = tiers
        self._destination = destination
        self._io = io
        self._on_written = on_written
        self._on_end = on_end
        # Its lock guards the changes of the next two fields. ``has_copied`` reads them without it: they only grow.
        self._change = threading.Condition()
        self._copied: set[Tile] = set(share.saved_elsewhere if kept is None else share.tiles)
        self._copied_all = False
        self._end_event = threading.Event()
        self._cancelled = False
        self._copies = None if tiers.streams is None else Copies(tiers.streams, 2 * AHEAD + 2)
        self._kept = kept
        self._window = WINDOW if kept is None else WINDOW + PARTIAL_PAGES
        self._windows = Arena.map(AHEAD * self._window, "checkpoint")

    def start(self) -> None:
        """Start the thread. If the system refuses one, the save ends with that error."""
        try:
            super().start()
        except RuntimeError as error:
            self._end(error)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread.

        After Ctrl-C in ``Thread.join``, CPython 3.11 counts the thread as ended while it still runs: so wait for the
        event first.
        """
        if self._end_event.wait(timeout) and self.ident is not None:
            super().join()

    @property
    def has_ended(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return self._end_event.is_set()

    def wait_for_end(self, within: float) -> bool:
        """Wait up to ``within`` seconds for the end; returns whether the save has ended."""
        return self._end_event.wait(within)

    def result(self) -> RankRecord:
        """The record of the written files. Raises the error that ended the save."""
        if isinstance(self.error, CheckpointError | OSError):
            raise self.error
        if self.error is not None:
            raise CheckpointError(
                f"{self._destination.directory}: the save was ended by {self.error!r}"
            ) from self.error
        return self.record

    def has_copied(self, tile: Tile) -> bool:
        """Whether ``tile`` may change."""
        return self._copied_all or tile in self._copied

    def let_change(self, tile: Tile | None, within: float) -> bool:
        """Wait up to ``within`` seconds until ``tile``, or with None all state, may change; returns whether it may."""
        with self._change:
            return self._change.wait_for(
                lambda: self._copied_all if tile is None else self.has_copied(tile), within
            )

    def cancel(self) -> None:
        """Cancel the save, and wait for its end."""
        # The thread checks it before it reads the next chunk.
        self._cancelled = True
        self.join()

    def run(self) -> None:
        try:
            if self._tiers.streams is not None:
                self._tiers.streams.enter_thread()
            with Output(self._io, windows=len(self._share.kinds) + 1 + WRITING) as output:
                self._save(output)
            self._on_written()
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        # First: a thread that wakes up below reads it.
        self.error = error
        # No read is under way here: ``_copy`` has waited for all of them.
        self._windows.forget_memory()
        # Before ``on_end``, so that a step does not wait for what that does. After an error there is nothing to copy
        # any more.
        self._let_all_change()
        try:
            self._on_end()
        finally:
            # Last: a thread that waits for it may use the outcome that ``on_end`` has recorded.
            self._end_event.set()

    def _save(self, output: Output) -> None:
        files: dict[str, tuple[Sequence[TensorSpec], Mapping[str, str]]] = {}
        files |= {kind: self._share.tensors(kind) for kind in self._share.kinds}
        files["rank"] = specs_of(self._state), {}
        with RankWriter(*self._destination, files, output=output) as writer:
            for tensor in self._state.tensors.values():
                writer.append("rank", bytes_of(tensor))
            self._copy(writer)
            # Every byte is in a window or on disk: training need not wait until the files are.
            self._let_all_change()
            self.record = writer.finish(self._state.content, self._note_file)

    def _note_file(self) -> None:
        self.progress += 1

    def _copy(self, writer: RankWriter) -> None:
        """Write all chunks to their files, and read the next ``AHEAD`` chunks meanwhile."""
        reading: deque[Reading] = deque()
        reader = ChunkReader(self._tiers, self._windows, self._window, self._copies, self._kept)
        try:
            for chunk in self._share.chunks():
                if self._cancelled:
                    raise CheckpointError(
                        f"{self._destination.directory}: the save was cancelled; save again"
                    )
                reading.append(reader.begin(chunk))
                if len(reading) == AHEAD:
                    self._finish(reading.popleft(), writer)
            while reading:
                self._finish(reading.popleft(), writer)
        finally:
            for each in reading:
                # Reads still fill their windows, and the memory of all windows is dropped after this.
                each.settle()

    def _finish(self, reading: Reading, writer: RankWriter) -> None:
        """Wait for the chunk, and write its elements, without padding, to its file."""
        chunk, content = reading.chunk, reading.content()
        for first, nbytes in chunk.parts:
            writer.append(chunk.kind, bytes_of(content[first : first + nbytes]))
        # ``append`` has copied the bytes, so the window may be filled again.
        if reading.window is not None:
            reading.window.release()
        self.progress += 1
        if chunk.tile is not None:
            with self._change:
                # Last: from here on a step may change the tile at home.
                self._copied.add(chunk.tile)
                self._change.notify_all()

    def _let_all_change(self) -> None:
        with self._change:
            self._copied_all = True
            self._change.notify_all()


def specs_of(state: RankState) -> list[TensorSpec]:
    """The tensors of the state of a rank, as in its file."""
    return [
        TensorSpec(name, STORED_NAMES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in state.tensors.items()
    ]


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor in host memory."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()


def check_shared(partial: Path) -> None:
    """CheckpointError unless this rank sees ``partial``, which rank 0 has created."""
    if not partial.is_dir():
        raise CheckpointError(
            f"{partial}, which rank 0 created, does not exist on this node: save to a file system that all nodes share"
        )
