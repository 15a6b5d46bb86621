"""What a rank knows of another one: its last beat, and what its process does while it gives none.

Note [A rank that computes and says nothing]
    The heartbeat is a thread of Python's. A call that keeps the GIL for long (a large json.load, a regular expression,
    an extension) stops it, though the rank is alive and will go on. So while a rank says nothing, those of the same
    host look at its process: CPU time that it spends counts as a sign of life, and they tell the other hosts in their
    own beats. That goes on for ``timeout`` seconds, for the process may be in a loop that never ends.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from zero3.ranks.store import Beat

TICKS = os.sysconf("SC_CLK_TCK")  # of CPU time, in a second
BUSY = 0.05  # of one CPU: less is what a process spends that only waits, on threads of its own
WINDOW = 0.5  # seconds: a tick more or less is nothing there
STOPPED = "TtZX"  # states of a process that cannot go on by itself


@dataclass
class Seen:
    """What is known of another rank. Times are the heartbeat's clock, in seconds."""

    beat: Beat
    since: float  # when this beat was first seen
    looked: float  # when somebody looked last, which may be long ago
    here: bool = False  # its process can be seen from here, while it lives
    worked: float = float("-inf")  # when its process was last known to compute, after that beat
    _ticks: int | None = None  # of CPU time, when they were last counted
    _counted: float = 0.0
    _computes: bool = False  # as of then

    @property
    def silence(self) -> float:
        """Seconds for which it is known to have said nothing."""
        return self.looked - self.since

    def stillness(self, timeout: float) -> float:
        """Seconds without a sign of life: its silence, or, up to ``timeout`` of that, since it was seen to compute."""
        return self.silence if self.silence > timeout else self.looked - max(self.since, self.worked)

    def take(self, beat: Beat, clock: float) -> None:
        """It has given another beat."""
        self.beat, self.since = beat, clock
        self._ticks, self._computes = None, False

    def look_at_work(self, clock: float) -> bool:
        """Whether its process, which is on this host, computes. To be called at every look."""
        passed = clock - self._counted
        if self._ticks is None or passed >= WINDOW:
            state, ticks, before = self.beat.process.state(), self.beat.process.cpu_ticks(), self._ticks
            self._ticks, self._counted = ticks, clock
            goes_on = state is not None and state not in STOPPED
            spent = ticks - before if ticks is not None and before is not None else 0
            self._computes = goes_on and spent > BUSY * TICKS * passed
        if self._computes:
            self.worked = clock
        return self._computes
