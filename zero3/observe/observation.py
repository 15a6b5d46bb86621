"""The observation of one engine's run: telemetry, traces of a step, progress lines and monitors.

Progress is a line in the log every ``steps_per_print`` steps, and events for the monitors. Its seconds, bytes and
stalls are those of rank 0; the loss is the mean over the ranks, the gradient norm that of all ranks. On a GPU phases
and stalls are measured by the GPU, up to the point that it has reached: nothing waits for it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import nn

from tiering import _logs
from tiering.config.training import TieringConfig
from tiering.errors import EngineStateError
from tiering.placement.workload import Tier
from tiering.telemetry import CheckpointStatus, ConfigurationStatus, plain_name
from zero3.device.tiers import Tiers
from zero3.loop.step import Update
from zero3.observe.device_rates import saved_link_rate
from zero3.observe.ending import Ending
from zero3.observe.engine_description import describe
from zero3.observe.monitors import Monitor
from zero3.observe.run_record import RunIdentity, RunRecord, Sources
from zero3.observe.throughput import throughput_of
from zero3.observe.trace import StepTrace
from zero3.parts import Assembly
from zero3.passes.moved_activations import MovedActivations
from zero3.passes.saved_tensors import Activations
from zero3.ranks.collectives import Collectives

RATES_SHOWN = 4


class Observation:
    """Records a run, and shows it: the ``publisher`` writes the status file, ``monitor`` the scalars.

    ``parts`` are mostly passed on. With several ranks, all of them make it together: they agree on the run's name.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TieringConfig,
        parts: Assembly,
        *,
        updates: Update,
        activations: Activations,
        moved: MovedActivations | None,
        checkpoint_status: Callable[[], CheckpointStatus],
        configuration: ConfigurationStatus | None,
    ) -> None:
        self._updates = updates
        self._tiers = parts.tiers
        self._trace: StepTrace | None = None
        run_name, run_id = _name_run(config.tiering.run_name, parts.collectives)
        peers = None if parts.collectives is None else parts.collectives.peers
        self.monitor = Monitor(config, parts.world.rank)
        self.throughput = throughput_of(model, parts.groups, config, parts.device)
        self.description = describe(
            config,
            configuration,
            links=self.monitor.links,
            tiers=parts.tiers,
            groups=parts.groups,
            local_size=parts.world.local_size,
        )
        self.record = RunRecord(
            RunIdentity(run_name, run_id, parts.world),
            parts.tiers,
            activations,
            sources=Sources(updates, parts.collectives, checkpoint_status, moved, self.throughput),
            ending=Ending(parts.world.rank, lambda: None if peers is None else peers.failure_began_with),
            link_rate=saved_link_rate(parts.plan.workload, parts.device, local_ranks=parts.world.local_size),
        )
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
        run_id = bytes(collectives.run_tables.table(row, "name the run")[0].tolist()).decode().rstrip()
    return configured_name or run_id.rpartition("-")[0], run_id


@dataclass(frozen=True)
class Totals:
    """Counters since the run began, or the difference between two moments.

    Bytes over NVMe (``read``, ``written``) are by path; ``reading`` and ``writing`` are the seconds in which at least
    one transfer was in flight there. ``copied`` bytes and ``copying`` seconds of a GPU's link are by direction.
    """

    steps: int
    seconds: float
    phases: dict[str, float]
    stalls: dict[str, float]
    read: dict[str, float]
    reading: dict[str, float]
    written: dict[str, float]
    writing: dict[str, float]
    sent: int
    copied: dict[str, float]
    copying: dict[str, float]

    @classmethod
    def of(cls, record: RunRecord, tiers: Tiers) -> Self:
        """The counters at the end of the last step."""
        links = {} if tiers.copies is None else tiers.copies.stats()
        return cls(
            steps=record.step,
            seconds=record.elapsed,
            phases=dict(record.seconds),
            stalls=dict(tiers.stalls.seconds),
            read={file.name: file.read.bytes for file in record.files},
            reading={file.name: file.read.busy_ns / 1e9 for file in record.files},
            written={file.name: file.write.bytes for file in record.files},
            writing={file.name: file.write.busy_ns / 1e9 for file in record.files},
            sent=record.sent(),
            copied={direction: link.bytes for direction, link in links.items()},
            copying={direction: link.busy_seconds for direction, link in links.items()},
        )

    def since(self, before: Totals) -> Totals:
        """The difference to ``before``."""
        values = {
            field.name: _difference(getattr(self, field.name), getattr(before, field.name))
            for field in fields(self)
        }
        return Totals(**values)


class Progress:
    """Logs progress lines and writes events to ``monitor`` after steps, as ``config`` says."""

    def __init__(
        self, config: TieringConfig, tiers: Tiers, updates: Update, record: RunRecord, monitor: Monitor
    ) -> None:
        self._config = config
        self._tiers = tiers
        self._updates = updates
        self._record = record
        self._monitor = monitor
        self._times = config.wall_clock_breakdown
        self._every = config.steps_per_print or (1 if self._times else 0)
        self._totals_logged = self._totals_written = Totals.of(record, tiers)
        # Since the last line.
        self._samples = 0

    def end_step(self, samples: int, total_samples: int) -> None:
        """A step of ``samples`` has ended and is in the record; ``total_samples`` counts those of all steps."""
        self._samples += samples
        if self._every and self._updates.steps % self._every == 0:
            self._log()
            self._samples = 0
        if self._monitor.writers:
            self._write(total_samples)

    def _log(self) -> None:
        now = Totals.of(self._record, self._tiers)
        interval, self._totals_logged = now.since(self._totals_logged), now
        log, level = _logs.progress(), _logs.once(_logs.LEVELS["info"])
        if self._config.steps_per_print:
            skipped = f", {self._updates.skipped} skipped" if self._updates.skipped else ""
            log.log(level, "step %d%s: %s", self._updates.steps, skipped, ", ".join(self._figures(interval)))
        if self._times:
            log.log(level, "step %d: %s", self._updates.steps, _times(interval))

    def _figures(self, interval: Totals) -> Iterator[str]:
        if self._record.loss is not None:
            yield f"loss {self._record.loss:.5g}"
        if self._updates.norm is not None:
            yield f"gradient norm {self._updates.norm:.4g}"
        yield f"lr {_rates(self._lrs())}"
        if self._scales:
            yield f"loss scale {self._updates.loss_scale.value:g}"
        yield f"{self._samples / interval.seconds:.4g} samples/s"
        if any(interval.read.values()) or any(interval.written.values()):
            read, written = sum(interval.read.values()), sum(interval.written.values())
            yield f"NVMe read {_decimal(read)}B at {_decimal(_bandwidth(interval.read, interval.reading))}B/s"
            yield f"written {_decimal(written)}B at {_decimal(_bandwidth(interval.written, interval.writing))}B/s"
        if interval.copied:
            to, of = (f"{_decimal(each)}B" for each in (interval.copied["h2d"], interval.copied["d2h"]))
            yield f"{to} to the device and {of} back at {_decimal(_bandwidth(interval.copied, interval.copying))}B/s"
        if interval.copied or any(interval.read.values()) or any(interval.written.values()):
            yield f"stalled {100 * sum(interval.stalls.values()) / interval.seconds:.1f} %"

    def _write(self, total_samples: int) -> None:
        now = Totals.of(self._record, self._tiers)
        interval, self._totals_written = now.since(self._totals_written), now
        self._monitor.write_events([(name, value, total_samples) for name, value in self._events(interval)])

    def _events(self, interval: Totals) -> Iterator[tuple[str, float]]:
        """Names and values of the events; DeepSpeed's names for figures that DeepSpeed has."""
        if self._record.loss is not None:
            yield "Train/Samples/train_loss", self._record.loss
        yield "Train/Samples/lr", self._lrs()[0]
        if self._scales:
            yield "Train/Samples/loss_scale", self._updates.loss_scale.value
        if self._updates.norm is not None:
            yield "Train/Samples/gradient_norm", self._updates.norm
        if self._times:
            for phase in ("forward", "backward", "step"):
                yield f"Train/Samples/elapsed_time_ms_{phase}", 1e3 * interval.phases.get(phase, 0.0)
        yield "Tiering/step_seconds", interval.seconds
        for cause, seconds in interval.stalls.items():
            yield f"Tiering/stall_seconds/{cause.replace(' ', '_')}", seconds
        tiers = self._tiers
        if tiers.aio is not None:
            yield "Tiering/nvme_read_bytes", sum(interval.read.values())
            yield "Tiering/nvme_read_bytes_per_second", _bandwidth(interval.read, interval.reading)
            yield "Tiering/nvme_written_bytes", sum(interval.written.values())
            yield "Tiering/nvme_written_bytes_per_second", _bandwidth(interval.written, interval.writing)
        if self._record.run.world.size > 1:
            yield "Tiering/sent_bytes", interval.sent
        for tier in Tier:
            if tiers.plan.total(tier):
                yield f"Tiering/used_bytes/{tier.value}", sum(tiers.occupancy(tier).values())

    @property
    def _scales(self) -> bool:
        return "fp16" in (self._config.precision, self._config.autocast)

    def _lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self._updates.param_groups]


def _difference(now: Any, before: Any) -> Any:
    if isinstance(now, dict):
        return {name: value - before.get(name, 0) for name, value in now.items()}
    return now - before


def _bandwidth(nbytes: dict[str, float], seconds: dict[str, float]) -> float:
    """Bytes per second of all paths together, each over the seconds in which it was busy."""
    return sum(nbytes[path] / busy for path, busy in seconds.items() if busy)


def _times(interval: Totals) -> str:
    def milliseconds(seconds: float) -> str:
        return f"{1e3 * seconds / interval.steps:.1f}"

    phases = {name: interval.phases.get(name, 0.0) for name in ("forward", "backward", "step")}
    # Not below zero: the phases of a GPU are known a moment late.
    phases["between them"] = max(0.0, interval.seconds - sum(phases.values()))
    parts = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in phases.items())
    causes = ", ".join(
        f"{cause} {milliseconds(seconds)}"
        for cause, seconds in interval.stalls.items()
        if milliseconds(seconds) != "0.0"
    )
    stalled = f"; stalled {milliseconds(sum(interval.stalls.values()))} ({causes})" if causes else ""
    return f"{milliseconds(interval.seconds)} ms a step: {parts}{stalled}"


def _rates(rates: Sequence[float]) -> str:
    """The learning rate of each param group, or one number if all are equal."""
    texts = [f"{rate:.4g}" for rate in rates]
    if len(set(texts)) == 1:
        return texts[0]
    remaining = len(texts) - RATES_SHOWN
    return " ".join(texts[:RATES_SHOWN]) + (f" and {remaining} more" if remaining > 0 else "")


def _decimal(number: float) -> str:
    """Three digits and the unit: "3.22 G"."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} T"
