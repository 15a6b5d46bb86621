"""The run as a whole: sides started, run in turn and ended, and what becomes of those that fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ranks.side import Place
from step import turns
from step.side import SideError

from .scale import Scale
from .side import Side, Spec


@dataclass(slots=True)
class Run(turns.Run):
    """As in bench_step.py, with sides that save. ``readings``, by case and side, are for whoever wants them all."""

    place: Place
    scale: Scale

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
