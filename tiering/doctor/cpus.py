"""Checks of the CPUs that the kernels compute on: affinity, quota, instruction set."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from pathlib import Path

from optim_cpu import kernels
from tiering._text import counted
from tiering.doctor.finding import Check, Finding, note, problem
from tiering.host.kernel_files import text_of
from tiering.host.topology import format_cpus, parse_cpus


def own_cpus(root: Path) -> list[int]:
    """The CPUs that this process may run on."""
    match = re.search(
        r"^Cpus_allowed_list:\s+([\d,-]+)$", text_of(root / "proc/self/status") or "", re.MULTILINE
    )
    return parse_cpus(match[1]) if match else []


def affinity(root: Path) -> Finding:
    own, online = own_cpus(root), parse_cpus(text_of(root / "sys/devices/system/cpu/online") or "")
    if not own:
        return Finding("unknown")
    cpus = f"{len(own)} of {counted(max(len(own), len(online)), 'CPU')} ({format_cpus(own)})"
    if len(own) > 1 or len(online) <= 1:
        return Finding(cpus)
    return note(
        f"{cpus}: the optimizer has one thread",
        "taskset -p -c 0-N PID, or the launcher's binding (srun --cpus-per-task, docker run --cpuset-cpus)",
    )


def quota(root: Path) -> Finding:
    quota_cpus, threads = kernels.cpu_quota(root), len(own_cpus(root))
    if quota_cpus is None:
        return Finding("none")
    text = f"the time of {quota_cpus:g} {'CPU' if quota_cpus == 1 else 'CPUs'}"
    if quota_cpus >= threads:
        return Finding(text)
    kernel_threads = counted(max(1, int(quota_cpus)), "thread")
    return note(
        f"{text}, on {threads} CPUs: the optimizer has {kernel_threads}, but if torch and data workers use more time,"
        " the kernel stops all threads for the remainder of each period",
        f"reduce the threads: taskset -c {format_cpus(own_cpus(root)[: max(1, int(quota_cpus))])} ..., or raise the"
        " quota (docker run --cpus, the cgroup's cpu.max)",
    )


def instruction_set(root: Path, ask: Callable[[], str] = kernels.instruction_set) -> Finding:
    """``root`` is not used: the kernels read the features of the CPU."""
    try:
        name = ask()
    except ValueError as error:
        return problem(str(error), "unset TIERING_ISA")
    if name != "portable":
        return Finding(name)
    return note(
        f"portable, on {platform.machine()}: the optimizer does not use SIMD",
        "unset TIERING_ISA if it is set; a virtual machine must be given the host's CPU features (-cpu host)",
    )


CHECKS: dict[str, Check] = {"CPUs": affinity, "CPU quota": quota, "instruction set": instruction_set}
