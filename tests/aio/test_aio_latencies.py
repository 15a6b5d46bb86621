"""Latencies: C counts each operation in the right bucket, and percentiles are never more than one bucket off."""

from __future__ import annotations

import errno
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.storage.aio import Fault
from tiering.storage.latencies import LatencyHistogram, bucket_start

BLOCK = 65536
TIMES = st.one_of(
    st.integers(0, 100), st.integers(0, 1 << 41), st.integers(0, 40).map(lambda bits: 1 << bits)
)
SHARES = st.one_of(st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.floats(0, 1))


def octaves(histogram: LatencyHistogram) -> list[int]:
    """Its counts by powers of two, as the statistics have them."""
    counted = [0] * 40
    for bucket, count in enumerate(histogram.counts):
        counted[max(0, bucket_start(bucket).bit_length() - 1)] += count
    return counted


def test_buckets_are_narrow_and_leave_no_gap() -> None:
    starts = [bucket_start(bucket) for bucket in range(1152)]
    assert starts[:66] == [*range(65), 66]
    assert all(0 < end - start <= max(1, start / 32) for start, end in pairwise(starts))
    assert starts[-1] < 1 << 40 == bucket_start(1152)


@given(times=st.lists(TIMES, min_size=1), share=SHARES)
def test_a_percentile_is_at_most_a_bucket_too_long(times: list[int], share: float) -> None:
    exact = sorted(times)[max(1, math.ceil(share * len(times))) - 1]
    histogram = LatencyHistogram.of(*times)
    reported = round(histogram.percentile(share) * 1e9)
    assert exact <= reported <= max(times)
    if exact < 1 << 40:
        assert reported < exact + max(1, exact / 32)
    assert histogram.percentile(1.0) == max(times) / 1e9
    assert histogram.percentiles(share, 1.0) == [histogram.percentile(share), max(times) / 1e9]
    assert histogram.total == len(times)


@given(before=st.lists(TIMES), after=st.lists(TIMES))
def test_histograms_add_and_subtract(before: list[int], after: list[int]) -> None:
    first, second = LatencyHistogram.of(*before), LatencyHistogram.of(*after)
    both = first + second
    assert both == LatencyHistogram.of(*before, *after)
    between = both - first
    assert between.counts == second.counts
    longest = max(after, default=0)
    assert longest <= between.max_ns <= both.max_ns
    if longest < 1 << 40:
        assert between.max_ns <= longest + longest // 32
    if longest >= max(before, default=0):
        assert between == second  # then it is known exactly


def test_what_has_no_percentile_is_refused() -> None:
    some = LatencyHistogram.of(5, 7)
    for share in (-0.1, 1.1, math.nan, 99):
        with pytest.raises(ValueError, match="invalid percentile"):
            some.percentile(share)
    with pytest.raises(ValueError, match="no operations"):
        LatencyHistogram.of().percentile(0.5)
    with pytest.raises(ValueError, match="earlier snapshot"):
        LatencyHistogram.of(5) - some


def test_late_operations_lie_where_they_must(open_context: Any, swap_file: Any, memory: Any) -> None:
    """Ten reads are as quick as they are, nine late, one later still."""
    context = open_context(Fault("read", first=20, delay=0.06), Fault("read", first=11, count=9, delay=0.01))
    file = context.add_file(swap_file(BLOCK), direct=True, name="swap")
    for _ in range(10):
        context.read(file, memory(4096), 0, 4096).wait()
    quick = context.latencies(file, "read")
    for _ in range(10):
        context.read(file, memory(4096), 0, 4096).wait()
    context.close()
    both = context.latencies(file, "read")  # statistics stay readable
    late = both - quick
    assert (quick.total, late.total, both.total) == (10, 10, 20)
    assert min(late.percentile(0.1), both.percentile(0.55)) >= 0.01
    assert late.percentile(1) == both.percentile(1) == both.max_ns / 1e9 >= 0.06
    assert context.latencies(file, "write") == context.latencies(file, "flush") == LatencyHistogram.of()


def test_c_and_python_agree_on_the_buckets(open_context: Any, swap_file: Any, memory: Any) -> None:
    """Of a file with one operation the only bucket used is that of the longest; octaves are sums of them."""
    context = open_context(*(Fault("any", file=index, delay=2**index * 1e-6) for index in range(0, 16, 2)))
    for index in range(16):
        file = context.add_file(swap_file(BLOCK), direct=True, name=str(index))
        context.write(file, memory(4096), 0, 4096).wait()
        counted = context.latencies(file, "write")
        assert counted == LatencyHistogram.of(counted.max_ns)
        assert context.stats()[index].write.latency_ns == counted.max_ns > 0
    context.write(0, memory(4 * BLOCK), 0, 4 * BLOCK).wait()
    context.flush(0).wait()
    stats = context.stats()[0]
    for kind in ("read", "write", "flush"):
        assert octaves(context.latencies(0, kind)) == list(getattr(stats, kind).latency)
    assert (sum(stats.write.latency), sum(stats.flush.latency)) == (5, 1)


def test_failures_have_no_latency_and_unknown_files_no_histogram(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    context = open_context(Fault("write", error=errno.EIO))
    file = context.add_file(swap_file(), direct=True, name="swap")
    failure(context.write(file, memory(4096), 0, 4096).wait)
    assert context.latencies(file, "write").total == 0
    with pytest.raises(ValueError, match="no such file"):
        context.latencies(file + 1, "write")
