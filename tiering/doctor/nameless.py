"""Files in use that have no name: what `df` counts and `ls` does not show. Swap space is such files."""

from __future__ import annotations

import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tiering.config.fields import format_size
from tiering.doctor.finding import Finding, Verdict, note
from tiering.host.kernel_files import listed, said
from tiering.telemetry import TelemetryError, find_status_files
from tiering.text import counted

_NOT_ON_DISK = ("/memfd:", "/dev/", "/SYSV", "/[", "/anon_hugepage", "/proc/")
_SHOWN = 5  # processes


@dataclass(frozen=True)
class Holder:
    """A process, a file without a name that it has open, and the bytes that it takes on its file system."""

    process: int
    command: str
    device: int
    inode: int
    nbytes: int


def holders(root: Path = Path("/")) -> list[Holder]:
    """Of the processes that this user may look into: their own, or everybody's for root."""
    found = []
    for process in listed(root / "proc"):
        if not process.name.isdecimal():
            continue
        seen: set[tuple[int, int]] = set()
        for descriptor in listed(process / "fd"):
            try:
                target = str(descriptor.readlink())
                if not target.endswith(" (deleted)") or target.startswith(_NOT_ON_DISK):
                    continue
                status = descriptor.stat()
            except OSError:  # gone meanwhile
                continue
            file = (status.st_dev, status.st_ino)
            if status.st_nlink or not stat.S_ISREG(status.st_mode) or file in seen:
                continue
            seen.add(file)
            command = said(process / "comm") or "?"
            found.append(Holder(int(process.name), command, *file, status.st_blocks * 512))
    return found


def live_runs() -> dict[int, str]:
    """Runs of this user that publish now, by the process: "run gpt, in backward at step 12"."""
    try:
        readings = [page.read() for page in find_status_files()]
    except TelemetryError:  # a directory that cannot be read has no page for us
        return {}
    said = [reading.snapshot for reading in readings if reading.state == "live"]
    return {one.pid: f"run {one.run_name}, step {one.global_step}" for one in said if one is not None}


def judge(held: Iterable[Holder], runs: Mapping[int, str] | None = None) -> Finding:
    """Each file counts once in the sum, however many processes have it open. Swap space of ``runs`` is as it should be.

    Without ``runs`` they are those that publish now.
    """
    held = list(held)
    runs = live_runs() if runs is None and held else runs or {}
    training = {runs[holder.process] for holder in held if holder.process in runs}
    expected = {(holder.device, holder.inode) for holder in held if holder.process in runs}
    held = [holder for holder in held if (holder.device, holder.inode) not in expected]
    finding = _judge_others(held)
    if not training:
        return finding
    swap = f"swap space of {'; '.join(sorted(training))}"
    return (
        Finding(swap)
        if finding.verdict is Verdict.OK
        else replace(finding, found=f"{finding.found}; besides, {swap}")
    )


def _judge_others(held: Iterable[Holder]) -> Finding:
    files: dict[tuple[int, int], int] = {}
    processes: defaultdict[tuple[int, str], int] = defaultdict(int)
    for holder in held:
        if holder.nbytes:
            files[holder.device, holder.inode] = holder.nbytes
            processes[holder.process, holder.command] += holder.nbytes
    if not files:
        return Finding("none")
    order = sorted(processes.items(), key=lambda item: -item[1])
    shown = [
        f"{command} (process {process}) {format_size(nbytes)}"
        for (process, command), nbytes in order[:_SHOWN]
    ]
    more = [f"{len(order) - _SHOWN} more"] if len(order) > _SHOWN else []
    pids = ",".join(str(process) for (process, _), _ in order)
    return note(
        f"{format_size(sum(files.values()))} in {counted(len(files), 'file')} without a name, which df counts and ls"
        f" does not show: {', '.join(shown + more)}",
        f"the space returns when those processes end; look at them: ps -fp {pids}",
    )
