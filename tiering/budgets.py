"""What this machine can give: the numbers behind ``"auto"`` budgets. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tiering.config import TiersConfig
from tiering.plan import Budgets
from tiering.swap_file import check_directory, free_by_file_system

AUTO_SHARE = 0.8  # of the memory limit, less what is in use
NVME_SHARE = 0.95  # of the free space, so that the file system is not filled to the brim


def host_memory() -> tuple[int, int]:
    """Bytes of (limit, now in use): those of the cgroup with the least limit, if it is below the machine's memory.

    Files that the kernel caches and would drop first are not in use: a cgroup counts them, but nobody needs them.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit, in_use = total, total - available
    for directory, names in _cgroups():
        try:
            own_limit = int((directory / names[0]).read_text())
            own_use = int((directory / names[1]).read_text()) - _cached(directory / "memory.stat", names[2])
        except (OSError, ValueError):  # "max", or no such controller here
            continue
        if own_limit < limit:
            limit, in_use = own_limit, own_use
    return limit, in_use


def resolve_budgets(
    config: TiersConfig, *, device_memory: int | None, nvme_paths: Iterable[Path] = (), ranks_on_node: int = 1
) -> Budgets:
    """Bytes for one rank, ``"auto"`` replaced by what the machine has; the ranks of a node share it evenly.

    ``device_memory`` is what a GPU has free, None when the CPU is the device: device and host then share memory, and
    what is left of it is halved between those that are ``"auto"``. Half of a GPU is left to activations. Directories in
    one file system share its free space.
    """
    limit, in_use = host_memory()
    spare = max(0, int(limit * AUTO_SHARE) - in_use)
    device, host, nvme = config.device_budget, config.host_budget, config.nvme_budget
    if device_memory is not None:
        device = device_memory // 2 * ranks_on_node if device == "auto" else device
        host = spare if host == "auto" else host
    elif device == "auto" and host == "auto":
        device = host = spare // 2
    elif device == "auto":
        device = max(0, spare - int(host))
    elif host == "auto":
        host = max(0, spare - device)
    if nvme == "auto":
        allowed = config.io.allow_memory_file_system
        usable = [check_directory(path, allow_memory_file_system=allowed) for path in nvme_paths]
        nvme = int(sum(free_by_file_system(usable).values()) * NVME_SHARE)
    return Budgets(int(device) // ranks_on_node, int(host) // ranks_on_node, int(nvme) // ranks_on_node)


def least_of(ranks: Iterable[Budgets]) -> Budgets:
    """Budgets that every rank can keep to, so that all have one plan, from what each rank has resolved.

    Ranks must tell each other before the first of them allocates. Then none has counted another's tiers as in use, and
    the last to look has seen the models of all: what it found to be spare is the least, and its share is right for all.
    """
    device, host, nvme = zip(*((each.device, each.host, each.nvme) for each in ranks), strict=True)
    return Budgets(min(device), min(host), min(nvme))


def _cgroups() -> list[tuple[Path, tuple[str, str, str]]]:
    """Directories that may hold a memory limit for this process: (directory, names of limit, use and cached files).

    A limit may stand at any level above the process, and a container may see its own cgroup at the root of the mount
    while /proc names it as the host does: every level is asked.
    """
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        relative = Path(path.lstrip("/"))
        if number == "0":
            base, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        found += [(base / level, names) for level in (relative, *relative.parents)]
    return found


def _cached(stat: Path, key: str) -> int:
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get(key, 0))
