"""Writes past a drive's write cache: sequential writes over a large span until the rate has fallen and is steady.

Consumer drives first write into cells that hold one bit, later into cells that hold three or four bits, at a fraction
of the speed; cloud volumes have credits that run out. A training run writes for days, so the later rate is the one that
matters.

The rate of a shared disk can change by a factor of two within minutes without a cache. So a fall counts only if it is
large, if almost all rates before it are higher than almost all rates after it, and if it lasts.
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
MAX_BYTES = 256 * 10**9
_SHARE_OF_FREE = 0.5  # such caches use up to a third of the free space; other programs may need the rest
_SHARE_OF_DRIVE = 0.25

MIN_DROP = 2.2  # a shared disk that varies by a factor of two must not look like a cache
_FIRST_SECONDS = 1.0  # least duration before a fall
_AFTER_SECONDS = 5.0  # least duration after a fall
# After a fall, the writes end early if the rate is steady for this long, and for as long as before the fall.
_STEADY_SECONDS = 30.0
_STEADY_RATIO = 1.5  # largest ratio of the halves of a steady part
_CHECK_SECONDS = 2.0
_STRETCHES = 20  # parts of each side that are compared; shorter stalls and bursts are part of a rate
_CLEAR_SHARE = 0.9  # of the parts of a side that must be on their side of the middle
_MIB = 1 << 20


def span(directory: Path, backing: Backing, *, sharing: int = 1) -> int:
    """Most bytes to write to a file in ``directory``, if ``sharing`` files are on its drives."""
    bounds = [MAX_BYTES, free_bytes(directory) * _SHARE_OF_FREE]
    sizes = [drive.nbytes for drive in backing.drives if drive.nbytes]
    if sizes:
        bounds.append(sum(sizes) * _SHARE_OF_DRIVE)
    return int(min(bounds)) // sharing // _MIB * _MIB


def announcement(nbytes: int, seconds: float) -> str:
    """The message before a run that writes ``nbytes`` in all."""
    return (
        f"writes at most {format_size(nbytes)} ({nbytes} bytes) in at most {seconds:.0f} s, and stops earlier if the"
        " rate has fallen and is steady; --max-write and --runtime change these limits"
    )


def run(
    load: Load, *, seconds: float = SECONDS, watch: Callable[[Sample, float], None] | None = None
) -> tuple[Row, Sustained]:
    """Write each file of ``load`` once from its start, until the rate is steady after a fall, or for ``seconds``.

    The size of the files limits the bytes; ``span`` computes it. The first complete file ends the writes, because one
    drive less would look like a fall.
    """
    samples: list[Sample] = []
    work_files = load.work_files
    allowed = work_files.max_write
    last_check = 0.0

    def check(sample: Sample, done: float) -> None:
        nonlocal last_check
        samples.append(sample)
        if watch is not None:
            watch(sample, done)
        if sample.at - last_check >= _CHECK_SECONDS:
            last_check = sample.at
            if _is_steady(samples):
                work_files.max_write = 0  # the lanes end; the requests in flight are counted

    try:
        row = load.lay_out(seconds=seconds, watch=check, together=True)
    finally:
        work_files.max_write = allowed
    return row, judge(row)


def judge(row: Row) -> Sustained:
    """The burst and sustained rates, from the samples of an interval of writes."""
    cache_end = find_cache_end(row.samples)
    if cache_end is not None:
        burst, sustained = cache_end.burst, cache_end.sustained
    elif len(row.samples) > 1:
        burst, sustained = _halves(row.samples)
    else:
        burst = sustained = row.rate
    return Sustained(
        burst=burst,
        sustained=sustained,
        cached_bytes=None if cache_end is None else cache_end.cached_bytes,
        written_bytes=row.write.bytes,
    )


def describe(row: Row, sustained: Sustained) -> str:
    """The result as a sentence."""
    wrote = f"{sustained.written_bytes / 1e9:.1f} GB"
    burst, beyond = f"{sustained.burst / 1e9:.2f} GB/s", f"{sustained.sustained / 1e9:.2f} GB/s"
    if sustained.cached_bytes is not None:
        return f"the write cache was full after {sustained.cached_bytes / 1e9:.1f} GB: {burst} before, {beyond} after"
    rates = sorted(_stretches(row.samples))
    slow, fast = (rates[len(rates) // 10], rates[-1 - len(rates) // 10]) if rates else (row.rate, row.rate)
    if fast > MIN_DROP * slow:
        return (
            f"no clear end of a write cache in {wrote}: the rate varied between {slow / 1e9:.2f} and"
            f" {fast / 1e9:.2f} GB/s, as on a shared disk"
        )
    return (
        f"no end of a write cache in {wrote}: {burst} in the first half of the time, {beyond} in the second"
    )


class CacheEnd(NamedTuple):
    """A fall of the rate, with the bytes per second before and after it."""

    cached_bytes: int
    burst: float
    sustained: float
    at: float  # seconds


def find_cache_end(samples: Sequence[Sample]) -> CacheEnd | None:
    """The end of a write cache: from there to the end of ``samples``, the rate is lower by ``MIN_DROP`` or more.

    It is the split into two levels with the least squares of logarithms, because noise is multiplicative. If the rate
    falls again, the last level is the sustained rate.
    """
    split = _split(samples)
    if split is None:
        return None
    before, after = samples[:split], samples[split:]
    start = before[-1].at
    burst, beyond = _rate(before, 0.0), _rate(after, start)
    if burst < MIN_DROP * beyond:
        return None
    middle = math.sqrt(burst * beyond)
    fast = [rate > middle for rate in _stretches(before)]
    slow = [rate < middle for rate in _stretches(after, start)]
    if sum(fast) < _CLEAR_SHARE * len(fast) or sum(slow) < _CLEAR_SHARE * len(slow):
        return None
    later = find_cache_end([sample.model_copy(update={"at": sample.at - start}) for sample in after])
    return CacheEnd(
        cached_bytes=round(burst * start),
        burst=burst,
        sustained=beyond if later is None else later.sustained,
        at=start if later is None else start + later.at,
    )


def _split(samples: Sequence[Sample]) -> int | None:
    """The number of samples before the change; None if there are too few samples."""
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
        remaining = len(logs) - count
        fall = so_far / count - (whole - so_far) / remaining
        weight = fall * abs(fall) * count * remaining
        if weight > best:
            best, place = weight, count
    return place


def _is_steady(samples: Sequence[Sample]) -> bool:
    """Whether the rate has fallen, and then been steady for long enough."""
    cache_end = find_cache_end(samples)
    if cache_end is None:
        return False
    after = [sample for sample in samples if sample.at > cache_end.at]
    if after[-1].at - cache_end.at < max(_STEADY_SECONDS, cache_end.at):
        return False
    early, late = _halves(after, cache_end.at)
    return max(early, late) <= _STEADY_RATIO * min(early, late)


def _rate(samples: Sequence[Sample], start: float) -> float:
    """Bytes per second over ``samples``; the first sample began at ``start``."""
    return moved(samples, start) / (samples[-1].at - start)


def _halves(samples: Sequence[Sample], start: float = 0.0) -> tuple[float, float]:
    half = len(samples) // 2
    return _rate(samples[:half], start), _rate(samples[half:], samples[half - 1].at)


def _stretches(samples: Sequence[Sample], start: float = 0.0) -> list[float]:
    """The rates of equal parts of ``samples``, each of about a second or more."""
    if not samples:
        return []
    count = max(1, min(_STRETCHES, int(samples[-1].at - start)))
    ends = [len(samples) * each // count for each in range(count + 1)]
    return [
        _rate(samples[first:last], samples[first - 1].at if first else start)
        for first, last in itertools.pairwise(ends)
        if last > first
    ]
