"""Writing past a drive's write cache: sequential writes over a large span until the rate has fallen and stays there.

Consumer drives take what comes first in cells that hold one bit each, later in cells that hold three or four, and with
a fraction of the speed; cloud volumes have credits that run out. A training run writes for days, so the rate beyond
is the one that counts.

Shared disks swing twofold within minutes, which is no cache. So a fall counts only if it is large, if nearly all
before it was faster than nearly all after it, and if it lasts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tiering.config.fields import format_size
from tiering.host.drives import Backing
from tiering.storage.swap_file import free_bytes
from tiering.tierbench.result import Row, Sample, Sustained, moved

if TYPE_CHECKING:
    from tiering.tierbench.load.windows import Load

SECONDS = 300.0
# More than the write cache of a drive of 2 TB holds; about 0.02 % of the drive's endurance.
MOST_BYTES = 256 * 10**9
_SHARE_OF_FREE = 0.5  # such caches take up to a third of what is free, and others may need the rest
_SHARE_OF_DRIVE = 0.25

LEAST_DROP = 2.2  # a shared disk that swings twofold must not look like a cache
_FIRST_SECONDS = 1.0  # that a cache must last
_AFTER_SECONDS = 5.0  # that a fall must last
_STEADY_SECONDS = 30.0  # after a fall, and as long as before it, until writing ends early
_STEADY_RATIO = 1.5  # that halves of it may differ by
_LOOK_SECONDS = 2.0
_STRETCHES = 20  # each side is looked at in: stalls and bursts shorter than those are part of a rate
_ONE_SIDED = 0.9  # of the stretches of a side must be on their side of the middle
_MIB = 1 << 20


def span(directory: Path, backing: Backing, *, sharing: int = 1) -> int:
    """Bytes to write in ``directory`` at most, where ``sharing`` files of directories and jobs are on its drives."""
    bounds = [MOST_BYTES, free_bytes(directory) * _SHARE_OF_FREE]
    sizes = [drive.nbytes for drive in backing.drives if drive.nbytes]
    if sizes:
        bounds.append(sum(sizes) * _SHARE_OF_DRIVE)
    return int(min(bounds)) // sharing // _MIB * _MIB


def announcement(nbytes: int, seconds: float) -> str:
    """What is about to happen, for ``nbytes`` in all."""
    return (
        f"writes at most {format_size(nbytes)} ({nbytes} bytes) in at most {seconds:.0f} s, and less once the rate has"
        " fallen and is steady; --max-write and --runtime set other bounds"
    )


def run(
    load: Load, *, seconds: float = SECONDS, watch: Callable[[Sample, float], None] | None = None
) -> tuple[Row, Sustained]:
    """Write each file of ``load`` once from its start, until the rate is steady after a fall, or ``seconds`` are over.

    Its files bound the bytes: ``span`` says how large they should be. The first that is through ends it: one drive less
    at work would look like a fall.
    """
    seen: list[Sample] = []
    ground = load.ground
    allowed = ground.max_write
    looked = 0.0

    def look(sample: Sample, done: float) -> None:
        nonlocal looked
        seen.append(sample)
        if watch is not None:
            watch(sample, done)
        if sample.at - looked >= _LOOK_SECONDS:
            looked = sample.at
            if _settled(seen):
                ground.max_write = 0  # the lanes end, and what they have begun is counted

    try:
        row = load.lay_out(seconds=seconds, watch=look, together=True)
    finally:
        ground.max_write = allowed
    return row, judge(row)


def judge(row: Row) -> Sustained:
    """What the samples of a window of writes say."""
    found = cliff(row.samples)
    if found is not None:
        burst, sustained = found.burst, found.sustained
    elif len(row.samples) > 1:
        burst, sustained = _halves(row.samples)
    else:
        burst = sustained = row.rate
    return Sustained(
        burst=burst,
        sustained=sustained,
        cached_bytes=None if found is None else found.cached_bytes,
        written_bytes=row.write.bytes,
    )


def words(row: Row, sustained: Sustained) -> str:
    """What was found, in a sentence."""
    wrote = f"{sustained.written_bytes / 1e9:.1f} GB"
    burst, beyond = f"{sustained.burst / 1e9:.2f} GB/s", f"{sustained.sustained / 1e9:.2f} GB/s"
    if sustained.cached_bytes is not None:
        return f"the write cache ended after {sustained.cached_bytes / 1e9:.1f} GB: {burst} until then, {beyond} beyond"
    rates = sorted(_stretches(row.samples))
    slow, fast = (rates[len(rates) // 10], rates[-1 - len(rates) // 10]) if rates else (row.rate, row.rate)
    if fast > LEAST_DROP * slow:
        return (
            f"no clear end of a write cache in {wrote}: the rate came and went between {slow / 1e9:.2f} and"
            f" {fast / 1e9:.2f} GB/s, as on a disk that others use too"
        )
    return (
        f"no end of a write cache in {wrote}: {burst} in the first half of the time, {beyond} in the second"
    )


class Cliff(NamedTuple):
    """Where the rate fell, and what it was on both sides; bytes per second."""

    cached_bytes: int
    burst: float
    sustained: float
    at: float  # seconds


def cliff(samples: Sequence[Sample]) -> Cliff | None:
    """The end of a write cache: after it all is slower, ``LEAST_DROP`` times, until the end of ``samples``.

    Found as the split into two levels that leaves the least squares, of logarithms, as noise multiplies. Where the
    rate falls again the last level is what is sustained.
    """
    split = _split(samples)
    if split is None:
        return None
    before, after = samples[:split], samples[split:]
    start = before[-1].at
    burst, beyond = _rate(before, 0.0), _rate(after, start)
    if burst < LEAST_DROP * beyond:
        return None
    middle = math.sqrt(burst * beyond)
    fast = [rate > middle for rate in _stretches(before)]
    slow = [rate < middle for rate in _stretches(after, start)]
    if sum(fast) < _ONE_SIDED * len(fast) or sum(slow) < _ONE_SIDED * len(slow):
        return None
    later = cliff([sample.model_copy(update={"at": sample.at - start}) for sample in after])
    return Cliff(
        cached_bytes=round(burst * start),
        burst=burst,
        sustained=beyond if later is None else later.sustained,
        at=start if later is None else start + later.at,
    )


def _split(samples: Sequence[Sample]) -> int | None:
    """How many samples are before the change; None if there are too few to tell."""
    if not samples:
        return None
    total = samples[-1].at
    mean = _rate(samples, 0.0)
    logs = [math.log(max(sample.rate, 0.01 * mean, 1.0)) for sample in samples]  # a stall has no logarithm
    whole, so_far, best, place = sum(logs), 0.0, 0.0, None
    for count, (sample, each) in enumerate(zip(samples, logs, strict=True), start=1):
        so_far += each
        if sample.at < _FIRST_SECONDS or total - sample.at < _AFTER_SECONDS:
            continue
        rest = len(logs) - count
        fall = so_far / count - (whole - so_far) / rest
        weight = fall * abs(fall) * count * rest
        if weight > best:
            best, place = weight, count
    return place


def _settled(samples: Sequence[Sample]) -> bool:
    """Whether the rate has fallen, and then been steady for long enough."""
    found = cliff(samples)
    if found is None:
        return False
    after = [sample for sample in samples if sample.at > found.at]
    if after[-1].at - found.at < max(_STEADY_SECONDS, found.at):
        return False
    early, late = _halves(after, found.at)
    return max(early, late) <= _STEADY_RATIO * min(early, late)


def _rate(samples: Sequence[Sample], start: float) -> float:
    """Bytes per second over ``samples``, the first of which began at ``start``."""
    return moved(samples, start) / (samples[-1].at - start)


def _halves(samples: Sequence[Sample], start: float = 0.0) -> tuple[float, float]:
    half = len(samples) // 2
    return _rate(samples[:half], start), _rate(samples[half:], samples[half - 1].at)


def _stretches(samples: Sequence[Sample], start: float = 0.0) -> list[float]:
    """The rates of equal parts of ``samples``, of at least a second or so where there is that much."""
    if not samples:
        return []
    count = max(1, min(_STRETCHES, int(samples[-1].at - start)))
    ends = [len(samples) * each // count for each in range(count + 1)]
    return [
        _rate(samples[first:last], samples[first - 1].at if first else start)
        for first, last in itertools.pairwise(ends)
        if last > first
    ]
