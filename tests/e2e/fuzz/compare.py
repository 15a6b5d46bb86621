"""What differs between two runs of a program, and how a failure is shrunk and told."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .actions import ACTIONS
from .placements import Placement
from .program import REFERENCE, Outcome, Program, execute
from .run import Number

SHRINKING_RUNS = 80
"""Most runs of a program that shrinking takes."""
FRAMES = 8
# Sums in another order, over some dozens of updates.
LOSS_ROUNDING, WEIGHT_ROUNDING = 1e-4, 1e-4


@dataclass
class Failure:
    """A program that computes something else at a placement (None: in the plain loop), or fails there."""

    program: Program
    placement: Placement | None
    what: str

    def __str__(self) -> str:
        drawn = Program.draw(self.program.seed).placements
        where = "the plain loop" if self.placement is None else f"placement {self.placement}"
        index = f" --placement {drawn.index(self.placement)}" if self.placement in drawn else ""
        command = f"python -m tests.e2e.fuzz --seed {self.program.seed}{index}"
        return f"{self.program}\n  at {where}\n  {self.what}\n  repeat: {command}"


@dataclass
class Tally:
    """How many programs were compared."""

    programs: int = 0
    compared: int = 0
    with_plain: int = 0
    ended: int = 0  # by an error that plain torch raises, at all placements alike
    retried: int = 0  # with the remedy of a refusal
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        return (
            f"{self.programs} programs, {self.compared} comparisons of placements and {self.with_plain} with a plain"
            f" loop, {self.retried} runs again as an error asked, {self.ended} ended by an error of torch's:"
            f" {len(self.failures)} failures"
        )


def check(program: Program, *, plainly: bool = True) -> Tally:
    """Run ``program`` everywhere and compare; failures are not shrunk yet."""
    tally = Tally(programs=1)
    try:
        reference = execute(program, REFERENCE)
    except Exception as error:
        tally.failures.append(Failure(program, REFERENCE, _told(error)))
        return tally
    tally.ended += bool(reference.ended)
    if plainly and program.has_plain_loop:
        tally.with_plain += 1
        if message := _fails(lambda: rounding(reference, execute(program, None))):
            tally.failures.append(Failure(program, None, message))
    for placement in program.placements:
        tally.compared += 1

        def compare(placement: Placement = placement) -> str:
            outcome = execute(program, placement)
            tally.retried += outcome.retried
            return difference(reference, outcome)

        if message := _fails(compare):
            tally.failures.append(Failure(program, placement, message))
    return tally


def _fails(compare: Callable[[], str]) -> str:
    """What differs, or the error; "" if nothing does."""
    try:
        return compare()
    except Exception as error:
        return _told(error)


def _told(error: Exception) -> str:
    """``error`` and where it came from, the innermost calls alone."""
    return f"raises {''.join(traceback.format_exception(error, limit=-FRAMES))}"


def difference(reference: Outcome, outcome: Outcome) -> str:
    """The first bit in which the two differ, in words; "" if there is none."""
    for ours, theirs in zip(outcome.numbers, reference.numbers, strict=False):
        same = ours.value == theirs.value or (math.isnan(ours.value) and math.isnan(theirs.value))
        if (ours.action, ours.label) != (theirs.action, theirs.label) or not same:
            return f"first difference: {ours}, reference {theirs}"
    if outcome.ended != reference.ended:
        return f"ended by {outcome.ended!r}, reference by {reference.ended!r}"
    if len(outcome.numbers) != len(reference.numbers):
        return f"{len(outcome.numbers)} numbers, reference {len(reference.numbers)}"
    names = sorted(
        name
        for name in outcome.tensors.keys() | reference.tensors.keys()
        if not same_bits(outcome.tensors.get(name), reference.tensors.get(name))
    )
    return f"{len(names)} tensors differ at the end: {', '.join(names[:5])}" if names else ""


def same_bits(first: Tensor | None, other: Tensor | None) -> bool:
    if first is None or other is None or first.dtype != other.dtype or first.shape != other.shape:
        return False
    return first.numel() == 0 or _bytes(first).equal(_bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def rounding(outcome: Outcome, plain: Outcome) -> str:
    """Where the engine is further from the plain loop than rounding; "" if nowhere."""
    if outcome.ended != plain.ended:
        return f"ended by {outcome.ended!r}, the plain loop by {plain.ended!r}"
    pairs = zip(_losses(outcome), _losses(plain), strict=True)
    for ours, theirs in pairs:
        if not _near(ours.value, theirs.value):
            return f"first difference: {ours}, the plain loop {theirs}"
    for name, value in plain.tensors.items():
        tensor = outcome.tensors.get(name)
        if tensor is None:
            return f"{name} is there in the plain loop alone"
        away = float((tensor.double() - value.double()).abs().max())
        if name != "random state" and away > WEIGHT_ROUNDING * max(1.0, float(value.double().abs().max())):
            return f"{name} is {away} away from the plain loop's"
    return ""


def _losses(outcome: Outcome) -> list[Number]:
    return [number for number in outcome.numbers if number.label == "loss"]


def _near(first: float, other: float) -> bool:
    if not math.isfinite(first) or not math.isfinite(other):
        return math.isfinite(first) == math.isfinite(other)
    return math.isclose(first, other, rel_tol=LOSS_ROUNDING, abs_tol=LOSS_ROUNDING)


def shrunk(failure: Failure, runs: int = SHRINKING_RUNS) -> Failure:
    """The same failure with fewer actions and, where it still fails, a smaller model."""
    runs_left = [runs]

    def fails(program: Program) -> str:
        runs_left[0] -= 1
        return _fails(lambda: _compared(program, failure.placement))

    program, failure_text = failure.program, failure.what
    progress = True
    while progress and runs_left[0] > 0:
        progress = False
        for smaller in _smaller(program):
            if runs_left[0] <= 0:
                break
            if smaller_failure := fails(smaller):
                program, failure_text, progress = smaller, smaller_failure, True
                break
    return Failure(program, failure.placement, failure_text)


def _compared(program: Program, placement: Placement | None) -> str:
    try:
        reference = execute(program, REFERENCE)
    except Exception:
        if placement == REFERENCE:
            raise
        return ""  # another failure
    if placement == REFERENCE:
        return ""  # it was an error there, and now is none
    outcome = execute(program, placement)
    return rounding(reference, outcome) if placement is None else difference(reference, outcome)


def _smaller(program: Program) -> Iterator[Program]:
    """Without half of the actions, without one of them, with less of a model."""
    entries = program.actions
    half = len(entries) // 2
    if half > 1:
        yield replace(program, actions=entries[half:])
        yield replace(program, actions=entries[:half])
    for index in reversed(range(len(entries))):
        if len(entries) > 1:
            yield replace(program, actions=entries[:index] + entries[index + 1 :])
    if program.training.tile:
        yield replace(program, training=replace(program.training, tile=0))
    for plan in program.plan.smaller():
        if all(ACTIONS[name].needs.met_by(plan, program.training) for _, name, _ in entries):
            yield replace(program, plan=plan)
