"""The control groups of this process and their limits. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tiering.host.kernel_files import text_of


class Level(NamedTuple):
    """A directory that may have a limit, and the version of cgroups that determines its file names."""

    version: int
    directory: Path


def levels(controller: str, root: Path = Path("/")) -> list[Level]:
    """All directories with limits of ``controller`` ("memory", "io"; "blkio" in version 1), innermost first.

    Any level above the process may have a limit. In a container, its cgroup may be the root of the mount although /proc
    shows the host's path, so all levels are returned.
    """
    mounted = root / "sys/fs/cgroup"
    name = "blkio" if controller == "io" else controller
    directories = []
    for line in (text_of(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        inner = Path(path.lstrip("/"))
        if number == "0":
            # If version 1 is also mounted, version 2 is in the directory `unified`.
            bases = [Level(2, mounted), Level(2, mounted / "unified")]
        elif name in controllers.split(","):
            bases = [Level(1, mounted / name)]
        else:
            continue
        directories += [
            Level(base.version, base.directory / part) for base in bases for part in (inner, *inner.parents)
        ]
    return directories


class IoLimit(NamedTuple):
    """A line of limits: the file, the device number of the drive, and the limits (bytes or operations per second)."""

    file: str
    drive: str
    words: str


def io_limits(root: Path = Path("/")) -> Iterator[IoLimit]:
    """The limits of this process' reads and writes per second on drives, level by level."""
    for level in levels("io", root):
        throttles = (
            f"blkio.throttle.{way}_{unit}_device" for unit in ("bps", "iops") for way in ("read", "write")
        )
        for name in ("io.max",) if level.version == 2 else throttles:
            for line in (text_of(level.directory / name) or "").splitlines():
                drive, _, text = line.partition(" ")
                limits = " ".join(word for word in text.split() if not word.endswith("=max"))
                if limits:
                    yield IoLimit(name, drive, limits)
