"""Tiers that are almost full, and budgets that are larger than necessary."""

from __future__ import annotations

from collections.abc import Iterator

from service.advice.advice import Advice, error, info, warning
from service.advice.larger_budget import as_setting
from service.formatting import size
from service.view import RankView, RunView
from tiering.telemetry import TierStatus


def exceeded_budgets(run: RunView) -> Iterator[Advice]:
    """Budgets that a tier exceeded: a defect of the engine."""
    for rank, tier in _tiers(run):
        if tier.budget and tier.peak > tier.budget:
            yield error(
                "budget-exceeded",
                f"{tier.name} held {size(tier.peak)} at its peak, above its budget of {size(tier.budget)}",
                "this is a bug: please report it, with the output of /v1/plan",
                rank.rank,
            )


# Free fraction of the machine's capacity. Below it, file systems become slower, and the kernel reclaims memory.
NEARLY_FULL = 0.05
LOW_MEMORY = 1 << 30  # bytes: on a large machine, 5 % is enough


def nearly_full(run: RunView) -> Iterator[Advice]:
    """The machine is short of disk space or host memory. Ranks share these, so the smallest report counts."""
    nvme, host = _least_available(run, "nvme"), _least_available(run, "host")
    if nvme is not None and nvme[0] < NEARLY_FULL * nvme[1].capacity:
        yield warning(
            "nvme-nearly-full",
            f"{size(nvme[0])} are free on the file systems of nvme_path",
            "the run has reserved its own space and continues; free some space for other files there, for example"
            " checkpoints",
        )
    if host is not None and host[0] < min(NEARLY_FULL * host[1].capacity, LOW_MEMORY):
        yield warning(
            "host-memory-low",
            f"{size(host[0])} of {size(host[1].capacity)} of host memory are free: the kernel may swap, or"
            " kill the run",
            "lower tiering.host_budget, or stop other processes; the budget does not include activations and data"
            " loaders",
        )


def _least_available(run: RunView, name: str) -> tuple[int, TierStatus] | None:
    reports = [
        (tier.available, tier) for _, tier in _tiers(run) if tier.name == name and tier.available is not None
    ]
    return min(reports, key=lambda report: report[0], default=None)


UNUSED_FRACTION = 0.5  # of a budget in the configuration file
MIN_UNUSED = 1 << 30  # bytes: less is not useful to another job


def unused_budgets(run: RunView) -> Iterator[Advice]:
    """Budgets in the configuration file that are much larger than the plan needs."""
    for rank in run.ranks:
        description, snapshot = rank.description, rank.snapshot
        if not rank.fresh or description is None or description.plan is None or snapshot is None:
            continue
        settings = description.configuration.settings if description.configuration is not None else []
        keys = {
            setting.key.rpartition(".")[2]
            for setting in settings
            if setting.origin == "file" and setting.value != "auto"
        }
        ranks = snapshot.local_world_size
        for tier in description.plan.tiers:
            unused = tier.budget - tier.planned
            if f"{tier.name}_budget" in keys and unused > max(UNUSED_FRACTION * tier.budget, MIN_UNUSED):
                yield info(
                    "budget-unused",
                    f"the plan does not use {size(unused * ranks)} of {tier.name}_budget",
                    f"{as_setting(tier.planned * ranks)} is enough; a budget is a maximum, so the unused part costs"
                    " nothing",
                )


def _tiers(run: RunView) -> Iterator[tuple[RankView, TierStatus]]:
    for rank in run.ranks:
        for tier in rank.snapshot.tiers if rank.fresh and rank.snapshot is not None else []:
            yield rank, tier
