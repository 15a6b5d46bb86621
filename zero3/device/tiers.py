"""The tiers of one process, built from a Plan: arenas, swap space, the I/O context, the timeline and its stall clock.

On a CPU the device tier is host memory too: one arena holds what the device budget pays for, another what the host
budget pays for. On a GPU the device tier is torch's own allocations, counted here, and a slab for what is unsharded;
the host arena is registered with CUDA as a whole.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tiering.config.training import TiersConfig
from tiering.errors import ArenaError
from tiering.placement.plan import Plan
from tiering.placement.workload import Tier
from tiering.storage.aio import AioContext
from tiering.storage.arena import PAGE, Arena, Lease, round_up
from tiering.storage.swap_space import Section, StripedExtent, SwapSpace
from zero3.device import closed_storage, nan_memory
from zero3.device.link_copies import Copies
from zero3.device.slab import DeviceSlab
from zero3.device.storage_swap import can_exchange
from zero3.device.timeline import StallClock

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NvmePaths:
    """Directories of the swap space: those of offload_param for parameters, of offload_optimizer for all else."""

    param: tuple[Path, ...] = ()
    optimizer: tuple[Path, ...] = ()

    @property
    def all(self) -> tuple[Path, ...]:
        """Each of them once."""
        return tuple(dict.fromkeys((*self.param, *self.optimizer)))


@dataclass
class Home:
    """Where a flat array of bytes lives: in memory (a uint8 tensor), or on NVMe (an extent)."""

    tensor: Tensor | None = None
    extent: StripedExtent | None = None
    on_device: bool = False  # in memory that a GPU addresses, and the CPU does not

    @property
    def address(self) -> int:
        """Address of the first byte in host memory, 0 when the bytes are elsewhere."""
        return self.tensor.data_ptr() if self.tensor is not None and self.on_host else 0

    @property
    def on_host(self) -> bool:
        """Whether the CPU can address the bytes."""
        return self.tensor is not None and not self.on_device


class LedgerEntry:
    """Bytes counted in a Ledger."""

    def __init__(self, ledger: Ledger, nbytes: int) -> None:
        self.ledger = ledger
        self.nbytes = nbytes

    def release(self) -> None:
        self.ledger.used -= self.nbytes


class Ledger:
    """Counts bytes of memory that torch allocates, as ``name``, against a budget."""

    def __init__(self, capacity: int, name: str) -> None:
        self.capacity = capacity
        self.name = name
        self.used = 0
        self.peak = 0

    def try_lease(self, nbytes: int, kind: str, *, at: int | None = None) -> LedgerEntry | None:
        """Count ``nbytes`` if they fit; ``kind`` and ``at`` matter only where memory has addresses."""
        if self.used + nbytes > self.capacity:
            return None
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return LedgerEntry(self, nbytes)

    def lease(self, nbytes: int, kind: str, *, at: int | None = None, alone: bool = True) -> LedgerEntry:
        """Count ``nbytes``; ArenaError if they do not fit: nothing here comes free by waiting."""
        entry = self.try_lease(nbytes, kind)
        if entry is None:
            raise ArenaError(
                f"no {nbytes} bytes of device memory left for {kind} ({self.used} of {self.capacity} in use). This is a"
                " defect of the plan: please report it; a larger device_budget works around it"
            )
        return entry


class Tiers:
    """Memory and swap space for ``plan`` on ``device``. ``close`` waits for transfers and gives everything back.

    The streams of ``stalls`` are those of a device with memory of its own, None if the CPU is the device.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        config: TiersConfig,
        nvme: NvmePaths,
        stalls: StallClock,
        numa_node: int | None = None,
    ) -> None:
        self.plan = plan
        self.device = device
        self.streams = stalls.streams
        self.stalls = stalls
        self.copies = None if self.streams is None else Copies(self.streams, stalls)
        self.timeline = stalls.timeline
        self._numa_node = numa_node
        self.aio: AioContext | None = None
        self.swap: SwapSpace | None = None
        self._homes: list[Home] = []
        self._arenas: list[Arena] = []
        self._on_gpu: Counter[str] = Counter()
        self._on_nvme: Counter[str] = Counter()
        self._unpin: weakref.finalize[..., Tiers] | None = None  # lets CUDA forget the arena, once
        try:
            io = config.io
            if plan.total(Tier.NVME):
                self.aio = AioContext(
                    engine=io.engine,
                    block_size=io.block_size,
                    queue_depth=io.queue_depth,
                    registered=io.registered,
                    verify=config.verify,
                )
                allowed = io.allow_memory_file_system
                self.swap = SwapSpace(_sections(plan, nvme), self.aio, allow_memory_file_system=allowed)
            self._map_arenas(plan)
            if self.aio is not None:
                for arena in (self.host, self.device_arena):
                    self.aio.register(arena)
                log.info("I/O engine: %s", self.aio.info)
        except BaseException:
            self.close()
            raise

    def _map_arenas(self, plan: Plan) -> None:
        on_gpu = not self.device_is_host
        on_cuda = self.device.type == "cuda"
        in_arena = plan.total(Tier.HOST) - plan.checksum_bytes
        self.host = Arena.map(
            in_arena, "host", pin=register_with_cuda if on_cuda else None, numa_node=self._numa_node
        )
        if on_cuda and self.host.capacity:
            # Also for tiers that nobody closes: CUDA would refuse pages at this address to whoever maps them next.
            self._unpin = weakref.finalize(self, unregister_with_cuda, self.host.address, self.device)
            self._unpin.atexit = False  # the end of the process does it, whatever state CUDA is in by then
        self.staging = self.host.split(plan.staging.nbytes, "staging")
        self.grad_window = self.host.split(plan.grad_window_bytes, "gradient window")
        self.fetch_window = self.host.split(plan.fetch_window_bytes, "fetch window")
        self.offload_window = self.host.split(plan.offload_window_bytes, "offload window")
        by_copy = plan.workload.fetch_by_copy
        on_cpu = 0 if on_gpu else plan.total(Tier.DEVICE) - (plan.working_bytes if by_copy else 0)
        self.device_arena = Arena.map(on_cpu, "device", numa_node=self._numa_node)
        self.working: Arena | DeviceSlab | Ledger
        if self.streams is not None and can_exchange(self.device):
            self.working = DeviceSlab(plan.working_bytes, self.device, self.streams, "working")
        elif by_copy:
            self.working = Ledger(plan.working_bytes, "unsharded groups")
        else:
            self.working = self.device_arena.split(plan.working_bytes, "working")
        # Where gradients are on their way between ranks: arenas of their own; what a GPU allocates is counted.
        self.reduction: dict[str, Arena | Ledger] = {}
        for name in ("opened", "collected", "exchanged"):
            nbytes, kind = getattr(plan.reduction, name), "gradient reduction"
            self.reduction[name] = Ledger(nbytes, kind) if on_gpu else self.device_arena.split(nbytes, kind)
        # What storages show that have no bytes now, where torch cannot refuse to read them.
        self.nowhere: memoryview | None = None
        if not by_copy and plan.working_bytes and not closed_storage.can_close():
            self.nowhere = nan_memory.map_nan(max(group.param_bytes for group in plan.workload.groups))
        self._on_host = (self.staging, self.grad_window, self.fetch_window, self.offload_window)
        self._on_device = (self.working, *self.reduction.values())
        windows = (self.host, self.device_arena, *self._on_host, *self._on_device)
        self._arenas = [arena for arena in windows if isinstance(arena, Arena)]

    @property
    def device_is_host(self) -> bool:
        """Whether the CPU is the device."""
        return self.streams is None

    def home(self, tier: Tier, nbytes: int, kind: str, names: tuple[str, ...]) -> Home:
        """A place of ``nbytes`` on ``tier`` until ``close``. ``kind`` is one of the plan's."""
        home = self._make_home(tier, nbytes, kind, names)
        self._homes.append(home)
        return home

    def _make_home(self, tier: Tier, nbytes: int, kind: str, names: tuple[str, ...]) -> Home:
        if tier is Tier.NVME and not nbytes:  # a group without gradients: nothing to swap
            return Home(tensor=torch.empty(0, dtype=torch.uint8, device="cpu"))
        if tier is Tier.NVME:
            assert self.swap is not None
            self._on_nvme[kind] += nbytes
            return Home(extent=self.swap.allocate(nbytes, names, kind))
        if tier is Tier.DEVICE and not self.device_is_host:
            self._on_gpu[kind] += nbytes
            return Home(torch.empty(nbytes, dtype=torch.uint8, device=self.device), on_device=True)
        arena = self.device_arena if tier is Tier.DEVICE else self.host
        return Home(tensor=as_tensor(arena.lease(nbytes, kind))[:nbytes])

    def sections(self) -> Iterator[tuple[str, int, str]]:
        """Directory and offset at which each part of an extent begins, and the kind of state that lives there."""
        for home in self._homes:
            if home.extent is not None:
                for part in home.extent.parts:
                    yield str(part.slab.directory), part.extent.offset, home.extent.section

    @property
    def chunk_bytes(self) -> int:
        """The most that ``writing`` takes at once for bytes on NVMe."""
        return self.plan.staging.slot_bytes

    @contextmanager
    def writing(self, home: Home, offset: int, nbytes: int) -> Iterator[Tensor]:
        """A uint8 tensor in host memory for bytes [offset, offset + nbytes) of ``home``, stored when the block ends.

        Its contents are undefined at first. On NVMe ``offset`` and ``nbytes`` are multiples of 4096, ``nbytes`` at
        most ``chunk_bytes``; the write may still be in flight afterwards.
        """
        if home.tensor is not None:
            target = home.tensor[offset : offset + nbytes]
            local = target if home.on_host else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            yield local
            # A copy from memory that is not pinned: it runs behind compute's kernels, and has ended when the call
            # returns.
            if local is not target:
                target.copy_(local)
            return
        assert home.extent is not None and self.swap is not None
        lease = self.staging.lease(nbytes, "staging")
        try:
            yield as_tensor(lease)[:nbytes]
            # The extent orders this write behind transfers of the same bytes that are under way.
            ticket = self.swap.swap_out(home.extent, lease.part(0, nbytes), offset=offset)
        except BaseException:
            # A signal handler may have raised after the submission: the memory is released only when no write reads it.
            self.swap.settle(home.extent)
            lease.release()
            raise
        # The write reads the lease until the ticket is done.
        lease.retire(ticket)

    def load(self, home: Home, offset: int, nbytes: int) -> Tensor:
        """A copy, in host memory, of bytes [offset, offset + nbytes) of ``home``; any offset and length."""
        if home.tensor is not None:
            # From a device, the copy runs behind the kernels of the current stream, and the CPU waits for it.
            return home.tensor[offset : offset + nbytes].to("cpu", copy=True)
        assert home.extent is not None and self.swap is not None
        loaded = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        end = round_up(offset + nbytes)
        for at in range(offset // PAGE * PAGE, end, self.chunk_bytes):
            size = min(self.chunk_bytes, end - at)
            lease = self.staging.lease(size, "staging")
            self.fetch(home.extent, lease, offset=at)
            first, last = max(at, offset), min(at + size, offset + nbytes)
            loaded[first - offset : last - offset] = as_tensor(lease)[first - at : last - at]
            lease.release()
        return loaded

    def fetch(self, extent: StripedExtent, lease: Lease, *, offset: int = 0) -> None:
        """Fill ``lease`` from ``offset`` of ``extent`` and wait for that. After an exception the lease is given up."""
        assert self.swap is not None
        ticket = None
        try:
            ticket = self.swap.swap_in(extent, lease, offset=offset)
            ticket.wait()
        except BaseException:
            if ticket is None:  # interrupted, perhaps, with the bytes under way
                self.swap.settle(extent)
                lease.release()
            elif ticket.done():
                lease.release()
            else:
                lease.retire(ticket)
            raise

    def occupancy(self, tier: Tier) -> dict[str, int]:
        """Bytes that the engine owns on ``tier`` now, by kind. Windows count in full: what is not leased is idle."""
        if tier is Tier.NVME:
            return dict(self._on_nvme)
        held = Counter(self.device_arena.by_kind if tier is Tier.DEVICE else self.host.by_kind)
        if tier is Tier.HOST:
            held["checksums"] = self.plan.checksum_bytes
        if tier is Tier.DEVICE:
            held.update(self._on_gpu)
        for window in self._on_device if tier is Tier.DEVICE else self._on_host:
            if isinstance(window, Arena):
                leased = window.by_kind
                # The others are parts of an arena, which has counted them.
                if not isinstance(window, DeviceSlab):
                    held[window.name] -= window.capacity
                held.update(leased)
                held["idle windows"] += window.capacity - sum(leased.values())
            else:
                held[window.name] += window.used
        return {kind: nbytes for kind, nbytes in held.items() if nbytes}

    def peak(self, tier: Tier) -> int:
        """The most bytes that the engine owned on ``tier`` at one time."""
        if tier is Tier.NVME:
            return self.swap.used if self.swap is not None else 0
        if tier is Tier.HOST:
            return self.host.peak + self.plan.checksum_bytes
        ledgers = sum(window.peak for window in self._on_device if isinstance(window, Ledger))
        slab = self.working.capacity if isinstance(self.working, DeviceSlab) else 0
        return self.device_arena.peak + slab + sum(self._on_gpu.values()) + ledgers

    def close(self) -> None:
        """Wait for what is in flight and release the swap space. Idempotent. Raises the first pending I/O error."""
        try:
            if self.aio is not None:
                # Each step relies on the one before. After this one, no transfer uses an arena or a descriptor.
                self.aio.close()
        finally:
            if self.swap is not None:
                # The driver of the I/O used these descriptors until it ended.
                self.swap.close()
            if self.streams is not None:
                try:
                    # Copies may still read or fill pinned memory.
                    self.streams.synchronize()
                except RuntimeError as error:  # memory must be given back nevertheless
                    log.error("the device has failed before its queued work has ended: %s", error)
            # While the pages are still mapped: CUDA finds its registration by their address.
            if self._unpin is not None:
                self._unpin()
            # The engine may be referred to for long; its memory must not wait for that.
            for home in self._homes:
                home.tensor = None
            for arena in self._arenas:
                arena.forget_memory()
            self.nowhere = None


def _sections(plan: Plan, nvme: NvmePaths) -> dict[str, Section]:
    """What each kind of state needs on NVMe, and where."""
    sections = {}
    for kind, nbytes in plan.contents(Tier.NVME).items():
        paths = nvme.param if kind == "parameters" else nvme.optimizer
        assert paths, "a plan uses NVMe only where the configuration names a path"
        sections[kind] = Section(nbytes, paths)
    return sections


def as_tensor(lease: Lease) -> Tensor:
    """The lease's bytes as a uint8 tensor that keeps the arena's memory reachable."""
    if lease.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # The tensor refers to the view, and the view to the lease: so the range is not lost while the tensor lives. An
    # explicit release frees it nevertheless.
    return torch.frombuffer(lease.view, dtype=torch.uint8)


def register_with_cuda(address: int, nbytes: int) -> None:
    """Page-lock host memory for CUDA. Raises RuntimeError if the driver refuses it."""
    cudart = torch.cuda.cudart()
    result = int(cudart.cudaHostRegister(address, nbytes, 0))
    if result:
        # CUDA's runtime keeps the error and would report it at the next launch of a kernel. This launch takes it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise RuntimeError(
            f"cudaHostRegister of {nbytes} bytes failed with error {result}: lower host_budget or raise memlock"
        )


def unregister_with_cuda(address: int, device: torch.device) -> None:
    """Undo ``register_with_cuda``, after all copies on ``device`` that use the memory have ended."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        log.error(
            "the device has failed; pinned memory is unregistered without waiting for its copies: %s", error
        )
    result = int(torch.cuda.cudart().cudaHostUnregister(address))
    if result:
        log.error(
            "cudaHostUnregister failed with error %d; the memory stays pinned until the process ends", result
        )
