"""The pinned arena: one page-aligned slab of host memory, divided into leases of exact sizes.

One mapping replaces thousands of pinned allocations: its size is the plan's number to the page, it is touched once,
registered with CUDA by the caller when there is a GPU or else locked as far as the limits allow, and not inherited by
forked children, so that a data worker can neither keep it alive nor touch it.

A lease is the first free range that fits, from the bottom. Leases that outlive their neighbours have a fixed place
(``at``), so that long and short lives cannot fragment each other. When a lease does not fit, ``lease`` waits: for
any of the transfers that own *retiring* leases, and for other threads. It fails only when waiting cannot help, and the
error lists the leased bytes by kind.

**Signals.** A signal handler may raise between any two statements, also when a lease was made and its caller does not
have it yet. So memory is free if no living lease holds it. The lists and counts repeat this information for speed; they
are rebuilt from the leases when an exception interrupted a change of them, and when a request does not fit and a lease
was lost. A lease lives as long as there is a reference to it, to a view of its bytes, or to a tensor over them, and
while a transfer uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import mmap
import operator
import os
import threading
import weakref
from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Sequence

from tiering._aio import ffi, lib
from tiering.errors import ArenaError, NotDoneError, SwapError
from tiering.host import numa
from tiering.host.numa import Node
from tiering.storage.request import Completion
from tiering.storage.tickets import wait_any

PAGE = 4096
STARVED_AFTER_SECONDS = 120.0
PATIENCE_SECONDS = 0.005
"""The interval at which a wait for transfers checks the releases of other threads."""

log = logging.getLogger(__name__)


def round_up(nbytes: int, multiple: int = PAGE) -> int:
    """``nbytes`` rounded up to a multiple of ``multiple``."""
    return -(-nbytes // multiple) * multiple


class Lease:
    """A range of the arena. ``address`` and ``nbytes`` describe memory that belongs to the holder until ``release``.

    A lease without any reference is released, too (see Signals, above).
    """

    __slots__ = ("__weakref__", "address", "arena", "is_held", "kind", "nbytes", "offset")

    def __init__(self, arena: Arena, offset: int, nbytes: int, kind: str) -> None:
        self.arena = arena
        self.offset = offset
        self.nbytes = nbytes
        self.kind = kind
        self.address = arena.address + offset
        self.is_held = True

    @property
    def view(self) -> memoryview:
        """The bytes, writable. The view keeps the lease."""
        return keeping(self.arena.memory[self.offset : self.offset + self.nbytes], self)

    def part(self, offset: int, nbytes: int) -> LeasePart:
        """A part of the lease, for a transfer."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"part [{offset}, {offset + nbytes}) lies outside a lease of {self.nbytes} bytes"
            )
        return LeasePart(self, offset, nbytes)

    def release(self) -> None:
        """Release the range. The bytes must not be used afterwards."""
        self.arena.release_lease(self)

    def retire(self, completion: Completion) -> None:
        """Release the range when ``completion`` (a transfer that reads or fills it) is done."""
        self.arena.retire(self, completion)


class LeasePart:
    """A part of a lease; it keeps the lease alive while a transfer uses it."""

    __slots__ = ("address", "lease", "nbytes")

    def __init__(self, lease: Lease, offset: int, nbytes: int) -> None:
        self.lease = lease
        self.address = lease.address + offset
        self.nbytes = nbytes


class Arena:
    """A slab of host memory, sub-allocated by size. ``name`` appears in messages and telemetry. Thread-safe.

    Memory returns to the system when the arena and all tensors over it were freed.
    """

    def __init__(self, memory: memoryview, address: int, name: str, *, capacity: int | None = None) -> None:
        """``capacity`` in bytes, if the CPU cannot address the memory and ``memory`` is empty."""
        self.name = name
        self.memory = memory
        self.address = address
        self.capacity = (len(memory) if capacity is None else capacity) // PAGE * PAGE
        # Always entered directly: entering the Condition runs a Python function, in which a signal handler may raise
        # after the lock was acquired.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Weak: a lease that nobody refers to is lost, and its range is free again.
        self._leases: dict[int, weakref.ref[Lease]] = {}  # with bytes, by offset
        # Strong: these leases stay until their transfers are done, though no caller refers to them any more.
        self._retiring: deque[tuple[Lease, Completion]] = deque()
        self._forgotten = False  # the memory was freed: counts do not change
        self._stale = True  # the next four are to be rebuilt
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
        nodes: Sequence[Node] = (),
    ) -> Arena:
        """A new page-aligned mapping of ``nbytes`` (rounded up to pages), touched, and not inherited by forks.

        ``pin`` registers (address, nbytes) with the device driver; the caller unregisters it. Pages come from
        ``nodes``, in turn, while these have free memory.
        """
        mapping = mmap.mmap(-1, round_up(max(nbytes, 1)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                log.debug("%s arena: no transparent huge pages in this kernel", name)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        # Before the pages exist. A fork would share them copy-on-write, and the next write of this process would move
        # it to a copy, while the kernel and the GPU still use the pages that they have pinned.
        withhold(mapping, address)
        memory = memoryview(mapping)[: round_up(nbytes)]
        # Now and not in the first step.
        if code := numa.populate(name, memory, address, nodes):
            raise ArenaError(
                f"the {name} arena needs {len(memory)} bytes of memory, which the system does not give:"
                f" {errno.errorcode.get(code, code)}, {os.strerror(code)}; lower the {name} budget"
            )
        if pin is not None and nbytes:
            pin(address, len(memory))
        elif nbytes and (code := lock_memory(address, len(memory))):
            limit = "; ulimit -l may be too low" if code in (errno.ENOMEM, errno.EPERM) else ""
            log.debug("%s arena: not locked into RAM: %s%s", name, os.strerror(code), limit)
        return cls(memory, address, name)

    @property
    def nbytes(self) -> int:
        """The capacity; with ``address`` it makes the arena a Buffer, which the I/O context can register."""
        return self.capacity

    def split(self, nbytes: int, name: str) -> Arena:
        """A separate arena over ``nbytes`` of this one, for leases that must not compete with others."""
        if nbytes == 0:
            return Arena(self.memory[:0], self.address, name)
        lease = self.lease(nbytes, name)
        # The view keeps the lease, so this range has no other owner as long as the new arena lives.
        return Arena(lease.view, lease.address, name)

    @property
    def used(self) -> int:
        """Leased bytes."""
        with self._lock:
            self._reclaim_lost()
            return self._used

    @property
    def by_kind(self) -> dict[str, int]:
        """Leased bytes by kind."""
        with self._lock:
            self._reclaim_lost()
            return {kind: nbytes for kind, nbytes in self._by_kind.items() if nbytes}

    def try_lease(self, nbytes: int, kind: str, *, at: int | None = None) -> Lease | None:
        """A lease of ``nbytes`` (rounded up to pages) if there is room now, else None. Never waits.

        ``at``: only the range at that offset, a multiple of 4096.
        """
        size = round_up(nbytes)
        with self._lock:
            self._collect()
            return self._carve(size, kind, at)

    def lease(self, nbytes: int, kind: str, *, at: int | None = None, alone: bool = False) -> Lease:
        """A lease of ``nbytes``; waits while there is no room.

        Raises ArenaError when ``nbytes`` exceeds the arena, after two minutes without a release, and at once if no
        transfer holds room and the caller is ``alone``, the only thread that releases leases. An I/O error of a
        retiring lease is raised here, once, by the first caller that meets it.
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
                retiring = [completion for _, completion in self._retiring]
                if not retiring and (alone or not self._changed.wait(timeout=STARVED_AFTER_SECONDS)):
                    raise self._starved(size, kind)
            # Outside the lock: meanwhile, other threads release leases and take some.
            if retiring:
                # _collect raises the error, after it has freed the room.
                with contextlib.suppress(NotDoneError, SwapError):
                    wait_any(retiring, PATIENCE_SECONDS)

    def release_lease(self, lease: Lease) -> None:
        """Return a lease's range to the free list (see Lease.release)."""
        with self._lock:
            self._restore(lease)
            # Threads in ``lease`` sleep until some range is released.
            self._changed.notify_all()

    def retire(self, lease: Lease, completion: Completion) -> None:
        """Return a lease's range once ``completion`` is done (see Lease.retire)."""
        with self._lock:
            self._retiring.append((lease, completion))
            # A thread that sleeps in ``lease`` now has a transfer to wait for.
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait for all retiring leases, then raise the first I/O error among them."""
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
                if retiring in self._retiring:  # unless another thread has released it
                    self._restore_retired(retiring)
        if error is not None:
            raise error

    def forget_memory(self) -> None:
        """Drop the memory, after the last use of all leases; the counts stay."""
        with self._lock:
            self._reclaim_lost()
            self._forgotten = True
        self.memory = memoryview(b"")

    def _collect(self) -> None:
        """Free the retired leases whose transfers have ended, in any order."""
        # Not in their order: a slow path must not hold back the leases of others.
        for retiring in tuple(self._retiring):
            if retiring[1].done():
                self._restore_retired(retiring)
                # Raises its error, once; only now, when the range is free and the arena consistent.
                retiring[1].wait()

    def _restore_retired(self, retiring: tuple[Lease, Completion]) -> None:
        self._retiring.remove(retiring)
        self._restore(retiring[0])
        self._changed.notify_all()

    def _starved(self, size: int, kind: str) -> ArenaError:
        leased_bytes = {holder: nbytes for holder, nbytes in self._by_kind.items() if nbytes}
        return ArenaError(
            f"no {size} bytes for {kind!r} became free in the {self.name} arena within {STARVED_AFTER_SECONDS:.0f} s;"
            f" capacity {self.capacity}, held: {leased_bytes}, largest free range {self._free.largest}. This is a"
            f" defect of the plan: please report it; a larger {self.name} budget works around it"
        )

    def _carve(self, size: int, kind: str, at: int | None) -> Lease | None:
        self._recount_if_stale()
        try:
            # A lease of zero bytes takes no page: the plan gives a group without gradients none.
            offset = self._free.allocate(size, at=at) if size else 0
            if offset is None and self._reclaim_lost():
                offset = self._free.allocate(size, at=at)
            if offset is None:
                return None
            lease = Lease(self, offset, size, kind)
            if size:
                self._leases[offset] = weakref.ref(lease)
            self._count(lease)
            return lease
        # A signal handler may have raised between two of these statements.
        except BaseException:
            self._stale = True
            raise

    def _restore(self, lease: Lease) -> None:
        self._recount_if_stale()
        assert lease.is_held, f"lease of {lease.kind!r} in the {self.name} arena was released twice"
        try:
            # First: after an exception from here on, the rebuild counts the range as free.
            lease.is_held = False
            if lease.nbytes:
                del self._leases[lease.offset]
                self._by_kind[lease.kind] -= lease.nbytes
                self._used -= lease.nbytes
                self._free.free(lease.offset, lease.nbytes)
                lease.nbytes = 0
        except BaseException:
            self._stale = True
            raise

    def _count(self, lease: Lease) -> None:
        self._by_kind[lease.kind] += lease.nbytes
        self._used += lease.nbytes
        self.peak = max(self.peak, self._used)

    def _reclaim_lost(self) -> bool:
        """Free the ranges of lost leases; whether there were any."""
        has_lost = any(lease() is None for lease in self._leases.values())
        if self._forgotten or not (self._stale or has_lost):
            return False
        self._stale = True
        self._recount_if_stale()
        return True

    def _recount_if_stale(self) -> None:
        """Rebuild the lists and counts from the living leases."""
        if not self._stale:
            return
        leases = [lease for ref in self._leases.values() if (lease := ref()) is not None and lease.is_held]
        self._leases = {lease.offset: weakref.ref(lease) for lease in leases}
        self._free, self._by_kind, self._used = FreeRanges(self.capacity), Counter(), 0
        for lease in leases:
            self._free.allocate(lease.nbytes, at=lease.offset)
            self._count(lease)
        # Last: after an exception above, the next caller rebuilds again.
        self._stale = False


class FreeRanges:
    """The free part of [0, ``size``), of an arena or a slab file: first fit, merged when neighbours meet.

    Not thread-safe: the owner holds its lock.
    """

    def __init__(self, size: int) -> None:
        self._ranges: list[tuple[int, int]] = [(0, size)] if size else []  # sorted (start, end)

    def allocate(self, size: int, *, at: int | None = None) -> int | None:
        """Allocate a range of ``size``: the first that fits, or the range ``at`` an offset. Returns its start.

        None if no range fits, or the range at the offset is not free.
        """
        for index, (start, end) in enumerate(self._ranges):
            first = start if at is None else at
            if first < start or first + size > end:
                continue
            remaining = [(start, first), (first + size, end)]
            self._ranges[index : index + 1] = [part for part in remaining if part[0] < part[1]]
            return first
        return None

    def free(self, start: int, size: int) -> None:
        """Make [start, start + size) free again."""
        end = start + size
        index = bisect(self._ranges, (start, end))
        before = self._ranges[index - 1] if index else None
        after = self._ranges[index] if index < len(self._ranges) else None
        assert (before is None or before[1] <= start) and (after is None or end <= after[0]), "freed twice"
        first, last = index, index
        if before is not None and before[1] == start:
            start, first = before[0], index - 1
        if after is not None and after[0] == end:
            end, last = after[1], index + 1
        self._ranges[first:last] = [(start, end)]

    @property
    def largest(self) -> int:
        """Size of the largest free range."""
        return max((end - start for start, end in self._ranges), default=0)


def keeping(memory: memoryview, owner: object) -> memoryview:
    """``memory``, in a view that keeps ``owner`` alive."""
    # A destructor without effect, in C: the interpreter discards an exception of a signal handler in one of Python.
    pointer = ffi.gc(ffi.from_buffer(memory), functools.partial(operator.is_, owner))
    return memoryview(ffi.buffer(pointer, len(memory)))


def lock_memory(address: int, nbytes: int) -> int:
    """Keep a range of memory in RAM (mlock), best effort: 0, or the errno of the refusal (ENOMEM: RLIMIT_MEMLOCK)."""
    return -int(lib.aio_lock_memory(ffi.cast("void *", address), nbytes))


def withhold(mapping: mmap.mmap, address: int) -> None:
    """Hide a private mapping, which begins at ``address``, from forked children, as long as it exists.

    Children can neither read nor write it, and its addresses stay reserved: the child's copy of ``mapping`` unmaps
    only itself. Raises OSError if the system refuses.
    """
    out = ffi.new("aio_withheld **")
    code = lib.aio_withhold(out, ffi.cast("void *", address), len(mapping))
    if code < 0:
        raise OSError(-code, f"memory cannot be hidden from forked children: {os.strerror(-code)}")
    weakref.finalize(mapping, lib.aio_forget_withheld, out[0]).atexit = False
