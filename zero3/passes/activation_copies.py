"""Copies of activations that have left the device, and what autograd keeps in place of a tensor that did."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from tiering.storage.arena import Lease
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.tickets import Ticket
from zero3.device.streams import Event


class Copy:
    """The copy of one storage: ``lease`` in memory, or ``extent`` on NVMe, or both once it was read back."""

    __slots__ = ("__weakref__", "arrival", "extent", "given", "lease", "nbytes", "number", "returning")

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.lease: Lease | None = None
        # What fills the lease: a copy from a GPU, or a read.
        self.arrival: Event | Ticket | None = None
        self.extent: StripedExtent | None = None
        # On its way back to a GPU: the bytes there, and the end of the copy.
        self.returning: tuple[Tensor, Event] | None = None
        # The storage that backward was given, as long as it lives.
        self.given: weakref.ref[UntypedStorage] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """What autograd keeps in place of a saved tensor: its place in the storage that was copied."""

    copy: Copy
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    # Whether torch reads the bytes as their complex conjugates, and as their negatives.
    is_conj: bool
    is_neg: bool
    # Without bytes: see Note [Changes in place].
    alias: Tensor
    version: int


class End(weakref.ref[Copy]):
    """Notes the end of a copy, and keeps what is to be freed then."""

    __slots__ = ("extent", "nbytes", "number")
    number: int
    nbytes: int
    extent: StripedExtent | None


class Original(weakref.ref[UntypedStorage]):
    """A storage that has a copy of its bytes at ``version``, which ``alias`` counts."""

    __slots__ = ("alias", "copy", "version")
    copy: weakref.ref[Copy]
    alias: Tensor
    version: int


def given(copy: Copy) -> UntypedStorage | None:
    """The storage that backward was given, if it still lives."""
    return None if copy.given is None else copy.given()
