"""Metrics of a rank: its process, its steps, tiers, swapping, copies, collectives, checkpoints, and its plan.

Units are bytes and seconds. What pages have as rates and percentiles is left out: those of several ranks, or of another
window, can be made of counters and buckets, but not of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Literal

from service.metrics.families import Family, Histogram, Values, counter, gauge
from service.recent import recent
from service.view import RankView
from tiering.telemetry import CopyStatus, DirectionStatus, PathStatus, PlanStatus, Snapshot

# Powers of two nanoseconds, as engines count them, from 16 us to 8.6 s. The same from the first scrape on: a bucket
# that appears later would be missing in a rate.
LATENCY_POWERS = range(14, 34)
LATENCY_BOUNDS = tuple(str(2.0**power / 1e9) for power in LATENCY_POWERS)


RANK_UP: Family[RankView] = gauge(
    "tiering_rank_up",
    "Whether the rank may be running (1), or its process is gone and has left its page (0).",
    # Not 0 where a page cannot be read: its process may well train.
    lambda rank: float(rank.state != "stale"),
)


def _rank_info(rank: RankView) -> Values:
    said, engine = rank.snapshot, rank.snapshot.io_engine if rank.snapshot is not None else None
    if said is None:
        return {}
    device = rank.description.device if rank.description is not None else ""
    name, flags = (engine.name, ",".join(sorted(engine.flags))) if engine is not None else ("", "")
    return {(said.node, str(said.local_rank), device, name, flags): 1}


# Of ranks that live; their process may hang, which is what the age is for.
OF_RANK: tuple[Family[RankView], ...] = (
    # An age, though moments are more common: the clock of whoever asks need not be this node's.
    gauge(
        "tiering_rank_heartbeat_age_seconds",
        "Seconds since the rank last published, which it does four times a second.",
        lambda rank: rank.heartbeat_age,
    ),
    Family(
        "info",
        "tiering_rank_info",
        "Where the rank runs, on what it computes, and the I/O engine that swaps for it.",
        ("node", "local_rank", "device", "io_engine", "io_flags"),
        _rank_info,
    ),
)


def _by_phase_and_cause(said: Snapshot) -> Values:
    return {
        (phase, cause): seconds
        for phase, causes in said.stalls_by_phase.items()
        for cause, seconds in causes.items()
    }


def _recent_step(said: Snapshot) -> float | None:
    found = recent(said)
    return None if found is None else found.seconds


def _recent_stall(said: Snapshot) -> float | None:
    found = recent(said)
    return None if found is None else found.share


def _of_tiers(name: str, text: str, attribute: str) -> Family[Snapshot]:
    return Family(
        "gauge", name, text, ("tier",), lambda said: {(t.name,): getattr(t, attribute) for t in said.tiers}
    )


def _tier_contents(said: Snapshot) -> Values:
    return {(tier.name, kind): nbytes for tier in said.tiers for kind, nbytes in tier.by_kind.items()}


_OF_STEPS: tuple[Family[Snapshot], ...] = (
    gauge(
        "tiering_rank_start_time_seconds",
        "Unix time at which the rank's engine was built.",
        lambda said: said.started_at,
    ),
    counter("tiering_steps_total", "Optimizer steps since the start.", lambda said: said.step),
    gauge(
        "tiering_global_step",
        "Optimizer steps of the run, those before the checkpoint that it went on from included.",
        lambda said: said.global_step,
    ),
    counter(
        "tiering_samples_total",
        "Samples of all ranks in finished steps since the start; every rank tells the same.",
        lambda said: said.samples,
    ),
    counter(
        "tiering_skipped_steps_total",
        "Optimizer steps that changed nothing because a gradient was not finite, since the start.",
        lambda said: said.skipped_steps,
    ),
    gauge(
        "tiering_loss",
        "Loss of the last micro-batch, the mean over all ranks; NaN where it diverged.",
        lambda said: said.loss,
    ),
    gauge(
        "tiering_gradient_norm",
        "Norm of all gradients in the last step, before clipping.",
        lambda said: said.gradient_norm,
    ),
    gauge(
        "tiering_learning_rate",
        "Learning rate of the first param group in the next step.",
        lambda said: said.learning_rate,
    ),
    gauge(
        "tiering_loss_scale",
        "What the loss is multiplied with; absent where nothing is scaled.",
        lambda said: said.loss_scale,
    ),
    Family(
        "counter",
        "tiering_phase_seconds_total",
        "Seconds that the rank, or its GPU, spent in each phase of a step, and idle between phases, since the start.",
        ("phase",),
        lambda said: {(phase,): seconds for phase, seconds in said.phase_seconds.items()},
    ),
    Family(
        "counter",
        "tiering_stall_seconds_total",
        "Seconds that compute (the GPU, if there is one) waited, by phase and what it waited for, since the start.",
        ("phase", "cause"),
        _by_phase_and_cause,
    ),
    gauge(
        "tiering_recent_step_seconds",
        "Seconds from the end of one step to that of the next: the median of the last 32, the run's first left out.",
        _recent_step,
    ),
    gauge(
        "tiering_recent_stall_ratio",
        "Share of the time of those steps in which compute waited, 0 to 1.",
        _recent_stall,
    ),
    gauge(
        "tiering_last_step_timestamp_seconds",
        "Unix time at which the last optimizer step ended.",
        lambda said: said.steps[-1].ended_at or None if said.steps else None,
    ),
)

_OF_TIERS: tuple[Family[Snapshot], ...] = (
    _of_tiers(
        "tiering_tier_capacity_bytes",
        "Bytes that the tier has on this machine; all ranks of a node share them.",
        "capacity",
    ),
    _of_tiers(
        "tiering_tier_available_bytes",
        "Bytes of the tier that nobody uses now; all ranks of a node share them. Absent where not known.",
        "available",
    ),
    _of_tiers("tiering_tier_budget_bytes", "Bytes of the tier that the rank may use.", "budget"),
    _of_tiers("tiering_tier_used_bytes", "Bytes of the tier that the rank uses.", "used"),
    _of_tiers(
        "tiering_tier_peak_bytes",
        "The most bytes of the tier that the rank has used since the start.",
        "peak",
    ),
    Family(
        "gauge",
        "tiering_tier_content_bytes",
        "Bytes of the tier that the rank uses, by what they hold; they add up to tiering_tier_used_bytes.",
        ("tier", "kind"),
        _tier_contents,
    ),
    gauge(
        "tiering_activation_bytes",
        "Bytes that autograd keeps for backward, beside the tiers.",
        lambda said: said.activations.used if said.activations is not None else None,
    ),
    gauge(
        "tiering_activation_peak_bytes",
        "The most bytes that autograd has kept for backward since the start.",
        lambda said: said.activations.peak if said.activations is not None else None,
    ),
    gauge(
        "tiering_device_memory_allocated_bytes",
        "Bytes of the GPU in torch's tensors, those of the device tier included; absent on a CPU.",
        lambda said: said.device_memory.allocated if said.device_memory is not None else None,
    ),
    gauge(
        "tiering_device_memory_peak_bytes",
        "The most bytes of the GPU in torch's tensors since the start, or since the program reset that.",
        lambda said: said.device_memory.peak if said.device_memory is not None else None,
    ),
    gauge(
        "tiering_device_memory_reserved_bytes",
        "Bytes of the GPU that torch has taken from the driver, those that it keeps for later included.",
        lambda said: said.device_memory.reserved if said.device_memory is not None else None,
    ),
)


def _directions(said: Snapshot) -> Iterator[tuple[tuple[str, str], DirectionStatus]]:
    for path in said.io:
        yield (path.path, "read"), path.read
        yield (path.path, "write"), path.written


def _of_directions(
    kind: Literal["gauge", "counter", "histogram"],
    name: str,
    text: str,
    read: Callable[[DirectionStatus], float | Histogram],
) -> Family[Snapshot]:
    return Family(
        kind,
        name,
        text,
        ("path", "direction"),
        lambda said: {labels: read(one) for labels, one in _directions(said)},
    )


def _of_paths(
    kind: Literal["gauge", "counter"], name: str, text: str, read: Callable[[PathStatus], float | None]
) -> Family[Snapshot]:
    return Family(kind, name, text, ("path",), lambda said: {(path.path,): read(path) for path in said.io})


def _errors_by_errno(said: Snapshot) -> Values:
    return {
        (*labels, errno): count
        for labels, one in _directions(said)
        for errno, count in one.errors_by_errno.items()
    }


def _latency(one: DirectionStatus) -> Histogram:
    below = [0, *accumulate(one.latency_buckets)]  # below[i]: in less than 2^i ns
    counts = [below[min(power, len(below) - 1)] for power in LATENCY_POWERS]
    return Histogram(LATENCY_BOUNDS, counts, below[-1], one.latency_seconds)


_OF_SWAPPING: tuple[Family[Snapshot], ...] = (
    Family(
        "info",
        "tiering_swap_path_info",
        "How a swap path is accessed: by which I/O engine, and whether past the page cache.",
        ("path", "io_engine", "direct"),
        lambda said: {(path.path, path.engine, str(path.direct).lower()): 1 for path in said.io},
    ),
    _of_directions(
        "counter", "tiering_swap_bytes_total", "Bytes swapped since the start.", lambda one: one.bytes
    ),
    _of_directions(
        "counter",
        "tiering_swap_operations_total",
        "Requests to the I/O engine that have ended since the start.",
        lambda one: one.ops,
    ),
    _of_directions(
        "counter",
        "tiering_swap_retries_total",
        "Requests that were continued after a short transfer, or issued again, since the start.",
        lambda one: one.retries,
    ),
    _of_directions(
        "counter",
        "tiering_swap_errors_total",
        "Requests that failed since the start.",
        lambda one: one.errors,
    ),
    # Beside the sum, which is there from the start: a series that begins with an error has no increase.
    Family(
        "counter",
        "tiering_swap_errors_by_errno_total",
        "Requests that failed since the start, by the name of the error; absent before the first.",
        ("path", "direction", "errno"),
        _errors_by_errno,
    ),
    _of_directions(
        "gauge",
        "tiering_swap_operations_in_flight",
        "Requests that are with the I/O engine now.",
        lambda one: one.in_flight,
    ),
    _of_directions(
        "counter",
        "tiering_swap_busy_seconds_total",
        "Seconds with at least one transfer in flight since the start.",
        lambda one: one.busy_seconds,
    ),
    _of_directions(
        "histogram",
        "tiering_swap_latency_seconds",
        "Seconds from issue to completion of a request.",
        _latency,
    ),
    _of_paths(
        "counter",
        "tiering_swap_queue_full_seconds_total",
        "Seconds in which transfers waited because the path had as many in flight as allowed, since the start.",
        lambda path: path.queue_full_seconds,
    ),
    _of_paths(
        "gauge",
        "tiering_swap_path_measured_bytes_per_second",
        "Bandwidth by which the path got its share of the stripes; absent where there is one path.",
        lambda path: path.measured_bytes_per_second,
    ),
    gauge(
        "tiering_io_registered_bytes",
        "Bytes of memory that the kernel knows for I/O; absent where nothing is swapped.",
        lambda said: said.io_engine.registered_bytes if said.io_engine is not None else None,
    ),
)


def _of_copies(name: str, text: str, read: Callable[[CopyStatus], float]) -> Family[Snapshot]:
    def told(said: Snapshot) -> Values:
        link = said.link
        return {} if link is None else {("h2d",): read(link.h2d), ("d2h",): read(link.d2h)}

    return Family("counter", name, text, ("direction",), told)


_OF_THE_LINK: tuple[Family[Snapshot], ...] = (
    _of_copies(
        "tiering_device_copy_bytes_total",
        "Bytes copied to the GPU (h2d) and from it (d2h) since the start; absent on a CPU.",
        lambda one: one.bytes,
    ),
    _of_copies(
        "tiering_device_copies_total",
        "Copies to the GPU (h2d) and from it (d2h) since the start; absent on a CPU.",
        lambda one: one.copies,
    ),
    _of_copies(
        "tiering_device_copy_busy_seconds_total",
        "Seconds with a copy under way in that direction since the start, by the GPU's clock; absent on a CPU.",
        lambda one: one.busy_seconds,
    ),
    gauge(
        "tiering_device_link_measured_bytes_per_second",
        "Bandwidth each way of the link to the GPU, as tiering plan --measure found it; absent where it did not.",
        lambda said: said.link.measured_bytes_per_second if said.link is not None else None,
    ),
)

_OF_COLLECTIVES: tuple[Family[Snapshot], ...] = (
    Family(
        "counter",
        "tiering_collective_calls_total",
        "Collectives that the rank took part in since the start.",
        ("kind",),
        lambda said: {(one.kind,): one.calls for one in said.collectives},
    ),
    Family(
        "counter",
        "tiering_collective_sent_bytes_total",
        "Bytes that the rank sent in collectives since the start.",
        ("kind",),
        lambda said: {(one.kind,): one.sent_bytes for one in said.collectives},
    ),
)

_OF_CHECKPOINTS: tuple[Family[Snapshot], ...] = (
    Family(
        "counter",
        "tiering_checkpoints_total",
        "Checkpoints that the rank has ended to save since the start, by how that ended.",
        ("outcome",),
        lambda said: (
            {("saved",): said.checkpoint.saved, ("failed",): said.checkpoint.failed}
            if said.checkpoint
            else {}
        ),
    ),
    gauge(
        "tiering_checkpoint_under_way",
        "Whether the rank saves a checkpoint now (1), or not (0).",
        lambda said: float(said.checkpoint.under_way) if said.checkpoint else None,
    ),
    gauge(
        "tiering_checkpoint_last_timestamp_seconds",
        "Unix time at which the last save ended, well or not.",
        lambda said: said.checkpoint.ended_at if said.checkpoint else None,
    ),
    gauge(
        "tiering_checkpoint_last_duration_seconds",
        "Seconds that the last save took.",
        lambda said: said.checkpoint.seconds if said.checkpoint else None,
    ),
    gauge(
        "tiering_checkpoint_last_stall_seconds",
        "Seconds for which training stood still in the last save.",
        lambda said: said.checkpoint.stalled if said.checkpoint else None,
    ),
    gauge(
        "tiering_checkpoint_last_bytes",
        "Bytes of this rank's files in the last save.",
        lambda said: said.checkpoint.nbytes if said.checkpoint else None,
    ),
)

OF_SNAPSHOT = _OF_STEPS + _OF_TIERS + _OF_SWAPPING + _OF_THE_LINK + _OF_COLLECTIVES + _OF_CHECKPOINTS

OF_PLAN: tuple[Family[PlanStatus], ...] = (
    Family(
        "gauge",
        "tiering_plan_tier_bytes",
        "Bytes that the plan puts on the tier, by what they hold.",
        ("tier", "kind"),
        lambda plan: {
            (tier.name, kind): nbytes for tier in plan.tiers for kind, nbytes in tier.by_kind.items()
        },
    ),
    Family(
        "gauge",
        "tiering_plan_step_bytes",
        "Bytes that a step moves by the plan, by what they hold: read and written over NVMe, sent to other ranks.",
        ("direction", "kind"),
        lambda plan: {
            (direction, kind): nbytes
            for direction, moved in (("read", plan.read), ("write", plan.written), ("send", plan.sent))
            for kind, nbytes in moved.items()
        },
    ),
)
