"""Steps that wait for copies over the link of a device with its own memory, and remedies."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median
from typing import Literal

from service.advice.advice import Advice, warning
from service.advice.larger_budget import as_setting
from service.advice.stalls import (
    BOUND_FRACTION,
    MIN_CAUSE_FRACTION,
    ON_NVME,
    SIMILAR_FRACTION,
    STALL_FRACTION,
    SteppingRank,
    stepping_ranks,
)
from service.formatting import joined, moved, rate, seconds, share, size
from service.recent_steps import steady_steps
from service.view import RunView
from tiering.telemetry import COPIES_OF, CopyStatus

SLOW_FRACTION = 0.7  # of the measured rate: copies share host memory bandwidth, and small copies are slower
FULL_FRACTION = 0.7  # of the step: a link that is busy for less can start copies earlier

Direction = Literal["to the device", "from the device", "to the device and back"]


def bound(run: RunView) -> Iterator[Advice]:
    """Steps that wait for the link, with the figures of the rank that waits most."""
    ranks = [
        rank
        for rank in stepping_ranks(run)
        if rank.snapshot.link is not None and _stalled(rank) >= STALL_FRACTION
    ]
    if not ranks:
        return
    slowest = max(ranks, key=_stalled)
    stalled, steps = _stalled(slowest), steady_steps(slowest.snapshot)
    step_seconds = fmean(step.seconds for step in steps)
    causes = [
        f"{cause} {share(part)}"
        for cause, part in slowest.steps.causes.items()
        if cause in _causes(slowest) and part >= MIN_CAUSE_FRACTION * stalled
    ]
    h2d, d2h = median(step.h2d_bytes for step in steps), median(step.d2h_bytes for step in steps)
    assert slowest.snapshot.link is not None
    link = slowest.snapshot.link
    busy = _busy(h2d, link.h2d), _busy(d2h, link.d2h)
    measured = link.measured_bytes_per_second
    yield warning(
        "link-bound",
        f"the step {'is bound by' if stalled >= BOUND_FRACTION else 'waits for'} copies {_direction(*busy)}:"
        f" {share(stalled)} of its {seconds(step_seconds)} is stall ({joined(causes)});"
        f" it copies {moved(h2d)} to the device at {rate(link.h2d.average_bytes_per_second)}, which takes"
        f" {share(min(1.0, busy[0] / step_seconds))} of the step, and {moved(d2h)} from it at"
        f" {rate(link.d2h.average_bytes_per_second)}, {share(min(1.0, busy[1] / step_seconds))}"
        + ("" if measured is None else f"; {rate(measured)} were measured in each direction"),
        _remedy(slowest, busy, step_seconds),
        *([rank.rank.rank for rank in ranks] if len(run.ranks) > 1 else []),
    )


def _causes(rank: SteppingRank) -> list[str]:
    """The causes of stalls for the link. Without NVMe, all stalls except those for other ranks are for the link."""
    return [
        cause
        for cause in rank.steps.causes
        if cause.startswith(COPIES_OF) or (not rank.snapshot.io and cause in ON_NVME)
    ]


def _stalled(rank: SteppingRank) -> float:
    return rank.steps.stalled_on(_causes(rank))


def _busy(nbytes: float, copies: CopyStatus) -> float:
    """Seconds to copy ``nbytes`` at the average rate."""
    return nbytes / copies.average_bytes_per_second if copies.average_bytes_per_second else 0.0


def _direction(h2d: float, d2h: float) -> Direction:
    if min(h2d, d2h) >= SIMILAR_FRACTION * max(h2d, d2h):
        return "to the device and back"
    return "to the device" if h2d > d2h else "from the device"


RESERVE = 0.05  # of the device's memory: for a longer batch, and for other processes


def _remedy(rank: SteppingRank, busy: tuple[float, float], step_seconds: float) -> str:
    """The remedies: restore the speed of the link, move fewer bytes, copy earlier, use more samples per copy."""
    link = rank.snapshot.link
    assert link is not None
    slower = link.h2d if busy[0] >= busy[1] else link.d2h
    remedies = []
    if slower.average_bytes_per_second < SLOW_FRACTION * (link.measured_bytes_per_second or 0):
        remedies.append("check what else copies to or from GPUs, or uses the host's memory bandwidth")
    device = next((tier for tier in rank.snapshot.tiers if tier.name == "device"), None)
    larger = "a larger tiering.device_budget"
    effect = "keeps more data on the device"
    if max(busy) < FULL_FRACTION * step_seconds:
        effect += " and lets copies start earlier"
    if device is None or device.available is None:
        remedies.append(f"{larger} {effect}")
    elif (free := int(device.available - RESERVE * device.capacity)) < RESERVE * device.capacity:
        remedies.append(f"the device has no memory for {larger}")
    else:
        setting = as_setting((device.budget + free) * max(1, rank.snapshot.local_world_size))
        remedies.append(f"{size(free)} of device memory are free: tiering.device_budget {setting} {effect}")
    remedies.append("a larger micro-batch copies the parameters once for more samples")
    return "; ".join(remedies)
