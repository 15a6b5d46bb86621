"""What a save costs training: steps during one in the background, behind one in the foreground, and without."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from frame.report import Table, Verdict, middle

from . import sides, tables
from .side import CheckpointRun, Reading, SavingSpec

WITHOUT, BEHIND, DURING = "", "foreground", "background"
MOST_OF_FOREGROUND = 1.0


@dataclass(slots=True)
class Trained:
    """A side after its rounds of ``steps`` steps each, by where they saved."""

    name: str
    facts: dict[str, Any]
    steps: int
    rounds: dict[str, list[Reading]]

    def added(self, save: str) -> list[float]:
        """Seconds that a save added, round by round."""
        pairs = zip(self.rounds[save], self.rounds[WITHOUT], strict=True)
        return [round_.seconds - other.seconds for round_, other in pairs]

    def figures(self, name: str) -> list[float]:
        """By saves in the background."""
        return [round_.figures[name] for round_ in self.rounds[DURING]]

    @property
    def share(self) -> float:
        """Of what a save in the foreground adds, by medians."""
        return statistics.median(self.added(DURING)) / statistics.median(self.added(BEHIND))

    @property
    def spare(self) -> int:
        """Below the ceiling, at the least, in training with and without a save."""
        return min(round_.spare or 0 for rounds in self.rounds.values() for round_ in rounds)


def trained(run: CheckpointRun, spec: SavingSpec, steps: int) -> Trained | None:
    """None if it fails."""
    with run.started([spec]) as started:
        if not started:
            return None
        side = started[spec.name]
        ways = {f"{spec.name}, {way or 'no save'}": way for way in (WITHOUT, BEHIND, DURING)}
        rounds = run.alternate(
            run.scale.rounds, {name: partial(side.train, steps, way) for name, way in ways.items()}
        )
        if len(rounds) < len(ways):
            return None
        result = Trained(spec.name, side.facts, steps, {way: rounds[name] for name, way in ways.items()})
    run.sides.append(result)
    return result


def case(run: CheckpointRun) -> None:
    scale, report = run.scale, run.report
    specs = [(sides.on_nvme(scale), scale.steps_on_nvme), (sides.in_memory(scale), scale.steps_in_ram)]
    results = [result for spec, steps in specs if (result := trained(run, spec, steps)) is not None]
    if not results:
        run.without("saves in the background", *(spec.name for spec, _ in specs))
        return
    report.tables.append(table(results))
    for side in results:
        ceiling = tables.within("training and saving", side.name, side.spare)
        report.verdicts.append(ceiling)
        if side.name == sides.RAM:
            report.verdicts.append(cheaper(side))


def table(results: Sequence[Trained]) -> Table:
    """Seconds that training lost, and where."""
    columns = (
        "side",
        "steps",
        "s per step",
        "added by a save, s: in the foreground",
        "in the background",
        "share",
    )
    meanwhile = ("stood still, s", "the call, s", "over after, s", "steps meanwhile", "s each")
    table = Table("saves in the background", (*columns, *meanwhile))
    for side in results:
        each = [
            took / max(steps, 1)
            for took, steps in zip(side.figures("meanwhile"), side.figures("steps"), strict=True)
        ]
        table.rows.append(
            (
                side.name,
                str(side.steps),
                middle([round_.seconds / side.steps for round_ in side.rounds[WITHOUT]]),
                middle(side.added(BEHIND), ".2f"),
                middle(side.added(DURING), ".2f"),
                f"{side.share:.2f}",
                middle(side.figures("stalled"), ".2f"),
                middle(side.figures("called"), ".3f"),
                middle(side.figures("saved"), ".2f"),
                middle(side.figures("steps"), ".0f"),
                middle(each),
            )
        )
    table.notes.append(
        "Added: seconds of a round of so many steps with one save, until all is written and nothing is in flight, less"
        " those of a round without. Stood still: what the engine counts, the call among it. Medians with the range of"
        f" {len(results[0].rounds[WITHOUT])} rounds."
    )
    table.notes.append(
        "A step from NVMe keeps the disk busy, so a save beside it takes from it what it would have taken by itself."
    )
    return table


def cheaper(side: Trained) -> Verdict:
    """Where the disk has nothing else to do."""
    subject = f"seconds added by a save, {side.name}: in the background / in the foreground"
    return Verdict(
        subject, f"{side.share:.2f}", f"less than {MOST_OF_FOREGROUND:g}", side.share < MOST_OF_FOREGROUND
    )
