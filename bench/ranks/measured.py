"""A side of several ranks after its turns, and the run that measures such sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from frame.rounds import Run
from frame.side import SideError, Spec

from .overlap import Overlap, read
from .scale import Scale
from .side import Ranks, Turn


@dataclass(slots=True)
class Measured:
    """A side after its rounds. Memory in bytes, of the rank that has most: before anything was built, and peaks."""

    name: str
    module: str
    world_size: int
    parameters: int
    planned: int  # bytes that a rank sends in a step, by its plan; 0 if it has none
    turns: list[Turn]
    baseline: int
    built: int
    overlaps: list[Overlap] = field(default_factory=list)  # of some steps, on each rank

    @property
    def times(self) -> list[float]:
        """Seconds per step, by round."""
        return [turn.per_step for turn in self.turns]

    @property
    def peak(self) -> int:
        """In training."""
        return max(turn.peak for turn in self.turns)


@dataclass(slots=True)
class RanksRun(Run[Scale, Ranks]):
    """``world_size`` is that of sides that are compared; ``traces`` a directory for traces of ours, if wanted."""

    traces: Path | None = None
    world_size: int = 2

    def measured(self, specs: Sequence[Spec]) -> dict[str, Measured]:
        """``specs`` in turn."""
        with self.started(specs) as sides:
            steps = self.scale.steps
            turns = self.alternate(
                self.scale.rounds, {name: partial(side.turn, steps) for name, side in sides.items()}
            )
            results = {
                name: Measured(
                    name,
                    side.spec.module.removeprefix("ranks."),
                    side.spec.ranks,
                    side.facts["parameters"],
                    side.facts.get("planned", 0),
                    turns[name],
                    side.baseline,
                    side.peak,
                )
                for name, side in sides.items()
                if name in turns
            }
            for name, result in results.items():
                if result.module == "ours":
                    result.overlaps = self._overlaps(sides[name])
            self.sides += results.values()
            return results

    def _overlaps(self, side: Ranks) -> list[Overlap]:
        """After the rounds, so that recording takes no part in them."""
        directory = self.traces or self.place.directory
        path = directory / side.name.replace(" ", "-").replace(",", "")
        overlaps = []
        try:
            for _ in range(self.scale.traced):
                overlaps += [read(file) for file in side.traces(path)]
        except SideError as error:
            self.fail(f"traces of {side.name}", error)
        if self.traces is None:
            for file in Path(directory).glob(f"{path.name}.rank*.json"):
                file.unlink()
        return overlaps
