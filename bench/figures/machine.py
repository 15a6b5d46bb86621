"""Where a figure was measured: hardware, file system, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def mount_of(directory: Path) -> tuple[str, str, str]:
    """Source, file system type and options of what ``directory`` is on: the mount of its device number."""
    number = directory.stat().st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == wanted:
            kind, device, options = source.split(maxsplit=2)
            return device, kind, options
    return "?", "?", ""


def device_of(directory: Path) -> str:
    """The block device behind ``directory``: its name, model, size and scheduler, as far as sysfs tells."""
    number = directory.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        return "none"
    device = device.resolve()
    disk = device if (device / "queue").is_dir() else device.parent

    def said(name: str) -> str:
        path = disk / name
        return path.read_text().strip() if path.is_file() else ""

    parts = [disk.name, said("device/model")]
    if size := said("size"):
        parts.append(f"{int(size) * 512 / 1e9:.0f} GB")
    parts += [f"scheduler {said('queue/scheduler')}", f"max_sectors_kb {said('queue/max_sectors_kb')}"]
    return ", ".join(part for part in parts if part)


def huge_pages() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text().strip() if path.is_file() else "none"


def describe(*distributions: str, directory: Path | None = None) -> dict[str, str]:
    """What a reader needs to judge or repeat the figures, in printing order.

    ``distributions`` are named with their versions, and what ``directory`` is on if there is one.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    facts = {
        "CPU": f"{cpu_model()}, {os.cpu_count()} CPUs, {len(os.sched_getaffinity(0))} of them ours",
        "memory": f"{memory:.0f} GiB, transparent huge pages {huge_pages()}",
        "kernel": f"{platform.system()} {platform.release()}",
    }
    if directory is not None:
        source, kind, options = mount_of(directory)
        facts |= {"file system": f"{kind} on {source} ({options})", "device": device_of(directory)}
    versions = [f"{name} {importlib.metadata.version(name)}" for name in distributions]
    return facts | {
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "load average": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }
