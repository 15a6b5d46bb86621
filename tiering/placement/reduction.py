"""The device room in which ranks reduce their gradients: buckets, and what waits for them. Pure."""

from __future__ import annotations

from tiering.placement.plan import ReductionRoom
from tiering.placement.workload import Workload

# Elements of gradients that ranks exchange at once: with fewer, latency costs more than the room is worth.
GOOD_BUCKET = 8 << 20
SMALLEST_BUCKET = 1 << 20


def reduction_within(load: Workload, room: int, least_room: int) -> ReductionRoom:
    """Device room for the reduction in ``room`` bytes, beside parameters that are fetched ahead.

    Buckets of GOOD_BUCKET elements are worth more than these: they may take ``least_room``.
    """
    buckets = _buckets(load)
    choice = _reduction(load, buckets[0], ahead=1)
    if choice.nbytes <= room:
        return choice
    for bucket in buckets:
        choice = _reduction(load, bucket)
        if choice.nbytes <= (least_room if bucket <= GOOD_BUCKET else room):
            break
    return choice


def least_reduction(load: Workload) -> ReductionRoom:
    """The least device room for the reduction."""
    return _reduction(load, _buckets(load)[-1])


def _reduction(load: Workload, bucket: int, *, ahead: int = 0) -> ReductionRoom:
    """Device room for the reduction of gradients: the minimum, plus room for ``ahead`` more groups that are not open.

    Open groups fill their send buffers until the end of backward. Meanwhile one other group fills its buffer while the
    previous one is reduced, in parts of ``bucket`` elements. A rank sends zeros for parameters without gradients, which
    need the same room.
    """
    passing = [group for group, _ in load.passing]
    last = max((load.exchanged_bytes(group, bucket) for group, _ in load.opened), default=0)
    one = max((load.exchanged_bytes(group, bucket, zeros=True) for group in passing), default=0)
    further = max((load.exchanged_bytes(group, bucket) for group in passing), default=0)
    return ReductionRoom(
        opened=sum(count * load.collected_bytes(group) for group, count in load.opened),
        collected=(1 + ahead) * max(map(load.collected_bytes, passing), default=0),
        exchanged=max(last, one) + ahead * further,
        bucket=bucket,
    )


def _buckets(load: Workload) -> list[int]:
    """The elements that ranks may exchange at once: those of the configuration, and less, as far as it is worth it."""
    buckets = [load.reduce_bucket]
    while buckets[-1] // 2 >= SMALLEST_BUCKET:
        buckets.append(buckets[-1] // 2)
    return buckets
