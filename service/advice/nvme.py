"""Steps that wait for NVMe, and remedies."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median

from service.advice.advice import Advice, warning
from service.advice.larger_budget import NEGLIGIBLE, LargerBudget, as_setting, larger_budget, on_tier
from service.advice.stalls import (
    BOUND_FRACTION,
    MIN_CAUSE_FRACTION,
    ON_NVME,
    STALL_FRACTION,
    direction,
    stepping_ranks,
)
from service.formatting import joined, moved, seconds, share, size
from service.recent_steps import steady_steps
from service.view import RankView, RunView
from tiering.telemetry import PlanStatus, Snapshot, TierStatus


def bound(run: RunView) -> Iterator[Advice]:
    """Steps that wait for NVMe, with the figures of the rank that waits most: the other ranks wait for it."""
    ranks = [
        rank
        for rank in stepping_ranks(run)
        if rank.snapshot.io and rank.steps.stalled_on(ON_NVME) >= STALL_FRACTION
    ]
    if not ranks:
        return
    rank, snapshot, recent = max(ranks, key=lambda rank: rank.steps.stalled_on(ON_NVME))
    stalled, steps = recent.stalled_on(ON_NVME), steady_steps(snapshot)
    causes_on_nvme = {cause: part for cause, part in recent.causes.items() if cause in ON_NVME}
    causes = [
        f"{cause} {share(part)}"
        for cause, part in causes_on_nvme.items()
        if part >= MIN_CAUSE_FRACTION * stalled
    ]
    # The mean, because the stall is a share of the total time of these steps.
    step_seconds = fmean(step.seconds for step in steps)
    read, written = median(step.read_bytes for step in steps), median(step.written_bytes for step in steps)
    yield warning(
        "nvme-bound",
        f"the step {'is bound by' if stalled >= BOUND_FRACTION else 'waits for'} NVMe {direction(snapshot)}:"
        f" {share(stalled)} of its {seconds(step_seconds)} is stall ({joined(causes)});"
        f" it reads {moved(read)} and writes {moved(written)}",
        _fewer_activations(snapshot)
        if max(causes_on_nvme, key=causes_on_nvme.__getitem__) == "activations"
        else _remedy(rank, snapshot),
        *([stalled_rank.rank.rank for stalled_rank in ranks] if len(run.ranks) > 1 else []),
    )


RESERVE = 0.05  # of the machine's memory: for memory outside the budget, and for other processes


def _remedy(rank: RankView, snapshot: Snapshot) -> str:
    """The remedies, most effective first: free memory; else fewer bytes, more drives, fewer optimizer steps."""
    planned = rank.description.plan if rank.description is not None else None
    host = next((tier for tier in snapshot.tiers if tier.name == "host"), None)
    if planned is None or host is None or host.available is None:
        return "raise tiering.host_budget if the machine has free memory; `tiering plan` shows the effect"
    ranks = max(1, snapshot.local_world_size)
    free = int(host.available - RESERVE * host.capacity) // ranks
    larger = larger_budget(planned, max(0, free))
    if not _caches_in_host(rank):
        planned_host = on_tier(planned, "host")
        unused = max(0, host.budget - (planned_host.planned if planned_host is not None else 0)) * ranks
        cache = f"set tiering.cache_in_host to true: up to {size(unused)} more then stay in RAM within host_budget"
        return cache if larger is None else f"{cache}; {_with_memory(larger, ranks, host)}"
    if larger is None and planned.host_without_nvme is None:
        return _without_memory(planned, snapshot)
    if larger is None:
        return f"the machine has no memory for a larger tiering.host_budget; {_without_memory(planned, snapshot)}"
    if larger.saved == larger.moved:
        return _with_memory(larger, ranks, host)
    return f"{_with_memory(larger, ranks, host)}; in addition, {_without_memory(planned, snapshot)}"


def _fewer_activations(snapshot: Snapshot) -> str:
    """The remedies if the step waits for activations most of all."""
    host = next((tier for tier in snapshot.tiers if tier.name == "host"), None)
    free = (
        "" if host is None or host.available is None else f" ({size(host.available)} of host memory are free)"
    )
    return (
        f"raise tiering.activation_budget, and host_budget by as much{free}: half of it keeps activations off NVMe;"
        " activation checkpointing saves fewer bytes"
    )


def _caches_in_host(rank: RankView) -> bool:
    """Whether state offloaded to NVMe stays in host memory while there is room. If not, no budget keeps it there."""
    configuration = rank.description.configuration if rank.description is not None else None
    settings = configuration.settings if configuration is not None else []
    return not any(setting.key.endswith("cache_in_host") and setting.value is False for setting in settings)


def _with_memory(larger: LargerBudget, ranks: int, host: TierStatus) -> str:
    """The remedy of a larger host budget. Figures are of the node, as in its configuration."""
    in_memory = [
        kind if kind in larger.whole else f"{size(nbytes * ranks)} of the {kind}"
        for kind, nbytes in larger.bytes_in_memory.items()
    ]
    saved = "all" if larger.saved == larger.moved else f"about {moved(larger.saved * ranks)}"
    return (
        f"{size(larger.extra * ranks)} more host budget ({size(host.available or 0)} are free) would keep"
        f" {joined(in_memory)} in RAM and save {saved} of the {moved(larger.moved * ranks)} that a step moves:"
        f" set tiering.host_budget to {as_setting(larger.host_budget * ranks)}"
    )


def _without_memory(planned: PlanStatus, snapshot: Snapshot) -> str:
    """The remedies without more memory: move bytes faster, move fewer, or move them less often."""
    state = planned.read.get("optimizer state", 0) + planned.written.get("optimizer state", 0)
    remedies = ["a directory on another drive in nvme_path adds its bandwidth"]
    remedies += _smaller_formats(planned, max(1, snapshot.local_world_size))
    if 2 * state > sum(planned.read.values()) + sum(planned.written.values()):
        remedies.append("more gradient_accumulation_steps move the optimizer state once for more samples")
    else:
        remedies.append("a larger micro-batch fetches the parameters once for more samples")
    return joined(remedies)


EXACT = ("fp32", "split")  # state formats that keep all bits of an fp32 state


def _smaller_formats(planned: PlanStatus, ranks: int) -> list[str]:
    """The bytes that a step saves with the smallest state format, and with the smallest that keeps all bits."""
    step_bytes = sum(planned.read.values()) + sum(planned.written.values())
    by_format = planned.moved_by_format
    worthwhile = [
        name for name, nbytes in by_format.items() if step_bytes - nbytes >= NEGLIGIBLE * step_bytes
    ]
    best = min(worthwhile, key=by_format.__getitem__, default=None)
    if best is None:
        return []
    exact = min((name for name in worthwhile if name in EXACT), key=by_format.__getitem__, default=best)
    texts = [
        f'tiering.state "{name}" saves {moved((step_bytes - by_format[name]) * ranks)} a step'
        + ("" if name in EXACT else " (moments in bf16)")
        for name in dict.fromkeys((exact, best))
    ]
    return [" or ".join(texts)]
