"""Sides that train, after their rounds, and the run that measures them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tiering.tierbench.comparison.fio import RunReading

from .rounds import Run, ScaleOf
from .side import Side, Spec
from .training import Round


@dataclass(slots=True)
class Measured:
    """A side after its rounds. ``peaks`` are VmHWM in bytes: while it was built, and in training.

    ``fio`` are readings of the same rounds, at this side's ratio of reads to writes.
    """

    name: str
    facts: dict[str, Any]
    rounds: list[Round]
    peaks: tuple[int, int]
    fio: list[RunReading] = field(default_factory=list)

    @property
    def times(self) -> list[float]:
        """Seconds per step, by round."""
        return [round_.per_step for round_ in self.rounds]

    @property
    def peak(self) -> int:
        return max(self.peaks)

    @property
    def planned(self) -> int:
        """Bytes over NVMe per step, by its plan; 0 if it has none."""
        return int(self.facts.get("planned_read", 0) + self.facts.get("planned_written", 0))

    @property
    def as_planned(self) -> bool:
        """Whether every round moved the plan's bytes, to the byte, in both directions."""
        return all(
            round_.counted[way] == round_.steps * self.facts[f"planned_{way}"]
            for round_ in self.rounds
            for way in ("read", "written")
        )


Beside = Callable[[Mapping[str, Side]], dict[str, Callable[[], RunReading]]]


@dataclass(slots=True)
class TrainingRun(Run[ScaleOf, Side]):
    """A run of sides that train."""

    def measured(
        self, specs: Sequence[Spec], rounds: int, steps: Mapping[str, int] | int, beside: Beside | None = None
    ) -> dict[str, Measured]:
        """``specs`` in turn, so many steps a round. ``beside`` makes one more turn for each side that has a disk."""
        with self.started(specs) as sides:
            turns: dict[str, Callable[[], Any]] = {
                name: partial(side.train, steps if isinstance(steps, int) else steps[name])
                for name, side in sides.items()
            }
            fios = beside(sides) if beside is not None else {}
            turns |= {f"fio beside {name}": turn for name, turn in fios.items()}
            readings = self.alternate(rounds, turns)
            self.after_rounds(sides, readings)
            results = {
                name: Measured(
                    name,
                    side.facts,
                    readings[name],
                    (side.facts["peak"], max(round_.peak for round_ in side.rounds)),
                    readings.get(f"fio beside {name}", []),
                )
                for name, side in sides.items()
                if name in readings
            }
            self.sides += results.values()
            return results

    def after_rounds(self, sides: Mapping[str, Side], readings: Mapping[str, Any]) -> None:
        """Called while the sides that got through all rounds, those in ``readings``, still run."""
