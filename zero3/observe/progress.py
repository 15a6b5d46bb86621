"""What a user has asked to see of a run: lines in the log every so many steps, and events for the monitors.

Seconds, bytes and stalls are this rank's, which is the first one; the loss is the mean over the ranks, the gradient
norm that of all. On a GPU phases and stalls are the device's, as far as it has got: nothing waits to find out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from tiering import logs
from tiering.config.training import TieringConfig
from tiering.placement.plan import Tier
from zero3.device.tiers import Tiers
from zero3.loop.step import Update
from zero3.observe.monitors import Monitor
from zero3.observe.run_record import RunRecord
from zero3.parts import Assembly

RATES_SHOWN = 4


@dataclass(frozen=True)
class Totals:
    """What has been counted since the run began, or between two moments of it. Bytes over NVMe are by path.

    ``reading`` and ``writing`` are the seconds in which at least one transfer was in flight there.
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
    copied: dict[str, float]  # over the link of a GPU, by direction
    copying: dict[str, float]

    @classmethod
    def of(cls, record: RunRecord, tiers: Tiers) -> Self:
        """As of the end of the last step."""
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
        """What came after ``before``."""
        values = {
            field.name: _difference(getattr(self, field.name), getattr(before, field.name))
            for field in fields(self)
        }
        return Totals(**values)


class Progress:
    """Says and writes what ``config`` asks for after each step; where it asks for nothing, that costs nothing."""

    def __init__(
        self, config: TieringConfig, parts: Assembly, updates: Update, record: RunRecord, monitor: Monitor
    ) -> None:
        self._config = config
        self._parts = parts
        self._updates = updates
        self._record = record
        self._monitor = monitor
        self._times = config.wall_clock_breakdown
        self._every = config.steps_per_print or (1 if self._times else 0)
        self._said = self._written = Totals.of(record, parts.tiers)
        self._samples = 0  # since the last line

    def end_step(self, samples: int, so_far: int) -> None:
        """A step of ``samples`` has ended, and is in the record; ``so_far`` are those of all steps."""
        self._samples += samples
        if self._every and self._updates.steps % self._every == 0:
            self._say()
            self._samples = 0
        if self._monitor.enabled:
            self._write(so_far)

    def _say(self) -> None:
        now = Totals.of(self._record, self._parts.tiers)
        took, self._said = now.since(self._said), now
        log, level = logs.progress(), logs.once(logs.LEVELS["info"])
        if self._config.steps_per_print:
            skipped = f", {self._updates.skipped} skipped" if self._updates.skipped else ""
            log.log(level, "step %d%s: %s", self._updates.steps, skipped, ", ".join(self._figures(took)))
        if self._times:
            log.log(level, "step %d: %s", self._updates.steps, _times(took))

    def _figures(self, took: Totals) -> Iterator[str]:
        if self._record.loss is not None:
            yield f"loss {self._record.loss:.5g}"
        if self._updates.norm is not None:
            yield f"gradient norm {self._updates.norm:.4g}"
        yield f"lr {_rates(self._lrs())}"
        if self._scales:
            yield f"loss scale {self._updates.loss_scale.value:g}"
        yield f"{self._samples / took.seconds:.4g} samples/s"
        if any(took.read.values()) or any(took.written.values()):
            read, written = sum(took.read.values()), sum(took.written.values())
            yield f"NVMe read {_decimal(read)}B at {_decimal(_bandwidth(took.read, took.reading))}B/s"
            yield f"written {_decimal(written)}B at {_decimal(_bandwidth(took.written, took.writing))}B/s"
        if took.copied:
            to, of = (f"{_decimal(each)}B" for each in (took.copied["h2d"], took.copied["d2h"]))
            yield f"{to} to the device and {of} back at {_decimal(_bandwidth(took.copied, took.copying))}B/s"
        if took.copied or any(took.read.values()) or any(took.written.values()):
            yield f"stalled {100 * sum(took.stalls.values()) / took.seconds:.1f} %"

    def _write(self, so_far: int) -> None:
        now = Totals.of(self._record, self._parts.tiers)
        took, self._written = now.since(self._written), now
        self._monitor.write_events([(name, value, so_far) for name, value in self._events(took)])

    def _events(self, took: Totals) -> Iterator[tuple[str, float]]:
        """By DeepSpeed's names, where it has one."""
        if self._record.loss is not None:
            yield "Train/Samples/train_loss", self._record.loss
        yield "Train/Samples/lr", self._lrs()[0]
        if self._scales:
            yield "Train/Samples/loss_scale", self._updates.loss_scale.value
        if self._updates.norm is not None:
            yield "Train/Samples/gradient_norm", self._updates.norm
        if self._times:
            for phase in ("forward", "backward", "step"):
                yield f"Train/Samples/elapsed_time_ms_{phase}", 1e3 * took.phases.get(phase, 0.0)
        yield "Tiering/step_seconds", took.seconds
        for cause, seconds in took.stalls.items():
            yield f"Tiering/stall_seconds/{cause.replace(' ', '_')}", seconds
        tiers = self._parts.tiers
        if tiers.aio is not None:
            yield "Tiering/nvme_read_bytes", sum(took.read.values())
            yield "Tiering/nvme_read_bytes_per_second", _bandwidth(took.read, took.reading)
            yield "Tiering/nvme_written_bytes", sum(took.written.values())
            yield "Tiering/nvme_written_bytes_per_second", _bandwidth(took.written, took.writing)
        if self._parts.collectives is not None:
            yield "Tiering/sent_bytes", took.sent
        for tier in Tier:
            if tiers.plan.total(tier):
                yield f"Tiering/used_bytes/{tier.value}", sum(tiers.occupancy(tier).values())

    @property
    def _scales(self) -> bool:
        return "fp16" in (self._config.precision, self._config.autocast)

    def _lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self._parts.optimizer.param_groups]


def _difference(now: Any, before: Any) -> Any:
    if isinstance(now, dict):
        return {name: value - before.get(name, 0) for name, value in now.items()}
    return now - before


def _bandwidth(nbytes: dict[str, float], seconds: dict[str, float]) -> float:
    """Bytes per second, of the paths together, each over the time in which it had something to do."""
    return sum(nbytes[path] / busy for path, busy in seconds.items() if busy)


def _times(took: Totals) -> str:
    def shown(seconds: float) -> str:
        return f"{1e3 * seconds / took.steps:.1f}"

    phases = {name: took.phases.get(name, 0.0) for name in ("forward", "backward", "step")}
    # Not below zero: a GPU's phases are told a moment late.
    phases["between them"] = max(0.0, took.seconds - sum(phases.values()))
    parts = ", ".join(f"{name} {shown(seconds)}" for name, seconds in phases.items())
    causes = ", ".join(
        f"{cause} {shown(seconds)}" for cause, seconds in took.stalls.items() if shown(seconds) != "0.0"
    )
    stalled = f"; stalled {shown(sum(took.stalls.values()))} ({causes})" if causes else ""
    return f"{shown(took.seconds)} ms a step: {parts}{stalled}"


def _rates(rates: Sequence[float]) -> str:
    """Learning rates, of a group each; one, if they are alike."""
    shown = [f"{rate:.4g}" for rate in rates]
    if len(set(shown)) == 1:
        return shown[0]
    more = len(shown) - RATES_SHOWN
    return " ".join(shown[:RATES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _decimal(number: float) -> str:
    """Three digits and the unit: "3.22 G"."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} T"
