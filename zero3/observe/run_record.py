"""The record of one rank's run: phases, recent steps, and the snapshots that telemetry publishes."""

from __future__ import annotations

import logging
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tiering import _logs
from tiering._interrupts import forget_exit_code
from tiering.config.training import TelemetryConfig, format_size
from tiering.placement.budgets import host_memory
from tiering.placement.workload import Tier
from tiering.storage.io_stats import FileStats
from tiering.storage.swap_file import size_by_file_system
from tiering.telemetry import (
    RECENT_STEPS,
    ActivationStatus,
    CheckpointStatus,
    CollectiveStatus,
    CopyStatus,
    CurveRecorder,
    Description,
    IoEngineStatus,
    LinkStatus,
    Publisher,
    Snapshot,
    StepRecord,
    TierStatus,
    as_text,
    open_writer,
    write_stacks_at_signal,
)
from zero3.device.tiers import Tiers
from zero3.device.timeline import PhaseClock, by_cause
from zero3.observe.ending import Ending
from zero3.observe.free_memory import INTERVAL, FreeMemory, RateLimited
from zero3.observe.gpu_sensors import GpuSensors
from zero3.observe.swap_paths import SwapPaths
from zero3.observe.throughput import Throughput
from zero3.passes.saved_tensors import Activations
from zero3.ranks.joining import ALONE, World

log = logging.getLogger(__name__)


LONGEST_REASON = 1000  # characters


class CollectiveCounts(Protocol):
    """Counts the collectives so far, by kind: calls, and bytes that this rank has sent."""

    @property
    def calls(self) -> Mapping[str, int]: ...
    @property
    def sent(self) -> Mapping[str, int]: ...


class Updates(Protocol):
    """Counts the updates of the parameters, with those before the checkpoint from which a run was resumed.

    ``skipped`` of the ``steps`` changed nothing. ``norm`` is the gradient norm of the last update, ``scale`` the factor
    of the loss. ``broken`` is the reason why training cannot continue, or empty.
    """

    steps: int
    skipped: int
    norm: float | None

    @property
    def scale(self) -> float | None: ...
    @property
    def broken(self) -> str: ...
    @property
    def param_groups(self) -> Sequence[Mapping[str, object]]: ...


@dataclass(frozen=True)
class RunIdentity:
    """The name of a run, its id, which is equal on all ranks, and this rank among them."""

    name: str
    id: str = ""
    world: World = ALONE


class ActivationCounts(Protocol):
    """Counts the bytes of activations so far: moved off the device, read from NVMe, written to it."""

    copied_bytes: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class Sources:
    """The parts of an engine that snapshots read, in addition to its tiers; None for a part that it does not have."""

    updates: Updates | None = None
    traffic: CollectiveCounts | None = None
    checkpoint: Callable[[], CheckpointStatus] | None = None
    moved: ActivationCounts | None = None
    throughput: Throughput = field(default_factory=Throughput)


class RunRecord:
    """Records one rank's run and describes its state. The publisher's thread reads it at any time.

    ``phases`` are timed by the engine.
    ``link_rate`` is the measured rate of a GPU's link, in bytes per second.
    """

    def __init__(
        self,
        run: RunIdentity,
        tiers: Tiers,
        activations: Activations,
        *,
        sources: Sources | None = None,
        ending: Ending | None = None,
        link_rate: int | None = None,
    ) -> None:
        self.run = run
        self.ending = Ending(run.world.rank) if ending is None else ending
        self.loss: float | None = None
        self.step = 0
        self.samples = 0
        self.skipped = 0
        # Seconds from the first forward to the end of the last step.
        self.elapsed = 0.0
        self._tiers = tiers
        self._activations = activations
        self._sources = sources or Sources()
        self._node = socket.gethostname()
        self._link_rate = link_rate
        self._started_at = time.time()
        self.phases = PhaseClock(tiers.streams, tiers.stalls)
        self._seconds_before: dict[str, float] = {}
        self._steps: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self._step_began = time.perf_counter()
        self._stalls_before = dict(tiers.stalls.seconds)
        # I/O statistics of each path at the end of the last step.
        self.files = self._stats()
        # Counted from now on: the fill of the tiers is not part of the first step.
        self._moved_before = _moved(self.files)
        self._sent_before = self.sent()
        self._copied_before = self._copied()
        self._activations_before = self._moved_activations()
        self._counted_before = (0, 0.0)
        # Of one rank for each node: the loss and the norm are those of all ranks.
        self._curve = CurveRecorder() if run.world.local_rank == 0 else None
        self._capacities = _capacities(tiers)
        self._free_memory = FreeMemory(tiers)
        # Of one rank for each node, because the ranks share the drives.
        self._swap_paths = SwapPaths(tiers, reads_wear=run.world.local_rank == 0)
        self._gpu = RateLimited(GpuSensors(tiers.device).read, INTERVAL)

    def publish(self, telemetry: TelemetryConfig, description: Description | None = None) -> Publisher | None:
        """Start to publish snapshots; None if telemetry is off, or no status file or thread can be made.

        Raises TelemetryError if ``telemetry.dir`` names a directory that cannot hold a status file.
        """
        if telemetry.stacks:
            write_stacks_at_signal()
        if not telemetry.enabled:
            return None
        # The file name has the id of the run, so that a status file that cannot be read still shows its run.
        name = self.run.id or self.run.name
        world = self.run.world
        level = logging.WARNING if world.local_rank == 0 else logging.DEBUG
        writer = open_writer(name, world.rank, world.size, telemetry.dir, description, level=level)
        if writer is None:
            return None
        streams = self._tiers.streams
        enter_thread = _nothing if streams is None else streams.enter_thread
        publisher = Publisher(
            writer,
            _weak_source(self),
            enter_thread=enter_thread,
            answers_stacks=telemetry.stacks,
            final_snapshot=self.ending.final_snapshot,
        )
        try:
            publisher.start()
        except RuntimeError as error:
            # The system refuses another thread.
            log.warning("telemetry of %s cannot be published: %s", writer.path, error)
            publisher.close()
            return None
        return publisher

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds so far by phase, "idle" between phases; on a GPU, on the clock of the GPU."""
        return self.phases.seconds

    def end_step(self, samples: int = 0, *, loss: float | None = None, skipped: bool = False) -> None:
        """Record that an optimizer step of ``samples``, counted over all ranks, has ended; ``loss`` is their mean."""
        self.step += 1
        self.loss = loss
        self.samples += samples
        self.skipped += skipped
        self.files = self._stats()
        if self._tiers.swap is not None:
            self._tiers.swap.observe(self.files)
        now, moved, stalls = time.perf_counter(), _moved(self.files), self._tiers.stalls.seconds
        sent, copied, activations = self.sent(), self._copied(), self._moved_activations()
        throughput, updates = self._sources.throughput, self._sources.updates
        counted = throughput.tokens, throughput.flops
        stalled = {cause: seconds - self._stalls_before.get(cause, 0.0) for cause, seconds in stalls.items()}
        # The time before the first forward is no part of a step.
        began = self.phases.began if self.step == 1 else None
        seconds, phases = now - (self._step_began if began is None else began), self.seconds
        in_phase = {phase: spent - self._seconds_before.get(phase, 0.0) for phase, spent in phases.items()}
        self.elapsed += seconds
        record = StepRecord(
            step=self.step,
            seconds=seconds,
            forward=in_phase.get("forward", 0.0),
            backward=in_phase.get("backward", 0.0),
            update=in_phase.get("step", 0.0),
            stall=sum(stalled.values()),
            read_bytes=moved[0] - self._moved_before[0],
            written_bytes=moved[1] - self._moved_before[1],
            sent_bytes=sent - self._sent_before,
            stalls={cause: seconds for cause, seconds in stalled.items() if seconds},
            ended_at=time.time(),
            h2d_bytes=copied[0] - self._copied_before[0],
            d2h_bytes=copied[1] - self._copied_before[1],
            activation_bytes=activations[0] - self._activations_before[0],
            activation_read_bytes=activations[1] - self._activations_before[1],
            activation_written_bytes=activations[2] - self._activations_before[2],
            tokens=counted[0] - self._counted_before[0],
            flops=counted[1] - self._counted_before[1],
        )
        self._steps.append(record)
        if self._curve is not None:
            self._curve.add(record, loss, None if updates is None else updates.norm)
        self._count()
        self._sent_before, self._copied_before, self._activations_before = sent, copied, activations
        self._counted_before = counted
        self._step_began, self._moved_before, self._stalls_before = now, moved, stalls
        self._seconds_before = phases
        if self.step == 1:
            log.log(
                _logs.once(logging.INFO),
                "in addition to the tiers, activations of the first step took up to %s",
                format_size(self._activations.peak),
            )

    def _count(self) -> None:
        """Copy the totals to ``ending``, which writes the last snapshot even if the engine was freed before."""
        totals, updates = self.ending.totals, self._sources.updates
        totals.step, totals.samples, totals.skipped_steps = self.step, self.samples, self.skipped
        totals.loss = self.loss
        totals.global_step = self.step if updates is None else updates.steps
        totals.global_skipped_steps = self.skipped if updates is None else updates.skipped
        # A step has ended since an earlier sys.exit, so that has not ended the program.
        forget_exit_code()

    def moved(self) -> tuple[int, int]:
        """Bytes (read, written) over NVMe so far."""
        return _moved(self._stats())

    def _stats(self) -> list[FileStats]:
        return [total for total, _ in self._tiers.file_stats()]

    def sent(self) -> int:
        """Bytes sent to other ranks so far."""
        return sum(collective.sent_bytes for collective in self._collectives())

    def _copied(self) -> tuple[int, int]:
        """Bytes copied so far to a device with memory of its own, and from it."""
        return (0, 0) if (link := self.link) is None else (link.h2d.bytes, link.d2h.bytes)

    def snapshot(self) -> Snapshot:
        """All figures as of now. The publisher fills in the bandwidths over an interval."""
        updates, checkpoint = self._sources.updates, self._sources.checkpoint
        throughput = self._sources.throughput
        run, stalls = self.run, self._tiers.stalls.by_phase()
        return Snapshot(
            run_name=run.name,
            rank=run.world.rank,
            world_size=run.world.size,
            pid=os.getpid(),
            started_at=self._started_at,
            step=self.step,
            phase=self.phases.phase,
            loss=self.loss,
            run_id=run.id,
            node=self._node,
            local_rank=run.world.local_rank,
            local_world_size=run.world.local_size,
            mesh=dict(run.world.place.coordinate),
            global_step=self.step if updates is None else updates.steps,
            phase_since=self.phases.since,
            broken="" if updates is None else as_text(updates.broken[:LONGEST_REASON]),
            samples=self.samples,
            tokens=throughput.tokens,
            flops=throughput.flops,
            peak_flops=throughput.peak_flops,
            skipped_steps=self.skipped,
            global_skipped_steps=self.skipped if updates is None else updates.skipped,
            gradient_norm=None if updates is None else updates.norm,
            learning_rate=self._learning_rate(),
            loss_scale=None if updates is None else updates.scale,
            phase_seconds=self.seconds,
            tiers=[self._tier(tier) for tier in Tier],
            activations=self._activation_status(),
            device_memory=self._free_memory.device_memory(),
            gpu=self._gpu(),
            io=self._swap_paths.status(),
            io_engine=self._engine(),
            link=self.link,
            collectives=self._collectives(),
            stalls=by_cause(stalls),
            stalls_by_phase=stalls,
            checkpoint=None if checkpoint is None else checkpoint(),
            steps=list(self._steps),
            curve=None if self._curve is None else self._curve.curve,
        )

    def _tier(self, tier: Tier) -> TierStatus:
        kinds = self._tiers.occupancy(tier)
        return TierStatus(
            name=tier.value,
            budget=self._tiers.plan.budgets.of(tier),
            capacity=self._capacities[tier],
            used=sum(kinds.values()),
            peak=self._tiers.peak(tier),
            by_kind=kinds,
            available=self._free_memory.available(tier),
        )

    def _learning_rate(self) -> float | None:
        param_groups = () if self._sources.updates is None else self._sources.updates.param_groups
        rate = param_groups[0].get("lr") if param_groups else None
        if isinstance(rate, Tensor) and rate.device.type != "cpu":
            # A read would wait for the device.
            return None
        return float(rate) if isinstance(rate, Tensor | float | int) else None

    def _activation_status(self) -> ActivationStatus:
        return ActivationStatus(self._activations.used, self._activations.peak, *self._moved_activations())

    def _moved_activations(self) -> tuple[int, int, int]:
        """Bytes of activations so far: moved off the device, read from NVMe, written to it."""
        moved = self._sources.moved
        return (0, 0, 0) if moved is None else (moved.copied_bytes, moved.read_bytes, moved.written_bytes)

    @property
    def link(self) -> LinkStatus | None:
        """Traffic so far over the link of a device with memory of its own; None if the CPU is the device."""
        copies = self._tiers.copies
        if copies is None:
            return None
        stats = copies.stats()
        h2d, d2h = (
            CopyStatus(direction.bytes, direction.copies, direction.busy_seconds)
            for direction in (stats["h2d"], stats["d2h"])
        )
        return LinkStatus(h2d, d2h, self._link_rate)

    def _collectives(self) -> list[CollectiveStatus]:
        traffic = self._sources.traffic
        if traffic is None:
            return []
        # Copies, because other threads add to the counters meanwhile.
        sent, calls = dict(traffic.sent), dict(traffic.calls)
        return [CollectiveStatus(kind, calls[kind], sent.get(kind, 0)) for kind in calls]

    def _engine(self) -> IoEngineStatus | None:
        if self._tiers.aio is None:
            return None
        info = self._tiers.aio.info
        return IoEngineStatus(info.engine, list(info.flags), info.registered_bytes, info.passed_over)


def _nothing() -> None:
    pass


def _weak_source(record: RunRecord) -> Callable[[], Snapshot | None]:
    """Makes snapshots of ``record`` while it exists.

    The publisher's thread must not keep the record: otherwise an engine without close() would never be freed.
    """
    reference = weakref.WeakMethod(record.snapshot)

    def source() -> Snapshot | None:
        snapshot = reference()
        return None if snapshot is None else snapshot()

    return source


def _moved(files: Sequence[FileStats]) -> tuple[int, int]:
    return sum(file.read.bytes for file in files), sum(file.write.bytes for file in files)


def _capacities(tiers: Tiers) -> dict[Tier, int]:
    memory = host_memory()[0]
    on_gpu = tiers.device.type == "cuda"
    device = torch.cuda.get_device_properties(tiers.device).total_memory if on_gpu else memory
    nvme = 0
    if tiers.swap is not None:
        nvme = sum(size_by_file_system(tiers.swap.directories).values())
    return {Tier.DEVICE: device, Tier.HOST: memory, Tier.NVME: nvme}
