"""Steps that hang, that wait for the program or for the optimizer on the CPU, or that have become slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from service.advice.advice import Advice, error, warning
from service.advice.stalls import on_link, on_nvme, on_ranks, outside, stepping_ranks
from service.formatting import seconds, share
from service.recent_steps import steady_steps
from service.view import RunView
from tiering.telemetry import Snapshot, StepRecord


def stuck(run: RunView) -> Iterator[Advice]:
    """Phases that take too long."""
    for rank in run.ranks:
        snapshot, duration = rank.snapshot, rank.phase_duration
        if snapshot is None or duration is None or not duration.is_stuck:
            continue
        text = f"{snapshot.phase} has taken {seconds(duration.seconds)} so far"
        if duration.step_seconds is not None:
            text += f", a whole step takes {seconds(duration.step_seconds)}"
        # A save may take this long.
        if snapshot.checkpoint is not None and snapshot.checkpoint.under_way:
            text += ", while a checkpoint is being saved"
        yield error(
            "stuck",
            text,
            f"`tierd stacks {run.id}` shows the function in which each rank waits; with several ranks, one late rank"
            " delays all",
            rank.rank,
        )


OUTSIDE_FRACTION = 0.3  # of a step: the work of a program between its steps is short unless it waits


def program_bound(run: RunView) -> Iterator[Advice]:
    """Steps with much time outside forward, backward and step, in which the engine does nothing."""
    for rank, snapshot, _ in stepping_ranks(run):
        steps = steady_steps(snapshot)
        total = sum(step.seconds for step in steps)
        outside_seconds = sum(map(outside, steps))
        if outside_seconds >= OUTSIDE_FRACTION * total:
            yield warning(
                "program-bound",
                f"{share(outside_seconds / total)} of the step is outside forward, backward and step: the program does"
                " other work or waits for data",
                "use more DataLoader workers; `py-spy dump` shows what the program does between its steps",
                rank.rank,
            )


UPDATE_FRACTION = 0.3  # of a step: an update on the GPU may also take less than this


def update_bound(run: RunView) -> Iterator[Advice]:
    """A GPU that is idle while the CPU updates the optimizer state. Stalls during the update are not counted."""
    for rank, snapshot, _ in stepping_ranks(run):
        planned = rank.description.plan if rank.description is not None else None
        if snapshot.link is None or planned is None:
            continue
        state_tiers = {tier.name for tier in planned.tiers if tier.by_kind.get("optimizer state", 0)}
        phase_seconds = snapshot.phase_seconds.get("step", 0.0)
        if not {"host", "nvme"} & state_tiers or phase_seconds <= 0:
            continue
        stalled = min(1.0, sum(snapshot.stalls_by_phase.get("step", {}).values()) / phase_seconds)
        steps = steady_steps(snapshot)
        fraction = (1 - stalled) * sum(step.update for step in steps) / sum(step.seconds for step in steps)
        if fraction >= UPDATE_FRACTION:
            yield warning(
                "update-bound",
                f"{share(fraction)} of the step is the update of the optimizer state on the CPU, while the GPU waits",
                'run `tiering plan --measure` on this machine: with its rates, tiering.update_on_device "auto" lets'
                " the GPU update the part for which the CPU is slower; an offload_optimizer.ratio below 1 keeps a part"
                " of the state on the GPU; more gradient_accumulation_steps update once for more samples",
                rank.rank,
            )


SLOWER_RATIO = 1.5  # to the earlier steps: more than the spread of a healthy run
LATEST_STEPS = 3  # one slow step is not a trend
LATEST_SECONDS = 5.0  # of these steps together: a busy moment of the machine delays several short steps
EARLIER_STEPS = 8  # to compare with


def slower_than_before(run: RunView) -> Iterator[Advice]:
    """Steps that take much longer than the earlier steps of the same run."""
    for rank, snapshot, _ in stepping_ranks(run):
        earlier, latest = _earlier_and_latest(steady_steps(snapshot))
        if len(earlier) < EARLIER_STEPS:
            continue
        earlier_seconds = median(step.seconds for step in earlier)
        latest_seconds = min(step.seconds for step in latest)
        if latest_seconds >= SLOWER_RATIO * earlier_seconds > 0:
            added = median(step.stall for step in latest) - median(step.stall for step in earlier)
            yield warning(
                "slower-now",
                f"each of the last {len(latest)} steps took at least {seconds(latest_seconds)}, earlier steps"
                f" {seconds(earlier_seconds)}; {seconds(max(0.0, added))} of the difference is stall",
                _slower_remedy(snapshot, earlier, latest),
                rank.rank,
            )


def _earlier_and_latest(steps: list[StepRecord]) -> tuple[list[StepRecord], list[StepRecord]]:
    """Split the steps: the latest are at least LATEST_STEPS and LATEST_SECONDS; else there are no earlier ones."""
    total = 0.0
    for count, step in enumerate(reversed(steps), 1):
        total += step.seconds
        if count >= LATEST_STEPS and total >= LATEST_SECONDS:
            return steps[:-count], steps[-count:]
    return [], steps


def _slower_remedy(snapshot: Snapshot, earlier: list[StepRecord], latest: list[StepRecord]) -> str:
    def is_main_cause(part: Callable[[StepRecord], float]) -> bool:
        """Whether ``part`` accounts for half of the difference."""
        difference = median(step.seconds for step in latest) - median(step.seconds for step in earlier)
        return median(map(part, latest)) - median(map(part, earlier)) >= difference / 2

    if snapshot.checkpoint is not None and snapshot.checkpoint.under_way:
        return "a checkpoint is being written at the same time: the slowdown ends with it"
    if is_main_cause(on_ranks):
        return "it waits for other ranks: see their warnings"
    if is_main_cause(on_nvme):
        return "check what else uses the disks (`iostat -x 1`); a drive may have filled its fast cache"
    if is_main_cause(on_link):
        return "check what else copies to or from GPUs, and the width and speed of the link (`nvidia-smi -q -d PCIE`)"
    if is_main_cause(outside):
        return "check what the program does between its steps: `py-spy dump`"
    return "check what else uses the CPU or GPU, and its clock and temperature"
