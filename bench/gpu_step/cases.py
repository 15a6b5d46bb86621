"""What meets what: a model that fits on the card, everywhere it can live, and one whose state does not fit."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from frame.report import Report

from . import sides, tables
from .link import Link
from .run import Measured, Run
from .shape import Shape, of_size
from .side import Spec
from .sides import DISK_SHARE, Sides
from .waves import Memory, packed
from .work import Work

LARGER = 1.25
"""Parameters, gradients and state of the model that does not fit, over the card's memory."""
LARGER_SHARE = 0.4
"""Of the time, for that model."""
TINY_CARD = 4 << 30
"""Bytes: of a device that is the CPU, for budgets."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What to measure on: ``memory`` is what all sides may take, ``card`` a card's in whole, None on a CPU.

    ``points`` are tokens per step, of which the goals are about the first. ``peer`` has DeepSpeed. ``shares`` are
    further sides' ``update_on_device``, ``resized`` asks for one more without a slab.
    """

    memory: Memory
    card: int | None
    sequence: int
    points: tuple[int, ...]
    peer: Path | None
    direct: bool  # the directory takes direct I/O
    pinned: Link | None
    more: dict[str, Any] = field(default_factory=dict)
    shares: tuple[float, ...] = ()
    resized: bool = False

    def work(self, shape: Shape) -> Work:
        return Work(shape, self.sequence, self.card)

    def sides(self, shape: Shape, points: Sequence[int]) -> Sides:
        return Sides(shape, max(points), self.card or TINY_CARD, self.more)


def in_waves(
    run: Run,
    setting: Setting,
    shape: Shape,
    anchor: Sequence[Spec],
    units: Sequence[Sequence[Spec]],
    points: Sequence[int],
    until: float,
) -> list[Measured]:
    """All sides, as many at a time as memory holds, each wave with its share of the time."""
    waves, without = packed(anchor, units, setting.memory)
    for spec in without:
        run.without(
            spec.name,
            f"about {spec.device / 2**30:.0f} GiB of the device and {spec.host / 2**30:.0f} GiB of the host"
            f" do not fit beside {', '.join(spec.name for spec in anchor) or 'nothing'}",
        )
    results: list[Measured] = []
    for number, wave in enumerate(waves):
        now = time.monotonic()
        results += run.wave(setting.work(shape), wave, points, now + (until - now) / (len(waves) - number))
    return results


def tell(
    report: Report,
    title: str,
    setting: Setting,
    results: Sequence[Measured],
    unoffloaded: float | None = None,
) -> None:
    """Tables of each wave, for each size of step."""
    for wave in dict.fromkeys(side.wave for side in results):
        for tokens in dict.fromkeys(side.tokens for side in results):
            ours = [side for side in results if (side.wave, side.tokens) == (wave, tokens)]
            tables.show(report, f"{title}, {tokens} tokens per step", ours, setting.pinned, unoffloaded)


def disk_holds(run: Run, of: Sides) -> bool:
    """Whether the NVMe side has room; else the report says so."""
    free = shutil.disk_usage(run.place.directory).free
    if of.disk <= DISK_SHARE * free:
        return True
    run.without(sides.ON_NVME, f"{of.disk / 2**30:.0f} GiB do not fit beside what is on the disk")
    return False


def ways(setting: Setting, of: Sides) -> list[list[Spec]]:
    """Who meets the reference, but for NVMe; DeepSpeed meets what it is compared with, too."""
    first = [of.offloaded()] + ([of.peer(setting.peer)] if setting.peer is not None else [])
    units = [first, [of.plain()], [of.eager()], [of.state_offloaded()]]
    for share in setting.shares:
        name = f"{sides.OFFLOADED}, {share:.0%} updated on the device"
        units.append([of.offloaded(name, tiering={"update_on_device": share})])
    if setting.resized:
        units.append([of.resized()])
    return units


def that_fits(setting: Setting) -> Shape | None:
    """The largest model whose reference and plain loop the card holds beside each other, and all others the host."""

    def fits(shape: Shape) -> bool:
        of = setting.sides(shape, setting.points[:1])
        others = [of.reference(), of.on_nvme(), *(spec for unit in ways(setting, of) for spec in unit)]
        host = sum(spec.host for spec in others)
        return setting.memory.holds(replace(of.reference(), host=0), replace(of.plain(), host=host))

    return sides.largest(fits)


def fitting(run: Run, setting: Setting, shape: Shape, until: float) -> None:
    """The model that fits: no offload is the reference for every way to offload it."""
    points = holding(run, setting, shape)
    of = setting.sides(shape, points)
    units = ways(setting, of)
    if setting.direct and disk_holds(run, of):
        units.append([of.on_nvme()])
    results = in_waves(run, setting, shape, [of.reference()], units, points, until)
    tell(run.report, "a model that fits", setting, results)
    run.report.verdicts += goals(run, setting, results)


def holding(run: Run, setting: Setting, shape: Shape) -> list[int]:
    """The sizes of a step at which no offload fits on the card beside plain PyTorch; the first is one."""
    points = list(setting.points[:1])
    for tokens in setting.points[1:]:
        of = setting.sides(shape, [*points, tokens])
        if setting.memory.holds(replace(of.reference(), host=0), replace(of.plain(), host=0)):
            points.append(tokens)
        else:
            run.without(f"{tokens} tokens per step", "its activations do not fit on the card twice")
    return points


def goals(run: Run, setting: Setting, results: Sequence[Measured]) -> list[Any]:
    """Of the first size of step, between sides of one wave. A CPU as the device proves none of them."""
    if setting.card is None:
        return []
    first = [side for side in results if side.tokens == setting.points[0]]
    verdicts = []
    ours = tables.named(first, sides.OFFLOADED)
    for name in (sides.REFERENCE, sides.PEER):
        theirs = next((side for side in first if ours and (side.name, side.wave) == (name, ours.wave)), None)
        if ours is None or theirs is None:
            run.without(f"{sides.OFFLOADED} beside {name}", "not measured without both")
        elif name == sides.PEER:
            verdicts.append(tables.as_fast(ours, theirs, tables.OF_PEER))
            verdicts.append(tables.smaller(ours, theirs, tables.MEMORY_OF_PEER))
        else:
            verdicts.append(tables.as_fast(ours, theirs, tables.OF_REFERENCE))
    return verdicts


def larger_shape(setting: Setting, card: int) -> Shape | None:
    """The shape whose parameters, gradients and state are so much larger; None where memory does not hold it."""
    shape = of_size(int(LARGER * card / sides.ALL))
    return shape if setting.memory.holds(setting.sides(shape, setting.points[:1]).filled()) else None


def larger(run: Run, setting: Setting, shape: Shape, until: float) -> None:
    """A model whose state is larger than ``setting.card``; the reference is what the one that fits has reached."""
    points = setting.points[:1]
    reached = [
        side.flops(statistics.median(side.rates))
        for side in run.sides
        if (side.name, side.tokens) == (sides.REFERENCE, points[0])
    ]
    of = setting.sides(shape, points)
    units = [[of.filled()], [of.offloaded()]]
    if setting.direct and disk_holds(run, of):
        units.append([of.on_nvme()])
    if setting.peer is not None:
        units.append([of.peer(setting.peer)])
    results = in_waves(run, setting, shape, [], units, points, until)
    unoffloaded = statistics.median(reached) if reached else None
    tell(run.report, "a model larger than the card", setting, results, unoffloaded)
