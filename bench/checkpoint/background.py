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
        return [one.seconds - other.seconds for one, other in pairs]

    def told(self, name: str) -> list[float]:
        """By saves in the background."""
        return [one.told[name] for one in self.rounds[DURING]]

    @property
    def share(self) -> float:
        """Of what a save in the foreground adds, by medians."""
        return statistics.median(self.added(DURING)) / statistics.median(self.added(BEHIND))

    @property
    def spare(self) -> int:
        """Below the ceiling, at the least, in training with and without a save."""
        return min(one.spare or 0 for rounds in self.rounds.values() for one in rounds)


def trained(run: CheckpointRun, spec: SavingSpec, steps: int) -> Trained | None:
    """None if it fails."""
    with run.started([spec]) as started:
        if not started:
            return None
        side = started[spec.name]
        ways = {f"{spec.name}, {way or 'no save'}": way for way in (WITHOUT, BEHIND, DURING)}
        found = run.alternate(
            run.scale.rounds, {name: partial(side.train, steps, way) for name, way in ways.items()}
        )
        if len(found) < len(ways):
            return None
        made = Trained(spec.name, side.facts, steps, {way: found[name] for name, way in ways.items()})
    run.sides.append(made)
    return made


def case(run: CheckpointRun) -> None:
    scale, report = run.scale, run.report
    specs = [(sides.on_nvme(scale), scale.steps_on_nvme), (sides.in_memory(scale), scale.steps_in_ram)]
    found = [made for spec, steps in specs if (made := trained(run, spec, steps)) is not None]
    if not found:
        run.without("saves in the background", *(spec.name for spec, _ in specs))
        return
    report.tables.append(table(found))
    for side in found:
        ceiling = tables.within("training and saving", side.name, side.spare)
        report.verdicts.append(ceiling)
        if side.name == sides.RAM:
            report.verdicts.append(cheaper(side))


def table(found: Sequence[Trained]) -> Table:
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
    for side in found:
        each = [
            took / max(steps, 1)
            for took, steps in zip(side.told("meanwhile"), side.told("steps"), strict=True)
        ]
        table.rows.append(
            (
                side.name,
                str(side.steps),
                middle([one.seconds / side.steps for one in side.rounds[WITHOUT]]),
                middle(side.added(BEHIND), ".2f"),
                middle(side.added(DURING), ".2f"),
                f"{side.share:.2f}",
                middle(side.told("stalled"), ".2f"),
                middle(side.told("called"), ".3f"),
                middle(side.told("saved"), ".2f"),
                middle(side.told("steps"), ".0f"),
                middle(each),
            )
        )
    table.notes.append(
        "Added: seconds of a round of so many steps with one save, until all is written and nothing is in flight, less"
        " those of a round without. Stood still: what the engine counts, the call among it. Medians with the range of"
        f" {len(found[0].rounds[WITHOUT])} rounds."
    )
    table.notes.append(
        "A step from NVMe keeps the disk busy, so a save beside it takes from it what it would have taken by itself."
    )
    return table


def cheaper(side: Trained) -> Verdict:
    """Where the disk has nothing else to do."""
    what = f"seconds added by a save, {side.name}: in the background / in the foreground"
    return Verdict(
        what, f"{side.share:.2f}", f"less than {MOST_OF_FOREGROUND:g}", side.share < MOST_OF_FOREGROUND
    )
