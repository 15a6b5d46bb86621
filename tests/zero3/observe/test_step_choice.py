"""The step that "auto" takes when an engine starts: by saved rates, and the same on all ranks."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiering.workloads import PLENTY, example
from tiering.config import ds_config
from tiering.config.training import StepPolicy, TieringConfig
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets
from tiering.planning.measure import of_cpu, of_disks
from tiering.planning.rates import Rates
from tiering.planning.saved_rates import Record, SavedRates
from tiering.planning.setting import usual_file
from zero3.observe.step_choice import settle_step

PLAN = make_plan(example(versions=2), Budgets(PLENTY, PLENTY, PLENTY))


class Others:
    """Another rank, on which the steps take other times."""

    def __init__(self, *seconds: float) -> None:
        self.run_tables = self.tables = self
        self.seconds = seconds

    def table(self, mine: torch.Tensor, label: str) -> torch.Tensor:
        return torch.stack([mine, torch.tensor(self.seconds, dtype=mine.dtype)])


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "drive").mkdir()
    return usual_file(tmp_path / "drive")


def configured(file: dict[str, Any], step: str, clip: float = 0.0) -> TieringConfig:
    return ds_config.load(file | {"gradient_clipping": clip, "tiering": {"step": step, "swap_versions": 2}})[
        0
    ]


def save(config: TieringConfig) -> None:
    disks = of_disks(config.zero.offload_optimizer.swap_directories, io=config.tiering.io)
    cpu = of_cpu(state_format="fp32", state_tensors=2, grad_itemsize=2)
    for part, rates in (
        (disks, Rates(nvme_read=1.0, nvme_write=1.0, nvme_mixed=2.0)),
        (cpu, Rates(host_copy=1.0, optimizer=1.0, gradients=1.0)),
    ):
        assert SavedRates.of_user().save(part, Record(rates, datetime.now(UTC)))


def settled(config: TieringConfig, others: Any = None) -> str:
    plan = settle_step(PLAN, config, torch.device("cpu"), local_ranks=1, collectives=others)
    assert plan.contents and plan.runs == PLAN.runs
    return plan.workload.step.value


def test_the_step_is_the_fastest_by_saved_rates(
    file: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(file, "auto")
    with caplog.at_level("INFO"):
        assert settled(config) == "deferred"
        assert "tiering.step 'auto' takes 'deferred'" in caplog.text
        assert "tiering plan --measure" in caplog.text
        save(config)
        assert settled(config) == "in_backward"
        assert settled(configured(file, "auto", clip=1.0)) == "deferred"
    assert "takes 'in_backward': with as much compute as other work, a step takes" in caplog.text


def test_all_ranks_take_the_step_that_is_fastest_on_the_slowest(file: dict[str, Any]) -> None:
    config = configured(file, "auto")
    # This rank has no rates: neither of both chooses by them.
    assert settled(config, Others(3e9, 2e9, 1e9)) == "deferred"
    save(config)
    assert settled(config, Others(3e9, 2e9, 1e9)) == "in_backward"
    assert settled(config, Others(3e9, 1e9, 2e9)) == "deferred"
    assert settled(config, Others(1e9, 1e9, 2e9)) == "after"
    assert settled(config, Others(math.inf, math.inf, math.inf)) == "deferred"


def test_a_step_that_is_configured_is_kept(file: dict[str, Any]) -> None:
    for step in ("after", "deferred", "in_backward"):
        config = configured(file, step)
        save(config)
        assert settle_step(PLAN, config, torch.device("cpu"), local_ranks=1, collectives=None) is PLAN
    assert PLAN.workload.step is StepPolicy.AFTER
