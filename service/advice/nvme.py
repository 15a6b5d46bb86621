"""Steps that wait for NVMe, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median

from service.advice.finding import Advice, warning
from service.advice.larger_budget import NEGLIGIBLE, Relief, as_setting, on_tier, relief
from service.advice.stalls import BOUND, ON_NVME, STALLED, TOLD, direction, stepping
from service.formatting import listed, moved, seconds, share, size
from service.recent_steps import steady
from service.view import RankView, RunView
from tiering.telemetry import PlanStatus, Snapshot, TierStatus


def bound(run: RunView) -> Iterator[Advice]:
    """Told of the rank that waits most: the others wait for it in turn."""
    found = [one for one in stepping(run) if one.said.io and one.waited.on(ON_NVME) >= STALLED]
    if not found:
        return
    rank, said, waited = max(found, key=lambda one: one.waited.on(ON_NVME))
    stalled, steps = waited.on(ON_NVME), steady(said)
    causes = [
        f"{cause} {share(part)}"
        for cause, part in waited.causes.items()
        if cause in ON_NVME and part >= TOLD * stalled
    ]
    took = fmean(one.seconds for one in steps)  # what it is a share of; the median may be of other steps
    read, written = median(one.read_bytes for one in steps), median(one.written_bytes for one in steps)
    yield warning(
        "nvme-bound",
        f"the step {'is bound by' if stalled >= BOUND else 'waits for'} NVMe {direction(said)}:"
        f" {share(stalled)} of its {seconds(took)} is stall ({listed(causes)});"
        f" it reads {moved(read)} and writes {moved(written)}",
        _less_over_nvme(rank, said),
        *([one.rank.rank for one in found] if len(run.ranks) > 1 else []),
    )


SPARED = 0.05  # of a machine's memory: for what the budget does not count, and for what else starts


def _less_over_nvme(rank: RankView, said: Snapshot) -> str:
    """What would help, surest first: memory that is free; else fewer bytes, more disks, rarer steps."""
    described = rank.description
    planned = described.plan if described is not None else None
    host = next((tier for tier in said.tiers if tier.name == "host"), None)
    if described is None or planned is None or host is None or host.available is None:
        return "raise tiering.host_budget if the machine has memory to spare; `tiering plan` tells what that changes"
    ranks = max(1, said.local_world_size)
    free = int(host.available - SPARED * host.capacity) // ranks
    more = relief(planned, max(0, free))
    if not _caches(rank):
        here = on_tier(planned, "host")
        left = max(0, host.budget - (here.planned if here is not None else 0)) * ranks
        cached = (
            "set tiering.cache_in_host to true: what fits into the"
            f" {size(left)} that host_budget has left then stays in RAM"
        )
        return cached if more is None else f"{cached}; {_with_memory(more, ranks, host)}"
    if more is None and planned.host_without_nvme is None:
        return _without_memory(planned, said)
    if more is None:
        return f"the machine has no memory for a larger tiering.host_budget; {_without_memory(planned, said)}"
    if more.saved == more.moved:
        return _with_memory(more, ranks, host)
    return f"{_with_memory(more, ranks, host)}; beyond that, {_without_memory(planned, said)}"


def _caches(rank: RankView) -> bool:
    """Whether what may live on NVMe stays in host memory as far as it fits: else no budget keeps it there."""
    configured = rank.description.configuration if rank.description is not None else None
    settings = configured.settings if configured is not None else []
    return not any(one.key.endswith("cache_in_host") and one.value is False for one in settings)


def _with_memory(more: Relief, ranks: int, host: TierStatus) -> str:
    """In figures of the node, as its configuration has them."""
    kept = [
        kind if kind in more.whole else f"{size(nbytes * ranks)} of the {kind}"
        for kind, nbytes in more.kept.items()
    ]
    saves = "all" if more.saved == more.moved else f"about {moved(more.saved * ranks)}"
    return (
        f"{size(more.extra * ranks)} more host budget ({size(host.available or 0)} are free) would keep {listed(kept)}"
        f" in RAM and save {saves} of the {moved(more.moved * ranks)} that a step moves:"
        f" set tiering.host_budget to {as_setting(more.host_budget * ranks)}"
    )


def _without_memory(planned: PlanStatus, said: Snapshot) -> str:
    """What moves them faster, moves fewer bytes, or moves them less often."""
    state = planned.read.get("optimizer state", 0) + planned.written.get("optimizer state", 0)
    remedies = ["one more directory in nvme_path, on another drive, adds its bandwidth"]
    remedies += _smaller_formats(planned, max(1, said.local_world_size))
    if 2 * state > sum(planned.read.values()) + sum(planned.written.values()):
        remedies.append("more gradient_accumulation_steps move the optimizer state once for more samples")
    else:
        remedies.append("a larger micro-batch fetches the parameters once for more samples")
    return listed(remedies)


EXACT = ("fp32", "split")  # formats of the state in which no bit of an fp32 one is lost


def _smaller_formats(planned: PlanStatus, ranks: int) -> list[str]:
    """What a step saves with the best format of the state, and with the best in which the state keeps all its bits."""
    moves = sum(planned.read.values()) + sum(planned.written.values())
    by_format = planned.moved_by_format
    worthwhile = [name for name, nbytes in by_format.items() if moves - nbytes >= NEGLIGIBLE * moves]
    best = min(worthwhile, key=by_format.__getitem__, default=None)
    if best is None:
        return []
    exact = min((name for name in worthwhile if name in EXACT), key=by_format.__getitem__, default=best)
    told = [
        f'tiering.state "{name}" saves {moved((moves - by_format[name]) * ranks)} a step'
        + ("" if name in EXACT else " (moments in bf16)")
        for name in dict.fromkeys((exact, best))
    ]
    return [" or ".join(told)]
