"""Control groups: where the limits on this process stand. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tiering.host.kernel_files import number, said


class Level(NamedTuple):
    """A directory in which a limit may stand, and the version of cgroups that its files are named by."""

    version: int
    directory: Path


def levels(controller: str, root: Path = Path("/")) -> list[Level]:
    """All that may hold limits of ``controller`` ("memory", "cpu", "io"; "blkio" in version 1) for this process.

    A limit may stand at any level above the process, and a container may see its own cgroup at the root of the mount
    while /proc names it as the host does: every level is asked. Innermost first.
    """
    mounted = root / "sys/fs/cgroup"
    first = "blkio" if controller == "io" else controller
    found = []
    for line in (said(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        inner = Path(path.lstrip("/"))
        if number == "0":
            # Beside version 1, version 2 has a directory of its own.
            bases = [Level(2, mounted), Level(2, mounted / "unified")]
        elif first in controllers.split(","):
            bases = [Level(1, mounted / first)]
        else:
            continue
        found += [
            Level(base.version, base.directory / part) for base in bases for part in (inner, *inner.parents)
        ]
    return found


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs whose time the tightest limit leaves to this process; None if there is no limit."""
    shares = []
    for level in levels("cpu", root):
        if level.version == 2:
            words = (said(level.directory / "cpu.max") or "").split()
            pair = [int(word) for word in words if word.isdecimal()]
        else:
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            pair = [value for name in files if (value := number(level.directory / name)) is not None]
        if len(pair) == 2 and pair[0] > 0 and pair[1] > 0:
            shares.append(pair[0] / pair[1])
    return min(shares, default=None)


class IoLimit(NamedTuple):
    """A line of limits: the file, the drive as the kernel numbers it, and the words, bytes or operations per second."""

    file: str
    drive: str
    words: str


def io_limits(root: Path = Path("/")) -> Iterator[IoLimit]:
    """What this process may read from drives and write to them in a second, level by level."""
    for level in levels("io", root):
        throttles = (
            f"blkio.throttle.{way}_{unit}_device" for unit in ("bps", "iops") for way in ("read", "write")
        )
        for name in ("io.max",) if level.version == 2 else throttles:
            for line in (said(level.directory / name) or "").splitlines():
                drive, _, words = line.partition(" ")
                told = " ".join(word for word in words.split() if not word.endswith("=max"))
                if told:
                    yield IoLimit(name, drive, told)
