"""Checks of the limits for a process, and of those for the whole system."""

from __future__ import annotations

import re
from pathlib import Path

from tiering.config.fields import format_size
from tiering.doctor.finding import Check, Finding, note, problem
from tiering.host.kernel_files import number, text_of

MIN_OPEN_FILES = 1024
"""Open files that a run may need, with the data workers of its ranks."""

MIN_AIO_EVENTS = 4096
"""Events that libaio contexts of a node may need: some 130 for each context, and a few contexts for each rank."""

_CAP_IPC_LOCK = 14  # linux/capability.h
_ALL_USERS = "0 0 4294967295"  # the uid_map of the namespace that the machine started with


def memlock(root: Path) -> Finding:
    if _may_lock_all(root):
        return Finding("unlimited for this process (CAP_IPC_LOCK)")
    limit = _limit(root, "Max locked memory")
    if limit is None:
        return Finding("unlimited")
    memory = re.search(r"^MemTotal:\s+(\d+) kB", text_of(root / "proc/meminfo") or "", re.MULTILINE)
    if memory and limit >= int(memory[1]) * 1024:
        return Finding(f"{format_size(limit)}, which covers all memory")
    return note(
        f"{format_size(limit)}: beyond that buffers are neither locked in RAM nor registered with io_uring, and each"
        " transfer costs more CPU time",
        "ulimit -l unlimited; permanently '* - memlock unlimited' in /etc/security/limits.conf, LimitMEMLOCK=infinity"
        " in a systemd unit, --ulimit memlock=-1 for a container",
    )


def open_files(root: Path) -> Finding:
    limit = _limit(root, "Max open files")
    if limit is None or limit >= MIN_OPEN_FILES:
        return Finding("unlimited" if limit is None else f"{limit}")
    return note(f"{limit}: data workers and checkpoints of many files may need more", "ulimit -n 65536")


def file_size(root: Path) -> Finding:
    limit = _limit(root, "Max file size")
    if limit is None:
        return Finding("unlimited")
    return problem(
        f"{format_size(limit)}: larger swap files and checkpoints fail (EFBIG)", "ulimit -f unlimited"
    )


def address_space(root: Path) -> Finding:
    limit = _limit(root, "Max address space")
    if limit is None:
        return Finding("unlimited")
    return problem(
        f"{format_size(limit)}: CUDA, torch and the arenas reserve more address space than they use memory",
        "ulimit -v unlimited; limit memory by a cgroup instead (systemd-run --user -p MemoryMax=64G ...)",
    )


def aio_contexts(root: Path) -> Finding:
    limit, used = number(root / "proc/sys/fs/aio-max-nr"), number(root / "proc/sys/fs/aio-nr")
    if limit is None or used is None:
        return Finding("unknown")
    text = f"{used} of {limit} events in use"
    if limit - used >= MIN_AIO_EVENTS:
        return Finding(text)
    return note(
        f"{text}: the engine libaio may not start",
        f"sudo sysctl -w fs.aio-max-nr={max(1 << 20, 2 * limit)}; permanently in /etc/sysctl.d/",
    )


def _limit(root: Path, name: str) -> int | None:
    """The soft limit ``name`` in /proc/self/limits; None if it is unlimited or missing."""
    match = re.search(rf"^{name} +(\d+|unlimited) ", text_of(root / "proc/self/limits") or "", re.MULTILINE)
    return int(match[1]) if match and match[1] != "unlimited" else None


def _may_lock_all(root: Path) -> bool:
    if " ".join((text_of(root / "proc/self/uid_map") or _ALL_USERS).split()) != _ALL_USERS:
        # A capability inside a user namespace (a rootless container) does not lift the limit.
        return False
    match = re.search(r"^CapEff:\s+([0-9a-f]+)$", text_of(root / "proc/self/status") or "", re.MULTILINE)
    return bool(match and int(match[1], 16) >> _CAP_IPC_LOCK & 1)


CHECKS: dict[str, Check] = {
    "memlock": memlock,
    "open files": open_files,
    "file size": file_size,
    "address space": address_space,
    "aio-max-nr": aio_contexts,
}
