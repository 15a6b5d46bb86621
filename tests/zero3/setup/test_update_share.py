"""The share of updates that a GPU takes over by itself: from rates that were measured on this machine, or none."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiering.workloads import HOST, NUMEL, PLENTY, example
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.plan import Budgets
from tiering.placement.workload import Workload
from tiering.planning.measure import of_cpu
from tiering.planning.rates import Rates
from tiering.planning.saved_rates import Record, SavedRates
from zero3.observe import device_rates
from zero3.observe.device_rates import saved_link_rate, settle_update_share

DEVICE = torch.device("cpu")  # stands in for a GPU: what it depends on is fewer things
AMPLE = Budgets(PLENTY, PLENTY, PLENTY)
KERNEL, LINK = Rates(optimizer=1.0), Rates(device_link=14.0, device_link_both=28.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def load() -> Workload:
    group = GroupSizes("blocks", 2 * 100 * NUMEL, 100 * NUMEL)
    return example(
        groups=(group,),
        device_is_host=False,
        fetch_by_copy=True,
        offload_param=HOST,
        offload_optimizer=HOST,
        sub_group_numel=NUMEL,
    )


def keep(kernel: Rates = KERNEL, link: Rates = LINK, *, dtype: Any = torch.bfloat16, **since: float) -> None:
    when = datetime.now(UTC) - timedelta(**since)
    cpu = of_cpu(state_format="fp32", state_tensors=2, grad_itemsize=2)
    gpu = device_rates.of_device(DEVICE, dtype, tokens=300)
    for part, rates in ((cpu, kernel), (gpu, link)):
        assert SavedRates.of_user().save(part, Record(rates, when)) is not None


def settled(ranks: int = 1, **changes: Any) -> float:
    settled_load = settle_update_share(load(), AMPLE, DEVICE, local_ranks=ranks, collectives=None, **changes)
    assert settled_load == example(**vars(load()) | {"update_on_device": settled_load.update_on_device})
    return settled_load.update_on_device


def test_the_share_is_that_of_measured_rates_whatever_else_was_measured_with_them() -> None:
    assert settled() == 0.0
    keep(hours=2)
    assert settled() == 0.5
    keep(link=Rates(device_link=7.0), dtype=torch.float32, minutes=1)  # of another dtype, and later
    assert settled() == 0.33


def test_ranks_share_the_cpu_not_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    keep()
    # A rank has a part of the CPUs, and of the kernels' threads.
    monkeypatch.setattr(device_rates.conditions, "format_cpus", lambda cpus: "0")
    monkeypatch.setattr(device_rates.conditions.kernels, "thread_count", lambda: 1)
    assert settled(ranks=3) == 0.75
    assert settled() == 0.0  # of a machine with as few of them nothing is known


@pytest.mark.parametrize(
    "rates",
    [{"days": 8}, {"kernel": Rates(gradients=1.0)}, {"link": Rates(flops=1.0)}],
    ids=["old", "kernel", "link"],
)
def test_what_is_not_known_now_is_not_guessed(
    rates: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    keep(**rates)
    with caplog.at_level("INFO"):
        assert settled() == 0.0
    assert "tiering plan --measure" in caplog.text


def test_the_link_rate_that_was_measured_is_that_of_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def saved(load: Workload, device: torch.device, *, local_ranks: int) -> Rates:
        calls.append((load, device, local_ranks))
        return Rates(device_link=5.25e10, device_link_both=8e10) if len(calls) == 1 else Rates()

    monkeypatch.setattr(device_rates, "saved_rates", saved)
    gpu, workload = torch.device("cuda", 1), load()
    rates = [saved_link_rate(workload, gpu, local_ranks=2) for _ in range(2)]
    assert (rates, calls[0]) == ([52_500_000_000, None], (workload, gpu, 2))
    assert saved_link_rate(workload, DEVICE, local_ranks=2) is None  # the CPU has no link
    assert len(calls) == 2


def test_ranks_take_the_least_share() -> None:
    class Others:
        def __init__(self) -> None:
            self.run_tables = self

        def table(self, mine: torch.Tensor, label: str) -> torch.Tensor:
            return torch.stack([mine, mine / 2])

    keep()
    others: Any = Others()
    settled_load = settle_update_share(load(), AMPLE, DEVICE, local_ranks=1, collectives=others)
    assert settled_load.update_on_device == 0.25
