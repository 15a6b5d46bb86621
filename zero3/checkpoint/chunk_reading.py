"""Reads of the chunks of a save: into windows of their own, while earlier chunks are written.

A chunk is read from where its bytes are now, or, for a checkpoint of the last snapshot, from the pages of the swap
files that the snapshot keeps, which later steps do not overwrite.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optim_cpu import kernels
from tiering.errors import SwapError
from tiering.storage.arena import PAGE, Arena, Lease, round_up
from tiering.storage.read_only import Loading
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.tickets import Ticket
from tiering.storage.versions import Kept
from tiering.weights.tensor_file import WINDOW
from zero3.checkpoint.rank_share import Chunk, Range
from zero3.checkpoint.swapped_state import SwappedState
from zero3.device.storages import as_tensor, content_of
from zero3.device.streams import Event, Streams
from zero3.device.tiers import Tiers

PARTIAL_PAGES = 4 * PAGE
"""Of a snapshot, whole pages are read: what was in memory may begin and end within a page. A chunk has two sources."""


@dataclass
class Reading:
    """A chunk that is being read.

    Bytes in swap space arrive in ``window``: ``swapped`` has the sources there, with the first byte of each in the
    window. Bytes in files of a user arrive by ``loading``. ``copied`` has an entry for each source in GPU memory: the
    range, its bytes in host memory, and the end of the copy.
    """

    chunk: Chunk
    window: Lease | None
    tickets: list[Ticket] = field(default_factory=list)
    swapped: list[tuple[Range, int]] = field(default_factory=list)
    copied: list[tuple[Range, Tensor, Event]] = field(default_factory=list)
    loading: Loading | None = None

    def settle(self) -> None:
        """Wait until no transfer uses the memory. Errors of transfers are ignored."""
        for ticket in self.tickets:
            with contextlib.suppress(SwapError):
                ticket.wait()
        if self.loading is not None:
            self.loading.settle()

    def content(self) -> Tensor:
        """Wait for the chunk; returns its bytes, with padding. They may be the home itself, in host memory."""
        try:
            for ticket in self.tickets:
                ticket.wait()
        except BaseException:
            self.settle()
            raise
        content = self._content(self.chunk.source)
        return content if self.chunk.upper is None else _joined(self._content(self.chunk.upper), content)

    def _content(self, source: Range) -> Tensor:
        """The bytes of ``source`` in host memory: its home, a copy from the GPU, or the window."""
        for swapped, at in self.swapped:
            if swapped is source:
                assert self.window is not None
                return as_tensor(self.window)[at : at + source.nbytes]
        for on_gpu, content, arrived in self.copied:
            if on_gpu is source:
                # The CPU reads these bytes next.
                arrived.wait()
                return content
        if self.loading is not None:
            return content_of(self.loading)
        assert source.home.tensor is not None
        return source.home.tensor[source.offset : source.offset + source.nbytes]


class ChunkReader:
    """Reads chunks into ``windows`` of ``window`` bytes each.

    With ``kept``, trained state is that of the last snapshot, and a window has ``PARTIAL_PAGES`` bytes more.
    """

    def __init__(
        self, tiers: Tiers, windows: Arena, window: int, copies: Copies | None, kept: SwappedState | None
    ) -> None:
        self._tiers = tiers
        self._windows = windows
        self._window = window
        self._copies = copies
        self._kept = kept

    def begin(self, chunk: Chunk) -> Reading:
        """Start to read ``chunk``. The caller releases its window."""
        sources = [source for source in (chunk.source, chunk.upper) if source is not None]
        swapped = [(source, place) for source in sources if (place := self._place_of(chunk, source))]
        # All windows have one size: the next one fits, in whatever order windows are released.
        window = self._windows.lease(self._window, "state", alone=True) if swapped else None
        reading = Reading(chunk, window)
        if chunk.source.home.files is not None:
            # Frozen parameters: they have no upper halves elsewhere.
            in_files = chunk.source
            reading.loading = self._tiers.begin_load(in_files.home, in_files.offset, in_files.nbytes)
        if self._copies is not None:
            for source in sources:
                if source.home.on_device and not self._is_kept(chunk):
                    # Begun before the step may change the tile: it waits until the saver has counted it as copied.
                    reading.copied.append((source, *self._copies.begin(source)))
        try:
            at = 0
            for source, (extent, first) in swapped:
                at = self._begin_swap_in(reading, source, extent, first, at)
        except BaseException:
            reading.settle()
            raise
        return reading

    def _is_kept(self, chunk: Chunk) -> bool:
        """Whether ``chunk`` is read where the snapshot keeps it."""
        return self._kept is not None and chunk.trained

    def _place_of(self, chunk: Chunk, source: Range) -> tuple[StripedExtent, int] | None:
        """The extent from which ``source`` is read, and its first byte there; None if it is not in swap space."""
        if self._kept is not None and chunk.trained:
            return self._kept.place_of(source)
        extent = source.home.extent
        return None if extent is None else (extent, source.offset)

    def _begin_swap_in(
        self, reading: Reading, source: Range, extent: StripedExtent, first: int, at: int
    ) -> int:
        """Start to read ``source``, from byte ``first`` of ``extent``, into the window; returns where it ends there."""
        assert self._tiers.swap is not None and reading.window is not None
        is_kept = self._is_kept(reading.chunk)
        start = first // PAGE * PAGE if is_kept else first
        nbytes = round_up(first + source.nbytes) - start if is_kept else source.nbytes
        reading.swapped.append((source, at + first - start))
        reading.tickets.append(
            self._tiers.swap.swap_in(
                extent,
                reading.window.part(at, nbytes),
                offset=start,
                kept=Kept.SNAPSHOT if is_kept else None,
            )
        )
        return at + nbytes


class Copies:
    """Copies GPU memory to ``count`` pieces of pinned host memory, in order, while compute continues.

    They run on a stream of their own. The first copy waits for all work that is on the compute stream when this is
    constructed.
    """

    def __init__(self, streams: Streams, count: int) -> None:
        self._stream = streams.save
        # Compute changes no state of a tile before it is counted as copied: so one wait, at the beginning, is enough.
        self._stream.wait_for(streams.compute.record())
        # Two for each chunk that is read, because masters may be split; and two for the chunk that is being written.
        self._pinned = [
            torch.empty(WINDOW, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(count)
        ]
        self._next = 0

    def begin(self, source: Range) -> tuple[Tensor, Event]:
        """The bytes of ``source``, valid from the event until as many further copies begin as there are buffers."""
        assert source.home.tensor is not None
        # Its last bytes were copied to a window: there are more buffers than copies whose chunk is not finished.
        into = self._pinned[self._next % len(self._pinned)][: source.nbytes]
        self._next += 1
        with self._stream.running():
            into.copy_(source.home.tensor[source.offset : source.offset + source.nbytes], non_blocking=True)
        return into, self._stream.record()


def _joined(upper: Tensor, lower: Tensor) -> Tensor:
    """The bytes of fp32 masters, from the bytes of their upper and lower 16 bits."""
    masters = torch.empty(upper.numel() // 2, device="cpu")
    kernels.join(masters.data_ptr(), upper.data_ptr(), lower.data_ptr(), masters.numel())
    return masters.view(torch.uint8)
