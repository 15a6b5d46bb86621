"""Steps that wait for copies over the link of a device with memory of its own, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median
from typing import Literal

from service.advice.finding import Advice, warning
from service.advice.relief import as_setting
from service.advice.waits import ALIKE, BOUND, ON_NVME, STALLED, TOLD, Stepping, stepping
from service.recent import steady
from service.view import RunView
from service.words import listed, moved, rate, seconds, share, size
from tiering.telemetry import COPIES_OF, CopyStatus

FULL = 0.7  # of the step: a link busy for less has room for copies that begin earlier

Way = Literal["to the device", "from the device", "to the device and back"]


def bound(run: RunView) -> Iterator[Advice]:
    """Told of the rank that waits most."""
    found = [one for one in stepping(run) if one.said.link is not None and _stalled(one) >= STALLED]
    if not found:
        return
    most = max(found, key=_stalled)
    stalled, steps = _stalled(most), steady(most.said)
    took = fmean(one.seconds for one in steps)
    causes = [
        f"{cause} {share(part)}"
        for cause, part in most.waited.causes.items()
        if cause in _causes(most) and part >= TOLD * stalled
    ]
    there, back = median(one.h2d_bytes for one in steps), median(one.d2h_bytes for one in steps)
    assert most.said.link is not None
    busy = _busy(there, most.said.link.h2d), _busy(back, most.said.link.d2h)
    yield warning(
        "link-bound",
        f"the step {'is bound by' if stalled >= BOUND else 'waits for'} copies {_way(*busy)}:"
        f" {share(stalled)} of its {seconds(took)} is stall ({listed(causes)});"
        f" it copies {moved(there)} to the device at {rate(most.said.link.h2d.average_bytes_per_second)}, which is"
        f" {share(min(1.0, busy[0] / took))} of the step, and {moved(back)} from it at"
        f" {rate(most.said.link.d2h.average_bytes_per_second)}, {share(min(1.0, busy[1] / took))}",
        _remedy(most, max(busy) / took),
        *([one.rank.rank for one in found] if len(run.ranks) > 1 else []),
    )


def _causes(one: Stepping) -> list[str]:
    """Of waits for the link. Without NVMe everything that is no wait for other ranks comes over it."""
    return [
        cause
        for cause in one.waited.causes
        if cause.startswith(COPIES_OF) or (not one.said.io and cause in ON_NVME)
    ]


def _stalled(one: Stepping) -> float:
    return one.waited.on(_causes(one))


def _busy(nbytes: float, way: CopyStatus) -> float:
    """Seconds that copies of so many bytes take."""
    return nbytes / way.average_bytes_per_second if way.average_bytes_per_second else 0.0


def _way(there: float, back: float) -> Way:
    if min(there, back) >= ALIKE * max(there, back):
        return "to the device and back"
    return "to the device" if there > back else "from the device"


SPARED = 0.05  # of the device's memory: for a longer batch, and for what others start there


def _remedy(one: Stepping, busy: float) -> str:
    """Fewer bytes; copies that begin earlier; more samples for the same bytes."""
    device = next((tier for tier in one.said.tiers if tier.name == "device"), None)
    larger = "a larger tiering.device_budget"
    more = "a larger micro-batch copies the parameters once for more samples"
    if device is not None and device.available is not None:
        free = int(device.available - SPARED * device.capacity)
        if free < SPARED * device.capacity:
            return f"the device has no memory for {larger}; {more}"
        ranks = max(1, one.said.local_world_size)
        named = as_setting((device.budget + free) * ranks)
        larger = f"{size(free)} of device memory are free: tiering.device_budget {named}"
    does = "keeps more there" if busy >= FULL else "keeps more there, and lets copies begin earlier"
    return f"{larger} {does}; {more}"
