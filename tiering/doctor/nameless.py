"""Unnamed open files, which `df` counts and `ls` does not show. Swap files are unnamed."""

from __future__ import annotations

import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tiering._text import counted
from tiering.config.fields import format_size
from tiering.doctor.finding import Finding, Verdict, note
from tiering.host.kernel_files import listed, text_of
from tiering.telemetry import TelemetryError, find_status_files

_NOT_ON_DISK = ("/memfd:", "/dev/", "/SYSV", "/[", "/anon_hugepage", "/proc/")
# Processes that a finding lists.
_MAX_PROCESSES = 5


@dataclass(frozen=True)
class Holder:
    """A process and an unnamed file that it has open. ``nbytes`` is its space on the file system."""

    process: int
    command: str
    device: int
    inode: int
    nbytes: int


def holders(root: Path = Path("/")) -> list[Holder]:
    """The holders among the processes that this user may inspect: their own, or all for root."""
    holders = []
    for process in listed(root / "proc"):
        if not process.name.isdecimal():
            continue
        # Device and inode of each file of this process that has been added.
        files: set[tuple[int, int]] = set()
        for descriptor in listed(process / "fd"):
            try:
                target = str(descriptor.readlink())
                if not target.endswith(" (deleted)") or target.startswith(_NOT_ON_DISK):
                    continue
                status = descriptor.stat()
            except OSError:
                # The process has closed the file, or has ended.
                continue
            file = (status.st_dev, status.st_ino)
            if status.st_nlink or not stat.S_ISREG(status.st_mode) or file in files:
                continue
            files.add(file)
            command = text_of(process / "comm") or "?"
            holders.append(Holder(int(process.name), command, *file, status.st_blocks * 512))
    return holders


def live_runs() -> dict[int, str]:
    """This user's runs that publish now, by process id: "run gpt, step 12"."""
    try:
        readings = [file.read() for file in find_status_files()]
    except TelemetryError:
        # The run directory cannot be used, so that it has no status files.
        return {}
    snapshots = [reading.snapshot for reading in readings if reading.state == "live"]
    return {
        snapshot.pid: f"run {snapshot.run_name}, step {snapshot.global_step}"
        for snapshot in snapshots
        if snapshot is not None
    }


def judge(holders: Iterable[Holder], runs: Mapping[int, str] | None = None) -> Finding:
    """The finding about ``holders``. Swap space of ``runs`` (default: ``live_runs()``) is OK; other files are a note.

    A file counts once in the sum, even if several processes have it open.
    """
    holders = list(holders)
    runs = live_runs() if runs is None and holders else runs or {}
    training = {runs[holder.process] for holder in holders if holder.process in runs}
    expected = {(holder.device, holder.inode) for holder in holders if holder.process in runs}
    finding = _judge_unexpected(holder for holder in holders if (holder.device, holder.inode) not in expected)
    if not training:
        return finding
    swap = f"swap space of {'; '.join(sorted(training))}"
    return (
        Finding(swap)
        if finding.verdict is Verdict.OK
        else replace(finding, found=f"{finding.found}; also {swap}")
    )


def _judge_unexpected(holders: Iterable[Holder]) -> Finding:
    files: dict[tuple[int, int], int] = {}
    processes: defaultdict[tuple[int, str], int] = defaultdict(int)
    for holder in holders:
        if holder.nbytes:
            files[holder.device, holder.inode] = holder.nbytes
            processes[holder.process, holder.command] += holder.nbytes
    if not files:
        return Finding("none")
    order = sorted(processes.items(), key=lambda item: -item[1])
    largest = [
        f"{command} (process {process}) {format_size(nbytes)}"
        for (process, command), nbytes in order[:_MAX_PROCESSES]
    ]
    more = [f"{len(order) - _MAX_PROCESSES} more"] if len(order) > _MAX_PROCESSES else []
    pids = ",".join(str(process) for (process, _), _ in order)
    return note(
        f"{format_size(sum(files.values()))} in {counted(len(files), 'file')} without a name, which df counts and ls"
        f" does not show: {', '.join(largest + more)}",
        f"the space is freed when these processes end; inspect them: ps -fp {pids}",
    )
