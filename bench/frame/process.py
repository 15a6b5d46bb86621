"""What the kernel counts of this process. Standard library only."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


def resident(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """Reset VmHWM where the kernel allows it; elsewhere it stays an upper bound."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def disk_traffic() -> tuple[int, int]:
    """Bytes (read, written) that this process made the disks move."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def cpu_seconds() -> float:
    """User and system time of all threads of this process so far."""
    now = os.times()
    return now.user + now.system


def driver_seconds() -> float:
    """CPU seconds of the threads that drive I/O contexts, by their name; workers have another one."""
    tasks = Path("/proc/self/task").iterdir()
    drivers = [task for task in tasks if (task / "comm").read_text() == "tiering-aio\n"]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in drivers) / 1e9


def age() -> float:
    """Seconds since this process was started."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
