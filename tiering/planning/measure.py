"""The rates of this machine, measured through the engine's own parts: its files, I/O engine, arenas and kernels.

Without torch, so without the device's: zero3/device_rates.py has those. What is measured is what a step does. State is
read into slots and written back to where it was, several slots at a time, on nameless files past the page cache, after
every block was written once; bytes are random, since some disks store repeated ones for nothing. Kernels run over
more memory than any cache holds.

Disks that are shared swing twofold within minutes, and a drive's own cache takes what comes first faster: a rate is as
good as the moment and the length of its window.
"""

from __future__ import annotations

import array
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from optim_cpu import kernels
from optim_cpu.kernels import DType, Rule, StateFormat, StepBatch
from tiering.aio import AioContext
from tiering.arena import PAGE, Arena, Lease, round_up
from tiering.config import IoConfig
from tiering.plan import FP32
from tiering.planning.rates import Rates
from tiering.swap_space import Section, StripedExtent, SwapSpace
from tiering.tickets import Transfer

SECONDS = 1.0  # of each window
FILE_BYTES = 1 << 30
SLOTS = 6
SLOT_BYTES = 16 << 20
KERNEL_NUMEL = 8 << 20  # elements: 192 MiB with Adam's state in fp32

Way = Literal["read", "write", "mixed"]


def measure(
    directories: Sequence[Path] = (),
    *,
    state_format: str = "fp32",
    state_tensors: int = 2,
    grad_itemsize: int = 2,
    io: IoConfig | None = None,
    file_bytes: int = FILE_BYTES,
    seconds: float = SECONDS,
) -> Rates:
    """The rates of the disks behind ``directories``, which are used together, and of this machine's CPU and memory.

    ``state_format`` and ``state_tensors`` (moments per element) are the plan's, ``grad_itemsize`` of its gradients.
    Takes four to five windows of ``seconds`` after writing ``file_bytes`` once, and 300 MB of memory; leaves nothing
    behind. Raises SwapSpaceError when a directory will not do, SwapError when a transfer fails.
    """
    cpu = cpu_rates(
        state_format=state_format,
        state_tensors=state_tensors,
        grad_itemsize=grad_itemsize,
        seconds=seconds / 2,
    )
    return (
        cpu.updated(disk_rates(directories, io=io, nbytes=file_bytes, seconds=seconds))
        if directories
        else cpu
    )


def disk_rates(
    directories: Sequence[Path],
    *,
    io: IoConfig | None = None,
    nbytes: int = FILE_BYTES,
    seconds: float = SECONDS,
) -> Rates:
    """Reading, writing and both at once, each for ``seconds``, on ``nbytes`` of swap space. Raises as ``measure``."""
    io = io or IoConfig()
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
            return Rates(
                nvme_write=window.run("write", seconds=seconds),
                nvme_read=window.run("read", seconds=seconds),
                nvme_mixed=window.run("mixed", seconds=seconds),
            )
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

    def run(self, way: Way, *, seconds: float = 0.0, places: int = 1) -> float:
        """Bytes per second over at least ``seconds`` and ``places``; "mixed" writes back what it has read."""
        idle = deque(self._leases)
        # Slot, offset, transfer, and whether that is the slot's last one.
        in_flight = deque[tuple[Lease, int, Transfer, bool]]()
        place = moved = 0
        began = time.perf_counter()
        while True:
            more = place < places or (seconds and time.perf_counter() - began < seconds)
            if idle and more:
                lease, offset = idle.popleft(), place % self.places * self._slot
                place += 1
                submit = self._space.swap_out if way == "write" else self._space.swap_in
                in_flight.append((lease, offset, submit(self._extent, lease, offset=offset), way != "mixed"))
            elif in_flight:
                lease, offset, transfer, last = in_flight.popleft()
                moved += transfer.wait()
                if last:
                    idle.append(lease)
                else:
                    written = self._space.swap_out(self._extent, lease, offset=offset)
                    in_flight.append((lease, offset, written, True))
            else:
                return moved / (time.perf_counter() - began)


def cpu_rates(
    *, state_format: str = "fp32", state_tensors: int = 2, grad_itemsize: int = 2, seconds: float = SECONDS
) -> Rates:
    """The optimizer's kernel, taking in gradients, and copying, on all threads of the kernels."""
    numel = KERNEL_NUMEL
    split, moment = "split" in state_format, StateFormat.BF16 if "bf16" in state_format else StateFormat.FP32
    arena = Arena.map(numel * (4 + state_tensors) * FP32, "measured kernels")
    page = array.array("f", (1e-3 * math.sin(i) for i in range(PAGE // FP32))).tobytes()
    wide, out = (arena.lease(numel * FP32, name) for name in ("fp32", "out"))
    states = tuple(arena.lease(numel * FP32, "state").address for _ in range(state_tensors))
    master, grad = (arena.lease(numel * FP32, name) for name in ("master", "gradient"))
    wide.view[:] = page * (numel * FP32 // PAGE)
    grad_dtype = DType.FP32 if grad_itemsize == FP32 else DType.BF16
    kernels.cast(grad.address, grad_dtype, wide.address, DType.FP32, numel)
    batch = StepBatch()
    batch.add(
        numel,
        batch.add_rule(_rule(state_tensors)),
        param=out.address if split else master.address,
        remainder=master.address if split else 0,
        state=states,
        state_format=moment,
        grad=grad.address,
        grad_dtype=grad_dtype,
        out=0 if split else out.address,
    )

    def take_in() -> None:
        kernels.accumulate(out.address, grad_dtype, grad.address, grad_dtype, numel, overwrite=True)
        kernels.sum_of_squares(out.address, grad_dtype, numel)

    def copy() -> None:
        kernels.cast(out.address, DType.FP32, wide.address, DType.FP32, numel)

    return Rates(
        optimizer=numel * repeated(batch.run, seconds),
        gradients=numel * repeated(take_in, seconds),
        host_copy=numel * FP32 * repeated(copy, seconds),
    )


def _rule(state_tensors: int) -> Rule:
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
