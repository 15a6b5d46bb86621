"""What a step of a plan moves, turn by turn, and in how little swap space it can be replayed. Pure.

A model is larger than the space that a benchmark may take. So extents are shared: those of one size are used in turn,
as many of them as there is room for, and at least as many as are in flight at one time: none then waits for another
that only has its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tiering.config.training import format_size
from tiering.errors import ConfigError
from tiering.placement.plan import GroupSizes, Plan, Tier
from tiering.storage.arena import round_up

Pattern = Literal["optimizer", "params", "mixed"]
Phase = Literal["forward", "backward", "step"]
Kind = Literal["parameters", "gradients", "optimizer state"]


@dataclass(frozen=True)
class Turn:
    """A part of a step and the bytes that it has to move. It stands for ``times`` of them."""

    phase: Phase
    read: int
    written: int
    times: int = 1
    gradients: bool = False  # go to NVMe, as far as the plan says so
    accumulates: bool = False  # those of earlier micro-batches are there
    last: bool = False  # of the micro-batches: state is read ahead


def turns_of(plan: Plan, pattern: Pattern) -> list[Turn]:
    """The turns of a step: all of them ("mixed"), forward and backward with the fetches alone, or the update alone.

    Of several micro-batches there are two: the first, which finds no gradients yet, and one for all others.
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


def order_of(groups: Sequence[GroupSizes]) -> tuple[list[int], list[int]]:
    """The groups as forward comes to them, and as backward does: what encloses others before these."""
    inside: dict[int | None, list[int]] = {}
    for number, group in enumerate(groups):
        if group.uses:
            inside.setdefault(group.parent, []).append(number)

    def walk(parent: int | None, step: int) -> Iterator[int]:
        for number in inside.get(parent, [])[::step]:
            yield number
            yield from walk(number, step)

    return list(walk(None, 1)), list(walk(None, -1))


def around(groups: Sequence[GroupSizes], number: int) -> set[int]:
    """The group and those that enclose it."""
    parent = groups[number].parent
    return {number} if parent is None else {number} | around(groups, parent)


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
class Shared:
    """The sizes of extents, and for each place the number of its extent; None where there are no bytes."""

    sizes: tuple[int, ...]
    extents: tuple[int | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


def share(plan: Plan, pattern: Pattern, size: int, directories: int = 1) -> dict[Kind, Shared]:
    """Extents for what the pattern moves, in ``size`` bytes of each directory. ConfigError if that is too little."""
    room = size * directories
    needs = {kind: [round_up(size) for size in sizes] for kind, sizes in sizes_on_nvme(plan).items()}
    if pattern == "params":
        needs = {kind: sizes if kind == "parameters" else [0] * len(sizes) for kind, sizes in needs.items()}
    # Parameters are only read while others of their size are on their way.
    windows: dict[Kind, int] = {"parameters": 1, "gradients": 2, "optimizer state": plan.staging.slots + 1}
    every = {kind: Counter(filter(None, sizes)) for kind, sizes in needs.items()}
    least = {kind: _most_in_a_row(list(filter(None, sizes)), windows[kind]) for kind, sizes in needs.items()}
    whole, minimum = (
        sum(size * count for counts in each.values() for size, count in counts.items())
        for each in (every, least)
    )
    if minimum > room:
        raise ConfigError(
            f"the replay needs {format_size(minimum)} of swap space, for what is in flight at one time, and has"
            f" {format_size(room)}: give --size {-(-minimum // directories >> 20)}M, or fewer --params"
        )
    spare = min(1.0, (room - minimum) / (whole - minimum)) if whole > minimum else 1.0
    shared: dict[Kind, Shared] = {}
    for kind, sizes in needs.items():
        fewest = least[kind]
        counts = {
            size: fewest[size] + int((count - fewest[size]) * spare) for size, count in every[kind].items()
        }
        shared[kind] = _in_turn(sizes, counts)
    return shared


def _most_in_a_row(sizes: Sequence[int], window: int) -> Counter[int]:
    """Of each size, the most among ``window`` in a row."""
    most: Counter[int] = Counter()
    for start in range(max(1, len(sizes) - window + 1)):
        most |= Counter(sizes[start : start + window])
    return most


def _in_turn(sizes: Sequence[int], counts: Mapping[int, int]) -> Shared:
    """Extents of each size, so many, each used when all others of its size were."""
    made: list[int] = []
    of_size: dict[int, list[int]] = {size: [] for size in counts}
    used: Counter[int] = Counter()
    extents: list[int | None] = []
    for size in sizes:
        if not size:
            extents.append(None)
            continue
        if used[size] < counts[size]:
            of_size[size].append(len(made))
            made.append(size)
        extents.append(of_size[size][used[size] % counts[size]])
        used[size] += 1
    return Shared(tuple(made), tuple(extents))
