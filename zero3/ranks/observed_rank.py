"""A rank as another rank observes it: its last beat, and the CPU time of its process while it gives none.

Note [A rank that computes without a beat]
    The heartbeat is a Python thread. A call that keeps the GIL for long (a large json.load, a regular expression, an
    extension) stops it, although the rank is alive. So while a rank gives no beat, the ranks of the same host
    observe its process: CPU time that it spends counts as a sign of life. They report it to other hosts in their own
    beats, for ``timeout`` seconds at most, because the process may be in an endless loop.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from zero3.ranks.store import Beat

TICKS = os.sysconf("SC_CLK_TCK")  # clock ticks of CPU time per second
BUSY = 0.05  # of one CPU: a process that only waits spends less, on background threads
INTERVAL = 0.5  # seconds over which CPU time is measured: one tick more or less does not matter
STOPPED = "TtZX"  # states of a process that does not run


@dataclass
class ObservedRank:
    """Another rank, as observed. Times are seconds of the heartbeat's clock. The heartbeat's thread writes it."""

    beat: Beat
    since: float  # when this beat was first read
    read_at: float  # when the store was last read for this rank, which may be long ago
    is_local: bool = False  # its process is visible from here, while it lives
    computed_at: float = float("-inf")  # when its process was last known to compute, after that beat
    _ticks: int | None = None  # CPU time when it was last measured
    _measured_at: float = 0.0
    _computes: bool = False  # at that time

    @property
    def silence(self) -> float:
        """Seconds for which the rank is known to have given no beat."""
        return self.read_at - self.since

    def stillness(self, timeout: float) -> float:
        """Seconds without a sign of life. Computation counts as one, up to ``timeout`` seconds of silence."""
        return self.silence if self.silence > timeout else self.read_at - max(self.since, self.computed_at)

    def update(self, beat: Beat, clock: float) -> None:
        """The rank has given another beat."""
        self.beat, self.since = beat, clock
        self._ticks, self._computes = None, False

    def is_computing(self, clock: float) -> bool:
        """Whether its process, on this host, computes. To be called at every look."""
        elapsed = clock - self._measured_at
        if self._ticks is None or elapsed >= INTERVAL:
            state, ticks, before = self.beat.process.state(), self.beat.process.cpu_ticks(), self._ticks
            self._ticks, self._measured_at = ticks, clock
            is_running = state is not None and state not in STOPPED
            spent = ticks - before if ticks is not None and before is not None else 0
            self._computes = is_running and spent > BUSY * TICKS * elapsed
        if self._computes:
            self.computed_at = clock
        return self._computes
