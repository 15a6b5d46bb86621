"""A View as OpenTelemetry's data: the metrics of /metrics under the same names, and each step of a rank as a span."""

from __future__ import annotations

import dataclasses
import hashlib
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags
from prometheus_client.core import Metric as PrometheusMetric

from service.metrics import RunMetrics
from service.view import View
from tiering._version import __version__
from tiering.telemetry import StepRecord

UNITS = {"seconds": "s", "bytes": "By", "ratio": "1", "": ""}
SCOPE = InstrumentationScope("tierd", __version__)
# Fields of a step that are not attributes of its span under their own name.
_NO_ATTRIBUTES = ("step", "seconds", "stalls", "ended_at")

Starts = Mapping[tuple[str, str], float]
Key = tuple[str, int]


def resource() -> Resource:
    """This sidecar as the origin of the data."""
    return Resource(
        {"service.name": "tierd", "service.version": __version__, "host.name": socket.gethostname()}
    )


def metrics_data(view: View, origin: Resource) -> MetricsData:
    """All metrics of the runs. Prometheus gives them the names of /metrics when it receives them from a collector."""
    starts = {
        (run.id, str(rank.rank)): rank.snapshot.started_at
        for run in view.runs
        for rank in run.ranks
        if rank.snapshot is not None
    }
    metrics = [
        converted
        for metric in RunMetrics(view).collect()
        if metric.samples and (converted := _metric(metric, starts, view.taken_at)) is not None
    ]
    return MetricsData([ResourceMetrics(origin, [ScopeMetrics(SCOPE, metrics, "")], "")])


def _metric(metric: PrometheusMetric, starts: Starts, taken_at: float) -> Metric | None:
    def number(labels: dict[str, str], value: float) -> NumberDataPoint:
        return NumberDataPoint(labels, _start(labels, starts, taken_at), _nanoseconds(taken_at), float(value))

    points = [number(sample.labels, sample.value) for sample in metric.samples]
    name, data = metric.name, None
    if metric.type == "counter":
        data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    elif metric.type == "histogram":
        data = Histogram(list(_histograms(metric, starts, taken_at)), AggregationTemporality.CUMULATIVE)
    elif metric.type == "info":
        name, data = name + "_info", Gauge(points)
    else:
        data = Gauge(points)
    return Metric(name, metric.documentation, UNITS[metric.unit], data)


def _start(labels: Mapping[str, str], starts: Starts, taken_at: float) -> int:
    """When the counters of the rank with these labels started, in nanoseconds."""
    return _nanoseconds(starts.get((labels.get("run", ""), labels.get("rank", "")), taken_at))


def _histograms(metric: PrometheusMetric, starts: Starts, taken_at: float) -> Iterator[HistogramDataPoint]:
    """Prometheus' cumulative buckets are samples of their own; OpenTelemetry has the count of each bucket."""
    series: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in metric.samples:
        key = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        part = sample.labels.get("le", sample.name.rpartition("_")[2])
        series.setdefault(key, {})[part] = sample.value
    for key, parts in series.items():
        labels = dict(key)
        bounds = [bound for bound in parts if bound not in ("+Inf", "sum", "count")]
        below = [int(parts[bound]) for bound in (*bounds, "+Inf")]
        yield HistogramDataPoint(
            labels,
            _start(labels, starts, taken_at),
            _nanoseconds(taken_at),
            below[-1],
            parts["sum"],
            [count - lower for count, lower in zip(below, (0, *below[:-1]), strict=True)],
            [float(bound) for bound in bounds],
            # Optional in the protocol, and unknown.
            None,
            None,
        )


class Steps:
    """The steps that have not been sent yet. A step has the same ids whoever sends it."""

    def __init__(self) -> None:
        self._sent: dict[Key, int] = {}

    def new(self, view: View, origin: Resource, limit: int) -> tuple[list[ReadableSpan], dict[Key, int]]:
        """At most ``limit`` spans of new steps, and the last step of each rank, for ``sent()``."""
        spans: list[ReadableSpan] = []
        last: dict[Key, int] = {}
        for run in view.runs:
            for rank in run.ranks:
                if rank.snapshot is None:
                    continue
                key = run.id, rank.rank
                before = last[key] = self._sent.get(key, 0)
                for step in rank.snapshot.steps:
                    if step.step > before and step.ended_at and len(spans) < limit:
                        attributes = {"run": run.id, "run.name": run.name, "rank": rank.rank}
                        spans.append(_span(step, attributes, origin))
                        last[key] = step.step
        return spans, last

    def sent(self, last: dict[Key, int]) -> None:
        """The steps up to ``last`` have been sent. Ranks that are gone are forgotten."""
        self._sent = last


def _span(step: StepRecord, of: Mapping[str, Any], origin: Resource) -> ReadableSpan:
    """The span of a step. The steps of all ranks with one number are one trace."""
    attributes = {**of, "step": step.step}
    attributes |= {
        field.name: value
        for field in dataclasses.fields(step)
        if field.name not in _NO_ATTRIBUTES and (value := getattr(step, field.name)) is not None
    }
    attributes |= {f"stall.{cause}": seconds for cause, seconds in step.stalls.items()}
    trace = _identifier(16, of["run"], step.step)
    span = _identifier(8, of["run"], step.step, of["rank"])
    return ReadableSpan(
        "step",
        SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)),
        resource=origin,
        attributes=attributes,
        instrumentation_scope=SCOPE,
        start_time=_nanoseconds(step.ended_at - step.seconds),
        end_time=_nanoseconds(step.ended_at),
    )


def _identifier(size: int, *parts: object) -> int:
    digest = hashlib.blake2b("/".join(map(str, parts)).encode("utf-8", "replace"), digest_size=size).digest()
    return int.from_bytes(digest, "big") or 1


def _nanoseconds(at: float) -> int:
    # A damaged status file may have any time; the protocol has unsigned 64-bit integers.
    return min(max(0, int(at * 1e9)), (1 << 63) - 1)
