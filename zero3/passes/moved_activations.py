"""Activations on the tiers: tensors that autograd saves leave the device, and come back before backward uses them.

The bytes of a saved tensor's storage are copied to the *activation memory*, an arena in host memory. While copies there
have more than half of it, the oldest are written to NVMe if the plan allows that: backward uses them last. The other
half is room for what is being written and what is read ahead. Backward uses tensors in about the reverse order in which
they were saved, so the next older ones are read ahead. What is written depends on sizes and order alone, not on time.

Only storages of at least ``SMALLEST`` bytes are moved, and none of parameters and buffers. Tensors that share a storage
share one copy, as long as the storage lives and no operation has changed it. A tensor for which there is no room stays
where it is. What a recomputation saves stays too, because backward needs it next.

Note [A copy ends anywhere]
    Torch drops a saved tensor on any thread, in the middle of any operation. So nothing is freed at that moment: a
    weak reference whose callback is in C notes the end, and the next call of this file frees the extent. A range of the
    activation memory is free when nothing refers to its lease any more (see tiering/storage/arena.py): neither the
    copy, nor a tensor that backward was given, nor a transfer. No lease is released by name.

Note [Changes in place]
    Torch raises if a saved tensor was changed in place before backward. For each saved tensor an alias without bytes is
    kept, which shares the version that torch counts. So a moved tensor raises as well. The tensor that backward is
    given shares it too, because a function may change it there, and others that saved it would read what is changed.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from tiering import _logs
from tiering._interrupts import deferred_interrupts
from tiering.config.fields import format_size
from tiering.errors import SwapError
from tiering.placement.workload import ACTIVATIONS
from tiering.storage.arena import PAGE, Arena, Lease, round_up
from tiering.storage.read_ahead import FETCH_PRIORITY
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.tickets import Ticket
from tiering.telemetry import COPIES_OF
from zero3.device.storages import (
    as_tensor,
    bytes_of,
    check_version,
    share_version,
    with_version_of,
    without_bytes,
)
from zero3.device.streams import Event
from zero3.device.tiers import Tiers
from zero3.params.layout import tiles
from zero3.params.param_group import ParamGroup
from zero3.passes.activation_copies import Copy, End, Moved, Original, given
from zero3.passes.kept_activations import Kept, KeptActivations
from zero3.passes.pass_state import in_autograd

log = logging.getLogger(__name__)

SMALLEST = 1 << 20
"""Bytes of the smallest storage that is moved: a smaller one costs more time than its memory is worth."""
FARTHEST = 64
"""Copies that are looked at to find those to read ahead."""
IN_FLIGHT_SHARE = 8
"""Copies from a GPU in flight have at most this fraction (1/n) of the activation memory."""
PIECES = 8
"""A storage that is too large for the activation memory is moved in pieces of this fraction (1/n) of it."""
MOST_ORIGINALS = 1024
"""Entries of storages that were freed before they are removed."""


class MovedActivations:
    """Moves activations of ``model`` to ``memory``, an arena, and on to NVMe if ``on_nvme``.

    All of them, or only those for which ``kept`` has no room. Calls come from one thread at a time: the one that runs a
    forward, or autograd's.
    """

    def __init__(
        self,
        tiers: Tiers,
        memory: Arena,
        model: nn.Module,
        groups: Iterable[ParamGroup],
        *,
        on_nvme: bool,
        kept: KeptActivations | None = None,
    ) -> None:
        self._tiers = tiers
        self._memory = memory
        self._model = model
        self._parameters = frozenset(group.storage_key for group in groups)  # addresses of their storages
        self._on_nvme = on_nvme
        self._kept = kept
        self._last = 0  # the number of the last copy
        self._ends: dict[int, End] = {}  # by number: of copies that live, or are not freed yet
        self._ended: deque[Any] = deque()
        self._on_end: Callable[[Any], None] = self._ended.append  # in C: see Note [A copy ends anywhere]
        self._unwritten: dict[
            int, int
        ] = {}  # bytes of copies that are in memory only, by number, oldest first
        self._unwritten_bytes = 0
        self._originals: dict[int, Original] = {}  # by address
        # Numbers of copies that have a lease besides their extent: read ahead, and given to backward.
        self._ahead: dict[int, None] = {}
        self._given: dict[int, None] = {}
        self._writes: deque[Ticket] = deque()
        # Through which bytes can be read while tensors of backward have all other room.
        self._spare: Lease | None = memory.lease(self._piece_bytes, ACTIVATIONS) if on_nvme else None
        # Copies over the link in flight, oldest first: both sides must stay as they are.
        self._leaving: deque[tuple[Event, Lease, Tensor]] = deque()
        self._returning: deque[tuple[Event, Lease, Tensor]] = deque()
        self._buffers = frozenset[int]()  # addresses of their storages
        self._warned = False
        self._freed = tiers.freed
        # Bytes since the start: copied to the activation memory, written to NVMe, read back.
        self.copied_bytes = self.written_bytes = self.read_bytes = 0

    def begin_pass(self) -> None:
        """A forward of the whole model begins."""
        self._free_ended()
        if self._kept is not None:
            self._kept.begin_pass()
        self._buffers = frozenset(
            buffer.untyped_storage()._cdata
            for buffer in self._model.buffers()
            if buffer.layout is torch.strided
        )

    def end_backward(self) -> None:
        """A backward has ended: free the copies of the tensors that it has dropped."""
        with deferred_interrupts():
            self._free_ended()
            if self._kept is not None:
                self._kept.end_backward()

    def take(self, tensor: Tensor) -> Moved | Kept | None:
        """What autograd keeps in place of a tensor that it saves; None: the tensor, which never leaves."""
        if type(tensor) is not Tensor or tensor.device != self._tiers.device or not _is_dense(tensor):
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST or in_autograd():
            return None
        if storage._cdata in self._parameters or storage._cdata in self._buffers:
            return None
        if self._kept is None or self._copy_of(storage, tensor) is not None:
            return self._move(tensor)
        with deferred_interrupts():
            return self._kept.keep(tensor, self._move)

    def _move(self, tensor: Tensor) -> Moved | None:
        """Copy the storage of ``tensor``; None if there is no room."""
        storage = tensor.untyped_storage()
        copy, alias = self._copy_of(storage, tensor), without_bytes(tensor)
        if copy is None:
            # An interruption between the statements would leave bytes that nobody counts.
            with deferred_interrupts(), torch.no_grad():
                self._free_ended()
                copy = self._make_copy(storage, storage.nbytes())
            if copy is None:
                return None
            original = Original(storage)
            original.copy, original.alias, original.version = weakref.ref(copy), alias, tensor._version
            self._originals[storage._cdata] = original
        return Moved(
            copy,
            tensor.dtype,
            int(tensor.storage_offset()),
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
            alias,
            tensor._version,
        )

    def give(self, packed: Moved | Kept) -> Tensor:
        """The tensor, on the device. RuntimeError if it was changed in place since it was saved, as torch raises."""
        moved = packed.moved if isinstance(packed, Kept) else packed
        if moved is None:
            assert isinstance(packed, Kept)
            return packed.checked()
        check_version(moved.alias, moved.version, moved.shape)
        copy = moved.copy
        with deferred_interrupts(), torch.no_grad():
            storage = given(copy)
            if storage is None:
                storage = self._fetch(copy)
                copy.given = weakref.ref(storage)
                if self._freed is not None:
                    # A backward makes and frees a gradient of about this size.
                    self._freed.look()
                self._read_ahead(copy.number)
            tensor = torch.empty(0, dtype=moved.dtype, device=self._tiers.device)
            tensor.set_(storage, moved.offset, moved.shape, moved.strides)
            tensor = tensor.conj() if moved.is_conj else tensor
            return with_version_of(moved.alias, torch._neg_view(tensor) if moved.is_neg else tensor)

    @property
    def used(self) -> dict[str, int]:
        """Bytes of the copies that live, by the name of the tier."""
        self._free_ended()
        written = sum(end.nbytes for end in self._ends.values() if end.extent is not None)
        return {"host": self._unwritten_bytes, "nvme": written}

    def _copy_of(self, storage: UntypedStorage, tensor: Tensor) -> Copy | None:
        """The copy of ``storage``, in which ``tensor`` lies, if it still has the bytes of the tensor."""
        original = self._originals.get(storage._cdata)
        # Another storage may have the address of one that was freed.
        if original is None or original() is not storage or original.version != tensor._version:
            return None
        # Tensors in one storage need not share a version: the parts of unsafe_chunk do not, and each is changed in
        # place after another one was saved.
        return original.copy() if share_version(original.alias, tensor) else None

    def _make_copy(self, storage: UntypedStorage, nbytes: int) -> Copy | None:
        copy, source = Copy(self._last + 1, nbytes), bytes_of(storage)
        if self._on_nvme and round_up(nbytes) > self._memory.capacity // 2:
            if not self._write_in_pieces(copy, source):
                return None
        else:
            lease = self._room(nbytes)
            if lease is None:
                self._warn_of_room(nbytes)
                return None
            copy.lease, copy.arrival = lease, self._copy_out(source, lease)
            self._unwritten[copy.number] = nbytes
            self._unwritten_bytes += nbytes
        self._last += 1
        end = End(copy, self._on_end)
        end.number, end.nbytes, end.extent = copy.number, nbytes, copy.extent
        self._ends[copy.number] = end
        self.copied_bytes += nbytes
        if self._freed is not None:
            self._freed.look()
        while self._on_nvme and self._unwritten_bytes > self._memory.capacity // 2:
            self._write_oldest()
        return copy

    def _copy_out(self, source: Tensor, lease: Lease) -> Event | None:
        """Copy ``source`` to ``lease``; from a GPU behind compute, and the returned event is the end."""
        target = as_tensor(lease)[: source.numel()]
        if self._tiers.streams is None:
            target.copy_(source)
            return None
        assert self._tiers.copies is not None
        after = [self._tiers.streams.compute.record()]
        event = self._tiers.copies.to_host(target, source, after=after, kind=ACTIVATIONS)
        # The CPU runs ahead of the device: without a bound, the sources of all copies would stay in device memory.
        self._leaving.append((event, lease, source))
        self._drop_ended(self._leaving, most=self._memory.capacity // IN_FLIGHT_SHARE)
        return event

    def _drop_ended(self, copies: deque[tuple[Event, Lease, Tensor]], *, most: int) -> None:
        """Drop copies over the link that have ended; waits until at most ``most`` bytes are in flight."""
        in_flight = sum(tensor.numel() for _, _, tensor in copies)
        while copies and (in_flight > most or copies[0][0].done()):
            event, _, tensor = copies.popleft()
            with self._tiers.stalls.waiting_for(COPIES_OF + ACTIVATIONS):
                event.wait()
            in_flight -= tensor.numel()

    def _write_oldest(self) -> None:
        """Start to write the oldest copy that is in memory only."""
        number = next(iter(self._unwritten))
        copy = self._ends[number]()
        if copy is not None:
            assert copy.lease is not None
            self._wait_for(copy)
            extent = self._tiers.lend(copy.nbytes, ACTIVATIONS)
            try:
                self._write(extent, copy.lease)
            except BaseException:
                self._tiers.take_back(extent)
                raise
            self._ends[number].extent = copy.extent = extent
            # The write keeps the lease, and so does a tensor that backward was given.
            copy.lease = None
        self._unwritten_bytes -= self._unwritten.pop(number)

    def _write(self, extent: StripedExtent, lease: Lease, *, offset: int = 0) -> None:
        assert self._tiers.swap is not None
        self._writes.append(self._tiers.swap.swap_out(extent, lease, offset=offset))
        self.written_bytes += lease.nbytes

    def _write_in_pieces(self, copy: Copy, source: Tensor) -> bool:
        """Write a storage that is too large for the activation memory; False if that has no room for a piece."""
        extent = self._tiers.lend(copy.nbytes, ACTIVATIONS)
        try:
            for start, end in tiles(source.numel(), self._piece_bytes):
                lease = self._room(end - start)
                if lease is None:
                    self._warn_of_room(end - start)
                    self._tiers.take_back(extent)
                    return False
                event = self._copy_out(source[start:end], lease)
                if event is not None:
                    event.wait()
                self._write(extent, lease, offset=start)
        except BaseException:
            self._tiers.take_back(extent)
            raise
        copy.extent = extent
        return True

    @property
    def _piece_bytes(self) -> int:
        """Bytes of a part of a storage that is moved in parts."""
        return max(PAGE, self._memory.capacity // PIECES // PAGE * PAGE)

    def _room(self, nbytes: int, *, ahead: bool = False) -> Lease | None:
        """A lease, if one can be had: it waits for writes, and reads ahead give way. ``ahead``: only free room."""
        while (lease := self._memory.try_lease(nbytes, ACTIVATIONS)) is None and not ahead:
            if self._given:
                # A tensor that backward still has keeps its lease.
                self._drop_lease(self._given, next(iter(self._given)))
            elif self._leaving or self._returning:
                self._drop_ended(self._leaving, most=0)
                self._drop_ended(self._returning, most=0)
            elif self._writes:
                assert self._tiers.aio is not None
                with self._tiers.stalls.waiting_for(ACTIVATIONS), contextlib.suppress(SwapError):
                    # The first that ends: a late one must not hold back the room of the others.
                    ended = self._tiers.aio.wait_any(self._writes)
                    self._writes.remove(ended)
                    # A failure is raised when the bytes are read.
                    ended.wait()
            elif self._ahead:
                # The one that is needed last.
                self._drop_lease(self._ahead, next(reversed(self._ahead)))
            elif self._on_nvme and self._unwritten:
                self._write_oldest()
            else:
                break
        while self._writes and self._writes[0].done():
            with contextlib.suppress(SwapError):
                self._writes.popleft().wait()
        return lease

    def _drop_lease(self, numbers: dict[int, None], number: int) -> None:
        """Drop the lease of a copy in ``numbers``: its extent is read again when it is needed."""
        del numbers[number]
        copy = self._ends[number]() if number in self._ends else None
        if copy is not None:
            copy.lease = copy.arrival = None

    def _fetch(self, copy: Copy) -> UntypedStorage:
        """The bytes of ``copy`` on the device."""
        if copy.lease is None:
            lease = self._room(copy.nbytes) if round_up(copy.nbytes) <= self._memory.capacity // 2 else None
            if lease is None:
                return self._read_in_pieces(copy)
            self._start_read(copy, lease)
        lease = copy.lease
        assert lease is not None
        if copy.extent is not None:
            self._wait_for(copy)
            self._ahead.pop(copy.number, None)
            # Another saved tensor may be in the same storage.
            self._given[copy.number] = None
        if self._tiers.streams is None:
            # Compute reads the bytes where they are: the storage keeps the lease.
            return as_tensor(lease).untyped_storage()
        if copy.returning is None:
            self._start_return(copy)
        assert copy.returning is not None and self._tiers.copies is not None
        (target, event), copy.returning = copy.returning, None
        # Compute that is queued from now on runs behind the copy.
        self._tiers.copies.hold_compute(event, ACTIVATIONS)
        return target.untyped_storage()

    def _start_return(self, copy: Copy) -> None:
        """Start to copy the lease, which has its bytes, back to the GPU."""
        assert copy.lease is not None
        target = torch.empty(copy.nbytes, dtype=torch.uint8, device=self._tiers.device)
        copy.returning = target, self._copy_back(target, copy.lease, copy.arrival)

    def _copy_back(self, target: Tensor, lease: Lease, arrival: Event | Ticket | None) -> Event:
        """Copy the first bytes of ``lease`` to ``target`` on the GPU; the returned event is the end."""
        streams, copies = self._tiers.streams, self._tiers.copies
        assert streams is not None and copies is not None
        # Kernels that are queued may still use the memory that torch has given to ``target``.
        after = [streams.compute.record()]
        if isinstance(arrival, Event):
            after.append(arrival)
        source = as_tensor(lease)[: target.numel()]
        event = copies.to_device(target, source, after=after, kind=ACTIVATIONS)
        self._returning.append((event, lease, target))
        self._drop_ended(self._returning, most=self._memory.capacity)
        return event

    def _start_read(self, copy: Copy, lease: Lease) -> None:
        assert copy.extent is not None and self._tiers.swap is not None
        copy.arrival = self._tiers.swap.swap_in(copy.extent, lease, priority=FETCH_PRIORITY)
        copy.lease = lease
        self.read_bytes += lease.nbytes

    def _read_in_pieces(self, copy: Copy) -> UntypedStorage:
        """Read a copy for which the activation memory has no room, because backward still uses what is in it."""
        assert copy.extent is not None
        target = torch.empty(copy.nbytes, dtype=torch.uint8, device=self._tiers.device)
        for start, end in tiles(copy.nbytes, self._piece_bytes):
            lease = self._room(end - start)
            is_spare = lease is None
            if lease is None:
                # ``fetch`` releases the lease if it raises.
                lease = self._spare or self._memory.lease(self._piece_bytes, ACTIVATIONS, alone=True)
                self._spare = None
            with self._tiers.stalls.waiting_for(ACTIVATIONS):
                self._tiers.fetch(copy.extent, lease, offset=start)
            self.read_bytes += round_up(end - start)
            if self._tiers.copies is None:
                target[start:end].copy_(as_tensor(lease)[: end - start])
            else:
                event = self._copy_back(target[start:end], lease, None)
                self._tiers.copies.hold_compute(event, ACTIVATIONS)
                if is_spare:
                    event.wait()
            if is_spare:
                self._spare = lease
        return target.untyped_storage()

    def _read_ahead(self, number: int) -> None:
        """Start to move back the copies that backward probably needs next, as far as there is room."""
        if self._tiers.streams is not None:
            room = self._memory.capacity // IN_FLIGHT_SHARE
            for copy in self._before(number):
                room -= copy.nbytes
                if room < 0 or copy.lease is None or (copy.arrival is not None and not copy.arrival.done()):
                    break
                if copy.returning is None:
                    self._start_return(copy)
        # Those in memory need no read: go on with the youngest one before them.
        if number - 1 in self._unwritten:
            number = next(iter(self._unwritten))
        for copy in self._before(number):
            if copy.lease is None:
                lease = self._room(copy.nbytes, ahead=True)
                if lease is None:
                    return
                self._start_read(copy, lease)
                self._ahead[copy.number] = None

    def _before(self, number: int) -> Iterator[Copy]:
        """The copies before that of ``number`` that backward was not given, from the last one on."""
        for earlier in range(number - 1, max(0, number - 1 - FARTHEST), -1):
            copy = self._ends[earlier]() if earlier in self._ends else None
            if copy is not None and given(copy) is None:
                yield copy

    def _wait_for(self, copy: Copy) -> None:
        """Let the CPU wait until the lease has the bytes. SwapError if they could not be read, or were not written."""
        if copy.arrival is not None:
            with self._tiers.stalls.waiting_for(ACTIVATIONS):
                copy.arrival.wait()
            copy.arrival = None

    def _free_ended(self) -> None:
        while self._ended:
            end = self._ended[0]
            self._unwritten_bytes -= self._unwritten.pop(end.number, 0)
            self._ahead.pop(end.number, None)
            self._given.pop(end.number, None)
            if end.extent is not None:
                self._tiers.take_back(end.extent)
            self._ends.pop(end.number, None)
            self._ended.popleft()
        if len(self._originals) > len(self._ends) + MOST_ORIGINALS:
            self._originals = {
                key: original for key, original in self._originals.items() if original.copy() is not None
            }

    def _warn_of_room(self, nbytes: int) -> None:
        """Warn of the first tensor that stays: each pass may have many."""
        if not self._warned:
            self._warned = True
            log.log(
                _logs.once(logging.WARNING),
                "a saved tensor of %s stays on the device: the activation budget of %s has no room for it; raise"
                " tiering.activation_budget%s. Further tensors that stay are not reported",
                format_size(nbytes),
                format_size(self._memory.capacity),
                "" if self._on_nvme else ", or set tiering.activations to nvme",
            )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor is what its dtype, shape and strides make of the bytes of its storage."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
