"""The tiers of one process, built from a Plan: arenas, swap space, the I/O context, the timeline and its stall clock.

If the CPU is the device, the device tier is host memory too: one arena has the memory of the device budget, another
one that of the host budget. On a GPU, the device tier consists of allocations of torch, counted here, and a slab for
unsharded groups. The host arena is registered with CUDA as a whole.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from tiering.config.fields import format_size
from tiering.config.training import TiersConfig
from tiering.errors import SwapError, SwapSpaceError
from tiering.host.numa import Node
from tiering.placement.plan import Plan
from tiering.placement.tenants import OPTIMIZER_STATE, PARAMETERS, SNAPSHOTS
from tiering.placement.workload import ACTIVATIONS, Tier
from tiering.storage.aio import AioContext
from tiering.storage.arena import PAGE, Arena, Lease, round_up
from tiering.storage.file_system import FileVersion
from tiering.storage.io_stats import FileStats, totals_by_path
from tiering.storage.read_only import FileRange, Loading, ReadOnlyFiles
from tiering.storage.request import Buffer, BufferPart
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.swap_space import SwapSpace
from tiering.storage.tickets import Abandoned, Ticket
from tiering.storage.versions import Kept, Versions
from zero3.device import heap, nan_memory, storages
from zero3.device.home import Home, NvmePaths
from zero3.device.ledger import Ledger
from zero3.device.link_copies import Copies
from zero3.device.pinning import PinnedMemory, pinned_memory
from zero3.device.slab import DeviceSlab
from zero3.device.storages import as_tensor, can_exchange, content_of
from zero3.device.timeline import StallClock

log = logging.getLogger(__name__)

WINDOW = 1 << 20
"""Bytes of a transfer between steps where staging slots are smaller, as they are if little or nothing is trained.

A request of a few KiB takes as long as one of a MiB.
"""


class Tiers:
    """Memory and swap space for ``plan`` on ``device``. ``close`` waits for transfers and frees everything.

    ``stalls`` has the streams of a device with its own memory, or None if the CPU is the device. ``versions`` are those
    of the files in which homes may be.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        config: TiersConfig,
        nvme: NvmePaths,
        stalls: StallClock,
        nodes: Sequence[Node] = (),
        versions: Mapping[Path, FileVersion] = MappingProxyType({}),
    ) -> None:
        self.plan = plan
        self.device = device
        self.streams = stalls.streams
        self.device_is_host = stalls.streams is None
        self.stalls = stalls
        self.copies = None if self.streams is None else Copies(self.streams, stalls)
        self.timeline = stalls.timeline
        # On a CPU torch's aligned allocations seldom fit into what the C library keeps of freed ones.
        moved = any(ACTIVATIONS in plan.contents(tier) for tier in Tier)
        most = heap.MOST_OF_MOVED if moved else heap.MOST
        self.freed = heap.FreedMemory(most) if self.device_is_host else None
        self._nodes = nodes
        self.aio: AioContext | None = None
        self.swap: SwapSpace | None = None
        self.files: ReadOnlyFiles | None = None
        self._homes: list[Home] = []
        self._arenas: list[Arena] = []
        self._on_gpu: Counter[str] = Counter()
        self._on_nvme: Counter[str] = Counter()
        self._peak_on_nvme = 0
        self._pinned: PinnedMemory | None = None
        self._unpin: weakref.finalize[..., Tiers] | None = None  # unregisters the arena from CUDA, once
        try:
            io = config.io
            if plan.total(Tier.NVME) or plan.in_place_bytes:
                self.aio = AioContext(
                    engine=io.engine,
                    block_size=io.block_size,
                    queue_depth=io.queue_depth,
                    registered=io.registered,
                    verify=config.verify,
                )
            if self.aio is not None and plan.in_place_bytes:
                self.files = ReadOnlyFiles(versions, self.aio)
            if self.aio is not None and plan.total(Tier.NVME):
                allowed = io.allow_memory_file_system
                self.swap = SwapSpace(nvme.sections(plan), self.aio, allow_memory_file_system=allowed)
            # The copies in swap space of trained state in memory, which a snapshot writes.
            self.flushed: StripedExtent | None = None
            if self.swap is not None and plan.workload.snapshots:
                self.swap.check_links()
                if plan.snapshot_bytes:
                    home = self.home(
                        Tier.NVME, plan.snapshot_bytes, SNAPSHOTS, (SNAPSHOTS,), kept=(Kept.SNAPSHOT,)
                    )
                    self.flushed = home.extent
            self._map_arenas(plan)
            if self.aio is not None:
                self._register(self.aio)
                log.info("I/O engine: %s", self.aio.info)
        except BaseException:
            self.close()
            raise

    def _map_arenas(self, plan: Plan) -> None:
        on_gpu = not self.device_is_host
        self._pinned = pinned_memory(self.device)
        pin = None if self._pinned is None else self._pinned.pin_arena
        self.host = Arena.map(plan.total(Tier.HOST) - plan.checksum_bytes, "host", pin=pin, nodes=self._nodes)
        if self._pinned is not None:
            # Also for tiers that are not closed: otherwise CUDA would refuse the next registration at this address.
            self._unpin = weakref.finalize(self, self._pinned.unpin, self.device)
            self._unpin.atexit = False  # at exit the process frees it, and CUDA may be in any state
        self.staging = self.host.split(plan.staging.nbytes, "staging")
        self.windows = {
            kind: self.host.split(nbytes, f"window of {kind}") for kind, nbytes in plan.windows.items()
        }
        self.fetch_window = self.host.split(plan.fetch_window_bytes, "fetch window")
        self.offload_window = self.host.split(plan.offload_window_bytes, "offload window")
        if self._pinned is not None:
            # Staging last: an update by the CPU does not copy it over the link.
            self._pinned.pin_windows(
                self.fetch_window, *self.windows.values(), self.offload_window, self.staging
            )
            self._pinned.report(self.host)
        by_copy = plan.workload.fetch_by_copy
        on_cpu = 0 if on_gpu else plan.total(Tier.DEVICE) - (plan.working_bytes if by_copy else 0)
        self.device_arena = Arena.map(on_cpu, "device", nodes=self._nodes)
        self.working: Arena | DeviceSlab | Ledger
        if self.streams is not None and can_exchange(self.device):
            self.working = DeviceSlab(plan.working_bytes, self.device, self.streams, "working")
        elif by_copy:
            self.working = Ledger(plan.working_bytes, "unsharded groups")
        else:
            self.working = self.device_arena.split(plan.working_bytes, "working")
        # Memory of gradients in flight between ranks: separate arenas on a CPU, counted allocations on a GPU.
        self.reduction: dict[str, Arena | Ledger] = {}
        for name in ("opened", "collected", "exchanged"):
            nbytes, kind = getattr(plan.reduction, name), "gradient reduction"
            self.reduction[name] = Ledger(nbytes, kind) if on_gpu else self.device_arena.split(nbytes, kind)
        # The content of storages without bytes, if torch cannot refuse reads of them.
        self.nowhere: memoryview | None = None
        if not by_copy and plan.working_bytes and not storages.can_close():
            self.nowhere = nan_memory.map_nan(max(group.param_bytes for group in plan.workload.groups))
        self._on_host = (self.staging, *self.windows.values(), self.fetch_window, self.offload_window)
        self._on_device = (self.working, *self.reduction.values())
        windows = (self.host, self.device_arena, *self._on_host, *self._on_device)
        self._arenas = [arena for arena in windows if isinstance(arena, Arena)]

    def _register(self, aio: AioContext) -> None:
        """Register the memory of the arenas with the kernel, as far as the limit of locked memory permits."""
        for memory in self._in_order_of_use():
            if aio.register(memory) < memory.nbytes:
                break
        info, total = aio.info, self.host.nbytes + self.device_arena.nbytes
        if 0 < info.registered_bytes < total:
            log.info(
                "I/O engine: %s of %s are registered with the kernel (%s); transfers of the rest take more CPU time."
                " Raise the limit of locked memory (ulimit -l) to %s",
                *(format_size(info.registered_bytes), format_size(total)),
                *(info.passed_over.get("registered_buffers", "refused"), format_size(total)),
            )

    def _in_order_of_use(self) -> Iterator[Buffer]:
        """The host memory of arenas: the windows of transfers, at their start without gaps, each alone; the rest."""
        apart = (self.host, self.device_arena)
        windows = [each for each in self._arenas if each not in apart and not isinstance(each, DeviceSlab)]
        yield from windows
        for arena in apart:
            end = arena.address + arena.capacity
            ends = [each.address + each.nbytes for each in windows if arena.address <= each.address < end]
            rest = max(ends, default=arena.address)
            yield BufferPart(arena, rest, end - rest)

    def home(
        self, tier: Tier, nbytes: int, kind: str, names: tuple[str, ...], *, kept: Collection[Kept] = ()
    ) -> Home:
        """A home of ``nbytes`` on ``tier`` until ``close``. ``kind`` is a kind of the plan.

        In swap space its content is ``kept`` for these purposes (SwapSpace.keep).
        """
        home = self._make_home(tier, nbytes, kind, names, kept)
        self._homes.append(home)
        return home

    @property
    def extents(self) -> list[StripedExtent]:
        """The extents of all homes, in the order in which they were made."""
        return [home.extent for home in self._homes if home.extent is not None]

    def home_in_files(
        self, ranges: Sequence[FileRange], nbytes: int, slack: int | None, names: tuple[str, ...]
    ) -> Home:
        """A home of ``nbytes`` in ``ranges`` of files. Raises WeightsError if a file cannot be opened, or has changed.

        ``slack`` is what a read of it takes beyond its bytes, None if only parts of it are read.
        """
        assert self.files is not None
        home = Home(files=self.files.home(ranges, nbytes, slack, names))
        self._homes.append(home)
        return home

    def _make_home(
        self, tier: Tier, nbytes: int, kind: str, names: tuple[str, ...], kept: Collection[Kept]
    ) -> Home:
        if tier is Tier.NVME and not nbytes:  # a group without gradients: nothing to swap
            return Home(tensor=torch.empty(0, dtype=torch.uint8, device="cpu"))
        if tier is Tier.NVME:
            assert self.swap is not None
            self._on_nvme[kind] += nbytes * Versions.count(kept)
            return Home(extent=self.swap.allocate(nbytes, names, kind, kept=kept))
        if tier is Tier.DEVICE and not self.device_is_host:
            self._on_gpu[kind] += nbytes
            return Home(torch.empty(nbytes, dtype=torch.uint8, device=self.device), on_device=True)
        arena = self.device_arena if tier is Tier.DEVICE else self.host
        return Home(tensor=as_tensor(arena.lease(nbytes, kind))[:nbytes])

    def arena_for(self, kind: str, nbytes: int) -> Arena:
        """Host memory that the plan has for the tenant ``kind``, as an arena of its own."""
        arena = self.host.split(nbytes, kind)
        if self._pinned is not None:
            self._pinned.pin_windows(arena)
        self._on_host = (*self._on_host, arena)
        self._arenas.append(arena)
        return arena

    def lend(self, nbytes: int, kind: str) -> StripedExtent:
        """An extent until ``take_back``. If the swap space of ``kind`` is in use, it grows within the NVMe budget.

        Raises SwapSpaceError if the budget or the disk has no room.
        """
        assert self.swap is not None
        try:
            extent = self.swap.allocate(nbytes, (kind,), kind)
        except SwapSpaceError:
            # In steps of a quarter: the space of a pass is reserved in few steps. It is kept for the next pass.
            more = max(round_up(nbytes), round_up(self._on_nvme[kind] // 4))
            room = self.plan.budgets.nvme - self.swap.capacity
            if round_up(nbytes) > room:
                raise SwapSpaceError(
                    f"{kind} need {format_size(more)} more of swap space than the"
                    f" {format_size(self._on_nvme[kind])} in use, but nvme_budget"
                    f" {format_size(self.plan.budgets.nvme)} leaves {format_size(max(0, room))}: raise nvme_budget, or"
                    " use smaller micro-batches or activation checkpointing"
                ) from None
            self.swap.grow(kind, min(more, room))
            extent = self.swap.allocate(nbytes, (kind,), kind)
        self._on_nvme[kind] += extent.nbytes
        self._peak_on_nvme = max(self._peak_on_nvme, self.swap.used)
        return extent

    def take_back(self, extent: StripedExtent) -> None:
        """Free an extent of ``lend``, after its transfers in flight."""
        assert self.swap is not None
        self._on_nvme[extent.section] -= extent.nbytes
        self.swap.free(extent)

    def sections(self) -> list[tuple[str, int, str]]:
        """Where the bytes of each kind begin on NVMe: directory, or file, and offset, in this order.

        Activations are in lent extents, wherever there is room between the homes.
        """
        parts = [(part, extent.section) for extent in self.extents for part in extent.parts]
        begins = [(str(part.slab.directory), part.extent.offset, section) for part, section in parts]
        begins += [(str(path), 0, PARAMETERS) for path in (() if self.files is None else self.files.paths)]
        if self.swap is not None and ACTIVATIONS in self.plan.contents(Tier.NVME):
            lent = [(str(slab.directory), 0, ACTIVATIONS) for slab in self.swap.slabs]
            for part, _ in parts:
                lent.append((str(part.slab.directory), part.extent.offset + part.extent.nbytes, ACTIVATIONS))
            # First: the sort keeps them before the home that begins at the same place.
            begins = [*lent, *begins]
        return sorted(begins, key=lambda begin: begin[:2])

    def check_files(self) -> None:
        """Raise WeightsError if a file in which homes are has changed."""
        if self.files is not None:
            self.files.check()

    def file_stats(self) -> list[tuple[FileStats, tuple[int, ...]]]:
        """I/O counters by path, and the numbers of the files there: a user's files count for their directory."""
        directories = {} if self.files is None else {str(path): str(path.parent) for path in self.files.paths}
        return [] if self.aio is None else totals_by_path(self.aio.stats(), directories)

    @property
    def chunk_bytes(self) -> int:
        """The maximum length of one ``writing`` to NVMe."""
        return self.plan.staging.slot_bytes

    @contextmanager
    def writing(self, home: Home, offset: int, nbytes: int, through: Arena | None = None) -> Iterator[Tensor]:
        """A uint8 tensor in host memory for bytes [offset, offset + nbytes) of ``home``, stored when the block ends.

        Its initial content is undefined. On NVMe, ``offset`` and ``nbytes`` are multiples of 4096, and ``nbytes`` is at
        most ``chunk_bytes``, or what a lease of ``through`` can have. The write may still be in flight after the block.
        """
        if home.tensor is not None:
            target = home.tensor[offset : offset + nbytes]
            local = target if home.on_host else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            yield local
            # A copy from memory that is not pinned runs behind compute's kernels, and has ended when the call returns.
            if local is not target:
                target.copy_(local)
            return
        assert home.extent is not None and self.swap is not None
        window = self.staging if through is None else through
        lease = window.lease(nbytes, "staging" if through is None else home.extent.section)
        try:
            yield as_tensor(lease)[:nbytes]
            # The extent orders this write behind transfers of the same bytes in flight.
            ticket = self.swap.swap_out(home.extent, lease.part(0, nbytes), offset=home.offset + offset)
        except BaseException:
            # A signal handler may have raised after the submission. The memory is released when no write reads it.
            self.swap.settle(home.extent)
            lease.release()
            raise
        # The write reads the lease until the ticket is done.
        lease.retire(ticket)

    @contextmanager
    def read_windows(self, count: int, nbytes: int) -> Iterator[tuple[Arena, int]]:
        """Host memory for reads of ``nbytes``, ``count`` of them at a time, and the largest length of one read.

        It is staging, or pages of their own while the block runs if slots are smaller than ``WINDOW`` and than
        ``nbytes``. Leases are released or retired in the block.
        """
        length = min(round_up(nbytes), WINDOW)
        if self.chunk_bytes >= length:
            yield self.staging, self.chunk_bytes
            return
        windows = Arena.map(count * length, "reading")
        try:
            yield windows, length
        finally:
            # After an exception, reads may still fill the windows. It is raised, and not the error of a read.
            with suppress(SwapError):
                windows.drain()
            windows.forget_memory()

    def load(self, home: Home, offset: int, nbytes: int) -> Tensor:
        """A copy of bytes [offset, offset + nbytes) of ``home`` in host memory, with any offset and length."""
        if home.tensor is not None:
            # From a device, the copy runs behind the kernels of the current stream, and the CPU waits for it.
            return home.tensor[offset : offset + nbytes].to("cpu", copy=True)
        if home.files is not None:
            return content_of(self.begin_load(home, offset, nbytes))
        assert home.extent is not None and self.swap is not None
        loaded = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        start, end = offset // PAGE * PAGE, round_up(offset + nbytes)
        with self.read_windows(1, end - start) as (windows, length):
            for at in range(start, end, length):
                size = min(length, end - at)
                lease = windows.lease(size, "staging")
                self.fetch(home.extent, lease, offset=home.offset + at)
                first, last = max(at, offset), min(at + size, offset + nbytes)
                loaded[first - offset : last - offset] = as_tensor(lease)[first - at : last - at]
                lease.release()
        return loaded

    def begin_load(self, home: Home, offset: int, nbytes: int) -> Loading:
        """Start to read bytes [offset, offset + nbytes) of ``home``, which is in files, into memory of their own."""
        assert home.files is not None and self.files is not None
        return self.files.load(home.files, offset, nbytes)

    def reader(self, home: Home) -> Callable[..., Ticket]:
        """The function of (buffer, offset=, priority=) that starts to read ``home``, which is on NVMe.

        It reads as many bytes as the buffer has, or to the end. A home in files, and a part of an extent, is read as a
        whole, without an offset. A home in files is read into ``home.room`` bytes; then ``home.files.layout`` arranges
        it. A signal handler may raise before the caller has the transfer: after an exception, ``settle`` before the
        memory is released.
        """
        if home.files is not None:
            assert self.files is not None
            return partial(self.files.read, home.files)
        assert home.extent is not None and self.swap is not None
        if home.length:
            return partial(self.swap.swap_in, home.extent, offset=home.offset)
        return partial(self.swap.swap_in, home.extent)

    def keep(self) -> None:
        """Keep what trained state on NVMe is now, if the plan has two versions: see SwapSpace.keep."""
        if self.swap is not None and self.plan.workload.versions > 1:
            with self.stalls.waiting_for(OPTIMIZER_STATE):
                self.swap.keep()

    def go_back(self) -> None:
        """Make trained state on NVMe what it was at the last ``keep``."""
        if self.swap is not None:
            self.swap.go_back()

    def settle(self, home: Home) -> None:
        """Wait for all transfers of ``home``, which is on NVMe."""
        if home.files is not None:
            assert self.files is not None
            self.files.settle(home.files)
        else:
            assert home.extent is not None and self.swap is not None
            self.swap.settle(home.extent)

    def fetch(self, extent: StripedExtent, lease: Lease, *, offset: int = 0) -> None:
        """Fill ``lease`` from ``offset`` of ``extent`` and wait for the read. An exception releases the lease."""
        assert self.swap is not None
        ticket = None
        try:
            ticket = self.swap.swap_in(extent, lease, offset=offset)
            ticket.wait()
        except BaseException:
            if ticket is None:  # a signal handler may have raised after the submission
                self.swap.settle(extent)
                lease.release()
            elif ticket.done():
                lease.release()
            else:
                lease.retire(Abandoned(ticket))
            raise

    def occupancy(self, tier: Tier) -> dict[str, int]:
        """Bytes that the engine owns on ``tier`` now, by kind. Windows count whole.

        Their free part is of the kind "idle windows".
        """
        if tier is Tier.NVME:
            return {kind: nbytes for kind, nbytes in dict(self._on_nvme).items() if nbytes}
        bytes_by_kind = Counter(self.device_arena.by_kind if tier is Tier.DEVICE else self.host.by_kind)
        if tier is Tier.HOST:
            bytes_by_kind["checksums"] = self.plan.checksum_bytes
        if tier is Tier.DEVICE:
            bytes_by_kind.update(self._on_gpu)
        for window in self._on_device if tier is Tier.DEVICE else self._on_host:
            if isinstance(window, Arena):
                leased = window.by_kind
                # All windows except the slab are parts of an arena, which has counted them.
                if not isinstance(window, DeviceSlab):
                    bytes_by_kind[window.name] -= window.capacity
                bytes_by_kind.update(leased)
                bytes_by_kind["idle windows"] += window.capacity - sum(leased.values())
            else:
                bytes_by_kind[window.name] += window.used
        return {kind: nbytes for kind, nbytes in bytes_by_kind.items() if nbytes}

    def peak(self, tier: Tier) -> int:
        """The maximum of the bytes that the engine has owned on ``tier``."""
        if tier is Tier.NVME:
            return max(self._peak_on_nvme, self.swap.used) if self.swap is not None else 0
        if tier is Tier.HOST:
            return self.host.peak + self.plan.checksum_bytes
        ledgers = sum(window.peak for window in self._on_device if isinstance(window, Ledger))
        slab = self.working.capacity if isinstance(self.working, DeviceSlab) else 0
        return self.device_arena.peak + slab + sum(self._on_gpu.values()) + ledgers

    def close(self) -> None:
        """Wait for transfers in flight and free the swap space. Idempotent. Raises the first pending I/O error."""
        try:
            if self.aio is not None:
                # The order of these steps matters. After this one, no transfer uses an arena or a descriptor.
                self.aio.close()
        finally:
            # The driver of the I/O used these descriptors until it ended.
            if self.swap is not None:
                self.swap.close()
            if self.files is not None:
                self.files.close()
            if self.streams is not None:
                try:
                    # Copies may still read or fill pinned memory.
                    self.streams.synchronize()
                except RuntimeError as error:  # the memory must be freed in any case
                    log.error("the device has failed before its queued work has ended: %s", error)
            # While the pages are still mapped, because CUDA finds its registration by their address.
            if self._unpin is not None:
                self._unpin()
            # References to the engine may exist for long; its memory is freed now.
            for home in self._homes:
                home.tensor = None
            for arena in self._arenas:
                arena.forget_memory()
            self.nowhere = None
