"""The run as a whole: sides started, run in turn and ended, and what becomes of those that fail."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from figures.report import Report

from tiering.tierbench.comparison.fio import FioError, Reading
from tiering.tierbench.ratios import take_turns

from .scale import Scale
from .side import Place, Round, Side, SideError, Spec


@dataclass(slots=True)
class Measured:
    """A side after its rounds. ``peaks`` are VmHWM in bytes: while it was built, and in training."""

    name: str
    facts: dict[str, Any]
    rounds: list[Round]
    peaks: tuple[int, int]
    fio: list[Reading] = field(
        default_factory=list
    )  # of the same rounds, at this side's ratio of reads to writes

    @property
    def times(self) -> list[float]:
        """Seconds per step, by round."""
        return [one.per_step for one in self.rounds]

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
            one.counted[way] == one.steps * self.facts[f"planned_{way}"]
            for one in self.rounds
            for way in ("read", "written")
        )


@dataclass(slots=True)
class Run:
    """What every case needs. ``failed`` says which sides did, for the exit status; the report says why.

    ``sides`` keeps what every side came to, in the order in which they ran.
    """

    place: Place
    scale: Scale
    peers: Path | None
    report: Report
    traces: Path | None = None
    failed: list[str] = field(default_factory=list)
    sides: list[Measured] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def say(self, what: str) -> None:
        """Progress, for who waits."""
        print(f"{time.monotonic() - self.began:6.0f} s  {what}", file=sys.stderr, flush=True)

    def fail(self, name: str, why: Exception) -> None:
        self.failed.append(name)
        self.report.skipped.append(str(why))
        self.say(f"{name} failed: {why}")

    def without(self, what: str, *needed: str) -> None:
        """A verdict that cannot be given because a side is not there."""
        self.report.skipped.append(f"{what}: not measured without {', '.join(needed)}")

    @contextmanager
    def started(self, specs: Sequence[Spec]) -> Iterator[dict[str, Side]]:
        """The sides that start, by name; all are ended."""
        with ExitStack() as stack:
            sides = {}
            for spec in specs:
                self.say(f"starting {spec.name}")
                try:
                    sides[spec.name] = stack.enter_context(Side(spec, self.place))
                except SideError as error:
                    self.fail(spec.name, error)
            yield sides

    def alternate(self, rounds: int, sides: Mapping[str, Callable[[], Any]]) -> dict[str, list[Any]]:
        """The readings of every side that got through all rounds. One that fails sits out the rest."""
        broken: set[str] = set()

        def guarded(name: str, run: Callable[[], Any]) -> Any:
            if name in broken:
                return None
            try:
                return run()
            except (SideError, FioError) as error:
                broken.add(name)
                self.fail(name, error)
                return None

        self.say(f"{rounds} rounds of {', '.join(sides)}")
        found = take_turns(rounds, {name: partial(guarded, name, run) for name, run in sides.items()})
        return {name: readings for name, readings in found.items() if name not in broken}

    def measured(
        self,
        specs: Sequence[Spec],
        rounds: int,
        steps: Mapping[str, int] | int,
        beside: Callable[[dict[str, Side]], dict[str, Callable[[], Reading]]] | None = None,
    ) -> dict[str, Measured]:
        """``specs`` in turn, so many steps a round. ``beside`` makes a fio for each side with a plan: one more turn."""
        with self.started(specs) as sides:
            turns: dict[str, Callable[[], Any]] = {
                name: partial(side.run, steps if isinstance(steps, int) else steps[name])
                for name, side in sides.items()
            }
            fios = beside(sides) if beside is not None else {}
            turns |= {f"fio beside {name}": run for name, run in fios.items()}
            found = self.alternate(rounds, turns)
            self._trace(sides, found)
            made = {
                name: Measured(
                    name,
                    side.facts,
                    found[name],
                    (side.facts["peak"], max(one.peak for one in side.rounds)),
                    found.get(f"fio beside {name}", []),
                )
                for name, side in sides.items()
                if name in found
            }
            self.sides += made.values()
            return made

    def _trace(self, sides: Mapping[str, Side], found: Mapping[str, Any]) -> None:
        """After the rounds, so that recording takes no part in them."""
        for name, side in sides.items():
            if self.traces is not None and name in found and side.module == "ours":
                path = self.traces / f"{name.replace(' ', '-').replace(',', '')}.json"
                self.say(f"tracing {name} to {path}")
                try:
                    side.trace(path)
                except SideError as error:
                    self.fail(f"trace of {name}", error)
