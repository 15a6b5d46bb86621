"""Resolves ``"auto"`` budgets from the memory and disk space of this machine. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tiering.config.fields import format_size
from tiering.config.training import TiersConfig
from tiering.errors import PlacementError
from tiering.host import cgroups
from tiering.host.kernel_files import number, text_of
from tiering.placement.placement import AMPLE, make_plan, place
from tiering.placement.plan import Budgets, Plan
from tiering.placement.workload import Tier, Workload
from tiering.storage.swap_file import check_directory, free_by_file_system, wait_for_space

# Fraction of the memory limit; memory in use is subtracted.
AUTO_SHARE = 0.8
MIB = 1 << 20
_HALF_OF_GPU = "half of the GPU's free memory, because activations are not counted"
_OF_MEMORY = f"{AUTO_SHARE:.0%} of the host's memory, less memory in use"
# Fraction of the free disk space, so that the file system does not fill up.
NVME_SHARE = 0.95


# By version of cgroups: the files of the limit and of the use, and the line of memory.stat with cached files.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Bytes of (limit, in use) of the cgroup with the lowest limit, or of the machine if no limit is lower.

    Inactive cached files do not count as in use: a cgroup counts them, but the kernel can drop them.
    """
    return min(_memory_limits(root), key=lambda level: level[0])


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process can still allocate: the minimum over all limits."""
    return max(0, min(limit - in_use for limit, in_use in _memory_limits(root)))


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Bytes of (limit, in use) of the machine, then of each cgroup that has a limit."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    total, available = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    yield total, total - available
    for version, directory in cgroups.levels("memory", root):
        limit_name, use_name, cached_name = _MEMORY_FILES[version]
        limit, in_use = number(directory / limit_name), number(directory / use_name)
        # None: the limit is "max", or the file is missing.
        if limit is not None and in_use is not None:
            yield limit, in_use - _cached(directory / "memory.stat", cached_name)


def resolve_budgets(
    config: TiersConfig,
    *,
    device_memory: int | None,
    nvme_paths: Iterable[Path] = (),
    ranks_on_node: int = 1,
    elsewhere: bool = False,
) -> Budgets:
    """The budgets in bytes of one rank, with ``"auto"`` resolved; the ranks of a node share its memory equally.

    ``device_memory`` is the free memory of a GPU in bytes; None if the CPU is the device. In that case device and host
    share memory, and budgets of ``"auto"`` divide the spare memory. Half of a GPU's memory is left to activations, as
    nobody counts them here. Directories in one file system share its free space. ``elsewhere``: the node is another
    machine, of which host memory and drives are unknown: AMPLE.
    """
    nvme_paths = [Path(path).absolute() for path in nvme_paths]
    if elsewhere:
        config = config.model_copy(
            update={
                key: (AMPLE if key == "host_budget" or nvme_paths else 0) * ranks_on_node
                for key in ("host_budget", "nvme_budget")
                if getattr(config, key) == "auto"
            }
        )
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
        nvme = int(_free(usable) * NVME_SHARE)
    sources = {Tier.DEVICE: _OF_MEMORY if device_memory is None else _HALF_OF_GPU, Tier.HOST: _OF_MEMORY}
    if nvme_paths:
        sources[Tier.NVME] = f"{NVME_SHARE:.0%} of the free space in {', '.join(map(str, nvme_paths))}"
    configured = {
        Tier.DEVICE: config.device_budget,
        Tier.HOST: config.host_budget,
        Tier.NVME: config.nvme_budget,
    }
    return Budgets(
        int(device) // ranks_on_node,
        int(host) // ranks_on_node,
        int(nvme) // ranks_on_node,
        {tier: source for tier, source in sources.items() if configured[tier] == "auto"},
    )


def beside_activations(budgets: Budgets, device_memory: int, nbytes: int) -> Budgets:
    """``budgets`` with what ``nbytes`` of activations and gradients leave of a GPU, in whole MiB."""
    device = max(0, device_memory - nbytes) // MIB * MIB
    source = f"the GPU's free memory, less {format_size(nbytes)} of activations and gradients"
    return replace(budgets, device=device, sources={**budgets.sources, Tier.DEVICE: source})


def plan_within(
    load: Workload,
    budgets: Budgets,
    config: TiersConfig,
    nvme_paths: Sequence[Path],
    resolve_anew: Callable[[], Budgets],
) -> Plan:
    """The plan for ``load``. If the NVMe budget is the free space and too small, waits for space that is being freed.

    All ranks have the same budgets, so either all ranks call ``resolve_anew`` or none.
    """
    try:
        return make_plan(load, budgets)
    except PlacementError:
        if config.nvme_budget != "auto" or not nvme_paths or not fits(load, replace(budgets, nvme=AMPLE)):
            raise
    free = max(1, _free(nvme_paths))

    def fits_now() -> bool:
        return fits(load, replace(budgets, nvme=budgets.nvme * _free(nvme_paths) // free))

    wait_for_space(nvme_paths, fits_now)
    return make_plan(load, resolve_anew())


def fits(load: Workload, budgets: Budgets) -> bool:
    """Whether ``load`` has a plan within ``budgets``."""
    try:
        place(load, budgets)
    except PlacementError:
        return False
    return True


def _free(directories: Iterable[Path]) -> int:
    return sum(free_by_file_system(directories).values())


def least_of(ranks: Iterable[Budgets]) -> Budgets:
    """The minimum of the ranks' budgets, so that all ranks have the same plan.

    Ranks must exchange budgets before the first of them allocates. Then no rank has counted the tiers of another one as
    in use. The last rank to measure has seen the models of all ranks in memory, so its spare memory is the minimum and
    valid for all.
    """
    budgets = list(ranks)
    device, host, nvme = zip(*((each.device, each.host, each.nvme) for each in budgets), strict=True)
    return Budgets(min(device), min(host), min(nvme), budgets[0].sources)


def _cached(stat: Path, key: str) -> int:
    fields = dict(line.split() for line in (text_of(stat) or "").splitlines())
    return int(fields.get(key, 0))
