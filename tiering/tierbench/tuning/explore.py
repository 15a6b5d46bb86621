"""The windows of a sweep: round by round, settings between windows of the reference."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tiering.text import counted
from tiering.tierbench.bench import Phases
from tiering.tierbench.load.windows import Watch
from tiering.tierbench.result import Row, Sample, moved
from tiering.tierbench.tuning.search import Cell, Reading, Sweep, pairs

_SEED = 11


class Taken(NamedTuple):
    """What a window showed: bytes per second, CPU seconds per 10^9 bytes, seconds."""

    rate: float
    cpu_per_gb: float
    p99: float


class Bench(Protocol):
    """What measures windows of settings; ``None`` stands for the defaults."""

    def window(self, cell: Cell | None, tell: Watch | None) -> Taken: ...


class Ended(Exception):  # noqa: N818 # an end, and no error
    """No further window can be measured; what there is counts."""


class CannotStart(Exception):  # noqa: N818 # the setting's, and told with it
    """This setting cannot be measured here."""


def explore(
    bench: Bench,
    sweep: Sweep,
    *,
    until: float,
    phases: Phases | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Measure into ``sweep`` until it is over, or about to last longer than ``until``; why it ended.

    Interrupted: KeyboardInterrupt is raised, and what ``sweep`` has is whole.
    """
    order = random.Random(_SEED)  # noqa: S311 # the order of windows
    began = clock()
    try:
        before = _reference(bench, sweep, clock() - began, None)
        while cells := sweep.next_round():
            order.shuffle(cells)
            tell = _Rounds(
                phases, f"round {sweep.rounds}: {counted(len(cells), 'setting')}", windows=len(cells) * 3 // 2
            )
            for pair in pairs(cells):
                started = clock()
                found = [(cell, clock() - began, _setting(bench, sweep, cell, tell)) for cell in pair]
                after = _reference(bench, sweep, clock() - began, tell)
                for cell, at, each in found:
                    if each is not None:
                        sweep.add(cell, Reading(at=at, before=before, after=after, **each._asdict()))
                before = after
                if clock() + (clock() - started) > until:
                    return "the time was over"
    except Ended as end:
        return str(end)
    return "more would not have changed it"


def taken(row: Row, seconds: float) -> Taken:
    """What ``row`` shows of the ``seconds`` while its queues were full.

    After a ramp a window counts what was in flight when it began, and what is drained after it. Beside so short a
    window that is much where much is in flight, and would make deep queues look fast. So it is with a mix on a drive
    that reads faster than it writes: until memory holds no more, reads are ahead, and lead the further the more there
    is. What goes on is twice the slower direction.
    """
    ended = (count for count, sample in enumerate(row.samples, 1) if sample.at >= 0.99 * seconds)
    full = row.samples[: next(ended, len(row.samples))]
    tails = [traffic.latency.p99 for _, traffic in row.directions() if traffic.latency is not None]
    read = moved(each.model_copy(update={"write": 0.0}) for each in full)
    written = moved(each.model_copy(update={"read": 0.0}) for each in full)
    both = 2 * min(read, written) or read + written
    return Taken(
        rate=max(1.0, both / full[-1].at if full else row.rate),  # a drive that stood still has no logarithm
        cpu_per_gb=row.cpu_per_gb,
        p99=max(tails, default=row.seconds),
    )


def _setting(bench: Bench, sweep: Sweep, cell: Cell, tell: _Rounds) -> Taken | None:
    try:
        return bench.window(cell, tell.window())
    except CannotStart as why:
        sweep.leave_out(cell, str(why))
        return None


def _reference(bench: Bench, sweep: Sweep, at: float, tell: _Rounds | None) -> float:
    found = bench.window(None, None if tell is None else tell.window())
    sweep.reference.append(Reading(at=at, before=found.rate, after=found.rate, **found._asdict()))
    return found.rate


class _Rounds:
    """Progress of a round, whose windows are one phase."""

    def __init__(self, phases: Phases | None, name: str, *, windows: int) -> None:
        self._watch = None if phases is None else phases.phase(name, None)
        self._windows = max(1, windows)
        self._over = -1
        self._offset = self._last = 0.0

    def window(self) -> Watch | None:
        """For the next window."""
        self._over += 1
        self._offset += self._last
        self._last = 0.0
        watch = self._watch
        if watch is None:
            return None

        def tell(sample: Sample, done: float) -> None:
            self._last = sample.at
            watch(
                sample.model_copy(update={"at": self._offset + sample.at}),
                min(1.0, (self._over + done) / self._windows),
            )

        return tell
