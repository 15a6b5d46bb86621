"""``/metrics``: a View as Prometheus and OpenMetrics text.

Of a rank whose process is gone only ``tiering_rank_up`` is told, which is then 0. Its last counters would stand still
beside those of ranks that train, and pull every average over them down.
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

from service.metrics.families import Family, Histogram, Values
from service.metrics.rank_metrics import OF_PLAN, OF_RANK, OF_SNAPSHOT, RANK_UP
from service.metrics.run_metrics import OF_RUN
from service.metrics.sidecar_metrics import OF_SIDECAR, Scrape
from service.view import RankView, RunView, State, View

Subject = TypeVar("Subject")
Labels = tuple[str, ...]

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_UNSPEAKABLE = re.compile("[\0\ud800-\udfff]")  # what no text in UTF-8 holds, or no parser reads


def render(view: View, accept: str | None, subscribers: int = 0) -> tuple[bytes, str]:
    """The metrics of ``view`` in the form that the header ``accept`` prefers, and its content type."""
    collected = _Collected(Scrape(view, subscribers))
    if prefers_openmetrics(accept or ""):
        return openmetrics.generate_latest(collected), OPENMETRICS  # type: ignore[no-untyped-call]  # it has no types
    return exposition.generate_latest(collected), TEXT


def prefers_openmetrics(accept: str) -> bool:
    """Whether OpenMetrics is accepted, and text is not preferred to it."""
    wanted = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for one in accept.split(","):
        name, *parameters = (part.strip().lower() for part in one.split(";"))
        if name in wanted:
            wanted[name] = max(wanted[name], _quality(parameters))
    return 0 < wanted["application/openmetrics-text"] >= wanted["text/plain"]


def _quality(parameters: Iterable[str]) -> float:
    given = next((value[2:] for value in parameters if value.startswith("q=")), "1")
    return float(given) if re.fullmatch(r"[01](\.\d{0,3})?", given) else 0.0


class _Collected(Collector):
    """A registry of its own: what prometheus_client's default one tells of this process is not about training."""

    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape

    def collect(self) -> Iterator[Metric]:
        up: dict[Labels, RankView] = {}
        runs: dict[Labels, RunView] = {}
        for run in self._scrape.view.runs:
            for rank in run.ranks:
                labels = run.id, str(rank.rank)
                # Of a rank that was started again under the name of an older page, the one that lives counts.
                if labels not in up or _weight(rank) >= _weight(up[labels]):
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
        yield from _metrics(OF_SIDECAR, (), {(): self._scrape})
        yield from _PROCESS.collect()
        yield from _metrics(OF_RUN, ("run",), runs)
        of_rank = "run", "rank"
        yield from _metrics([RANK_UP], of_rank, up)
        yield from _metrics(OF_RANK, of_rank, live)
        yield from _metrics(OF_SNAPSHOT, of_rank, snapshots)
        yield from _metrics(OF_PLAN, of_rank, plans)


_PROCESS = ProcessCollector(registry=None)  # CPU time, memory and descriptors of the sidecar itself


_MOST_TELLING_LAST: tuple[State, ...] = ("stale", "unreadable", "newer-version", "torn", "silent", "live")


def _weight(rank: RankView) -> tuple[int, float]:
    said = rank.snapshot
    return _MOST_TELLING_LAST.index(rank.state), said.started_at if said is not None else 0.0


def _metrics(
    families: Iterable[Family[Subject]], names: Labels, subjects: Mapping[Labels, Subject]
) -> Iterator[Metric]:
    labelled = [(tuple(map(_spoken, labels)), subject) for labels, subject in subjects.items()]
    for family in families:
        series = {
            (*labels, *map(_spoken, more)) if more else labels: value
            for labels, subject in labelled
            for more, value in family.read(subject).items()
        }
        yield _metric(family, (*names, *family.labels), series)


@lru_cache(maxsize=4096)  # the same few words in every series
def _spoken(word: str) -> str:
    return _UNSPEAKABLE.sub("\ufffd", word)


def _metric(family: Family[Subject], labels: Labels, series: Values) -> Metric:
    name, unit = family.name, family.unit
    if family.kind == "info":
        info = InfoMetricFamily(name.removesuffix("_info"), family.help, labels=labels)
        for values in series:
            info.add_metric(values, {})
        return info
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.help, labels=labels, unit=unit)
        for values, value in series.items():
            if isinstance(value, Histogram) and _counts(value.sum) and _rises(value):
                histogram.add_metric(values, _buckets(value), value.sum)
        return histogram
    if family.kind == "counter":
        counter = CounterMetricFamily(name, family.help, labels=labels, unit=unit)
        for values, value in series.items():
            if isinstance(value, int | float) and _counts(value):
                counter.add_metric(values, value)
        return counter
    gauge = GaugeMetricFamily(name, family.help, labels=labels, unit=unit)
    for values, value in series.items():
        if isinstance(value, int | float) and not _LARGEST < abs(value) < math.inf:
            gauge.add_metric(values, value)
    return gauge


_LARGEST = sys.float_info.max  # an integer of a damaged page may be larger, and is then no float


def _counts(value: float) -> bool:
    """Whether a counter can have it. One that cannot is left out: it would cost all others their scrape."""
    return 0 <= value <= _LARGEST


def _rises(histogram: Histogram) -> bool:
    """Whether its counts can be those of a histogram: none below zero, and none below the one before."""
    counts = (0, *histogram.below, histogram.count, _LARGEST)
    return all(less <= more for less, more in pairwise(counts))


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    return [*zip(histogram.bounds, histogram.below, strict=True), ("+Inf", histogram.count)]
