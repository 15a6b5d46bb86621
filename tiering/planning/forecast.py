"""Forecast: how long a step of a plan takes at given rates, and what bounds it. Pure: a Plan and Rates in, seconds out.

A step has three phases: the forwards, the backwards and the step itself. In each of them the parts of a machine work
at the same time (device, disk, link, network, CPU), and the phase takes as long as the one that has most to do. What a
CPU that is the device does, it does one after the other. Between phases little moves: state for as many slots as there
are is read in the last backward, and as much is written in the next forward. docs/tools/planning.md derives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from tiering.errors import ConfigError
from tiering.placement.plan import GroupSizes, Plan, Tier, Workload
from tiering.planning.rates import Rates

SECONDS_PER_DAY = 86_400
HIDDEN = 0.9  # NVMe counts as hidden when all else waits for it in no more than the rest of a step


class Part(Enum):
    """What of a machine may bound a phase."""

    COMPUTE = "compute"
    NVME_READS = "NVMe reads"
    NVME_WRITES = "NVMe writes"
    OPTIMIZER = "CPU optimizer"
    HOST_MEMORY = "host memory"
    DEVICE_LINK = "device link"
    NETWORK = "network"
    CHECKSUMS = "checksums"


# Where the CPU is the device, its cores do these one after the other.
ON_CORES = (Part.COMPUTE, Part.HOST_MEMORY, Part.OPTIMIZER)
ON_DISK = (Part.NVME_READS, Part.NVME_WRITES)
ON_IO_THREAD = (*ON_DISK, Part.CHECKSUMS)  # of a rank: it submits what the disk does, and sums it if asked to


@dataclass(frozen=True)
class Phase:
    """A phase: its seconds, what bounds it, how long all else waits for NVMe, and how long each part is ``busy``."""

    name: str
    seconds: float
    bound: Part
    stalled: float
    busy: Mapping[Part, float]


@dataclass(frozen=True)
class Forecast:
    """A steady step of one rank. Bytes are a rank's; tokens, and what is told per day, are of its node's ranks."""

    forward: Phase
    backward: Phase
    step: Phase
    read: int  # bytes over NVMe in a step
    written: int
    tokens: int  # in a step
    tokens_that_hide: int  # per micro-batch and rank: the fewest with which the I/O with NVMe is hidden
    local_ranks: int

    @property
    def phases(self) -> tuple[Phase, Phase, Phase]:
        return self.forward, self.backward, self.step

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def bound(self) -> Part:
        """What bounds the longest phase."""
        return max(self.phases, key=lambda phase: phase.seconds).bound

    @property
    def efficiency(self) -> float:
        """The share of a step in which the device computes."""
        return sum(phase.busy[Part.COMPUTE] for phase in self.phases) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def written_per_day(self) -> float:
        """Bytes that the node writes to its drives, training without pause."""
        return self.written * self.local_ranks * SECONDS_PER_DAY / self.seconds

    def drive_days(self, endurance: float) -> float | None:
        """Days until ``endurance`` bytes (a drive's TBW x 10^12, of all drives together) are written; None: never."""
        return endurance / self.written_per_day if self.written else None


@dataclass
class _Work:
    """What a phase has to do beside floating-point operations, in bytes unless named elements."""

    device_bytes: float = 0.0  # of the device's memory
    nvme_read: float = 0.0
    nvme_written: float = 0.0
    copied: float = 0.0  # within host memory
    to_device: float = 0.0
    from_device: float = 0.0
    sent: float = 0.0
    gradients: float = 0.0  # elements that the CPU takes in
    stepped: float = 0.0  # elements, by the CPU
    updating: float = (
        0.0  # bytes of host memory, which are read and written to update what a GPU does not keep
    )


def forecast(
    plan: Plan,
    rates: Rates,
    *,
    tokens: int,
    local_ranks: int = 1,
    checkpointed: bool = False,
    active: float = 1.0,
    attention_flops: float = 0.0,
) -> Forecast:
    """A steady step of ``plan`` at the node's ``rates``, of ``tokens`` per micro-batch and rank.

    The device's work is 2 floating-point operations per parameter and token forward and 4 backward (2 where a parameter
    is frozen), 6 in all, and with activation checkpointing (``checkpointed``) 2 more, since backward repeats the
    forward. ``active`` is the share of the parameters that a token passes, where it does not pass all experts;
    ``attention_flops`` are those per token of a forward that no parameter takes part in.

    Raises ConfigError when a rate is missing that this plan depends on.
    """
    work = _work_of(plan)
    rank = rates.of_rank(local_ranks)
    if not plan.workload.verified_files:
        rank = replace(rank, checksum=None)
    per_token = _flops(plan, checkpointed, active, attention_flops)

    def phases(tokens: int) -> tuple[Phase, ...]:
        return tuple(
            _phase(name, work[name], per_token[name] * tokens, rank, plan.workload.device_is_host)
            for name in work
        )

    def hidden(tokens: int) -> bool:
        made = phases(tokens)
        return sum(phase.stalled for phase in made) <= (1 - HIDDEN) * sum(phase.seconds for phase in made)

    forward, backward, step = phases(tokens)
    read, written = plan.nvme_traffic()
    return Forecast(
        forward=forward,
        backward=backward,
        step=step,
        read=read,
        written=written,
        tokens=tokens * plan.workload.micro_batches * local_ranks,
        tokens_that_hide=_fewest(hidden),
        local_ranks=local_ranks,
    )


def _fewest(hidden: Callable[[int], bool]) -> int:
    """The fewest tokens that are enough: more of them take longer to compute, and stall for less."""
    if hidden(0):
        return 0
    low, high = 0, 1  # not enough, enough
    while not hidden(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if hidden(middle) else (middle, high)
    return high


def _flops(plan: Plan, checkpointed: bool, active: float, attention_flops: float) -> dict[str, float]:
    """Floating-point operations per token of a micro-batch, by phase."""
    load = plan.workload
    numel = active * sum(group.param_bytes / load.of(group).compute_itemsize for group in load.groups)
    trained = active * sum(group.trainable_numel for group in load.groups)
    forward = 2 * numel + attention_flops
    backward = 2 * numel + 2 * trained + 2 * attention_flops + (forward if checkpointed else 0)
    return {"forward": forward * load.micro_batches, "backward": backward * load.micro_batches, "step": 0.0}


def _work_of(plan: Plan) -> dict[str, _Work]:
    """What each phase has to move and to step; operations are counted apart, since they depend on tokens."""
    forward, backward, step = _Work(), _Work(), _Work()
    steps = backward if plan.workload.step_in_backward else step
    for group, param, grad in zip(plan.workload.groups, plan.param_tiers, plan.grad_tiers, strict=True):
        _fetch(plan.workload, group, param, (forward, backward))
        _take_gradients(plan.workload, group, grad, backward, steps)
    _update(plan, steps)
    _swap_state(plan, forward, backward, steps)
    sent = plan.sent_bytes()
    for phase in (forward, backward):
        phase.sent += sent.get("parameters", 0) / 2
    backward.sent += sent.get("gradients", 0)
    steps.sent += sent.get("updated parameters", 0)
    return {"forward": forward, "backward": backward, "step": step}


def _fetch(load: Workload, group: GroupSizes, tier: Tier, phases: Iterable[_Work]) -> None:
    """Parameters come to where they are used, in each of ``phases``."""
    fetched = load.micro_batches * group.uses * load.home_bytes(group)
    for phase in phases:
        phase.device_bytes += load.micro_batches * group.param_bytes
        phase.nvme_read += fetched if tier is Tier.NVME else 0
        if not load.device_is_host:
            phase.to_device += fetched if tier is not Tier.DEVICE else 0
        elif tier is Tier.NVME and load.fetch_by_copy:
            phase.copied += fetched


def _take_gradients(load: Workload, group: GroupSizes, tier: Tier, backward: _Work, steps: _Work) -> None:
    """Gradients leave autograd, add up, and go to NVMe and back, if they live there."""
    sizes = load.of(group)
    backward.device_bytes += load.micro_batches * group.trainable_numel * sizes.grad_itemsize
    if tier is Tier.NVME and (moved := load.grad_traffic(group)):
        once = load.grad_numel(group) * sizes.grad_itemsize
        backward.nvme_written += moved
        backward.nvme_read += moved - once
        steps.nvme_read += once
    if tier is Tier.DEVICE and not load.device_is_host:
        return
    arriving = load.grad_numel(group) * (1 if load.grads_stay_local else load.micro_batches)
    backward.gradients += arriving
    if not load.device_is_host:
        backward.from_device += arriving * sizes.sent_itemsize
    elif load.world_size > 1:  # whole ones are collected before ranks reduce them
        backward.gradients += load.micro_batches * group.trainable_numel


def _update(plan: Plan, steps: _Work) -> None:
    """Sub-groups are stepped by the CPU, or by a device that keeps their state or is visited by it."""
    load = plan.workload
    for tile in plan.sub_groups:
        sizes = plan.sizes_of(tile)
        there, back = plan.visited(tile) if tile.visits else (0, 0)
        steps.to_device += there
        steps.from_device += back
        steps.updating += there + back
        if tile.visits or (tile.tier is Tier.DEVICE and not load.device_is_host):
            steps.device_bytes += updated_on_device(sizes, tile.numel)
            continue
        steps.stepped += tile.numel
        steps.updating += 0 if load.device_is_host else tile.numel * sizes.stepped_bytes
        if plan.param_tiers[tile.group] is Tier.DEVICE and not load.device_is_host:
            steps.to_device += tile.numel * sizes.compute_itemsize
            steps.from_device += tile.numel * sizes.compute_itemsize if sizes.steps_need_params else 0


def updated_on_device(load: Workload, numel: int) -> int:
    """Bytes of device memory that stepping ``numel`` elements there reads and writes."""
    return numel * 2 * (load.state_itemsize + load.compute_itemsize)


def _swap_state(plan: Plan, forward: _Work, backward: _Work, steps: _Work) -> None:
    """What a step reads and writes on NVMe beside gradients; as much as slots hold of it in the phases around it."""
    load, slots = plan.workload, plan.staging
    state = sum(plan.tile_state_bytes(tile) for tile in plan.sub_groups if tile.tier is Tier.NVME)
    params = written = 0
    for group, tier in zip(load.groups, plan.param_tiers, strict=True):
        if tier is Tier.NVME:
            reads, writes = load.param_traffic(group)
            params += reads - 2 * load.micro_batches * group.uses * load.home_bytes(group)
            written += writes
    ahead = min(state, slots.slots * slots.param_offset)
    behind = min(state + written, slots.slots * slots.grad_offset)
    backward.nvme_read += ahead
    steps.nvme_read += state - ahead + params
    steps.nvme_written += state + written - behind
    forward.nvme_written += behind


def _phase(name: str, work: _Work, flops: float, rates: Rates, device_is_host: bool) -> Phase:
    """How long ``work`` and ``flops`` take."""

    def needed(amount: float, rate: str) -> float:
        value: float | None = getattr(rates, rate)
        if amount and value is None:
            raise ConfigError(
                f"the forecast of {name} needs the rate {rate!r}: give it (tiering plan --{rate.replace('_', '-')}),"
                " measure it (--measure DIR), or name a profile that has it (--profile NAME)"
            )
        return amount / value if amount and value else 0.0

    busy = dict.fromkeys(Part, 0.0)
    busy[Part.COMPUTE] = needed(flops, "flops")
    if rates.device_memory is not None and work.device_bytes:
        busy[Part.COMPUTE] = max(busy[Part.COMPUTE], work.device_bytes / rates.device_memory)
    busy[Part.HOST_MEMORY] = needed(work.copied, "host_copy") + needed(work.gradients, "gradients")
    if rates.host_memory is not None:
        busy[Part.HOST_MEMORY] = max(busy[Part.HOST_MEMORY], work.updating / rates.host_memory)
    busy[Part.OPTIMIZER] = needed(work.stepped, "optimizer")
    needed(max(work.to_device, work.from_device), "device_link")
    busy[Part.DEVICE_LINK] = link_seconds(work.to_device, work.from_device, rates)
    busy[Part.NETWORK] = needed(work.sent, "network")
    busy[Part.NVME_READS] = needed(work.nvme_read, "nvme_read")
    busy[Part.NVME_WRITES] = needed(work.nvme_written, "nvme_write")
    if rates.checksum is not None:
        busy[Part.CHECKSUMS] = (work.nvme_read + work.nvme_written) / rates.checksum
    other = max((part for part in Part if part not in ON_IO_THREAD), key=lambda part: busy[part])
    besides = max(busy[other], sum(busy[part] for part in ON_CORES) if device_is_host else 0.0)
    disk = disk_seconds(work.nvme_read, work.nvme_written, rates)
    slowest = max(ON_DISK, key=lambda part: busy[part]) if disk > busy[Part.CHECKSUMS] else Part.CHECKSUMS
    nvme = max(disk, busy[Part.CHECKSUMS])  # blocks are summed while others are on their way
    bound = slowest if nvme > besides else other
    return Phase(name, max(besides, nvme), bound, max(0.0, nvme - besides), busy)


def link_seconds(there: float, back: float, rates: Rates) -> float:
    """Of so many bytes to the device and from it: both at once as long as there are both, then what is left alone.

    Neither way slows the other if nobody knows how fast both are together.
    """
    if rates.device_link is None:
        return 0.0
    both = min(there, back)
    together = 2 * both / rates.device_link_both if rates.device_link_both is not None else 0.0
    return max(together, both / rates.device_link) + (max(there, back) - both) / rates.device_link


def disk_seconds(read: float, written: float, rates: Rates) -> float:
    """Of ``read`` and ``written`` bytes on NVMe.

    Both at once as long as there are both, then what is left alone; one after the other if nobody knows the mix.
    """
    both = min(read, written) if rates.nvme_mixed is not None else 0.0
    seconds = 2 * both / rates.nvme_mixed if rates.nvme_mixed is not None else 0.0
    if rates.nvme_read is not None:
        seconds += (read - both) / rates.nvme_read
    if rates.nvme_write is not None:
        seconds += (written - both) / rates.nvme_write
    return seconds
