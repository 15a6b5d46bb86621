"""The CPUs that the kernels compute on, and what part of their time is this process's."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from pathlib import Path

from optim_cpu import kernels
from tiering.doctor.finding import Check, Finding, note, problem
from tiering.host.cgroups import cpu_quota
from tiering.host.kernel_files import said
from tiering.host.topology import format_cpus, parse_cpus
from tiering.text import counted


def own_cpus(root: Path) -> list[int]:
    """Those that this process may run on."""
    found = re.search(
        r"^Cpus_allowed_list:\s+([\d,-]+)$", said(root / "proc/self/status") or "", re.MULTILINE
    )
    return parse_cpus(found[1]) if found else []


def affinity(root: Path) -> Finding:
    own, online = own_cpus(root), parse_cpus(said(root / "sys/devices/system/cpu/online") or "")
    if not own:
        return Finding("not told")
    found = f"{len(own)} of {counted(max(len(own), len(online)), 'CPU')} ({format_cpus(own)})"
    if len(own) > 1 or len(online) <= 1:
        return Finding(found)
    return note(
        f"{found}: the optimizer has one thread",
        "taskset -p -c 0-N PID, or the launcher's binding (srun --cpus-per-task, docker run --cpuset-cpus)",
    )


def quota(root: Path) -> Finding:
    share, threads = cpu_quota(root), len(own_cpus(root))
    if share is None:
        return Finding("none")
    found = f"the time of {share:g} {'CPU' if share == 1 else 'CPUs'}"
    if share >= threads:
        return Finding(found)
    return note(
        f"{found} for threads on {threads}: they are stopped for the rest of each period",
        f"taskset -c {format_cpus(own_cpus(root)[: max(1, int(share))])} ..., so that there are as many threads, or"
        " raise the quota (docker run --cpus, the cgroup's cpu.max)",
    )


def instruction_set(root: Path, ask: Callable[[], str] = kernels.instruction_set) -> Finding:
    """``root`` does not matter: the kernels ask the CPU itself."""
    try:
        name = ask()
    except ValueError as error:
        return problem(str(error), "unset TIERING_ISA")
    if name != "portable":
        return Finding(name)
    return note(
        f"portable, on {platform.machine()}: the optimizer does without SIMD",
        "unset TIERING_ISA if it is set; a virtual machine must be given the host's CPU features (-cpu host)",
    )


CHECKS: dict[str, Check] = {"CPUs": affinity, "CPU quota": quota, "instruction set": instruction_set}
