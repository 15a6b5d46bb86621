"""How busy others keep this machine while something is measured on it: it seems slower than it is then."""

from __future__ import annotations

import os
from pathlib import Path

STAT = Path("/proc/stat")
WORTH_A_WORD = 0.2  # of the CPUs: some of the kernel's work for our own transfers is counted as others', too


class Others:
    """What others take, from now on, of the CPUs that this process may use; hypervisors that give less are others."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._before = self._counted()

    def share(self) -> float:
        """From 0 to 1; 0 if the kernel does not tell."""
        busy, idle, ours = (late - early for late, early in zip(self._counted(), self._before, strict=True))
        return min(1.0, max(0.0, (busy - ours) / (busy + idle))) if busy + idle > 0 else 0.0

    def _counted(self) -> tuple[float, float, float]:
        """Ticks in which those CPUs were (busy, idle), and which this process took of them."""
        busy = idle = 0
        mine = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            lines = []
        for name, *counts in filter(None, map(str.split, lines)):
            if name in mine:
                user, nice, system, waits, io, irq, soft, steal = map(int, counts[:8])
                busy += user + nice + system + irq + soft + steal
                idle += waits + io
        times = os.times()
        return busy, idle, (times.user + times.system) * os.sysconf("SC_CLK_TCK")


def remark(share: float) -> str:
    """What to say of figures that were measured meanwhile; "" if it does not matter."""
    return f"while others took {share:.0%} of the CPUs" if share >= WORTH_A_WORD else ""
