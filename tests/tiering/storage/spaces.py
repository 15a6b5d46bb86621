"""Bytes in and out of a swap space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tiering.storage.arena import Arena, Lease
from tiering.storage.slab_file import SlabFile
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.swap_space import SwapSpace
from tiering.storage.tickets import Ticket

OpenSpace = Callable[..., SwapSpace]


def filled(arena: Arena, content: bytes) -> Lease:
    lease = arena.lease(len(content), "out")
    lease.view[: len(content)] = content
    return lease


def write(space: SwapSpace, extent: StripedExtent, arena: Arena, content: bytes, offset: int = 0) -> Ticket:
    lease = filled(arena, content)
    ticket = space.swap_out(extent, lease, offset=offset, nbytes=len(content))
    lease.retire(ticket)
    return ticket


def read(space: SwapSpace, extent: StripedExtent, arena: Arena, offset: int, nbytes: int) -> bytes:
    lease = arena.lease(nbytes, "in")
    ticket = None
    try:
        ticket = space.swap_in(extent, lease, offset=offset, nbytes=nbytes)
        assert ticket.wait() == nbytes
        return bytes(lease.view[:nbytes])
    finally:
        assert ticket is None or ticket.done()
        lease.release()


def on_disk(extent: StripedExtent) -> bytes:
    """The extent's bytes as they lie in the files."""
    raw = bytearray(extent.nbytes)
    for piece in extent.stripes.pieces(0, extent.nbytes):
        part = extent.parts[piece.path]
        with Path(f"/proc/self/fd/{part.slab.fd}").open("rb") as file:
            file.seek(part.extent.offset + piece.offset)
            raw[piece.start : piece.start + piece.nbytes] = file.read(piece.nbytes)
    return bytes(raw)


def at_places(places: Iterable[tuple[SlabFile, int, int]]) -> Iterator[bytes]:
    """The bytes in the files at ``StripedExtent.places``."""
    for slab, start, nbytes in places:
        with Path(f"/proc/self/fd/{slab.fd}").open("rb") as file:
            file.seek(start)
            yield file.read(nbytes)
