"""The rates of this machine, measured through the engine's own parts: its files, I/O engine, arenas and kernels.

Without torch, so without the device's: zero3/observe/device_rates.py has those. What is measured is what a step does.
State is read into slots and written back to where it was, several slots at a time, on nameless files past the page
cache, after every block was written once; bytes are random, since some disks store repeated ones for nothing. Kernels
go round more memory than the caches hold.

Disks that are shared swing twofold within minutes, and a drive's own cache takes what comes first faster: a rate is as
good as the moment and the length of its window.
"""

from __future__ import annotations

import array
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from optim_cpu import kernels
from optim_cpu.kernels import DType, Rule, StateFormat, StepBatch
from tiering._aio import ffi, lib
from tiering.config.training import IoConfig
from tiering.placement.budgets import host_memory
from tiering.placement.plan import FP32
from tiering.planning import conditions
from tiering.planning.conditions import Conditions
from tiering.planning.rates import Rates
from tiering.storage.aio import ALIGNMENT, AioContext
from tiering.storage.arena import PAGE, Arena, Lease, round_up
from tiering.storage.swap_file import check_directory
from tiering.storage.swap_space import Section, StripedExtent, SwapSpace
from tiering.storage.tickets import Transfer

SECONDS = 1.0  # of each window
FILE_BYTES = 1 << 30
SLOTS = 6
SLOT_BYTES = 16 << 20
# Memory that kernels go round: so many times the caches, between these.
CACHES = 4
KERNEL_BYTES = 192 << 20
MOST_KERNEL_BYTES = 1 << 30

_MOMENTS = {False: StateFormat.FP32, True: StateFormat.BF16_STOCHASTIC}  # as the engine keeps them

Way = Literal["read", "write", "mixed"]


@dataclass(frozen=True)
class Leg:
    """A way that bytes, elements or operations go, and how many of them do in a second.

    ``name`` is that of a field of Rates, as a rule; ``written`` are the bytes that a disk had to take to know. ``cut``:
    its window was over before its time, since no more may be written.
    """

    name: str
    rate: float
    written: int = 0
    cut: bool = False


Tell = Callable[[Leg], object]
"""Told of each leg as soon as it is measured."""


def quietly(leg: Leg) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Measurement:
    """Rates that are measured together, of what ``name`` says, and all that they depend on."""

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
    """The CPU and its memory. ``state_tensors`` are moments per element."""

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
    most: int | None = None,
) -> Measurement:
    """The disks behind ``directories``, which are used together. ``most``: bytes that may be written in all.

    Raises SwapSpaceError when a directory will not do.
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
            most=most,
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
    """The rates of the disks behind ``directories``, which are used together, and of this machine's CPU and memory.

    ``state_format`` and ``state_tensors`` (moments per element) are the plan's, ``grad_itemsize`` of its gradients.
    Takes four to five windows of ``seconds`` (1) after writing ``file_bytes`` (1 GiB) once, and 300 MB of memory, or up
    to 1 GiB where caches are large; leaves nothing behind. Raises SwapSpaceError when a directory will not do,
    SwapError when a transfer fails.
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
    most: int | None = None,
    tell: Tell = quietly,
) -> Rates:
    """Reading, writing and both at once, each for ``seconds``, on ``nbytes`` of swap space. Raises as ``measure``.

    ``most``, at least twice ``nbytes``: bytes that may be written in all. Of what is left when all was written once,
    writing has half, both at once the rest.
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
            window = _Window(space, space.allocate(nbytes, ("measured",), "measured"), arena, slot)
            window.run("write", places=window.places)  # blocks that were never written cost more
            found = {}
            for way in ("write", "read", "mixed"):
                if most is not None and way != "read":
                    left = most - window.written
                    window.room = left if way == "mixed" else left // 2
                before = 0 if way == "write" else window.written  # what was written first counts for writing
                rate = found[f"nvme_{way}"] = window.run(way, seconds=seconds)
                tell(Leg(f"nvme_{way}", rate, window.written - before, window.full))
            return Rates(**found)
        finally:
            aio.close()
            space.close()


class _Window:
    """Transfers of whole slots over an extent, round and round."""

    def __init__(self, space: SwapSpace, extent: StripedExtent, arena: Arena, slot: int) -> None:
        self.places = extent.nbytes // slot
        self._space = space
        self._extent = extent
        self._slot = slot
        self._leases = [arena.lease(slot, "slot") for _ in range(SLOTS)]
        self.written = 0  # bytes, in all runs
        self.room: int | None = None  # bytes that the next run may write; None: as many as it can
        self.full = False  # whether the last run ended because of that

    def run(self, way: Way, *, seconds: float = 0.0, places: int = 1) -> float:
        """Bytes per second over at least ``seconds`` and ``places``; "mixed" writes back what it has read."""
        idle = deque(self._leases)
        # Slot, offset, transfer, and whether that is the slot's last one.
        in_flight = deque[tuple[Lease, int, Transfer, bool]]()
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
    """The optimizer's kernel, taking in gradients, and copying, on all threads of the kernels; sums, on one."""
    found: dict[str, float] = {}

    def keep(name: str, unit: int, call: Callable[[], object]) -> None:
        found[name] = unit * repeated(call, seconds)
        tell(Leg(name, found[name]))

    ring = _Ring(4 + state_tensors)
    numel, grad_dtype = ring.numel, DType.FP32 if grad_itemsize == FP32 else DType.BF16
    ring.fill(grad_dtype, leases=1)
    keep("optimizer", numel, ring.batch(state_format, state_tensors, grad_dtype).run)
    ring.fill(grad_dtype)
    keep("gradients", numel, lambda: ring.take_in(grad_dtype))
    keep("host_copy", numel * FP32, ring.copy)
    keep("checksum", numel * FP32, ring.checksum)
    return Rates(**found)


def kernel_bytes() -> int:
    """What kernels go round: no more than a quarter of what is free, where that is above the least."""
    limit, in_use = host_memory()
    wanted = min(CACHES * conditions.cache_bytes(), (limit - in_use) // 4)
    return min(max(KERNEL_BYTES, wanted), MOST_KERNEL_BYTES)


class _Ring:
    """Equal leases, more memory together than caches hold. Each call takes the next ones, which are in no cache."""

    def __init__(self, leases: int) -> None:
        nbytes = round_up(-(-kernel_bytes() // leases))
        self.numel = nbytes // FP32
        arena = Arena.map(leases * nbytes, "measured kernels")
        self._leases = [arena.lease(nbytes, "ring") for _ in range(leases)]
        self._turn = itertools.count(1)
        self._sums = ffi.new("uint32_t[]", nbytes // ALIGNMENT)

    def _next(self) -> tuple[Lease, Lease]:
        """(from, to)."""
        turn, count = next(self._turn), len(self._leases)
        return self._leases[(turn - 1) % count], self._leases[turn % count]

    def fill(self, dtype: DType, *, leases: int | None = None) -> None:
        """Gradients of usual sizes, into the first ``leases`` or all: other numbers may take kernels longer."""
        values = array.array("f", (1e-3 * math.sin(i) for i in range(PAGE // FP32)))
        first = self._leases[0]
        kernels.cast(first.address, dtype, values.buffer_info()[0], DType.FP32, len(values))
        page = bytes(first.view[: len(values) * (FP32 if dtype is DType.FP32 else FP32 // 2)])
        pages = page * (first.nbytes // len(page))
        for lease in self._leases[:leases]:
            lease.view[:] = pages

    def batch(self, state_format: str, state_tensors: int, grad_dtype: DType) -> StepBatch:
        """A step of all elements, with the gradients in the first lease; state begins as zeros."""
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

    def checksum(self) -> None:
        source, _ = self._next()
        lib.aio_checksum(ffi.cast("void *", source.address), source.nbytes // ALIGNMENT, self._sums)


def usual_rule(state_tensors: int) -> Rule:
    """An optimizer that keeps so many moments; those that keep as many cost much the same."""
    if state_tensors == 2:
        return kernels.adam(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
    if state_tensors == 1:
        return kernels.lion(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.01, step=1)
    return kernels.sgd(lr=1e-4, momentum=0.0, dampening=0.0, nesterov=False, weight_decay=0.01, step=1)


def repeated(call: Callable[[], object], seconds: float) -> float:
    """Calls per second over at least ``seconds``, after one that is not counted."""
    call()
    count, began = 0, time.perf_counter()
    while not count or time.perf_counter() - began < seconds:
        call()
        count += 1
    return count / (time.perf_counter() - began)
