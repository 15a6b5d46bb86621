"""Comparison of tierbench's load with fio's, alternating on the same files; the ratio of each pair is the result.

A shared drive may be twice as fast a minute later, so both sides run within seconds of each other, and the first side
alternates. The files belong to tierbench and have no names; fio opens them as /proc/PID/fd/N. Both sides have the same:

- files, O_DIRECT, engine, block size, depth, registered buffers and files, as tierbench's engine uses them; tierbench's
  "threads" is compared with fio's psync and as many threads, each with its own part of the file;
- time: from the first submission to the last completion, drained blocks included; start-up does not count;
- memory in huge pages, not modified between writes; both sides keep latencies;
- CPU seconds: user and system time of each side during its run, without kernel threads. For tierbench these are all its
  threads, which also take the samples; for fio, what it reports of its jobs, without the thread that started them.

Mixed loads differ: fio chooses the direction of each block at random and uses the whole file for both; tierbench
alternates between reads in the first half of the file and writes in the second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tiering.config.training import format_size
from tiering.errors import ConfigError, SwapError
from tiering.tierbench.bench import BenchRequest, Phases
from tiering.tierbench.comparison import fio
from tiering.tierbench.comparison.fio import FioError, FioJob, RunReading
from tiering.tierbench.display import figures
from tiering.tierbench.interrupts import Interrupts
from tiering.tierbench.load import target
from tiering.tierbench.load.windows import Load, WorkFiles
from tiering.tierbench.ratios import compare, in_turn
from tiering.tierbench.result import CommandResult, Engine, ResultPart, Sample, Settings, header
from tiering.tierbench.spread import Estimate
from tiering.tierbench.words import ReadWrite, writes

if TYPE_CHECKING:
    from rich.console import Console

PAIRS, RUNTIME = 10, 1.0
# With fewer pairs, even the range of all ratios is narrower than a 95 % confidence interval of the median.
MIN_PAIRS = 6
# A run starts only if --max-write has room for this multiple of the largest run so far.
_MARGIN = 1.5


class Pair(ResultPart):
    """One run of each side, in sequence."""

    fio: RunReading
    ours: RunReading


class ComparedLoad(ResultPart):
    """The pairs of one kind of load, and the medians of their ratios, tierbench (``ours``) divided by fio."""

    rw: ReadWrite
    fio_command: str
    pairs: tuple[Pair, ...]
    rate: Estimate
    cpu: Estimate | None = Field(
        description="Ratio of CPU seconds per byte; None if the CPU time was too short to measure."
    )

    def median(self, of: Callable[[Pair], float]) -> float:
        ordered = sorted(map(of, self.pairs))
        middle = len(ordered) // 2
        return (ordered[middle] + ordered[~middle]) / 2


class FioComparison(CommandResult):
    """The result of ``tierbench compare --fio DIR``."""

    kind: Literal["compare-fio"] = "compare-fio"
    fio: str
    settings: Settings
    engine: Engine
    windows: tuple[ComparedLoad, ...]
    failure: str | None = Field(
        default=None, description="The reason for an early end: fio or a transfer failed."
    )


class _NoRoomError(Exception):
    """``--max-write`` does not allow another run."""


def measure(request: BenchRequest, pairs: int, phases: Phases, say: Callable[[str], None]) -> FioComparison:
    """Measure ``pairs`` pairs of each kind of load.

    After Ctrl-C, ``max_write`` or a failed run, the result has the completed pairs; if there is none, a failed run
    raises FioError or SwapError. Raises FioMissingError without fio, and the errors of ``target.check``.
    """
    fio_version = fio.version()
    directory = target.check(*request.directories)
    with target.alone_in([directory]), Interrupts() as interrupts:
        header_fields = header(request.command, [target.describe(directory)])
        run = _FioComparisonRun(request, directory, pairs, phases, say)
        failure = None
        with run.prepared():
            try:
                if not interrupts.received:
                    run.measure()
            except (FioError, SwapError) as error:
                if not run.windows:
                    raise
                failure = str(error)
            engine = run.load.engine
        return FioComparison(
            **header_fields,
            fio=fio_version,
            settings=run.settings,
            engine=engine,
            windows=tuple(run.windows),
            read_bytes=run.work_files.read_bytes,
            written_bytes=run.work_files.written_bytes,
            notes=tuple(run.notes),
            interrupted=interrupts.received,
            failure=failure,
        )


class _FioComparisonRun:
    """A comparison in progress, which collects pairs and notes."""

    def __init__(
        self, request: BenchRequest, directory: Path, pairs: int, phases: Phases, say: Callable[[str], None]
    ) -> None:
        self._request = request
        self._directory = directory
        self._pairs = pairs
        self._phases = phases
        self._say = say
        self.settings = Settings(
            bs=request.bs,
            iodepth=request.iodepth,
            numjobs=request.numjobs,
            size=_size(request, directory),
            runtime=request.runtime or RUNTIME,
            ioengine=request.ioengine,
        )
        self.windows: list[ComparedLoad] = []
        self.notes: list[str] = []
        self._expected_write = 0.0  # bytes of a run that only writes
        self._largest_write: dict[ReadWrite, int] = {}  # by a run

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Within the block, the files exist and are completely written."""
        request, size = self._request, self.settings.size
        with WorkFiles([self._directory], size=size, numjobs=request.numjobs) as self.work_files:
            self.work_files.max_write = request.max_write
            with Load(self.work_files, self.settings) as self.load:
                row = self.load.lay_out(watch=self._phases.phase("writing once", None))
                self._expected_write = row.rate * self.settings.runtime
                yield

    def measure(self) -> None:
        self._announce()
        for rw in self._request.rws:
            try:
                self._compare_load(rw)
            except KeyboardInterrupt:  # the result reports the interruption
                return
            except _NoRoomError:
                limit = format_size(self._request.max_write or 0)
                self.notes.append(f"{rw} ended early: another run could exceed --max-write {limit}")
        if not self.windows:
            raise ConfigError(
                f"no pair was completed: {'; '.join(self.notes)}; raise --max-write, or give a shorter --runtime"
            )
        if self.load.engine.ioengine == "threads":
            self.notes.append(
                "fio counts the CPU time of each thread in whole milliseconds, so many threads lose some of it"
            )
        if any(len(load.pairs) < MIN_PAIRS for load in self.windows):
            self.notes.append(f"confidence intervals of fewer than {MIN_PAIRS} pairs cover less than 95 %")

    def _announce(self) -> None:
        request, share = self._request, {"read": 0.0, "write": 1.0, "rw": 0.5}
        runs = sum(share[rw.removeprefix("rand")] for rw in request.rws) * 2 * (self._pairs + 1)
        if runs:
            limit = (
                "--max-write sets a limit"
                if request.max_write is None
                else f"limit: {format_size(request.max_write)}"
            )
            self._say(f"about {figures.nbytes(runs * self._expected_write, 2)} will be written ({limit})")

    def _compare_load(self, rw: ReadWrite) -> None:
        request = self._request
        engine = self.load.engine
        job = FioJob(
            paths=tuple(f"/proc/{os.getpid()}/fd/{files[0].fd}" for files in self.work_files.files),
            size=self.settings.size,
            rw=rw,
            bs=request.bs,
            iodepth=request.iodepth,
        )
        watch = self._phases.phase(rw, None)
        pairs: list[Pair] = []
        elapsed, runs = 0.0, 0

        def recorded(reading: RunReading) -> RunReading:
            nonlocal elapsed, runs
            elapsed, runs = elapsed + reading.seconds, runs + 1
            read, written = reading.read_bytes / reading.seconds, reading.written_bytes / reading.seconds
            watch(Sample(at=elapsed, read=read, write=written), runs / (2 * self._pairs + 2))
            self._largest_write[rw] = max(self._largest_write.get(rw, 0), reading.written_bytes)
            return reading

        def by_fio() -> RunReading:
            write_limit = self._room(rw)
            try:
                reading = fio.run(
                    job, engine.ioengine, engine.flags, self.settings.runtime, write_limit=write_limit
                )
            except KeyboardInterrupt:
                if writes(rw):
                    self.notes.append("the bytes of fio's interrupted run are not in the total")
                raise
            self.work_files.read_bytes += reading.read_bytes
            self.work_files.written_bytes += reading.written_bytes
            return recorded(reading)

        def by_tierbench() -> RunReading:
            self._room(rw)
            row = self.load.run(rw, seconds=self.settings.runtime)
            if not row.complete:
                raise KeyboardInterrupt
            if not row.bytes:
                raise ConfigError(f"no transfer completed in {row.seconds:.2f} s; give a longer --runtime")
            return recorded(RunReading(row.read.bytes, row.write.bytes, row.seconds, row.cpu_seconds))

        try:
            for readings in in_turn(self._pairs, {"fio": by_fio, "ours": by_tierbench}):
                pairs.append(Pair(fio=readings["fio"], ours=readings["ours"]))
        finally:
            if pairs:
                fio_arguments = fio.command(job, engine.ioengine, engine.flags, self.settings.runtime)
                self.windows.append(_compared_load(rw, " ".join(fio_arguments), pairs))

    def _room(self, rw: ReadWrite) -> int | None:
        """Bytes that a run may write; None without a limit. Raises _NoRoomError if the limit could end a run early."""
        if self._request.max_write is None or not writes(rw):
            return None
        room = self._request.max_write - self.work_files.written_bytes
        if room < _MARGIN * self._largest_write.get(rw, self._expected_write):
            raise _NoRoomError
        return room


def _size(request: BenchRequest, directory: Path) -> int:
    size = target.file_size([directory], numjobs=request.numjobs, bs=request.bs, requested=request.size)
    if request.max_write is None:
        return size
    # The measured pairs write more than the preparation does.
    largest = request.max_write // (4 * request.numjobs) // request.bs * request.bs
    if largest < 4 * request.bs:
        smallest = format_size(16 * request.numjobs * request.bs)
        raise ConfigError(
            f"--max-write {format_size(request.max_write)} is too little; give at least {smallest}"
        )
    return min(size, largest)


def _compared_load(rw: ReadWrite, command: str, pairs: list[Pair]) -> ComparedLoad:
    rate = compare([pair.ours.rate for pair in pairs], [pair.fio.rate for pair in pairs]).median
    costs = [(pair.ours.cpu_per_gb, pair.fio.cpu_per_gb) for pair in pairs]
    cpu = None
    if all(tierbench_cost and fio_cost for tierbench_cost, fio_cost in costs):
        cpu = compare(
            [tierbench_cost for tierbench_cost, _ in costs], [fio_cost for _, fio_cost in costs]
        ).median
    return ComparedLoad(rw=rw, fio_command=command, pairs=tuple(pairs), rate=rate, cpu=cpu)


def show(comparison: FioComparison, console: Console) -> None:
    """Print it."""
    from tiering._figures_table import FiguresTable

    def put(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    settings, [target] = comparison.settings, comparison.targets
    drive = "; ".join(map(str, target.backing.drives))
    if comparison.failure is not None:
        put("the comparison failed; these are the completed pairs\n")
    elif comparison.interrupted:
        put("interrupted: these are the completed pairs\n")
    put(
        f"tierbench {comparison.version} and {comparison.fio}, alternating on the same files; {comparison.date}"
    )
    put(f"directory  {figures.legible(target.directory)}{f', {drive}' if drive else ''}")
    put(f"engine     {', '.join((comparison.engine.ioengine, *comparison.engine.flags))}; fio uses the same")
    jobs = f"{settings.numjobs} files" if settings.numjobs > 1 else "one file"
    put(
        f"load       bs {format_size(settings.bs)} ({settings.bs} bytes), depth {settings.iodepth}, O_DIRECT,"
        f" {jobs} of {format_size(settings.size)}, runs of {settings.runtime:g} s\n"
    )
    table = FiguresTable(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("", "median of", "fio", "tierbench", "tierbench / fio (95 %)", "pairs"):
        table.add_column(
            column, justify="right" if column in ("fio", "tierbench", "pairs") else "left", no_wrap=True
        )
    for load in comparison.windows:
        name, count = load.rw, str(len(load.pairs))
        rates = [
            figures.gb(load.median(rate))
            for rate in (lambda pair: pair.fio.rate, lambda pair: pair.ours.rate)
        ]
        table.add_row(name, "GB/s", *rates, str(load.rate), count)
        costs = [
            figures.number(load.median(cost))
            for cost in (lambda pair: pair.fio.cpu_per_gb, lambda pair: pair.ours.cpu_per_gb)
        ]
        table.add_row("", "CPU s/GB", *costs, str(load.cpu or "too small to measure"))
    if comparison.windows:
        console.print(table)
        put("")
    for load in comparison.windows:
        few = len(load.pairs) < MIN_PAIRS
        put(f"{load.rw}: {'too few pairs for a result' if few else load.rate.of_rates('tierbench', 'fio')}")
    for note in comparison.notes:
        put(f"note: {note}")
    put(f"written: {figures.nbytes(comparison.written_bytes)}, read: {figures.nbytes(comparison.read_bytes)}")
