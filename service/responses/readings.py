"""``/v1/readings``: the status of each rank as it was read. The tierd of several nodes makes its View from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler

from service.responses.status import SCHEMA_VERSION
from service.view import RunView, State, View
from tiering.telemetry import Description, Snapshot


class _InfinitiesAsStrings:
    """Of a record, in place of its own setting: the JSON of HTTP responses has no constants."""

    @staticmethod
    def __get_pydantic_core_schema__(source: type, schema_of: GetCoreSchemaHandler) -> Any:
        schema: dict[str, Any] = {**schema_of.resolve_ref_schema(schema_of(source))}
        # The reference names the schema with the record's own setting.
        schema.pop("ref", None)
        return {**schema, "config": {**schema.get("config", {}), "ser_json_inf_nan": "strings"}}


class RankReading(BaseModel):
    """One status file: its run, rank and user, and its content."""

    run: str = Field(
        description="id of the run; without a readable status file, the run in the name of the file"
    )
    rank: int = Field(ge=0, lt=1 << 31)
    user: str = Field(description="name of the user whose run it is")
    state: State
    reason: str = Field(description="why the state is not live; empty if it is")
    heartbeat_age: float | None = Field(description="seconds since the rank last published")
    published_at: float | None = Field(description="Unix time at which the rank last published")
    snapshot: Annotated[Snapshot, _InfinitiesAsStrings] | None = Field(
        description="the figures that the rank publishes; null if unreadable"
    )
    description: Description | None = Field(
        description="device, versions, labels, configuration and plan, which do not change; null if unknown, and if not"
        " requested"
    )


class Readings(BaseModel):
    """All status files, including those of ranks that have just ended."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    schema_version: int = Field(default=SCHEMA_VERSION, description="of all JSON of tierd")
    readings: list[RankReading]


# Fields of a RankView under the same names.
_OF_RANK = RankReading.model_fields.keys() - {"run", "user", "description"}


def readings(view: View, descriptions: bool = True) -> Readings:
    """The ranks of ``view``, in the order of its runs."""
    runs = (*view.runs, *view.closed)
    return Readings(readings=[reading for run in runs for reading in _of_run(run, descriptions)])


def _of_run(run: RunView, descriptions: bool) -> Iterator[RankReading]:
    # The View adds the user to an id that runs of several users have.
    run_id = run.id.removesuffix(f"@{run.user}")
    for rank in run.ranks:
        yield RankReading(
            run=run_id,
            user=run.user,
            description=rank.description if descriptions else None,
            **{name: getattr(rank, name) for name in _OF_RANK},
        )
