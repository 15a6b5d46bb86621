"""Forecast: the time of a plan's step at given rates, and its bottleneck. Pure: a Plan and Rates in, seconds out.

A step has three phases: the forwards, the backwards and the update. In each phase the parts of a machine (device, disk,
link, network, CPU) work at the same time, and the slowest part determines its time. If the CPU is the device, its work
is sequential. Phases overlap little: the last backward reads state for all slots, and the next forward writes as much.
docs/tools/planning.md derives the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tiering.errors import ConfigError
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.plan import Plan
from tiering.placement.workload import Tier, Workload
from tiering.planning.rates import Rates

SECONDS_PER_DAY = 86_400
# NVMe I/O counts as hidden if the other parts wait for it during at most the rest of a step.
HIDDEN = 0.9


class MachinePart(Enum):
    """A part of the machine that may bound a phase."""

    COMPUTE = "compute"
    NVME_READS = "NVMe reads"
    NVME_WRITES = "NVMe writes"
    OPTIMIZER = "CPU optimizer"
    HOST_MEMORY = "host memory"
    DEVICE_LINK = "device link"
    NETWORK = "network"
    CHECKSUMS = "checksums"


# If the CPU is the device, its cores do these one after the other.
ON_CORES = (MachinePart.COMPUTE, MachinePart.HOST_MEMORY, MachinePart.OPTIMIZER, MachinePart.CHECKSUMS)
ON_DISK = (MachinePart.NVME_READS, MachinePart.NVME_WRITES)


@dataclass(frozen=True)
class Phase:
    """A phase of a step. Times are seconds.

    ``bound`` is the slowest part, ``stalled`` the time in which other parts wait for NVMe, ``busy`` the time by part.
    """

    name: str
    seconds: float
    bound: MachinePart
    stalled: float
    busy: Mapping[MachinePart, float]


@dataclass(frozen=True)
class Forecast:
    """A steady step of one rank. Bytes are those of a rank; tokens, and figures per day, those of its node.

    ``read`` and ``written`` are bytes over NVMe per step. ``tokens`` are per step. ``tokens_that_hide`` is the minimum
    of tokens per micro-batch and rank with which NVMe I/O is hidden.
    """

    forward: Phase
    backward: Phase
    step: Phase
    read: int
    written: int
    tokens: int
    tokens_that_hide: int
    local_ranks: int

    @property
    def phases(self) -> tuple[Phase, Phase, Phase]:
        return self.forward, self.backward, self.step

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def bound(self) -> MachinePart:
        """The slowest part of the longest phase."""
        return max(self.phases, key=lambda phase: phase.seconds).bound

    @property
    def efficiency(self) -> float:
        """The fraction of a step in which the device computes."""
        return sum(phase.busy[MachinePart.COMPUTE] for phase in self.phases) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def written_per_day(self) -> float:
        """Bytes per day that the node writes to its drives, training without pause."""
        return self.written * self.local_ranks * SECONDS_PER_DAY / self.seconds

    def drive_days(self, endurance: float) -> float | None:
        """Days until ``endurance`` bytes (TBW x 10^12, of all drives together) are written; None without writes."""
        return endurance / self.written_per_day if self.written else None


@dataclass
class _Work:
    """The work of a phase except floating-point operations, in bytes unless a comment says elements."""

    # Read and written in the device's memory.
    device_bytes: float = 0.0
    nvme_read: float = 0.0
    nvme_written: float = 0.0
    # Copied within host memory.
    copied: float = 0.0
    to_device: float = 0.0
    from_device: float = 0.0
    sent: float = 0.0
    # Elements of gradients that the CPU accumulates.
    gradients: float = 0.0
    # Elements that the CPU updates.
    stepped: float = 0.0
    # Read and written in host memory to update state that is not in a GPU's memory.
    updating: float = 0.0


def forecast(
    plan: Plan,
    rates: Rates,
    *,
    tokens: int,
    local_ranks: int = 1,
    checkpointed: bool = False,
    chunks: int = 1,
    active: float = 1.0,
    attention_flops: float = 0.0,
    computed: int | None = None,
) -> Forecast:
    """A steady step of ``plan`` at the node's ``rates``, with ``tokens`` per micro-batch and rank.

    The device needs 2 floating-point operations per parameter and token in forward and 4 in backward (2 for a frozen
    parameter), 6 in total; activation checkpointing (``checkpointed``) adds 2, because backward repeats the forward.
    Each block computes a micro-batch in so many ``chunks`` of rows, while its parameters are on the device once.
    ``active`` is the fraction of the parameters that a token uses, below 1 for a mixture of experts.
    ``attention_flops`` are the operations per token of a forward that use no parameter. ``computed`` is the number of
    parameters, if the frozen ones are stored in another format than that in which they compute.

    Raises ConfigError if a rate is missing that this plan needs.
    """
    work = _work_of(plan, chunks)
    rank = rates.of_rank(local_ranks)
    if not plan.workload.verified_files:
        rank = replace(rank, checksum=None)
    per_token = _flops(plan, checkpointed, active, attention_flops, computed)

    def phases(tokens: int) -> tuple[Phase, ...]:
        return tuple(
            _phase(name, work[name], per_token[name] * tokens, rank, plan.workload.device_is_host)
            for name in work
        )

    def hidden(tokens: int) -> bool:
        phases_now = phases(tokens)
        return sum(phase.stalled for phase in phases_now) <= (1 - HIDDEN) * sum(
            phase.seconds for phase in phases_now
        )

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
    """The minimum of tokens with ``hidden(tokens)``: more tokens take longer to compute and stall less."""
    if hidden(0):
        return 0
    # `low` is not enough; `high` is enough after the first loop.
    low, high = 0, 1
    while not hidden(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if hidden(middle) else (middle, high)
    return high


def _flops(
    plan: Plan, checkpointed: bool, active: float, attention_flops: float, computed: int | None
) -> dict[str, float]:
    """Floating-point operations per token of a micro-batch, by phase."""
    load = plan.workload
    held = sum(group.param_bytes / load.of(group).compute_itemsize for group in load.groups)
    numel = active * (held if computed is None else computed)
    trained = active * sum(group.trainable_numel for group in load.groups)
    forward = 2 * numel + attention_flops
    backward = 2 * numel + 2 * trained + 2 * attention_flops + (forward if checkpointed else 0)
    return {"forward": forward * load.micro_batches, "backward": backward * load.micro_batches, "step": 0.0}


def _work_of(plan: Plan, chunks: int) -> dict[str, _Work]:
    """The work of each phase; operations are counted separately, because they depend on tokens."""
    forward, backward, step = _Work(), _Work(), _Work()
    load = plan.workload
    # The phase in which each group is updated. What stays on the device is not deferred.
    updating = [backward if load.step_in_backward else step] * len(load.groups)
    for index, (group, param, grad) in enumerate(
        zip(load.groups, plan.param_tiers, plan.grad_tiers, strict=True)
    ):
        if load.step_deferred and not load.computes_in_place(group, param):
            updating[index] = forward
        _fetch(load, group, param, forward, group.uses)
        _fetch(load, group, param, backward, group.unshards - group.uses)
        _take_gradients(load, group, grad, backward, updating[index], chunks)
    for tenant, tiers in zip(plan.workload.others, plan.other_tiers, strict=True):
        for piece, tier in zip(tenant.pieces, tiers, strict=True):
            # As activations: forward makes them, and backward uses them.
            forward.nvme_written += piece.written if tier is Tier.NVME else 0
            backward.nvme_read += piece.read if tier is Tier.NVME else 0
            if plan.workload.device_is_host:
                # Backward uses the copy where it is.
                forward.copied += piece.copied
            else:
                forward.from_device += piece.copied
                backward.to_device += piece.copied
    _update(plan, updating)
    _swap_state(plan, forward, backward, updating)
    sent = plan.sent_bytes()
    for phase in (forward, backward):
        phase.sent += sent.get("parameters", 0) / 2
    backward.sent += sent.get("gradients", 0)
    # They are whole on every rank, and so are not deferred.
    (backward if load.step_in_backward else step).sent += sent.get("updated parameters", 0)
    return {"forward": forward, "backward": backward, "step": step}


def _fetch(load: Workload, group: GroupSizes, tier: Tier, phase: _Work, uses: int) -> None:
    """Adds the transfers of a group's parameters to the device for its ``uses`` in ``phase``."""
    times = load.micro_batches * uses
    fetched = times * load.home_bytes(group)
    read = fetched if group.in_files is None else times * group.in_files.read_bytes
    phase.device_bytes += load.micro_batches * group.param_bytes
    phase.nvme_read += read if tier is Tier.NVME else 0
    if not load.device_is_host:
        phase.to_device += fetched if tier is not Tier.DEVICE else 0
    elif tier is Tier.NVME and load.fetch_by_copy:
        phase.copied += fetched


def _take_gradients(
    load: Workload, group: GroupSizes, tier: Tier, backward: _Work, steps: _Work, chunks: int
) -> None:
    """Adds the accumulation of a group's gradients, and their transfers to NVMe and back if they live there.

    The gradients of each chunk are accumulated; several ranks reduce them once per micro-batch.
    """
    sizes = load.of(group)
    backward.device_bytes += chunks * load.micro_batches * group.trainable_numel * sizes.grad_itemsize
    if tier is Tier.NVME and (moved := load.grad_traffic(group)):
        once = load.grad_numel(group) * sizes.grad_itemsize
        backward.nvme_written += moved
        backward.nvme_read += moved - once
        steps.nvme_read += once
    if tier is Tier.DEVICE and not load.device_is_host:
        return
    arriving = load.grad_numel(group) * (1 if load.grads_stay_local else load.micro_batches)
    if load.world_size == 1:
        arriving *= chunks
    backward.gradients += arriving
    if not load.device_is_host:
        backward.from_device += arriving * sizes.sent_itemsize
    elif load.world_size > 1:
        # The CPU collects whole gradients before the ranks reduce them.
        backward.gradients += chunks * load.micro_batches * group.trainable_numel


def _update(plan: Plan, updating: Sequence[_Work]) -> None:
    """Adds the updates of sub-groups by the CPU, or by a device that has their state or that they visit."""
    load = plan.workload
    for tile in plan.runs:
        sizes, steps = plan.sizes_of(tile), updating[tile.group]
        to_device, from_device = plan.visited(tile) if tile.visits else (0, 0)
        steps.to_device += to_device
        steps.from_device += from_device
        steps.updating += to_device + from_device
        if tile.visits or (tile.tier is Tier.DEVICE and not load.device_is_host):
            steps.device_bytes += updated_on_device(sizes, tile.numel)
            continue
        steps.stepped += tile.numel
        steps.updating += 0 if load.device_is_host else tile.numel * sizes.stepped_bytes
        if plan.param_tiers[tile.group] is Tier.DEVICE and not load.device_is_host:
            steps.to_device += tile.numel * sizes.compute_itemsize
            steps.from_device += tile.numel * sizes.compute_itemsize if sizes.steps_need_params else 0


def updated_on_device(load: Workload, numel: int) -> int:
    """Bytes of device memory that an update of ``numel`` elements there reads and writes."""
    return numel * 2 * (load.state_itemsize + load.compute_itemsize)


def _swap_state(plan: Plan, forward: _Work, backward: _Work, updating: Sequence[_Work]) -> None:
    """Adds NVMe I/O of state and updated parameters; as much as the slots hold overlaps the neighbouring phases."""
    load, slots = plan.workload, plan.staging
    state = written = 0
    # Those of updates that are not in forward itself.
    apart, state_apart, written_apart = backward, 0, 0
    for tile in plan.runs:
        if tile.tier is Tier.NVME:
            nbytes, phase = plan.tile_state_bytes(tile), updating[tile.group]
            phase.nvme_read += nbytes
            phase.nvme_written += nbytes
            state, written = state + nbytes, written + nbytes
            if phase is not forward:
                apart, state_apart, written_apart = phase, state_apart + nbytes, written_apart + nbytes
    for group, tier, phase in zip(load.groups, plan.param_tiers, updating, strict=True):
        if tier is Tier.NVME:
            reads, writes = load.param_traffic(group)
            phase.nvme_read += reads - load.micro_batches * group.unshards * load.home_bytes(group)
            phase.nvme_written += writes
            written += writes
            if phase is not forward:
                apart, written_apart = phase, written_apart + writes
    # Backward reads the first state into the slots, and the last writes end in forward.
    ahead = min(state, slots.slots * slots.param_offset)
    behind = max(0, min(written, slots.slots * slots.grad_offset) - (written - written_apart))
    apart.nvme_read -= min(ahead, state_apart)
    forward.nvme_read -= max(0, ahead - state_apart)
    backward.nvme_read += ahead
    apart.nvme_written -= behind
    forward.nvme_written += behind


def _phase(name: str, work: _Work, flops: float, rates: Rates, device_is_host: bool) -> Phase:
    """The phase ``name`` with the time of ``work`` and ``flops``."""

    def needed(amount: float, rate: str) -> float:
        value: float | None = getattr(rates, rate)
        if amount and value is None:
            raise ConfigError(
                f"the forecast of {name} needs the rate {rate!r}: set it (tiering plan --{rate.replace('_', '-')}),"
                " measure it (--measure DIR), or name a profile that has it (--profile NAME)"
            )
        return amount / value if amount and value else 0.0

    busy = dict.fromkeys(MachinePart, 0.0)
    busy[MachinePart.COMPUTE] = needed(flops, "flops")
    if rates.device_memory is not None and work.device_bytes:
        busy[MachinePart.COMPUTE] = max(busy[MachinePart.COMPUTE], work.device_bytes / rates.device_memory)
    busy[MachinePart.HOST_MEMORY] = needed(work.copied, "host_copy") + needed(work.gradients, "gradients")
    if rates.host_memory is not None:
        busy[MachinePart.HOST_MEMORY] = max(busy[MachinePart.HOST_MEMORY], work.updating / rates.host_memory)
    busy[MachinePart.OPTIMIZER] = needed(work.stepped, "optimizer")
    needed(max(work.to_device, work.from_device), "device_link")
    busy[MachinePart.DEVICE_LINK] = link_seconds(work.to_device, work.from_device, rates)
    busy[MachinePart.NETWORK] = needed(work.sent, "network")
    busy[MachinePart.NVME_READS] = needed(work.nvme_read, "nvme_read")
    busy[MachinePart.NVME_WRITES] = needed(work.nvme_written, "nvme_write")
    if rates.checksum is not None:
        busy[MachinePart.CHECKSUMS] = (work.nvme_read + work.nvme_written) / rates.checksum
    other = max((part for part in MachinePart if part not in ON_DISK), key=lambda part: busy[part])
    besides = max(busy[other], sum(busy[part] for part in ON_CORES) if device_is_host else 0.0)
    disk = disk_seconds(work.nvme_read, work.nvme_written, rates)
    bound = max(ON_DISK, key=lambda part: busy[part]) if disk > besides else other
    return Phase(name, max(besides, disk), bound, max(0.0, disk - besides), busy)


def link_seconds(to_device: float, from_device: float, rates: Rates) -> float:
    """Seconds to copy ``to_device`` bytes to the device and ``from_device`` bytes from it.

    Both directions run at the same time until one is finished; then the rest of the other runs alone. Without the rate
    of both together, the directions do not slow each other.
    """
    if rates.device_link is None:
        return 0.0
    overlap = min(to_device, from_device)
    together = 2 * overlap / rates.device_link_both if rates.device_link_both is not None else 0.0
    return (
        max(together, overlap / rates.device_link)
        + (max(to_device, from_device) - overlap) / rates.device_link
    )


def disk_seconds(read: float, written: float, rates: Rates) -> float:
    """Seconds to read ``read`` and write ``written`` bytes on NVMe.

    Reads and writes run at the same time until one is finished; then the rest of the other runs alone. Without the
    mixed rate they run one after the other.
    """
    overlap = min(read, written) if rates.nvme_mixed is not None else 0.0
    seconds = 2 * overlap / rates.nvme_mixed if rates.nvme_mixed is not None else 0.0
    if rates.nvme_read is not None:
        seconds += (read - overlap) / rates.nvme_read
    if rates.nvme_write is not None:
        seconds += (written - overlap) / rates.nvme_write
    return seconds
