"""A run of ``tierbench profile``: the replay in rounds, between plain intervals over files of the same drives.

The rate of the replay, divided by the rate of the plain intervals, is the part of a drive's speed that the engine
reaches. The speed of disks varies within minutes; alternating rounds let that affect both sides.
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
from tiering.tierbench.replay.replayed_step import Replay, TurnResult
from tiering.tierbench.result import Engine, Row, Sample, Settings, header
from tiering.tierbench.verdict import rates_of
from tiering.tierbench.words import ReadWrite

RUNTIME = 10.0  # seconds of the replay, over all rounds
ROUNDS = 6
WINDOW = 0.4  # seconds of each plain interval
RAMP = 0.2  # seconds, with several directories: unequal drives do not end a window at the same time
PLAIN: tuple[ReadWrite, ...] = ("read", "write", "rw")
PLAIN_BYTES = 1 << 30  # the largest size of the files of plain intervals
PLAIN_SHARE = 4  # plain intervals may write 1/4 of --max-write
FILES_SHARE = 4  # 1/4 of that creates the files, the windows themselves write the remaining bytes
BOUNDLESS = 1 << 60  # bytes of a budget without effect


@dataclass(frozen=True)
class Request:
    """The options of a command line; None: the default. Sizes are bytes, times seconds."""

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


def run(request: Request, phases: Phases | None = None) -> Profile:
    """Run the replay. After Ctrl-C the result covers the turns until then.

    Raises ConfigError and UnsafeTargetError for requests that are refused, SwapSpaceError if a directory cannot hold
    swap space, SwapError when a transfer fails, KeyboardInterrupt if nothing was replayed before it.
    """
    directories = target.check_all(request.directories)
    config = configured(request, directories)
    planned = plan_of_size(request.params, config, Setting(gpu_memory=request.gpu_memory), Rates())
    if planned.plan is None:
        raise ConfigError(f"there is no plan to replay: {planned.refusal}")
    with target.alone_in(directories):
        return _Run(request, directories, config, planned.plan, phases).run(planned.model, planned.params)


def configured(request: Request, directories: Sequence[Path]) -> TieringConfig:
    """The configuration of the step: the file's, or everything on NVMe, changed by the options of the command line."""
    # The replay does not create the swap space of the model, so no drive has to hold it.
    tiers: dict[str, Any] = {"nvme_budget": BOUNDLESS}
    if request.config is None:
        config = usual_config(directories[0])
        tiers |= {"host_budget": BOUNDLESS, "cache_in_host": request.host_budget is not None}
        tiers |= {"device_budget": BOUNDLESS} if request.gpu_memory is None else {}
    else:
        config, _ = ds_config.load(request.config)
        if config.optimizer is None:
            config = config.model_copy(update={"optimizer": OptimizerConfig()})
    if request.host_budget is not None:
        tiers["host_budget"] = request.host_budget
    if request.state is not None:
        tiers["state"] = request.state
    io_options = {"engine": request.ioengine, "block_size": request.bs, "queue_depth": request.iodepth}
    io = {key: value for key, value in io_options.items() if value is not None}
    if io:
        tiers["io"] = config.tiering.io.model_dump() | io
    return with_changes(config, tiers=tiers)


class _Run:
    """One run."""

    def __init__(
        self,
        request: Request,
        directories: tuple[Path, ...],
        config: TieringConfig,
        plan: Plan,
        phases: Phases | None,
    ) -> None:
        self._request = request
        self._directories = directories
        self._tiers = config.tiering
        self._plan = plan
        self._phases = phases
        self._windows: list[list[Row]] = []  # before the first round, and after each
        self._rounds: list[tuple[TurnResult, ...]] = []
        self._notes: list[str] = []
        self._is_cut = False  # --max-write has ended a plain interval

    def run(self, model: str, params: int) -> Profile:
        request, load = self._request, self._plan.workload
        targets = [target.describe(each) for each in self._directories]
        run_header = header(request.command, targets)
        for each in targets:
            self._notes += target.warnings(Path(each.directory), each.backing)
        size = target.file_size(self._directories, numjobs=1, bs=PAGE, requested=request.size)
        plain_writes = None if request.max_write is None else request.max_write // PLAIN_SHARE
        settings = self._settings(size, plain_writes)
        with (
            Replay(
                self._plan,
                request.pattern,
                self._directories,
                self._tiers,
                size=size,
                with_kernels=request.with_kernels,
                write_limit=None
                if request.max_write is None or plain_writes is None
                else request.max_write - plain_writes,
            ) as replay,
            WorkFiles(self._directories, size=settings.size) as work_files,
            Load(work_files, settings) as windows,
        ):
            work_files.max_write = plain_writes
            self._notes += [
                f"{directory}: {feature}"
                for directory, missing in work_files.missing_features.items()
                for feature in missing
            ]
            interrupted = self._measure(replay, windows)
            read, written = replay.moved
            read, written = read + work_files.read_bytes, written + work_files.written_bytes
        info, plain = replay.engine, _mean(rates_of(rows) for rows in self._windows)
        phases = tuple(results(replay.turns, self._between_windows(), plain))
        if not phases:
            if interrupted:
                raise KeyboardInterrupt
            raise ConfigError("no bytes were moved in that time: give more --runtime")
        moving = dict.fromkeys(turn.phase for turn in replay.turns if turn.read + turn.written)
        missing = [phase for phase in moving if phase not in {each.name for each in phases}]
        if missing and not interrupted:
            self._notes.append(
                f"too little of {' and '.join(missing)} was replayed for a result: give more --runtime"
            )
        return Profile(
            **run_header,
            engine=Engine(ioengine=info.engine, flags=info.flags, passed_over=info.passed_over),
            bs=settings.bs,
            iodepth=settings.iodepth,
            pattern=request.pattern,
            model=model,
            params=params,
            state=load.state_format,
            gpu_memory=request.gpu_memory,
            micro_batches=load.micro_batches,
            kernels=request.with_kernels,
            slots=self._plan.staging.slots,
            slot_bytes=self._plan.staging.slot_bytes,
            space_bytes=replay.space_bytes,
            phases=phases,
            plain=plain.as_dict(),
            read_bytes=read,
            written_bytes=written,
            notes=(*self._notes, *self._remarks(replay)),
            interrupted=interrupted,
        )

    def _settings(self, size: int, plain_writes: int | None) -> Settings:
        """The settings of the plain intervals, which may write ``plain_writes`` bytes."""
        io = self._tiers.io
        file_bytes = PLAIN_BYTES if plain_writes is None else min(PLAIN_BYTES, plain_writes // FILES_SHARE)
        blocks = min(size, file_bytes // len(self._directories)) // io.block_size
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
        """Rounds of the replay with plain intervals around each; whether Ctrl-C has ended them."""
        request = self._request
        if not any(turn.read + turn.written for turn in replay.turns):
            raise ConfigError(
                f"the plan moves no bytes of the pattern {request.pattern!r} over NVMe: lower or omit --host-budget"
            )
        start = time.monotonic()
        watch = self._phase("writing once", None)
        replay.lay_out(_progress_report(replay, watch, start, None))
        if not windows.lay_out(watch=_since(watch, start)).complete or not self._measure_plainly(windows):
            raise KeyboardInterrupt  # nothing was replayed
        rounds = ROUNDS if request.steps is None else 1
        for number in range(1, rounds + 1):
            seconds = None if request.steps is not None else request.runtime / rounds
            watch = self._phase("replay" if rounds == 1 else f"replay {number} of {rounds}", seconds)
            self._rounds.append(tuple(self._replay(replay, seconds, watch)))
            if replay.interrupted or not self._measure_plainly(windows):
                return True
            if replay.full:
                break
        return False

    def _measure_plainly(self, windows: Load) -> bool:
        """Windows of reads, writes and both; False if one was interrupted."""
        start, rows = time.monotonic(), list[Row]()
        self._windows.append(rows)
        watch = self._phase("plain reads and writes", WINDOW * len(PLAIN))
        for rw in PLAIN:
            ramp = windows.settings.ramp_time
            row = windows.run(rw, seconds=WINDOW, ramp=ramp, watch=_since(watch, start))
            # The window is cut short: its rate is that of a few blocks, or of a mix without writes.
            if windows.work_files.full:
                self._is_cut = True
            else:
                rows.append(row)
            if not row.complete:
                return False
        return True

    def _replay(self, replay: Replay, seconds: float | None, watch: Watch | None) -> list[TurnResult]:
        """Replay turns for ``seconds``, each for a part of them, or whole steps if all turns complete in that time.

        None: replay ``--steps`` steps.
        """
        start, results = time.monotonic(), list[TurnResult]()
        report = _progress_report(replay, watch, start, seconds)
        turns_left, seconds_left = sum(turn.read + turn.written > 0 for turn in replay.turns), seconds
        for turn in replay.turns:
            deadline = None
            if seconds_left is not None and turn.read + turn.written:
                deadline = time.monotonic() + seconds_left / turns_left
                turns_left -= 1
            results.append(replay.replay_turn(turn, deadline, report))
            if seconds_left is not None:  # the wait for the transfers of a turn that was cut does not count
                seconds_left -= results[-1].seconds
            if replay.interrupted or replay.full:
                return results
        if all(each.complete for each in results):
            step_seconds, steps = time.monotonic() - start, 1
            while (
                steps < (self._request.steps or 1)
                if seconds is None
                else time.monotonic() + step_seconds <= start + seconds
            ):
                steps += 1
                for turn in replay.turns:
                    results.append(replay.replay_turn(turn, None, report))
                    if not results[-1].complete:
                        return results
            # Writes continue into the next forward: here the step waits for them, and their time counts.
            results[-1] = replace(results[-1], seconds=results[-1].seconds + replay.settle())
        return results

    def _phase(self, name: str, seconds: float | None) -> Watch | None:
        return None if self._phases is None else self._phases.phase(name, seconds)

    def _between_windows(self) -> Iterator[Round]:
        """The rounds, each with the mean rates of the plain intervals before and after it."""
        for number, turns in enumerate(self._rounds):
            yield Round(turns, _mean(rates_of(rows) for rows in self._windows[number : number + 2]))

    def _remarks(self, replay: Replay) -> Iterator[str]:
        if replay.full:
            limit = format_size(self._request.max_write or 0)
            yield f"ended early at --max-write {limit}"
        if self._is_cut:
            yield (
                "the share of --max-write for plain intervals was used up: intervals that it cut short do not count,"
                " and figures that need them are missing"
            )
        if replay.fetches_alone:
            load = self._plan.workload
            remedy = (
                "raise device_budget" if load.prefetch_bytes else "set stage3_prefetch_bucket_size above 0"
            )
            yield f"no block is read while another is used, because there is room for only one: {remedy}"


def _mean(rates: Iterable[Rates]) -> Rates:
    values = [each.as_dict() for each in rates]
    names = {name for each in values for name in each}
    return Rates(**{name: fmean(each[name] for each in values if name in each) for name in names})


def _since(watch: Watch | None, began: float) -> Watch | None:
    """``watch`` for several successive windows: the time of a sample counts from ``start``."""
    if watch is None:
        return None

    def tell(sample: Sample, done: float) -> None:
        watch(Sample(at=time.monotonic() - began, read=sample.read, write=sample.write), done)

    return tell


def _progress_report(
    replay: Replay, watch: Watch | None, began: float, seconds: float | None
) -> Callable[[], None]:
    """A function that reports the progress of the replay to ``watch``, to be called from time to time."""
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
