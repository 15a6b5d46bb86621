"""The run as a whole: sides started, run in turn and ended, all within a time, and what becomes of those that fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from frame.rounds import Progress
from frame.side import Place, SideError

from tiering.tierbench.ratios import in_turn

from .side import Round, Side, Spec
from .work import Work

PATIENCE = 20.0  # seconds beyond its turn after which a side is given up
FIRST_STEPS = 2  # in the round that is dropped, which also tells how long a step takes
MOST_STEPS = 16
MOST_ROUNDS = 9
FEWEST_ROUNDS = 1
STARTING = 0.6  # of a wave's time, at most, for its sides to build their models
FIRST_POINT = 2  # times the time of each further one


@dataclass(slots=True)
class Measured:
    """A side after its rounds of so many tokens per step. ``wave`` numbers those who ran beside each other."""

    name: str
    work: Work
    facts: dict[str, Any]
    rounds: list[Round]
    wave: int

    @property
    def tokens(self) -> int:
        return self.rounds[0].tokens

    @property
    def rates(self) -> list[float]:
        """Tokens per second, by round."""
        return [round_.rate for round_ in self.rounds]

    @property
    def host(self) -> int:
        """The most host memory that the process took, building included."""
        return max(self.facts["built"]["host"], *(round_.host for round_ in self.rounds))

    def most(self, name: str) -> int | None:
        """Of the rounds; None where there is no device to tell."""
        values = [getattr(round_, name) for round_ in self.rounds]
        return None if None in values else max(values)

    def flops(self, rate: float) -> float:
        """Per second, at a rate of tokens."""
        return rate * self.work.shape.flops(self.work.sequence)


@dataclass(slots=True)
class Run(Progress):
    """What every case needs.

    ``deadline`` is a time of ``time.monotonic`` at which all rounds are over; a round that is under way then may end.
    ``turn`` is how many seconds a side trains in one round, about.
    """

    place: Place
    deadline: float
    turn: float
    sides: list[Measured] = field(default_factory=list)
    waves: int = 0

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def without(self, label: str, why: str) -> None:
        self.report.skipped.append(f"{label}: {why}")

    def wave(self, work: Work, specs: Sequence[Spec], points: Sequence[int], until: float) -> list[Measured]:
        """``specs`` beside each other, in turn, for each of ``points`` tokens per step, until that time."""
        self.waves += 1
        results: list[Measured] = []
        with ExitStack() as stack:
            now = time.monotonic()
            sides = self._started(stack, work, specs, now + STARTING * (until - now))
            for number, tokens in enumerate(points):
                rest = until - time.monotonic()
                if not sides or (number and rest < 2 * self.turn * len(sides)):
                    self.without(f"{tokens} tokens per step", "no time, or no side, was left for it")
                    continue
                shares = [FIRST_POINT if index == 0 else 1 for index in range(len(points))][number:]
                stop = time.monotonic() + max(0.0, rest) * shares[0] / sum(shares)
                rounds = self._alternate(sides, tokens, stop)
                results += [
                    Measured(name, work, sides[name].facts, turns, self.waves)
                    for name, turns in rounds.items()
                ]
                sides = {name: sides[name] for name in rounds}
        self.sides += results
        return results

    def _started(self, stack: ExitStack, work: Work, specs: Sequence[Spec], until: float) -> dict[str, Side]:
        """The sides that build their models, all at the same time."""
        self.say(f"starting {'; '.join(spec.name for spec in specs)}")
        begun, sides = {}, {}
        for spec in specs:
            try:
                begun[spec.name] = stack.enter_context(Side(spec, work, self.place))
            except SideError as error:
                self.fail(spec.name, error)
        stack.callback(let_go, begun.values())  # all of them, before each is waited for
        for name, side in begun.items():
            try:
                side.built(until - time.monotonic())
                sides[name] = side
                self.say(f"{name} is there")
            except SideError as error:
                self.fail(name, error)
        return sides

    def _alternate(self, sides: dict[str, Side], tokens: int, stop: float) -> dict[str, list[Round]]:
        """The rounds of every side that got through all of them, as many as there is time for."""
        steps = dict.fromkeys(sides, FIRST_STEPS)
        broken: set[str] = set()

        def turn(name: str) -> Round | None:
            if name in broken:
                return None
            try:
                # Who is late by a lot hangs; who is late by a little has a slow disk.
                round_ = sides[name].run(tokens, steps[name], self.turn + max(PATIENCE, self.left))
            except SideError as error:
                broken.add(name)
                self.fail(name, error)
                return None
            steps[name] = max(1, min(MOST_STEPS, round(self.turn / round_.per_step)))
            return round_

        self.say(f"{tokens} tokens per step: {', '.join(sides)}")
        history: dict[str, list[Round]] = {name: [] for name in sides}
        turns: dict[str, Callable[[], Round | None]] = {name: partial(turn, name) for name in sides}
        for number, results in enumerate(in_turn(MOST_ROUNDS, turns), start=1):
            for name, round_ in results.items():
                if round_ is not None:
                    history[name].append(round_)
            took = sum(round_.seconds for round_ in results.values() if round_ is not None)
            if number >= FEWEST_ROUNDS and time.monotonic() + took > stop:
                break
        return {name: rounds for name, rounds in history.items() if name not in broken}


def let_go(sides: Iterable[Side]) -> None:
    for side in sides:
        side.leave()
