"""Metrics of the sidecar itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from platform import python_version
from typing import get_args

from service.metrics.families import Family, Values, counter, gauge
from service.version import own_version
from service.view import State, View


@dataclass(frozen=True)
class Scrape:
    """The input of a scrape: the current View, and the number of subscribers of /v1/events."""

    view: View
    subscribers: int


def _status_files(scrape: Scrape) -> Values:
    counts = Counter(rank.state for run in scrape.view.runs for rank in run.ranks)
    return {(state,): counts[state] for state in get_args(State)}


SIDECAR_METRICS: tuple[Family[Scrape], ...] = (
    Family(
        "info",
        "tiering_build_info",
        "The version of the sidecar, and of the Python that runs it.",
        ("version", "python_version"),
        lambda _: {(own_version(), python_version()): 1},
    ),
    Family(
        "gauge",
        "tiering_sidecar_pages",
        "Status files in the run directory, by state.",
        ("state",),
        _status_files,
    ),
    gauge(
        "tiering_sidecar_last_reading_timestamp_seconds",
        "Unix time at which the status files were last read.",
        lambda scrape: scrape.view.taken_at,
    ),
    counter(
        "tiering_sidecar_readings_total",
        "Number of readings of the status files; at most four per second, for any number of clients.",
        lambda scrape: scrape.view.readings,
    ),
    gauge(
        "tiering_sidecar_subscribers",
        "Number of clients connected to /v1/events.",
        lambda scrape: scrape.subscribers,
    ),
)
