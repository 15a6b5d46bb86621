"""``tierbench DIR ...``: windows of reads, writes and both on private files in the directories, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tiering.config.training import ALIGNMENT, MAX_QUEUE_DEPTH, format_size
from tiering.errors import ConfigError, SwapError
from tiering.host import drives
from tiering.host.drives import Backing
from tiering.placement.budgets import host_memory
from tiering.text import counted
from tiering.tierbench.interrupts import Interrupts
from tiering.tierbench.load import target
from tiering.tierbench.load.block_mover import slots
from tiering.tierbench.load.windows import Load, Watch
from tiering.tierbench.load.work_files import Ground
from tiering.tierbench.result import Result, Row, Settings, Sustained, Verdict, header
from tiering.tierbench.words import NAMES, ReadWrite, writes

WINDOW = 2.5  # seconds, unless told: with the preparation three of them take ten
RAMP = 0.5  # seconds, of several directories: drives that differ do not end a window at the same time
PREPARATION_SHARE, SUSTAINED_SHARE = 0.5, 0.9  # of --max-write, that writing the files once may take
PREPARATION = 2.0  # seconds that writing the files may take, unless their size was asked for
MEMORY_SHARE = 0.5  # of what is free


class Phases(Protocol):
    """Who is told of the progress: of a phase when it begins, by what it returns of each sample, and of what else."""

    def phase(self, name: str, seconds: float | None) -> Watch: ...
    def announce(self, text: str) -> None: ...


@dataclass(frozen=True)
class Asked:
    """What a command line asks for; None: what is usual. Sizes are bytes, times seconds."""

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
                f"--bs is {self.bs} bytes, which has to be a multiple of {ALIGNMENT} up to 1 GiB: {nearest} is one"
                " (K, M and G are 1024-based, KB, MB and GB are decimal)"
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
            raise ConfigError("--runtime is 0; give the seconds of a window")
        for name, asked in (("--verify", self.verify), ("--sustained", self.sustained)):
            if asked and not self.direct:
                raise ConfigError(f"{name} of the page cache says nothing of the drive; leave out --direct 0")


def run(asked: Asked, phases: Phases | None = None) -> Result:
    """Measure what was asked for. After Ctrl-C in a window the result is what there is until then.

    A transfer that fails, or with ``verify`` reads what was not written, ends it, and ``failure`` says so. Raises
    ConfigError, SwapSpaceError and UnsafeTargetError for what will not be measured.
    """
    directories = target.check_all(asked.directories)
    with target.alone_in(directories), Interrupts() as interrupts:
        return _Run(asked, directories, phases, interrupts).run()


class _Run:
    """A run under way: rows and notes as they come."""

    def __init__(
        self, asked: Asked, directories: tuple[Path, ...], phases: Phases | None, interrupts: Interrupts
    ) -> None:
        self._interrupts = interrupts
        self._asked = asked
        self._ramp = (RAMP if len(directories) > 1 else 0.0) if asked.ramp_time is None else asked.ramp_time
        self._directories = directories
        self._phases = phases
        self._targets = [target.of(directory) for directory in directories]
        self._backings = [each.backing for each in self._targets]
        self._rows: list[Row] = []
        self._notes: list[str] = []
        self._sustained: Sustained | None = None
        self._failure: str | None = None

    def run(self) -> Result:
        asked = self._asked
        self._notes += [
            note
            for place in zip(self._directories, self._backings, strict=True)
            for note in target.warnings(*place)
        ]
        size = self._size()
        self._check_memory(size)
        before = [_counters(backing) for backing in self._backings]
        begun = header(asked.command, self._targets)
        with Ground(self._directories, size=size, numjobs=asked.numjobs, direct=asked.direct) as ground:
            ground.max_write = asked.max_write
            self._notes += [
                f"{directory}: {what}" for directory, lost in ground.lost.items() for what in lost
            ]
            with self._load(ground, size) as load:
                try:
                    self._measure(ground, load)
                except SwapError as error:  # what was measured until then is told with it
                    self._failure = str(error)
                interrupted = self._interrupts.came
                engine, moved = load.engine, load.moved()
            used = min(min(each) for each in ground.written_once)
            verified = ground.read_bytes if asked.verify and not self._failure else None
            read, written = ground.read_bytes, ground.written_bytes
            others = self._others(before, moved)
        settings = self._settings(used)
        if self._rows and used < 4 * settings.iodepth * settings.bs:
            self._notes.append(
                f"{format_size(used)} of a file are too few for a depth of {settings.iodepth} blocks of"
                f" {format_size(settings.bs)}: give a larger --size, or a smaller --bs or --iodepth"
            )
        told, block = self._meaning(settings)
        targets = [
            each.model_copy(update={"others_read": moved and moved[0], "others_written": moved and moved[1]})
            for each, moved in zip(self._targets, others, strict=True)
        ]
        return Result(
            **begun | {"targets": targets},
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
            verdict=told,
            config=block,
        )

    def _size(self) -> int:
        asked = self._asked
        wanted = asked.size
        if asked.sustained and wanted is None:
            from tiering.tierbench import sustained

            wanted = min(
                sustained.span(directory, backing, sharing=asked.numjobs * len(self._sharing(backing)))
                for directory, backing in zip(self._directories, self._backings, strict=True)
            )
        size = target.file_size(self._directories, numjobs=asked.numjobs, bs=asked.bs, asked=wanted)
        if asked.max_write is not None:  # the files are written once before anything is measured
            files = len(self._directories) * asked.numjobs
            share = SUSTAINED_SHARE if asked.sustained else PREPARATION_SHARE
            most = int(asked.max_write * share) // files // asked.bs * asked.bs
            least = 4 * asked.bs
            if most < least:
                raise ConfigError(
                    f"--max-write {format_size(asked.max_write)} is too little for {counted(files, 'file')} in blocks"
                    f" of {format_size(asked.bs)}: give at least {format_size(files * least / share)}, or a"
                    " smaller --bs"
                )
            size = min(size, most)
        return size

    def _check_memory(self, size: int) -> None:
        asked = self._asked
        count, blocks = slots(self._settings(size), size)
        needed = len(self._directories) * asked.numjobs * count * blocks * asked.bs
        limit, in_use = host_memory()
        if needed > (limit - in_use) * MEMORY_SHARE:
            raise ConfigError(
                f"blocks of {format_size(asked.bs)} at a depth of {asked.iodepth}, {counted(asked.numjobs, 'job')} and"
                f" {counted(len(self._directories), 'directory', 'directories')} need {format_size(needed)} of memory,"
                f" more than half of the {format_size(limit - in_use)} that are free: lower --bs, --iodepth or"
                " --numjobs"
            )

    def _settings(self, size: int) -> Settings:
        asked = self._asked
        return Settings(
            bs=asked.bs,
            iodepth=asked.iodepth,
            numjobs=asked.numjobs,
            size=size,
            runtime=WINDOW if asked.sustained else asked.runtime or WINDOW,
            ramp_time=self._ramp,
            direct=asked.direct,
            ioengine=asked.ioengine,
            registered=asked.registered,
            rwmixread=asked.rwmixread,
            verify=asked.verify,
        )

    def _load(self, ground: Ground, size: int) -> Load:
        try:
            return Load(ground, self._settings(size))
        except SwapError as error:
            raise ConfigError(f"--ioengine {self._asked.ioengine}: {error.message}") from None

    def _measure(self, ground: Ground, load: Load) -> None:
        asked = self._asked
        if asked.sustained:
            self._sustain(load)
        else:
            limit = PREPARATION if asked.size is None else None
            load.lay_out(seconds=limit, watch=self._phase("writing once", limit))
        seconds = WINDOW if asked.sustained else asked.runtime or WINDOW
        for number, rw in enumerate(asked.rws):
            if self._interrupts.came:
                return
            if asked.max_write is not None:  # what is left is for all windows that write
                writing = max(1, sum(map(writes, asked.rws[number:])))
                ground.max_write = ground.written_bytes + (asked.max_write - ground.written_bytes) // writing
            watch = self._phase(NAMES[rw], seconds + self._ramp)
            row = load.run(rw, seconds=seconds, ramp=self._ramp, watch=watch)
            if row.bytes:
                self._rows.append(row)
            if ground.full:
                self._notes.append(
                    f"{NAMES[rw]}: ended after {row.seconds:.2f} s, with its part of --max-write"
                    f" {format_size(asked.max_write or 0)}"
                )
        if asked.verify and not self._interrupts.came:
            load.check(watch=self._phase("verifying", None))

    def _phase(self, name: str, seconds: float | None) -> Watch | None:
        return None if self._phases is None else self._phases.phase(name, seconds)

    def _sustain(self, load: Load) -> None:
        from tiering.tierbench import sustained

        seconds = self._asked.runtime or sustained.SECONDS
        if self._phases is not None:
            self._phases.announce(sustained.announcement(load.ground.total_bytes, seconds))
        watch = self._phase("sustained write", seconds)
        row, self._sustained = sustained.run(load, seconds=seconds, watch=watch)
        self._rows.append(row)

    def _others(
        self, before: Sequence[tuple[int, int] | None], ours: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int] | None]:
        """What others read and wrote on the drives of each directory meanwhile; what is ours there is taken off."""
        found: list[tuple[int, int] | None] = []
        for backing, early in zip(self._backings, before, strict=True):
            late = _counters(backing)
            if early is None or late is None or self._failure:  # what failed may have moved, too
                found.append(None)
                continue
            here = [ours[self._directories.index(directory)] for directory in self._sharing(backing)]
            moved = zip(early, late, *here, strict=True)
            read, written = (max(0, end - start - sum(own)) for start, end, *own in moved)
            found.append((read, written))
        return found

    def _sharing(self, backing: Backing) -> list[Path]:
        """The directories that are on drives of ``backing``; where drives are not told, on its file system."""

        def place(of: Backing) -> set[str]:
            return {drive.name for drive in of.drives} or {
                f"{of.file_system.source} {of.file_system.mount_point}"
            }

        return [
            directory
            for directory, other in zip(self._directories, self._backings, strict=True)
            if place(backing) & place(other)
        ]

    def _meaning(self, settings: Settings) -> tuple[Verdict | None, dict[str, Any]]:
        """The verdict and the configuration: of figures that are the drive's."""
        if not self._rows:
            return None, {}
        if not settings.direct:
            self._notes.append("buffered figures are of memory and drive together: no verdict for training")
            return None, {}
        if any(map(drives.posing, self._backings)):
            self._notes.append("figures of what only poses as a disk are no drive's: no verdict for training")
            return None, {}
        from tiering.tierbench import verdict

        rates = verdict.rates_of(self._rows, self._sustained, rwmixread=settings.rwmixread)
        told = verdict.verdict(self._asked.params, rates, state=self._asked.state)
        if told is not None and settings.rwmixread != 50 and any(row.rw == "rw" for row in self._rows):
            self._notes.append(
                "the step is told with reads and writes one after the other: --rwmixread is not 50"
            )
        return told, verdict.config_block(self._directories, settings, state=self._asked.state)


def _counters(backing: Backing) -> tuple[int, int] | None:
    """Bytes read and written so far, by all its drives; None if one of them does not tell, or there is none."""
    counted = [drives.io_counters(drive) for drive in backing.drives]
    known = [each for each in counted if each is not None]
    if not known or len(known) < len(counted):
        return None
    return sum(read for read, _ in known), sum(written for _, written in known)
