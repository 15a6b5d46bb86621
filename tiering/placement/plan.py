"""The Plan: the bytes on each tier, the bytes that a step moves, and the table that shows them; and the budgets.

``placement.make_plan`` makes it of a Workload and Budgets.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from tiering.config.training import format_size
from tiering.placement.tenants import (
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    SNAPSHOTS,
    beside_budgets,
    tenants,
    with_windows,
)
from tiering.placement.workload import Tenant, Tier, Workload
from tiering.storage.arena import PAGE, round_up
from tiering.storage.versions import Kept, Versions
from tiering.telemetry import PlannedTier, PlanStatus

if TYPE_CHECKING:
    from rich.table import Table

# Bytes on NVMe per byte of checksums: 4 bytes per memory page.
CHECKSUM_SHARE = PAGE // 4
# Of what a snapshot writes: one is in the last snapshot, one is written for the next.
FLUSHED_VERSIONS = Versions.count([Kept.SNAPSHOT])
# Bytes of a file whose checksums are allocated together.
CHECKSUM_CHUNK = 16 << 20
# Chunks per file: its last one, and those that a measurement writes beyond the file's later size.
CHECKSUM_SPARE = 5


@dataclass(frozen=True)
class Budgets:
    """The maximum bytes of the engine per tier. ``sources`` describes where "auto" budgets come from."""

    device: int
    host: int
    nvme: int
    sources: Mapping[Tier, str] = field(default_factory=dict, compare=False, hash=False)

    def having(self, tier: Tier, nbytes: int) -> Budgets:
        """These budgets with ``nbytes`` on ``tier``, which then counts as set."""
        device, host, nvme = (nbytes if each is tier else self.of(each) for each in Tier)
        return Budgets(
            device, host, nvme, {each: source for each, source in self.sources.items() if each is not tier}
        )

    def text(self, tier: Tier) -> str:
        """The budget of ``tier`` as text: "17.02 MiB", and its source if it is "auto"."""
        source = self.sources.get(tier)
        return format_size(self.of(tier)) + (f" (auto: {source})" if source else "")

    def of(self, tier: Tier) -> int:
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.NVME: self.nvme}[tier]


@dataclass(frozen=True)
class SubGroup:
    """A tile: a range of a rank's shard of a group's trainable elements, and the tier of its optimizer state.

    ``visits``: its parts in host memory visit a GPU, which updates them.
    """

    group: int
    start: int
    end: int
    tier: Tier
    visits: bool = False

    @property
    def numel(self) -> int:
        return self.end - self.start


class TileRun(NamedTuple):
    """Tiles of a group behind each other, on one tier: ``step`` elements each, but for the last tile of the group.

    A large model has millions of tiles.
    """

    group: int
    start: int
    end: int
    step: int
    tier: Tier
    visits: bool = False

    @property
    def numel(self) -> int:
        return self.end - self.start

    @property
    def largest(self) -> int:
        """Elements of the largest tile."""
        return min(self.step, self.numel)

    def parted(self, numel: int) -> tuple[TileRun, TileRun | None]:
        """The fewest of its tiles that have ``numel`` elements together, or all of them; and the other tiles."""
        middle = self.start + -(-numel // self.step) * self.step
        if middle >= self.end:
            return self, None
        return self._replace(end=middle), self._replace(start=middle)

    def sizes(self) -> Iterator[tuple[int, int]]:
        """The elements of a tile, and the number of such tiles."""
        yield self.step, self.numel // self.step
        yield self.numel % self.step, 1

    def sub_groups(self) -> Iterator[SubGroup]:
        """Its tiles."""
        for start in range(self.start, self.end, self.step):
            yield SubGroup(self.group, start, min(start + self.step, self.end), self.tier, self.visits)


@dataclass(frozen=True)
class Staging:
    """Slots of memory through which tiles pass. A slot holds optimizer state | parameter | gradient, as needed."""

    slots: int = 0
    slot_bytes: int = 0
    param_offset: int = 0
    grad_offset: int = 0

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes


@dataclass(frozen=True)
class ReductionRoom:
    """Device room for the reduction of gradients between ranks, in bytes.

    ``opened``: send buffers of groups that stay open during backward; ``collected``: send buffers of other groups,
    while gradients arrive and wait for the reduction; ``exchanged``: receive buffers, and copies of what is sent.
    ``bucket``: elements of a group that are exchanged at once, at most.
    """

    opened: int = 0
    collected: int = 0
    exchanged: int = 0
    bucket: int = 0

    @property
    def nbytes(self) -> int:
        return self.opened + self.collected + self.exchanged


@dataclass
class _Sums:
    """Bytes of pieces, of swap space for them, those that are read from files of a user, the traffic of a step, and
    what a snapshot writes.
    """

    nbytes: int = 0
    swap: int = 0
    in_files: int = 0
    read: int = 0
    written: int = 0
    flushed: int = 0


@dataclass(frozen=True)
class Plan:
    """The placement of each rank. Tuples have the order of ``workload.groups``; bytes are exact and include padding."""

    workload: Workload
    budgets: Budgets
    param_tiers: tuple[Tier, ...]
    grad_tiers: tuple[Tier, ...]
    runs: tuple[TileRun, ...]
    # Device room for unsharded groups, including prefetch.
    working_bytes: int
    staging: Staging
    # Host room for parameters that are read from NVMe and copied to where compute uses them.
    fetch_window_bytes: int
    # Host room for gradients that arrive from a device with its own memory.
    offload_window_bytes: int
    reduction: ReductionRoom = ReductionRoom()
    # Device room for tiles that visit it.
    update_window: Staging = Staging()
    # Bytes that a step moves over NVMe, by format of the state, with the same budgets.
    moved_by_format: Mapping[str, int] = field(default_factory=dict)
    # A host budget with which a step moves nothing over NVMe, with cache_in_host and otherwise the same configuration.
    # None if no such budget exists, or nothing moves now.
    host_without_nvme: int | None = None
    # The tiers of the pieces of each of ``workload.others``.
    other_tiers: tuple[tuple[Tier, ...], ...] = ()

    @cached_property
    def sub_groups(self) -> tuple[SubGroup, ...]:
        """All tiles, of all ``runs``."""
        return tuple(tile for run in self.runs for tile in run.sub_groups())

    def sizes_of(self, tile: SubGroup | TileRun) -> Workload:
        """The Workload with the sizes per element of the group of ``tile``."""
        return self.workload.of(self.workload.groups[tile.group])

    def tile_state_bytes(self, tile: SubGroup | TileRun) -> int:
        """Bytes of optimizer state of ``tile``."""
        return tile.numel * self.sizes_of(tile).state_itemsize

    @cached_property
    def tenants(self) -> tuple[Tenant, ...]:
        """What lives on the tiers."""
        return tenants(self.workload)

    @cached_property
    def _sums(self) -> Mapping[tuple[str, Tier], _Sums]:
        """The sums over the pieces of each tenant, by its kind and their tier; optimizer state is in runs."""
        sums: defaultdict[tuple[str, Tier], _Sums] = defaultdict(_Sums)
        for tenant in self.tenants:
            if tenant.kind in self.tiers:
                for piece, tier, count in tenant.counted(self.tiers[tenant.kind]):
                    in_files = piece.read_in_files if tier is Tier.NVME else None
                    each = sums[tenant.kind, tier]
                    each.nbytes += count * piece.nbytes
                    each.swap += count * piece.swap_bytes
                    each.in_files += count * (0 if in_files is None else piece.nbytes)
                    each.read += count * (piece.read if in_files is None else in_files)
                    each.written += count * piece.written
                    each.flushed += count * (0 if tier is Tier.NVME else piece.flushed)
        load = self.workload
        itemsizes = load.kinds.spread([load.of(group).state_itemsize for group, _ in load.alike])
        for run in self.runs:
            each, nbytes = sums[OPTIMIZER_STATE, run.tier], run.numel * itemsizes[run.group]
            each.nbytes += nbytes
            each.swap += nbytes * Versions.count(load.kept_state)
            if load.snapshots and run.tier is not Tier.NVME:
                each.flushed += sum(
                    count * round_up(numel * itemsizes[run.group]) for numel, count in run.sizes()
                )
            each.read += nbytes
            each.written += nbytes
        return sums

    @cached_property
    def tiers(self) -> dict[str, tuple[Tier, ...]]:
        """The tiers of the pieces of each tenant whose pieces are not divided, by its kind."""
        others = zip(self.workload.others, self.other_tiers, strict=True)
        return {
            PARAMETERS: self.param_tiers,
            GRADIENTS: self.grad_tiers,
            **{tenant.kind: tiers for tenant, tiers in others},
        }

    @cached_property
    def windows(self) -> dict[str, int]:
        """Host room through which the pieces of a tenant stream to and from NVMe, by its kind."""
        return {
            tenant.kind: tenant.window_bytes(self.tiers[tenant.kind]) for tenant in with_windows(self.tenants)
        }

    def contents(self, tier: Tier) -> dict[str, int]:
        """Bytes planned on ``tier``, by kind."""
        load, kinds = self.workload, {tenant.kind: 0 for tenant in self.tenants}
        for (kind, on), sums in self._sums.items():
            if on is tier:
                kinds[kind] += sums.swap if tier is Tier.NVME else sums.nbytes
        if tier is Tier.NVME:
            kinds[SNAPSHOTS] = FLUSHED_VERSIONS * self.snapshot_bytes
        if tier is Tier.DEVICE:
            kinds["local gradients"] = load.local_grad_bytes
            kinds["gradient reduction"] = self.reduction.nbytes
            kinds["update window"] = self.update_window.nbytes
            kinds["unsharded groups"] = self.working_bytes
        if tier is Tier.HOST:
            windows = sum(self.windows.values()) + self.fetch_window_bytes + self.offload_window_bytes
            kinds["staging"] = self.staging.nbytes + windows
            kinds["checksums"] = self.checksum_bytes
        return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}

    @property
    def snapshot_bytes(self) -> int:
        """Bytes that a snapshot writes: trained state that does not live on NVMe, in whole pages."""
        return sum(sums.flushed for sums in self._sums.values())

    @property
    def in_place_bytes(self) -> int:
        """Bytes of parameters that are read from files of the user instead of swap space."""
        return sum(sums.in_files for sums in self._sums.values())

    @property
    def frozen_swap_bytes(self) -> int:
        """Bytes of swap space for groups without trained parameters."""
        return sum(
            count * self.workload.home_bytes(group)
            for group, (tier,), count in self.workload.kinds.counted(self.param_tiers)
            if tier is Tier.NVME and not group.trainable_numel and not group.in_files
        )

    @property
    def checksum_bytes(self) -> int:
        """Host memory for the checksums of data on NVMe; the I/O engine allocates it, not the arena."""
        return checksum_bytes(self.workload, self.total(Tier.NVME))

    def total(self, tier: Tier) -> int:
        """Bytes planned on ``tier``."""
        return sum(self.contents(tier).values())

    def state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state of one rank on all tiers together."""
        kinds = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE)
        placed = (sums for (kind, _), sums in self._sums.items() if kind in kinds)
        return sum(sums.nbytes for sums in placed) + self.workload.local_grad_bytes

    def nvme_traffic(self) -> tuple[int, int]:
        """Bytes (read, written) over NVMe in a steady step of ``micro_batches`` forward and backward passes."""
        read, written = self.nvme_traffic_by_kind()
        return sum(read.values()), sum(written.values())

    def nvme_traffic_by_kind(self) -> tuple[Counter[str], Counter[str]]:
        """The bytes of ``nvme_traffic`` by the kinds of ``contents``."""
        read: Counter[str] = Counter()
        written: Counter[str] = Counter()
        for (kind, tier), sums in self._sums.items():
            if tier is Tier.NVME:
                read[kind] += sums.read
                written[kind] += sums.written
        return +read, +written

    def visited(self, tile: SubGroup | TileRun) -> tuple[int, int]:
        """Bytes that the update of ``tile``, which visits the device, copies (to the device, back) over its link."""
        sizes = self.sizes_of(tile)
        state = 0 if tile.tier is Tier.DEVICE else sizes.state_itemsize
        grad = 0 if self.grad_tiers[tile.group] is Tier.DEVICE else sizes.grad_itemsize
        param = 0 if self.param_tiers[tile.group] is Tier.DEVICE else sizes.compute_itemsize
        to_device = state + grad + (param if sizes.steps_need_params else 0)
        return tile.numel * to_device, tile.numel * (state + param)

    def updated(self) -> dict[str, int]:
        """Bytes of optimizer state by the place of their update: the CPU, device memory, or a visit to the device."""
        load, kinds = self.workload, {"by the CPU": 0, "in device memory": 0, "visiting the device": 0}
        for run in self.runs:
            is_on_device = run.tier is Tier.DEVICE and not load.device_is_host
            place = (
                "in device memory" if is_on_device else "visiting the device" if run.visits else "by the CPU"
            )
            kinds[place] += self.tile_state_bytes(run)
        return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}

    def sent_bytes(self) -> dict[str, int]:
        """Bytes that a rank sends to others in a steady step, by kind: ZeRO's volumes, with padding.

        A rank sends (world_size - 1) / world_size of gathered or reduced bytes, with any algorithm.
        """
        load, kinds = self.workload, {"parameters": 0, "gradients": 0, "updated parameters": 0}
        other_ranks = load.world_size - 1
        reductions = 1 if load.grads_stay_local else load.micro_batches
        for group, count in load.alike:
            shard, sizes = count * (group.trainable_numel // load.world_size), load.of(group)
            kinds["gradients"] += other_ranks * shard * sizes.sent_itemsize * reductions
            if load.shards_params(group):
                unshards = count * load.micro_batches * group.unshards
                kinds["parameters"] += other_ranks * load.home_bytes(group) * unshards
            elif load.stage == 0:
                # Every rank updates all parameters, so gradients are also gathered.
                kinds["gradients"] += other_ranks * shard * sizes.grad_itemsize
            else:
                kinds["updated parameters"] += other_ranks * shard * sizes.compute_itemsize
        return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}

    def status(self, parameters: int) -> PlanStatus:
        """The plan for telemetry; ``parameters`` are the model's elements, without padding."""
        read, written = self.nvme_traffic_by_kind()
        return PlanStatus(
            tiers=[
                PlannedTier(tier.value, self.budgets.of(tier), self.total(tier), self.contents(tier))
                for tier in Tier
            ],
            read=dict(read),
            written=dict(written),
            sent=self.sent_bytes(),
            groups=len(self.workload.groups),
            parameters=parameters,
            micro_batches=self.workload.micro_batches,
            state_format=self.workload.state_format,
            moved_by_format=dict(self.moved_by_format),
            host_without_nvme=self.host_without_nvme,
        )

    def __str__(self) -> str:
        """The table of the plan as plain text."""
        from rich.console import Console

        console = Console(width=100, color_system=None)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get()

    def _formats(self) -> str:
        """A line with the NVMe bytes per parameter and step, for each format of the state."""
        trained = sum(self.workload.state_numel(group) for group in self.workload.groups)
        if len(self.moved_by_format) < 2 or not trained:
            return ""
        current = self.workload.state_format
        texts = [
            f"{name} {moved / trained:.1f}{' (this)' if name == current else ''}"
            for name, moved in self.moved_by_format.items()
        ]
        return f"NVMe bytes per parameter and step, by tiering.state: {', '.join(texts)}"

    def _updates(self) -> str:
        """A line with the bytes of state that the CPU and the GPU update; empty without a GPU."""
        if self.workload.device_is_host:
            return ""
        texts = [f"{format_size(nbytes)} {place}" for place, nbytes in self.updated().items()]
        return f"optimizer state is updated: {', '.join(texts)}" if texts else ""

    def staging_figures(self) -> dict[str, float | bool] | None:
        """The slots, and the ``seconds`` of NVMe transfers that they cover at ``bytes_per_second``.

        None if nothing passes through them to NVMe, or without a rate.
        """
        disk = self.workload.disk
        if disk is None or not self.staging.nbytes or not sum(self.nvme_traffic()):
            return None
        return {
            "slots": self.staging.slots,
            "slot_bytes": self.staging.slot_bytes,
            "seconds": self.staging.nbytes / disk.nbytes,
            "bytes_per_second": disk.nbytes,
            "assumed": disk.assumed,
        }

    def _staged(self) -> str:
        """A line with ``staging_figures``; empty if there are none."""
        figures = self.staging_figures()
        if figures is None:
            return ""
        source = " (assumed: tiering plan --measure DIR measures it)" if figures["assumed"] else ""
        return (
            f"staging: {self.staging.slots} slots of {format_size(self.staging.slot_bytes)} cover"
            f" {1e3 * figures['seconds']:.3g} ms of NVMe at {format_size(int(figures['bytes_per_second']))}/s{source}"
        )

    def _snapshots(self) -> str:
        """A line with the bytes of a snapshot; empty without snapshots."""
        return f"a snapshot writes {format_size(self.snapshot_bytes)}" if self.workload.snapshots else ""

    def table(self) -> Table:
        """The plan as a table."""
        from tiering._figures_table import FiguresTable

        read, written = self.nvme_traffic()
        moved = f"read {format_size(read)}\nwrite {format_size(written)}" if read or written else "-"
        ranks = self.workload.world_size
        each = f", each of {ranks} ranks (stage {self.workload.stage})" if ranks > 1 else ""
        notes = filter(
            None,
            (
                self._formats(),
                self._updates(),
                self._staged(),
                self._snapshots(),
                beside_budgets(self.workload),
            ),
        )
        # Every plan fits in 80 columns.
        table = FiguresTable.plain(title=f"Placement plan{each}", caption="\n".join(notes))
        for heading in ("tier", "budget", "planned", "what lives there", "per step"):
            right = heading in ("budget", "planned")
            table.add_column(heading, justify="right" if right else "left", no_wrap=True)
        for tier in Tier:
            listed = [f"{kind} {format_size(nbytes)}" for kind, nbytes in self.contents(tier).items()]
            if tier is Tier.NVME and self.in_place_bytes:
                listed.append(f"read in place {format_size(self.in_place_bytes)}")
            contents = "\n".join(listed)
            table.add_row(
                tier.value,
                format_size(self.budgets.of(tier)),
                format_size(self.total(tier)),
                contents or "-",
                moved if tier is Tier.NVME else "-",
            )
        if ranks > 1:
            table.add_row("network", "-", "-", "-", f"send {format_size(sum(self.sent_bytes().values()))}")
        return table


def checksum_bytes(load: Workload, on_nvme: int) -> int:
    """Host memory for the checksums of ``on_nvme`` bytes."""
    if not load.verified_files or not on_nvme:
        return 0
    chunks = on_nvme // CHECKSUM_CHUNK + load.verified_files * CHECKSUM_SPARE
    return chunks * CHECKSUM_CHUNK // CHECKSUM_SHARE
