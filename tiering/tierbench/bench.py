"""``tierbench DIR ...``: timed intervals of reads, writes and both on private files, and the training estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tiering._text import counted
from tiering.config.training import ALIGNMENT, MAX_QUEUE_DEPTH, format_size
from tiering.errors import ConfigError, SwapError
from tiering.host import drives
from tiering.host.drives import Backing
from tiering.placement.budgets import host_memory
from tiering.tierbench.interrupts import Interrupts
from tiering.tierbench.load import target
from tiering.tierbench.load.block_mover import slots
from tiering.tierbench.load.windows import Load, Watch
from tiering.tierbench.load.work_files import WorkFiles
from tiering.tierbench.result import Result, Row, Settings, StepVerdict, Sustained, header
from tiering.tierbench.words import NAMES, ReadWrite, writes

# The default; three intervals and the preparation take ten seconds.
INTERVAL_SECONDS = 2.5
# The default with several directories: drives of different speed do not end an interval at the same time.
RAMP_SECONDS = 0.5
# Parts of --max-write that the first write of the files may take.
PREPARATION_SHARE, SUSTAINED_SHARE = 0.5, 0.9
# The most that the first write of the files may take, unless --size is set.
PREPARATION_SECONDS = 2.0
# Part of the free memory that the buffers may take.
MEMORY_SHARE = 0.5


class Phases(Protocol):
    """A display of progress. ``phase`` begins a phase and returns a callback for its samples."""

    def phase(self, name: str, seconds: float | None) -> Watch: ...
    def announce(self, text: str) -> None: ...


@dataclass(frozen=True)
class BenchRequest:
    """The request of a command line; None selects a default. Sizes are bytes, times seconds."""

    directories: tuple[Path, ...]
    rws: tuple[ReadWrite, ...] = ("read", "write", "rw")
    bs: int = 1 << 20
    iodepth: int = 16
    numjobs: int = 1
    size: int | None = None
    runtime: float | None = None
    ramp_time: float | None = None
    direct: bool = True
    ioengine: str = "auto"
    registered: bool = True
    rwmixread: int = 50
    verify: bool = False
    sustained: bool = False
    max_write: int | None = None
    params: int = 7_000_000_000
    state: str = "fp32"
    command: str = "tierbench"

    def __post_init__(self) -> None:
        if self.bs % ALIGNMENT or self.bs > 1 << 30:
            nearest = max(ALIGNMENT, round(self.bs / ALIGNMENT) * ALIGNMENT)
            raise ConfigError(
                f"--bs is {self.bs} bytes, which is not a multiple of {ALIGNMENT} up to 1 GiB; use for example"
                f" {nearest} (K, M and G are 1024-based; KB, MB and GB are decimal)"
            )
        if not 1 <= self.iodepth <= MAX_QUEUE_DEPTH:
            raise ConfigError(f"--iodepth is {self.iodepth}; choose 1 .. {MAX_QUEUE_DEPTH}")
        if not 1 <= self.numjobs <= 64:
            raise ConfigError(f"--numjobs is {self.numjobs}; choose 1 .. 64")
        if not 1 <= self.rwmixread <= 99:
            raise ConfigError(
                f"--rwmixread is {self.rwmixread}; choose 1 .. 99 percent, or --rw read or write"
            )
        if self.runtime is not None and self.runtime <= 0:
            raise ConfigError("--runtime is 0; give a duration above 0, such as 2.5s")
        for name, enabled in (("--verify", self.verify), ("--sustained", self.sustained)):
            if enabled and not self.direct:
                raise ConfigError(f"{name} cannot test the drive through the page cache; remove --direct 0")


def run(request: BenchRequest, phases: Phases | None = None) -> Result:
    """Measure the requested load. After Ctrl-C the result has the measurements so far.

    A failed transfer, or with ``verify`` a read of wrong bytes, ends the run and sets ``failure``. Raises ConfigError,
    SwapSpaceError and UnsafeTargetError if the request cannot or must not be measured.
    """
    directories = target.check_all(request.directories)
    with target.alone_in(directories), Interrupts() as interrupts:
        return _BenchRun(request, directories, phases, interrupts).run()


class _BenchRun:
    """A run in progress, which collects rows and notes."""

    def __init__(
        self,
        request: BenchRequest,
        directories: tuple[Path, ...],
        phases: Phases | None,
        interrupts: Interrupts,
    ) -> None:
        self._interrupts = interrupts
        self._request = request
        self._ramp = (
            (RAMP_SECONDS if len(directories) > 1 else 0.0)
            if request.ramp_time is None
            else request.ramp_time
        )
        self._directories = directories
        self._phases = phases
        self._targets = [target.describe(directory) for directory in directories]
        self._backings = [each.backing for each in self._targets]
        self._rows: list[Row] = []
        self._notes: list[str] = []
        self._sustained: Sustained | None = None
        self._failure: str | None = None

    def run(self) -> Result:
        request = self._request
        self._notes += [
            note
            for place in zip(self._directories, self._backings, strict=True)
            for note in target.warnings(*place)
        ]
        size = self._size()
        self._check_memory(size)
        before = [_counters(backing) for backing in self._backings]
        header_fields = header(request.command, self._targets)
        with WorkFiles(
            self._directories, size=size, numjobs=request.numjobs, direct=request.direct
        ) as work_files:
            work_files.max_write = request.max_write
            self._notes += [
                f"{directory}: {feature}"
                for directory, features in work_files.missing_features.items()
                for feature in features
            ]
            with self._load(work_files, size) as load:
                try:
                    self._measure(work_files, load)
                except SwapError as error:
                    # The result reports the failure with the measurements before it.
                    self._failure = str(error)
                interrupted = self._interrupts.received
                engine, moved = load.engine, load.moved()
            used = min(min(each) for each in work_files.written_once)
            verified = work_files.read_bytes if request.verify and not self._failure else None
            read, written = work_files.read_bytes, work_files.written_bytes
            other_traffic = self._other_traffic(before, moved)
        settings = self._settings(used)
        if self._rows and used < 4 * settings.iodepth * settings.bs:
            self._notes.append(
                f"the files have only {format_size(used)} each, too little for a depth of {settings.iodepth} blocks of"
                f" {format_size(settings.bs)}: give a larger --size, or a smaller --bs or --iodepth"
            )
        verdict, block = self._verdict_and_config(settings)
        targets = [
            each.model_copy(update={"others_read": moved and moved[0], "others_written": moved and moved[1]})
            for each, moved in zip(self._targets, other_traffic, strict=True)
        ]
        return Result(
            **header_fields | {"targets": targets},
            settings=settings,
            engine=engine,
            rows=tuple(self._rows),
            read_bytes=read,
            written_bytes=written,
            verified_bytes=verified,
            sustained=self._sustained,
            notes=tuple(self._notes),
            interrupted=interrupted,
            failure=self._failure,
            verdict=verdict,
            config=block,
        )

    def _size(self) -> int:
        request = self._request
        requested_size = request.size
        if request.sustained and requested_size is None:
            from tiering.tierbench import sustained

            requested_size = min(
                sustained.span(directory, backing, sharing=request.numjobs * len(self._sharing(backing)))
                for directory, backing in zip(self._directories, self._backings, strict=True)
            )
        size = target.file_size(
            self._directories, numjobs=request.numjobs, bs=request.bs, requested=requested_size
        )
        if request.max_write is not None:  # includes the first write of the files, before the first interval
            files = len(self._directories) * request.numjobs
            share = SUSTAINED_SHARE if request.sustained else PREPARATION_SHARE
            largest = int(request.max_write * share) // files // request.bs * request.bs
            smallest = 4 * request.bs
            if largest < smallest:
                raise ConfigError(
                    f"--max-write {format_size(request.max_write)} is too little for {counted(files, 'file')} with"
                    f" blocks of {format_size(request.bs)}: give at least {format_size(files * smallest / share)}, or a"
                    " smaller --bs"
                )
            size = min(size, largest)
        return size

    def _check_memory(self, size: int) -> None:
        request = self._request
        count, blocks = slots(self._settings(size), size)
        needed = len(self._directories) * request.numjobs * count * blocks * request.bs
        limit, in_use = host_memory()
        if needed > (limit - in_use) * MEMORY_SHARE:
            raise ConfigError(
                f"blocks of {format_size(request.bs)} at a depth of {request.iodepth},"
                f" {counted(request.numjobs, 'job')} and"
                f" {counted(len(self._directories), 'directory', 'directories')} need {format_size(needed)} of memory,"
                f" which is more than half of the free {format_size(limit - in_use)}: lower --bs, --iodepth or"
                " --numjobs"
            )

    def _settings(self, size: int) -> Settings:
        request = self._request
        return Settings(
            bs=request.bs,
            iodepth=request.iodepth,
            numjobs=request.numjobs,
            size=size,
            runtime=INTERVAL_SECONDS if request.sustained else request.runtime or INTERVAL_SECONDS,
            ramp_time=self._ramp,
            direct=request.direct,
            ioengine=request.ioengine,
            registered=request.registered,
            rwmixread=request.rwmixread,
            verify=request.verify,
        )

    def _load(self, work_files: WorkFiles, size: int) -> Load:
        try:
            return Load(work_files, self._settings(size))
        except SwapError as error:
            raise ConfigError(f"--ioengine {self._request.ioengine}: {error.message}") from None

    def _measure(self, work_files: WorkFiles, load: Load) -> None:
        request = self._request
        if request.sustained:
            self._run_sustained(load)
        else:
            limit = PREPARATION_SECONDS if request.size is None else None
            load.lay_out(seconds=limit, watch=self._phase("writing once", limit))
        seconds = INTERVAL_SECONDS if request.sustained else request.runtime or INTERVAL_SECONDS
        for number, rw in enumerate(request.rws):
            if self._interrupts.received:
                return
            # The remaining bytes are divided among the intervals that write.
            if request.max_write is not None:
                writing = max(1, sum(map(writes, request.rws[number:])))
                work_files.max_write = (
                    work_files.written_bytes + (request.max_write - work_files.written_bytes) // writing
                )
            watch = self._phase(NAMES[rw], seconds + self._ramp)
            row = load.run(rw, seconds=seconds, ramp=self._ramp, watch=watch)
            if row.bytes:
                self._rows.append(row)
            if work_files.full:
                self._notes.append(
                    f"{NAMES[rw]}: ended after {row.seconds:.2f} s, at its part of --max-write"
                    f" {format_size(request.max_write or 0)}"
                )
        if request.verify and not self._interrupts.received:
            load.check(watch=self._phase("verifying", None))

    def _phase(self, name: str, seconds: float | None) -> Watch | None:
        return None if self._phases is None else self._phases.phase(name, seconds)

    def _run_sustained(self, load: Load) -> None:
        from tiering.tierbench import sustained

        seconds = self._request.runtime or sustained.SECONDS
        if self._phases is not None:
            self._phases.announce(sustained.announcement(load.work_files.total_bytes, seconds))
        watch = self._phase("sustained write", seconds)
        row, self._sustained = sustained.run(load, seconds=seconds, watch=watch)
        self._rows.append(row)

    def _other_traffic(
        self, before: Sequence[tuple[int, int] | None], own_traffic: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int] | None]:
        """Bytes that other processes read and wrote on each directory's drives: the counters less this run's bytes."""
        traffic: list[tuple[int, int] | None] = []
        for backing, early in zip(self._backings, before, strict=True):
            late = _counters(backing)
            if early is None or late is None or self._failure:  # the bytes of a failed transfer are unknown
                traffic.append(None)
                continue
            own_moved = [
                own_traffic[self._directories.index(directory)] for directory in self._sharing(backing)
            ]
            moved = zip(early, late, *own_moved, strict=True)
            read, written = (max(0, end - start - sum(own)) for start, end, *own in moved)
            traffic.append((read, written))
        return traffic

    def _sharing(self, backing: Backing) -> list[Path]:
        """The directories on the drives of ``backing``; on its file system if its drives are unknown."""

        def place(backing: Backing) -> set[str]:
            return {drive.name for drive in backing.drives} or {
                f"{backing.file_system.source} {backing.file_system.mount_point}"
            }

        return [
            directory
            for directory, candidate in zip(self._directories, self._backings, strict=True)
            if place(backing) & place(candidate)
        ]

    def _verdict_and_config(self, settings: Settings) -> tuple[StepVerdict | None, dict[str, Any]]:
        """The verdict and the configuration; none if the figures are not the drive's."""
        if not self._rows:
            return None, {}
        if not settings.direct:
            self._notes.append("buffered figures include the page cache: no verdict for training")
            return None, {}
        if any(map(drives.posing, self._backings)):
            self._notes.append("the target is not a real disk: no verdict for training")
            return None, {}
        from tiering.tierbench import verdict

        rates = verdict.rates_of(self._rows, self._sustained, rwmixread=settings.rwmixread)
        step_verdict = verdict.verdict(self._request.params, rates, state=self._request.state)
        if (
            step_verdict is not None
            and settings.rwmixread != 50
            and any(row.rw == "rw" for row in self._rows)
        ):
            self._notes.append(
                "the estimate assumes that reads and writes do not overlap, because --rwmixread is not 50"
            )
        return step_verdict, verdict.config_block(self._directories, settings, state=self._request.state)


def _counters(backing: Backing) -> tuple[int, int] | None:
    """Bytes that all its drives have read and written so far; None if a drive has no counters, or without drives."""
    readings = [drives.io_counters(drive) for drive in backing.drives]
    available = [each for each in readings if each is not None]
    if not available or len(available) < len(readings):
        return None
    return sum(read for read, _ in available), sum(written for _, written in available)
