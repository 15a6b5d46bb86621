"""Where a figure was measured: hardware, file system, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from tiering.host import drives
from tiering.host.machine import cpu_model, kernel, memory_bytes


def huge_pages() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text().strip() if path.is_file() else "none"


def takes_direct_io(directory: Path) -> bool:
    """True if anonymous files in ``directory`` can be opened with O_DIRECT."""
    try:
        os.close(os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


def describe(*distributions: str, directory: Path | None = None) -> dict[str, str]:
    """What a reader needs to judge or repeat the figures, in printing order.

    ``distributions`` are named with their versions, and what ``directory`` is on if there is one.
    """
    facts = {
        "CPU": f"{cpu_model()}, {os.cpu_count()} CPUs, {len(os.sched_getaffinity(0))} of them ours",
        "memory": f"{memory_bytes() / 2**30:.0f} GiB, transparent huge pages {huge_pages()}",
        "kernel": kernel(),
    }
    if directory is not None:
        backing = drives.behind(directory)
        facts |= {
            "file system": str(backing.file_system),
            "device": "; ".join(str(drive) for drive in backing.drives) or "none",
        }
    versions = [f"{name} {importlib.metadata.version(name)}" for name in distributions]
    return facts | {
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "load average": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }
