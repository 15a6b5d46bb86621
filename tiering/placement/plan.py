"""What a placement is about and what it decides: the model in groups, the budgets, and the Plan with its table.

``placement.make_plan`` turns the first two into the third. A plan knows what each tier holds and what a step moves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from tiering.config.training import format_size
from tiering.storage.arena import PAGE, round_up
from tiering.telemetry import PlannedTier, PlanStatus

if TYPE_CHECKING:
    from rich.table import Table

FP32 = 4
QUANTUM = PAGE // 2  # elements to which the ranks' shards of a group are padded: a page of the smallest dtype
CHECKSUM_SHARE = PAGE // 4  # bytes on NVMe per byte of checksums: four for each page
CHECKSUM_CHUNK = 16 << 20  # bytes of a file whose checksums are allocated together
CHECKSUM_SPARE = 5  # chunks per file: its last one, and what measuring writes beyond the file's later size


class Tier(Enum):
    """Where bytes live, fastest first."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True)
class GroupSizes:
    """What the planner knows of a ParamGroup: the whole of it, padded so that the ranks' shards are equal."""

    name: str
    param_bytes: int  # the flat tensor in the compute dtype
    trainable_numel: int  # elements of it that have gradients and optimizer state
    parent: int | None = None  # index of the group whose modules enclose this one's
    persistent: bool = False  # small parameters that never leave the device
    uses: int = 1  # unshards per forward pass
    # Parameters, gradients and what is sent of them are fp32, whatever those of other groups are.
    fp32: bool = False
    largest_trained: int = 0  # elements of its largest trainable parameter, without padding
    parts: int = 1  # times that a backward of one process brings gradients: each use of a tied parameter


@dataclass(frozen=True)
class Workload:
    """A model cut into groups, and what the configuration asks for. Sizes are bytes unless named elements.

    With more ranks than one, what a rank keeps of a group depends on the ZeRO stage: the methods that take a group say.
    """

    groups: tuple[GroupSizes, ...]
    micro_batches: int
    compute_itemsize: int
    grad_itemsize: int
    state_tensors: int  # moments per element beside the master, as exp_avg and exp_avg_sq are
    offload_param: Tier
    offload_optimizer: Tier
    cache_in_host: bool
    sub_group_numel: int
    prefetch_bytes: int
    device_is_host: bool  # training on the CPU: host memory is the device's memory
    verified_files: int = 0  # swap files whose pages have checksums in host memory
    fetch_by_copy: bool = False  # NVMe reads cannot land where compute uses them: they pass through a window
    offload_ratio: float = 1.0  # share of the optimizer state that offload_optimizer takes off the device
    update_on_device: float = 0.0  # share of it in host memory that passes through a GPU to be updated
    whole_groups: bool = False  # who steps this needs each group's state in one piece
    split: bool = False  # parameters are the upper halves of their masters; state keeps the lower ones
    moment_itemsize: int = FP32
    can_split: bool = False
    step_in_backward: bool = False
    world_size: int = 1
    stage: int = 3
    reduce_itemsize: int = 0  # of gradients as ranks send them to each other; 0: grad_itemsize

    def of(self, group: GroupSizes) -> Workload:
        """What sizes per element are for ``group``: these, or those of fp32 where it is kept in that."""
        return self._in_fp32 if group.fp32 else self

    @cached_property
    def _in_fp32(self) -> Workload:
        return replace(
            self,
            compute_itemsize=FP32,
            grad_itemsize=FP32,
            reduce_itemsize=FP32,
            split=False,
            can_split=False,
        )

    def state_bytes(self, group: GroupSizes) -> int:
        """Bytes of optimizer state that a rank keeps."""
        return self.state_numel(group) * self.of(group).state_itemsize

    def shards_params(self, group: GroupSizes) -> bool:
        """Whether a rank keeps only its shard of the parameters, and gathers the others' to compute."""
        return self.world_size > 1 and self.stage == 3 and not group.persistent

    def home_bytes(self, group: GroupSizes) -> int:
        """Bytes of parameters that a rank keeps."""
        return group.param_bytes // self.world_size if self.shards_params(group) else group.param_bytes

    def state_numel(self, group: GroupSizes) -> int:
        """Elements whose optimizer state a rank keeps."""
        return group.trainable_numel // self.world_size if self.stage >= 1 else group.trainable_numel

    def grad_numel(self, group: GroupSizes) -> int:
        """Elements whose reduced, accumulated gradients a rank keeps until it steps them."""
        return self.state_numel(group)

    @property
    def grads_stay_local(self) -> bool:
        """Whether whole gradients accumulate on the device until the last backward of a step, which reduces them."""
        return self.world_size > 1 and self.stage <= 1

    def home_grad_bytes(self, group: GroupSizes) -> int:
        """Bytes of reduced gradients that a rank keeps beside the local ones, which stage 0 reduces where they are."""
        replicated = self.world_size > 1 and self.stage == 0
        return 0 if replicated else self.grad_numel(group) * self.of(group).grad_itemsize

    @property
    def local_grad_bytes(self) -> int:
        """Device room for whole gradients that accumulate before they are reduced."""
        trained = sum(group.trainable_numel * self.of(group).grad_itemsize for group in self.groups)
        return trained if self.grads_stay_local else 0

    @property
    def sent_itemsize(self) -> int:
        """Bytes per element of gradients as ranks send them to each other."""
        return self.reduce_itemsize or self.grad_itemsize

    @property
    def collects(self) -> bool:
        """Whether gradients are collected in buffers from which they are sent: nothing else keeps whole ones."""
        return self.world_size > 1 and not self.grads_stay_local

    def reduce_buffers(self, group: GroupSizes) -> tuple[int, int]:
        """Device room to (send, receive) the gradients of ``group`` while they are reduced.

        Those that stay local are sent from where they accumulate, unless in another dtype.
        """
        if self.world_size == 1:
            return 0, 0
        sizes = self.of(group)
        nbytes = round_up(group.trainable_numel * sizes.sent_itemsize)
        in_place = self.grads_stay_local and sizes.sent_itemsize == sizes.grad_itemsize
        return 0 if in_place else nbytes, nbytes

    @property
    def gradients_beside(self) -> int:
        """The most bytes of gradients that torch holds at one time, beside all budgets, until they are taken.

        A gradient and its copy in the parameter's strides. With several ranks, a tied parameter has one of each use.
        """
        sizes = (group.largest_trained * self.of(group).compute_itemsize for group in self.groups)
        return (2 if self.world_size == 1 else 3) * max(sizes, default=0)

    def beside_budgets(self) -> str:
        """What the process needs that no budget counts, as a plan and a refusal say it."""
        gradients = (
            f", up to {format_size(self.gradients_beside)} of gradients" if self.gradients_beside else ""
        )
        return (
            f"Not counted in the budgets: activations{gradients}, and memory of Python and torch themselves"
        )

    @property
    def master_itemsize(self) -> int:
        """Bytes of optimizer state per element for the master, or for what of it the parameter is not."""
        return 0 if self.master_is_param else 2 if self.split else FP32

    @cached_property
    def state_itemsize(self) -> int:
        """Bytes of optimizer state per element."""
        return self.master_itemsize + self.state_tensors * self.moment_itemsize

    @property
    def state_format(self) -> str:
        """The format's name in the configuration."""
        halves = ("split",) * self.split + ("bf16",) * (self.moment_itemsize < FP32)
        return "+".join(halves) or "fp32"

    def other_formats(self) -> Iterator[Workload]:
        """The same with the state in each other format that it could have."""
        for split in (False, True) if self.compute_itemsize < FP32 and self.can_split else (False,):
            for moment_itemsize in (FP32, FP32 // 2):
                if (split, moment_itemsize) != (self.split, self.moment_itemsize):
                    yield replace(self, split=split, moment_itemsize=moment_itemsize)

    @property
    def compute_dtype(self) -> str:
        """Its name in the configuration. Of the dtypes of 16 bits, bf16 alone is the half of an fp32 master."""
        return "fp32" if self.compute_itemsize == FP32 else "bf16" if self.can_split else "fp16"

    @property
    def master_is_param(self) -> bool:
        """Whether the compute parameters are the fp32 master themselves."""
        return self.compute_itemsize == FP32

    @property
    def steps_need_params(self) -> bool:
        """Whether a step reads the compute parameters: they are the master, or a half of it."""
        return self.master_is_param or self.split

    @property
    def stepped_bytes(self) -> int:
        """Bytes that the CPU reads and writes to step an element."""
        params = self.compute_itemsize * (2 if self.steps_need_params else 1)
        return 2 * self.state_itemsize + self.grad_itemsize + params

    def param_traffic(self, group: GroupSizes) -> tuple[int, int]:
        """Bytes (read, written) over NVMe in a step for the parameters of ``group``, if they live there."""
        sizes = self.of(group)
        updated = self.state_numel(group) * sizes.compute_itemsize
        fetched = 2 * self.micro_batches * group.uses * self.home_bytes(group)
        return fetched + (updated if sizes.steps_need_params else 0), updated

    def grad_traffic(self, group: GroupSizes) -> int:
        """Bytes read, and as many written, over NVMe in a step for the gradients of ``group``, if they live there.

        What is stepped in backward takes the last micro-batch's gradients from the window in which they accumulate.
        """
        parts = group.parts if self.world_size == 1 else 1
        arrivals = 1 if self.grads_stay_local else self.micro_batches * parts
        written = arrivals - (1 if self.step_in_backward and group.uses == 1 else 0)
        return written * self.grad_numel(group) * self.of(group).grad_itemsize

    @property
    def computed_in_place(self) -> frozenset[Tier]:
        """The tiers whose parameters compute can use where they are."""
        return frozenset({Tier.DEVICE, Tier.HOST} if self.device_is_host else {Tier.DEVICE})

    def computes_in_place(self, group: GroupSizes, tier: Tier) -> bool:
        """Whether ``group`` needs no room beside its home on ``tier`` to compute: a shard alone never suffices."""
        return tier in self.computed_in_place and not self.shards_params(group)

    @cached_property
    def optimizer_tiers(self) -> tuple[Tier, ...]:
        """The slowest tier that the gradients and optimizer state of each group may live on.

        ``offload_ratio`` of the state leaves the device, or a little more: groups are kept whole. Those stay that come
        first in the model, as far as they fit the share: their gradients come last in backward, when the least of it is
        left to hide their way off the device.
        """
        trained = sum(group.trainable_numel for group in self.groups)
        stays = trained - math.ceil(self.offload_ratio * trained)
        tiers = []
        for group in self.groups:
            kept = 0 < group.trainable_numel <= stays
            stays -= group.trainable_numel if kept else 0
            tiers.append(Tier.DEVICE if kept else self.offload_optimizer)
        return tuple(tiers)

    @property
    def steps_copy_out(self) -> bool:
        """Whether the CPU steps parameters that the device keeps in memory of its own."""
        trained = zip(self.groups, self.optimizer_tiers, strict=True)
        stepped = any(group.trainable_numel and tier is not Tier.DEVICE for group, tier in trained)
        return stepped and not self.device_is_host


@dataclass(frozen=True)
class Budgets:
    """Bytes per tier that the engine may own. ``sources`` say where those come from that nobody has set."""

    device: int
    host: int
    nvme: int
    sources: Mapping[Tier, str] = field(default_factory=dict, compare=False, hash=False)

    def having(self, tier: Tier, nbytes: int) -> Budgets:
        """The same with another one of ``tier``, which is set then."""
        device, host, nvme = (nbytes if each is tier else self.of(each) for each in Tier)
        return Budgets(
            device, host, nvme, {each: said for each, said in self.sources.items() if each is not tier}
        )

    def told(self, tier: Tier) -> str:
        """One in words: "17.02 MiB", and where it comes from unless it was set."""
        source = self.sources.get(tier)
        return format_size(self.of(tier)) + (f" (auto: {source})" if source else "")

    def of(self, tier: Tier) -> int:
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.NVME: self.nvme}[tier]


@dataclass(frozen=True)
class SubGroup:
    """A tile of a rank's shard of a group's trainable elements, where its optimizer state lives, and who updates it.

    ``visits``: what of it is in host memory visits a GPU to be updated there.
    """

    group: int
    start: int
    end: int
    tier: Tier
    visits: bool = False

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Staging:
    """Slots of memory through which tiles pass: optimizer state | parameter | gradient, as far as needed."""

    slots: int = 0
    slot_bytes: int = 0
    param_offset: int = 0
    grad_offset: int = 0

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes


@dataclass(frozen=True)
class ReductionRoom:
    """Device room for gradients on their way between ranks, in bytes.

    ``opened``: for what groups that stay open through a backward send; ``collected``: for what others send, while it
    arrives and while it waits for its turn; ``exchanged``: for what is received, and for what is sent as another dtype.
    """

    opened: int = 0
    collected: int = 0
    exchanged: int = 0

    @property
    def nbytes(self) -> int:
        return self.opened + self.collected + self.exchanged


@dataclass(frozen=True)
class Plan:
    """The placement of each rank. Tuples follow ``workload.groups``; bytes are exact and include padding."""

    workload: Workload
    budgets: Budgets
    param_tiers: tuple[Tier, ...]
    grad_tiers: tuple[Tier, ...]
    sub_groups: tuple[SubGroup, ...]
    working_bytes: int  # device room for unsharded groups, prefetch included
    staging: Staging
    grad_window_bytes: int  # host room for gradients on their way to and from NVMe
    fetch_window_bytes: int  # host room for parameters read from NVMe that compute cannot use where they land
    offload_window_bytes: int  # host room for gradients that arrive from a device with memory of its own
    reduction: ReductionRoom = ReductionRoom()
    update_window: Staging = Staging()  # device room for tiles that visit it
    # Bytes that a step moves over NVMe, with each format of the state, within the same budgets.
    moved_by_format: Mapping[str, int] = field(default_factory=dict)
    # A host budget with which it would move nothing there, all else as it is but cache_in_host true. None if there is
    # none, or nothing moves now.
    host_without_nvme: int | None = None

    def sizes_of(self, tile: SubGroup) -> Workload:
        """What sizes per element are for the group of ``tile``."""
        return self.workload.of(self.workload.groups[tile.group])

    def tile_state_bytes(self, tile: SubGroup) -> int:
        """Bytes of optimizer state of ``tile``."""
        return tile.numel * self.sizes_of(tile).state_itemsize

    def contents(self, tier: Tier) -> dict[str, int]:
        """Bytes planned on ``tier``, by kind."""
        load, kinds = self.workload, {"parameters": 0, "gradients": 0, "optimizer state": 0}
        for group, param, grad in zip(load.groups, self.param_tiers, self.grad_tiers, strict=True):
            kinds["parameters"] += load.home_bytes(group) if param is tier else 0
            kinds["gradients"] += load.home_grad_bytes(group) if grad is tier else 0
        for tile in self.sub_groups:
            kinds["optimizer state"] += self.tile_state_bytes(tile) if tile.tier is tier else 0
        if tier is Tier.DEVICE:
            kinds["local gradients"] = load.local_grad_bytes
            kinds["gradient reduction"] = self.reduction.nbytes
            kinds["update window"] = self.update_window.nbytes
            kinds["unsharded groups"] = self.working_bytes
        if tier is Tier.HOST:
            windows = self.grad_window_bytes + self.fetch_window_bytes + self.offload_window_bytes
            kinds["staging"] = self.staging.nbytes + windows
            kinds["checksums"] = self.checksum_bytes
        return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}

    @property
    def checksum_bytes(self) -> int:
        """Host memory for the checksums of what is on NVMe: the I/O engine's, not the arena's."""
        return checksum_bytes(self.workload, self.total(Tier.NVME))

    def total(self, tier: Tier) -> int:
        """Bytes planned on ``tier``."""
        return sum(self.contents(tier).values())

    def state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state of one rank on all tiers together."""
        kinds = ("parameters", "gradients", "local gradients", "optimizer state")
        return sum(self.contents(tier).get(kind, 0) for tier in Tier for kind in kinds)

    def nvme_traffic(self) -> tuple[int, int]:
        """Bytes (read, written) over NVMe in a steady step of ``micro_batches`` forward and backward passes."""
        read, written = self.nvme_traffic_by_kind()
        return sum(read.values()), sum(written.values())

    def nvme_traffic_by_kind(self) -> tuple[Counter[str], Counter[str]]:
        """The same, each by the kinds of ``contents``."""
        load = self.workload
        read: Counter[str] = Counter()
        written: Counter[str] = Counter()
        for group, param, grad in zip(load.groups, self.param_tiers, self.grad_tiers, strict=True):
            if param is Tier.NVME:
                moved = load.param_traffic(group)
                read["parameters"] += moved[0]
                written["parameters"] += moved[1]
            if grad is Tier.NVME:
                read["gradients"] += load.grad_traffic(group)
                written["gradients"] += load.grad_traffic(group)
        state = sum(self.tile_state_bytes(tile) for tile in self.sub_groups if tile.tier is Tier.NVME)
        read["optimizer state"] = written["optimizer state"] = state
        return +read, +written

    def visited(self, tile: SubGroup) -> tuple[int, int]:
        """Bytes that the update of ``tile``, which visits the device, takes there and back over its link."""
        sizes = self.sizes_of(tile)
        state = 0 if tile.tier is Tier.DEVICE else sizes.state_itemsize
        grad = 0 if self.grad_tiers[tile.group] is Tier.DEVICE else sizes.grad_itemsize
        param = 0 if self.param_tiers[tile.group] is Tier.DEVICE else sizes.compute_itemsize
        there = state + grad + (param if sizes.steps_need_params else 0)
        return tile.numel * there, tile.numel * (state + param)

    def updated(self) -> dict[str, int]:
        """Bytes of optimizer state by where they are updated: by the CPU, in device memory, or on a visit there."""
        load, kinds = self.workload, {"by the CPU": 0, "in device memory": 0, "visiting the device": 0}
        for tile in self.sub_groups:
            kept = tile.tier is Tier.DEVICE and not load.device_is_host
            where = "in device memory" if kept else "visiting the device" if tile.visits else "by the CPU"
            kinds[where] += self.tile_state_bytes(tile)
        return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}

    def sent_bytes(self) -> dict[str, int]:
        """Bytes that a rank sends to others in a steady step, by kind: ZeRO's volumes, with padding.

        A rank sends (world_size - 1) / world_size of what is gathered or reduced, whatever the route.
        """
        load, kinds = self.workload, {"parameters": 0, "gradients": 0, "updated parameters": 0}
        others = load.world_size - 1
        reductions = 1 if load.grads_stay_local else load.micro_batches
        for group in load.groups:
            shard, sizes = group.trainable_numel // load.world_size, load.of(group)
            kinds["gradients"] += others * shard * sizes.sent_itemsize * reductions
            if load.shards_params(group):
                unshards = 2 * load.micro_batches * group.uses
                kinds["parameters"] += others * load.home_bytes(group) * unshards
            elif load.stage == 0:
                kinds["gradients"] += others * shard * sizes.grad_itemsize  # every rank steps all of them
            else:
                kinds["updated parameters"] += others * shard * sizes.compute_itemsize
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
        """The table as plain text."""
        from rich.console import Console

        console = Console(width=100, color_system=None)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get()

    def _formats(self) -> str:
        """What a step would move over NVMe with the state in each format, per parameter."""
        trained = sum(self.workload.state_numel(group) for group in self.workload.groups)
        if len(self.moved_by_format) < 2 or not trained:
            return ""
        now = self.workload.state_format
        told = [
            f"{name} {moved / trained:.1f}{' (this)' if name == now else ''}"
            for name, moved in self.moved_by_format.items()
        ]
        return f"NVMe bytes per parameter and step, by tiering.state: {', '.join(told)}"

    def _updates(self) -> str:
        """Where a GPU and the CPU update optimizer state, if both do or the GPU what is not there."""
        if self.workload.device_is_host:
            return ""
        told = [f"{format_size(nbytes)} {where}" for where, nbytes in self.updated().items()]
        return f"optimizer state is updated: {', '.join(told)}" if told else ""

    def table(self) -> Table:
        """The plan as people read it."""
        from tiering.figures_table import FiguresTable

        read, written = self.nvme_traffic()
        moved = f"read {format_size(read)}\nwrite {format_size(written)}" if read or written else "-"
        ranks = self.workload.world_size
        each = f", each of {ranks} ranks (stage {self.workload.stage})" if ranks > 1 else ""
        beside = filter(None, (self._formats(), self._updates(), self.workload.beside_budgets()))
        # 80 columns hold any plan.
        table = FiguresTable.plain(title=f"Placement plan{each}", caption="\n".join(beside))
        for heading in ("tier", "budget", "planned", "what lives there", "per step"):
            right = heading in ("budget", "planned")
            table.add_column(heading, justify="right" if right else "left", no_wrap=True)
        for tier in Tier:
            what = "\n".join(f"{kind} {format_size(nbytes)}" for kind, nbytes in self.contents(tier).items())
            table.add_row(
                tier.value,
                format_size(self.budgets.of(tier)),
                format_size(self.total(tier)),
                what or "-",
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
