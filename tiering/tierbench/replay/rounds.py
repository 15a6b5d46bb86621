"""A run of ``tierbench profile``: the replay in rounds, between plain windows over files of the same drives.

What the replay reaches of the windows' rates is what the engine's path leaves of a drive. Disks swing within minutes;
in rounds that meets both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tiering.config import ds_config
from tiering.config.training import OptimizerConfig, TieringConfig, format_size
from tiering.errors import ConfigError
from tiering.placement.plan import Plan
from tiering.planning.rates import Rates
from tiering.planning.setting import Setting, usual_config, with_changes
from tiering.planning.sizing import plan_of_size
from tiering.storage.arena import PAGE
from tiering.tierbench.bench import Phases
from tiering.tierbench.load import target
from tiering.tierbench.load.windows import SAMPLE_SECONDS, Load, Watch, WorkFiles
from tiering.tierbench.replay.pattern import Pattern
from tiering.tierbench.replay.profile_result import Profile, Round, results
from tiering.tierbench.replay.step import Replay, Taken
from tiering.tierbench.result import Engine, Row, Sample, Settings, header
from tiering.tierbench.verdict import rates_of
from tiering.tierbench.words import ReadWrite

RUNTIME = 10.0  # seconds of the replay, in all rounds
ROUNDS = 6
WINDOW = 0.4  # seconds of each plain window
RAMP = 0.2  # of several directories: drives that differ do not end a window at the same time
PLAIN: tuple[ReadWrite, ...] = ("read", "write", "rw")
PLAIN_BYTES = 1 << 30  # of the files of plain windows, at most
PLAIN_SHARE = 4  # one part in so many of what may be written is for plain windows
FILES_SHARE = 4  # and one in so many of that is for the files, the rest for the windows themselves
BOUNDLESS = 1 << 60  # bytes of a budget that is not to bound anything


@dataclass(frozen=True)
class Asked:
    """What a command line asks for; None: what is usual. Sizes are bytes, times seconds."""

    directories: tuple[Path, ...]
    pattern: Pattern = "mixed"
    params: int = 7_000_000_000
    state: str | None = None
    config: Path | None = None
    host_budget: int | None = None
    gpu_memory: int | None = None
    with_kernels: bool = False
    steps: int | None = None
    runtime: float = RUNTIME
    size: int | None = None
    max_write: int | None = None
    bs: int | None = None
    iodepth: int | None = None
    ioengine: str | None = None
    command: str = "tierbench profile"


def run(asked: Asked, phases: Phases | None = None) -> Profile:
    """Replay what was asked for. After Ctrl-C the result is what there is until then.

    Raises ConfigError and UnsafeTargetError for what will not be measured, SwapSpaceError where a directory does not
    do, SwapError when a transfer fails, KeyboardInterrupt if nothing was replayed before it.
    """
    directories = target.check_all(asked.directories)
    config = configured(asked, directories)
    planned = plan_of_size(asked.params, config, Setting(gpu_memory=asked.gpu_memory), Rates())
    if planned.plan is None:
        raise ConfigError(f"there is no plan to replay: {planned.refusal}")
    with target.alone_in(directories):
        return _Run(asked, directories, config, planned.plan, phases).run(planned.model, planned.params)


def configured(asked: Asked, directories: Sequence[Path]) -> TieringConfig:
    """The configuration of the step: the file's, or all on NVMe; with what the command line says in its place."""
    # The swap space of the model itself is not made, so no drive has to hold it.
    tiers: dict[str, Any] = {"nvme_budget": BOUNDLESS}
    if asked.config is None:
        config = usual_config(directories[0])
        tiers |= {"host_budget": BOUNDLESS, "cache_in_host": asked.host_budget is not None}
        tiers |= {"device_budget": BOUNDLESS} if asked.gpu_memory is None else {}
    else:
        config, _ = ds_config.load(asked.config)
        if config.optimizer is None:
            config = config.model_copy(update={"optimizer": OptimizerConfig()})
    if asked.host_budget is not None:
        tiers["host_budget"] = asked.host_budget
    if asked.state is not None:
        tiers["state"] = asked.state
    named = {"engine": asked.ioengine, "block_size": asked.bs, "queue_depth": asked.iodepth}
    io = {key: value for key, value in named.items() if value is not None}
    if io:
        tiers["io"] = config.tiering.io.model_dump() | io
    return with_changes(config, tiers=tiers)


class _Run:
    """A run under way."""

    def __init__(
        self,
        asked: Asked,
        directories: tuple[Path, ...],
        config: TieringConfig,
        plan: Plan,
        phases: Phases | None,
    ) -> None:
        self._asked = asked
        self._directories = directories
        self._tiers = config.tiering
        self._plan = plan
        self._phases = phases
        self._windows: list[list[Row]] = []  # before the first round, and after each
        self._rounds: list[tuple[Taken, ...]] = []
        self._notes: list[str] = []
        self._cut = False  # whether --max-write has ended a plain window

    def run(self, model: str, params: int) -> Profile:
        asked, load = self._asked, self._plan.workload
        targets = [target.describe(each) for each in self._directories]
        begun = header(asked.command, targets)
        for each in targets:
            self._notes += target.warnings(Path(each.directory), each.backing)
        size = target.file_size(self._directories, numjobs=1, bs=PAGE, requested=asked.size)
        for_plain = None if asked.max_write is None else asked.max_write // PLAIN_SHARE
        settings = self._settings(size, for_plain)
        with (
            Replay(
                self._plan,
                asked.pattern,
                self._directories,
                self._tiers,
                size=size,
                with_kernels=asked.with_kernels,
                most=None if asked.max_write is None or for_plain is None else asked.max_write - for_plain,
            ) as replay,
            WorkFiles(self._directories, size=settings.size) as ground,
            Load(ground, settings) as windows,
        ):
            ground.max_write = for_plain
            self._notes += [
                f"{directory}: {what}" for directory, lost in ground.missing_features.items() for what in lost
            ]
            interrupted = self._measure(replay, windows)
            read, written = replay.moved
            read, written = read + ground.read_bytes, written + ground.written_bytes
        info, plain = replay.engine, _mean(rates_of(rows) for rows in self._windows)
        found = tuple(results(replay.turns, self._between_windows(), plain))
        if not found:
            if interrupted:
                raise KeyboardInterrupt
            raise ConfigError("nothing was moved in that time: give more --runtime")
        moving = dict.fromkeys(turn.phase for turn in replay.turns if turn.read + turn.written)
        missing = [phase for phase in moving if phase not in {each.name for each in found}]
        if missing and not interrupted:
            self._notes.append(
                f"too little of {' and '.join(missing)} was replayed to tell: give more --runtime"
            )
        return Profile(
            **begun,
            engine=Engine(ioengine=info.engine, flags=info.flags, passed_over=info.passed_over),
            bs=settings.bs,
            iodepth=settings.iodepth,
            pattern=asked.pattern,
            model=model,
            params=params,
            state=load.state_format,
            gpu_memory=asked.gpu_memory,
            micro_batches=load.micro_batches,
            kernels=asked.with_kernels,
            slots=self._plan.staging.slots,
            slot_bytes=self._plan.staging.slot_bytes,
            space_bytes=replay.space_bytes,
            phases=found,
            plain=plain.as_dict(),
            read_bytes=read,
            written_bytes=written,
            notes=(*self._notes, *self._remarks(replay)),
            interrupted=interrupted,
        )

    def _settings(self, size: int, for_plain: int | None) -> Settings:
        """Those of the plain windows, which may write ``for_plain`` bytes."""
        io = self._tiers.io
        most = PLAIN_BYTES if for_plain is None else min(PLAIN_BYTES, for_plain // FILES_SHARE)
        blocks = min(size, most // len(self._directories)) // io.block_size
        return Settings(
            bs=io.block_size,
            iodepth=io.queue_depth,
            size=max(4, blocks) * io.block_size,
            runtime=WINDOW,
            ramp_time=RAMP if len(self._directories) > 1 else 0.0,
            ioengine=io.engine,
            registered=io.registered,
        )

    def _measure(self, replay: Replay, windows: Load) -> bool:
        """Rounds of the replay with plain windows around each; True if Ctrl-C has ended them."""
        asked = self._asked
        if not any(turn.read + turn.written for turn in replay.turns):
            raise ConfigError(
                f"the plan moves nothing of the pattern {asked.pattern!r} over NVMe: lower --host-budget, or leave it"
                " out"
            )
        began = time.monotonic()
        watch = self._phase("writing once", None)
        replay.lay_out(_telling(replay, watch, began, None))
        if not windows.lay_out(watch=_since(watch, began)).complete or not self._measure_plainly(windows):
            raise KeyboardInterrupt  # nothing was replayed
        rounds = ROUNDS if asked.steps is None else 1
        for number in range(1, rounds + 1):
            seconds = None if asked.steps is not None else asked.runtime / rounds
            watch = self._phase("replay" if rounds == 1 else f"replay {number} of {rounds}", seconds)
            self._rounds.append(tuple(self._replay(replay, seconds, watch)))
            if replay.interrupted or not self._measure_plainly(windows):
                return True
            if replay.full:
                break
        return False

    def _measure_plainly(self, windows: Load) -> bool:
        """Windows of reads, writes and both; False if one was interrupted."""
        began, rows = time.monotonic(), list[Row]()
        self._windows.append(rows)
        watch = self._phase("plain windows", WINDOW * len(PLAIN))
        for rw in PLAIN:
            ramp = windows.settings.ramp_time
            row = windows.run(rw, seconds=WINDOW, ramp=ramp, watch=_since(watch, began))
            if windows.work_files.full:  # no rate of what it was to be: some blocks, or reads alone of a mix
                self._cut = True
            else:
                rows.append(row)
            if not row.complete:
                return False
        return True

    def _replay(self, replay: Replay, seconds: float | None, watch: Watch | None) -> list[Taken]:
        """Turns for so many seconds: each for its share of them, or, if all come to their end so, whole steps.

        None: the steps that were asked for.
        """
        began, taken = time.monotonic(), list[Taken]()
        tell = _telling(replay, watch, began, seconds)
        waiting, left = sum(turn.read + turn.written > 0 for turn in replay.turns), seconds
        for turn in replay.turns:
            until = None
            if left is not None and turn.read + turn.written:
                until = time.monotonic() + left / waiting
                waiting -= 1
            taken.append(replay.take(turn, until, tell))
            if left is not None:  # what a turn that was cut had under way is waited for, in nobody's time
                left -= taken[-1].seconds
            if replay.interrupted or replay.full:
                return taken
        if all(each.complete for each in taken):
            once, steps = time.monotonic() - began, 1
            while (
                steps < (self._asked.steps or 1)
                if seconds is None
                else time.monotonic() + once <= began + seconds
            ):
                steps += 1
                for turn in replay.turns:
                    taken.append(replay.take(turn, None, tell))
                    if not taken[-1].complete:
                        return taken
            # Writes run on into the forward that comes next: here they are waited for, and are the step's.
            taken[-1] = replace(taken[-1], seconds=taken[-1].seconds + replay.settle())
        return taken

    def _phase(self, name: str, seconds: float | None) -> Watch | None:
        return None if self._phases is None else self._phases.phase(name, seconds)

    def _between_windows(self) -> Iterator[Round]:
        """The rounds, with what plain windows before and after each have found."""
        for number, taken in enumerate(self._rounds):
            yield Round(taken, _mean(rates_of(rows) for rows in self._windows[number : number + 2]))

    def _remarks(self, replay: Replay) -> Iterator[str]:
        if replay.full:
            most = format_size(self._asked.max_write or 0)
            yield f"ended early: no more than --max-write {most} may be written"
        if self._cut:
            yield (
                "the plain windows' share of --max-write was used up: those that it cut short do not count, and no"
                " figure is made without them"
            )
        if replay.fetches_alone:
            load = self._plan.workload
            remedy = (
                "raise device_budget" if load.prefetch_bytes else "set stage3_prefetch_bucket_size above 0"
            )
            yield f"no block is read while another is used, since there is room for one alone: {remedy}"


def _mean(rates: Iterable[Rates]) -> Rates:
    found = [each.as_dict() for each in rates]
    names = {name for each in found for name in each}
    return Rates(**{name: fmean(each[name] for each in found if name in each) for name in names})


def _since(watch: Watch | None, began: float) -> Watch | None:
    """``watch`` for several windows in a row: a sample's time is since ``began``."""
    if watch is None:
        return None

    def tell(sample: Sample, done: float) -> None:
        watch(Sample(at=time.monotonic() - began, read=sample.read, write=sample.write), done)

    return tell


def _telling(replay: Replay, watch: Watch | None, began: float, seconds: float | None) -> Callable[[], None]:
    """What tells ``watch`` of the replay's progress when it is called now and then."""
    at, last = began, replay.moved

    def tell() -> None:
        nonlocal at, last
        now = time.monotonic()
        if watch is None or now - at < SAMPLE_SECONDS:
            return
        moved = replay.moved
        read, write = ((late - early) / (now - at) for late, early in zip(moved, last, strict=True))
        at, last = now, moved
        watch(Sample(at=now - began, read=read, write=write), (now - began) / seconds if seconds else 0.0)

    return tell
