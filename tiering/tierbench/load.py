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
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from tiering.aio import AioContext, Ticket
from tiering.arena import PAGE, Arena, Lease
from tiering.errors import SwapError, SwapSpaceError, UnsafeTargetError
from tiering.latencies import LatencyHistogram
from tiering.swap_file import SwapFile
from tiering.tierbench.result import Engine, Latencies, PathRow, Row, Sample, Settings, Traffic
from tiering.tierbench.walk import Stretch, Walk
from tiering.tierbench.words import ReadWrite, is_random, reads, writes

SAMPLE_SECONDS = 0.1
_REQUEST = 4 << 20  # bytes: fewer would keep Python busy on a fast drive
_WORD = 8

Watch = Callable[[Sample, float], None]
"""Told of each sample, and of the share of the window that is over."""


class Ground:
    """Private files of ``size`` bytes, one per directory and job, reserved; with what of them was written once.

    ``lost`` says what the file systems do not give, by directory. Raises UnsafeTargetError where O_DIRECT was asked
    for and is refused, SwapSpaceError where there is no room.
    """

    def __init__(
        self, directories: Sequence[Path], *, size: int, numjobs: int = 1, direct: bool = True
    ) -> None:
        self.directories = tuple(directories)
        self.size = size
        self.direct = direct
        self.files: list[list[SwapFile]] = []  # by job and directory
        self.lost: dict[Path, tuple[str, ...]] = {}
        self.max_write: int | None = None
        self.read_bytes = 0
        self.written_bytes = 0  # of windows that are over
        try:
            for _ in range(numjobs):
                self.files.append([])
                for directory in self.directories:
                    file = _private_file(directory, size, direct)
                    self.files[-1].append(file)
                    self.lost[directory] = file.lost
                    if direct and not file.direct:
                        raise UnsafeTargetError(
                            f"{directory} refuses O_DIRECT, so its drive cannot be told from the page cache; name"
                            " another directory, or measure memory and drive together with --direct 0"
                        )
        except BaseException:
            self.close()
            raise
        self.written_once = [[0 for _ in self.directories] for _ in range(numjobs)]

    def close(self) -> None:
        """Close the files, and the kernel frees their space. Loads over them must be closed first."""
        for file in (file for files in self.files for file in files):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _private_file(directory: Path, size: int, direct: bool) -> SwapFile:
    try:
        return SwapFile(directory, size, direct=direct)
    except SwapSpaceError as error:  # its remedy is one for training
        what, _, _ = error.words.partition("; ")
        raise SwapSpaceError(
            f"{what}; free space there, give a smaller --size, or name another directory"
        ) from None


@dataclass
class _Count:
    """What C has counted so far, in one direction of one file."""

    bytes: int
    latency: LatencyHistogram


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
        self._lock = threading.Lock()
        self._promised = 0  # bytes of the window's writes, (lock)
        self._contexts: list[AioContext] = []
        self._lanes: list[_Lane] = []
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
                    self._lanes.append(_Lane(self, aio, index, job, place))
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> Engine:
        """What is really in use; files are registered when they are first used."""
        info = self._contexts[0].info
        return Engine(ioengine=info.engine, flags=info.flags, passed_over=info.passed_over)

    def lay_out(self, *, seconds: float | None = None, watch: Watch | None = None) -> Row:
        """Write each file once from its start: first writes cost more, and what was never written costs a read nothing.

        After ``seconds`` what is left is left, and later windows use what was written.
        """
        row = self._window("write", seconds, 0.0, watch, once=True)
        for lane in self._lanes:
            self.ground.written_once[lane.job][lane.place] = lane.reached
        return row

    def run(self, rw: ReadWrite, *, seconds: float, ramp: float = 0.0, watch: Watch | None = None) -> Row:
        """A window of at least ``seconds``, after ``ramp`` seconds that do not count."""
        return self._window(rw, seconds, ramp, watch, once=False)

    def check(self, *, watch: Watch | None = None) -> Row:
        """Read once all that was written; with ``verify`` it is compared. Raises SwapError (EBADMSG) if it differs."""
        return self._window("read", None, 0.0, watch, once=True)

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

    def may_write(self, nbytes: int) -> bool:
        """Whether ``--max-write`` has room for so many bytes more; if so they are taken. Called by every lane."""
        with self._lock:
            most = self.ground.max_write
            if most is not None and self.ground.written_bytes + self._promised + nbytes > most:
                return False
            self._promised += nbytes
            return True

    def _window(
        self, rw: ReadWrite, seconds: float | None, ramp: float, watch: Watch | None, *, once: bool
    ) -> Row:
        self._promised = 0
        whole = before = self._counts()
        marks = [_Mark(0.0, *self._moved())]
        complete = True
        crew = _Crew(self._lanes, rw, once=once)
        cpu, began = time.process_time(), time.monotonic()
        try:
            with crew:
                if ramp:
                    crew.sleep_until(began + ramp)
                    before, cpu, began = self._counts(), time.process_time(), time.monotonic()
                    marks = [_Mark(0.0, *self._moved())]
                until = math.inf if seconds is None else began + seconds
                while (now := time.monotonic()) < until and crew.sleep_until(
                    min(now + SAMPLE_SECONDS, until)
                ):
                    marks.append(_Mark(time.monotonic() - began, *self._moved()))
                    if watch is not None:
                        share = self._reached() if seconds is None else min(1.0, marks[-1].at / seconds)
                        watch(_sample(*marks[-2:]), share)
        except KeyboardInterrupt:
            complete = False
        for lane in self._lanes:
            if lane.failed is not None:
                raise lane.failed
        if writes(rw) and not self.ground.direct:  # or it is not on the drive yet
            for lane in self._lanes:
                lane.flush()
        took, cpu = time.monotonic() - began, time.process_time() - cpu
        after = self._counts()
        moved, all_moved = _less(after, before), _less(after, whole)
        if len(marks) == 1 or took - marks[-1].at > SAMPLE_SECONDS / 2:  # the end is a stretch of its own
            marks.append(_Mark(took, *self._moved()))
            if watch is not None:
                watch(_sample(*marks[-2:]), 1.0)
        self.ground.read_bytes += sum(read.bytes for read, _ in all_moved)
        self.ground.written_bytes += sum(write.bytes for _, write in all_moved)
        return self._row(rw, moved, took, cpu, [_sample(*pair) for pair in pairwise(marks)], complete)

    def _reached(self) -> float:
        """The share of all files that the pass over them has covered."""
        return sum(lane.reached for lane in self._lanes) / (self.ground.size * len(self._lanes))

    def _moved(self) -> tuple[int, int]:
        """Bytes read and written so far."""
        stats = [each for aio in self._contexts for each in aio.stats()]
        return sum(each.read.bytes for each in stats), sum(each.write.bytes for each in stats)

    def _counts(self) -> list[tuple[_Count, _Count]]:
        """By lane: what was read, what was written."""
        return [lane.counts() for lane in self._lanes]

    def _row(
        self,
        rw: ReadWrite,
        counts: list[tuple[_Count, _Count]],
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
    """The threads of all lanes, at work on a window."""

    def __init__(self, lanes: Sequence[_Lane], rw: ReadWrite, *, once: bool) -> None:
        self._stop = threading.Event()
        self._ended = threading.Semaphore(0)
        self._at_work = len(lanes)
        self._threads = [
            threading.Thread(
                target=lane.work, args=(lane.walks(rw, once=once), self._stop, self._ended, once), daemon=True
            )
            for lane in lanes
        ]

    def sleep_until(self, when: float) -> bool:
        """Until then, or until nobody is at work any more; False in that case."""
        while self._at_work:
            if not self._ended.acquire(timeout=max(0.0, when - time.monotonic())):
                return True
            self._at_work -= 1
        return False

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


class _Lane:
    """One file under load: some slots of memory, whose requests follow one another."""

    def __init__(self, load: Load, aio: AioContext, file: int, job: int, place: int) -> None:
        self.job, self.place = job, place
        self.reached = 0  # bytes from the start of the file that the last pass over it has covered
        self.failed: SwapError | None = None
        self._load, self._aio, self._file = load, aio, file
        settings = load.settings
        self._bs = settings.bs
        blocks = max(
            1, min(max(_REQUEST // self._bs, -(-settings.iodepth // 4)), load.ground.size // self._bs // 4)
        )
        count = -(-settings.iodepth // blocks) + 2  # one is waited for, one is about to be begun
        arena = Arena.map(count * blocks * self._bs, "tierbench")
        for at in range(0, len(arena.memory), _REQUEST):  # incompressible, and no two pages alike
            part = arena.memory[at : at + _REQUEST]
            part[:] = os.urandom(len(part))
        aio.register(arena)
        self._slots = [arena.lease(blocks * self._bs, "slot") for _ in range(count)]
        self._blocks = blocks
        self._stamp = 0

    def counts(self) -> tuple[_Count, _Count]:
        stats = self._aio.stats()[self._file]
        return (
            _Count(stats.read.bytes, self._aio.latencies(self._file, "read")),
            _Count(stats.write.bytes, self._aio.latencies(self._file, "write")),
        )

    def flush(self) -> None:
        self._aio.flush(self._file).wait()

    def work(
        self, walks: dict[str, Walk], stop: threading.Event, ended: threading.Semaphore, once: bool
    ) -> None:
        """Keep requests under way until ``stop``, or ``once`` through the file. What fails is kept in ``failed``."""
        try:
            self._work(walks, stop, once)
        except SwapError as error:
            self.failed = error
            stop.set()
        finally:
            ended.release()

    def _work(self, walks: dict[str, Walk], stop: threading.Event, once: bool) -> None:
        # Never a block twice under way: O_DIRECT orders nothing, and a read would meet half of a write.
        most = min(len(self._slots), max(1, min(walk.count for walk in walks.values()) // self._blocks - 1))
        idle = self._slots[:most]
        in_flight: deque[tuple[Lease, Ticket, int]] = deque()
        share = self._load.settings.rwmixread if len(walks) > 1 else 100 if "read" in walks else 0
        drawn = 0  # of a hundred: reads are those that carry over
        self.reached = 0
        try:
            while not stop.is_set() and not (once and any(walk.passes for walk in walks.values())):
                if not idle:
                    slot, ticket, end = in_flight.popleft()
                    ticket.wait()
                    self.reached = max(self.reached, end)
                    idle.append(slot)
                    continue
                drawn += share
                kind = "read" if drawn >= 100 else "write"
                drawn -= 100 * (kind == "read")
                stretch = walks[kind].take(self._blocks)
                if kind == "write" and not self._load.may_write(stretch.nbytes):
                    break
                slot = idle.pop()
                in_flight.append((slot, self._submit(kind, slot, stretch), stretch.offset + stretch.nbytes))
        finally:
            self._end(in_flight, taking_back=stop.is_set())

    def walks(self, rw: ReadWrite, *, once: bool) -> dict[str, Walk]:
        """By what is done there: of a mix, reads have the first half of the file and writes the second."""
        ground = self._load.ground
        written = ground.written_once[self.job][self.place]
        blocks = (ground.size if once and rw == "write" else written) // self._bs
        half = blocks // 2 if reads(rw) and writes(rw) else 0
        seed = self.job * 1009 + self.place
        made = {}
        if reads(rw):
            made["read"] = Walk(0, half or blocks, self._bs, shuffled=is_random(rw), seed=2 * seed)
        if writes(rw):
            made["write"] = Walk(half, blocks - half, self._bs, shuffled=is_random(rw), seed=2 * seed + 1)
        return made

    def _submit(self, kind: str, slot: Lease, stretch: Stretch) -> Ticket:
        aio = self._aio
        if kind == "write" and self._load.settings.verify:
            self._stamp_pages(slot)
        if stretch.scattered:
            scattered = aio.read_scattered if kind == "read" else aio.write_scattered
            return scattered(self._file, slot, stretch.scattered, self._bs)
        return (aio.read if kind == "read" else aio.write)(self._file, slot, stretch.offset, stretch.nbytes)

    def _stamp_pages(self, slot: Lease) -> None:
        """Make each page unlike what it was before: a write that did not arrive is then found."""
        self._stamp += 1
        words = slot.view.cast("Q")
        words[:: PAGE // _WORD] = memoryview(array("Q", [self._stamp]) * (slot.nbytes // PAGE))

    def _end(self, in_flight: deque[tuple[Lease, Ticket, int]], *, taking_back: bool) -> None:
        """Take back what was not begun, from the last, if that is wanted, and wait for the rest."""
        taken_back = {ticket for _, ticket, _ in reversed(in_flight) if taking_back and ticket.cancel()}
        failed: SwapError | None = None
        for _, ticket, end in in_flight:
            try:
                ticket.wait()
                self.reached = max(self.reached, end)
            except SwapError as error:
                failed = failed or (None if ticket in taken_back else error)
        if failed is not None:
            raise failed


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


def _less(
    after: list[tuple[_Count, _Count]], before: list[tuple[_Count, _Count]]
) -> list[tuple[_Count, _Count]]:
    def between(late: _Count, early: _Count) -> _Count:
        return _Count(late.bytes - early.bytes, late.latency - early.latency)

    return [
        (between(late[0], early[0]), between(late[1], early[1]))
        for late, early in zip(after, before, strict=True)
    ]


def _traffic(counts: Sequence[_Count]) -> Traffic:
    histogram = LatencyHistogram.of()
    for count in counts:
        histogram = histogram + count.latency
    if not histogram.total:
        return Traffic()
    p50, p95, p99, p999 = (histogram.percentile(share) for share in (0.5, 0.95, 0.99, 0.999))
    return Traffic(
        bytes=sum(count.bytes for count in counts),
        ops=histogram.total,
        latency=Latencies(p50=p50, p95=p95, p99=p99, p999=p999, max=histogram.max_ns / 1e9),
    )
