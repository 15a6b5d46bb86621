"""A run of a benchmark: sides started, alternated and ended, and what becomes of those that fail."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from tiering.tierbench.comparison.fio import FioError
from tiering.tierbench.ratios import take_turns

from .report import Report
from .side import Place, Side, SideError, Spec

ScaleOf = TypeVar("ScaleOf")
SideOf = TypeVar("SideOf", bound=Side)


@dataclass(slots=True)
class Progress:
    """The report of a run, with lines of progress. ``failed`` names what failed; the report says why."""

    report: Report
    failed: list[str] = field(default_factory=list, kw_only=True)
    began: float = field(default_factory=time.monotonic, kw_only=True)

    def say(self, progress: str) -> None:
        """A line of progress, to standard error."""
        print(f"{time.monotonic() - self.began:6.0f} s  {progress}", file=sys.stderr, flush=True)

    def fail(self, name: str, error: Exception) -> None:
        self.failed.append(name)
        self.report.skipped.append(str(error))
        self.say(f"{name} failed: {error}")


@dataclass(slots=True)
class Run(Progress, Generic[ScaleOf, SideOf]):
    """What every case needs: the report, where sides run, how large and how often, and how a side is started.

    ``sides`` keeps the results of every side, in the order in which they ran.
    """

    place: Place
    scale: ScaleOf
    start: Callable[[Spec, Place], SideOf]
    sides: list[Any] = field(default_factory=list)

    def without(self, verdict: str, *missing: str) -> None:
        """A verdict that cannot be given because of missing sides."""
        self.report.skipped.append(f"{verdict}: not measured without {', '.join(missing)}")

    @contextmanager
    def started(self, specs: Sequence[Spec]) -> Iterator[dict[str, SideOf]]:
        """The sides that start, by name; all are ended."""
        with ExitStack() as stack:
            sides = {}
            for spec in specs:
                self.say(f"starting {spec.name}" + (f": {spec.ranks} ranks" if spec.ranks > 1 else ""))
                try:
                    sides[spec.name] = stack.enter_context(self.start(spec, self.place))
                except SideError as error:
                    self.fail(spec.name, error)
            yield sides

    def alternate(self, rounds: int, turns: Mapping[str, Callable[[], Any]]) -> dict[str, list[Any]]:
        """The readings of every side that got through all rounds. One that fails sits out the rest.

        Who goes first rotates, and a first round is dropped.
        """
        broken: set[str] = set()

        def guarded(name: str, turn: Callable[[], Any]) -> Any:
            if name in broken:
                return None
            try:
                return turn()
            except (SideError, FioError) as error:
                broken.add(name)
                self.fail(name, error)
                return None

        self.say(f"{rounds} rounds of {', '.join(turns)}")
        results = take_turns(rounds, {name: partial(guarded, name, turn) for name, turn in turns.items()})
        return {name: readings for name, readings in results.items() if name not in broken}
