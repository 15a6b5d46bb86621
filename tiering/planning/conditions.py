"""The conditions that a measured rate depends on: if one differs, the rate must be measured again. No torch.

All values are JSON values. They include names of machines and paths, because machines that share a home directory may
differ only by name; therefore they are only stored in the user's own files.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from optim_cpu import kernels
from tiering._version import __version__
from tiering.config.fields import parse_size
from tiering.config.training import IoConfig
from tiering.host import cgroups, drives
from tiering.host.machine import cpu_identity, memory_bytes
from tiering.host.topology import SYSFS, format_cpus

Conditions = dict[str, object]

MACHINE_ID = Path("/etc/machine-id")


def machine() -> Conditions:
    """The resources of this machine that this process may use, and the versions of kernel and package."""
    return {
        "host": platform.node(),
        "id": machine_id(),
        "cpu": cpu_identity(),
        "cpus": format_cpus(sorted(os.sched_getaffinity(0))),
        "cpu_quota": kernels.cpu_quota(),
        "io_limits": sorted({" ".join(limit) for limit in cgroups.io_limits()}),
        "memory": memory_bytes(),
        "kernel": platform.release(),
        "version": __version__,
    }


def machine_id(path: Path = MACHINE_ID) -> str:
    """Distinguishes machines with the same name; hashed, because the machine id is confidential."""
    try:
        return hashlib.sha256(b"tiering " + path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def disks(directories: Sequence[Path], io: IoConfig) -> Conditions:
    """The disks behind ``directories``, independent of their order, and the I/O settings.

    It includes the paths: directories of one file system may differ in compression, quotas and tiers.
    """
    places = sorted(directory.resolve() for directory in directories)
    return {
        "directories": [
            {"path": str(place), "identity": os.statvfs(place).f_fsid, **asdict(drives.behind(place))}
            for place in places
        ],
        "io": io.model_dump(mode="json"),
    }


def arithmetic(state_format: str, state_tensors: int, grad_itemsize: int) -> Conditions:
    """The CPU kernels: state format, dtype, threads and instruction set."""
    return {
        "state": state_format,
        "state_tensors": state_tensors,
        "grad_itemsize": grad_itemsize,
        "threads": kernels.thread_count(),
        "instruction_set": kernels.instruction_set(),
    }


def cache_bytes(sysfs: Path = SYSFS) -> int:
    """The total bytes of the last-level caches of this process' CPUs; 0 if the kernel does not report them."""
    own_cpus = os.sched_getaffinity(0)
    # By level, then by the CPUs that share a cache.
    sizes: dict[int, dict[str, int]] = {}
    for cpu in own_cpus:
        for index in (sysfs / f"devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            try:
                level, shared = int((index / "level").read_text()), (index / "shared_cpu_list").read_text()
                sizes.setdefault(level, {})[shared] = parse_size((index / "size").read_text().strip())
            except (OSError, ValueError):
                continue
    return sum(sizes[max(sizes)].values()) if sizes else 0
