"""CPU use by other processes during a measurement, which lowers the measured rates."""

from __future__ import annotations

import os
from pathlib import Path

STAT = Path("/proc/stat")
# Fraction of the CPUs. Lower values are ignored: some kernel work for this process counts as other processes' too.
WORTH_A_WORD = 0.2


class Others:
    """The CPU use of other processes, since construction, on the CPUs of this process; includes time stolen by a VM."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._before = self._counted()

    def share(self) -> float:
        """The fraction used by other processes, from 0 to 1; 0 if the kernel does not report it."""
        busy, idle, own = (late - early for late, early in zip(self._counted(), self._before, strict=True))
        return min(1.0, max(0.0, (busy - own) / (busy + idle))) if busy + idle > 0 else 0.0

    def _counted(self) -> tuple[float, float, float]:
        """Ticks of these CPUs that were (busy, idle), and the ticks that this process used."""
        busy = idle = 0
        own_cpus = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            lines = []
        for name, *counts in filter(None, map(str.split, lines)):
            if name in own_cpus:
                user, nice, system, waits, io, irq, soft, steal = map(int, counts[:8])
                busy += user + nice + system + irq + soft + steal
                idle += waits + io
        times = os.times()
        return busy, idle, (times.user + times.system) * os.sysconf("SC_CLK_TCK")


def remark(share: float) -> str:
    """A remark for figures measured at this CPU use by others; "" if it is negligible."""
    return f"while other processes used {share:.0%} of the CPUs" if share >= WORTH_A_WORD else ""
