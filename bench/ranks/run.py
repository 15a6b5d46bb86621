"""The run as a whole: sides of several ranks started, run in turn and ended, and what becomes of those that fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from step import turns
from step.side import SideError

from .overlap import Overlap, read
from .scale import Scale
from .side import Place, Ranks, Spec, Turn


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
class Run(turns.Run):
    """As in bench_step.py, with sides that are several ranks. ``world_size`` is that of sides that are compared."""

    place: Place
    scale: Scale
    world_size: int = 2

    @contextmanager
    def started(self, specs: Sequence[Spec]) -> Iterator[dict[str, Ranks]]:
        """The sides that start, by name; all are ended."""
        with ExitStack() as stack:
            sides = {}
            for spec in specs:
                self.say(f"starting {spec.name}: {spec.world_size} ranks")
                try:
                    sides[spec.name] = stack.enter_context(Ranks(spec, self.place))
                except SideError as error:
                    self.fail(spec.name, error)
            yield sides

    def measured(self, specs: Sequence[Spec]) -> dict[str, Measured]:
        """``specs`` in turn."""
        with self.started(specs) as sides:
            steps = self.scale.steps
            found = self.alternate(
                self.scale.rounds, {name: partial(side.run, steps) for name, side in sides.items()}
            )
            made = {
                name: Measured(
                    name,
                    side.module,
                    side.world_size,
                    side.facts["parameters"],
                    side.facts.get("planned", 0),
                    found[name],
                    side.baseline,
                    side.built,
                )
                for name, side in sides.items()
                if name in found
            }
            for name, one in made.items():
                if one.module == "ours":
                    one.overlaps = self._overlaps(sides[name])
            self.sides += made.values()
            return made

    def _overlaps(self, side: Ranks) -> list[Overlap]:
        """After the rounds, so that recording takes no part in them."""
        directory = self.traces or self.place.directory
        path = directory / side.name.replace(" ", "-").replace(",", "")
        overlaps = []
        try:
            for _ in range(self.scale.traced):
                files = side.trace(path)
                overlaps += [read(file) for file in files]
        except SideError as error:
            self.fail(f"traces of {side.name}", error)
        if self.traces is None:
            for file in Path(directory).glob(f"{path.name}.rank*.json"):
                file.unlink()
        return overlaps
