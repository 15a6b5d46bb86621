"""What bounds the step, and what would help. Of live ranks with enough steps to tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

from service.advice.advice import Advice, warning
from service.advice.relief import NEGLIGIBLE, Relief, as_setting, on_tier, relief
from service.advice.waits import ON_NVME, ON_RANKS, Waits, direction, steady, waits
from service.view import RankView, RunView
from service.words import listed, moved, seconds, share, size
from tiering.telemetry import PlanStatus, Snapshot, StepRecord, TierStatus


class _Stepping(NamedTuple):
    rank: RankView
    said: Snapshot
    waited: Waits


def _stepping(run: RunView) -> list[_Stepping]:
    return [
        _Stepping(rank, rank.snapshot, waited)
        for rank in run.ranks
        if rank.fresh and rank.snapshot is not None and (waited := waits(rank.snapshot)) is not None
    ]


STALLED = 0.2  # of a step: below, what could be gained is within the spread of step times
TOLD = 0.05  # of the stalls: causes of less are left out
BOUND = 0.5  # of a step: whatever takes most of it is what bounds it


def for_nvme(run: RunView) -> Iterator[Advice]:
    """Told of the rank that waits most: the others wait for it in turn."""
    found = [one for one in _stepping(run) if one.said.io and one.waited.on(ON_NVME) >= STALLED]
    if not found:
        return
    rank, said, waited = max(found, key=lambda one: one.waited.on(ON_NVME))
    stalled, steps = waited.on(ON_NVME), steady(said)
    causes = [
        f"{cause} {share(part)}"
        for cause, part in waited.causes.items()
        if cause in ON_NVME and part >= TOLD * stalled
    ]
    read, written = median(one.read_bytes for one in steps), median(one.written_bytes for one in steps)
    yield warning(
        "nvme-bound",
        f"the step {'is bound by' if stalled >= BOUND else 'waits for'} NVMe {direction(said)}:"
        f" {share(stalled)} of its {seconds(waited.seconds)} is stall ({listed(causes)});"
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
    more = relief(planned, max(0, free), device_is_host=described.device.startswith("cpu"))
    if not _caches(rank):
        here = on_tier(planned, "host")
        left = max(0, host.budget - (here.planned if here is not None else 0)) * ranks
        cached = (
            "set tiering.cache_in_host to true: what fits into the"
            f" {size(left)} that host_budget has left then stays in RAM"
        )
        return cached if more is None else f"{cached}; {_with_memory(more, ranks, host)}"
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


STUCK = 10.0  # times a usual step, and
STUCK_SECONDS = 60.0  # at least: a phase that long has met something that a step does not have


def stuck(run: RunView) -> Iterator[Advice]:
    """A heartbeat says that a process lives, not that it gets anywhere."""
    for rank, said, waited in _stepping(run):
        since = (rank.published_at or 0.0) - said.phase_since
        if not said.phase_since or said.phase not in ("forward", "backward", "step"):
            continue
        if since >= max(STUCK_SECONDS, STUCK * waited.seconds):
            yield warning(
                "stuck",
                f"{said.phase} has taken {seconds(since)} so far, a whole step takes {seconds(waited.seconds)}",
                f"`py-spy dump --pid {said.pid}` shows where it is; with several ranks, one that is late holds all up",
                rank.rank,
            )


OUTSIDE = 0.3  # of a step: what a program does between its steps is short, unless it waits for something


def for_the_program(run: RunView) -> Iterator[Advice]:
    """Time between forward, backward and step, in which the engine has nothing to do."""
    for rank, said, _ in _stepping(run):
        steps = steady(said)
        total = sum(one.seconds for one in steps)
        outside = sum(_outside(one) for one in steps)
        if outside >= OUTSIDE * total:
            yield warning(
                "program-bound",
                f"{share(outside / total)} of the step is neither forward nor backward nor step: the program is busy"
                " with something else, or waits for data",
                "more workers of the DataLoader, or `py-spy dump` to see what the program does between its steps",
                rank.rank,
            )


_SENDING = "all ranks are on this node, and take this time to send each other what they compute"
STRAGGLES = 1.25  # times as busy as the others: the spread of equal ranks that share a machine stays below


def for_other_ranks(run: RunView) -> Iterator[Advice]:
    """A rank that all wait for, or else the network between them."""
    told = _stepping(run)
    if len(told) > 1:
        slowest = max(told, key=_busy)
        usual = median(_busy(one) for one in told if one is not slowest)
        if _busy(slowest) >= STRAGGLES * usual:
            yield _straggler(slowest, usual, [one for one in told if one is not slowest])
            return
    found = [one for one in told if one.waited.on(ON_RANKS) >= STALLED]
    if found:
        most = max(one.waited.on(ON_RANKS) for one in found)
        elsewhere = any(one.said.world_size > one.said.local_world_size for one in found)
        yield warning(
            "network-bound",
            f"{share(most)} of the step is waiting for other ranks, and no rank of this node is a straggler",
            ("look on the other nodes for a slower rank; else it is the network" if elsewhere else _SENDING)
            + ": a larger micro-batch or, below stage 3, more gradient_accumulation_steps send less for each sample",
            *[one.rank.rank for one in found],
        )


def _busy(one: _Stepping) -> float:
    """Seconds of a step in which it does not wait for others: all ranks take the same time with that."""
    return one.waited.seconds * (1 - one.waited.on(ON_RANKS))


def _straggler(slowest: _Stepping, usual: float, others: list[_Stepping]) -> Advice:
    took, rank = _busy(slowest), slowest.rank.rank
    text = f"rank {rank} is busy for {seconds(took)} of each step, the others for {seconds(usual)}: they wait for it"
    for part, told, remedy in (
        (
            _nvme,
            "stall for NVMe",
            "look at what else uses its disk, and compare the ranks' disks with `tierbench DIR`",
        ),
        (
            _outside,
            "neither forward nor backward nor step",
            "look at what its program does there: its data, its logging",
        ),
    ):
        more, usually = _of(slowest, part), median(_of(one, part) for one in others)
        if more - usually >= (took - usual) / 2:
            text += f"; {seconds(more)} of it is {told}, {seconds(usually)} of theirs"
            return warning("straggler", text, remedy, rank)
    remedy = "look at what else runs on its cores or GPU, at their clock and temperature, and at its share of the data"
    return warning("straggler", text, remedy, rank)


def _of(one: _Stepping, part: Callable[[StepRecord], float]) -> float:
    return median(part(step) for step in steady(one.said))


def _nvme(step: StepRecord) -> float:
    return sum(step.stalls.get(cause, 0.0) for cause in ON_NVME)


def _ranks(step: StepRecord) -> float:
    return sum(step.stalls.get(cause, 0.0) for cause in ON_RANKS)


def _outside(step: StepRecord) -> float:
    return step.seconds - step.forward - step.backward - step.update


SLOWER = 1.5  # times as long as the earlier steps: more than the spread of a healthy run
LATEST = 3  # steps: one slow step is an event, three are a state
LATEST_SECONDS = 5.0  # together at least: short steps meet a busy moment of the machine several at a time
EARLIER = 8  # steps to compare with


def longer_than_before(run: RunView) -> Iterator[Advice]:
    """Steps that take much longer than the run's own did a little while ago."""
    for rank, said, _ in _stepping(run):
        before, now = _before_and_now(steady(said))
        if len(before) < EARLIER:
            continue
        then, latest = median(step.seconds for step in before), min(step.seconds for step in now)
        if latest >= SLOWER * then > 0:
            added = median(step.stall for step in now) - median(step.stall for step in before)
            yield warning(
                "slower-now",
                f"each of the last {len(now)} steps took {seconds(latest)} or more, those before {seconds(then)};"
                f" {seconds(max(0.0, added))} of the difference is stall",
                _why_slower(said, before, now),
                rank.rank,
            )


def _before_and_now(steps: list[StepRecord]) -> tuple[list[StepRecord], list[StepRecord]]:
    """The latest steps, enough for a state, apart from those before; none are before where all are not enough."""
    took = 0.0
    for count, step in enumerate(reversed(steps), 1):
        took += step.seconds
        if count >= LATEST and took >= LATEST_SECONDS:
            return steps[:-count], steps[-count:]
    return [], steps


def _why_slower(said: Snapshot, before: list[StepRecord], now: list[StepRecord]) -> str:
    def mostly(part: Callable[[StepRecord], float]) -> bool:
        """Whether it makes half of the difference."""
        whole = median(step.seconds for step in now) - median(step.seconds for step in before)
        return median(map(part, now)) - median(map(part, before)) >= whole / 2

    if said.checkpoint is not None and said.checkpoint.under_way:
        return "a checkpoint is being written beside them: it passes"
    if mostly(_ranks):
        return "it waits for other ranks: theirs tell why"
    if mostly(_nvme):
        return "look at what else uses the disks (`iostat -x 1`); a drive may have filled its fast cache"
    if mostly(_outside):
        return "look at what the program does between its steps: `py-spy dump`"
    return "look at what else uses the CPU or GPU, and at its clock and temperature"
