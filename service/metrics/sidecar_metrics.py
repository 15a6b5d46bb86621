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
    """What is told when Prometheus asks: what the pages said, and how many listen to events."""

    view: View
    subscribers: int


def _pages(scrape: Scrape) -> Values:
    found = Counter(rank.state for run in scrape.view.runs for rank in run.ranks)
    return {(state,): found[state] for state in get_args(State)}


OF_SIDECAR: tuple[Family[Scrape], ...] = (
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
        "Telemetry pages in the run directory, by what became of reading them.",
        ("state",),
        _pages,
    ),
    gauge(
        "tiering_sidecar_last_reading_timestamp_seconds",
        "Unix time at which the telemetry pages were last read.",
        lambda scrape: scrape.view.taken_at,
    ),
    counter(
        "tiering_sidecar_readings_total",
        "How often the telemetry pages were read; at most four times a second, however many ask.",
        lambda scrape: scrape.view.readings,
    ),
    gauge(
        "tiering_sidecar_subscribers",
        "How many listen to /v1/events.",
        lambda scrape: scrape.subscribers,
    ),
)
