"""A figure that a record declares is in answers, in metrics and in their documentation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import pytest

from service.metrics.from_figures import families_of
from service.metrics.rank_metrics import SNAPSHOT_METRICS
from service.responses.status import RankStatus
from tiering.telemetry import Figure, Label, Snapshot, figures

DOORS = Figure("Doors by how they stand.", "house_doors")


@dataclass(frozen=True)
class Room:
    name: Annotated[str, Label("room")]
    lamps: Annotated[int, Figure("Lamps.", "house_lamps")] = 0
    visits: Annotated[
        dict[str, dict[str, int]], Figure("Visits.", "house_visits_total", by=("day", "who"))
    ] = field(default_factory=dict)
    walls: Annotated[int, Figure("Walls; not a metric.")] = 4


def test_each_figure_is_a_metric_with_the_labels_of_where_it_is() -> None:
    @dataclass(frozen=True)
    class Street:
        rooms: Annotated[list[Room], Label("side", "left")]

    families = {family.name: family for family in families_of(Street)}
    assert {(family.name, family.kind, family.help, family.labels) for family in families.values()} == {
        ("house_lamps", "gauge", "Lamps.", ("side", "room")),
        ("house_visits_total", "counter", "Visits.", ("side", "room", "day", "who")),
    }
    street = Street([Room("hall", 2, {"monday": {"cat": 3}, "sunday": {}}), Room("bath", 1)])
    assert families["house_lamps"].read(street) == {("left", "hall"): 2, ("left", "bath"): 1}
    assert families["house_visits_total"].read(street) == {("left", "hall", "monday", "cat"): 3}


def test_fields_of_one_figure_are_one_metric() -> None:
    @dataclass(frozen=True)
    class Chalet:
        age: Annotated[float | None, Figure("Age in seconds.", "house_age_seconds")]
        opened: Annotated[int, DOORS, Label("state", "open")]
        closed: Annotated[int, DOORS, Label("state", "closed")]
        attic: Room | None = None

    age, doors, lamps, _ = families_of(Chalet)
    house = Chalet(None, 1, 2)
    assert (age.read(house), age.unit) == ({(): None}, "seconds")
    assert doors.read(house) == {("open",): 1, ("closed",): 2}
    assert lamps.read(house) == {}, "there is no attic"


def test_a_metric_has_one_text_and_one_set_of_labels() -> None:
    @dataclass(frozen=True)
    class House:
        rooms: list[Room]
        attic: Annotated[Room, Label("floor", "top")]

    with pytest.raises(AssertionError, match="house_lamps is declared in two ways"):
        families_of(House)


def test_every_figure_of_a_snapshot_is_in_the_status_with_its_text() -> None:
    properties = RankStatus.model_json_schema()["properties"]
    for name, figure in figures(Snapshot).items():
        assert name in ("stalls_by_phase", "curve") or properties[name]["description"] == figure.help
        assert not figure.metric or figure.help in {
            family.help for family in SNAPSHOT_METRICS if family.name == figure.metric
        }
    assert RankStatus(rank=1, state="torn", heartbeat_age=None, reason="").model_dump(
        include={"loss", "step", "tiers", "stalls"}
    ) == {"loss": None, "step": None, "tiers": [], "stalls": {}}
    diverged = RankStatus(rank=1, state="live", heartbeat_age=0.5, reason="", loss=float("-inf"))
    assert '"loss":"-Infinity"' in diverged.model_dump_json()
