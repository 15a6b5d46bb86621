"""``/v1/history``: bandwidth, stalls and occupancy of the last minutes, one entry per second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, Field

from service.history import INTERVAL, TIERS, Entry
from service.view import RunView, View


class RunHistory(BaseModel):
    """One run on this node: lists of one length, an entry for each moment in ``at``; null where nothing was known."""

    id: str = Field(description="the same on all ranks of one start, and of no other")
    name: str
    interval: float = Field(description="seconds between entries")
    at: list[float] = Field(description="Unix time of each entry, oldest first; ten minutes at most")
    step: list[int | None] = Field(description="optimizer steps finished by then")
    read: list[float | None] = Field(description="bytes per second from NVMe, all ranks here together")
    written: list[float | None] = Field(description="bytes per second to NVMe, all ranks here together")
    sent: list[float | None] = Field(
        description="bytes per second to other ranks, from all ranks here together"
    )
    h2d: list[float | None] = Field(
        description="bytes per second to the devices; null where the CPU is the device"
    )
    d2h: list[float | None] = Field(description="bytes per second from the devices; likewise")
    stall: list[float | None] = Field(
        description="share of the time in which compute waited, 0 to 1, mean over the ranks here"
    )
    used: dict[Literal["device", "host", "nvme"], list[int | None]] = Field(
        description="bytes held on each tier, all ranks here together"
    )


class Histories(BaseModel):
    """The last minutes of every run that has a page here, as far as the sidecar was there to see."""

    runs: list[RunHistory]


def history(view: View, run: str | None, entries: Callable[[str], list[Entry]]) -> Histories:
    """``entries`` gives those of a run by its id. Raises NotHereError for a run that is not."""
    return Histories(runs=[_run_history(one, entries(one.id)) for one in view.select(run)])


def _run_history(run: RunView, entries: list[Entry]) -> RunHistory:
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
