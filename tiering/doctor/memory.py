"""The host tier: how much memory there is for it, whose it is, and what the kernel does with it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tiering.config.fields import format_size
from tiering.doctor.finding import Check, Finding, note
from tiering.host.cgroups import levels
from tiering.host.kernel_files import listed, number, said

SHARED = 1 << 30
"""Bytes of /dev/shm that data workers and the collectives between ranks of a node may need."""

_NO_LIMIT = 1 << 60  # version 1 writes a number beyond any memory for "none"
_RESERVED = 0.1  # of the memory: huge pages that are set aside are worth a word from there on
_SWAPPED = 1 << 30


def memory(root: Path) -> Finding:
    fields = _meminfo(root)
    if not {"MemTotal", "MemAvailable"} <= fields.keys():
        return Finding("not told")
    total, available = fields["MemTotal"], fields["MemAvailable"]
    found = f"{format_size(total)}, {format_size(available)} of it available"
    if available >= total / 4:
        return Finding(found)
    return note(
        f"{found}: an automatic host_budget counts what others use as gone",
        "see who uses it (ps aux --sort=-rss | head), or set host_budget",
    )


def cgroup_memory(root: Path) -> Finding:
    total = _meminfo(root).get("MemTotal", _NO_LIMIT)
    files = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
    limits = [
        (name, limit)
        for level in levels("memory", root)
        for name in files[level.version]
        if (limit := number(level.directory / name)) is not None and limit < total
    ]
    hard = [limit for name, limit in limits if name != "memory.high"]
    soft = min((limit for name, limit in limits if name == "memory.high"), default=None)
    if soft is not None and soft < min(hard, default=total):
        return note(
            f"slowed down beyond {format_size(soft)} (memory.high)",
            f"set host_budget below {format_size(soft * 0.8)}, or memory.high of the cgroup to max"
            " (systemctl set-property UNIT MemoryHigh=infinity)",
        )
    if hard:
        return Finding(f"at most {format_size(min(hard))}, of {format_size(total)}")
    return Finding("no limit")


def huge_pages(root: Path) -> Finding:
    text = said(root / "sys/kernel/mm/transparent_hugepage/enabled")
    found = re.search(r"\[(\w+)\]", text or "")
    if found is None:
        return note(
            "none in this kernel: touching and copying buffers costs more CPU time", "a kernel with them"
        )
    if found[1] != "never":
        return Finding(f"{found[1]}")
    return note(
        "never: touching and copying buffers costs more CPU time",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )


def set_aside(root: Path) -> Finding:
    fields = _meminfo(root)
    nbytes = fields.get("Hugetlb", 0)
    if not nbytes:
        return Finding("none")
    found = f"{format_size(nbytes)} of memory are set aside for hugetlbfs"
    if nbytes < _RESERVED * fields.get("MemTotal", 0):
        return Finding(found)
    return note(
        f"{found}, which this project does not use", "sudo sysctl -w vm.nr_hugepages=0, if nobody else does"
    )


def swap(root: Path) -> Finding:
    fields = _meminfo(root)
    total, used = fields.get("SwapTotal", 0), fields.get("SwapTotal", 0) - fields.get("SwapFree", 0)
    if not total:
        return Finding("none")
    found = f"{format_size(used)} of {format_size(total)} in use"
    if used < _SWAPPED:
        return Finding(found)
    return note(
        f"{found}: the system has been short of memory, and may swap out what was to stay in RAM",
        "lower host_budget; once memory is free, sudo swapoff -a && sudo swapon -a brings it back",
    )


def overcommit(root: Path) -> Finding:
    mode = number(root / "proc/sys/vm/overcommit_memory")
    if mode != 2:
        return Finding("not told" if mode is None else f"mode {mode}")
    fields = _meminfo(root)
    left = fields.get("CommitLimit", 0) - fields.get("Committed_AS", 0)
    return note(
        f"mode 2: what is reserved counts as used, and {format_size(max(left, 0))} are left; CUDA reserves more than"
        " it uses",
        "sudo sysctl -w vm.overcommit_memory=0",
    )


def shared_memory(root: Path) -> Finding:
    try:
        status = os.statvfs(root / "dev/shm")
    except OSError as error:
        return note(
            f"none: {error.strerror}; data workers and NCCL need it",
            "mount it: sudo mount -t tmpfs tmpfs /dev/shm",
        )
    return judge_shared_memory(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)


def judge_shared_memory(nbytes: int, free: int) -> Finding:
    found = f"{format_size(nbytes)}, {format_size(free)} free"
    if free >= SHARED:
        return Finding(found)
    return note(
        f"{found}: data workers, and NCCL between the ranks of a node, may fail",
        "docker run --shm-size=16g (or --ipc=host); else sudo mount -o remount,size=16G /dev/shm,"
        " or remove what lies there",
    )


def numa(root: Path) -> Finding:
    places = [
        place for place in listed(root / "sys/devices/system/node") if re.fullmatch(r"node\d+", place.name)
    ]
    memories = []
    for place in places:
        found = re.search(r"MemTotal:\s+(\d+) kB", said(place / "meminfo") or "")
        memories.append((place.name, int(found[1]) * 1024 if found else 0))
    if len(memories) < 2:
        return Finding("1 node")
    empty = [name for name, nbytes in memories if not nbytes]
    shown = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in memories)
    if not empty:
        return Finding(shown)
    return note(f"{shown}: {', '.join(empty)} without memory", "see that each socket has its memory modules")


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes; what is counted in pages is left out."""
    text = said(root / "proc/meminfo") or ""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


CHECKS: dict[str, Check] = {
    "memory": memory,
    "cgroup memory": cgroup_memory,
    "NUMA nodes": numa,
    "transparent huge pages": huge_pages,
    "huge pages set aside": set_aside,
    "system swap": swap,
    "overcommit": overcommit,
    "shm": shared_memory,
}
