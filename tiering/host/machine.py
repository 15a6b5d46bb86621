"""The CPU, memory, GPUs and kernel of this machine. No torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# On Arm, the kernel reports these fields instead of a model name.
_ARM_FIELDS = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision")
# The fields that identify a CPU: first those of x86, then those of Arm.
_CPU_FIELDS = ("vendor_id", "model name", "cpu family", "model", "stepping", *_ARM_FIELDS)


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """The model name of the CPU."""
    return _first_cpu(cpuinfo, ("model name",)) or _first_cpu(cpuinfo, _ARM_FIELDS) or platform.machine()


def cpu_identity(cpuinfo: Path = CPUINFO) -> str:
    """A text that identifies the CPU model, also among models with the same name."""
    return _first_cpu(cpuinfo, _CPU_FIELDS) or platform.machine()


def memory_bytes() -> int:
    """Bytes of physical memory, regardless of cgroup limits."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gpu_count(devices: Path = Path("/dev")) -> int:
    """The number of NVIDIA GPUs, as the driver lists them."""
    return sum(each.name.removeprefix("nvidia").isdigit() for each in devices.glob("nvidia*"))


def kernel() -> str:
    return f"{platform.system()} {platform.release()}"


def _first_cpu(cpuinfo: Path, names: tuple[str, ...]) -> str:
    """The values of the fields ``names`` of the first CPU, joined by blanks."""
    try:
        first = cpuinfo.read_text().partition("\n\n")[0]
    except OSError:
        return ""
    fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    values = {name.strip(): value.strip() for name, value in fields.items()}
    return " ".join(values[name] for name in names if name in values)
