"""The training curve: figures of the steps over the whole life of a run, in a bounded number of points."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from threading import Lock
from typing import Annotated, NamedTuple, Self

from tiering.telemetry.figure import Diverging, Figure, Integer
from tiering.telemetry.step_record import StepRecord

MOST_POINTS = 256

Values = list[Diverging | None]


@dataclass(frozen=True)
class TrainingCurve:
    """Lists of equal length, with one entry for each point; a point stands for ``stride`` steps in a row.

    The last point may have fewer. Means are those of the finite values: a point without one has NaN, and a point whose
    steps have no value has None.
    """

    stride: Annotated[Integer, Figure("Steps of a point; it doubles when there are too many points.")] = 1
    step: Annotated[list[Integer], Figure("Last step of each point, since the start.")] = field(
        default_factory=list
    )
    ended_at: Annotated[list[float], Figure("Unix time at which that step ended.")] = field(
        default_factory=list
    )
    seconds: Annotated[list[float], Figure("Mean duration of a step.")] = field(default_factory=list)
    tokens: Annotated[list[float], Figure("Mean tokens of the rank in a step.")] = field(default_factory=list)
    loss: Annotated[Values, Figure("Mean loss.")] = field(default_factory=list)
    highest_loss: Annotated[Values, Figure("Highest loss of a step.")] = field(default_factory=list)
    gradient_norm: Annotated[Values, Figure("Mean gradient norm.")] = field(default_factory=list)
    highest_gradient_norm: Annotated[Values, Figure("Highest gradient norm of a step.")] = field(
        default_factory=list
    )

    def __post_init__(self) -> None:
        # A damaged status file must not give a reader columns that do not belong together.
        if len({len(column) for name, column in vars(self).items() if name != "stride"}) > 1:
            raise ValueError("the lists of the training curve differ in length")


class _Values(NamedTuple):
    """Values of several steps: the sum of the finite ones, their number, the highest, and the number of others."""

    total: float = 0.0
    finite: int = 0
    highest: float = -math.inf
    diverged: int = 0

    @classmethod
    def of(cls, value: float | None) -> Self:
        if value is None:
            return cls()
        return cls(value, 1, value) if math.isfinite(value) else cls(diverged=1)

    def plus(self, other: _Values) -> _Values:
        return _Values(
            self.total + other.total,
            self.finite + other.finite,
            max(self.highest, other.highest),
            self.diverged + other.diverged,
        )

    @property
    def shown(self) -> tuple[float | None, float | None]:
        """The mean and the highest value."""
        if not self.finite:
            nothing = math.nan if self.diverged else None
            return nothing, nothing
        return _short(self.total / self.finite), _short(self.highest)


class _Point(NamedTuple):
    steps: int
    step: int
    ended_at: float
    seconds: float
    tokens: int
    loss: _Values
    gradient_norm: _Values

    def plus(self, later: _Point) -> _Point:
        return _Point(
            self.steps + later.steps,
            later.step,
            later.ended_at,
            self.seconds + later.seconds,
            self.tokens + later.tokens,
            self.loss.plus(later.loss),
            self.gradient_norm.plus(later.gradient_norm),
        )

    @property
    def row(self) -> tuple[object, ...]:
        """The entries of the point, in the order of the lists of TrainingCurve."""
        return (
            self.step,
            round(self.ended_at, 1),
            _short(self.seconds / self.steps),
            _short(self.tokens / self.steps),
            *self.loss.shown,
            *self.gradient_norm.shown,
        )


class CurveRecorder:
    """Adds steps to a training curve. When it has MOST_POINTS, two neighbours become one. Any thread may use it."""

    def __init__(self) -> None:
        # All points but the last one have as many steps as the first one.
        self._points: list[_Point] = []
        # The entries of each point: only those of the last one change with a step.
        self._rows: list[tuple[object, ...]] = []
        # Guards both lists: a step that ends changes them while the publisher reads them.
        self._lock = Lock()

    def add(self, step: StepRecord, loss: float | None, gradient_norm: float | None) -> None:
        """Add the step that has just ended."""
        point = _Point(
            1,
            step.step,
            step.ended_at,
            step.seconds,
            step.tokens,
            _Values.of(loss),
            _Values.of(gradient_norm),
        )
        with self._lock:
            points = self._points
            if points and points[-1].steps < points[0].steps:
                points[-1] = points[-1].plus(point)
                self._rows[-1] = points[-1].row
                return
            if len(points) == MOST_POINTS:
                pairs = zip(points[::2], points[1::2], strict=True)
                points[:] = [first.plus(second) for first, second in pairs]
                self._rows = [each.row for each in points]
            points.append(point)
            self._rows.append(point.row)

    @property
    def curve(self) -> TrainingCurve | None:
        """The points so far; None before the first step."""
        with self._lock:
            if not self._points:
                return None
            stride, rows = self._points[0].steps, list(self._rows)
        # The types of the columns are those of _Point.row.
        columns: list[list[object]] = [list(column) for column in zip(*rows, strict=True)]
        return TrainingCurve(stride, *columns)  # type: ignore[arg-type]


def _short(value: float) -> float:
    """``value`` with six digits: a status file has little room."""
    return float(f"{value:.6g}")
