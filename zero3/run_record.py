"""What a run tells about itself: phases, recent steps, and the snapshot that telemetry publishes."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from tiering import logs
from tiering.budgets import host_memory
from tiering.config import TelemetryConfig, format_size
from tiering.io_stats import DirectionStats, FileStats
from tiering.plan import Tier
from tiering.swap_file import free_by_file_system
from tiering.telemetry import (
    ActivationStatus,
    CollectiveStatus,
    ConfigurationStatus,
    DirectionStatus,
    IoEngineStatus,
    PageWriter,
    PathStatus,
    Publisher,
    Snapshot,
    StepRecord,
    TierStatus,
)
from tiering.telemetry.page import RECENT_STEPS
from tiering.telemetry.snapshot import Phase
from zero3.activations import Activations
from zero3.tiers import Tiers

log = logging.getLogger(__name__)


class Traffic(Protocol):
    """What counts the collectives: calls so far, and bytes this rank sent in them, by kind."""

    @property
    def calls(self) -> Mapping[str, int]: ...
    @property
    def sent(self) -> Mapping[str, int]: ...


class RunRecord:
    """Times the phases of one rank's run and describes its state. Read by the publisher's thread at any time."""

    def __init__(
        self,
        run_name: str,
        tiers: Tiers,
        activations: Activations,
        *,
        rank: int = 0,
        world_size: int = 1,
        traffic: Traffic | None = None,
        configuration: ConfigurationStatus | None = None,
    ) -> None:
        self.run_name = run_name
        self.configuration = configuration
        self.rank = rank
        self.world_size = world_size
        self.loss: float | None = None
        self.step = 0
        self.elapsed = 0.0  # seconds from the first forward to the end of the last step
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by phase, since the run began
        self._tiers = tiers
        self._activations = activations
        self._traffic = traffic
        self._started_at = time.time()
        self._phase: Phase = "start"
        self._seconds_before: dict[str, float] = {}
        self._steps: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self._step_began = time.perf_counter()
        self._stalled_before = 0.0
        self.files = self._stats()  # what went over each path by the end of the last step
        self._moved_before = _moved(self.files)  # filling the tiers is not part of the first step
        self._sent_before = self.sent()
        self._capacities = _capacities(tiers)

    def publish(self, telemetry: TelemetryConfig) -> Publisher | None:
        """Start to publish snapshots, if the configuration wants it."""
        if not telemetry.enabled:
            return None
        publisher = Publisher(
            PageWriter(self.run_name, self.rank, self.world_size, telemetry.dir), self.snapshot
        )
        publisher.start()
        return publisher

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Time the block as ``phase`` of the step that is under way."""
        began = time.perf_counter()
        if self._phase == "start":  # what a program does before its first forward is no part of a step
            self._step_began = began
        self._phase = phase
        try:
            yield
        finally:
            self._phase = "idle"
            self.seconds[phase] += time.perf_counter() - began

    def end_step(self) -> None:
        """An optimizer step has ended: record it."""
        self.step += 1
        self.files = self._stats()
        now, moved, stalled = time.perf_counter(), _moved(self.files), self._tiers.stalls.total
        sent = self.sent()
        seconds = now - self._step_began
        self.elapsed += seconds
        self._steps.append(
            StepRecord(
                step=self.step,
                seconds=seconds,
                forward=self._in_step("forward"),
                backward=self._in_step("backward"),
                update=self._in_step("step"),
                stall=stalled - self._stalled_before,
                read_bytes=moved[0] - self._moved_before[0],
                written_bytes=moved[1] - self._moved_before[1],
                sent_bytes=sent - self._sent_before,
            )
        )
        self._sent_before = sent
        self._step_began, self._moved_before, self._stalled_before = now, moved, stalled
        self._seconds_before = dict(self.seconds)
        if self.step == 1:
            log.log(
                logs.once(logging.INFO),
                "beside the tiers, activations of the first step took up to %s",
                format_size(self._activations.peak),
            )

    def _in_step(self, phase: Phase) -> float:
        return self.seconds[phase] - self._seconds_before.get(phase, 0.0)

    def moved(self) -> tuple[int, int]:
        """Bytes (read, written) over NVMe so far."""
        return _moved(self._stats())

    def _stats(self) -> list[FileStats]:
        return self._tiers.aio.stats() if self._tiers.aio is not None else []

    def sent(self) -> int:
        """Bytes sent to other ranks so far."""
        return sum(one.sent_bytes for one in self._collectives())

    def snapshot(self) -> Snapshot:
        """Everything as of now. Bandwidths over a window are the publisher's to fill in."""
        return Snapshot(
            run_name=self.run_name,
            rank=self.rank,
            world_size=self.world_size,
            pid=os.getpid(),
            started_at=self._started_at,
            step=self.step,
            phase=self._phase,
            loss=self.loss,
            tiers=[self._tier(tier) for tier in Tier],
            configuration=self.configuration,
            activations=self._activation_status(),
            io=self._paths(),
            io_engine=self._engine(),
            collectives=self._collectives(),
            stalls=dict(self._tiers.stalls.seconds),
            steps=list(self._steps),
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
        )

    def _activation_status(self) -> ActivationStatus:
        return ActivationStatus(self._activations.used, self._activations.peak)

    def _paths(self) -> list[PathStatus]:
        aio, swap = self._tiers.aio, self._tiers.swap
        if aio is None or swap is None:
            return []
        measured = {str(path): rate for path, rate in swap.weights.items()}
        return [
            PathStatus(
                path=file.name,
                engine=aio.engine,
                direct=file.direct,
                read=_direction(file.read),
                written=_direction(file.write),
                queue_full_seconds=file.queue_full_ns / 1e9,
                measured_bytes_per_second=measured.get(file.name),
            )
            for file in aio.stats()
        ]

    def _collectives(self) -> list[CollectiveStatus]:
        if self._traffic is None:
            return []
        sent, calls = dict(self._traffic.sent), dict(self._traffic.calls)  # others add to them meanwhile
        return [CollectiveStatus(kind, calls[kind], sent.get(kind, 0)) for kind in calls]

    def _engine(self) -> IoEngineStatus | None:
        if self._tiers.aio is None:
            return None
        info = self._tiers.aio.info
        return IoEngineStatus(info.engine, list(info.flags), info.registered_bytes, info.passed_over)


def _moved(files: Sequence[FileStats]) -> tuple[int, int]:
    return sum(file.read.bytes for file in files), sum(file.write.bytes for file in files)


def _direction(stats: DirectionStats) -> DirectionStatus:
    return DirectionStatus(
        bytes=stats.bytes,
        ops=stats.ops,
        retries=stats.retries,
        errors=stats.errors,
        in_flight=stats.in_flight,
        busy_seconds=stats.busy_ns / 1e9,
        errors_by_errno={
            errno.errorcode.get(code, "other"): count for code, count in stats.errors_by_errno.items()
        },
        latency_buckets=list(stats.latency[: _last_used(stats.latency) + 1]),
    )


def _last_used(buckets: Sequence[int]) -> int:
    return max((index for index, count in enumerate(buckets) if count), default=-1)


def _capacities(tiers: Tiers) -> dict[Tier, int]:
    memory = host_memory()[0]
    device = memory if tiers.device_is_host else torch.cuda.get_device_properties(tiers.device).total_memory
    nvme = 0
    if tiers.swap is not None:
        nvme = sum(free_by_file_system(tiers.swap.directories).values()) + tiers.swap.capacity
    return {Tier.DEVICE: device, Tier.HOST: memory, Tier.NVME: nvme}
