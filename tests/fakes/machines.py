"""The files by which the kernel tells of a machine, for tests of what reads them."""

from __future__ import annotations

from pathlib import Path

MEMINFO = f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\nHugePages_Total: 0"
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max file size             unlimited            unlimited            bytes
Max open files            1024                 524288               files
Max locked memory         8388608              unlimited            bytes
Max address space         unlimited            unlimited            bytes"""
STATUS = "Name:\tpython\nCapEff:\t0000000000000000\nSeccomp:\t0\nCpus_allowed_list:\t0-7"
NODE = "sys/devices/system/node/node"
CGROUP = "sys/fs/cgroup"
V1 = "4:memory:/job\n3:cpu,cpuacct:/job\n2:blkio:/job"
Files = dict[str, str]


def machine(root: Path, files: Files) -> Path:
    """The root directory of a machine that is well, but for ``files``."""
    well = {
        "proc/meminfo": MEMINFO,
        "proc/self/limits": LIMITS,
        "proc/self/status": STATUS,
        "proc/self/cgroup": "0::/",
    }
    for name, text in (well | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root
