"""The observation of one engine's run: telemetry, traces of a step, progress lines and monitors."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable

import torch

from tiering.config.training import TieringConfig
from tiering.errors import EngineStateError
from tiering.telemetry import CheckpointStatus, ConfigurationStatus, plain_name
from zero3.loop.step import Update
from zero3.observe.device_rates import saved_link_rate
from zero3.observe.ending import Ending
from zero3.observe.engine_description import describe
from zero3.observe.monitors import Monitor
from zero3.observe.progress import Progress
from zero3.observe.run_record import RunIdentity, RunRecord, Sources
from zero3.observe.trace import StepTrace
from zero3.parts import Assembly
from zero3.passes.saved_tensors import Activations
from zero3.ranks.collectives import Collectives


class Observation:
    """Records a run, and shows it: the ``publisher`` writes the status file, ``monitor`` the scalars.

    ``parts`` are mostly passed on. With several ranks, all of them make it together: they agree on the run's name.
    """

    def __init__(
        self,
        config: TieringConfig,
        parts: Assembly,
        *,
        updates: Update,
        activations: Activations,
        checkpoint_status: Callable[[], CheckpointStatus],
        configuration: ConfigurationStatus | None,
    ) -> None:
        self._updates = updates
        self._tiers = parts.tiers
        self._trace: StepTrace | None = None
        run_name, run_id = _name_run(config.tiering.run_name, parts.collectives)
        peers = None if parts.collectives is None else parts.collectives.peers
        self.description = describe(
            config,
            configuration,
            tiers=parts.tiers,
            groups=parts.groups,
            local_size=parts.world.local_size,
        )
        self.record = RunRecord(
            RunIdentity(run_name, run_id, parts.world),
            parts.tiers,
            activations,
            sources=Sources(updates, parts.collectives, checkpoint_status),
            ending=Ending(parts.world.rank, lambda: None if peers is None else peers.failure_began_with),
            link_rate=saved_link_rate(parts.plan.workload, parts.device, local_ranks=parts.world.local_size),
        )
        self.monitor = Monitor(config, parts.world.rank)
        self._progress = Progress(config, parts.tiers, updates, self.record, self.monitor)
        self.publisher = self.record.publish(config.tiering.telemetry, self.description)

    def end_step(self, samples: int) -> None:
        """A step of ``samples``, over all ranks, has ended."""
        self.record.end_step(samples, loss=self._updates.loss, skipped=self._updates.overflow)
        if self._trace is not None and self._trace.end_step(self._updates.steps):
            self._trace = None
        self._progress.end_step(samples, self._updates.samples)

    def begin_trace(self, path: str | os.PathLike[str]) -> None:
        """See Engine.trace."""
        if self._trace is not None:
            raise EngineStateError(
                f"trace was called while the trace to {self._trace.path} is in progress; end the step that it records"
                " first"
            )
        self._trace = StepTrace(path, self._tiers)

    def note_failure(self, error: BaseException) -> None:
        """``error`` has ended a phase of the step: write the trace of the step, if its recording has begun."""
        if self._trace is not None and self._trace.under_way:
            self._end_trace(type(error).__name__)

    def settle(self, error: BaseException | None, *, stopped_by: str) -> None:
        """The run ends now. See Ending.settle."""
        self.record.ending.settle(error, stopped_by=stopped_by, broken=self._updates.broken)

    def close(self) -> None:
        """Write the trace that is under way, and publish the last status. ``monitor`` stays open."""
        self._end_trace("close()")
        if self.publisher is not None:
            self.publisher.end()

    def _end_trace(self, cause: str) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.write(f"step {self._updates.steps + 1}, ended by {cause}")


def _name_run(configured_name: str | None, collectives: Collectives | None) -> tuple[str, str]:
    """(name, id) of this run. The id is rank 0's, and so is the name where the configuration has none."""
    name = configured_name or f"run-{os.getpid()}"
    run_id = f"{plain_name(name)[:48]}-{secrets.token_hex(4)}"
    if collectives is not None:
        row = torch.frombuffer(bytearray(run_id.encode().ljust(64)), dtype=torch.uint8)
        run_id = bytes(collectives.table(row, "name the run")[0].tolist()).decode().rstrip()
    return configured_name or run_id.rpartition("-")[0], run_id
