"""``/metrics``: a View as Prometheus and OpenMetrics text.

A rank whose process is gone has only ``tiering_rank_up``, with the value 0. Its other counters would not change any
more and would lower every average over the ranks.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

from prometheus_client import ProcessCollector, exposition
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from service.http.compression import quality
from service.metrics.families import Family, Histogram, Values
from service.metrics.rank_metrics import PLAN_METRICS, RANK_METRICS, RANK_UP, SNAPSHOT_METRICS
from service.metrics.run_metrics import RUN_ENDED, RUN_METRICS
from service.metrics.sidecar_metrics import SIDECAR_METRICS, Scrape
from service.run_end import ended
from service.view import RankView, RunView, State, View
from tiering.telemetry import LABEL_NAME

Subject = TypeVar("Subject")
Labels = tuple[str, ...]

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_UNPRINTABLE = re.compile("[\0\ud800-\udfff]")  # not allowed in UTF-8, or rejected by parsers


def render(scrape: Scrape, accept: str | None = None) -> tuple[bytes, str]:
    """The metrics of ``scrape`` in the form that the header ``accept`` prefers, and its content type."""
    collected = _OfSidecarAndRuns(scrape)
    if prefers_openmetrics(accept or ""):
        # prometheus_client declares no types for this function.
        return openmetrics.generate_latest(collected), OPENMETRICS  # type: ignore[no-untyped-call]
    return exposition.generate_latest(collected), TEXT


def render_runs(view: View) -> bytes:
    """The metrics of the runs in ``view`` as text, without those of the sidecar."""
    return exposition.generate_latest(RunMetrics(view))


def prefers_openmetrics(accept: str) -> bool:
    """Whether OpenMetrics is accepted and the text format is not preferred."""
    qualities = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for media_range in accept.split(","):
        name, *parameters = (part.strip().lower() for part in media_range.split(";"))
        if name in qualities:
            qualities[name] = max(qualities[name], quality(parameters))
    return 0 < qualities["application/openmetrics-text"] >= qualities["text/plain"]


class _OfSidecarAndRuns(Collector):
    """A registry with all metrics of one View. prometheus_client's default registry describes only this process."""

    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape

    def collect(self) -> Iterator[Metric]:
        yield from _metrics(SIDECAR_METRICS, (), {(): self._scrape})
        yield from _PROCESS.collect()
        yield from RunMetrics(self._scrape.view).collect()


class RunMetrics(Collector):
    """A registry with the metrics of the runs in a View."""

    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        up: dict[Labels, RankView] = {}
        runs: dict[Labels, RunView] = {}
        for run in self._view.runs:
            # The tierd of each node has the metrics of its ranks. Twice in one Prometheus, every sum would be wrong.
            for rank in () if run.on_all_nodes else run.ranks:
                labels = run.id, str(rank.rank)
                # A restarted rank may have an older status file too: the live one counts.
                if labels not in up or _precedence(rank) >= _precedence(up[labels]):
                    up[labels] = rank
            if not run.over:
                runs[run.id,] = run
        live = {labels: rank for labels, rank in up.items() if rank.state in ("live", "silent")}
        snapshots = {labels: rank.snapshot for labels, rank in live.items() if rank.snapshot is not None}
        plans = {
            labels: rank.description.plan
            for labels, rank in live.items()
            if rank.description is not None and rank.description.plan is not None
        }
        yield from _metrics(RUN_METRICS, ("run",), runs)
        yield from _metrics([RUN_ENDED], ("run",), {(run.id,): run for run in ended(self._view)})
        of_rank = "run", "rank"
        yield from _metrics([RANK_UP], of_rank, up)
        yield from _metrics(RANK_METRICS, of_rank, live)
        yield from _metrics(SNAPSHOT_METRICS, of_rank, snapshots)
        yield from _metrics(PLAN_METRICS, of_rank, plans)


_PROCESS = ProcessCollector(registry=None)  # CPU time, memory and file descriptors of the sidecar


_STATE_ORDER: tuple[State, ...] = (
    "stale",
    "unreadable",
    "newer-version",
    "torn",
    "unreachable",
    "silent",
    "live",
)


def _precedence(rank: RankView) -> tuple[int, float]:
    snapshot = rank.snapshot
    return _STATE_ORDER.index(rank.state), snapshot.started_at if snapshot is not None else 0.0


def _metrics(
    families: Iterable[Family[Subject]], names: Labels, subjects: Mapping[Labels, Subject]
) -> Iterator[Metric]:
    labelled = [(tuple(map(_printable, labels)), subject) for labels, subject in subjects.items()]
    for family in families:
        series = {
            (*labels, *map(_printable, record_labels)) if record_labels else labels: value
            for labels, subject in labelled
            for record_labels, value in family.read(subject).items()
        }
        yield _metric(family, (*names, *family.labels), series)


def _label_values(further: Mapping[str, str], names: Labels) -> dict[str, str]:
    """The labels of ``further`` with a valid name that is not in ``names``: a status file may be damaged."""
    return {
        name: _printable(value)
        for name, value in further.items()
        if LABEL_NAME.fullmatch(name) and name not in names
    }


@lru_cache(maxsize=4096)  # all series share a few label values
def _printable(label: str) -> str:
    return _UNPRINTABLE.sub("\ufffd", label)


def _metric(family: Family[Subject], labels: Labels, series: Values) -> Metric:
    name, unit = family.name, family.unit
    if family.kind == "info":
        info = InfoMetricFamily(name.removesuffix("_info"), family.help, labels=labels)
        for values, further in series.items():
            info.add_metric(values, _label_values(further, labels) if isinstance(further, Mapping) else {})
        return info
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.help, labels=labels, unit=unit)
        for values, value in series.items():
            if isinstance(value, Histogram) and _is_counter_value(value.sum) and _is_valid(value):
                histogram.add_metric(values, _buckets(value), value.sum)
        return histogram
    if family.kind == "counter":
        counter = CounterMetricFamily(name, family.help, labels=labels, unit=unit)
        for values, value in series.items():
            if isinstance(value, int | float) and _is_counter_value(value):
                counter.add_metric(values, value)
        return counter
    gauge = GaugeMetricFamily(name, family.help, labels=labels, unit=unit)
    for values, value in series.items():
        if isinstance(value, int | float) and not _LARGEST < abs(value) < math.inf:
            gauge.add_metric(values, value)
    return gauge


_LARGEST = sys.float_info.max  # an integer in a damaged status file may be larger than any float


def _is_counter_value(value: float) -> bool:
    """Whether a counter can have the value. An invalid series is left out: it would fail the whole scrape."""
    return 0 <= value <= _LARGEST


def _is_valid(histogram: Histogram) -> bool:
    """Whether the cumulative counts of the buckets are not negative and do not decrease."""
    counts = (0, *histogram.below, histogram.count, _LARGEST)
    return all(lower <= higher for lower, higher in pairwise(counts))


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    return [*zip(histogram.bounds, histogram.below, strict=True), ("+Inf", histogram.count)]
