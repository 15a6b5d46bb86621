"""Placement: which tier holds what, decided once before the first step. Pure: sizes and budgets in, a Plan out.

Access is cyclic, so a fixed resident set is as good as any eviction policy; the question is only what to keep. A byte
kept in host memory saves, per step, as many NVMe bytes as it would move: a 16-bit parameter about 2 x micro-batches
+ 1, a gradient 2 x micro-batches, optimizer state 2. So the host budget is filled in that order, and what is left over
streams through fixed windows, which are planned first: without them nothing could move at all.

Budgets are ceilings. What cannot fit is refused here with the numbers and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiering.arena import PAGE, round_up
from tiering.config import format_size
from tiering.errors import PlacementError
from tiering.plan import Budgets, Plan, Staging, SubGroup, Tier, Workload, checksum_bytes

FEWEST_SLOTS = 3  # one read, one stepped, one written
USUAL_SLOTS = 4
STAGING_SHARE = 3  # staging takes at most this fraction (1/n) of the host budget when there is a choice
SMALLEST_TILE = 2048
LARGEST_TILE = 4 << 20


def make_plan(load: Workload, budgets: Budgets) -> Plan:
    """Place ``load`` within ``budgets``. Raises PlacementError, with numbers and remedy, when it cannot fit."""
    fixed = _Room(budgets)
    param_tiers = [Tier.DEVICE if group.persistent else load.offload_param for group in load.groups]
    # Groups that stay open for a whole pass would hold their window all the time: their gradients stay in memory.
    parents = {group.parent for group in load.groups}
    stays_open = [group.persistent or index in parents for index, group in enumerate(load.groups)]
    grad_tiers = [
        Tier.HOST if tier is Tier.NVME and open_ else tier
        for tier, open_ in zip(load.optimizer_tiers, stays_open, strict=True)
    ]

    for index, group in enumerate(load.groups):
        if param_tiers[index] is not Tier.NVME:
            fixed.take(param_tiers[index], group.param_bytes, f"parameters of {group.name}")
        if grad_tiers[index] is not Tier.NVME:
            nbytes = group.trainable_numel * load.grad_itemsize
            fixed.take(grad_tiers[index], nbytes, f"gradients of {group.name}")
        if load.optimizer_tiers[index] is not Tier.NVME:
            nbytes = group.trainable_numel * load.state_itemsize
            fixed.take(load.optimizer_tiers[index], nbytes, f"optimizer state of {group.name}")
    fixed.check()

    _keep_what_cannot_move(load, fixed, param_tiers)

    # Apart from each other: each can be waited for without the other's leases being in the way.
    largest = max((group.param_bytes for group in load.groups), default=0)
    fetch_window = 2 * largest if load.fetch_by_copy and Tier.NVME in param_tiers else 0
    offload_window = 2 * largest if load.steps_copy_out else 0
    fixed.take(Tier.HOST, fetch_window + offload_window, "copies to and from the device")
    largest_tile = _largest_tile(load)

    # Where the device has memory of its own, updated parameters reach it through a slot.
    staging, window = Staging(), 0
    filled = (
        None if load.steps_copy_out else _fill_host(load, fixed, param_tiers, grad_tiers, largest_tile, None)
    )
    if filled is None:
        # Of all that might go to NVMe: what stays in host memory after all needs none, so this is enough.
        fixed.take(Tier.HOST, checksum_bytes(load, _most_on_nvme(load, param_tiers, grad_tiers)), "checksums")
        tile, staging = _staging(load, fixed, param_tiers, grad_tiers, largest_tile)
        fixed.take(Tier.HOST, staging.nbytes, "staging")
        window = _grad_window(load, grad_tiers)
        fixed.take(Tier.HOST, window, "gradients on their way to NVMe")
        fixed.check()
        filled = _fill_host(load, fixed, param_tiers, grad_tiers, tile, window)
    assert filled is not None
    params, grads, tiles = filled
    window = _grad_window(load, grads)

    working = _working_set(load, params, fixed)
    plan = Plan(
        workload=load,
        budgets=budgets,
        param_tiers=tuple(params),
        grad_tiers=tuple(grads),
        sub_groups=tuple(tiles),
        working_bytes=working,
        staging=staging,
        grad_window_bytes=window,
        fetch_window_bytes=fetch_window,
        offload_window_bytes=offload_window,
    )
    for tier in Tier:
        if plan.total(tier) > budgets.of(tier):
            raise PlacementError(
                f"{tier.value} needs {format_size(plan.total(tier))} but its budget is"
                f" {format_size(budgets.of(tier))}: {_listed(plan.contents(tier))}; raise {tier.value}_budget"
            )
    return plan


def _largest_tile(load: Workload) -> int:
    if load.whole_groups:
        return max([SMALLEST_TILE, *(group.trainable_numel for group in load.groups)])
    return min(LARGEST_TILE, max(SMALLEST_TILE, load.sub_group_numel // SMALLEST_TILE * SMALLEST_TILE))


def _keep_what_cannot_move(load: Workload, fixed: _Room, param_tiers: list[Tier]) -> None:
    """Groups too large for the device's room live in host memory if that is where they compute and it can hold them.

    Before anything else is decided: whether a plan exists must not depend on what the rest of the budget is used for.
    """
    if not load.cache_in_host:
        return
    for index, group in enumerate(load.groups):
        too_large = _chain_bytes(load, index, param_tiers) > fixed.left(Tier.DEVICE)
        kept = (
            too_large and Tier.HOST in load.computed_in_place and group.param_bytes <= fixed.left(Tier.HOST)
        )
        if kept and param_tiers[index] is Tier.NVME:
            param_tiers[index] = Tier.HOST
            fixed.take(Tier.HOST, group.param_bytes, f"parameters of {group.name}")


class _Room:
    """What is left of each budget while mandatory bytes are laid out."""

    def __init__(self, budgets: Budgets) -> None:
        self.budgets = budgets
        self.taken: dict[Tier, dict[str, int]] = {tier: {} for tier in Tier}

    def take(self, tier: Tier, nbytes: int, what: str) -> None:
        if nbytes:
            kind = what.split(" of ")[0]
            self.taken[tier][kind] = self.taken[tier].get(kind, 0) + nbytes

    def left(self, tier: Tier) -> int:
        return self.budgets.of(tier) - sum(self.taken[tier].values())

    def check(self) -> None:
        for tier in Tier:
            if self.left(tier) < 0:
                slower = {
                    Tier.DEVICE: "offload to cpu or nvme",
                    Tier.HOST: "offload to nvme",
                    Tier.NVME: "free disk space",
                }[tier]
                raise PlacementError(
                    f"{tier.value} needs at least {format_size(sum(self.taken[tier].values()))} but its budget is"
                    f" {format_size(self.budgets.of(tier))} ({_listed(self.taken[tier])});"
                    f" raise {tier.value}_budget, or {slower}"
                )


def _fill_host(
    load: Workload,
    fixed: _Room,
    param_tiers: Sequence[Tier],
    grad_tiers: Sequence[Tier],
    tile: int,
    streaming: int | None,
) -> tuple[list[Tier], list[Tier], list[SubGroup]] | None:
    """Fill what is left of the host budget, best ratio first; ``streaming`` None: all of it or None.

    The gradient window (``streaming`` bytes) is spent too if that brings all gradients in. ``cache_in_host`` false
    keeps parameters and state out of host memory, not gradients: they are no offloaded state, only spilled.
    """
    room = fixed.left(Tier.HOST)
    params, grads = list(param_tiers), list(grad_tiers)
    whole = True

    def keep(nbytes: int, *, cached: bool = True) -> bool:
        nonlocal room, whole
        if not nbytes:  # SGD's state in fp32: there is nothing to move
            return True
        if nbytes <= room and (load.cache_in_host or not cached):
            room -= nbytes
            return True
        whole = False
        return False

    def saved_per_byte(index: int) -> float:
        group = load.groups[index]
        return sum(load.param_traffic(group)) / max(group.param_bytes, 1)

    for index in sorted(range(len(params)), key=saved_per_byte, reverse=True):
        if params[index] is Tier.NVME and keep(load.groups[index].param_bytes):
            params[index] = Tier.HOST
    # Gradients that cause no traffic keep their extent: it is there for what turns out not to be final in time.
    waiting = [i for i, tier in enumerate(grads) if tier is Tier.NVME and load.grad_traffic(load.groups[i])]
    sizes = {index: load.groups[index].trainable_numel * load.grad_itemsize for index in waiting}
    if streaming is not None and sum(sizes.values()) <= room + streaming:
        room += streaming
    for index in waiting:
        if keep(sizes[index], cached=False):
            grads[index] = Tier.HOST
    tiles: list[SubGroup] = []
    for index, (group, home) in enumerate(zip(load.groups, load.optimizer_tiers, strict=True)):
        for start in range(0, group.trainable_numel, tile):
            end = min(start + tile, group.trainable_numel)
            tier = home
            if tier is Tier.NVME and keep((end - start) * load.state_itemsize):
                tier = Tier.HOST
            tiles.append(SubGroup(index, start, end, tier))
    return (params, grads, tiles) if whole or streaming is not None else None


def _staging(
    load: Workload,
    fixed: _Room,
    param_tiers: Sequence[Tier],
    grad_tiers: Sequence[Tier],
    largest_tile: int,
) -> tuple[int, Staging]:
    """The tile (elements) and the slots, for what may have to stream."""
    state = load.state_itemsize if Tier.NVME in load.optimizer_tiers else 0
    param = load.compute_itemsize if Tier.NVME in param_tiers or load.steps_copy_out else 0
    grad = load.grad_itemsize if Tier.NVME in grad_tiers else 0
    per_element = state + param + grad
    room = fixed.left(Tier.HOST) - _grad_window(load, grad_tiers)
    longest = max((group.trainable_numel for group in load.groups), default=0)
    tile = min(largest_tile, max(SMALLEST_TILE, longest))
    while tile > SMALLEST_TILE and USUAL_SLOTS * tile * per_element > room // STAGING_SHARE:
        tile = max(SMALLEST_TILE, tile // 2 // SMALLEST_TILE * SMALLEST_TILE)
    slots = USUAL_SLOTS if USUAL_SLOTS * tile * per_element <= room else FEWEST_SLOTS
    return tile, Staging(slots, tile * per_element, tile * state, tile * (state + param))


def _grad_window(load: Workload, grad_tiers: Sequence[Tier]) -> int:
    """Two of the largest streamed gradient: one group accumulates while the one before it is written."""
    return 2 * max(
        (
            round_up(group.trainable_numel * load.grad_itemsize)
            for group, tier in zip(load.groups, grad_tiers, strict=True)
            if tier is Tier.NVME
        ),
        default=0,
    )


def _most_on_nvme(load: Workload, param_tiers: Sequence[Tier], grad_tiers: Sequence[Tier]) -> int:
    """Bytes on NVMe if nothing that may live there were kept in host memory."""
    total = 0
    kinds = zip(load.groups, param_tiers, grad_tiers, load.optimizer_tiers, strict=True)
    for group, param, grad, state in kinds:
        total += group.param_bytes if param is Tier.NVME else 0
        total += group.trainable_numel * load.grad_itemsize if grad is Tier.NVME else 0
        total += group.trainable_numel * load.state_itemsize if state is Tier.NVME else 0
    return total


def _chain_bytes(load: Workload, index: int, param_tiers: Sequence[Tier]) -> int:
    """Device room for a group and those around it, as far as they have to be unsharded to compute."""
    chain = 0
    at: int | None = index
    while at is not None:
        group = load.groups[at]
        chain += round_up(group.param_bytes) if param_tiers[at] not in load.computed_in_place else 0
        at = group.parent
    return chain


def _working_set(load: Workload, param_tiers: Sequence[Tier], fixed: _Room) -> int:
    """Device room for the groups that are unsharded at one time, plus as much prefetch as fits."""
    least, deepest = 0, ""
    for index, group in enumerate(load.groups):
        chain = _chain_bytes(load, index, param_tiers)
        if chain > least:
            least, deepest = chain, group.name
    if least > fixed.left(Tier.DEVICE):
        raise PlacementError(
            f"the largest group, {deepest!r}, needs {format_size(least)} on the device while it computes, but"
            f" {format_size(fixed.left(Tier.DEVICE))} of device_budget {format_size(fixed.budgets.device)} are left"
            f" ({_listed(fixed.taken[Tier.DEVICE]) or 'nothing else is planned there'}); raise device_budget to at"
            f" least {format_size(fixed.budgets.device - fixed.left(Tier.DEVICE) + least)}"
        )
    everything = sum(
        round_up(group.param_bytes)
        for group, tier in zip(load.groups, param_tiers, strict=True)
        if tier not in load.computed_in_place
    )
    room = fixed.left(Tier.DEVICE) // PAGE * PAGE
    return min(everything, room, least + round_up(load.prefetch_bytes))


def _listed(kinds: dict[str, int]) -> str:
    return ", ".join(f"{kind} {format_size(nbytes)}" for kind, nbytes in kinds.items())
