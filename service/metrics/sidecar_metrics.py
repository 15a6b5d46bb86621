"""Metrics of the sidecar itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from platform import python_version
from typing import get_args

from service.metrics.families import Family, Values, counter, gauge
from service.run_end import How
from service.view import State, View
from tiering._version import __version__


@dataclass(frozen=True)
class Scrape:
    """The input of a scrape: the current View, the subscribers of /v1/events, and the runs that ended, by how."""

    view: View
    subscribers: int = 0
    ended: Mapping[How, int] = field(default_factory=dict)


def _status_files(scrape: Scrape) -> Values:
    counts = Counter(rank.state for run in scrape.view.runs for rank in run.ranks)
    return {(state,): counts[state] for state in get_args(State)}


SIDECAR_METRICS: tuple[Family[Scrape], ...] = (
    Family(
        "info",
        "tiering_build_info",
        "The version of the sidecar, and of the Python that runs it.",
        ("version", "python_version"),
        lambda _: {(__version__, python_version()): 1},
    ),
    Family(
        "gauge",
        "tiering_sidecar_pages",
        "Status files in the run directory, by state.",
        ("state",),
        _status_files,
    ),
    Family(
        "gauge",
        "tiering_node_up",
        "1 if the tierd of the node answers, 0 if it does not; only of tierd --of.",
        ("node",),
        lambda scrape: {(node.address,): float(not node.problem) for node in scrape.view.nodes or ()},
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
    Family(
        "counter",
        "tiering_runs_ended_total",
        "Number of runs that ended on this node since the sidecar started, by how.",
        ("how",),
        lambda scrape: {(how,): scrape.ended.get(how, 0) for how in get_args(How)},
    ),
    gauge(
        "tiering_sidecar_subscribers",
        "Number of clients connected to /v1/events.",
        lambda scrape: scrape.subscribers,
    ),
)
