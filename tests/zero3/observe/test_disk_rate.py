"""The rate for which staging is sized: as ``tiering plan --measure`` has saved it for these drives, or assumed."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiering.workloads import example
from tiering.config import ds_config
from tiering.config.training import TieringConfig
from tiering.placement.workload import DiskRate
from tiering.planning import conditions
from tiering.planning.measure import of_disks
from tiering.planning.rates import ASSUMED_DISK, Rates
from tiering.planning.saved_rates import Record, SavedRates
from tiering.planning.setting import usual_file
from zero3.observe.disk_rate import settle_disk_rate


class Others:
    """Another rank, with drives of another rate."""

    def __init__(self, rate: int) -> None:
        self.run_tables = self.tables = self
        self.rate = rate

    def table(self, mine: torch.Tensor, label: str) -> torch.Tensor:
        return torch.stack([mine, torch.full_like(mine, self.rate)])


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TieringConfig:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "drive").mkdir()
    return ds_config.load(usual_file(tmp_path / "drive"))[0]


def save(config: TieringConfig, rates: Rates) -> None:
    measurement = of_disks(config.zero.offload_optimizer.swap_directories, io=config.tiering.io)
    assert SavedRates.of_user().save(measurement, Record(rates, datetime.now(UTC)))


def settled(config: TieringConfig, ranks: int = 1, others: Any = None) -> DiskRate | None:
    return settle_disk_rate(example(), config, local_ranks=ranks, collectives=others).disk


def test_a_measured_rate_is_divided_among_the_ranks_of_the_node(
    config: TieringConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settled(config) == DiskRate(ASSUMED_DISK, assumed=True)
    save(config, Rates(nvme_mixed=8e9))
    assert settled(config) == DiskRate(8 * 10**9, assumed=False)
    # A rank has a part of the CPUs.
    monkeypatch.setattr(conditions, "format_cpus", lambda cpus: "0")
    assert settled(config, ranks=4) == DiskRate(2 * 10**9, assumed=False)


def test_all_ranks_have_the_rate_of_the_slowest(config: TieringConfig) -> None:
    save(config, Rates(nvme_read=8e9, nvme_write=8e9))
    assert settled(config, others=Others(5 * 10**9)) == DiskRate(5 * 10**9, assumed=False)
    assert settled(config, others=Others(9 * 10**9)) == DiskRate(8 * 10**9, assumed=False)
    # Another node has not measured.
    assert settled(config, 2, Others(0)) == DiskRate(ASSUMED_DISK // 2, assumed=True)


def test_without_nvme_there_is_no_rate(config: TieringConfig) -> None:
    memory = ds_config.load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})[0]
    assert settled(memory) is None
