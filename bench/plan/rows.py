"""One row: a side that trains, rates before and after each of its rounds, and what is concluded from both."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from frame.report import Report, Table, Verdict, middle
from frame.side import Place, Side, Spec
from frame.training import Round

from tiering.placement.plan import Plan
from tiering.planning.forecast import Forecast
from tiering.planning.rates import Rates
from tiering.tierbench.ratios import compare

from .predictions import Machine, plan_of

WITHIN = 0.2
GB = 1e9


@dataclass(slots=True)
class Row:
    """``rates`` and ``forecasts`` are one more than ``rounds``: each round has one before and one behind it."""

    name: str
    plan: Plan
    facts: dict[str, object]
    rounds: list[Round] = field(default_factory=list)
    rates: list[Rates] = field(default_factory=list)
    forecasts: list[Forecast] = field(default_factory=list)

    @property
    def predicted(self) -> list[float]:
        """Predicted seconds per step of each round: the mean of what the rates before and after it come to."""
        seconds = [forecast.seconds for forecast in self.forecasts]
        return [(before + after) / 2 for before, after in itertools.pairwise(seconds)]

    @property
    def real(self) -> list[float]:
        return [round_.per_step for round_ in self.rounds]

    @property
    def ratios(self) -> list[float]:
        return [predicted / real for predicted, real in zip(self.predicted, self.real, strict=True)]


def measure(
    spec: Spec,
    place: Place,
    *,
    rounds: int,
    steps: int,
    seconds: float,
    file_bytes: int,
    say: Callable[[str], None],
) -> Row:
    """Train ``rounds`` rounds of ``steps``, rates before and after each; a first round is dropped. Raises SideError."""
    plan = plan_of(spec, place.directory)
    machine = Machine(plan, (place.directory,) if spec.on_disk else (), spec.model, seconds, file_bytes)
    say(f"starting {spec.name}")
    with Side(spec, place) as side:
        row = Row(spec.name, plan, dict(side.facts))
        side.train(steps)

        def rate() -> None:
            row.rates.append(machine.measure())
            row.forecasts.append(machine.forecast(row.rates[-1]))

        rate()
        for _ in range(rounds):
            row.rounds.append(side.train(steps))
            rate()
            say(f"{spec.name}: predicted {row.predicted[-1]:.3f} s, took {row.real[-1]:.3f} s")
    return row


def conclude(report: Report, rows: list[Row]) -> None:
    """The tables and the verdicts."""
    report.tables += [_times(rows), _phases(rows), _rates(rows)]
    for row in rows:
        ratio = compare(row.predicted, row.real).median
        subject = f"predicted / real seconds per step: {row.name}"
        near = abs(ratio.point - 1) <= WITHIN
        report.verdicts.append(Verdict(subject, str(ratio), f"1 within {WITHIN:.0%}", near))
        read, written = row.plan.nvme_traffic()
        exact = all(
            (round_.counted["read"], round_.counted["written"])
            == (round_.steps * read, round_.steps * written)
            for round_ in row.rounds
        )
        goal = "what the planner said of a model that is not here"
        nbytes = f"read {read:,}, written {written:,}"
        report.verdicts.append(Verdict(f"bytes per step: {row.name}", nbytes, goal, exact))


def _times(rows: list[Row]) -> Table:
    table = Table(
        "predicted and real",
        (
            "side",
            "NVMe per step, GB",
            "predicted s per step",
            "real",
            "predicted / real, by round",
            "bound by",
        ),
    )
    for row in rows:
        bounds = sorted({forecast.bound.value for forecast in row.forecasts})
        table.rows.append(
            (
                row.name,
                f"{sum(row.plan.nvme_traffic()) / GB:.3f}",
                middle(row.predicted),
                middle(row.real),
                middle(row.ratios, ".2f"),
                ", ".join(bounds),
            )
        )
    table.notes.append("Medians with the range of all rounds.")
    return table


def _phases(rows: list[Row]) -> Table:
    table = Table(
        "phases, predicted and real, in seconds per step",
        ("side", "forward", "real", "backward", "real", "step", "real", "idle again"),
    )
    for row in rows:
        predicted = [
            statistics.median(getattr(forecast, phase).seconds for forecast in row.forecasts)
            for phase in ("forward", "backward", "step")
        ]
        real = [
            statistics.median(getattr(round_, part) / round_.steps for round_ in row.rounds)
            for part in ("forward", "backward", "update", "settled")
        ]
        cells = [predicted[0], real[0], predicted[1], real[1], predicted[2], real[2], real[3]]
        table.rows.append((row.name, *(f"{cell:.3f}" for cell in cells)))
    return table


def _rates(rows: list[Row]) -> Table:
    names = list(dict.fromkeys(name for row in rows for rates in row.rates for name in rates.as_dict()))
    table = Table("rates, in 10^9 per second", ("side", *(name.replace("_", " ") for name in names)))
    for row in rows:
        measured = [rates.as_dict() for rates in row.rates]
        cells = [
            middle([figures[name] / GB for figures in measured], ".2f") if name in measured[0] else "-"
            for name in names
        ]
        table.rows.append((row.name, *cells))
    table.notes.append(
        "Medians with the range of all measurements, between the rounds. NVMe, copies: bytes; optimizer, gradients:"
        " elements; flops: operations of transformer blocks of the model's width on its number of tokens."
    )
    return table
