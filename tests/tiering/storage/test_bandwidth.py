"""The measured bandwidth of paths: from few large requests, within bounds, and with nothing left in flight."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tiering.errors import SwapError
from tiering.storage import bandwidth
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import PAGE

MIB = 1 << 20


def test_measuring_stays_within_the_span_and_its_bounds(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "MAX_BYTES", MIB)  # any disk gets there before the time is up
    with AioContext(engine=engine) as aio:
        spans = [3 * MIB + PAGE, 5 * PAGE]
        files = []
        for number, span in enumerate(spans):
            fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
            os.ftruncate(fd, span)
            files.append((aio.add_file(fd, direct=True, name=str(number)), span, fd))
        rates = bandwidth.measure(aio, [(file, span) for file, span, _ in files])
        assert all(rate > 0 for rate in rates)
        for (_, span, fd), stats in zip(files, aio.stats(), strict=True):
            assert os.fstat(fd).st_size == span
            assert 0 < stats.read.bytes < MIB + span, "more than the block that reaches beyond"
            assert 0 < stats.write.bytes < 2 * (MIB + span)
            assert stats.read.in_flight == stats.write.in_flight == 0
    for _, _, fd in files:
        os.close(fd)


@pytest.mark.parametrize("first", [1, 2, 30, 100])
def test_measuring_that_fails_has_nothing_in_flight_any_more(
    engine: str, tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are closed next: what is still under way would go to whatever gets their numbers."""
    monkeypatch.setattr(bandwidth, "SECONDS", 10.0)  # the failure ends it, however busy the machine is
    fault = FaultPlan((Fault("write", first=first, count=3, error=errno.EIO), Fault(count=0, delay=0.002)))
    with AioContext(engine=engine, block_size=64 << 10, fault=fault) as aio:
        fds = [os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600) for _ in range(2)]
        files = [(aio.add_file(fd, direct=True, name="x"), 4 * MIB) for fd in fds]
        with pytest.raises(SwapError, match="EIO"):
            bandwidth.measure(aio, files)
        assert [stats.write.in_flight for stats in aio.stats()] == [0, 0]
    for fd in fds:
        os.close(fd)


def test_python_submits_few_large_requests(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C divides them into blocks: so Python does not limit what a fast path reaches."""
    monkeypatch.setattr(bandwidth, "MAX_BYTES", 64 * MIB)
    monkeypatch.setattr(bandwidth, "SECONDS", 60.0)  # memory gets to these bytes before the time is up
    sizes: dict[str, list[int]] = {"read": [], "write": []}

    class Counted(AioContext):
        def prepare(self, kind: Any, file: int, buffer: Any, offset: int, nbytes: int, **options: Any) -> Any:
            sizes[kind].append(nbytes)
            return super().prepare(kind, file, buffer, offset, nbytes, **options)

    fd = os.memfd_create("path")
    with Counted(engine=engine) as aio:
        bandwidth.measure(aio, [(aio.add_file(fd, direct=False, name="x"), 64 * MIB)])
        (stats,) = aio.stats()
    os.close(fd)
    # They double, up to what may be in flight, and the last one may be cancelled.
    assert sizes["read"][:3] == [256 << 10] * 3 and 4 * MIB <= max(sizes["read"]) <= 32 * MIB
    assert stats.read.ops > 2 * len(sizes["read"]) and len(sizes["read"]) < 40
    assert 16 * MIB < stats.read.bytes <= sum(sizes["read"])


def test_with_checksums_little_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has room for the checksums of 64 MiB. All pages that are read are as they were written."""
    monkeypatch.setattr(bandwidth, "MAX_CHECKSUMMED_BYTES", MIB)
    with AioContext(verify=True) as aio:
        assert bandwidth.max_bytes(aio) == MIB
        spans, files = [8 * MIB, 8 * MIB, 5 * PAGE], []
        for span in spans:
            fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
            files.append((aio.add_file(fd, direct=True, name="x"), span, fd))
        bandwidth.measure(aio, [(file, span) for file, span, _ in files])
        assert all(os.fstat(fd).st_size <= MIB for _, _, fd in files)
    for _, _, fd in files:
        os.close(fd)


def test_absurd_ratios_are_cut_off() -> None:
    assert bandwidth.weights([6400, 3200, 101, 99, 0]) == [6400, 3200, 101, 100, 100]
    assert bandwidth.weights([0, 0]) == [1, 1]
    assert bandwidth.weights([]) == []
