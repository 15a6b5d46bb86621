"""Measures the rates of this machine with the engine's own files, I/O engine, arenas and kernels.

It does not use torch; zero3/observe/device_rates.py measures the device. It measures the operations of a step: state is
read into slots and written back to its place, several slots at a time, on unnamed files past the page cache, after each
block was written once. Bytes are random, because some disks store repeated bytes without writing them. Kernels use more
memory than the caches hold.

The rate of a shared disk varies by a factor of two within minutes, and a drive's cache accepts the first writes faster:
a rate depends on the time and the length of its interval.
"""

from __future__ import annotations

import array
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from optim_cpu import kernels
from optim_cpu.kernels import DType, Rule, StateFormat, StepBatch
from tiering._aio import ffi, lib
from tiering.config.training import IoConfig
from tiering.placement.budgets import host_memory
from tiering.placement.workload import FP32
from tiering.planning import conditions
from tiering.planning.conditions import Conditions
from tiering.planning.rates import Rates
from tiering.storage.aio import ALIGNMENT, AioContext
from tiering.storage.arena import PAGE, Arena, Lease, round_up
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.swap_file import check_directory
from tiering.storage.swap_space import Section, SwapSpace
from tiering.storage.tickets import Ticket

# Seconds of each interval.
SECONDS = 1.0
FILE_BYTES = 1 << 30
SLOTS = 6
SLOT_BYTES = 16 << 20
# Memory that the kernels use: this many times the caches, between these limits in bytes.
CACHES = 4
KERNEL_BYTES = 192 << 20
MOST_KERNEL_BYTES = 1 << 30

# The engine's formats of moments, by whether they are bf16.
_MOMENTS = {False: StateFormat.FP32, True: StateFormat.BF16_STOCHASTIC}

Way = Literal["read", "write", "mixed"]


@dataclass(frozen=True)
class Leg:
    """One measured rate, in bytes, elements or operations per second.

    ``name`` is usually a field of Rates. ``written`` are the bytes written to a disk for it. ``cut``: the interval
    ended early, because the limit of written bytes was reached.
    """

    name: str
    rate: float
    written: int = 0
    cut: bool = False


Tell = Callable[[Leg], object]
"""Called with each leg as soon as it is measured."""


def quietly(leg: Leg) -> None:
    """Reports nothing."""


@dataclass(frozen=True)
class Measurement:
    """Rates that are measured together: the part of the machine, the conditions, and the function that measures."""

    name: str
    conditions: Conditions
    run: Callable[[Tell], Rates]


def of_cpu(
    *,
    state_format: str = "fp32",
    state_tensors: int = 2,
    grad_itemsize: int = 2,
    seconds: float | None = None,
) -> Measurement:
    """The measurement of the CPU and its memory. ``state_tensors`` is the number of moments per element."""

    def run(tell: Tell) -> Rates:
        return cpu_rates(
            state_format=state_format,
            state_tensors=state_tensors,
            grad_itemsize=grad_itemsize,
            seconds=SECONDS / 2 if seconds is None else seconds,
            tell=tell,
        )

    depends = conditions.arithmetic(state_format, state_tensors, grad_itemsize)
    return Measurement("CPU", conditions.machine() | depends, run)


def of_disks(
    directories: Sequence[Path],
    *,
    io: IoConfig | None = None,
    nbytes: int | None = None,
    seconds: float | None = None,
    max_bytes: int | None = None,
) -> Measurement:
    """The measurement of the disks behind ``directories``, used together; writes at most ``max_bytes`` in total.

    Raises SwapSpaceError if a directory cannot hold swap space.
    """
    io = io or IoConfig()
    for directory in directories:
        check_directory(directory, allow_memory_file_system=io.allow_memory_file_system)

    def run(tell: Tell) -> Rates:
        return disk_rates(
            directories,
            io=io,
            nbytes=FILE_BYTES if nbytes is None else nbytes,
            seconds=SECONDS if seconds is None else seconds,
            max_bytes=max_bytes,
            tell=tell,
        )

    return Measurement("disks", conditions.machine() | conditions.disks(directories, io), run)


def measure(
    directories: Sequence[Path] = (),
    *,
    state_format: str = "fp32",
    state_tensors: int = 2,
    grad_itemsize: int = 2,
    io: IoConfig | None = None,
    file_bytes: int | None = None,
    seconds: float | None = None,
) -> Rates:
    """The rates of the disks behind ``directories``, used together, and of this machine's CPU and memory.

    ``state_format``, ``state_tensors`` (moments per element) and ``grad_itemsize`` (bytes) are the plan's. It takes 4
    to 5 intervals of ``seconds`` (1) after writing ``file_bytes`` (1 GiB) once, and 300 MB of memory, or up to 1 GiB
    if caches are large; it leaves no files. Raises SwapSpaceError if a directory cannot hold swap space, SwapError if a
    transfer fails.
    """
    parts = [
        of_cpu(
            state_format=state_format,
            state_tensors=state_tensors,
            grad_itemsize=grad_itemsize,
            seconds=None if seconds is None else seconds / 2,
        )
    ]
    if directories:
        parts.append(of_disks(directories, io=io, nbytes=file_bytes, seconds=seconds))
    rates = Rates()
    for part in parts:
        rates = rates.updated(part.run(quietly))
    return rates


def disk_rates(
    directories: Sequence[Path],
    *,
    io: IoConfig,
    nbytes: int,
    seconds: float,
    max_bytes: int | None = None,
    tell: Tell = quietly,
) -> Rates:
    """Measures writes, reads and both, each for ``seconds``, on ``nbytes`` of swap space. Raises like ``measure``.

    Writes at most ``max_bytes`` in total, which is at least twice ``nbytes``. Of the bytes that remain after all blocks
    were written once, the writes may use half, and the mixed interval the rest.
    """
    slot = max(PAGE, min(SLOT_BYTES, nbytes // SLOTS // PAGE * PAGE))
    arena = Arena.map(SLOTS * slot, "measured slots")
    arena.memory[:] = os.urandom(len(arena.memory))
    with AioContext(
        engine=io.engine, block_size=io.block_size, queue_depth=io.queue_depth, registered=io.registered
    ) as aio:
        space = SwapSpace(
            {"measured": Section(round_up(nbytes), tuple(directories))},
            aio,
            allow_memory_file_system=io.allow_memory_file_system,
        )
        try:
            aio.register(arena)
            window = _SlotCycle(space, space.allocate(nbytes, ("measured",), "measured"), arena, slot)
            # The first write of a block is slower, so write all blocks once before measuring.
            window.run("write", places=window.places)
            rates = {}
            for way in ("write", "read", "mixed"):
                if max_bytes is not None and way != "read":
                    remaining = max_bytes - window.written
                    window.room = remaining if way == "mixed" else remaining // 2
                # The initial writes count as bytes of the write interval.
                before = 0 if way == "write" else window.written
                rate = rates[f"nvme_{way}"] = window.run(way, seconds=seconds)
                tell(Leg(f"nvme_{way}", rate, window.written - before, window.full))
            return Rates(**rates)
        finally:
            aio.close()
            space.close()


class _SlotCycle:
    """Transfers whole slots over an extent, cyclically."""

    def __init__(self, space: SwapSpace, extent: StripedExtent, arena: Arena, slot: int) -> None:
        self.places = extent.nbytes // slot
        self._space = space
        self._extent = extent
        self._slot = slot
        self._leases = [arena.lease(slot, "slot") for _ in range(SLOTS)]
        # Bytes written in all runs.
        self.written = 0
        # Maximum bytes that the next run may write; None: no limit.
        self.room: int | None = None
        # Whether the last run reached that maximum.
        self.full = False

    def run(self, way: Way, *, seconds: float = 0.0, places: int = 1) -> float:
        """Bytes per second over at least ``seconds`` and ``places``; "mixed" writes back each slot that it read."""
        idle = deque(self._leases)
        # Slot, offset, transfer, and whether that is the slot's last one.
        in_flight = deque[tuple[Lease, int, Ticket, bool]]()
        place = moved = 0
        room, self.full = None if way == "read" else self.room, False
        began = time.perf_counter()
        while True:
            more = place < places or (seconds and time.perf_counter() - began < seconds)
            if more and room is not None and (place + 1) * self._slot > room:
                more, self.full = False, True
            if idle and more:
                lease, offset = idle.popleft(), place % self.places * self._slot
                place += 1
                submit = self._space.swap_out if way == "write" else self._space.swap_in
                in_flight.append((lease, offset, submit(self._extent, lease, offset=offset), way != "mixed"))
            elif in_flight:
                lease, offset, transfer, last = in_flight.popleft()
                nbytes = transfer.wait()
                moved += nbytes
                if last:
                    self.written += nbytes if way != "read" else 0
                    idle.append(lease)
                else:
                    written = self._space.swap_out(self._extent, lease, offset=offset)
                    in_flight.append((lease, offset, written, True))
            else:
                return moved / (time.perf_counter() - began)


def cpu_rates(
    *, state_format: str, state_tensors: int, grad_itemsize: int, seconds: float, tell: Tell = quietly
) -> Rates:
    """Measures updates, gradient accumulation, copies and checksums, each on as many threads as the kernels have."""
    rates: dict[str, float] = {}

    def keep(name: str, unit: int, call: Callable[[], object]) -> None:
        rates[name] = unit * repeated(call, seconds)
        tell(Leg(name, rates[name]))

    ring = _Ring(4 + state_tensors)
    numel, grad_dtype = ring.numel, DType.FP32 if grad_itemsize == FP32 else DType.BF16
    ring.fill(grad_dtype, leases=1)
    keep("optimizer", numel, ring.batch(state_format, state_tensors, grad_dtype).run)
    ring.fill(grad_dtype)
    keep("gradients", numel, lambda: ring.take_in(grad_dtype))
    keep("host_copy", numel * FP32, ring.copy)
    with ThreadPoolExecutor(kernels.thread_count()) as pool:
        keep("checksum", numel * FP32, lambda: ring.checksum(pool, kernels.thread_count()))
    return Rates(**rates)


def kernel_bytes() -> int:
    """Bytes that the kernels use: at most a quarter of the free memory, but at least KERNEL_BYTES."""
    limit, in_use = host_memory()
    enough = min(CACHES * conditions.cache_bytes(), (limit - in_use) // 4)
    return min(max(KERNEL_BYTES, enough), MOST_KERNEL_BYTES)


class _Ring:
    """Equal leases, together larger than the caches. Each call uses the next leases, which are not in a cache."""

    def __init__(self, leases: int) -> None:
        nbytes = round_up(-(-kernel_bytes() // leases))
        self.numel = nbytes // FP32
        arena = Arena.map(leases * nbytes, "measured kernels")
        self._leases = [arena.lease(nbytes, "ring") for _ in range(leases)]
        self._turn = itertools.count(1)
        self._sums = ffi.new("uint32_t[]", nbytes // ALIGNMENT)

    def _next(self) -> tuple[Lease, Lease]:
        """The next (source, target)."""
        turn, count = next(self._turn), len(self._leases)
        return self._leases[(turn - 1) % count], self._leases[turn % count]

    def fill(self, dtype: DType, *, leases: int | None = None) -> None:
        """Writes gradients of usual magnitude to the first ``leases`` or to all; denormals would slow the kernels."""
        values = array.array("f", (1e-3 * math.sin(i) for i in range(PAGE // FP32)))
        first = self._leases[0]
        kernels.cast(first.address, dtype, values.buffer_info()[0], DType.FP32, len(values))
        page = bytes(first.view[: len(values) * (FP32 if dtype is DType.FP32 else FP32 // 2)])
        pages = page * (first.nbytes // len(page))
        for lease in self._leases[:leases]:
            lease.view[:] = pages

    def batch(self, state_format: str, state_tensors: int, grad_dtype: DType) -> StepBatch:
        """An update of all elements, with the gradients in the first lease; state starts as zeros."""
        split = "split" in state_format
        grad, master, out, *states = (lease.address for lease in self._leases)
        batch = StepBatch()
        batch.add(
            self.numel,
            batch.add_rule(usual_rule(state_tensors)),
            param=out if split else master,
            remainder=master if split else 0,
            state=tuple(states[:state_tensors]),
            state_format=_MOMENTS["bf16" in state_format],
            grad=grad,
            grad_dtype=grad_dtype,
            out=0 if split else out,
        )
        return batch

    def take_in(self, dtype: DType) -> None:
        source, target = self._next()
        kernels.accumulate(target.address, dtype, source.address, dtype, self.numel, overwrite=True)
        kernels.sum_of_squares(target.address, dtype, self.numel)

    def copy(self) -> None:
        source, target = self._next()
        kernels.cast(target.address, DType.FP32, source.address, DType.FP32, self.numel)

    def checksum(self, pool: ThreadPoolExecutor, threads: int) -> None:
        source, _ = self._next()
        pages = source.nbytes // ALIGNMENT
        most = -(-pages // threads)

        def sum_from(first: int) -> None:
            address = ffi.cast("void *", source.address + first * ALIGNMENT)
            lib.aio_checksum(address, min(most, pages - first), self._sums + first)

        # Consumed, so that an error is raised.
        list(pool.map(sum_from, range(0, pages, most)))


def usual_rule(state_tensors: int) -> Rule:
    """A rule with this many moments; rules with as many moments have about the same cost."""
    if state_tensors == 2:
        return kernels.adam(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
    if state_tensors == 1:
        return kernels.lion(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.01, step=1)
    return kernels.sgd(lr=1e-4, momentum=0.0, dampening=0.0, nesterov=False, weight_decay=0.01, step=1)


def repeated(call: Callable[[], object], seconds: float) -> float:
    """Calls per second over at least ``seconds``, after one uncounted call."""
    call()
    count, began = 0, time.perf_counter()
    while not count or time.perf_counter() - began < seconds:
        call()
        count += 1
    return count / (time.perf_counter() - began)
