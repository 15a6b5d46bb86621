"""Forecast: the time of a plan's step at given rates, and its bottleneck. Pure: a Plan and Rates in, seconds out.

A step has three phases: the forwards, the backwards and the update. In each phase the parts of a machine (device, disk,
link, network, CPU) work at the same time, and the slowest part determines its time. If the CPU is the device, its work
is sequential. Phases overlap little: the last backward reads state for all slots, and the next forward writes as much.
A deferred update works beside the first forward of the next step, and an update in backward beside the last backward of
its own; the other micro-batches compute alone. docs/tools/planning.md derives the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from enum import Enum

from tiering.config.step_policy import StepPolicy
from tiering.errors import ConfigError
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.plan import Plan
from tiering.placement.updates import update_of
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

    def plus(self, other: _Work, times: int = 1) -> _Work:
        """This work, and that of ``other`` so many times."""
        return _Work(*(own + times * more for own, more in zip(astuple(self), astuple(other), strict=True)))


class _Phase:
    """The work of a phase with so many micro-batches: of ``each``, and ``once``, beside the first or last of them."""

    def __init__(self, micro_batches: int) -> None:
        self.each, self.once = _Work(), _Work()
        self._micro_batches = micro_batches

    def add(self, *, once: bool = False, **amounts: float) -> None:
        """Adds work that all micro-batches share equally, or that one of them has; ``once`` has the remainder."""
        for name, amount in amounts.items():
            each, rest = (0, amount) if once else divmod(amount, self._micro_batches)
            setattr(self.each, name, getattr(self.each, name) + each)
            setattr(self.once, name, getattr(self.once, name) + rest)

    @property
    def parts(self) -> list[tuple[_Work, int]]:
        """The work of the micro-batch that has ``once``, and that of the others; and their numbers."""
        others = self._micro_batches - 1
        beside = [(self.each.plus(self.once), 1)]
        return [*beside, (_Work().plus(self.each, others), others)] if others else beside


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
    work = {name: phase.parts for name, phase in _work_of(plan, chunks).items()}
    rank = rates.of_rank(local_ranks)
    if not plan.workload.verified_files:
        rank = replace(rank, checksum=None)
    per_token = _flops(plan, checkpointed, active, attention_flops, computed)

    def phases(tokens: int) -> tuple[Phase, ...]:
        return tuple(
            _in_turn(
                [
                    _phase(name, part, per_token[name] * tokens * count, rank, plan.workload.device_is_host)
                    for part, count in parts
                ]
            )
            for name, parts in work.items()
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
    """Floating-point operations of a micro-batch per token, by phase."""
    load = plan.workload
    held = sum(group.param_bytes / load.of(group).compute_itemsize for group in load.groups)
    numel = active * (held if computed is None else computed)
    trained = active * sum(group.trainable_numel for group in load.groups)
    forward = 2 * numel + attention_flops
    backward = 2 * numel + 2 * trained + 2 * attention_flops + (forward if checkpointed else 0)
    return {"forward": forward, "backward": backward, "step": 0.0}


def _work_of(plan: Plan, chunks: int) -> dict[str, _Phase]:
    """The work of each phase; operations are counted separately, because they depend on tokens."""
    load = plan.workload
    forward, backward, step = _Phase(load.micro_batches), _Phase(load.micro_batches), _Phase(1)
    for group, param, grad in zip(load.groups, plan.param_tiers, plan.grad_tiers, strict=True):
        _fetch(load, group, param, forward, group.uses)
        _fetch(load, group, param, backward, group.unshards - group.uses)
        _take_gradients(load, group, grad, backward, chunks)
    for tenant, tiers in zip(plan.workload.others, plan.other_tiers, strict=True):
        for piece, tier in zip(tenant.pieces, tiers, strict=True):
            # As activations: forward makes them, and backward uses them.
            forward.add(nvme_written=piece.written if tier is Tier.NVME else 0)
            backward.add(nvme_read=piece.read if tier is Tier.NVME else 0)
            if plan.workload.device_is_host:
                # Backward uses the copy where it is.
                forward.add(copied=piece.copied)
            else:
                forward.add(from_device=piece.copied)
                backward.add(to_device=piece.copied)
    update = {
        StepPolicy.AFTER: step.once,
        StepPolicy.DEFERRED: forward.once,
        StepPolicy.IN_BACKWARD: backward.once,
    }
    # The phase that updates each run of tiles.
    updating = [update[update_of(plan, run)] for run in plan.runs]
    _update(plan, updating)
    _swap(plan, updating, forward=forward.once, backward=backward.once, step=step.once)
    sent = plan.sent_bytes()
    for phase in (forward, backward):
        phase.add(sent=sent.get("parameters", 0) / 2)
    backward.add(once=load.grads_stay_local, sent=sent.get("gradients", 0))
    # They are whole on every rank, and so are updated in the step.
    step.add(sent=sent.get("updated parameters", 0))
    return {"forward": forward, "backward": backward, "step": step}


def _fetch(load: Workload, group: GroupSizes, tier: Tier, phase: _Phase, uses: int) -> None:
    """Adds the transfers of a group's parameters to the device for its ``uses`` in ``phase``."""
    times = load.micro_batches * uses
    fetched = times * load.home_bytes(group)
    read = fetched if group.in_files is None else times * group.in_files.read_bytes
    phase.add(device_bytes=load.micro_batches * group.param_bytes, nvme_read=read if tier is Tier.NVME else 0)
    if not load.device_is_host:
        phase.add(to_device=fetched if tier is not Tier.DEVICE else 0)
    elif tier is Tier.NVME and load.fetch_by_copy:
        phase.add(copied=fetched)


def _take_gradients(load: Workload, group: GroupSizes, tier: Tier, backward: _Phase, chunks: int) -> None:
    """Adds the accumulation of a group's gradients, and their transfers to NVMe and back if they live there.

    The gradients of each chunk are accumulated; several ranks reduce them once per micro-batch, or once per step.
    """
    sizes, once = load.of(group), load.grads_stay_local
    backward.add(device_bytes=chunks * load.micro_batches * group.trainable_numel * sizes.grad_itemsize)
    if tier is Tier.NVME and (moved := load.grad_traffic(group)):
        # The update reads them for the last time.
        read = moved - load.grad_numel(group) * sizes.grad_itemsize
        backward.add(once=once, nvme_written=moved, nvme_read=read)
    if tier is Tier.DEVICE and not load.device_is_host:
        return
    arriving = load.grad_numel(group) * (1 if once else load.micro_batches)
    if load.world_size == 1:
        arriving *= chunks
    backward.add(once=once, gradients=arriving)
    if not load.device_is_host:
        backward.add(once=once, from_device=arriving * sizes.sent_itemsize)
    elif load.world_size > 1:
        # The CPU collects whole gradients before the ranks reduce them.
        backward.add(gradients=chunks * load.micro_batches * group.trainable_numel)


def _update(plan: Plan, updating: Sequence[_Work]) -> None:
    """Adds the updates of sub-groups by the CPU, or by a device that has their state or that they visit."""
    load = plan.workload
    for tile, steps in zip(plan.runs, updating, strict=True):
        sizes = plan.sizes_of(tile)
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


def _swap(plan: Plan, updating: Sequence[_Work], *, forward: _Work, backward: _Work, step: _Work) -> None:
    """Adds NVMe I/O of updates; as much as the slots hold overlaps the neighbouring phases."""
    load, slots = plan.workload, plan.staging
    # Bytes of state that the updates of each phase read, and bytes that they write.
    state, written = ({id(phase): 0 for phase in (forward, backward, step)} for _ in range(2))
    for run, phase in zip(plan.runs, updating, strict=True):
        sizes, group = plan.sizes_of(run), load.groups[run.group]
        of_state = plan.tile_state_bytes(run) if run.tier is Tier.NVME else 0
        param = run.numel * sizes.compute_itemsize if plan.param_tiers[run.group] is Tier.NVME else 0
        has_grad = plan.grad_tiers[run.group] is Tier.NVME and load.grad_traffic(group)
        phase.nvme_read += of_state + (param if sizes.steps_need_params else 0)
        phase.nvme_read += run.numel * sizes.grad_itemsize if has_grad else 0
        phase.nvme_written += of_state + param
        state[id(phase)] += of_state
        written[id(phase)] += of_state + param
    # Before an update that backward does not make, the last backward reads the first state into the slots.
    room = 0 if load.step is StepPolicy.IN_BACKWARD else slots.slots * slots.param_offset
    for phase in (step, forward):
        ahead = min(room, state[id(phase)])
        phase.nvme_read -= ahead
        backward.nvme_read += ahead
        room -= ahead
    # The last writes end in the next forward.
    last = step if written[id(step)] else backward
    behind = min(written[id(last)], slots.slots * slots.grad_offset)
    last.nvme_written -= behind
    forward.nvme_written += behind


def _in_turn(phases: Sequence[Phase]) -> Phase:
    """One phase of all ``phases``, one after the other."""
    if len(phases) == 1:
        return phases[0]
    return replace(
        max(phases, key=lambda phase: phase.seconds),
        seconds=sum(phase.seconds for phase in phases),
        stalled=sum(phase.stalled for phase in phases),
        busy={part: sum(phase.busy[part] for phase in phases) for part in MachinePart},
    )


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
