"""Divides the CPUs and NUMA nodes of a machine among its ranks. No torch.

Budgets divide memory; this module divides CPUs. Kernel threads: ranks with the same affinity mask divide it, by whole
cores before hyper-threads, so that W ranks start as many threads as one rank. (torchrun sets OMP_NUM_THREADS to 1 for
OpenMP; the kernels' threads do not use OpenMP, and one thread per rank could not saturate the memory bus.) Ranks that a
launcher has bound to different masks keep them. A CPU quota of the control groups bounds the threads: with more, the
kernel stops all threads of the process, those of I/O as well, for the remainder of each period. A share of many cores
saturates its memory with one thread for each core: it has no second thread on a core, and leaves one core to the I/O
driver if there is NVMe. A program that calls ``kernels.set_thread_count`` first keeps its number.

Memory: a rank's arena prefers the NUMA node of its GPU, or else the node of its CPUs; if these are on several nodes, it
is interleaved over them (``numa.py``).

Note: Why threads are not pinned
    The caller of a kernel, a thread of the user, also works on it and must not be pinned. Threads claim tiles one by
    one, so all would wait for a pinned worker whose core another process uses. Each worker starts with the same slice
    in each step, and memory that is interleaved over nodes is equally far from all CPUs. Binding whole ranks is the
    task of the launcher (``torchrun --numa-binding=node``, ``srun --cpu-bind``, ``numactl``), which also binds torch's
    threads and data workers. This module uses the launcher's masks.
"""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from optim_cpu import kernels
from tiering._text import counted
from tiering.host.numa import Node

log = logging.getLogger(__name__)

SYSFS = Path("/sys")
_PCI = re.compile(r"(?:(?P<domain>[0-9a-f]+):)?(?P<rest>[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])")
# From so many cores on, one thread for each is taken to saturate the memory: a core alone moves 24 GB/s (bench_pool.py,
# on Zen 4), and a server's memory has 3 to 10 GB/s for each core. On fewer cores each hyper-thread counts.
MANY_CORES = 8


@dataclass(frozen=True)
class Place:
    """The CPUs of a rank's affinity mask, and the NUMA node of its GPU if it is known."""

    cpus: tuple[int, ...]
    gpu_node: int | None = None


@dataclass(frozen=True)
class Machine:
    """The NUMA node and the core of each CPU. The number of a core is that of its first hyper-thread."""

    node_of: dict[int, int]
    core_of: dict[int, int]

    @classmethod
    def read(cls, sysfs: Path = SYSFS) -> Machine:
        """Reads sysfs. CPUs without information count as on one node, and as cores with one thread."""
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
        """The number of NUMA nodes with CPUs."""
        return len(set(self.node_of.values())) or 1

    def node(self, cpu: int) -> int:
        return self.node_of.get(cpu, 0)

    def cores(self, cpus: Sequence[int]) -> list[tuple[int, ...]]:
        """``cpus`` grouped by core, sorted by node."""
        cpus_by_core: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for cpu in sorted(cpus):
            cpus_by_core[self.node(cpu), self.core_of.get(cpu, cpu)].append(cpu)
        return [tuple(cpus_by_core[core]) for core in sorted(cpus_by_core)]


@dataclass(frozen=True)
class NodeShare:
    """A rank's CPUs, its number of kernel threads, and the NUMA nodes of its memory.

    ``nodes`` is empty if the machine has one node. ``bounds`` are the reasons for fewer threads than CPUs.
    """

    cpus: tuple[int, ...]
    threads: int
    nodes: tuple[Node, ...] = ()
    bounds: tuple[str, ...] = ()

    def __str__(self) -> str:
        node = "".join(f", NUMA node {node.number}" for node in self.nodes)
        bounds = f" ({', '.join(self.bounds)})" if self.bounds else ""
        return f"{counted(self.threads, 'kernel thread')}{bounds}, CPUs {format_cpus(self.cpus)}{node}"


@dataclass(frozen=True)
class Limits:
    """What the ranks of a node have beside its CPUs: the CPU quota of all together, and whether they use NVMe."""

    quota: float | None = None
    nvme: bool = False


def settle(
    local_rank: int,
    local_world_size: int,
    gpu_pci: str | None = None,
    *,
    nvme: bool = False,
    gather: Callable[[Place], Sequence[Place]] | None = None,
    sysfs: Path = SYSFS,
) -> NodeShare:
    """Sets the number of kernel threads to this rank's share of the CPUs, and returns the share.

    ``gpu_pci`` is the bus id of the rank's GPU ("0000:3b:00.0"). ``gather`` returns the Places of all local ranks, in
    their order; without it, all ranks are assumed to have this rank's mask. A single rank keeps all CPUs. ``nvme``:
    whether the ranks use NVMe. A thread count that the program has set itself is not changed.
    """
    mask = tuple(sorted(os.sched_getaffinity(0)))
    machine, limits = Machine.read(sysfs), Limits(kernels.cpu_quota(), nvme)
    if local_world_size == 1:
        # The GPU's node has a part of the CPUs only.
        share = share_out([Place(mask)], machine, limits)[0]
    else:
        place = Place(mask, gpu_node(gpu_pci, sysfs) if gpu_pci else None)
        places = [place] * local_world_size if gather is None else list(gather(place))
        if len(places) != local_world_size:
            raise ValueError(f"gather returned {len(places)} places for {local_world_size} local ranks")
        share = share_out(places, machine, limits)[local_rank]
    kernels.set_default_thread_count(share.threads)
    level = logging.INFO if share.bounds else logging.DEBUG
    log.log(level, "local rank %d of %d: %s", local_rank, local_world_size, share)
    return share


def share_out(places: Sequence[Place], machine: Machine, limits: Limits = Limits()) -> list[NodeShare]:
    """The share of each rank. Ranks with the same mask divide it, in the order of their GPUs' nodes; none is empty."""
    together: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        together[place.cpus].append(rank)
    part = Limits(None if limits.quota is None else limits.quota / len(places), limits.nvme)
    shares: dict[int, NodeShare] = {}
    for mask, ranks in together.items():
        cores = machine.cores(mask)
        # sorted() is stable: ranks without a known GPU node stay in their order.
        ranks = sorted(ranks, key=lambda rank: places[rank].gpu_node or 0)
        for rank, cpus in zip(ranks, _cut(cores, len(ranks)), strict=True):
            threads, bounds = _threads(cpus, machine, part)
            shares[rank] = NodeShare(cpus, threads, _nodes(places[rank], cpus, machine), bounds)
    return [shares[rank] for rank in range(len(places))]


def _within(cpus: int, quota: float | None) -> int:
    """One thread for each of ``cpus``, as far as the quota allows."""
    threads = min(cpus, kernels.MAX_THREADS)
    return threads if quota is None else min(threads, max(1, int(quota)))


def _threads(cpus: tuple[int, ...], machine: Machine, limits: Limits) -> tuple[int, tuple[str, ...]]:
    """The number of kernel threads on ``cpus``, and the reasons for fewer than one for each."""
    threads, cores, bounds = len(cpus), len(machine.cores(cpus)), []
    if MANY_CORES <= cores < threads:
        threads = cores
        bounds.append("one per core")
    if _within(threads, limits.quota) < threads and limits.quota is not None:
        bounds.append(f"CPU quota {limits.quota:g}")
    threads = _within(threads, limits.quota)
    if limits.nvme and threads > MANY_CORES:
        threads -= 1
        bounds.append("one core for the I/O driver")
    return threads, tuple(bounds)


def _cut(cores: list[tuple[int, ...]], parts: int) -> list[tuple[int, ...]]:
    """Neighbouring cores for each part; hyper-threads if there are fewer cores than parts, shared if too few."""
    units = cores if len(cores) >= parts else [(cpu,) for core in cores for cpu in core]
    count = len(units)
    cut = []
    for part in range(parts):
        begin, end = part * count // parts, (part + 1) * count // parts
        cut.append(tuple(sorted(cpu for unit in units[begin : max(end, begin + 1)] for cpu in unit)))
    return cut


def _nodes(place: Place, cpus: tuple[int, ...], machine: Machine) -> tuple[Node, ...]:
    """The nodes of the memory of a rank on ``cpus``, with all CPUs of ``place`` on them."""
    if machine.nodes == 1:
        return ()
    # Ignore a GPU on a node outside the mask: the user has bound this process elsewhere.
    numbers = {machine.node(cpu) for cpu in place.cpus if machine.node(cpu) == place.gpu_node}
    numbers = numbers or {machine.node(cpu) for cpu in cpus}
    return tuple(
        Node(number, tuple(cpu for cpu in place.cpus if machine.node(cpu) == number))
        for number in sorted(numbers)
    )


def gpu_node(pci: str, sysfs: Path = SYSFS) -> int | None:
    """The NUMA node of a PCI device, by its bus id as CUDA, nvidia-smi or sysfs write it; None if unknown."""
    match = _PCI.fullmatch(pci.strip().lower())
    if match is None:
        return None
    name = f"{int(match['domain'] or '0', 16):04x}:{match['rest']}"
    try:
        node = int((sysfs / "bus/pci/devices" / name / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    # -1: the firmware does not report a node.
    return node if node >= 0 else None


def parse_cpus(text: str) -> list[int]:
    """The CPUs in a kernel list such as "0-3,8"."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def format_cpus(cpus: Sequence[int]) -> str:
    """The inverse of ``parse_cpus``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)
