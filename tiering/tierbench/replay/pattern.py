"""The bytes that a step of a plan moves, turn by turn, and the swap space for replaying it. Pure.

A model is larger than the space that a benchmark may use, so extents are shared: extents of one size are used in turn.
There are as many of them as fit, and at least as many as are in flight at one time, so that no transfer waits for
another one only because both use the same extent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tiering.config.training import format_size
from tiering.errors import ConfigError
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.plan import Plan
from tiering.placement.workload import Tier
from tiering.storage.arena import round_up

Pattern = Literal["optimizer", "params", "mixed"]
Phase = Literal["forward", "backward", "step"]
Kind = Literal["parameters", "gradients", "optimizer state"]


@dataclass(frozen=True)
class Turn:
    """A part of a step and the bytes that it moves. A step has ``times`` of them."""

    phase: Phase
    read: int
    written: int
    times: int = 1
    gradients: bool = False  # gradients go to NVMe where the plan places them there
    accumulates: bool = False  # gradients are added to those of earlier micro-batches
    last: bool = False  # the last micro-batch: state is read ahead


def turns_of(plan: Plan, pattern: Pattern) -> list[Turn]:
    """The turns of a step: all ("mixed"), forward and backward with only the fetches ("params"), or only the update.

    Several micro-batches have two turns each for forward and backward: of the first micro-batch, which finds no
    gradients to add to, and of all others.
    """
    passes = plan.workload.micro_batches
    fetched = sum(group.uses * plan.workload.home_bytes(group) for group in _on_nvme(plan, plan.param_tiers))
    arriving = sum(plan.workload.home_grad_bytes(group) for group in _on_nvme(plan, plan.grad_tiers))
    turns: list[Turn] = []
    if pattern != "optimizer":
        whole = pattern == "mixed"
        for times in (1,) if passes == 1 else (1, passes - 1):
            later = bool(turns)
            turns.append(Turn("forward", fetched, 0, times))
            turns.append(
                Turn(
                    "backward",
                    fetched + (arriving if whole and later else 0),
                    arriving if whole else 0,
                    times,
                    gradients=whole,
                    accumulates=later,
                    last=whole and (later or passes == 1),
                )
            )
    if pattern != "params":
        read, written = plan.nvme_traffic()
        read -= 2 * passes * fetched + (passes - 1) * arriving
        turns.append(Turn("step", read, written - passes * arriving))
    return turns


def _on_nvme(plan: Plan, tiers: Sequence[Tier]) -> Iterator[GroupSizes]:
    return (group for group, tier in zip(plan.workload.groups, tiers, strict=True) if tier is Tier.NVME)


def pass_orders(groups: Sequence[GroupSizes]) -> tuple[list[int], list[int]]:
    """The groups in the order of forward, and in that of backward: a group comes before the groups that it encloses."""
    inside: dict[int | None, list[int]] = {}
    for number, group in enumerate(groups):
        if group.uses:
            inside.setdefault(group.parent, []).append(number)

    def walk(parent: int | None, step: int) -> Iterator[int]:
        for number in inside.get(parent, [])[::step]:
            yield number
            yield from walk(number, step)

    return list(walk(None, 1)), list(walk(None, -1))


def sizes_on_nvme(plan: Plan) -> dict[Kind, list[int]]:
    """Bytes on NVMe: parameters and gradients of each group, state of each tile; 0 where they live in memory."""
    load = plan.workload
    groups = list(zip(load.groups, plan.param_tiers, plan.grad_tiers, strict=True))
    return {
        "parameters": [load.home_bytes(group) if tier is Tier.NVME else 0 for group, tier, _ in groups],
        "gradients": [load.home_grad_bytes(group) if tier is Tier.NVME else 0 for group, _, tier in groups],
        "optimizer state": [
            plan.tile_state_bytes(tile) if tile.tier is Tier.NVME else 0 for tile in plan.sub_groups
        ],
    }


@dataclass(frozen=True)
class SharedExtents:
    """The sizes of extents, and for each group or tile the number of its extent; None where it has no bytes."""

    sizes: tuple[int, ...]
    extents: tuple[int | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


def share_extents(plan: Plan, pattern: Pattern, size: int, directories: int = 1) -> dict[Kind, SharedExtents]:
    """Extents for the pattern in ``size`` bytes of each directory. Raises ConfigError if that is too little."""
    room = size * directories
    needs = {kind: [round_up(size) for size in sizes] for kind, sizes in sizes_on_nvme(plan).items()}
    if pattern == "params":
        needs = {kind: sizes if kind == "parameters" else [0] * len(sizes) for kind, sizes in needs.items()}
    # The extents in flight at one time. Parameters are only read, so reads of one extent do not wait for each other.
    windows: dict[Kind, int] = {"parameters": 1, "gradients": 2, "optimizer state": plan.staging.slots + 1}
    all_counts = {kind: Counter(filter(None, sizes)) for kind, sizes in needs.items()}
    minimums = {
        kind: _window_maxima(list(filter(None, sizes)), windows[kind]) for kind, sizes in needs.items()
    }
    whole, minimum = (
        sum(size * count for counts in each.values() for size, count in counts.items())
        for each in (all_counts, minimums)
    )
    if minimum > room:
        raise ConfigError(
            f"the replay needs {format_size(minimum)} of swap space for the transfers in flight at one time, and has"
            f" {format_size(room)}: give --size {-(-minimum // directories >> 20)}M, or fewer --params"
        )
    spare = min(1.0, (room - minimum) / (whole - minimum)) if whole > minimum else 1.0
    shared: dict[Kind, SharedExtents] = {}
    for kind, sizes in needs.items():
        minimum_counts = minimums[kind]
        counts = {
            size: minimum_counts[size] + int((count - minimum_counts[size]) * spare)
            for size, count in all_counts[kind].items()
        }
        shared[kind] = _in_turn(sizes, counts)
    return shared


def _window_maxima(sizes: Sequence[int], window: int) -> Counter[int]:
    """For each size, the largest count among ``window`` successive sizes."""
    maxima: Counter[int] = Counter()
    for start in range(max(1, len(sizes) - window + 1)):
        maxima |= Counter(sizes[start : start + window])
    return maxima


def _in_turn(sizes: Sequence[int], counts: Mapping[int, int]) -> SharedExtents:
    """``counts`` extents of each size, used in turn."""
    extent_sizes: list[int] = []
    extents_by_size: dict[int, list[int]] = {size: [] for size in counts}
    used: Counter[int] = Counter()
    extents: list[int | None] = []
    for size in sizes:
        if not size:
            extents.append(None)
            continue
        if used[size] < counts[size]:
            extents_by_size[size].append(len(extent_sizes))
            extent_sizes.append(size)
        extents.append(extents_by_size[size][used[size] % counts[size]])
        used[size] += 1
    return SharedExtents(tuple(extent_sizes), tuple(extents))
