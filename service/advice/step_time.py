"""Steps that do not come, that the program or the CPU's optimizer holds up, or that have become slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from service.advice.finding import Advice, warning
from service.advice.stalls import on_link, on_nvme, on_ranks, outside, stepping
from service.formatting import seconds, share
from service.recent_steps import steady
from service.view import RunView
from tiering.telemetry import Snapshot, StepRecord

STUCK = 10.0  # times a usual step, and
STUCK_SECONDS = 60.0  # at least: a phase that long has met something that a step does not have
HUNG_SECONDS = 600.0  # where no step says what is usual: longer than a start, a compilation or an evaluation


def stuck(run: RunView) -> Iterator[Advice]:
    """A heartbeat says that a process lives, not that it gets anywhere: nor whether it ever got to its first step."""
    usual = {one.rank.rank: one.waited.seconds for one in stepping(run)}
    for rank in run.ranks:
        said = rank.snapshot
        if not rank.fresh or said is None or not said.phase_since:
            continue
        lasted, step = (rank.published_at or 0.0) - said.phase_since, usual.get(rank.rank)
        told = f"{said.phase} has taken {seconds(lasted)} so far"
        if said.phase in ("forward", "backward", "step") and step is not None:
            longest = max(STUCK_SECONDS, STUCK * step)
            told += f", a whole step takes {seconds(step)}"
        else:
            longest = HUNG_SECONDS
        if said.checkpoint is not None and said.checkpoint.under_way:  # which may well take that long
            told += ", in which a checkpoint is being saved"
        if lasted >= longest:
            yield warning(
                "stuck",
                told,
                f"`py-spy dump --pid {said.pid}` shows where it is; with several ranks, one that is late holds all up",
                rank.rank,
            )


OUTSIDE = 0.3  # of a step: what a program does between its steps is short, unless it waits for something


def of_the_program(run: RunView) -> Iterator[Advice]:
    """Time between forward, backward and step, in which the engine has nothing to do."""
    for rank, said, _ in stepping(run):
        steps = steady(said)
        total = sum(one.seconds for one in steps)
        elsewhere = sum(map(outside, steps))
        if elsewhere >= OUTSIDE * total:
            yield warning(
                "program-bound",
                f"{share(elsewhere / total)} of the step is neither forward nor backward nor step: the program is busy"
                " with something else, or waits for data",
                "more workers of the DataLoader, or `py-spy dump` to see what the program does between its steps",
                rank.rank,
            )


UPDATING = 0.3  # of a step: less is what an update on the GPU takes, too


def of_the_update(run: RunView) -> Iterator[Advice]:
    """A GPU that has nothing to do while the CPU updates the optimizer state. What it waits for meanwhile is not it."""
    for rank, said, _ in stepping(run):
        planned = rank.description.plan if rank.description is not None else None
        if said.link is None or planned is None:
            continue
        elsewhere = [tier.name for tier in planned.tiers if tier.by_kind.get("optimizer state", 0)]
        in_phase = said.phase_seconds.get("step", 0.0)
        if not {"host", "nvme"} & {*elsewhere} or in_phase <= 0:
            continue
        waited = min(1.0, sum(said.stalls_by_phase.get("step", {}).values()) / in_phase)
        steps = steady(said)
        part = (1 - waited) * sum(one.update for one in steps) / sum(one.seconds for one in steps)
        if part >= UPDATING:
            yield warning(
                "update-bound",
                f"{share(part)} of the step is the update of the optimizer state on the CPU, for which the GPU waits",
                'run `tiering plan --measure` on this machine: at its rates tiering.update_on_device "auto" lets the'
                " GPU update what the CPU would take longer for; an offload_optimizer.ratio below 1 keeps a share of"
                " the state there; more gradient_accumulation_steps update once for more samples",
                rank.rank,
            )


SLOWER = 1.5  # times as long as the earlier steps: more than the spread of a healthy run
LATEST = 3  # steps: one slow step is an event, three are a state
LATEST_SECONDS = 5.0  # together at least: short steps meet a busy moment of the machine several at a time
EARLIER = 8  # steps to compare with


def slower_than_before(run: RunView) -> Iterator[Advice]:
    """Steps that take much longer than the run's own did a little while ago."""
    for rank, said, _ in stepping(run):
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
    if mostly(on_ranks):
        return "it waits for other ranks: theirs tell why"
    if mostly(on_nvme):
        return "look at what else uses the disks (`iostat -x 1`); a drive may have filled its fast cache"
    if mostly(on_link):
        return "look at what else copies to or from GPUs, and at the link's width and speed (`nvidia-smi -q -d PCIE`)"
    if mostly(outside):
        return "look at what the program does between its steps: `py-spy dump`"
    return "look at what else uses the CPU or GPU, and at its clock and temperature"
