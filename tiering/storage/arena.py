"""The pinned arena: one page-aligned slab of host memory, leased out in exact sizes.

One mapping replaces thousands of pinned allocations: its size is the plan's number to the page, it is touched once,
registered with CUDA by the caller when there is a GPU or else locked as far as the limits allow, and not inherited by
forked children, so that a data worker can neither keep it alive nor touch it.

Free space is taken first fit from the bottom. Leases that outlive the ones around them have a place of their own
(``at``), so that long and short lives cannot fragment each other. When a lease does not fit, ``lease`` waits: first
for transfers that own *retiring* leases, then for other threads. It fails only when waiting cannot help, and says who
holds what.

**Signals.** A signal handler may raise between any two statements: a lease was granted, and nobody has it. So what is
free is what no living lease holds. The lists and counts are kept beside that for speed; they are made anew from the
leases when an exception cut a change of them short, and when a lease does not fit although one was lost. A lease lives
as long as somebody refers to it, to a view of its bytes, or to a tensor over them, and while a transfer uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from tiering.errors import ArenaError, NotDoneError, SwapError
from tiering.host.topology import prefer_node
from tiering.storage.mappings import keeping, lock_memory, withhold
from tiering.storage.ranges import FreeRanges

PAGE = 4096
MADV_POPULATE_WRITE = 23  # linux/mman.h; Python has no name for it
STARVED_AFTER_SECONDS = 120.0
PATIENCE_SECONDS = 0.005
"""While the oldest transfer is waited for, this often the others, and what other threads give back, are looked at."""

log = logging.getLogger(__name__)


def round_up(nbytes: int, multiple: int = PAGE) -> int:
    """``nbytes`` rounded up to a multiple of ``multiple``."""
    return -(-nbytes // multiple) * multiple


class Completion(Protocol):
    """What a retiring lease waits for: a ticket of the I/O context. ``wait`` raises NotDoneError after ``timeout``."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> int: ...


class Lease:
    """A range of the arena. ``address`` and ``nbytes`` describe memory that is the holder's until ``release``.

    One that is lost without it gives its range back when nothing refers to it any more (see Signals, above).
    """

    __slots__ = ("__weakref__", "address", "arena", "held", "kind", "nbytes", "offset")

    def __init__(self, arena: Arena, offset: int, nbytes: int, kind: str) -> None:
        self.arena = arena
        self.offset = offset
        self.nbytes = nbytes
        self.kind = kind
        self.address = arena.address + offset
        self.held = True

    @property
    def view(self) -> memoryview:
        """The bytes, writable. The view keeps the lease."""
        return keeping(self.arena.memory[self.offset : self.offset + self.nbytes], self)

    def part(self, offset: int, nbytes: int) -> LeasePart:
        """A window of the lease, for a transfer of a part of it."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"part [{offset}, {offset + nbytes}) lies outside a lease of {self.nbytes} bytes"
            )
        return LeasePart(self, offset, nbytes)

    def release(self) -> None:
        """Give the range back. The bytes must not be touched afterwards."""
        self.arena.give_back(self)

    def retire(self, completion: Completion) -> None:
        """Give the range back as soon as ``completion`` (a transfer that reads or fills it) is done."""
        self.arena.retire(self, completion)


class LeasePart:
    """A window of a lease that keeps the lease's memory reachable while a transfer uses it."""

    __slots__ = ("address", "lease", "nbytes")

    def __init__(self, lease: Lease, offset: int, nbytes: int) -> None:
        self.lease = lease
        self.address = lease.address + offset
        self.nbytes = nbytes


class Arena:
    """A slab of host memory, sub-allocated by size. ``name`` appears in messages and telemetry. Thread-safe.

    Memory returns to the system when the arena and every tensor over it are gone.
    """

    def __init__(self, memory: memoryview, address: int, name: str, *, capacity: int | None = None) -> None:
        """``capacity`` in bytes, where ``memory`` is none that the CPU can address."""
        self.name = name
        self.memory = memory
        self.address = address
        self.capacity = (len(memory) if capacity is None else capacity) // PAGE * PAGE
        # Entered by itself: a Condition is entered by a function of Python, in which a signal handler may raise when
        # the lock is taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._leases: dict[int, weakref.ref[Lease]] = {}  # that hold something, by where it begins
        self._retiring: deque[tuple[Lease, Completion]] = deque()
        self._forgotten = False  # the memory, and with it the leases: counts stay as they are
        self._stale = True  # what follows is to be made anew
        self._free = FreeRanges(0)
        self._by_kind: Counter[str] = Counter()
        self._used = 0
        self.peak = 0

    @classmethod
    def map(
        cls,
        nbytes: int,
        name: str,
        pin: Callable[[int, int], None] | None = None,
        *,
        numa_node: int | None = None,
    ) -> Arena:
        """A new page-aligned mapping of ``nbytes`` (rounded up to pages), touched, and not inherited by forks.

        ``pin`` registers (address, nbytes) with the device driver; undoing that is the caller's. Pages come from
        ``numa_node`` while it has room.
        """
        mapping = mmap.mmap(-1, round_up(max(nbytes, 1)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                log.debug("%s arena: no transparent huge pages in this kernel", name)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        withhold(mapping, address)
        if numa_node is not None:
            prefer_node(address, len(mapping), numa_node)
        memory = memoryview(mapping)[: round_up(nbytes)]
        # Fault every page in now, so that the first step does not: a GiB in 0.05 s, where touching takes half a second.
        try:
            mapping.madvise(MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # touching the pages would end the process
                raise ArenaError(
                    f"the {name} arena needs {len(memory)} bytes of memory, which the system does not give:"
                    f" {errno.errorcode.get(error.errno or 0, error.errno)}, {error.strerror}; lower the {name} budget"
                ) from error
            memory[::PAGE] = bytes(len(memory) // PAGE)  # a kernel before 5.14
        if pin is not None and nbytes:
            pin(address, len(memory))
        elif nbytes and (code := lock_memory(address, len(memory))):
            limit = "; ulimit -l may be too low" if code in (errno.ENOMEM, errno.EPERM) else ""
            log.debug("%s arena: not locked into RAM: %s%s", name, os.strerror(code), limit)
        return cls(memory, address, name)

    @property
    def nbytes(self) -> int:
        """The capacity: an arena is a buffer to the I/O context, which may register it as a whole."""
        return self.capacity

    def split(self, nbytes: int, name: str) -> Arena:
        """An arena of its own over ``nbytes`` of this one, for leases that must not compete with the others."""
        if nbytes == 0:
            return Arena(self.memory[:0], self.address, name)
        lease = self.lease(nbytes, name)
        return Arena(lease.view, lease.address, name)

    @property
    def used(self) -> int:
        """Bytes now leased."""
        with self._lock:
            self._forget_lost()
            return self._used

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes now leased, by what they hold."""
        with self._lock:
            self._forget_lost()
            return {kind: nbytes for kind, nbytes in self._by_kind.items() if nbytes}

    def try_lease(self, nbytes: int, kind: str, *, at: int | None = None) -> Lease | None:
        """A lease of ``nbytes`` (rounded up to pages) if there is room now, else None. Never waits.

        ``at`` asks for the range at that offset (a multiple of 4096) and no other.
        """
        size = round_up(nbytes)
        with self._lock:
            self._collect()
            return self._carve(size, kind, at)

    def lease(self, nbytes: int, kind: str, *, at: int | None = None, alone: bool = False) -> Lease:
        """A lease of ``nbytes``; waits while others hold the room.

        Raises ArenaError at once when ``nbytes`` exceeds the arena, and after two minutes in which nothing was given
        back; at once, too, if the caller is ``alone`` in giving back and no transfer holds any of the room. An I/O
        error of a retiring lease is raised here, by the first caller that meets it and by no other.
        """
        size = round_up(nbytes)
        if size > self.capacity:
            raise ArenaError(
                f"a lease of {size} bytes for {kind!r} exceeds the whole {self.name} arena of {self.capacity} bytes;"
                f" raise the {self.name} budget or lower sub_group_size"
            )
        while True:
            with self._lock:
                self._collect()
                lease = self._carve(size, kind, at)
                if lease is not None:
                    return lease
                oldest = self._retiring[0][1] if self._retiring else None
                if oldest is None and (alone or not self._changed.wait(timeout=STARVED_AFTER_SECONDS)):
                    raise self._starved(size, kind)
            if oldest is not None:
                # An error is raised by _collect, which frees the room first.
                with contextlib.suppress(NotDoneError, SwapError):
                    oldest.wait(PATIENCE_SECONDS)

    def give_back(self, lease: Lease) -> None:
        """Return a lease's range to the free list (see Lease.release)."""
        with self._lock:
            self._restore(lease)
            self._changed.notify_all()

    def retire(self, lease: Lease, completion: Completion) -> None:
        """Return a lease's range once ``completion`` is done (see Lease.retire)."""
        with self._lock:
            self._retiring.append((lease, completion))
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait for every retiring lease; raises the first I/O error among them after all have ended."""
        error: SwapError | None = None
        while True:
            with self._lock:
                if not self._retiring:
                    break
                retiring = self._retiring[0]
            try:
                retiring[1].wait()
            except SwapError as failed:
                error = error or failed
            with self._lock:
                if retiring in self._retiring:  # no other thread was here
                    self._restore_retired(retiring)
        if error is not None:
            raise error

    def forget_memory(self) -> None:
        """Let go of the memory, once nothing is leased any more that anybody will use; the counts stay."""
        with self._lock:
            self._forget_lost()
            self._forgotten = True
        self.memory = memoryview(b"")

    def _collect(self) -> None:
        """Free the retired leases whose transfers have ended, in any order."""
        for retiring in tuple(self._retiring):
            if retiring[1].done():
                self._restore_retired(retiring)
                retiring[1].wait()  # raises its error, once

    def _restore_retired(self, retiring: tuple[Lease, Completion]) -> None:
        self._retiring.remove(retiring)
        self._restore(retiring[0])
        self._changed.notify_all()

    def _starved(self, size: int, kind: str) -> ArenaError:
        held = {holder: nbytes for holder, nbytes in self._by_kind.items() if nbytes}
        return ArenaError(
            f"no {size} bytes for {kind!r} came free in the {self.name} arena within {STARVED_AFTER_SECONDS:.0f} s;"
            f" capacity {self.capacity}, held: {held}, largest free range {self._free.largest}. This is a defect of"
            f" the plan: please report it; a larger {self.name} budget works around it"
        )

    def _carve(self, size: int, kind: str, at: int | None) -> Lease | None:
        self._count_anew_if_stale()
        try:
            # Nothing is nobody's page: a group without gradients takes no more than the plan says, zero.
            offset = self._free.take(size, at=at) if size else 0
            if offset is None and self._forget_lost():
                offset = self._free.take(size, at=at)
            if offset is None:
                return None
            lease = Lease(self, offset, size, kind)
            if size:
                self._leases[offset] = weakref.ref(lease)
            self._count(lease)
            return lease
        except BaseException:
            self._stale = True
            raise

    def _restore(self, lease: Lease) -> None:
        self._count_anew_if_stale()
        assert lease.held, f"lease of {lease.kind!r} in the {self.name} arena was released twice"
        try:
            lease.held = False
            if lease.nbytes:
                del self._leases[lease.offset]
                self._by_kind[lease.kind] -= lease.nbytes
                self._used -= lease.nbytes
                self._free.give(lease.offset, lease.nbytes)
                lease.nbytes = 0
        except BaseException:
            self._stale = True
            raise

    def _count(self, lease: Lease) -> None:
        self._by_kind[lease.kind] += lease.nbytes
        self._used += lease.nbytes
        self.peak = max(self.peak, self._used)

    def _forget_lost(self) -> bool:
        """Take back what lost leases held; whether there were any."""
        lost = any(lease() is None for lease in self._leases.values())
        if self._forgotten or not (self._stale or lost):
            return False
        self._stale = True
        self._count_anew_if_stale()
        return True

    def _count_anew_if_stale(self) -> None:
        """Make the lists and counts from the leases that live."""
        if not self._stale:
            return
        held = [lease for ref in self._leases.values() if (lease := ref()) is not None and lease.held]
        self._leases = {lease.offset: weakref.ref(lease) for lease in held}
        self._free, self._by_kind, self._used = FreeRanges(self.capacity), Counter(), 0
        for lease in held:
            self._free.take(lease.nbytes, at=lease.offset)
            self._count(lease)
        self._stale = False
