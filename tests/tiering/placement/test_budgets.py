"""What "auto" comes to: the machine's memory, the cgroup's where it is less, divided over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

from tiering.config.training import TiersConfig
from tiering.errors import SwapSpaceError
from tiering.placement import budgets
from tiering.placement.budgets import available_memory, host_memory, least_of, resolve_budgets
from tiering.placement.plan import Budgets
from tiering.placement.workload import Tier
from tiering.storage import swap_file
from tiering.storage.swap_file import memory_file_system

GIB = 1 << 30
Machine = Callable[..., tuple[int, int]]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """The memory of another machine by its /proc and /sys: 64 GiB, of which 16 are in use. ``files``: bytes or text."""

    def set_up(cgroup: str = "0::/\n", **files: object) -> tuple[int, int]:
        meminfo = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\nHugePages_Total: 0"
        for name, content in {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, **files}.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{str(content).rstrip()}\n")
        return host_memory(tmp_path)

    return set_up


def v2(directory: str, limit: object, used: int, cached: int = 0) -> dict[str, object]:
    base = f"sys/fs/cgroup{directory}"
    stat = f"anon 1\nfile {cached + 5}\ninactive_file {cached}\nactive_file 5"
    return {f"{base}/memory.max": limit, f"{base}/memory.current": used, f"{base}/memory.stat": stat}


def v1(directory: str, limit: int, used: int, cached: int = 0) -> dict[str, object]:
    base = f"sys/fs/cgroup/memory{directory}"
    return {
        f"{base}/memory.limit_in_bytes": limit,
        f"{base}/memory.usage_in_bytes": used,
        f"{base}/memory.stat": f"inactive_file 1\ntotal_inactive_file {cached}",
    }


def test_without_a_limit_it_is_the_machine(machine: Machine) -> None:
    assert machine(**v2("", "max", 3 * GIB)) == (64 * GIB, 16 * GIB)


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/\n", v2("", 8 * GIB, GIB)),
        ("0::/user/job\n", v2("/user/job", 8 * GIB, GIB)),
        ("12:cpu,memory:/job\n1:name=systemd:/\n0::/\n", v1("/job", 8 * GIB, GIB)),
        ("0::/user/job\n", {**v2("/user/job", "max", 5), **v2("/user", 8 * GIB, GIB)}),
        ("0::/user/job\n", {**v2("/user/job", 20 * GIB, 5), **v2("/user", 8 * GIB, GIB)}),
        ("4:memory:/docker/4f1c\n", v1("", 8 * GIB, GIB)),
    ],
    ids=["v2", "nested", "v1", "set above", "tightest above", "named as the host does"],
)
def test_the_cgroup_limits(machine: Machine, cgroup: str, files: dict[str, object]) -> None:
    assert machine(cgroup, **files) == (8 * GIB, GIB)


def test_a_limit_above_the_machine_is_none(machine: Machine) -> None:
    assert machine("4:memory:/\n", **v1("", (1 << 63) - 4096, GIB)) == (64 * GIB, 16 * GIB)


def test_what_can_still_be_taken_is_the_least_that_a_limit_leaves(machine: Machine, tmp_path: Path) -> None:
    machine("0::/user/job\n")
    assert available_memory(tmp_path) == 48 * GIB
    machine(
        "0::/user/job\n", **v2("/user/job", 20 * GIB, 12 * GIB), **v2("/user", 40 * GIB, 39 * GIB, 2 * GIB)
    )
    assert available_memory(tmp_path) == 3 * GIB  # not of the cgroup with the least limit
    machine("0::/\n", **v2("", GIB, 2 * GIB))
    assert available_memory(tmp_path) == 0


@pytest.mark.parametrize(("cgroup", "version"), [("0::/\n", v2), ("4:memory:/\n", v1)])
def test_cached_files_are_not_in_use(machine: Machine, cgroup: str, version: Callable[..., object]) -> None:
    assert machine(cgroup, **version("", 8 * GIB, 7 * GIB, 6 * GIB)) == (8 * GIB, GIB)


def test_a_limit_without_statistics_is_a_limit(machine: Machine) -> None:
    files = v2("", 8 * GIB, 2 * GIB)
    files.pop("sys/fs/cgroup/memory.stat")
    assert machine(**files) == (8 * GIB, 2 * GIB)


def test_this_machine_has_memory() -> None:
    limit, in_use = host_memory()
    assert 0 < in_use < limit
    total = next(
        line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")
    )
    assert limit <= int(total.split()[1]) * 1024


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> int:
    """100 GiB of which 30 are in use: 80 less 30 are spare."""
    monkeypatch.setattr(budgets, "host_memory", lambda: (100 * GIB, 30 * GIB))
    return 50 * GIB


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        ("auto", "auto", (25, 25)),
        ("10GiB", "auto", (10, 40)),
        ("auto", "10GiB", (40, 10)),
        ("10GiB", "20GiB", (10, 20)),
        ("60GiB", "auto", (60, 0)),
        ("auto", "60GiB", (0, 60)),
        ("60GiB", "70GiB", (60, 70)),  # what is asked for is not argued with here
    ],
)
def test_on_a_cpu_device_and_host_share(
    spare: int, device: str, host: str, expected: tuple[int, int]
) -> None:
    config = TiersConfig(device_budget=device, host_budget=host, nvme_budget="3GiB")
    resolved = resolve_budgets(config, device_memory=None, nvme_paths=())
    assert resolved == Budgets(expected[0] * GIB, expected[1] * GIB, 3 * GIB)


@pytest.mark.parametrize(
    ("device", "host", "ranks", "expected"),
    [
        ("auto", "auto", 1, (20, 50)),
        ("auto", "auto", 2, (20, 25)),  # every rank has a GPU, and its half of the host
        ("10GiB", "auto", 5, (2, 10)),
        ("auto", "10GiB", 5, (20, 2)),
    ],
)
def test_on_a_gpu_half_is_left_to_activations(
    spare: int, device: str, host: str, ranks: int, expected: tuple[int, int]
) -> None:
    config = TiersConfig(device_budget=device, host_budget=host)
    resolved = resolve_budgets(config, device_memory=40 * GIB, nvme_paths=(), ranks_on_node=ranks)
    assert resolved == Budgets(expected[0] * GIB, expected[1] * GIB, 0)


@pytest.mark.parametrize("ranks", [1, 2, 5, 7])
def test_ranks_share_a_node(spare: int, ranks: int) -> None:
    config = TiersConfig(nvme_budget="7GiB")
    resolved = resolve_budgets(config, device_memory=None, nvme_paths=(), ranks_on_node=ranks)
    assert resolved == Budgets(25 * GIB // ranks, 25 * GIB // ranks, 7 * GIB // ranks)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_ranks_that_start_at_once_agree_on_what_fits_all(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    """Each loads a model of 5 GiB, looks, tells the others, and only then allocates: in any order it fits."""
    in_use, resolved = 10 * GIB, {}
    monkeypatch.setattr(budgets, "host_memory", lambda: (100 * GIB, in_use))
    for rank in order:
        in_use += 5 * GIB
        resolved[rank] = resolve_budgets(TiersConfig(), device_memory=None, ranks_on_node=3)
    agreed = least_of(resolved.values())
    spare = 80 * GIB - in_use
    assert agreed == Budgets(spare // 2 // 3, spare // 2 // 3, 0) == resolved[order[-1]]
    assert in_use + 3 * (agreed.device + agreed.host) <= 80 * GIB
    assert resolved[order[0]].host > agreed.host


def test_the_least_counts_for_each_budget_on_its_own() -> None:
    """Nodes differ: one has less memory, the other fewer bytes on its disk."""
    assert least_of([Budgets(4, 7, 9), Budgets(5, 6, 8), Budgets(6, 8, 7)]) == Budgets(4, 6, 7)
    assert least_of(iter([Budgets(1, 2, 3)])) == Budgets(1, 2, 3)


def test_with_no_memory_to_spare_it_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "host_memory", lambda: (100 * GIB, 90 * GIB))
    assert resolve_budgets(TiersConfig(), device_memory=None, nvme_paths=()) == Budgets(0, 0, 0)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """100 GiB are free everywhere; the list says where it was asked."""
    directories: list[Path] = []

    def free_bytes(directory: Path) -> int:
        directories.append(directory)
        return 100 * GIB

    monkeypatch.setattr(swap_file, "free_bytes", free_bytes)
    return directories


def test_swap_space_is_what_is_free_in_a_directory_that_will_do(
    spare: int, tmp_path: Path, free: list[Path]
) -> None:
    resolved = resolve_budgets(TiersConfig(), device_memory=None, nvme_paths=[tmp_path], ranks_on_node=2)
    assert (resolved.nvme, free) == (95 * GIB // 2, [tmp_path])
    with pytest.raises(SwapSpaceError, match="does not exist"):
        resolve_budgets(TiersConfig(), device_memory=None, nvme_paths=[tmp_path, tmp_path / "missing"])
    fixed = TiersConfig(nvme_budget="1GiB")
    assert resolve_budgets(fixed, device_memory=None, nvme_paths=[tmp_path / "missing"]).nvme == GIB


def test_a_file_system_is_counted_once(spare: int, tmp_path: Path, free: list[Path]) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    assert resolve_budgets(TiersConfig(), device_memory=None, nvme_paths=paths).nvme == 95 * GIB
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here: /dev/shm is missing or the same one")
    allowed = TiersConfig.model_validate({"io": {"allow_memory_file_system": True}})
    assert resolve_budgets(allowed, device_memory=None, nvme_paths=[*paths, shm]).nvme == 190 * GIB
    if memory_file_system(shm):
        with pytest.raises(SwapSpaceError, match="lives in RAM"):
            resolve_budgets(TiersConfig(), device_memory=None, nvme_paths=[*paths, shm])


def test_a_budget_that_nobody_set_says_where_it_comes_from(spare: int, tmp_path: Path) -> None:
    auto = resolve_budgets(TiersConfig(), device_memory=None, nvme_paths=[tmp_path]).sources
    assert auto[Tier.NVME] == f"95% of the free space in {tmp_path}"
    assert auto[Tier.HOST] == auto[Tier.DEVICE] == "80% of the host's memory, less memory in use"
    tiers = TiersConfig(host_budget=1 << 30, nvme_budget=1 << 30)
    on_gpu = resolve_budgets(tiers, device_memory=1 << 30, nvme_paths=[tmp_path])
    assert on_gpu.sources == {
        Tier.DEVICE: "half of the GPU's free memory, because activations are not counted"
    }
    assert least_of([on_gpu, on_gpu]).sources == on_gpu.sources
