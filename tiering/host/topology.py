"""Ranks on one node: which CPUs and which NUMA node are a rank's own. No torch.

Budgets divide bytes; this divides the rest of a node. Kernel threads: the affinity mask that ranks have in common is
cut among them, whole cores before hyper-threads, so that W ranks start as many threads as one would. (torchrun sets
OMP_NUM_THREADS to 1, for OpenMP; our threads are not OpenMP's, and one of them per rank would leave the memory bus
idle.) Ranks that a launcher has bound to masks of their own keep them.

Memory: a rank's arena prefers the node of its GPU, or else the node on which its share of the CPUs lies.

Note: Why threads are not pinned
    A run of the kernels is also worked on by its caller, a thread of the user's, which is not ours to bind; tiles are
    claimed one by one, so that a bound worker whose core is taken by somebody else would be the one that all wait for.
    To bind whole ranks is the launcher's business (``torchrun --numa-binding=node``, ``srun --cpu-bind``, ``numactl``):
    it reaches torch's threads and data workers, too. What it chose is taken over here.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from optim_cpu import kernels
from tiering.text import counted

log = logging.getLogger(__name__)

SYSFS = Path("/sys")
MPOL_PREFERRED = 1  # linux/mempolicy.h
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_PCI = re.compile(r"(?:(?P<domain>[0-9a-f]+):)?(?P<rest>[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])")
_MASK_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True)
class Place:
    """What a rank finds itself on: the CPUs of its affinity mask, and its GPU's NUMA node if that is known."""

    cpus: tuple[int, ...]
    gpu_node: int | None = None


@dataclass(frozen=True)
class NodeShare:
    """A rank's part of its node. ``numa_node`` is None where there is but one, or where its CPUs lie on several."""

    cpus: tuple[int, ...]
    numa_node: int | None = None

    @property
    def threads(self) -> int:
        """Threads for the kernels."""
        return min(len(self.cpus), kernels.MAX_THREADS)

    def __str__(self) -> str:
        node = "" if self.numa_node is None else f", NUMA node {self.numa_node}"
        return f"{counted(self.threads, 'kernel thread')}, CPUs {format_cpus(self.cpus)}{node}"


@dataclass(frozen=True)
class Machine:
    """Which NUMA node and which core a CPU belongs to. A core is named by the first of its hyper-threads."""

    node_of: dict[int, int]
    core_of: dict[int, int]

    @classmethod
    def read(cls, sysfs: Path = SYSFS) -> Machine:
        """As the kernel tells it; what it does not tell is one node, and cores of one thread each."""
        node_of: dict[int, int] = {}
        for listed in (sysfs / "devices/system/node").glob("node[0-9]*/cpulist"):
            for cpu in parse_cpus(listed.read_text()):
                node_of[cpu] = int(listed.parent.name.removeprefix("node"))
        core_of: dict[int, int] = {}
        for listed in (sysfs / "devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list"):
            threads = parse_cpus(listed.read_text())
            core_of.update(dict.fromkeys(threads, min(threads, default=0)))
        return cls(node_of, core_of)

    @property
    def nodes(self) -> int:
        """NUMA nodes that have CPUs."""
        return len(set(self.node_of.values())) or 1

    def node(self, cpu: int) -> int:
        return self.node_of.get(cpu, 0)

    def cores(self, cpus: Sequence[int]) -> list[tuple[int, ...]]:
        """``cpus`` by core, cores by node."""
        found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for cpu in sorted(cpus):
            found[self.node(cpu), self.core_of.get(cpu, cpu)].append(cpu)
        return [tuple(found[core]) for core in sorted(found)]


def settle(
    local_rank: int,
    local_world_size: int,
    gpu_pci: str | None = None,
    *,
    gather: Callable[[Place], Sequence[Place]] | None = None,
    sysfs: Path = SYSFS,
) -> NodeShare:
    """Give the kernels this rank's share of the threads, and say which share that is.

    ``gpu_pci`` is the bus id of the rank's GPU ("0000:3b:00.0"). ``gather`` gives every local rank's Place, in the
    order of the local ranks; without it all ranks are taken to have this one's mask. A rank that is alone on its node
    keeps everything, and a thread count that the program has chosen itself stays.
    """
    mask = tuple(sorted(os.sched_getaffinity(0)))
    machine = Machine.read(sysfs)
    mine = Place(mask, gpu_node(gpu_pci, sysfs) if gpu_pci else None)
    if local_world_size == 1:
        return NodeShare(mask)
    places = [mine] * local_world_size if gather is None else list(gather(mine))
    if len(places) != local_world_size:
        raise ValueError(f"{len(places)} places were gathered from a local world of {local_world_size}")
    share = share_out(places, machine)[local_rank]
    if kernels.thread_count() == min(len(mask), kernels.MAX_THREADS):  # as it was at the start
        kernels.set_thread_count(share.threads)
    log.debug("local rank %d of %d: %s", local_rank, local_world_size, share)
    return share


def share_out(places: Sequence[Place], machine: Machine) -> list[NodeShare]:
    """Each rank's share. Ranks with the same mask divide it, in the order of their GPUs' nodes; no share is empty."""
    together: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        together[place.cpus].append(rank)
    shares: dict[int, NodeShare] = {}
    for mask, ranks in together.items():
        cores = machine.cores(mask)
        # sorted() is stable: ranks whose GPU is not known are spread in their own order.
        ranks = sorted(ranks, key=lambda rank: places[rank].gpu_node or 0)
        for rank, cpus in zip(ranks, _cut(cores, len(ranks)), strict=True):
            shares[rank] = NodeShare(cpus, _numa_node(places[rank], cpus, machine))
    return [shares[rank] for rank in range(len(places))]


def _cut(cores: list[tuple[int, ...]], parts: int) -> list[tuple[int, ...]]:
    """Neighbouring cores for each part; with fewer cores than parts hyper-threads, and those are shared at the end."""
    units = cores if len(cores) >= parts else [(cpu,) for core in cores for cpu in core]
    count = len(units)
    cut = []
    for part in range(parts):
        begin, end = part * count // parts, (part + 1) * count // parts
        cut.append(tuple(sorted(cpu for unit in units[begin : max(end, begin + 1)] for cpu in unit)))
    return cut


def _numa_node(place: Place, cpus: tuple[int, ...], machine: Machine) -> int | None:
    if machine.nodes == 1:
        return None
    # A GPU on a node that the mask leaves out does not count: the user has said where this process belongs.
    if place.gpu_node is not None and place.gpu_node in {machine.node(cpu) for cpu in place.cpus}:
        return place.gpu_node
    on = {machine.node(cpu) for cpu in cpus}
    return on.pop() if len(on) == 1 else None


def gpu_node(pci: str, sysfs: Path = SYSFS) -> int | None:
    """The NUMA node of the device at a PCI bus id as CUDA, nvidia-smi or sysfs write it; None if that is not known."""
    found = _PCI.fullmatch(pci.strip().lower())
    if found is None:
        return None
    name = f"{int(found['domain'] or '0', 16):04x}:{found['rest']}"
    try:
        node = int((sysfs / "bus/pci/devices" / name / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware does not say


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Let the pages of a mapping that are not there yet come from ``node`` while it has room; False if refused.

    ``address`` is a multiple of the page size. Best effort: a container may deny the call.
    """
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        return False
    words = node // _MASK_WORD + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _MASK_WORD] = 1 << (node % _MASK_WORD)
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    # The kernel reads one bit less than it is told.
    refused = call(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(words * _MASK_WORD + 1),
        ctypes.c_uint(0),
    )
    if refused:
        log.debug("NUMA node %d cannot be preferred: %s", node, os.strerror(ctypes.get_errno()))
    return not refused


def parse_cpus(text: str) -> list[int]:
    """The CPUs of a kernel list as "0-3,8"."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def format_cpus(cpus: Sequence[int]) -> str:
    """Inverse of ``parse_cpus``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)
