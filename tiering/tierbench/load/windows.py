"""The load: timed intervals of reads, writes or both over private files in each directory.

It uses the engine's I/O path: unnamed files with O_DIRECT (``SwapFile``), one I/O context per job (``AioContext``), and
memory registered with the kernel. The C library counts a block when it completes. An interval lasts from the first
submission to the last completion.

A job has a lane, and a Python thread, for each directory. A lane keeps several requests of several blocks queued, so
that the C library maintains the depth and Python has little to do; random blocks go in scattered requests. At the end
of an interval, requests that have not started are canceled, so that a slow disk does not extend it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import TracebackType
from typing import NamedTuple, Self

from tiering._text import counted
from tiering.errors import ConfigError
from tiering.storage.aio import AioContext
from tiering.storage.latencies import LatencyHistogram
from tiering.tierbench.interrupts import Interrupts
from tiering.tierbench.load.block_mover import Count, Lane
from tiering.tierbench.load.countdown import Countdown
from tiering.tierbench.load.work_files import WorkFiles
from tiering.tierbench.result import Engine, Latencies, PathRow, Row, Sample, Settings, Traffic
from tiering.tierbench.words import ReadWrite, writes

__all__ = ["SAMPLE_SECONDS", "Load", "Watch", "WorkFiles", "worst_second"]

SAMPLE_SECONDS = 0.1
_MIN_SAMPLE_SECONDS = SAMPLE_SECONDS / 2  # a shorter rest of an interval gets no sample of its own

Watch = Callable[[Sample, float], None]
"""Called with each sample, and with the elapsed part of the interval, from 0 to 1."""


class _LoadSnapshot(NamedTuple):
    """A time, the process's CPU seconds, and the counters of each lane's reads and writes."""

    at: float
    cpu: float
    counts: list[tuple[Count, Count]]


class _TransferMark(NamedTuple):
    """The bytes transferred until a time of an interval."""

    at: float
    read: int
    write: int


class Load:
    """I/O contexts over ``work_files`` with ``settings``. It runs one interval after another.

    Raises SwapError if a named engine cannot start. After Ctrl-C an interval returns a row that is not complete.
    """

    def __init__(self, work_files: WorkFiles, settings: Settings) -> None:
        self.work_files = work_files
        self.settings = settings
        self._contexts: list[AioContext] = []
        self._lanes: list[Lane] = []
        try:
            for job, files in enumerate(work_files.files[: settings.numjobs]):
                aio = AioContext(
                    engine=settings.ioengine,
                    block_size=settings.bs,
                    queue_depth=settings.iodepth,
                    registered=settings.registered,
                    verify=settings.verify,
                )
                self._contexts.append(aio)
                for place, file in enumerate(files):
                    index = aio.add_file(file.fd, direct=file.direct, name=str(file.directory))
                    self._lanes.append(Lane(work_files, settings, aio, index, job=job, place=place))
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> Engine:
        """The engine in use. Its flags are final after the first interval, since files are registered on first use."""
        info = self._contexts[0].info
        return Engine(ioengine=info.engine, flags=info.flags, passed_over=info.passed_over)

    def lay_out(
        self, *, seconds: float | None = None, watch: Watch | None = None, together: bool = False
    ) -> Row:
        """Write each file once: the first write of a block costs more, and a read of an unwritten block costs nothing.

        It ends after ``seconds``; later intervals use the written part. With ``together`` it also ends when one file is
        complete, because from then on not all drives are busy.
        """
        row = self._run_interval("write", seconds, 0.0, watch, once=True, together=together)
        for lane in self._lanes:
            self.work_files.written_once[lane.job][lane.place] = lane.reached
        return row

    def run(self, rw: ReadWrite, *, seconds: float, ramp: float = 0.0, watch: Watch | None = None) -> Row:
        """Run an interval of at least ``seconds``, after ``ramp`` seconds that do not count."""
        return self._run_interval(rw, seconds, ramp, watch, once=False)

    def check(self, *, watch: Watch | None = None) -> Row:
        """Read all written bytes once. With ``verify`` they are compared; raises SwapError (EBADMSG) if they differ."""
        return self._run_interval("read", None, 0.0, watch, once=True)

    def moved(self) -> list[tuple[int, int]]:
        """Bytes read and written so far, by directory."""
        jobs = [aio.moved() for aio in self._contexts]
        return [
            (sum(read for read, _ in files), sum(written for _, written in files))
            for files in zip(*jobs, strict=True)
        ]

    def close(self) -> None:
        """End the threads of the C library."""
        for aio in self._contexts:
            aio.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run_interval(
        self,
        rw: ReadWrite,
        seconds: float | None,
        ramp: float,
        watch: Watch | None,
        *,
        once: bool,
        together: bool = False,
    ) -> Row:
        crew = _LaneThreads(self._lanes, rw, once=once, together=together)
        self.work_files.full = False
        whole = start = self._snapshot()
        end: _LoadSnapshot | None = None
        marks = [_TransferMark(0.0, *self._total_moved())]
        with Interrupts() as interrupts:
            with crew:
                if ramp:
                    for _ in self._ticks(crew, start.at, start.at + ramp, interrupts):
                        pass
                    start = self._snapshot()
                    marks = [_TransferMark(0.0, *self._total_moved())]
                until = math.inf if seconds is None else start.at + seconds
                for at in self._ticks(crew, start.at, until, interrupts):
                    marks.append(_TransferMark(at, *self._total_moved()))
                    if watch is not None:
                        share = self._reached() if seconds is None else min(1.0, at / seconds)
                        watch(_sample(*marks[-2:]), share)
                # A very short interval lasts until a block is done: its end cancels the others.
                at_work = not once
                while at_work and not interrupts.received and self._total_moved() == marks[0][1:]:
                    at_work = crew.sleep_until(time.monotonic() + _MIN_SAMPLE_SECONDS)
                # The interval ends before its queues drain: after a ramp it also began with full queues, and with
                # ``together`` one queue is already empty.
                if (ramp or together) and self.work_files.direct:
                    end = self._snapshot()
            error = next((lane.error for lane in self._lanes if lane.error is not None), None)
            # Buffered writes are on the drive only after a flush.
            if error is None and writes(rw) and not self.work_files.direct:
                for lane in self._lanes:
                    lane.flush()
        drained = self._snapshot(drained=True)
        end = end or drained
        duration = end.at - start.at
        if duration - marks[-1].at > _MIN_SAMPLE_SECONDS:  # the last part is long enough for a sample
            marks.append(_TransferMark(duration, *self._total_moved()))
        moved = _differences(drained.counts, whole.counts)
        self.work_files.count(sum(read.bytes for read, _ in moved), sum(write.bytes for _, write in moved))
        if error is not None:
            raise error
        return self._row(
            rw,
            _differences(end.counts, start.counts),
            duration,
            end.cpu - start.cpu,
            [_sample(*pair) for pair in pairwise(marks)],
            complete=not interrupts.received,
        )

    def _snapshot(self, *, drained: bool = False) -> _LoadSnapshot:
        """The counters change until the load is ``drained``; then their reading is not part of the interval."""
        clocks = time.monotonic(), time.process_time()
        stats = {aio: aio.stats() for aio in self._contexts}
        counts = [lane.counts(stats[lane.aio][lane.file]) for lane in self._lanes]
        return _LoadSnapshot(*(clocks if drained else (time.monotonic(), time.process_time())), counts)

    def _ticks(
        self, crew: _LaneThreads, began: float, until: float, interrupts: Interrupts
    ) -> Iterator[float]:
        """Wait for each time to take a sample, and for the end of the interval; yields seconds since ``began``."""
        at, at_work = began, True
        while at_work and at < until and not interrupts.received:
            following = at + SAMPLE_SECONDS
            at_work = crew.sleep_until(following if until - following > _MIN_SAMPLE_SECONDS else until)
            before, at = at, time.monotonic()
            if at_work or at - before > _MIN_SAMPLE_SECONDS or before == began:
                yield at - began

    def _reached(self) -> float:
        """The part of all files that the current pass has covered, from 0 to 1."""
        return sum(lane.reached for lane in self._lanes) / (self.work_files.size * len(self._lanes))

    def _total_moved(self) -> tuple[int, int]:
        """Bytes read and written so far."""
        moved = self.moved()
        return sum(read for read, _ in moved), sum(written for _, written in moved)

    def _row(
        self,
        rw: ReadWrite,
        counts: list[tuple[Count, Count]],
        seconds: float,
        cpu: float,
        samples: list[Sample],
        complete: bool,
    ) -> Row:
        by_path = [
            [each for lane, each in zip(self._lanes, counts, strict=True) if lane.place == place]
            for place in range(len(self.work_files.directories))
        ]
        return Row(
            rw=rw,
            seconds=seconds,
            read=_traffic([read for read, _ in counts]),
            write=_traffic([write for _, write in counts]),
            cpu_seconds=cpu,
            worst_second=worst_second(samples),
            samples=tuple(samples),
            paths=tuple(
                PathRow(
                    directory=str(directory),
                    read=_traffic([read for read, _ in lanes]),
                    write=_traffic([write for _, write in lanes]),
                )
                for directory, lanes in zip(self.work_files.directories, by_path, strict=True)
            ),
            complete=complete,
        )


class _LaneThreads:
    """The threads of all lanes in an interval, until the last ends, or with ``together`` the first."""

    def __init__(self, lanes: Sequence[Lane], rw: ReadWrite, *, once: bool, together: bool) -> None:
        # To be canceled at the end. A pass completes its requests, however slow the drive is.
        self._lanes = () if once else tuple(lanes)
        self._stop = threading.Event()
        self._running = Countdown(1 if together else len(lanes))
        self._threads = [
            threading.Thread(
                target=lane.work,
                args=(lane.block_orders(rw, once=once), self._stop, self._running, once),
                daemon=True,
            )
            for lane in lanes
        ]

    def sleep_until(self, deadline: float) -> bool:
        """Wait until ``deadline`` and return True, or until the threads have finished and return False."""
        return not self._running.wait_until(deadline)

    def __enter__(self) -> Self:
        for number, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError as error:
                thread_count = len(self._threads)
                del self._threads[number:]
                self.__exit__(None, None, None)
                raise ConfigError(
                    f"only {number} of {counted(thread_count, 'thread')} could start, one for each job and directory"
                    f" ({error}): raise the limit (ulimit -u, the cgroup's pids.max), or lower --numjobs or --iodepth"
                ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for lane in self._lanes:
            lane.cancel()
        for thread in self._threads:
            thread.join()


def worst_second(samples: Sequence[Sample]) -> float | None:
    """The lowest bytes per second over any second; None if the samples span less than a second."""
    moved, at = [0.0], [0.0]
    for sample in samples:
        moved.append(moved[-1] + sample.rate * (sample.at - at[-1]))
        at.append(sample.at)
    worst, first = None, 0
    for last in range(1, len(at)):
        while at[last] - at[first + 1] >= 1.0:
            first += 1
        if at[last] - at[first] >= 1.0:
            rate = (moved[last] - moved[first]) / (at[last] - at[first])
            worst = rate if worst is None else min(worst, rate)
    return worst


def _sample(before: _TransferMark, after: _TransferMark) -> Sample:
    took = after.at - before.at
    return Sample(
        at=after.at, read=(after.read - before.read) / took, write=(after.write - before.write) / took
    )


def _differences(
    after: list[tuple[Count, Count]], before: list[tuple[Count, Count]]
) -> list[tuple[Count, Count]]:
    def between(late: Count, early: Count) -> Count:
        return Count(late.bytes - early.bytes, late.ops - early.ops, late.latency - early.latency)

    return [
        (between(late[0], early[0]), between(late[1], early[1]))
        for late, early in zip(after, before, strict=True)
    ]


def _traffic(counts: Sequence[Count]) -> Traffic:
    histogram = LatencyHistogram.of()
    for count in counts:
        histogram = histogram + count.latency
    ops, latency = sum(count.ops for count in counts), None
    if ops and histogram.total:
        p50, p95, p99, p999 = (histogram.percentile(share) for share in (0.5, 0.95, 0.99, 0.999))
        latency = Latencies(p50=p50, p95=p95, p99=p99, p999=p999, max=histogram.max_ns / 1e9)
    return Traffic(bytes=sum(count.bytes for count in counts), ops=ops, latency=latency)
