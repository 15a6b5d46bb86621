"""Where the trained state of a rank is in swap space, as snapshots have it; and what of it is in memory."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from tiering.checkpoint.manifest import WEIGHTS
from tiering.checkpoint.swap_places import Place, SwappedTensor, join_up
from tiering.placement.tenants import SNAPSHOTS
from tiering.storage.arena import Arena, round_up
from tiering.storage.request import BufferPart
from tiering.storage.slab_file import SlabFile
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.tickets import Ticket
from tiering.storage.versions import Kept
from tiering.weights.files import nbytes_of
from zero3.checkpoint.rank_share import Range, Share
from zero3.device.home import Home
from zero3.device.storages import as_tensor
from zero3.device.tiers import Tiers
from zero3.parts import Assembly

Tensors = dict[str, dict[str, SwappedTensor]]
"""By kind and name."""

PIECE = 4 << 20
"""Bytes that one transfer writes."""
WRITING = 16
"""Transfers in flight. As many pieces of memory for what cannot be written from where it is."""


class SwappedState:
    """Where trained state is in swap space. What is in memory has a place there for snapshots."""

    def __init__(self, parts: Assembly) -> None:
        self._tiers: Tiers = parts.tiers
        # By the identity of the home: the home, its bytes, and where they begin in the extent.
        self._homes: dict[int, tuple[Home, int, int]] = {}
        end = 0
        for home, nbytes in _in_memory(parts):
            self._homes[id(home)] = home, nbytes, end
            end += round_up(nbytes)
        assert end <= parts.plan.snapshot_bytes, "the plan has counted these bytes"

    def places(self, share: Share, files: Sequence[SlabFile]) -> Tensors:
        """The places of the tensors of ``share`` in ``files``, by kind and name."""
        numbers = {slab: number for number, slab in enumerate(files)}

        def locate(source: Range) -> Iterator[Place]:
            extent, start = self.place_of(source)
            for slab, offset, nbytes in extent.places(start, start + source.nbytes):
                yield numbers[slab], offset, nbytes

        return places_of(share, locate)

    def kept(self) -> Iterator[tuple[SlabFile, int, int]]:
        """Where all that a snapshot keeps is now: see StripedExtent.places. Whole pages."""
        for extent in self._tiers.extents:
            if Kept.SNAPSHOT in extent.kept:
                yield from extent.places(0, extent.nbytes)

    def plan(self, share: Share) -> str:
        """A digest of what each extent has for the tensors of ``share``, wherever it is."""
        extents = {extent: number for number, extent in enumerate(self._tiers.extents)}

        def locate(source: Range) -> Iterator[Place]:
            extent, start = self.place_of(source)
            yield extents[extent], start, source.nbytes

        tensors = places_of(share, locate)
        content = {
            kind: {name: each.as_dict() for name, each in named.items()} for kind, named in tensors.items()
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def place_of(self, source: Range) -> tuple[StripedExtent, int]:
        """The extent in which a snapshot has the bytes of ``source``, and the first of them."""
        extent, begin = source.home.extent, source.home.offset
        if extent is None:
            extent, (_, _, begin) = self._tiers.flushed, self._homes[id(source.home)]
        assert extent is not None
        return extent, begin + source.offset

    def write(self) -> None:
        """Write all of it, and wait for the writes. Raises SwapError."""
        extent, swap = self._tiers.flushed, self._tiers.swap
        if extent is None or not self._homes:
            return
        assert swap is not None
        writing: deque[Ticket] = deque()
        copies: Arena | None = None
        try:
            for home, nbytes, begin in self._homes.values():
                assert home.tensor is not None
                for at in range(0, nbytes, PIECE):
                    size = min(PIECE, nbytes - at)
                    if len(writing) == WRITING:
                        writing.popleft().wait()
                    part = self._in_place(home, at, size)
                    if part is not None:
                        writing.append(swap.swap_out(extent, part, offset=begin + at))
                        continue
                    copies = copies or Arena.map(WRITING * PIECE, SNAPSHOTS)
                    lease = copies.lease(round_up(size), SNAPSHOTS)
                    # From a GPU: after the kernels of the current stream; the CPU waits for it.
                    as_tensor(lease)[:size].copy_(home.tensor[at : at + size])
                    ticket = swap.swap_out(extent, lease, offset=begin + at)
                    lease.retire(ticket)
                    writing.append(ticket)
            while writing:
                writing.popleft().wait()
        finally:
            # After an exception, too, no write may read memory that changes or is freed.
            swap.settle(extent)
            if copies is not None:
                copies.forget_memory()

    def _in_place(self, home: Home, at: int, size: int) -> BufferPart | None:
        """The memory itself, in whole pages, if a transfer can read it."""
        address, nbytes = home.address + at, round_up(size)
        for arena in (self._tiers.host, self._tiers.device_arena):
            inside = arena.address <= address and address + nbytes <= arena.address + arena.capacity
            if home.on_host and inside and address == round_up(address):
                return BufferPart(arena, address, nbytes)
        return None


def _in_memory(parts: Assembly) -> Iterator[tuple[Home, int]]:
    """The homes in memory of which a snapshot has bytes, with the number of these."""
    stepped: dict[int, int] = {}
    for tile in parts.tiles:
        stepped[tile.group.index] = max(tile.end, stepped.get(tile.group.index, 0))
        if tile.state.tensor is not None and tile.state.tensor.numel():
            yield tile.state, tile.state.tensor.numel()
    for group in parts.groups:
        is_master = parts.layout.for_group(group).master_itemsize < nbytes_of("F32", 1)
        nbytes = stepped.get(group.index, 0) * group.dtype.itemsize
        if is_master and group.shard_home.tensor is not None and nbytes:
            yield group.shard_home, nbytes


def places_of(share: Share, locate: Callable[[Range], Iterable[Place]]) -> Tensors:
    """The places of the trained tensors of ``share``, by kind and name, whose bytes ``locate`` finds."""
    specs = {kind: share.tensors(kind) for kind in share.kinds}
    # The chunks have the bytes of a kind in the order of its tensors.
    tensors = {kind: iter(spec for spec in listed if spec.nbytes) for kind, (listed, _) in specs.items()}
    under_way: dict[str, tuple[str, int]] = {}
    places: dict[str, dict[str, list[Place]]] = {kind: {} for kind in share.kinds}
    upper: dict[str, list[Place]] = {}

    for chunk in share.chunks():
        # A chunk of padding has no parts, and a rank that has only such chunks has no tensors.
        for first, nbytes in chunk.parts:
            itemsize = nbytes_of(specs[chunk.kind][0][0].dtype, 1)
            name, remaining = under_way.get(chunk.kind, ("", 0))
            if not remaining:
                spec = next(tensors[chunk.kind])
                name, remaining = spec.name, spec.nbytes
            under_way[chunk.kind] = name, remaining - nbytes
            # The elements of the source may be halves of those in the tensor.
            size = itemsize if chunk.upper is None else itemsize // 2
            start, length = first // itemsize * size, nbytes // itemsize * size
            places[chunk.kind].setdefault(name, []).extend(locate(_part(chunk.source, start, length)))
            if chunk.upper is not None:
                upper.setdefault(name, []).extend(locate(_part(chunk.upper, start, length)))
    return {
        kind: {
            spec.name: SwappedTensor(
                spec.dtype,
                int(firsts.get(spec.name, "0")),
                join_up(places[kind].get(spec.name, ())),
                join_up(upper.get(spec.name, ())) if kind == WEIGHTS else (),
            )
            for spec in listed
        }
        for kind, (listed, firsts) in specs.items()
    }


def _part(source: Range, first: int, nbytes: int) -> Range:
    return Range(source.home, source.offset + first, nbytes)
