"""The load: private files in each directory, and windows of reads, writes or both over them.

Everything goes the engine's way: nameless files past the page cache (``SwapFile``), one I/O context per job
(``AioContext``), memory registered with the kernel. What is counted, C has counted when a block was over, and when is
taken from the first submission to the last completion.

A job has a lane, and a thread of Python, for each directory. A lane keeps some requests of several blocks queued, so
that the depth is C's to keep and Python has little to do; random blocks go in requests of pieces. At the end of a
window what was not begun is taken back, so a slow disk is not waited for.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import TracebackType
from typing import NamedTuple, Self

from tiering.errors import ConfigError
from tiering.storage.aio import AioContext
from tiering.storage.latencies import LatencyHistogram
from tiering.text import counted
from tiering.tierbench.interrupts import Interrupts
from tiering.tierbench.load.block_mover import Count, Lane
from tiering.tierbench.load.work_files import Ground
from tiering.tierbench.result import Engine, Latencies, PathRow, Row, Sample, Settings, Traffic
from tiering.tierbench.words import ReadWrite, writes

__all__ = ["SAMPLE_SECONDS", "Ground", "Load", "Watch", "worst_second"]

SAMPLE_SECONDS = 0.1
_SHORTEST = SAMPLE_SECONDS / 2  # stretch that is worth a sample

Watch = Callable[[Sample, float], None]
"""Told of each sample, and of the share of the window that is over."""


class _Moment(NamedTuple):
    """A time, the process's CPU seconds until then, and by lane what had been read and written."""

    at: float
    cpu: float
    counts: list[tuple[Count, Count]]


class _Mark(NamedTuple):
    """What had been moved at a time of a window."""

    at: float
    read: int
    write: int


class Load:
    """I/O contexts over ``ground`` as ``settings`` say; windows are run in it one after the other.

    Raises SwapError where a named engine cannot start. After Ctrl-C a window returns what it has, marked as not
    complete.
    """

    def __init__(self, ground: Ground, settings: Settings) -> None:
        self.ground = ground
        self.settings = settings
        self._contexts: list[AioContext] = []
        self._lanes: list[Lane] = []
        try:
            for job, files in enumerate(ground.files[: settings.numjobs]):
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
                    self._lanes.append(Lane(ground, settings, aio, index, job=job, place=place))
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> Engine:
        """What is really in use; files are registered when they are first used."""
        info = self._contexts[0].info
        return Engine(ioengine=info.engine, flags=info.flags, passed_over=info.passed_over)

    def lay_out(
        self, *, seconds: float | None = None, watch: Watch | None = None, together: bool = False
    ) -> Row:
        """Write each file once from its start: first writes cost more, and what was never written costs a read nothing.

        After ``seconds`` what is left is left, and later windows use what was written. ``together``: so it is when one
        of the files is through, since from then on not all drives are at work.
        """
        row = self._window("write", seconds, 0.0, watch, once=True, together=together)
        for lane in self._lanes:
            self.ground.written_once[lane.job][lane.place] = lane.reached
        return row

    def run(self, rw: ReadWrite, *, seconds: float, ramp: float = 0.0, watch: Watch | None = None) -> Row:
        """A window of at least ``seconds``, after ``ramp`` seconds that do not count."""
        return self._window(rw, seconds, ramp, watch, once=False)

    def check(self, *, watch: Watch | None = None) -> Row:
        """Read once all that was written; with ``verify`` it is compared. Raises SwapError (EBADMSG) if it differs."""
        return self._window("read", None, 0.0, watch, once=True)

    def moved(self) -> list[tuple[int, int]]:
        """Bytes read and written so far in each directory."""
        jobs = [aio.stats() for aio in self._contexts]
        return [
            (sum(each.read.bytes for each in files), sum(each.write.bytes for each in files))
            for files in zip(*jobs, strict=True)
        ]

    def close(self) -> None:
        """End the threads of C."""
        for aio in self._contexts:
            aio.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _window(
        self,
        rw: ReadWrite,
        seconds: float | None,
        ramp: float,
        watch: Watch | None,
        *,
        once: bool,
        together: bool = False,
    ) -> Row:
        crew = _Crew(self._lanes, rw, once=once, together=together)
        self.ground.full = False
        whole = begun = self._moment()
        ended: _Moment | None = None
        marks = [_Mark(0.0, *self._moved())]
        with Interrupts() as interrupts:
            with crew:
                if ramp:
                    for _ in self._ticks(crew, begun.at, begun.at + ramp, interrupts):
                        pass
                    begun = self._moment()
                    marks = [_Mark(0.0, *self._moved())]
                until = math.inf if seconds is None else begun.at + seconds
                for at in self._ticks(crew, begun.at, until, interrupts):
                    marks.append(_Mark(at, *self._moved()))
                    if watch is not None:
                        share = self._reached() if seconds is None else min(1.0, at / seconds)
                        watch(_sample(*marks[-2:]), share)
                # After a ramp queues are as full as they were when it ended; together, one of them is empty.
                if (ramp or together) and self.ground.direct:
                    ended = self._moment()
            failed = next((lane.failed for lane in self._lanes if lane.failed is not None), None)
            if failed is None and writes(rw) and not self.ground.direct:  # or it is not on the drive yet
                for lane in self._lanes:
                    lane.flush()
        drained = self._moment()
        ended = ended or drained
        took = ended.at - begun.at
        if took - marks[-1].at > _SHORTEST:  # the end is a stretch of its own
            marks.append(_Mark(took, *self._moved()))
        moved = _less(drained.counts, whole.counts)
        self.ground.count(sum(read.bytes for read, _ in moved), sum(write.bytes for _, write in moved))
        if failed is not None:
            raise failed
        return self._row(
            rw,
            _less(ended.counts, begun.counts),
            took,
            ended.cpu - begun.cpu,
            [_sample(*pair) for pair in pairwise(marks)],
            complete=not interrupts.came,
        )

    def _moment(self) -> _Moment:
        stats = {aio: aio.stats() for aio in self._contexts}
        counts = [lane.counts(stats[lane.aio][lane.file]) for lane in self._lanes]
        return _Moment(time.monotonic(), time.process_time(), counts)

    def _ticks(self, crew: _Crew, began: float, until: float, interrupts: Interrupts) -> Iterator[float]:
        """When to take a sample, in seconds since ``began``: as time comes, and when the window is over."""
        at, at_work = began, True
        while at_work and at < until and not interrupts.came:
            following = at + SAMPLE_SECONDS
            at_work = crew.sleep_until(following if until - following > _SHORTEST else until)
            before, at = at, time.monotonic()
            if at_work or at - before > _SHORTEST or before == began:
                yield at - began

    def _reached(self) -> float:
        """The share of all files that the pass over them has covered."""
        return sum(lane.reached for lane in self._lanes) / (self.ground.size * len(self._lanes))

    def _moved(self) -> tuple[int, int]:
        """Bytes read and written so far."""
        moved = self.moved()
        return sum(read for read, _ in moved), sum(written for _, written in moved)

    def _row(
        self,
        rw: ReadWrite,
        counts: list[tuple[Count, Count]],
        took: float,
        cpu: float,
        samples: list[Sample],
        complete: bool,
    ) -> Row:
        by_path = [
            [each for lane, each in zip(self._lanes, counts, strict=True) if lane.place == place]
            for place in range(len(self.ground.directories))
        ]
        return Row(
            rw=rw,
            seconds=took,
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
                for directory, lanes in zip(self.ground.directories, by_path, strict=True)
            ),
            complete=complete,
        )


class _Crew:
    """The threads of all lanes, at work on a window: until the last has ended, or if ``together`` the first."""

    def __init__(self, lanes: Sequence[Lane], rw: ReadWrite, *, once: bool, together: bool) -> None:
        self._stop = threading.Event()
        self._ended = threading.Semaphore(0)
        self._at_work = 1 if together else len(lanes)
        self._threads = [
            threading.Thread(
                target=lane.work, args=(lane.walks(rw, once=once), self._stop, self._ended, once), daemon=True
            )
            for lane in lanes
        ]

    def sleep_until(self, when: float) -> bool:
        """Until then, or until the work has ended; False in that case."""
        while self._at_work:
            if not self._ended.acquire(timeout=max(0.0, when - time.monotonic())):
                return True
            self._at_work -= 1
        return False

    def __enter__(self) -> Self:
        for number, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError as error:
                wanted = len(self._threads)
                del self._threads[number:]
                self.__exit__(None, None, None)
                raise ConfigError(
                    f"only {number} of {counted(wanted, 'thread')}, one for each job and directory, can start"
                    f" ({error}): raise the limit (ulimit -u, the cgroup's pids.max), or lower --numjobs or --iodepth"
                ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def worst_second(samples: Sequence[Sample]) -> float | None:
    """The least bytes per second over a second in a row; None if there was no such stretch."""
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


def _sample(before: _Mark, after: _Mark) -> Sample:
    took = after.at - before.at
    return Sample(
        at=after.at, read=(after.read - before.read) / took, write=(after.write - before.write) / took
    )


def _less(after: list[tuple[Count, Count]], before: list[tuple[Count, Count]]) -> list[tuple[Count, Count]]:
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
