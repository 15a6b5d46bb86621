"""Writing past a drive's write cache: where the rate fell, what is no cache, and when writing stops."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.host.drives import Backing, Drive, FileSystem
from tiering.tierbench import sustained
from tiering.tierbench.result import Row, Sample, Traffic
from tiering.tierbench.sustained import MAX_BYTES, announcement, describe, find_cache_end, judge, run, span

GB = 10**9


def samples(rates: Sequence[float], every: float = 0.1) -> list[Sample]:
    return [Sample(at=(count + 1) * every, read=0.0, write=rate) for count, rate in enumerate(rates)]


def noise(count: int, seed: int) -> list[float]:
    """Twofold: of a factor between 0.7 and 1.4, each alone."""
    drawn = random.Random(seed)
    return [2 ** drawn.uniform(-0.5, 0.5) for _ in range(count)]


def swings(count: int, seed: int, low: float, mean: int) -> list[float]:
    """A throttle: 1 or ``low``, for so many samples on average, time and again."""
    drawn = random.Random(seed)
    rates: list[float] = []
    level = 1.0
    while len(rates) < count:
        rates += [level] * max(1, int(drawn.expovariate(1 / mean)))
        level = low if level == 1.0 else 1.0
    return rates[:count]


def window(rates: Sequence[float], every: float = 0.1) -> Row:
    moved = Traffic(bytes=round(sum(rates) * every), ops=1)
    return Row(
        rw="write",
        seconds=max(every, len(rates) * every),
        read=Traffic(),
        write=moved,
        cpu_seconds=0.0,
        worst_second=None,
        samples=tuple(samples(rates, every)),
        paths=(),
    )


@settings(max_examples=30, deadline=None)
@given(
    fall=st.floats(3.0, 30.0),
    before=st.integers(20, 400),
    after=st.integers(60, 400),
    seed=st.integers(0, 10**6),
)
def test_a_cache_is_found_within_a_tenth_of_its_end(fall: float, before: int, after: int, seed: int) -> None:
    rates = [
        each * 3 * GB / (fall if place >= before else 1)
        for place, each in enumerate(noise(before + after, seed))
    ]
    end = find_cache_end(samples(rates))
    assert end is not None
    assert end.cached_bytes == pytest.approx(sum(rates[:before]) * 0.1, rel=0.1)
    assert end.burst == pytest.approx(sum(rates[:before]) / before, rel=0.15)
    assert end.sustained == pytest.approx(sum(rates[before:]) / after, rel=0.15)


def test_a_cache_of_two_levels_is_sustained_at_the_last() -> None:
    rates = [each * GB * level for level in (6, 1, 0.4) for each in noise(200, seed=int(level * 10))]
    end = find_cache_end(samples(rates))
    assert end is not None and end.sustained == pytest.approx(0.4 * GB, rel=0.1)


def test_what_swings_has_no_cache() -> None:
    def taken_for_one(rates: Callable[[int], list[float]]) -> int:
        return sum(
            find_cache_end(samples([GB * each for each in rates(seed)])) is not None for seed in range(40)
        )

    assert taken_for_one(lambda seed: noise(600, seed)) == 0
    assert taken_for_one(lambda seed: swings(600, seed, 1 / 2, mean=150)) == 0
    assert taken_for_one(lambda seed: [*noise(200, seed), *(3 * each for each in noise(200, seed))]) == 0
    # One that came once, and stayed, is what a cache looks like.
    assert taken_for_one(lambda seed: swings(600, seed, 1 / 3, mean=40)) <= 4
    assert taken_for_one(lambda seed: swings(600, seed, 1 / 10, mean=60)) <= 4


def test_an_end_that_is_not_clear_is_told() -> None:
    def text_of(rates: Sequence[float]) -> str:
        row = window(rates)
        return describe(row, judge(row))

    assert text_of([3 * GB] * 100 + [GB] * 300) == (
        "the write cache was full after 30.0 GB: 3.00 GB/s before, 1.00 GB/s after"
    )
    assert text_of([2 * GB] * 400) == (
        "no end of a write cache in 80.0 GB: 2.00 GB/s in the first half of the time, 2.00 GB/s in the second"
    )
    assert text_of(([3 * GB] * 60 + [GB] * 60) * 4).startswith(
        "no clear end of a write cache in 96.0 GB: the rate varied between 1.00 and 3.00 GB/s"
    )
    assert text_of([]).startswith("no end of a write cache in 0.0 GB")  # interrupted at once


class FakeWorkFiles:
    def __init__(self, max_write: int | None) -> None:
        self.max_write = max_write


class FakeLoad:
    """A drive that writes at these rates, until they end or nothing more may be written."""

    def __init__(self, rates: Sequence[float], max_write: int | None = None) -> None:
        self.work_files = FakeWorkFiles(max_write)
        self.rates = rates

    def lay_out(self, *, seconds: float, watch: Callable[[Sample, float], None], together: bool) -> Row:
        assert together  # else a drive whose file is through would look like a fall of the rate
        written: list[float] = []
        for each in samples(self.rates):
            if each.at > seconds or self.work_files.max_write == 0:
                break
            written.append(each.write)
            watch(each, each.at / seconds)
        return window(written)


def test_writing_ends_once_the_rate_is_steady_after_a_fall() -> None:
    load: Any = FakeLoad([3 * GB] * 100 + [GB] * 2900, max_write=10**15)
    shares: list[float] = []
    row, result = run(load, seconds=300, watch=lambda sample, share: shares.append(share))
    assert result.cached_bytes == 30 * GB
    assert (result.burst, result.sustained) == (pytest.approx(3 * GB), pytest.approx(GB))
    assert 40 <= row.seconds <= 43 and len(shares) == len(row.samples)  # 10 s until the fall, and 30 s of it
    assert result.written_bytes == row.write.bytes
    assert load.work_files.max_write == 10**15

    load = FakeLoad([3 * GB] * 100 + [GB, 2 * GB] * 50 + [0.2 * GB] * 2800)
    row, result = run(load, seconds=300)
    # The row is that of the later fall.
    assert 50 <= row.seconds <= 53 and result.sustained == pytest.approx(0.2 * GB, rel=0.01)

    load = FakeLoad([2 * GB] * 3000)
    row, result = run(load, seconds=60)
    assert 59.9 <= row.seconds <= 60.1 and result.cached_bytes is None and load.work_files.max_write is None


def test_bytes_are_bounded_by_the_drive_what_is_free_and_wear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bound(free: int, *drives: Drive, sharing: int = 1) -> int:
        monkeypatch.setattr(sustained, "free_bytes", lambda directory: free)
        return span(tmp_path, Backing(FileSystem("ext4", "disk", "/dev/x", "/", ()), drives), sharing=sharing)

    assert bound(100 << 30) == 50 << 30
    assert bound(100 << 30, sharing=4) == (50 << 30) // 4
    assert bound(100 << 30, Drive("nvme0n1", nbytes=64 << 30)) == 16 << 30
    assert bound(100 << 30, Drive("nvme0n1")) == 50 << 30
    assert MAX_BYTES - (1 << 20) < bound(10 << 40, Drive("nvme0n1", nbytes=12 << 40)) <= MAX_BYTES
    assert "50.00 GiB (53687091200 bytes) in at most 300 s" in announcement(50 << 30, 300)
