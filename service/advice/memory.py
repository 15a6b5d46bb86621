"""Tiers that are too full, or budgets that nobody needs."""

from __future__ import annotations

from collections.abc import Iterator

from service.advice.finding import Advice, error, info, warning
from service.advice.larger_budget import as_setting
from service.formatting import size
from service.view import RankView, RunView
from tiering.telemetry import TierStatus


def exceeded_budgets(run: RunView) -> Iterator[Advice]:
    """What the engine promises never to do."""
    for rank, tier in _tiers(run):
        if tier.budget and tier.peak > tier.budget:
            yield error(
                "budget-exceeded",
                f"{tier.name} held {size(tier.peak)} at its peak, above its budget of {size(tier.budget)}",
                "this should never be: please report it, with what /v1/plan answers",
                rank.rank,
            )


NEARLY_FULL = 0.05  # of a tier of the machine: file systems slow down, and the kernel begins to reclaim
LOW_MEMORY = 1 << 30  # bytes: 5 % of a large machine is no reason to worry


def nearly_full(run: RunView) -> Iterator[Advice]:
    """Little is left of what the machine has. The least that any rank saw: they share it."""
    known = [(tier.available, tier) for _, tier in _tiers(run) if tier.available is not None]
    nvme = min((one for one in known if one[1].name == "nvme"), key=_left, default=None)
    host = min((one for one in known if one[1].name == "host"), key=_left, default=None)
    if nvme is not None and nvme[0] < NEARLY_FULL * nvme[1].capacity:
        yield warning(
            "nvme-nearly-full",
            f"{size(nvme[0])} are left on the file systems of nvme_path",
            "the run has reserved its own space and goes on; free some for what else writes there, as checkpoints do",
        )
    if host is not None and host[0] < min(NEARLY_FULL * host[1].capacity, LOW_MEMORY):
        yield warning(
            "host-memory-low",
            f"{size(host[0])} of {size(host[1].capacity)} of host memory are left: the kernel may swap, or"
            " kill the run",
            "lower tiering.host_budget, or end what else runs there; activations and data loaders are not part of it",
        )


def _left(one: tuple[int, TierStatus]) -> int:
    return one[0]


UNUSED = 0.5  # of a budget that the file names, and
WORTHWHILE = 1 << 30  # bytes at least: another job could have them


def unused_budgets(run: RunView) -> Iterator[Advice]:
    """Budgets that were given, and are far above what the plan puts there."""
    for rank in run.ranks:
        described, said = rank.description, rank.snapshot
        if not rank.fresh or described is None or described.plan is None or said is None:
            continue
        settings = described.configuration.settings if described.configuration is not None else []
        given = {
            one.key.rpartition(".")[2] for one in settings if one.origin == "file" and one.value != "auto"
        }
        for tier in described.plan.tiers:
            unused = tier.budget - tier.planned
            if f"{tier.name}_budget" in given and unused > max(UNUSED * tier.budget, WORTHWHILE):
                yield info(
                    "budget-unused",
                    f"{tier.name}_budget leaves {size(unused * said.local_world_size)} that the plan has no use for",
                    f"{as_setting(tier.planned * said.local_world_size)} would do; a budget is a ceiling, so it costs"
                    " nothing as it is",
                )


def _tiers(run: RunView) -> Iterator[tuple[RankView, TierStatus]]:
    for rank in run.ranks:
        for tier in rank.snapshot.tiers if rank.fresh and rank.snapshot is not None else []:
            yield rank, tier
