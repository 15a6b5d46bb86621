"""Steps that wait for copies over the link of a device with memory of its own, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median
from typing import Literal

from service.advice.finding import Advice, warning
from service.advice.larger_budget import as_setting
from service.advice.stalls import ALIKE, BOUND, ON_NVME, STALLED, TOLD, Stepping, stepping
from service.formatting import listed, moved, rate, seconds, share, size
from service.recent_steps import steady
from service.view import RunView
from tiering.telemetry import COPIES_OF, CopyStatus

SLOW = 0.7  # of what was measured: copies share the memory of the host with others, and small ones are slower
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
    link = most.said.link
    busy = _busy(there, link.h2d), _busy(back, link.d2h)
    measured = link.measured_bytes_per_second
    yield warning(
        "link-bound",
        f"the step {'is bound by' if stalled >= BOUND else 'waits for'} copies {_way(*busy)}:"
        f" {share(stalled)} of its {seconds(took)} is stall ({listed(causes)});"
        f" it copies {moved(there)} to the device at {rate(link.h2d.average_bytes_per_second)}, which is"
        f" {share(min(1.0, busy[0] / took))} of the step, and {moved(back)} from it at"
        f" {rate(link.d2h.average_bytes_per_second)}, {share(min(1.0, busy[1] / took))}"
        + ("" if measured is None else f"; {rate(measured)} each way were measured"),
        _remedy(most, busy, took),
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


def _remedy(one: Stepping, busy: tuple[float, float], took: float) -> str:
    """A link as fast as it was; fewer bytes; copies that begin earlier; more samples for the same bytes."""
    assert one.said.link is not None
    way = one.said.link.h2d if busy[0] >= busy[1] else one.said.link.d2h
    remedies = []
    if way.average_bytes_per_second < SLOW * (one.said.link.measured_bytes_per_second or 0):
        remedies.append("see what else copies to or from GPUs, or fills the host's memory bandwidth")
    device = next((tier for tier in one.said.tiers if tier.name == "device"), None)
    larger = "a larger tiering.device_budget"
    does = "keeps more there" + ("" if max(busy) >= FULL * took else ", and lets copies begin earlier")
    if device is None or device.available is None:
        remedies.append(f"{larger} {does}")
    elif (free := int(device.available - SPARED * device.capacity)) < SPARED * device.capacity:
        remedies.append(f"the device has no memory for {larger}")
    else:
        named = as_setting((device.budget + free) * max(1, one.said.local_world_size))
        remedies.append(f"{size(free)} of device memory are free: tiering.device_budget {named} {does}")
    remedies.append("a larger micro-batch copies the parameters once for more samples")
    return "; ".join(remedies)
