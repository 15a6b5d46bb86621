"""``/v1/history``: bandwidth, stalls and used bytes of the last ten minutes, one entry per second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, Field

from service.history import INTERVAL, TIERS, HistoryEntry
from service.view import RunView, View


class RunHistory(BaseModel):
    """One run on this node: lists of equal length, with one entry for each time in ``at``; null means unknown."""

    id: str = Field(description="the same on all ranks of one start, unique among starts")
    name: str
    interval: float = Field(description="seconds between entries")
    at: list[float] = Field(description="Unix time of each entry, oldest first; ten minutes at most")
    step: list[int | None] = Field(description="optimizer steps finished by then")
    read: list[float | None] = Field(
        description="bytes per second from NVMe, sum over the ranks on this node"
    )
    written: list[float | None] = Field(
        description="bytes per second to NVMe, sum over the ranks on this node"
    )
    sent: list[float | None] = Field(
        description="bytes per second to other ranks, sum over the ranks on this node"
    )
    h2d: list[float | None] = Field(
        description="bytes per second to the devices; null if the CPU is the device"
    )
    d2h: list[float | None] = Field(
        description="bytes per second from the devices; null if the CPU is the device"
    )
    stall: list[float | None] = Field(
        description="share of the time in which compute waited, 0 to 1, mean over the ranks on this node"
    )
    used: dict[Literal["device", "host", "nvme"], list[int | None]] = Field(
        description="used bytes of each tier, sum over the ranks on this node"
    )


class Histories(BaseModel):
    """The last ten minutes of every run that has a status file on this node, as far as the sidecar was running."""

    runs: list[RunHistory]


def history(view: View, run: str | None, entries: Callable[[str], list[HistoryEntry]]) -> Histories:
    """``entries`` returns the entries of a run id. Raises NotHereError if ``run`` is not on this node."""
    return Histories(runs=[_run_history(selected, entries(selected.id)) for selected in view.select(run)])


def _run_history(run: RunView, entries: list[HistoryEntry]) -> RunHistory:
    return RunHistory(
        id=run.id,
        name=run.name,
        interval=INTERVAL,
        at=[entry.at for entry in entries],
        step=[entry.step for entry in entries],
        read=[entry.read for entry in entries],
        written=[entry.written for entry in entries],
        sent=[entry.sent for entry in entries],
        h2d=[entry.h2d for entry in entries],
        d2h=[entry.d2h for entry in entries],
        stall=[entry.stall for entry in entries],
        used={tier: [entry.used[tier] for entry in entries] for tier in TIERS},
    )
