"""The saver: a thread that streams a rank's share of all state, from wherever it lives, into files.

It has windows of its own, so a save takes no room from the tiers, and training may go on meanwhile: what was copied may
change, and who is about to update a tile waits until it was. The order is that in which steps come to
tiles, so an update during a save follows close behind.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from optim_cpu import kernels
from tiering.checkpoint.rank_writer import RankRecord, RankWriter
from tiering.config.training import IoConfig
from tiering.errors import CheckpointError, SwapError
from tiering.storage.arena import Arena, Lease
from tiering.storage.tickets import Transfer
from tiering.weights.tensor_file import WINDOW, Output, TensorSpec
from zero3.building.weights import STORED_NAMES
from zero3.checkpoint.rank_share import Chunk, Range, Share
from zero3.checkpoint.run_state import RankState
from zero3.device.streams import Event, Streams
from zero3.device.tiers import Tiers, as_tensor
from zero3.optimizer.tiles import Tile

AHEAD = 8  # chunks that are being read
WRITING = 4  # windows on their way to disk, beside one for each file


@dataclass
class _Reading:
    """A chunk, and the window in which its bytes arrive, if they are on NVMe: the source's first.

    ``copied`` is what comes from a GPU, where it arrives, and the copy's end.
    """

    chunk: Chunk
    window: Lease | None
    tickets: list[Transfer]
    copied: list[tuple[Range, Tensor, Event]] = field(default_factory=list)

    def settle(self) -> None:
        """Wait until the memory is nobody's, whatever became of the transfers."""
        for ticket in self.tickets:
            with contextlib.suppress(SwapError):
                ticket.wait()


class Destination(NamedTuple):
    """Where a rank writes: the files of ``rank`` of ``world_size`` in ``directory``. ``save`` is the id of the save."""

    directory: Path
    rank: int
    world_size: int
    save: str


class Saver(threading.Thread):
    """Writes ``share`` and ``state`` of one rank to ``destination``.

    The thread calls ``on_written`` when all files are written, and not after an ``error``. It calls ``on_end`` last,
    with or without an error: training no longer waits for the copies.
    """

    def __init__(
        self,
        share: Share,
        state: RankState,
        tiers: Tiers,
        destination: Destination,
        io: IoConfig,
        *,
        on_written: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(name="checkpoint")
        self.error: BaseException | None = None
        self.record = RankRecord()  # of all files, once they are written
        self.progress = 0  # chunks that were copied, and files that were closed since
        self._share = share
        self._state = state
        self._tiers = tiers
        self._destination = destination
        self._io = io
        self._on_written = on_written
        self._on_end = on_end
        self._change = threading.Condition()
        self._copied: set[Tile] = set(share.not_here)
        self._copied_all = False
        self._ended = threading.Event()
        self._cancelled = False
        self._copies = None if tiers.streams is None else _Copies(tiers.streams)
        self._reads = Arena.map(AHEAD * WINDOW, "checkpoint")

    def start(self) -> None:
        """As any thread's; where none is to be had, the save has ended before it has begun."""
        try:
            super().start()
        except RuntimeError as error:
            self._end(error)

    def join(self, timeout: float | None = None) -> None:
        """As any thread's, but: Ctrl-C in a thread's own join lets CPython 3.11 count it as ended while it runs on."""
        if self._ended.wait(timeout) and self.ident is not None:
            super().join()

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def ended(self, within: float) -> bool:
        """Wait that many seconds for its end; says whether it has come."""
        return self._ended.wait(within)

    def result(self) -> RankRecord:
        """What it has written. Raises what has ended it before its time."""
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
        """Wait that many seconds until ``tile``, or all state, may change; says whether it may."""
        with self._change:
            return self._change.wait_for(
                lambda: self._copied_all if tile is None else self.has_copied(tile), within
            )

    def cancel(self) -> None:
        """End it soon, and wait for that."""
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
        self.error = error
        self._reads.forget_memory()
        self._let_all_change()
        try:
            self._on_end()
        finally:
            self._ended.set()

    def _save(self, output: Output) -> None:
        files: dict[str, tuple[Sequence[TensorSpec], Mapping[str, str]]] = {}
        files |= {kind: self._share.tensors(kind) for kind in self._share.kinds}
        own = self._state.tensors
        files["rank"] = (
            [TensorSpec(name, STORED_NAMES[own[name].dtype], tuple(own[name].shape)) for name in own],
            {},
        )
        with RankWriter(*self._destination, files, output=output) as writer:
            for tensor in self._state.tensors.values():
                writer.append("rank", _bytes(tensor))
            self._copy(writer)
            self._let_all_change()
            self.record = writer.finish(self._state.content, self._note_file)

    def _note_file(self) -> None:
        self.progress += 1

    def _copy(self, writer: RankWriter) -> None:
        """All chunks, each to its file, while the next ones are being read."""
        reading: deque[_Reading] = deque()
        try:
            for chunk in self._share.chunks():
                reading.append(self._read(chunk))
                if len(reading) == AHEAD:
                    self._finish(reading.popleft(), writer)
            while reading:
                self._finish(reading.popleft(), writer)
        finally:
            for each in reading:
                each.settle()

    def _read(self, chunk: Chunk) -> _Reading:
        if self._cancelled:
            raise CheckpointError(
                f"{self._destination.directory}: the save was given up before its end; save again"
            )
        sources = [
            source for source in (chunk.source, chunk.upper) if source and source.home.extent is not None
        ]
        # Of one size each: whatever order they come free in, the next one fits.
        window = self._reads.lease(WINDOW, "state", alone=True) if sources else None
        reading, at = _Reading(chunk, window, []), 0
        if self._copies is not None:
            for source in (chunk.source, chunk.upper):
                if source is not None and source.home.on_device:
                    reading.copied.append((source, *self._copies.begin(source)))
        try:
            for source in sources:
                assert self._tiers.swap is not None and window is not None and source.home.extent is not None
                part = window.part(at, source.nbytes)
                at += source.nbytes
                reading.tickets.append(
                    self._tiers.swap.swap_in(source.home.extent, part, offset=source.offset)
                )
        except BaseException:
            reading.settle()
            raise
        return reading

    def _finish(self, reading: _Reading, writer: RankWriter) -> None:
        """The chunk's elements, without what only pads them, go to its file."""
        chunk = reading.chunk
        try:
            for ticket in reading.tickets:
                ticket.wait()
        except BaseException:
            reading.settle()
            raise
        content = _content(chunk.source, reading, 0)
        if chunk.upper is not None:
            at = chunk.source.nbytes if chunk.source.home.extent is not None else 0
            content = _joined(_content(chunk.upper, reading, at), content)
        elements = content.view(chunk.dtype)
        for first, numel in chunk.parts:
            writer.append(chunk.kind, _bytes(elements[first : first + numel]))
        if reading.window is not None:
            reading.window.release()
        self.progress += 1
        if chunk.tile is not None:
            with self._change:
                self._copied.add(chunk.tile)
                self._change.notify_all()

    def _let_all_change(self) -> None:
        with self._change:
            self._copied_all = True
            self._change.notify_all()


def _content(source: Range, reading: _Reading, at: int) -> Tensor:
    """The bytes of ``source``, on the CPU: in memory, from a GPU, or at ``at`` of the window."""
    for on_gpu, content, arrived in reading.copied:
        if on_gpu is source:
            arrived.wait()
            return content
    if source.home.tensor is not None:
        return source.home.tensor[source.offset : source.offset + source.nbytes]
    assert reading.window is not None
    return as_tensor(reading.window)[at : at + source.nbytes]


def _joined(upper: Tensor, lower: Tensor) -> Tensor:
    """fp32 masters, as bytes, of their halves."""
    masters = torch.empty(upper.numel() // 2, device="cpu")
    kernels.join(masters.data_ptr(), upper.data_ptr(), lower.data_ptr(), masters.numel())
    return masters.view(torch.uint8)


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()


class _Copies:
    """Copies of a GPU's memory, in the order in which they begin, beside the compute that goes on meanwhile.

    Before they begin, the device does all that it has been told until now.
    """

    def __init__(self, streams: Streams) -> None:
        self._stream = streams.save
        self._stream.wait_for(streams.compute.record())
        # Two for each chunk that is read, where masters are split; and those of one that is being taken.
        self._pinned = [
            torch.empty(WINDOW, dtype=torch.uint8, device="cpu", pin_memory=True)
            for _ in range(2 * AHEAD + 2)
        ]
        self._next = 0

    def begin(self, source: Range) -> tuple[Tensor, Event]:
        """The bytes of ``source``, there once the event has come, until as many others have begun as there is room."""
        assert source.home.tensor is not None
        into = self._pinned[self._next % len(self._pinned)][: source.nbytes]
        self._next += 1
        with self._stream.running():
            into.copy_(source.home.tensor[source.offset : source.offset + source.nbytes], non_blocking=True)
        return into, self._stream.record()
