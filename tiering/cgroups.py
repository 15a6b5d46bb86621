"""Control groups: where the limits on this process stand. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tiering.kernel_files import said


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
