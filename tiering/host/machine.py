"""What this machine is: its CPU as the kernel describes it, its memory, its kernel. No torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# Arm's kernels give a CPU no name, but these.
_ARM_FIELDS = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision")
# What tells one CPU from another: first x86's words, then Arm's.
_CPU_FIELDS = ("vendor_id", "model name", "cpu family", "model", "stepping", *_ARM_FIELDS)


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """What people call the CPU."""
    return _first_cpu(cpuinfo, ("model name",)) or _first_cpu(cpuinfo, _ARM_FIELDS) or platform.machine()


def cpu_identity(cpuinfo: Path = CPUINFO) -> str:
    """What tells it from one of the same name, too."""
    return _first_cpu(cpuinfo, _CPU_FIELDS) or platform.machine()


def memory_bytes() -> int:
    """All that is fitted, whatever a cgroup allows."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def kernel() -> str:
    return f"{platform.system()} {platform.release()}"


def _first_cpu(cpuinfo: Path, names: tuple[str, ...]) -> str:
    """Those of ``names`` that the kernel tells of its first CPU."""
    try:
        first = cpuinfo.read_text().partition("\n\n")[0]
    except OSError:
        return ""
    fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    return " ".join(named[name] for name in names if name in named)
