"""Our load beside fio, in turn on the same files: the ratio of each pair says what neither side's swings can.

A shared drive may be twice as fast a minute later, so both sides run within seconds of each other, and who goes first
alternates. The files are ours and nameless; fio opens them again as /proc/PID/fd/N. What makes the sides alike:

- files, O_DIRECT, engine, block, depth, buffers and files registered with the kernel: as ours really has them; our
  "threads" meets fio's psync with as many threads, each with a part of the file to itself;
- time: from the first submission to the last completion, drained blocks included; starts do not count;
- memory in huge pages, not touched between writes; latencies are kept on both sides;
- CPU seconds: user and system time of either side while it ran, kernel threads left out.

Of a mixed load, fio draws lots for each block and passes over the whole file in both directions; ours takes reads and
writes in turn, the ones in the first half of the file, the others in the second.
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
from tiering.tierbench.bench import Asked, Phases
from tiering.tierbench.comparison import fio
from tiering.tierbench.comparison.fio import FioError, Job, Reading
from tiering.tierbench.display import figures
from tiering.tierbench.interrupts import Interrupts
from tiering.tierbench.load import target
from tiering.tierbench.load.windows import Ground, Load
from tiering.tierbench.ratios import compare, in_turn
from tiering.tierbench.result import Engine, Record, Run, Sample, Settings, header
from tiering.tierbench.spread import Estimate
from tiering.tierbench.words import ReadWrite, writes

if TYPE_CHECKING:
    from rich.console import Console

PAIRS, RUNTIME = 10, 1.0
FEWEST_PAIRS = 6  # of fewer, not even from the smallest to the largest ratio is a 95 % interval of the median
_MARGIN = 1.5  # a run may write so many times what the most one has written: below that, none is begun


class Pair(Record):
    """One run of each side, one after the other."""

    fio: Reading
    ours: Reading


class Window(Record):
    """The pairs of one kind of load, and the medians of their ratios ``ours / fio``."""

    rw: ReadWrite
    fio_command: str
    pairs: tuple[Pair, ...]
    rate: Estimate
    cpu: Estimate | None = Field(description="Of CPU seconds per byte. None: too little to be measured.")

    def median(self, of: Callable[[Pair], float]) -> float:
        ordered = sorted(map(of, self.pairs))
        middle = len(ordered) // 2
        return (ordered[middle] + ordered[~middle]) / 2


class BesideFio(Run):
    """What ``tierbench compare --fio DIR`` has found."""

    kind: Literal["compare-fio"] = "compare-fio"
    fio: str
    settings: Settings
    engine: Engine
    windows: tuple[Window, ...]
    failure: str | None = Field(default=None, description="Why it ended early: fio or a transfer failed.")


class _NoRoomError(Exception):
    """``--max-write`` does not allow for another run."""


def measure(asked: Asked, pairs: int, phases: Phases, say: Callable[[str], None]) -> BesideFio:
    """So many pairs of each kind.

    After Ctrl-C, where ``max_write`` ends it or a run fails, the result is of the pairs there are; without any pair,
    FioError or SwapError is raised for a run that fails. FioMissingError where there is no fio; else as
    ``target.check``.
    """
    fio_version = fio.version()
    directory = target.check(*asked.directories)
    with target.alone_in([directory]), Interrupts() as interrupts:
        begun = header(asked.command, [target.of(directory)])
        run = _Run(asked, directory, pairs, phases, say)
        failure = None
        with run.prepared():
            try:
                if not interrupts.came:
                    run.measure()
            except (FioError, SwapError) as error:
                if not run.windows:
                    raise
                failure = str(error)
            engine = run.load.engine
        return BesideFio(
            **begun,
            fio=fio_version,
            settings=run.settings,
            engine=engine,
            windows=tuple(run.windows),
            read_bytes=run.ground.read_bytes,
            written_bytes=run.ground.written_bytes,
            notes=tuple(run.notes),
            interrupted=interrupts.came,
            failure=failure,
        )


class _Run:
    """A run under way: windows and notes as they come."""

    def __init__(
        self, asked: Asked, directory: Path, pairs: int, phases: Phases, say: Callable[[str], None]
    ) -> None:
        self._asked = asked
        self._directory = directory
        self._pairs = pairs
        self._phases = phases
        self._say = say
        self.settings = Settings(
            bs=asked.bs,
            iodepth=asked.iodepth,
            numjobs=asked.numjobs,
            size=_size(asked, directory),
            runtime=asked.runtime or RUNTIME,
            ioengine=asked.ioengine,
        )
        self.windows: list[Window] = []
        self.notes: list[str] = []
        self._expected = 0.0  # bytes that a run of writes alone comes to
        self._most_written: dict[ReadWrite, int] = {}  # by a run

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """The files, written whole."""
        asked, size = self._asked, self.settings.size
        with Ground([self._directory], size=size, numjobs=asked.numjobs) as self.ground:
            self.ground.max_write = asked.max_write
            with Load(self.ground, self.settings) as self.load:
                row = self.load.lay_out(watch=self._phases.phase("writing once", None))
                self._expected = row.rate * self.settings.runtime
                yield

    def measure(self) -> None:
        self._announce()
        for rw in self._asked.rws:
            try:
                self._window(rw)
            except KeyboardInterrupt:  # noted, too
                return
            except _NoRoomError:
                limit = format_size(self._asked.max_write or 0)
                self.notes.append(f"ended in {rw}: another run might write more than --max-write {limit}")
        if not self.windows:
            raise ConfigError(f"not one pair: {'; '.join(self.notes)}; raise it, or give a shorter --runtime")
        if self.load.engine.ioengine == "threads":
            self.notes.append(
                "fio counts the CPU time of each of its threads in whole milliseconds; so many of them lose some"
            )
        if any(len(window.pairs) < FEWEST_PAIRS for window in self.windows):
            self.notes.append(f"intervals of fewer than {FEWEST_PAIRS} pairs are narrower than 95 %")

    def _announce(self) -> None:
        asked, share = self._asked, {"read": 0.0, "write": 1.0, "rw": 0.5}
        runs = sum(share[rw.removeprefix("rand")] for rw in asked.rws) * 2 * (self._pairs + 1)
        if runs:
            bound = "--max-write is a bound" if asked.max_write is None else format_size(asked.max_write)
            self._say(f"about {figures.nbytes(runs * self._expected, 2)} will be written (at most: {bound})")

    def _window(self, rw: ReadWrite) -> None:
        asked = self._asked
        engine = self.load.engine
        job = Job(
            paths=tuple(f"/proc/{os.getpid()}/fd/{files[0].fd}" for files in self.ground.files),
            size=self.settings.size,
            rw=rw,
            bs=asked.bs,
            iodepth=asked.iodepth,
        )
        watch = self._phases.phase(rw, None)
        pairs: list[Pair] = []
        elapsed, runs = 0.0, 0

        def told(reading: Reading) -> Reading:
            nonlocal elapsed, runs
            elapsed, runs = elapsed + reading.seconds, runs + 1
            read, written = reading.read_bytes / reading.seconds, reading.written_bytes / reading.seconds
            watch(Sample(at=elapsed, read=read, write=written), runs / (2 * self._pairs + 2))
            self._most_written[rw] = max(self._most_written.get(rw, 0), reading.written_bytes)
            return reading

        def by_fio() -> Reading:
            most = self._room(rw)
            try:
                found = fio.run(job, engine.ioengine, engine.flags, self.settings.runtime, most_written=most)
            except KeyboardInterrupt:
                if writes(rw):
                    self.notes.append("what fio wrote until it was ended is not in the sum")
                raise
            self.ground.read_bytes += found.read_bytes
            self.ground.written_bytes += found.written_bytes
            return told(found)

        def by_us() -> Reading:
            self._room(rw)
            row = self.load.run(rw, seconds=self.settings.runtime)
            if not row.complete:
                raise KeyboardInterrupt
            if not row.bytes:
                raise ConfigError(f"nothing was moved in {row.seconds:.2f} s; give a longer --runtime")
            return told(Reading(row.read.bytes, row.write.bytes, row.seconds, row.cpu_seconds))

        try:
            for found in in_turn(self._pairs, {"fio": by_fio, "ours": by_us}):
                pairs.append(Pair(fio=found["fio"], ours=found["ours"]))
        finally:
            if pairs:
                words = fio.command(job, engine.ioengine, engine.flags, self.settings.runtime)
                self.windows.append(_window(rw, " ".join(words), pairs))

    def _room(self, rw: ReadWrite) -> int | None:
        """Bytes that a run may write. Raises _NoRoomError where the limit could cut it short."""
        if self._asked.max_write is None or not writes(rw):
            return None
        room = self._asked.max_write - self.ground.written_bytes
        if room < _MARGIN * self._most_written.get(rw, self._expected):
            raise _NoRoomError
        return room


def _size(asked: Asked, directory: Path) -> int:
    size = target.file_size([directory], numjobs=asked.numjobs, bs=asked.bs, asked=asked.size)
    if asked.max_write is None:
        return size
    # The measured pairs write more than the preparation does.
    most = asked.max_write // (4 * asked.numjobs) // asked.bs * asked.bs
    if most < 4 * asked.bs:
        least = format_size(16 * asked.numjobs * asked.bs)
        raise ConfigError(f"--max-write {format_size(asked.max_write)} is too little; give at least {least}")
    return min(size, most)


def _window(rw: ReadWrite, command: str, pairs: list[Pair]) -> Window:
    rate = compare([pair.ours.rate for pair in pairs], [pair.fio.rate for pair in pairs]).median
    costs = [(pair.ours.cpu_per_gb, pair.fio.cpu_per_gb) for pair in pairs]
    cpu = None
    if all(ours and theirs for ours, theirs in costs):
        cpu = compare([ours for ours, _ in costs], [theirs for _, theirs in costs]).median
    return Window(rw=rw, fio_command=command, pairs=tuple(pairs), rate=rate, cpu=cpu)


def show(found: BesideFio, console: Console) -> None:
    """Print it."""
    from tiering.figures_table import FiguresTable

    def put(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    settings, [place] = found.settings, found.targets
    drive = "; ".join(map(str, place.backing.drives))
    if found.failure is not None:
        put("ended by a failure: this is of the pairs until then\n")
    elif found.interrupted:
        put("interrupted: this is of the pairs until then\n")
    put(f"tierbench {found.version} beside {found.fio}, in turn on the same files; {found.date}")
    put(f"directory  {figures.legible(place.directory)}{f', {drive}' if drive else ''}")
    put(f"engine     {', '.join((found.engine.ioengine, *found.engine.flags))}; fio has the like")
    jobs = f"{settings.numjobs} files" if settings.numjobs > 1 else "a file"
    put(
        f"load       bs {format_size(settings.bs)} ({settings.bs} bytes), depth {settings.iodepth}, O_DIRECT,"
        f" {jobs} of {format_size(settings.size)}, runs of {settings.runtime:g} s\n"
    )
    table = FiguresTable(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("", "median of", "fio", "ours", "ours / fio (95 %)", "pairs"):
        table.add_column(
            column, justify="right" if column in ("fio", "ours", "pairs") else "left", no_wrap=True
        )
    for window in found.windows:
        name, count = window.rw, str(len(window.pairs))
        rates = [
            figures.gb(window.median(rate))
            for rate in (lambda pair: pair.fio.rate, lambda pair: pair.ours.rate)
        ]
        table.add_row(name, "GB/s", *rates, str(window.rate), count)
        costs = [
            figures.number(window.median(cost))
            for cost in (lambda pair: pair.fio.cpu_per_gb, lambda pair: pair.ours.cpu_per_gb)
        ]
        table.add_row("", "CPU s/GB", *costs, str(window.cpu or "too little to tell"))
    if found.windows:
        console.print(table)
        put("")
    for window in found.windows:
        few = len(window.pairs) < FEWEST_PAIRS
        put(f"{window.rw}: {'too few pairs to tell' if few else window.rate.of_rates('ours', 'fio')}")
    for note in found.notes:
        put(f"note: {note}")
    put(f"written: {figures.nbytes(found.written_bytes)}, read: {figures.nbytes(found.read_bytes)}")
