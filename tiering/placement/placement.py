"""Placement: assigns parameters, gradients and optimizer state to tiers, once, before the first step.

Pure: sizes and budgets in, a Plan out. Access is cyclic, so a fixed resident set is as good as any eviction policy;
only its choice matters. A byte kept in host memory saves, per step, the NVMe bytes that it would move: a trained 16-bit
parameter about 2 x micro-batches + 1, a gradient and a frozen parameter 2 x micro-batches, optimizer state 2. So the
host budget is filled in that order; at equal traffic, what is written comes first (host_filling.py). The remaining
bytes stream through fixed windows, which are planned first, because nothing can move without them.

Budgets are ceilings. A model that cannot fit is refused, with the numbers and the remedy.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from tiering.config.fields import format_need
from tiering.config.training import format_size
from tiering.errors import PlacementError
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.host_filling import Filled, HostFilling
from tiering.placement.plan import FLUSHED_VERSIONS, Budgets, Plan, Staging, TileRun, checksum_bytes
from tiering.placement.reduction import least_reduction, reduction_within
from tiering.placement.slots import USUAL_SLOTS, SlotRoom, growth, has_to_visit, slot_room, slots_of_sizes
from tiering.placement.tenants import GRADIENTS, PARAMETERS, beside_budgets, tenants, with_windows
from tiering.placement.workload import ACTIVATIONS, Tenant, Tier, Workload
from tiering.storage.arena import PAGE, round_up
from tiering.storage.versions import Versions

# Bytes: more than any budget that is needed.
AMPLE = 1 << 60
# One slot copies to the device; one is updated and copied back.
FEWEST_VISITS = 2


class BudgetError(PlacementError):
    """The budget of ``tier`` is too small: what is planned so far needs ``nbytes``."""

    def __init__(self, message: str, tier: Tier, nbytes: int) -> None:
        super().__init__(message)
        self.tier, self.nbytes = tier, nbytes


def make_plan(load: Workload, budgets: Budgets) -> Plan:
    """Places ``load`` within ``budgets``, in its coarsest cut that fits. PlacementError, with numbers, if none fits."""
    try:
        plan = place(load, budgets)
    except PlacementError as error:
        raise PlacementError(f"{error.message}. {beside_budgets(load)}") from None
    load = plan.workload
    moved = {load.state_format: sum(plan.nvme_traffic())}
    host_without_nvme = None
    if moved[load.state_format]:
        with contextlib.suppress(PlacementError):
            host_without_nvme = _host_without_nvme(load, budgets)
        for other in load.other_formats():
            with contextlib.suppress(PlacementError):
                moved[other.state_format] = sum(place(other, budgets).nvme_traffic())
    return replace(plan, moved_by_format=moved, host_without_nvme=host_without_nvme)


def _host_without_nvme(load: Workload, budgets: Budgets) -> int | None:
    """A host budget with which a step moves nothing over NVMe; None if no such budget exists."""
    load = replace(load, cache_in_host=True)
    ample = place(load, replace(budgets, host=AMPLE))
    if sum(ample.nvme_traffic()):
        return None
    # A lower budget than now may have no plan: windows and checksums need room before the streams are known.
    need = max(ample.total(Tier.HOST), budgets.host)
    while sum((plan := place(load, replace(budgets, host=need))).nvme_traffic()):
        need += plan.total(Tier.NVME) + plan.in_place_bytes
    return need


def place(load: Workload, budgets: Budgets) -> Plan:
    """Like ``make_plan``, without the figures for other state formats and for another budget."""
    *coarser, finest = load.cuts
    for cut in coarser:
        with contextlib.suppress(PlacementError):
            return _place_cut(cut, budgets)
    return _place_cut(finest, budgets)


def _place_cut(load: Workload, budgets: Budgets) -> Plan:
    """Places ``load``, with the usual slots where it does not fit with larger ones."""
    try:
        return _place(load, budgets)
    except BudgetError:
        if not load.staged_bytes:
            raise
    return replace(_place(replace(load, disk=None), budgets), workload=load)


def _room(budgets: Budgets, tier: Tier, other: str = "") -> str:
    """The remedy for a budget that is too small. An auto budget of NVMe cannot be raised: it is the free space."""
    if tier is Tier.NVME and tier in budgets.sources:
        return "free disk space, or set nvme_path to another directory or to several"
    return f"raise {tier.value}_budget" + (f", or {other}" if other else "")


def _place(load: Workload, budgets: Budgets) -> Plan:
    fixed, everything = _mandatory(load, budgets), tenants(load)
    tiers = {tenant.kind: [*tenant.first_tiers] for tenant in everything}
    param_tiers, grad_tiers = tiers[PARAMETERS], tiers[GRADIENTS]
    for index in _keep_what_cannot_move(load, fixed) if load.cache_in_host else ():
        param_tiers[index] = Tier.HOST

    # Two windows, so that a wait for one does not depend on leases of the other.
    largest = max((load.window_bytes(group) for group, _ in load.alike), default=0)
    fetch_window = 2 * largest if load.fetch_by_copy and Tier.NVME in param_tiers else 0
    offload_window = 2 * _largest_arrival(load) if load.steps_copy_out else 0
    fixed.add(Tier.HOST, fetch_window + offload_window, "copies to and from the device")

    def fill(slots: SlotRoom | None) -> Filled | None:
        return HostFilling(load, everything, tiers, fixed.remaining(Tier.HOST), slots).run()

    # Some bytes are on NVMe in any case.
    least_checksums = checksum_bytes(load, _bytes_on_nvme(everything, tiers, only_fixed=True))
    fixed.add(Tier.HOST, least_checksums, "checksums")
    # If the device has its own memory, updated parameters reach it through a slot.
    filled = None if load.steps_copy_out else fill(None)
    if filled is None:
        # Checksums for all bytes that may go to NVMe: an upper bound, since bytes kept in host memory need none.
        most_checksums = checksum_bytes(load, _bytes_on_nvme(everything, tiers))
        fixed.add(Tier.HOST, most_checksums - least_checksums, "checksums")
        windows = {
            tenant.kind: tenant.window_bytes(tiers[tenant.kind]) for tenant in with_windows(everything)
        }
        room = fixed.remaining(Tier.HOST) - sum(windows.values())
        slots = slot_room(load, room, growth(load, room, everything), param_tiers, grad_tiers)
        fixed.add(Tier.HOST, slots.staging(param_tiers, grad_tiers).nbytes, "staging")
        for kind, nbytes in windows.items():
            fixed.add(Tier.HOST, nbytes, f"{kind} on their way to NVMe")
        fixed.check()
        filled = fill(slots)
    assert filled is not None
    chains = _chains(load, filled.tiers[PARAMETERS])
    least_working = max(chains, default=0)
    runs, update_window = _visits(load, filled, fixed.remaining(Tier.DEVICE) - least_working)
    fixed.add(Tier.DEVICE, update_window.nbytes, "update window")
    working = _working_set(load, filled.tiers[PARAMETERS], chains, fixed)
    least = least_reduction(load).nbytes
    room = fixed.remaining(Tier.DEVICE) + least
    reduction = reduction_within(load, room - working, room - least_working)
    working = min(working, (room - reduction.nbytes) // PAGE * PAGE)
    spare = room - working - reduction.nbytes
    plan = Plan(
        workload=load,
        budgets=budgets,
        param_tiers=tuple(filled.tiers[PARAMETERS]),
        grad_tiers=tuple(_stay_to_be_used(load, runs, filled.tiers[GRADIENTS], spare)),
        runs=tuple(runs),
        working_bytes=working,
        staging=filled.staging,
        fetch_window_bytes=fetch_window,
        offload_window_bytes=offload_window,
        reduction=reduction,
        update_window=update_window,
        other_tiers=tuple(tuple(filled.tiers[tenant.kind]) for tenant in load.others),
    )
    for tier in Tier:
        if plan.total(tier) > budgets.of(tier):
            raise BudgetError(
                f"{tier.value} needs {format_need(plan.total(tier))} but its budget is"
                f" {budgets.text(tier)}: {_listed(plan.contents(tier))}; {_room(budgets, tier)}",
                tier,
                plan.total(tier),
            )
    return plan


def _mandatory(load: Workload, budgets: Budgets) -> _Room:
    """The room left after the bytes that no slower tier may have."""
    fixed = _Room(load, budgets)
    fixed.check()
    swapped, room = _swappable_bytes(load), fixed.remaining(Tier.HOST)
    # At most, because not all of it has several versions.
    needed = sum(swapped.values()) - room * Versions.count(load.kept_state)
    if needed > budgets.nvme:
        raise BudgetError(
            f"nvme needs at least {format_need(needed)} but its budget is {budgets.text(Tier.NVME)}"
            f" ({_listed(swapped)}, of which host memory has room for {format_size(room)});"
            f" {_room(budgets, Tier.NVME)}",
            Tier.NVME,
            needed,
        )
    return fixed


@lru_cache(maxsize=8)
def _swappable_bytes(load: Workload) -> dict[str, int]:
    """Bytes of swap space of all that may live on NVMe, by kind."""
    kinds = {
        tenant.kind: sum(
            count * piece.swap_bytes
            for piece, tier, count in tenant.counted(tenant.first_tiers)
            if tier is Tier.NVME
        )
        for tenant in tenants(load)
    }
    return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}


@lru_cache(maxsize=8)
def _mandatory_bytes(load: Workload) -> Mapping[Tier, Mapping[str, int]]:
    """Bytes that no slower tier may have, by tier and kind."""
    fixed: dict[Tier, Counter[str]] = {tier: Counter() for tier in Tier}
    for tenant in tenants(load):
        for piece, tier, count in tenant.counted(tenant.first_tiers):
            if tier is not Tier.NVME:
                fixed[tier][tenant.kind] += count * piece.nbytes
    fixed[Tier.DEVICE]["local gradients"] += load.local_grad_bytes
    fixed[Tier.DEVICE]["gradient reduction"] += least_reduction(load).nbytes
    return {tier: +kinds for tier, kinds in fixed.items()}


def _largest_arrival(load: Workload) -> int:
    """Bytes of the largest group's gradients as they leave a device with its own memory."""

    def sent(group: GroupSizes) -> int:
        sizes = load.of(group)
        if load.world_size == 1:
            return group.trainable_numel * sizes.compute_itemsize
        return load.grad_numel(group) * max(sizes.sent_itemsize, sizes.grad_itemsize)

    return max((sent(group) for group, _ in load.alike), default=0)


def _keep_what_cannot_move(load: Workload, fixed: _Room) -> list[int]:
    """Makes room on the device for each group and the groups around it, if some of them can compute in host memory.

    This is decided first, because whether a plan exists must not depend on other uses of the budget. Returns the
    indices of the groups that are kept in host memory.
    """
    (pieces,) = (tenant.pieces for tenant in tenants(load) if tenant.kind == PARAMETERS)
    param_tiers, kept = [piece.tier for piece in pieces], list[int]()
    room = fixed.remaining(Tier.DEVICE)
    too_large = [index for index, nbytes in enumerate(_chains(load, param_tiers)) if nbytes > room]
    for index in too_large:
        excess = _chain_bytes(load, index, param_tiers) - room
        movable = [
            at
            for at in load.chain(index)
            if param_tiers[at] is Tier.NVME and load.computes_in_place(load.groups[at], Tier.HOST)
        ]
        # As few bytes as possible.
        choices = itertools.chain.from_iterable(
            itertools.combinations(movable, count) for count in range(1, len(movable) + 1)
        )
        for choice in sorted(choices, key=lambda choice: _bytes_of(load, choice)):
            nbytes = _bytes_of(load, choice)
            # May be more than its bytes: parts of a group have room of their own on the device.
            freed = sum(load.unsharded_bytes(load.groups[at]) for at in choice)
            if 0 < excess <= freed and nbytes <= fixed.remaining(Tier.HOST):
                for at in choice:
                    param_tiers[at] = Tier.HOST
                kept += choice
                fixed.add(Tier.HOST, nbytes, "parameters")
                break
    return kept


def _bytes_of(load: Workload, indices: Sequence[int]) -> int:
    return sum(load.groups[index].param_bytes for index in indices)


class _Room:
    """The unused bytes of each budget while mandatory bytes are planned."""

    def __init__(self, load: Workload, budgets: Budgets) -> None:
        self.load = load
        self.budgets = budgets
        self.used = {tier: dict(kinds) for tier, kinds in _mandatory_bytes(load).items()}

    def add(self, tier: Tier, nbytes: int, use: str) -> None:
        if nbytes:
            self.used[tier][use] = self.used[tier].get(use, 0) + nbytes

    def remaining(self, tier: Tier) -> int:
        return self.budgets.of(tier) - sum(self.used[tier].values())

    def check(self) -> None:
        for tier in Tier:
            if self.remaining(tier) < 0:
                needed = sum(self.used[tier].values())
                raise BudgetError(
                    f"{tier.value} needs at least {format_need(needed)} but its budget is"
                    f" {self.budgets.text(tier)} ({_listed(self.used[tier])});"
                    f" {_room(self.budgets, tier, self._instead(tier))}",
                    tier,
                    needed,
                )

    def _instead(self, tier: Tier) -> str:
        """What else than a larger budget of ``tier`` helps, if it is not done yet; "" if nothing does."""
        used, load = self.used[tier], self.load
        if tier is Tier.DEVICE:
            if load.local_grad_bytes:
                return "use ZeRO stage 2 or 3"
            if tier in load.optimizer_tiers:
                return "offload to cpu or nvme"
            if load.offload_param is not tier:
                return ""
            # Before stage 3, parameters cannot leave the device.
            return "offload parameters to cpu or nvme" + (" with ZeRO stage 3" if load.stage < 3 else "")
        if tier is Tier.HOST:
            if -self.remaining(tier) < used.get(ACTIVATIONS, 0):
                return "lower activation_budget"
            return "offload to nvme" if tier in (load.offload_param, load.offload_optimizer) else ""
        return "free disk space"


def _visits(load: Workload, filled: Filled, room: int) -> tuple[list[TileRun], Staging]:
    """Marks the tiles that visit a GPU for their update; returns all tiles, and slots for them in ``room`` bytes there.

    Tiles whose state is on the GPU and whose parameters are not must visit. Of the tiles with state in host memory, the
    first ones visit, up to the configured fraction: their gradients come last in backward, and the next forward needs
    their parameters first. Without room for two slots, none of these visit.
    """
    homes = set(zip(load.optimizer_tiers, filled.tiers[PARAMETERS], strict=True))
    none_must = not any(has_to_visit(load, *home) for home in homes)
    if load.device_is_host or load.whole_groups or (none_must and not load.update_on_device):
        return filled.runs, Staging()

    def is_optional(run: TileRun) -> bool:
        tiers = run.tier, filled.tiers[PARAMETERS][run.group], filled.tiers[GRADIENTS][run.group]
        return Tier.NVME not in tiers and run.tier is not Tier.DEVICE

    def visiting(requested: float) -> list[TileRun]:
        """All runs, of which ``requested`` elements that need not visit do so."""
        runs = list[TileRun]()
        for run in filled.runs:
            if not is_optional(run):
                visits = has_to_visit(load, run.tier, filled.tiers[PARAMETERS][run.group])
                runs.append(run._replace(visits=visits))
            elif requested <= 0:
                runs.append(run)
            else:
                first, rest = run.parted(math.ceil(requested))
                requested -= first.numel
                runs.append(first._replace(visits=True))
                if rest is not None:
                    runs.append(rest)
        return runs

    runs = visiting(load.update_on_device * sum(run.numel for run in filled.runs if is_optional(run)))
    window = _visitors(load, filled, [run for run in runs if run.visits], room)
    if window.nbytes > room and any(run.visits and is_optional(run) for run in runs):
        runs = visiting(0)
        window = _visitors(load, filled, [run for run in runs if run.visits], room)
    return runs, window


def _stay_to_be_used(
    load: Workload, runs: Sequence[TileRun], grad_tiers: Sequence[Tier], room: int
) -> list[Tier]:
    """The tiers of gradients: gradients that the GPU uses stay on the device, as far as ``room`` allows."""
    visiting = {run.group for run in runs if run.visits} - {run.group for run in runs if not run.visits}
    stay = list(grad_tiers)
    for index in sorted(visiting):
        nbytes = load.home_grad_bytes(load.groups[index])
        if stay[index] is Tier.HOST and nbytes <= room:
            stay[index] = Tier.DEVICE
            room -= nbytes
    return stay


def _visitors(load: Workload, filled: Filled, runs: Sequence[TileRun], room: int) -> Staging:
    """Device slots for the parts of the tiles of ``runs`` that live in host memory: at least two."""
    sized = [(run.largest, load.of(load.groups[run.group])) for run in runs]
    on_host = any(run.tier is Tier.HOST for run in runs)
    params_on_host = any(filled.tiers[PARAMETERS][run.group] is Tier.HOST for run in runs)
    grads_on_host = any(filled.tiers[GRADIENTS][run.group] is Tier.HOST for run in runs)
    slot = slots_of_sizes(
        1,
        state=[numel * sizes.state_itemsize for numel, sizes in sized] if on_host else [],
        param=[numel * sizes.compute_itemsize for numel, sizes in sized] if params_on_host else [],
        grad=[numel * sizes.grad_itemsize for numel, sizes in sized] if grads_on_host else [],
    )
    slots = min(USUAL_SLOTS, max(FEWEST_VISITS, room // slot.nbytes)) if slot.nbytes else FEWEST_VISITS
    return replace(slot, slots=slots) if runs else Staging()


def _bytes_on_nvme(
    everything: Sequence[Tenant], tiers: Mapping[str, Sequence[Tier]], *, only_fixed: bool = False
) -> int:
    """At most so many bytes of swap space: of pieces on these ``tiers``, or with all that is not fixed in memory."""
    nbytes = 0
    for tenant in everything:
        for piece, tier, count in tenant.counted(tiers[tenant.kind]):
            # Host memory may keep it instead, and then a snapshot writes it.
            in_memory = FLUSHED_VERSIONS * piece.flushed
            on_nvme = tier is Tier.NVME and (piece.fixed or not only_fixed)
            nbytes += count * (max(piece.swap_bytes, in_memory) if on_nvme else in_memory)
    return nbytes


def _chain_bytes(load: Workload, index: int, param_tiers: Sequence[Tier]) -> int:
    """Device room for a group and its enclosing groups, as far as they must be unsharded to compute."""
    chain = ((load.groups[at], param_tiers[at]) for at in load.chain(index))
    return sum(
        load.unsharded_bytes(group) for group, tier in chain if not load.computes_in_place(group, tier)
    )


def _chains(load: Workload, param_tiers: Sequence[Tier]) -> list[int]:
    """``_chain_bytes`` of each group."""
    own = _moving(load, param_tiers)
    # Many groups have the same parent.
    around: dict[int | None, int] = {None: 0}
    chains = []
    for index, group in enumerate(load.groups):
        if group.parent is not None and group.parent not in around:
            around[group.parent] = sum(own[at] for at in load.chain(group.parent))
        beside = 0 if group.beside is None else own[group.beside]
        chains.append(own[index] + beside + around[group.parent])
    return chains


def _moving(load: Workload, param_tiers: Sequence[Tier]) -> list[int]:
    """Device room for each group itself, if it must be unsharded to compute."""
    needed = {
        (load.kinds.of[at], tier): 0
        if load.computes_in_place(load.groups[at], tier)
        else load.unsharded_bytes(load.groups[at])
        for tier in Tier
        for at in load.kinds.firsts
    }
    return [*map(needed.__getitem__, zip(load.kinds.of, param_tiers, strict=True))]


def _working_set(load: Workload, param_tiers: Sequence[Tier], chains: Sequence[int], fixed: _Room) -> int:
    """Device room for the groups that are unsharded at the same time, plus as much prefetch as fits.

    ``chains``: what ``_chains`` returns.
    """
    least = max(chains, default=0)
    if least > fixed.remaining(Tier.DEVICE):
        deepest = load.groups[chains.index(least)].name
        needed = fixed.budgets.device - fixed.remaining(Tier.DEVICE) + least
        raise BudgetError(
            f"the largest group, {deepest!r}, needs {format_need(least)} on the device while it computes, but"
            f" {format_size(fixed.remaining(Tier.DEVICE))} of device_budget {format_size(fixed.budgets.device)} are"
            f" left ({_listed(fixed.used[Tier.DEVICE]) or 'no other use is planned'}); raise device_budget to at"
            f" least {format_need(needed)}",
            Tier.DEVICE,
            needed,
        )
    moving = _moving(load, param_tiers)
    # Groups are fetched whole, so room for less than one group is useless. Enclosing groups are unsharded already, but
    # while one calls its experts, the next one is fetched.
    inner = [
        nbytes + (0 if group.beside is None else moving[group.beside])
        for index, (group, nbytes) in enumerate(zip(load.groups, moving, strict=True))
        if index not in load.enclosing or index in load.routing
    ]
    ahead = max(round_up(load.prefetch_bytes), *inner) if load.prefetch_bytes and inner else 0
    room = fixed.remaining(Tier.DEVICE) // PAGE * PAGE
    return min(sum(moving), room, least + ahead)


def _listed(kinds: dict[str, int]) -> str:
    return ", ".join(f"{kind} {format_size(nbytes)}" for kind, nbytes in kinds.items())
