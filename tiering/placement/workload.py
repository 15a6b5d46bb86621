"""The Workload that the planner places: a model in groups, and the configuration. No torch.

The engine measures the groups of a model in memory; ``planning.decoder_groups`` has those of a model not in memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from tiering.config.step_policy import StepPolicy
from tiering.placement.group_sizes import GroupSizes, exchanged_at_once, sizes_of
from tiering.placement.kinds import Kinds
from tiering.storage.arena import round_up
from tiering.storage.versions import Kept, Versions

ACTIVATIONS = "activations"
FP32 = 4
ITEMSIZES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Tier(Enum):
    """A kind of memory; fastest first."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"

    # Each member exists once. Enum hashes its name, in Python, for each of the many groups that are counted by tier.
    __hash__ = object.__hash__


class DiskRate(NamedTuple):
    """Bytes per second that a rank reads and writes over NVMe together, as many of each; ``assumed``: not measured."""

    nbytes: int
    assumed: bool


@dataclass(frozen=True)
class TenantPiece:
    """The bytes of a tenant that are placed together."""

    # Bytes that a rank keeps.
    nbytes: int
    # The slowest tier on which they may live.
    tier: Tier
    # Bytes that a step reads and writes over NVMe if they live there.
    read: int = 0
    written: int = 0
    # The bytes of an expert, which ``read`` counts although a pass may not use it.
    routed: bool = False
    # They live on ``tier`` and on no faster one.
    fixed: bool = False
    # Bytes that a step copies from the device in forward, and back in backward.
    copied: int = 0
    # The bytes that a step reads instead of ``read``, in whole pages, if files of a user have the piece: then it needs
    # no swap space.
    read_in_files: int | None = None
    # Purposes for which its content is kept in swap space: each takes as much room once more.
    kept: tuple[Kept, ...] = ()
    # Bytes that are written for a snapshot if they do not live on NVMe.
    flushed: int = 0

    @property
    def swap_bytes(self) -> int:
        """Bytes of swap space that it takes on NVMe."""
        return self.nbytes * Versions.count(self.kept) if self.read_in_files is None else 0


@dataclass(frozen=True)
class Tenant:
    """A kind of bytes that live on the tiers: ``kind`` is its name in plans, stalls, counters and errors.

    Equal ``pieces`` may be one object, which is counted instead of each of them: a large model has many thousands.
    """

    kind: str
    pieces: tuple[TenantPiece, ...]
    # With ``cache_in_host`` false, its pieces that may live on NVMe do so, although host memory may have room.
    offloaded: bool = False
    # It swaps to the paths of offload_param, not to those of offload_optimizer.
    with_parameters: bool = False

    def window_bytes(self, tiers: Sequence[Tier]) -> int:
        """Host room for two of the largest pieces that stream: one is in use while another one is read or written."""
        placed = self.counted(tiers)
        streamed = (piece.nbytes for piece, tier, _ in placed if tier is Tier.NVME and not piece.fixed)
        return 2 * round_up(max(streamed, default=0))

    @cached_property
    def first_tiers(self) -> tuple[Tier, ...]:
        """The slowest tier on which each piece may live."""
        return tuple(piece.tier for piece in self.pieces)

    @cached_property
    def distinct(self) -> Mapping[int, TenantPiece]:
        """Each object of ``pieces`` once, by its id."""
        return {id(piece): piece for piece in self.pieces}

    def counted(self, tiers: Sequence[Tier]) -> Iterator[tuple[TenantPiece, Tier, int]]:
        """Each object of ``pieces`` with each of its ``tiers``, and the number of pieces that have both."""
        for (at, tier), count in Counter(zip(map(id, self.pieces), tiers, strict=True)).items():
            yield self.distinct[at], tier, count


@dataclass(frozen=True)
class Workload:
    """A model in groups, and the configuration. Sizes are bytes unless named elements.

    With several ranks, the part of a group that a rank keeps depends on the ZeRO stage; see the methods that take a
    group.
    """

    groups: tuple[GroupSizes, ...]
    micro_batches: int
    compute_itemsize: int
    grad_itemsize: int
    # Moments per element in addition to the master, such as exp_avg and exp_avg_sq.
    state_tensors: int
    offload_param: Tier
    offload_optimizer: Tier
    cache_in_host: bool
    sub_group_numel: int
    prefetch_bytes: int
    # Training on the CPU: host memory is the device's memory.
    device_is_host: bool
    # Swap files whose pages have checksums in host memory.
    verified_files: int = 0
    # NVMe reads cannot land where compute uses the data: they pass through a window.
    fetch_by_copy: bool = False
    # Fraction of the optimizer state that offload_optimizer moves off the device.
    offload_ratio: float = 1.0
    # Fraction of the optimizer state in host memory that a GPU updates.
    update_on_device: float = 0.0
    # The optimizer needs each group's state in one piece.
    whole_groups: bool = False
    # Parameters are the upper halves of their masters; the state has the lower halves.
    split: bool = False
    moment_itemsize: int = FP32
    can_split: bool = False
    step: StepPolicy = StepPolicy.AFTER
    # Versions of what a step writes, in swap space, for the steps themselves.
    versions: int = 1
    # Swap space has room for snapshots, too.
    snapshots: bool = False
    world_size: int = 1
    stage: int = 3
    # Bytes per element of gradients sent between ranks; 0: grad_itemsize.
    reduce_itemsize: int = 0
    # Elements of a group's gradients that ranks exchange at once, at most.
    reduce_bucket: int = 5 * 10**8
    # What lives on the tiers besides parameters, gradients and optimizer state.
    others: tuple[Tenant, ...] = ()
    # Seconds of transfers, at the rate of ``disk``, that staging slots cover if there is room.
    staged_seconds: float = 0.0
    # The maximum of elements in a tile that passes through a slot.
    staged_numel: int = 2 << 20
    # None: unknown, and nothing is assumed either.
    disk: DiskRate | None = None
    # Other groups of the same model, for a lack of room: each of these is a finer cut than the one before it.
    finer: tuple[tuple[GroupSizes, ...], ...] = ()

    def __hash__(self) -> int:
        # Of few values: that of many thousands of groups takes longer than what is looked up by it.
        return hash(
            (len(self.groups), len(self.finer), self.world_size, self.stage, self.state_itemsize, self.others)
        )

    @cached_property
    def cuts(self) -> tuple[Workload, ...]:
        """This workload with each of its cuts into groups, and without the others; the coarsest one first."""
        first = replace(self, finer=()) if self.finer else self
        return first, *(replace(self, groups=groups, finer=()) for groups in self.finer)

    def of(self, group: GroupSizes) -> Workload:
        """The Workload with the sizes per element of ``group``: this one, or one in fp32 if the group is fp32."""
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

    def chain(self, index: int) -> Iterator[int]:
        """The indices of a group, of the group beside it, and of those that enclose them, innermost first."""
        at: int | None = index
        while at is not None:
            yield at
            group = self.groups[at]
            if group.beside is not None:
                yield group.beside
            at = group.parent

    @cached_property
    def enclosing(self) -> frozenset[int]:
        """The indices of groups that are unsharded while groups inside of them are unsharded and resharded."""
        return self._with_those_beside(group.parent for group in self.groups)

    @cached_property
    def routing(self) -> frozenset[int]:
        """The indices of groups that enclose experts, and of those beside them."""
        return self._with_those_beside(group.parent for group in self.groups if group.routed)

    def _with_those_beside(self, indices: Iterable[int | None]) -> frozenset[int]:
        known = {at for at in indices if at is not None}
        return frozenset(known | {beside for at in known if (beside := self.groups[at].beside) is not None})

    @cached_property
    def stay_open(self) -> tuple[bool, ...]:
        """Whether each group receives gradients in a whole backward: enclosing groups and persistent parameters."""
        return tuple(group.persistent or index in self.enclosing for index, group in enumerate(self.groups))

    @cached_property
    def kinds(self) -> Kinds[GroupSizes]:
        """Groups of one kind need, move and may use the same, but have other names, and other groups around them."""
        marks = (
            (sizes_of(group), tier, at in self.enclosing, at in self.routing)
            for at, (group, tier) in enumerate(zip(self.groups, self.optimizer_tiers, strict=True))
        )
        return Kinds(self.groups, marks)

    @property
    def alike(self) -> tuple[tuple[GroupSizes, int], ...]:
        """A group of each kind, and the number of groups of that kind."""
        return self.kinds.alike

    @cached_property
    def opened(self) -> tuple[tuple[GroupSizes, int], ...]:
        """Groups that ``stay_open``, one of each size, and the number of these."""
        return _by_gradients(self._open_or_not(stays=True))

    @cached_property
    def passing(self) -> tuple[tuple[GroupSizes, int], ...]:
        """The other groups, one of each size, and the number of these."""
        return _by_gradients(self._open_or_not(stays=False))

    def _open_or_not(self, *, stays: bool) -> Iterator[tuple[GroupSizes, int]]:
        open_ = (self.stay_open[at] for at in self.kinds.firsts)
        return (each for each, is_open in zip(self.alike, open_, strict=True) if is_open is stays)

    def state_bytes(self, group: GroupSizes) -> int:
        """Bytes of optimizer state that a rank keeps."""
        return self.state_numel(group) * self.of(group).state_itemsize

    @cached_property
    def kept_state(self) -> tuple[Kept, ...]:
        """The purposes for which optimizer state is kept in swap space."""
        return (Kept.STEP,) * (self.versions > 1) + (Kept.SNAPSHOT,) * self.snapshots

    def kept_params(self, group: GroupSizes) -> tuple[Kept, ...]:
        """The purposes for which the parameters of ``group`` are kept in swap space.

        Snapshots, like checkpoints, have masters: parameters only where these are the masters, or half of them.
        """
        if not group.trainable_numel:
            return ()
        return tuple(
            each for each in self.kept_state if each is not Kept.SNAPSHOT or self.of(group).steps_need_params
        )

    def flushed_params(self, group: GroupSizes) -> int:
        """Bytes of parameters of ``group`` that a snapshot writes if they do not live on NVMe."""
        saved = Kept.SNAPSHOT in self.kept_params(group)
        return round_up(self.state_numel(group) * self.of(group).compute_itemsize) if saved else 0

    def shards_params(self, group: GroupSizes) -> bool:
        """Whether a rank keeps only its shard of the parameters, and gathers the other shards to compute."""
        return self.world_size > 1 and self.stage == 3 and not group.persistent

    def home_bytes(self, group: GroupSizes) -> int:
        """Bytes of parameters that a rank keeps."""
        return group.param_bytes // self.world_size if self.shards_params(group) else group.param_bytes

    def unsharded_bytes(self, group: GroupSizes) -> int:
        """The least device room to use the group, in pages: all of it, or one of its fused experts.

        Also for what a read from files lands in, if compute is there.
        """
        slack = group.in_files.slack if group.in_files and not self.fetch_by_copy else 0
        return round_up(group.expert_bytes or group.param_bytes) + slack

    def window_bytes(self, group: GroupSizes) -> int:
        """Host room for the parameters that a rank keeps, while they are on their way from NVMe to the device."""
        nbytes = group.expert_bytes or self.home_bytes(group)
        return nbytes + (group.in_files.slack if group.in_files else 0)

    def state_numel(self, group: GroupSizes) -> int:
        """Elements whose optimizer state a rank keeps."""
        return group.trainable_numel // self.world_size if self.stage >= 1 else group.trainable_numel

    def grad_numel(self, group: GroupSizes) -> int:
        """Elements whose reduced, accumulated gradients a rank keeps until their update."""
        return self.state_numel(group)

    @property
    def grads_stay_local(self) -> bool:
        """Whether whole gradients accumulate on the device until the last backward of a step, which reduces them."""
        return self.world_size > 1 and self.stage <= 1

    def home_grad_bytes(self, group: GroupSizes) -> int:
        """Bytes of reduced gradients that a rank keeps besides local gradients; stage 0 reduces those in place."""
        replicated = self.world_size > 1 and self.stage == 0
        return 0 if replicated else self.grad_numel(group) * self.of(group).grad_itemsize

    @cached_property
    def local_grad_bytes(self) -> int:
        """Device room for whole gradients that accumulate before their reduction."""
        trained = sum(n * group.trainable_numel * self.of(group).grad_itemsize for group, n in self.alike)
        return trained if self.grads_stay_local else 0

    @property
    def sent_itemsize(self) -> int:
        """Bytes per element of gradients sent between ranks."""
        return self.reduce_itemsize or self.grad_itemsize

    @property
    def collects(self) -> bool:
        """Whether gradients are collected in send buffers, because whole gradients are kept nowhere else."""
        return self.world_size > 1 and not self.grads_stay_local

    def collected_bytes(self, group: GroupSizes) -> int:
        """Device room for the gradients of ``group`` while they arrive and wait for their reduction."""
        return round_up(group.trainable_numel * self.of(group).sent_itemsize) if self.collects else 0

    def exchanged_bytes(self, group: GroupSizes, bucket: int, *, zeros: bool = False) -> int:
        """Device room to exchange the gradients of ``group``, ``bucket`` elements at once.

        A group in one bucket is sent from where its gradients are, unless they are sent in another dtype, or are
        ``zeros`` that this rank has nowhere.
        """
        if self.world_size == 1:
            return 0
        sizes, numel = self.of(group), exchanged_at_once(group.trainable_numel, bucket, self.world_size)
        nbytes = round_up(numel * sizes.sent_itemsize)
        is_kept = not zeros if self.collects else sizes.sent_itemsize == sizes.grad_itemsize
        return nbytes if is_kept and numel == group.trainable_numel else 2 * nbytes

    @cached_property
    def gradients_beside(self) -> int:
        """Maximum bytes of gradients that torch holds at one time, not counted in the budgets.

        A gradient and its copy in the parameter's strides; with several ranks also that of another use of a tied
        parameter.
        """
        sizes = (group.largest_trained * self.of(group).compute_itemsize for group, _ in self.alike)
        return (2 if self.world_size == 1 else 3) * max(sizes, default=0)

    @property
    def master_itemsize(self) -> int:
        """Bytes of optimizer state per element for the master, or for its half that is not the parameter."""
        return 0 if self.master_is_param else 2 if self.split else FP32

    @cached_property
    def state_itemsize(self) -> int:
        """Bytes of optimizer state per element."""
        return self.master_itemsize + self.state_tensors * self.moment_itemsize

    @property
    def state_format(self) -> str:
        """The name of the state format in the configuration."""
        halves = ("split",) * self.split + ("bf16",) * (self.moment_itemsize < FP32)
        return "+".join(halves) or "fp32"

    def other_formats(self) -> Iterator[Workload]:
        """This workload with each other possible state format."""
        for split in (False, True) if self.compute_itemsize < FP32 and self.can_split else (False,):
            for moment_itemsize in (FP32, FP32 // 2):
                if (split, moment_itemsize) != (self.split, self.moment_itemsize):
                    yield replace(self, split=split, moment_itemsize=moment_itemsize)

    @property
    def compute_dtype(self) -> str:
        """The name of the compute dtype. ``can_split`` implies bf16: fp16 is not the half of an fp32 master."""
        return "fp32" if self.compute_itemsize == FP32 else "bf16" if self.can_split else "fp16"

    @property
    def master_is_param(self) -> bool:
        """Whether the compute parameters are the fp32 master themselves."""
        return self.compute_itemsize == FP32

    @property
    def steps_need_params(self) -> bool:
        """Whether an update reads the compute parameters, because they are the master or half of it."""
        return self.master_is_param or self.split

    @property
    def staged_bytes(self) -> int:
        """Bytes that staging slots should cover."""
        return 0 if self.disk is None else round(self.staged_seconds * self.disk.nbytes)

    @property
    def stepped_bytes(self) -> int:
        """Bytes that the CPU reads and writes to update an element."""
        params = self.compute_itemsize * (2 if self.steps_need_params else 1)
        return 2 * self.state_itemsize + self.grad_itemsize + params

    def param_traffic(self, group: GroupSizes) -> tuple[int, int]:
        """Bytes (read, written) over NVMe in a step for the parameters of ``group``, if they live there."""
        sizes = self.of(group)
        updated = self.state_numel(group) * sizes.compute_itemsize
        fetched = self.micro_batches * group.unshards * self.home_bytes(group)
        return fetched + (updated if sizes.steps_need_params else 0), updated

    def grad_traffic(self, group: GroupSizes) -> int:
        """Bytes read, and as many written, over NVMe in a step for the gradients of ``group``, if they live there.

        An update in backward that cannot be taken back uses the last micro-batch's gradients in their window.
        """
        parts = group.parts if self.world_size == 1 else 1
        arrivals = 1 if self.grads_stay_local else self.micro_batches * parts
        uses_window = self.is_irrevocable and group.uses == 1
        written = arrivals - (1 if uses_window else 0)
        return written * self.grad_numel(group) * self.of(group).grad_itemsize

    def computes_in_place(self, group: GroupSizes, tier: Tier) -> bool:
        """Whether ``group`` can compute from its home on ``tier`` without further room; never if it is sharded."""
        in_reach = tier is Tier.DEVICE or (tier is Tier.HOST and self.device_is_host)
        return in_reach and not self.shards_params(group)

    @property
    def is_irrevocable(self) -> bool:
        """Whether a step that is made in backward cannot be taken back."""
        return self.step is StepPolicy.IN_BACKWARD and self.versions == 1

    @cached_property
    def optimizer_tiers(self) -> tuple[Tier, ...]:
        """The slowest tier allowed for the gradients and optimizer state of each group.

        ``offload_ratio`` of the state leaves the device, or slightly more, because groups are not divided. The first
        groups of the model stay: their gradients come last in backward, when little compute is left to hide an offload.
        """
        trained = sum(group.trainable_numel for group in self.groups)
        stays = trained - math.ceil(self.offload_ratio * trained)
        tiers = []
        for group in self.groups:
            stays_on_device = 0 < group.trainable_numel <= stays
            stays -= group.trainable_numel if stays_on_device else 0
            tiers.append(Tier.DEVICE if stays_on_device else self.offload_optimizer)
        return tuple(tiers)

    @property
    def steps_copy_out(self) -> bool:
        """Whether the CPU updates parameters that a device keeps in its own memory."""
        trained = ((self.groups[at], self.optimizer_tiers[at]) for at in self.kinds.firsts)
        stepped = any(group.trainable_numel and tier is not Tier.DEVICE for group, tier in trained)
        return stepped and not self.device_is_host


def _by_gradients(groups: Iterable[tuple[GroupSizes, int]]) -> tuple[tuple[GroupSizes, int], ...]:
    """One of the counted ``groups`` for each size of gradients, with the number of groups of that size."""
    firsts: dict[tuple[int, bool], GroupSizes] = {}
    counts: Counter[tuple[int, bool]] = Counter()
    for group, count in groups:
        size = group.trainable_numel, group.fp32
        firsts.setdefault(size, group)
        counts[size] += count
    return tuple((group, counts[size]) for size, group in firsts.items())
