"""The measurements of a sweep: rounds of settings, each measured between two measurements of the reference."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tiering._text import counted
from tiering.tierbench.bench import Phases
from tiering.tierbench.load.windows import Watch
from tiering.tierbench.result import Row, Sample, moved
from tiering.tierbench.tuning.search import Cell, Reading, Sweep, pairs

_SEED = 11


class SettingFigures(NamedTuple):
    """The figures of one measurement: bytes per second, CPU seconds per 10^9 bytes, seconds."""

    rate: float
    cpu_per_gb: float
    p99: float


class Bench(Protocol):
    """Measures one interval of a setting; None is the default setting."""

    def measure(self, cell: Cell | None, watch: Watch | None) -> SettingFigures: ...


class SearchEnded(Exception):  # noqa: N818 # not an error
    """No further interval can be measured; the readings so far count."""


class SettingUnavailable(Exception):  # noqa: N818 # not an error of the run
    """This setting cannot be measured on this machine; the message is the reason."""


def explore(
    bench: Bench,
    sweep: Sweep,
    *,
    until: float,
    phases: Phases | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Measure into ``sweep`` until it is complete or the time ``until`` would pass; returns the reason for the end.

    An interruption raises KeyboardInterrupt and leaves ``sweep`` consistent.
    """
    order = random.Random(_SEED)  # noqa: S311 # the order of measurements
    began = clock()
    try:
        before = _measure_reference(bench, sweep, clock() - began, None)
        while cells := sweep.next_round():
            order.shuffle(cells)
            progress = _RoundProgress(
                phases, f"round {sweep.rounds}: {counted(len(cells), 'setting')}", count=len(cells) * 3 // 2
            )
            for pair in pairs(cells):
                started = clock()
                interval_figures = [
                    (cell, clock() - began, _measure_setting(bench, sweep, cell, progress)) for cell in pair
                ]
                after = _measure_reference(bench, sweep, clock() - began, progress)
                for cell, at, each in interval_figures:
                    if each is not None:
                        sweep.add(cell, Reading(at=at, before=before, after=after, **each._asdict()))
                before = after
                if clock() + (clock() - started) > until:
                    return "the time limit was reached"
    except SearchEnded as end:
        return str(end)
    return "more readings would not change the result"


def figures_of(row: Row, seconds: float) -> SettingFigures:
    """The figures of ``row`` for the first ``seconds``, while its queues were full.

    After a ramp, an interval counts the blocks in flight at its start and the blocks that drain after it. In a short
    interval with many blocks in flight, these are a large part, and would make deep queues look fast. A mix on a drive
    that reads faster than it writes has the same effect: reads run ahead until memory is full, and further ahead the
    more memory there is. The rate of a mix is therefore twice that of its slower direction.
    """
    cut_off = (count for count, sample in enumerate(row.samples, 1) if sample.at >= 0.99 * seconds)
    full = row.samples[: next(cut_off, len(row.samples))]
    p99s = [traffic.latency.p99 for _, traffic in row.directions() if traffic.latency is not None]
    read_bytes = moved(each.model_copy(update={"write": 0.0}) for each in full)
    written_bytes = moved(each.model_copy(update={"read": 0.0}) for each in full)
    both_bytes = 2 * min(read_bytes, written_bytes) or read_bytes + written_bytes
    return SettingFigures(
        rate=max(1.0, both_bytes / full[-1].at if full else row.rate),  # a stalled drive has no logarithm
        cpu_per_gb=row.cpu_per_gb,
        p99=max(p99s, default=row.seconds),
    )


def _measure_setting(
    bench: Bench, sweep: Sweep, cell: Cell, progress: _RoundProgress
) -> SettingFigures | None:
    try:
        return bench.measure(cell, progress.next_watch())
    except SettingUnavailable as why:
        sweep.leave_out(cell, str(why))
        return None


def _measure_reference(bench: Bench, sweep: Sweep, at: float, progress: _RoundProgress | None) -> float:
    interval_figures = bench.measure(None, None if progress is None else progress.next_watch())
    sweep.reference.append(
        Reading(
            at=at, before=interval_figures.rate, after=interval_figures.rate, **interval_figures._asdict()
        )
    )
    return interval_figures.rate


class _RoundProgress:
    """Progress of a round: all its measurements are one phase."""

    def __init__(self, phases: Phases | None, name: str, *, count: int) -> None:
        self._watch = None if phases is None else phases.phase(name, None)
        self._count = max(1, count)
        self._complete = -1
        self._offset = self._last = 0.0

    def next_watch(self) -> Watch | None:
        """The callback for the samples of the next measurement."""
        self._complete += 1
        self._offset += self._last
        self._last = 0.0
        watch = self._watch
        if watch is None:
            return None

        def tell(sample: Sample, done: float) -> None:
            self._last = sample.at
            watch(
                sample.model_copy(update={"at": self._offset + sample.at}),
                min(1.0, (self._complete + done) / self._count),
            )

        return tell
