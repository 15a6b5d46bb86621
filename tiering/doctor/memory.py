"""Checks of the memory for the host tier: free memory, limits, huge pages, swap, NUMA nodes."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiering.config.fields import format_size
from tiering.doctor.cpus import own_cpus
from tiering.doctor.finding import Check, Finding, note
from tiering.host import numa
from tiering.host.cgroups import levels
from tiering.host.kernel_files import listed, number, text_of
from tiering.host.numa import Node
from tiering.host.topology import Machine, Place, share_out
from tiering.storage.arena import Arena

MIN_SHARED = 1 << 30
"""Bytes of /dev/shm that data workers and the collectives between ranks of a node may need."""

# cgroup version 1 reports a number larger than any memory for "no limit".
_NO_LIMIT = 1 << 60
# Fraction of the memory from which on reserved huge pages are a note.
_MAX_RESERVED = 0.1
# Part of a node's equal share of the pages below which it is a note.
_FAIR_PART = 0.8
# Bytes of swap in use from which on it is a note.
_MAX_SWAPPED = 1 << 30


@dataclass(frozen=True)
class Placed:
    """The pages of a trial arena by NUMA node, and the errno with which the kernel refused its policy, 0 for none."""

    on: Counter[int]
    refusal: int = 0


def place_on(nodes: Sequence[Node], nbytes: int = 64 << 20) -> Placed:
    """Map an arena of ``nbytes`` on ``nodes``."""
    arena = Arena.map(nbytes, "trial", nodes=nodes)
    refusal = numa.prefer(arena.address, arena.capacity, [node.number for node in nodes])
    return Placed(numa.pages(arena.address, arena.capacity), refusal)


def memory(root: Path) -> Finding:
    fields = _meminfo(root)
    if not {"MemTotal", "MemAvailable"} <= fields.keys():
        return Finding("unknown")
    total, available = fields["MemTotal"], fields["MemAvailable"]
    text = f"{format_size(total)}, {format_size(available)} of it available"
    if available >= total / 4:
        return Finding(text)
    return note(
        f"{text}: an automatic host_budget excludes the memory of other processes",
        "find the processes (ps aux --sort=-rss | head), or set host_budget",
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
    text = text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")
    match = re.search(r"\[(\w+)\]", text or "")
    if match is None:
        return note(
            "not supported by this kernel: touching and copying buffers costs more CPU time",
            "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
        )
    if match[1] != "never":
        return Finding(f"{match[1]}")
    return note(
        "never: touching and copying buffers costs more CPU time",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )


def reserved_huge_pages(root: Path) -> Finding:
    fields = _meminfo(root)
    nbytes = fields.get("Hugetlb", 0)
    if not nbytes:
        return Finding("none")
    text = f"{format_size(nbytes)} of memory are reserved for hugetlbfs"
    if nbytes < _MAX_RESERVED * fields.get("MemTotal", 0):
        return Finding(text)
    return note(
        f"{text}, which tiering does not use",
        "sudo sysctl -w vm.nr_hugepages=0, if no other program uses them",
    )


def swap(root: Path) -> Finding:
    fields = _meminfo(root)
    total, used = fields.get("SwapTotal", 0), fields.get("SwapTotal", 0) - fields.get("SwapFree", 0)
    if not total:
        return Finding("none")
    text = f"{format_size(used)} of {format_size(total)} in use"
    if used < _MAX_SWAPPED:
        return Finding(text)
    return note(
        f"{text}: memory has been short, and the kernel may swap out memory of the host tier",
        "lower host_budget; when memory is free, sudo swapoff -a && sudo swapon -a moves the data back to RAM",
    )


def overcommit(root: Path) -> Finding:
    mode = number(root / "proc/sys/vm/overcommit_memory")
    if mode != 2:
        return Finding("unknown" if mode is None else f"mode {mode}")
    fields = _meminfo(root)
    remaining = fields.get("CommitLimit", 0) - fields.get("Committed_AS", 0)
    return note(
        f"mode 2: reserved memory counts as used, and {format_size(max(remaining, 0))} are left; CUDA reserves more"
        " than it uses",
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
    text = f"{format_size(nbytes)}, {format_size(free)} free"
    if free >= MIN_SHARED:
        return Finding(text)
    return note(
        f"{text}: data workers, and NCCL between the ranks of a node, may fail",
        "docker run --shm-size=16g (or --ipc=host); without a container: sudo mount -o remount,size=16G /dev/shm,"
        " or remove files there",
    )


def numa_nodes(root: Path) -> Finding:
    nodes = [node for node in listed(root / "sys/devices/system/node") if re.fullmatch(r"node\d+", node.name)]
    memories = []
    for node in nodes:
        match = re.search(r"MemTotal:\s+(\d+) kB", text_of(node / "meminfo") or "")
        memories.append((node.name, int(match[1]) * 1024 if match else 0))
    if len(memories) < 2:
        return Finding("1 node")
    empty = [name for name, nbytes in memories if not nbytes]
    text = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in memories)
    if not empty:
        return Finding(text)
    return note(f"{text}: {', '.join(empty)} without memory", "install memory modules for each socket")


def arena_pages(root: Path, place: Callable[[Sequence[Node]], Placed] = place_on) -> Finding:
    """The nodes of the pages of an arena, as a single rank with the CPUs of this process would map it."""
    nodes = share_out([Place(tuple(own_cpus(root)))], Machine.read(root / "sys"))[0].nodes
    if not nodes:
        return Finding("on the only NUMA node with CPUs")
    placed = place(nodes)
    text = numa.describe(placed.on)
    if placed.refusal:
        name = errno.errorcode.get(placed.refusal, str(placed.refusal))
        return note(
            f"{text}: mbind is denied ({name}), so threads bound to the nodes touch the pages; the kernel may move them"
            " later",
            "docker run --cap-add SYS_NICE, or a seccomp profile that allows mbind",
        )
    total = sum(placed.on.values())
    if total and min(placed.on[node.number] for node in nodes) < _FAIR_PART * total / len(nodes):
        numbers = ", ".join(str(node.number) for node in nodes)
        return note(
            f"{text}, of an arena for nodes {numbers}: the memory of a node is full, so the kernels have only"
            " the bandwidth of the other nodes",
            "find the processes on the full node (numastat -m, numastat -p PID), or bind this one to a node with free"
            " memory: numactl --cpunodebind=N",
        )
    return Finding(text)


def _meminfo(root: Path) -> dict[str, int]:
    """The fields of /proc/meminfo in kB, as bytes. Fields that count pages are left out."""
    text = text_of(root / "proc/meminfo") or ""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


CHECKS: dict[str, Check] = {
    "memory": memory,
    "cgroup memory": cgroup_memory,
    "NUMA nodes": numa_nodes,
    "arena's pages": arena_pages,
    "transparent huge pages": huge_pages,
    "huge pages set aside": reserved_huge_pages,
    "system swap": swap,
    "overcommit": overcommit,
    "shm": shared_memory,
}
